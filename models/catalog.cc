#include "models/catalog.h"

#include "absl/strings/str_cat.h"
#include "engine/base/nearest.h"
#include "models/hf_config.h"

namespace zero {
namespace {

class Catalog : public ModelCatalog {
 public:
  std::vector<std::string> PresetNames() const override {
    std::vector<std::string> names;
    for (const ModelPreset& preset : ModelPresets()) {
      names.push_back(preset.name);
    }
    return names;
  }

  absl::StatusOr<ModelConfig> Preset(absl::string_view name) const override {
    for (const ModelPreset& preset : ModelPresets()) {
      if (name == preset.name) return preset.config;
    }
    std::string message = absl::StrCat("no preset \"", name, "\";");
    const auto nearest = NearestNames(name, PresetNames(), 1);
    if (!nearest.empty()) {
      absl::StrAppend(&message, " did you mean \"", nearest[0], "\"?");
    }
    return absl::NotFoundError(
        absl::StrCat(message, " `zero models` lists them"));
  }

  absl::StatusOr<ModelConfig> Pretrained(absl::string_view dir) const override {
    return ReadHfConfig(std::string(dir));
  }
};

int64_t EmbeddingElems(const ModelConfig& c) {
  const bool learned = c.family == ModelFamily::kGpt2;
  return (c.vocab_size + (learned ? c.max_position_embeddings : 0)) *
         c.hidden_size;
}

int64_t BlocksElems(const ModelConfig& c) {
  const int64_t width = c.hidden_size, inner = c.intermediate_size;
  const int64_t q = c.num_attention_heads * c.head_dim;
  const int64_t kv = c.num_key_value_heads * c.head_dim;
  int64_t block = width * (q + 2 * kv) + q * width;
  if (c.family == ModelFamily::kGpt2) {
    block += 2 * width * inner;
    block += q + 2 * kv + width + inner + width;  // biases
    block += 2 * 2 * width;                       // two LayerNorms
    return c.num_hidden_layers * block;
  }
  block += 3 * width * inner + 2 * width;
  if (c.attention_bias) block += q + 2 * kv;
  if (c.family == ModelFamily::kQwen3) block += 2 * c.head_dim;
  return c.num_hidden_layers * block;
}

// All blocks and the final norm.
int64_t BodyElems(const ModelConfig& c) {
  const int64_t norm_vectors = c.family == ModelFamily::kGpt2 ? 2 : 1;
  return BlocksElems(c) + norm_vectors * c.hidden_size;
}

// The L q s of the formulas.
double AttentionElems(const ModelConfig& c, int64_t sequence_length) {
  return static_cast<double>(c.num_hidden_layers) *
         static_cast<double>(c.num_attention_heads * c.head_dim) *
         static_cast<double>(sequence_length);
}

}  // namespace

std::unique_ptr<ModelCatalog> MakeModelCatalog() {
  return std::make_unique<Catalog>();
}

int64_t NumParameters(const ModelConfig& config) {
  const int64_t head =
      config.tie_word_embeddings ? 0 : config.vocab_size * config.hidden_size;
  return EmbeddingElems(config) + BodyElems(config) + head;
}

double FlopsPerToken(const ModelConfig& config, int64_t sequence_length,
                     bool causal) {
  const double products = static_cast<double>(
      BodyElems(config) + config.vocab_size * config.hidden_size);
  return 6 * products +
         (causal ? 6 : 12) * AttentionElems(config, sequence_length);
}

double RecomputedFlopsPerToken(const ModelConfig& config,
                               int64_t sequence_length) {
  return 2.0 * static_cast<double>(BlocksElems(config)) +
         4 * AttentionElems(config, sequence_length);
}

}  // namespace zero
