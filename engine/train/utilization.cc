#include "engine/train/utilization.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_format.h"
#include "engine/nn/freeze.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// A unit's parameters that count for FLOPs per token: a table that is only
// looked up is not multiplied.
std::vector<const Parameter*> Multiplied(const Model& model, size_t unit) {
  const std::vector<Parameter*>& tied = model.units()[unit]->borrowed();
  std::vector<const Parameter*> multiplied(tied.begin(), tied.end());
  if (unit == 0) return multiplied;
  for (const auto& parameter : model.units()[unit]->parameters()) {
    multiplied.push_back(parameter.get());
  }
  return multiplied;
}

}  // namespace

TokenFlops WithoutFrozen(TokenFlops flops, const Model& model) {
  // The numbers are of one block: 6 q s, and its recomputation.
  const size_t num_units = model.units().size(), num_blocks = num_units - 2;
  const double attention = (flops.model - flops.causal) / num_blocks;
  const double recomputed = flops.recomputed / num_blocks;
  const size_t first_trained = FirstTrainedUnit(model);
  for (size_t u = 0; u < num_units; ++u) {
    const bool forward_only = u < first_trained;
    for (const Parameter* parameter : Multiplied(model, u)) {
      if (!parameter->frozen) continue;
      const double saved = (forward_only ? 4.0 : 2.0) *
                           static_cast<double>(parameter->shape.num_elems());
      flops.model -= saved;
      flops.causal -= saved;
    }
    const bool is_block = u > 0 && u + 1 < num_units;
    if (!forward_only || !is_block) continue;
    flops.model -= 2 * attention * 2 / 3;
    flops.causal -= attention * 2 / 3;
    flops.recomputed -= recomputed;
  }
  return flops;
}

bool Utilization::known() const { return !std::isnan(mfu); }

void Utilization::AddTo(nlohmann::ordered_json* line) const {
  (*line)["mfu"] = mfu;
  (*line)["mfu_causal"] = mfu_causal;
  if (hfu != 0) (*line)["hfu"] = hfu;
}

std::string Utilization::ToString() const {
  if (!known()) return "mfu unknown: machine busy while measuring";
  return absl::StrFormat(
      "mfu %.0f%%%s", 100 * mfu,
      hfu > 0 ? absl::StrFormat(" (hfu %.0f%%)", 100 * hfu) : "");
}

Utilization UtilizationAt(double tokens_per_second, const TokenFlops& flops,
                          double peak_flops) {
  if (peak_flops <= 0) return {};
  const double share = tokens_per_second / peak_flops;
  const bool recompute = flops.recomputed > 0;
  const Utilization found{
      .mfu = share * flops.model,
      .mfu_causal = share * flops.causal,
      .hfu = recompute ? share * (flops.model + flops.recomputed) : 0};
  if (std::max(found.mfu, found.hfu) <= 1) return found;
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  return {kUnknown, kUnknown, recompute ? kUnknown : 0};
}

}  // namespace zero
