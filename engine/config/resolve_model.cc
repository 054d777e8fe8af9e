#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "engine/base/file.h"
#include "engine/config/resolve.h"

namespace zero {
namespace {

constexpr int64_t kBytesVocab = 257;  // 256 bytes and the end of text
constexpr int64_t kDefaultSequence = 1024;
// Byte counts of anything below these fit into the rehearsal's 2^50.
constexpr double kMaxParameters = 1e12;
constexpr double kMaxActivations = 1e13;

// GPT-2's names for fields with other names elsewhere.
constexpr const char* kFamilyNames[][2] = {
    {"n_embd", "hidden_size"},
    {"n_layer", "num_hidden_layers"},
    {"n_head", "num_attention_heads"},
    {"n_inner", "intermediate_size"},
    {"n_positions", "max_position_embeddings"},
    {"layer_norm_epsilon", "rms_norm_eps"},
    {"activation_function", "hidden_act"},
};

}  // namespace

void ModelResolver::Base() {
  const std::string preset = GivenText("model.preset");
  const std::string dir = GivenText("model.from_pretrained");
  if (!preset.empty() && !dir.empty()) {
    return Problem("model.preset", Cite("model.from_pretrained"),
                   " already names the model; delete one");
  }
  if (preset.empty() && dir.empty()) return;
  const std::string path =
      preset.empty() ? "model.from_pretrained" : "model.preset";
  if (options_.catalog == nullptr) {
    return Problem(path, "no models are known to this program");
  }
  const std::string found = preset.empty() ? Locate(dir) : "";
  auto base = preset.empty() ? options_.catalog->Pretrained(found)
                             : options_.catalog->Preset(preset);
  if (!base.ok()) {
    return Problem(path, base.status().message());
  }
  base_ = *base;
  has_base_ = true;
  base_origin_ =
      preset.empty() ? found + "/config.json" : absl::StrCat("preset ", preset);
  config_.model = base_;
  if (!dir.empty()) config_.model.from_pretrained = found;
  const std::string family = ModelFamilyName(base_.family);
  if (Given("model.model_type") && GivenText("model.model_type") != family) {
    Problem("model.model_type", "\"", GivenText("model.model_type"), "\", but ",
            Cite(path), " is a ", family, " model; delete one");
  }
}

std::string ModelResolver::WrongFamily(const std::string& name,
                                       const std::string& applies_to) const {
  const bool gpt2 = config_.model.family == ModelFamily::kGpt2;
  const std::string family = ModelFamilyName(config_.model.family);
  for (const auto& names : kFamilyNames) {
    if (name == names[gpt2 ? 1 : 0]) {
      return absl::StrCat("a ", family, " model calls this \"",
                          names[gpt2 ? 0 : 1], "\"");
    }
  }
  return absl::StrCat("belongs to ", applies_to, "; this is a ", family,
                      " model");
}

void ModelResolver::Complete() {
  if (!config_.model.from_pretrained.empty()) CheckPretrained();
  for (const char* name : {"n_embd", "n_layer", "n_head"}) {
    Require(Hyper(name));
  }
  ModelConfig& model = config_.model;
  if (model.family != ModelFamily::kGpt2) Require(Hyper("n_inner"));
  Vocabulary();
  if (!problems_.empty()) return;
  Shape();
  Positions();
}

void ModelResolver::CheckSize() {
  const ModelConfig& m = config_.model;
  const auto parameters = static_cast<double>(NumParameters(m));
  if (parameters > kMaxParameters) {
    return Problem(
        "model", absl::StrFormat("%.2g parameters; this program counts up to "
                                 "%g; lower the widths or the number of layers",
                                 parameters, kMaxParameters));
  }
  const double tokens =
      static_cast<double>(config_.train_micro_batch_size_per_gpu) *
      static_cast<double>(config_.data.sequence_length);
  const auto widths = static_cast<double>(m.hidden_size + m.intermediate_size +
                                          m.num_attention_heads * m.head_dim);
  const auto layers = static_cast<double>(m.num_hidden_layers);
  if (tokens * layers * widths > kMaxActivations) {
    Problem(
        "train_micro_batch_size_per_gpu",
        absl::StrFormat(
            "%.2g tokens in one pass through %d layer%s of width %d are more "
            "than this program can count; lower it or data.sequence_length",
            tokens, m.num_hidden_layers, m.num_hidden_layers == 1 ? "" : "s",
            m.hidden_size));
  }
}

std::string ModelResolver::GivenText(const std::string& path) const {
  const auto it = given_.keys.find(path);
  return it == given_.keys.end() ? "" : std::get<std::string>(it->second.value);
}

void ModelResolver::DefaultsOfFamily() {
  if (!Given("model.model_type")) {
    return Problem("model.model_type",
                   "missing; want a preset (`zero models` lists them), "
                   "from_pretrained, or model_type and hyperparameters");
  }
  Set("model.model_type");
  config_.model = FamilyDefaults(config_.model.family);
}

std::string ModelResolver::Hyper(absl::string_view gpt2_name) const {
  for (const auto& names : kFamilyNames) {
    if (gpt2_name == names[0]) {
      const bool gpt2 = config_.model.family == ModelFamily::kGpt2;
      return absl::StrCat("model.", names[gpt2 ? 0 : 1]);
    }
  }
  return absl::StrCat("model.", gpt2_name);
}

void ModelResolver::Require(const std::string& path) {
  if (Given(path) || has_base_) return;
  Problem(path, "missing; a ", ModelFamilyName(config_.model.family),
          " model without a preset needs it");
}

void ModelResolver::CheckPretrained() {
  Config base;
  base.model = base_;
  for (const auto& [path, given] : given_.keys) {
    const absl::string_view name = path;
    if (!absl::StartsWith(name, "model.") || path == "model.from_pretrained" ||
        IsOfTraining(name.substr(6))) {
      continue;
    }
    const KeyValue theirs = FindKey(path)->get(base);
    if (theirs == given.value) continue;
    Problem(path, ValueText(given.value), ", but ", base_origin_, " says ",
            ValueText(theirs), "; delete the key");
  }
}

void ModelResolver::Vocabulary() {
  ModelConfig& model = config_.model;
  const std::string path = "model.vocab_size";
  const bool bytes = config_.data.tokenizer == "bytes";
  if (!Given(path) && !has_base_) {
    const std::string& file = config_.data.tokenizer;
    if (options_.tokenizer_ids != nullptr && PathExists(file)) {
      const auto ids = options_.tokenizer_ids(file);
      if (!ids.ok()) {
        return Problem("data.tokenizer", ids.status().message());
      }
      model.vocab_size = *ids;
      return Derived(path, "the ids of data.tokenizer");
    }
    if (!bytes) {
      return Problem(path,
                     "missing; want the number of ids of the tokenizer "
                     "that made the token files");
    }
    model.vocab_size = kBytesVocab;
    Derived(path, "256 bytes and the end of text");
  } else if (bytes && model.vocab_size < kBytesVocab) {
    Problem(path, model.vocab_size,
            " is too few for data.tokenizer \"bytes\", "
            "want >= 257");
  }
}

void ModelResolver::Shape() {
  ModelConfig& model = config_.model;
  const Config before = config_;
  // Values that the base derives from its width follow the width; Qwen3's head
  // width is the preset's.
  const int64_t heads = model.num_attention_heads;
  if (has_base_ && !Given("model.head_dim") &&
      model.family != ModelFamily::kQwen3 &&
      base_.head_dim * base_.num_attention_heads == base_.hidden_size) {
    model.head_dim =
        model.hidden_size % heads == 0 ? model.hidden_size / heads : 0;
  }
  if (model.family == ModelFamily::kGpt2 && !Given("model.n_inner") &&
      base_.intermediate_size == 4 * base_.hidden_size) {
    model.intermediate_size = 0;
  }
  if (const auto problem = CompleteModelConfig(&model)) {
    const std::string other = "model." + problem->other;
    return Problem("model." + problem->key,
                   problem->other.empty()
                       ? problem->message
                       : absl::StrReplaceAll(problem->message,
                                             {{problem->other, Cite(other)}}));
  }
  const auto derived = [&](const char* path, const char* formula) {
    const KeySpec* key = FindKey(path);
    if (key->Applies(config_) && key->get(config_) != key->get(before)) {
      Derived(path, formula);
    }
  };
  derived("model.n_inner", "4 * n_embd");
  derived("model.num_key_value_heads", "num_attention_heads");
  if (model.head_dim * heads == model.hidden_size) {
    derived("model.head_dim", "hidden_size / num_attention_heads");
  }
}

void ModelResolver::Positions() {
  ModelConfig& model = config_.model;
  const bool gpt2 = model.family == ModelFamily::kGpt2;
  const std::string path = Hyper("n_positions");
  const std::string length = "data.sequence_length";
  int64_t& positions = model.max_position_embeddings;
  int64_t& sequence = config_.data.sequence_length;
  if (!Given(length)) {
    sequence = kDefaultSequence;
    if (positions > 0 && positions < sequence) {
      sequence = positions;
      Derived(length, absl::StrCat("the model's ", path.substr(6)));
    }
  }
  if (positions == 0) {
    const int64_t usual = DefaultPositions(model.family);
    positions = gpt2 ? sequence : std::max(usual, sequence);
    if (gpt2 || sequence > usual) Derived(path, length);
  }
  if (sequence > positions) {
    Problem(length, sequence, " is more than ", Cite(path), " = ", positions,
            gpt2 ? "; the model has no more positions"
                 : "; raise that, it costs no parameters");
  }
}

}  // namespace zero
