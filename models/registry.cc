#include "models/registry.h"

#include "kernels/check.h"
#include "models/gpt/gpt.h"
#include "models/llama/llama.h"

namespace zero {

std::unique_ptr<Model> MakeModel(const ModelConfig& config) {
  switch (config.family) {
    case ModelFamily::kGpt2:
      return MakeGpt(config);
    case ModelFamily::kLlama:
    case ModelFamily::kQwen2:
    case ModelFamily::kQwen3:
      return MakeLlama(config);
  }
  ZERO_CHECK(false) << "unknown model family";
  return nullptr;
}

}  // namespace zero
