// The models that there are: presets by name, Hugging Face folders, and how
// large a configuration is.
//
// To add a preset: a line in presets.cc and its published parameter count in
// tests/models/presets_test.cc.
#ifndef ZERO_MODELS_CATALOG_H_
#define ZERO_MODELS_CATALOG_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/config/model_config.h"

namespace zero {

// What the config parser asks for `model.preset` and `model.from_pretrained`.
std::unique_ptr<ModelCatalog> MakeModelCatalog();

struct ModelPreset {
  const char* name;
  ModelConfig config;
};

// In the order in which `zero models` lists them.
const std::vector<ModelPreset>& ModelPresets();

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

// What recomputing every block adds to that: the forward pass of the blocks,
//   2 * (parameters of the blocks) + 4 * layers * heads * head_dim *
//   sequence_length.
// Embeddings cost nothing; the head's forward pass is made once.
double RecomputedFlopsPerToken(const ModelConfig& config,
                               int64_t sequence_length);

}  // namespace zero

#endif  // ZERO_MODELS_CATALOG_H_
