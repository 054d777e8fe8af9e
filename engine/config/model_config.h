// The hyperparameters of a model, under the names of each family's
// Hugging Face config.json. models/ builds from it; the config parser and the
// presets fill it in, and both complete it by the rules here.
#ifndef ZERO_ENGINE_CONFIG_MODEL_CONFIG_H_
#define ZERO_ENGINE_CONFIG_MODEL_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/base/recompute.h"

namespace zero {

enum class ModelFamily { kGpt2, kLlama, kQwen2, kQwen3 };

// Hugging Face's model_type.
inline constexpr const char* kModelFamilyNames[] = {"gpt2", "llama", "qwen2",
                                                    "qwen3"};
inline const char* ModelFamilyName(ModelFamily family) {
  return kModelFamilyNames[static_cast<size_t>(family)];
}

// Llama 3.1's frequency scaling of rotary embeddings.
struct RopeScaling {
  bool enabled = false;
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 8192;

  bool operator==(const RopeScaling&) const = default;
};

// Comments give GPT-2's name for a field if it differs.
struct ModelConfig {
  ModelFamily family = ModelFamily::kGpt2;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;              // n_embd
  int64_t num_hidden_layers = 0;        // n_layer
  int64_t num_attention_heads = 0;      // n_head
  int64_t num_key_value_heads = 0;      // = heads for GPT-2
  int64_t head_dim = 0;                 // hidden_size / heads unless given
  int64_t intermediate_size = 0;        // n_inner, 4 * n_embd
  int64_t max_position_embeddings = 0;  // n_positions
  double norm_eps = 1e-5;               // layer_norm_epsilon, rms_norm_eps
  std::string activation = "gelu_new";  // gelu_new | gelu | silu
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool attention_bias = false;  // q/k/v bias (GPT-2: all biases; Qwen2: true)
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  // Dropout while training; 0 unless the config asks for it.
  double embd_pdrop = 0;
  double resid_pdrop = 0;

  // A Hugging Face folder whose weights are loaded; empty: random init.
  std::string from_pretrained;
  // Globs over names of tensors that are not trained (engine/nn/freeze.h).
  std::vector<std::string> freeze;
  // That folder's token ids, each a number or a list as JSON; empty: null.
  std::string bos_token_id, eos_token_id;

  bool operator==(const ModelConfig&) const = default;
};

// A model of `family` with defaults for keys that its config.json may omit. Its
// shape is unset.
ModelConfig FamilyDefaults(ModelFamily family);
int64_t DefaultPositions(ModelFamily family);

// Whether a key of "model" concerns training and not the model: it may still be
// given for a loaded model.
inline bool IsOfTraining(absl::string_view key) {
  return key == "embd_pdrop" || key == "resid_pdrop" || key == "freeze";
}

// `key` and `other` are names of config.json; `message` cites `other`.
struct ModelProblem {
  std::string key, other, message;
};

// Derives heads and widths that are 0, and checks that they fit together.
// REQUIRES: hidden_size and num_attention_heads > 0.
std::optional<ModelProblem> CompleteModelConfig(ModelConfig* model);

// Elements of all parameters; a tied head is counted once.
int64_t NumParameters(const ModelConfig& config);

// Floating-point operations of forward and backward per token in sequences of
// `sequence_length`:
//   6 * (parameters without embedding tables, a tied head counted once) +
//   12 * layers * heads * head_dim * sequence_length.
// `causal`: half the attention, since no token looks ahead.
// Source: PaLM (Chowdhery et al. 2022), appendix B.
double FlopsPerToken(const ModelConfig& config, int64_t sequence_length,
                     bool causal = false);

// Floating-point operations per token that recompute adds to FlopsPerToken: 2 *
// (weights of q, k, v and the FFN's first layer). Full recompute also repeats 2
// * (weights of attention's output) and 4 * layers * heads * head_dim *
// sequence_length. A block's last product and the head are never recomputed.
double RecomputedFlopsPerToken(const ModelConfig& config,
                               int64_t sequence_length, Recompute level);

// Elements per token that are read and written to recompute everything but
// matrix products: a block's two norms, its GELU or SwiGLU, and q and k where
// they are normalized.
double RecomputedPassElemsPerToken(const ModelConfig& config, Recompute level);

// Where presets and pretrained folders come from; implemented by models/, so
// that the parser (below models/) can resolve a `model` section.
class ModelCatalog {
 public:
  virtual ~ModelCatalog() = default;
  virtual std::vector<std::string> PresetNames() const = 0;
  // Errors: NotFound with the nearest preset name.
  virtual absl::StatusOr<ModelConfig> Preset(absl::string_view name) const = 0;
  // Reads DIR/config.json. Errors name the file, the key and the reason.
  virtual absl::StatusOr<ModelConfig> Pretrained(
      absl::string_view dir) const = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_MODEL_CONFIG_H_
