#include "models/hf_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/json_text.h"
#include "engine/config/keys.h"

namespace zero {
namespace {

// Required keys: guessing a shape would only fail later.
constexpr const char* kGpt2Required[] = {"vocab_size", "n_embd", "n_layer",
                                         "n_head", "n_positions"};
constexpr const char* kRotaryRequired[] = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size"};

// Keys of the config table that say "refused unless harmless" and matter to
// the mathematics of a loaded model.
constexpr const char* kArchitecture[] = {
    "attention_bias", "mlp_bias", "use_sliding_window", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx"};

class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  absl::StatusOr<ModelConfig> Read(absl::string_view text) {
    std::vector<JsonProblem> problems;
    if (!ParseJsonText(text, 0, &root_, &problems)) {
      return Error(problems[0].place, problems[0].path, problems[0].message);
    }
    if (root_.kind != JsonKind::kObject) {
      return Error(root_.place, "", "want an object: { ... }");
    }
    ZERO_RETURN_IF_ERROR(Family());
    ZERO_RETURN_IF_ERROR(Required());
    ZERO_RETURN_IF_ERROR(Architecture());
    ZERO_RETURN_IF_ERROR(Rope());
    ZERO_RETURN_IF_ERROR(Keys());
    ZERO_RETURN_IF_ERROR(Activation());
    ZERO_RETURN_IF_ERROR(Shape());
    model().bos_token_id = TokenIds("bos_token_id");
    model().eos_token_id = TokenIds("eos_token_id");
    return model();
  }

 private:
  ModelConfig& model() { return config_.model; }
  bool gpt2() { return model().family == ModelFamily::kGpt2; }

  absl::Status Error(const JsonPlace& place, const std::string& key,
                     absl::string_view message) const {
    return absl::InvalidArgumentError(
        absl::StrCat(file_, ":", place.line, ":", place.column, ": ", key,
                     key.empty() ? "" : ": ", message));
  }
  absl::Status Error(const JsonNode& node, absl::string_view message) const {
    return Error(node.place, node.key, message);
  }

  // The member, or null if it is absent or null.
  static const JsonNode* FindValue(const JsonNode& object,
                                   absl::string_view key) {
    const JsonNode* node = object.Find(key);
    return node == nullptr || node->kind == JsonKind::kNull ? nullptr : node;
  }

  absl::Status Family() {
    const JsonNode* type = FindValue(root_, "model_type");
    if (type == nullptr) {
      return Error(root_.place, "model_type",
                   "missing; want gpt2, llama, qwen2 or qwen3");
    }
    const KeySpec* key = FindKey("model.model_type");
    const auto value = ReadValue(*key, *type);
    if (!value.ok()) return Error(*type, value.status().message());
    key->set(config_, *value);
    model() = FamilyDefaults(model().family);
    return absl::OkStatus();
  }

  absl::Status Required() {
    const absl::Span<const char* const> required =
        gpt2() ? absl::MakeConstSpan(kGpt2Required)
               : absl::MakeConstSpan(kRotaryRequired);
    for (const char* key : required) {
      if (FindValue(root_, key) == nullptr) {
        return Error(root_.place, key, "missing");
      }
    }
    return absl::OkStatus();
  }

  absl::Status Architecture() {
    for (const char* name : kArchitecture) {
      const JsonNode* node = FindValue(root_, name);
      const KeySpec* key = FindKey(absl::StrCat("model.", name));
      if (node != nullptr && !IsHarmless(*key, *node)) {
        return Error(*node, absl::StrCat(JsonBrief(*node), ": ", key->doc));
      }
    }
    if (const JsonNode* node = FindValue(root_, "add_cross_attention");
        node != nullptr && node->boolean) {
      return Error(*node, "these models have no cross attention");
    }
    if (const JsonNode* node = FindValue(root_, "quantization_config")) {
      return Error(*node, "quantized weights are not supported");
    }
    if (const JsonNode* layers = FindValue(root_, "layer_types")) {
      for (const JsonNode& layer : layers->children) {
        if (layer.text != "full_attention") {
          return Error(layer.place, "layer_types",
                       absl::StrCat(JsonBrief(layer),
                                    "; every layer's attention sees the whole "
                                    "sequence here (full_attention)"));
        }
      }
    }
    return absl::OkStatus();
  }

  // Sets rope_ to the object that holds rope_type, factor, ...
  absl::Status Rope() {
    const JsonNode* parameters = FindValue(root_, "rope_parameters");
    rope_ = parameters ? parameters : FindValue(root_, "rope_scaling");
    for (const JsonNode* holder :
         {rope_, static_cast<const JsonNode*>(&root_)}) {
      if (holder == nullptr) continue;
      const JsonNode* part = FindValue(*holder, "partial_rotary_factor");
      if (part != nullptr && part->number != 1) {
        return Error(*part, "every dimension of a head is rotated here");
      }
    }
    if (rope_ == nullptr || gpt2()) return absl::OkStatus();
    if (rope_->kind != JsonKind::kObject) {
      return Error(*rope_, "want an object: { ... }");
    }
    const JsonNode* type = FindValue(*rope_, "rope_type");
    if (type == nullptr) type = FindValue(*rope_, "type");
    if (type == nullptr) return absl::OkStatus();
    if (type->text != "default" && type->text != "llama3") {
      return Error(*type,
                   absl::StrCat(JsonBrief(*type),
                                " is not supported; want default or llama3"));
    }
    model().rope_scaling.enabled = type->text == "llama3";
    if (!model().rope_scaling.enabled) return absl::OkStatus();
    for (const char* key : {"factor", "low_freq_factor", "high_freq_factor",
                            "original_max_position_embeddings"}) {
      if (FindValue(*rope_, key) == nullptr) {
        return Error(rope_->place, absl::StrCat(rope_->key, ".", key),
                     "missing; llama3 scaling needs it");
      }
    }
    return absl::OkStatus();
  }

  // All keys with the name and meaning of our `model` section.
  absl::Status Keys() {
    for (const KeySpec& key : AllKeys()) {
      if (!absl::StartsWith(key.path, "model.") || key.set == nullptr ||
          !key.Applies(config_) || absl::EndsWith(key.path, "_pdrop") ||
          IsOurs(key.path)) {
        continue;
      }
      const std::string name = key.name();
      const bool scaling = absl::StartsWith(key.path, "model.rope_scaling.");
      const JsonNode* node =
          FindValue(scaling && rope_ != nullptr ? *rope_ : root_, name);
      if (name == "rope_theta" && node == nullptr && rope_ != nullptr) {
        node = FindValue(*rope_, name);
      }
      if (node == nullptr) continue;
      const auto value = ReadValue(key, *node);
      if (!value.ok()) return Error(*node, value.status().message());
      key.set(config_, *value);
    }
    return absl::OkStatus();
  }

  // Whether a key of the section is not in config.json, or is read above.
  static bool IsOurs(absl::string_view path) {
    return path == "model.preset" || path == "model.from_pretrained" ||
           path == "model.freeze" || path == "model.model_type" ||
           path == "model.activation_function" || path == "model.hidden_act" ||
           path == "model.rope_scaling.rope_type";
  }

  absl::Status Activation() {
    const JsonNode* node =
        FindValue(root_, gpt2() ? "activation_function" : "hidden_act");
    if (node == nullptr) return absl::OkStatus();
    const std::string& name = node->text;
    if (gpt2() && (name == "gelu_new" || name == "gelu_pytorch_tanh")) {
      model().activation = "gelu_new";
    } else if (gpt2() && name == "gelu") {
      model().activation = "gelu";
    } else if (gpt2() || (name != "silu" && name != "swish")) {
      return Error(*node,
                   absl::StrCat(JsonBrief(*node), " is not supported; want ",
                                gpt2() ? "gelu_new or gelu" : "silu"));
    }
    return absl::OkStatus();
  }

  absl::Status Shape() {
    if (model().max_position_embeddings == 0) {
      model().max_position_embeddings = DefaultPositions(model().family);
    }
    const auto problem = CompleteModelConfig(&model());
    return problem ? Error(root_.place, problem->key, problem->message)
                   : absl::OkStatus();
  }

  // A number or a list of them, as JSON text; empty for anything else.
  std::string TokenIds(absl::string_view key) const {
    const JsonNode* node = FindValue(root_, key);
    if (node == nullptr) return "";
    if (node->is_integer) return absl::StrCat(node->integer);
    if (node->kind != JsonKind::kArray || node->children.empty()) return "";
    std::string list;
    for (const JsonNode& child : node->children) {
      if (!child.is_integer) return "";
      absl::StrAppend(&list, list.empty() ? "[" : ", ", child.integer);
    }
    return list + "]";
  }

  const std::string& file_;
  JsonNode root_;
  const JsonNode* rope_ = nullptr;
  Config config_;
};

using Json = nlohmann::ordered_json;

const char* Architecture(ModelFamily family) {
  constexpr const char* kNames[] = {"GPT2LMHeadModel", "LlamaForCausalLM",
                                    "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
  return kNames[static_cast<size_t>(family)];
}

const char* TorchName(DType dtype) {
  return dtype == DType::kBF16  ? "bfloat16"
         : dtype == DType::kF16 ? "float16"
                                : "float32";
}

}  // namespace

absl::StatusOr<ModelConfig> ReadHfConfig(const std::string& dir) {
  const std::string file = absl::StrCat(dir, "/config.json");
  if (PathExists(dir + "/checkpoint.json")) {
    return absl::InvalidArgumentError(absl::StrCat(
        dir, " is a checkpoint of a run; `zero checkpoint export ", dir,
        " DIR` writes its weights to a folder that can be named here"));
  }
  if (!PathExists(file)) {
    return absl::NotFoundError(
        absl::StrCat(file,
                     ": does not exist; want a folder with config.json and "
                     "model.safetensors, as save_pretrained() writes it"));
  }
  const std::string final_dir = absl::StrCat(dir, "/final");
  if (!PathExists(dir + "/model.safetensors") &&
      !PathExists(dir + "/model.safetensors.index.json") &&
      PathExists(final_dir + "/config.json")) {
    return absl::NotFoundError(
        absl::StrCat(dir,
                     ": the folder of a run holds no model itself; did "
                     "you mean ",
                     final_dir, "?"));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
  ZERO_ASSIGN_OR_RETURN(ModelConfig config, ParseHfConfig(text, file));
  config.from_pretrained = dir;
  return config;
}

absl::StatusOr<ModelConfig> ParseHfConfig(absl::string_view text,
                                          const std::string& file) {
  return Reader(file).Read(text);
}

std::string WriteHfConfig(const ModelConfig& config, DType dtype,
                          int64_t begin_of_text, int64_t end_of_text) {
  Json out = {{"architectures", {Architecture(config.family)}}};
  const bool gpt2 = config.family == ModelFamily::kGpt2;
  if (!gpt2) out["rope_scaling"] = nullptr;
  Config run;
  run.model = config;
  for (const KeySpec& key : AllKeys()) {
    const bool scaling = absl::StartsWith(key.path, "model.rope_scaling.");
    if (!absl::StartsWith(key.path, "model.") || key.get == nullptr ||
        !key.Applies(run) || key.path == "model.preset" ||
        key.path == "model.from_pretrained" || key.path == "model.freeze" ||
        (absl::EndsWith(key.path, "_pdrop") && !gpt2) ||
        (scaling && !config.rope_scaling.enabled)) {
      continue;
    }
    Json& object = scaling ? out["rope_scaling"] : out;
    object[key.name()] = Json::parse(ValueText(key.get(run)));
  }
  out[gpt2 ? "attn_pdrop" : "attention_dropout"] = 0.0;
  if (!gpt2 && config.family != ModelFamily::kQwen2) {
    out["attention_bias"] = false;
  }
  if (config.family == ModelFamily::kLlama) out["mlp_bias"] = false;
  // Token files do not name these tokens; the pretrained model's are used.
  const auto token = [](int64_t known, const std::string& base) {
    if (known >= 0) return Json(known);
    return base.empty() ? Json() : Json::parse(base);
  };
  out["bos_token_id"] = token(begin_of_text, config.bos_token_id);
  out["eos_token_id"] = token(end_of_text, config.eos_token_id);
  out["use_cache"] = true;
  out["torch_dtype"] = TorchName(dtype);
  return out.dump(2) + "\n";
}

}  // namespace zero
