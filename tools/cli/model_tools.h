// The models room's functions for the engine.
#ifndef ZERO_TOOLS_CLI_MODEL_TOOLS_H_
#define ZERO_TOOLS_CLI_MODEL_TOOLS_H_

#include <cstdint>
#include <filesystem>
#include <string>

#include "engine/train/session.h"
#include "models/catalog.h"
#include "models/hf_config.h"
#include "models/registry.h"

namespace zero {

// The best product rates measured here: next to the program, so that another
// build starts over.
inline std::string ProductRatesFile() {
  std::error_code unknown;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", unknown);
  return (program.parent_path() / "product_rates.json").string();
}

inline ModelTools MakeModelTools() {
  return {
      .make = MakeModel,
      .hf_config_json = WriteHfConfig,
      .flops_per_token = [](const ModelConfig& model, int64_t length,
                            Recompute recompute) -> TokenFlops {
        return {
            .model = FlopsPerToken(model, length),
            .causal = FlopsPerToken(model, length, /*causal=*/true),
            .recomputed = RecomputedFlopsPerToken(model, length, recompute)};
      },
      .product_rate =
          [](Device& device, DType dtype, absl::Span<char> memory) {
            return BestProductRate(ProductRatesFile(), device.info(), dtype,
                                   MeasureProductRate(device, dtype, memory));
          }};
}

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_MODEL_TOOLS_H_
