// What the models room offers to the engine.
#ifndef ZERO_TOOLS_CLI_MODEL_TOOLS_H_
#define ZERO_TOOLS_CLI_MODEL_TOOLS_H_

#include <cstdint>

#include "engine/train/session.h"
#include "models/catalog.h"
#include "models/hf_config.h"
#include "models/registry.h"

namespace zero {

inline ModelTools MakeModelTools() {
  return {.make = MakeModel,
          .hf_config_json = WriteHfConfig,
          .flops_per_token = [](const ModelConfig& model, int64_t length,
                                Recompute recompute) -> TokenFlops {
            return {.model = FlopsPerToken(model, length),
                    .causal = FlopsPerToken(model, length, /*causal=*/true),
                    .recomputed =
                        RecomputedFlopsPerToken(model, length, recompute)};
          }};
}

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_MODEL_TOOLS_H_
