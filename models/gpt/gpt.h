// GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm blocks, tied
// head. Start reading at GptBlock::Forward in gpt.cc.
#ifndef ZERO_MODELS_GPT_GPT_H_
#define ZERO_MODELS_GPT_GPT_H_

#include <memory>

#include "engine/config/model_config.h"
#include "engine/nn/module.h"

namespace zero {

// REQUIRES: config.family is kGpt2 and config is complete.
std::unique_ptr<Model> MakeGpt(const ModelConfig& config);

}  // namespace zero

#endif  // ZERO_MODELS_GPT_GPT_H_
