// The available models: presets by name and Hugging Face folders.
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

// Resolves `model.preset` and `model.from_pretrained` for the config parser.
std::unique_ptr<ModelCatalog> MakeModelCatalog();

struct ModelPreset {
  const char* name;
  ModelConfig config;
};

// All presets, in the order in which `zero models` lists them.
const std::vector<ModelPreset>& ModelPresets();

}  // namespace zero

#endif  // ZERO_MODELS_CATALOG_H_
