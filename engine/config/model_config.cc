#include "engine/config/model_config.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/config/json_text.h"

namespace zero {
namespace {

ModelProblem DoesNotDivide(const char* key, int64_t divisor, const char* of,
                           int64_t value) {
  return {key, of,
          absl::StrCat(divisor, " does not divide ", of, " = ", value)};
}

// Counts are doubles: products of the largest widths pass 2^63.
double EmbeddingElems(const ModelConfig& c) {
  const bool learned = c.family == ModelFamily::kGpt2;
  return static_cast<double>(c.vocab_size +
                             (learned ? c.max_position_embeddings : 0)) *
         static_cast<double>(c.hidden_size);
}

double HeadElems(const ModelConfig& c) {
  return static_cast<double>(c.vocab_size) * static_cast<double>(c.hidden_size);
}

double BlocksElems(const ModelConfig& c) {
  const auto width = static_cast<double>(c.hidden_size);
  const auto inner = static_cast<double>(c.intermediate_size);
  const auto head = static_cast<double>(c.head_dim);
  const double q = static_cast<double>(c.num_attention_heads) * head;
  const double kv = static_cast<double>(c.num_key_value_heads) * head;
  double block = width * (q + 2 * kv) + q * width;
  if (c.family == ModelFamily::kGpt2) {
    block += 2 * width * inner;
    block += q + 2 * kv + width + inner + width;  // biases
    block += 2 * 2 * width;                       // two LayerNorms
  } else {
    block += 3 * width * inner + 2 * width;
    if (c.attention_bias) block += q + 2 * kv;
    if (c.family == ModelFamily::kQwen3) block += 2 * head;
  }
  return static_cast<double>(c.num_hidden_layers) * block;
}

// Elements of all blocks and the final norm.
double BodyElems(const ModelConfig& c) {
  const double norm_vectors = c.family == ModelFamily::kGpt2 ? 2 : 1;
  return BlocksElems(c) + norm_vectors * static_cast<double>(c.hidden_size);
}

// layers * heads * head_dim * sequence_length, a factor of both formulas.
double AttentionElems(const ModelConfig& c, int64_t sequence_length) {
  return static_cast<double>(c.num_hidden_layers) *
         static_cast<double>(c.num_attention_heads * c.head_dim) *
         static_cast<double>(sequence_length);
}

}  // namespace

ModelConfig FamilyDefaults(ModelFamily family) {
  const bool gpt2 = family == ModelFamily::kGpt2;
  ModelConfig model;
  model.family = family;
  model.tie_word_embeddings = gpt2;
  model.norm_eps = gpt2 ? 1e-5 : 1e-6;
  model.activation = gpt2 ? "gelu_new" : "silu";
  model.attention_bias = gpt2 || family == ModelFamily::kQwen2;
  return model;
}

int64_t DefaultPositions(ModelFamily family) {
  if (family == ModelFamily::kGpt2) return 1024;
  return family == ModelFamily::kLlama ? 2048 : 32768;
}

std::optional<ModelProblem> CompleteModelConfig(ModelConfig* model) {
  ModelConfig& m = *model;
  const bool gpt2 = m.family == ModelFamily::kGpt2;
  const int64_t heads = m.num_attention_heads;
  if (gpt2) {
    m.num_key_value_heads = heads;
    m.head_dim = 0;
    if (m.intermediate_size == 0) m.intermediate_size = 4 * m.hidden_size;
  }
  if (m.num_key_value_heads == 0) m.num_key_value_heads = heads;
  if (m.head_dim == 0 && m.family == ModelFamily::kQwen3) m.head_dim = 128;
  if (heads % m.num_key_value_heads != 0) {
    return DoesNotDivide("num_key_value_heads", m.num_key_value_heads,
                         "num_attention_heads", heads);
  }
  if (m.head_dim == 0) {
    if (m.hidden_size % heads != 0) {
      return DoesNotDivide(gpt2 ? "n_head" : "num_attention_heads", heads,
                           gpt2 ? "n_embd" : "hidden_size", m.hidden_size);
    }
    m.head_dim = m.hidden_size / heads;
  }
  if (!gpt2 && m.head_dim % 2 != 0) {
    return ModelProblem{
        "head_dim", "",
        absl::StrCat(m.head_dim, " is odd; rotary embeddings rotate pairs")};
  }
  const RopeScaling& rope = m.rope_scaling;
  if (rope.enabled && rope.low_freq_factor >= rope.high_freq_factor) {
    return ModelProblem{"rope_scaling.low_freq_factor", "",
                        absl::StrCat(JsonDouble(rope.low_freq_factor),
                                     " is not below high_freq_factor ",
                                     JsonDouble(rope.high_freq_factor))};
  }
  return std::nullopt;
}

int64_t NumParameters(const ModelConfig& config) {
  const double head = config.tie_word_embeddings ? 0 : HeadElems(config);
  return static_cast<int64_t>(
      std::min(EmbeddingElems(config) + BodyElems(config) + head, 9e18));
}

double FlopsPerToken(const ModelConfig& config, int64_t sequence_length,
                     bool causal) {
  return 6 * (BodyElems(config) + HeadElems(config)) +
         (causal ? 6 : 12) * AttentionElems(config, sequence_length);
}

double RecomputedFlopsPerToken(const ModelConfig& config,
                               int64_t sequence_length, Recompute level) {
  if (level <= Recompute::kOff) return 0;
  const double q =
      static_cast<double>(config.num_attention_heads * config.head_dim);
  const double kv =
      static_cast<double>(config.num_key_value_heads * config.head_dim);
  const double inner = static_cast<double>(config.intermediate_size) *
                       (config.family == ModelFamily::kGpt2 ? 1 : 2);
  const double outputs = q + 2 * kv + inner;
  const double per_output = 2 * static_cast<double>(config.num_hidden_layers) *
                            static_cast<double>(config.hidden_size);
  if (level == Recompute::kSelective) return per_output * outputs;
  return per_output * (outputs + q) +
         4 * AttentionElems(config, sequence_length);
}

double RecomputedPassElemsPerToken(const ModelConfig& config, Recompute level) {
  if (level == Recompute::kKeepAll) return 0;
  const auto inner = static_cast<double>(config.intermediate_size);
  double block = 2 * 2 * static_cast<double>(config.hidden_size);
  block += (config.family == ModelFamily::kGpt2 ? 2 : 3) * inner;
  if (config.family == ModelFamily::kQwen3) {  // rotated in a second pass
    block += 2 * 2 *
             static_cast<double>(
                 (config.num_attention_heads + config.num_key_value_heads) *
                 config.head_dim);
  }
  return static_cast<double>(config.num_hidden_layers) * block;
}

}  // namespace zero
