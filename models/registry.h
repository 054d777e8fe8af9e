// The one visible table from a model family to the code that builds it.
//
// To add a model: a folder next to gpt/ and llama/ with a Make function, a
// ModelFamily, a line in registry.cc, presets in presets.cc and the names of
// its Hugging Face tensors. Nothing here knows of ranks or ZeRO.
#ifndef ZERO_MODELS_REGISTRY_H_
#define ZERO_MODELS_REGISTRY_H_

#include <memory>

#include "engine/config/model_config.h"
#include "engine/nn/module.h"

namespace zero {

// REQUIRES: config is complete and valid, as the config room resolves it.
std::unique_ptr<Model> MakeModel(const ModelConfig& config);

}  // namespace zero

#endif  // ZERO_MODELS_REGISTRY_H_
