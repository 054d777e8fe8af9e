// What a test's Trainer gets from models/.
#ifndef ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
#define ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_

#include <cstdint>

#include "engine/train/session.h"
#include "models/hf_config.h"
#include "models/registry.h"

namespace zero {

// As the program's, but for the device's ceiling, which is made up: to measure
// it takes longer than the steps of a test.
inline ModelTools TestModelTools() {
  return {.make = MakeModel,
          .hf_config_json = WriteHfConfig,
          .flops_per_token = [](const ModelConfig& model,
                                int64_t length) -> TokenFlops {
            return {.model = FlopsPerToken(model, length),
                    .causal = FlopsPerToken(model, length, /*causal=*/true),
                    .recomputed = RecomputedFlopsPerToken(model, length)};
          },
          .product_rate = [](Device&, DType) -> ProductRate {
            return {.flops = 1e13, .size = 1024};
          }};
}

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_MODEL_TOOLS_H_
