// Llama 2/3 (Touvron et al. 2023), Qwen2 (q/k/v bias) and Qwen3 (q/k norm):
// RMSNorm, rotary positions, grouped key/value heads, SwiGLU.
// Start reading at LlamaBlock::Forward in llama.cc.
#ifndef ZERO_MODELS_LLAMA_LLAMA_H_
#define ZERO_MODELS_LLAMA_LLAMA_H_

#include <memory>

#include "engine/config/model_config.h"
#include "engine/nn/module.h"

namespace zero {

// REQUIRES: config.family is kLlama, kQwen2 or kQwen3 and config is complete.
std::unique_ptr<Model> MakeLlama(const ModelConfig& config);

}  // namespace zero

#endif  // ZERO_MODELS_LLAMA_LLAMA_H_
