#include "engine/train/utilization.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// Parameters that FLOPs per token count: a row of a table that is only looked
// up is not multiplied with anything.
std::vector<const Parameter*> Multiplied(const Model& model) {
  std::vector<const Parameter*> multiplied;
  for (size_t u = 0; u < model.units().size(); ++u) {
    const Unit& unit = *model.units()[u];
    for (const auto& parameter : unit.parameters()) {
      if (u > 0) multiplied.push_back(parameter.get());
    }
    for (const Parameter* tied : unit.borrowed()) multiplied.push_back(tied);
  }
  return multiplied;
}

}  // namespace

TokenFlops WithoutFrozen(TokenFlops flops, const Model& model) {
  for (const Parameter* parameter : Multiplied(model)) {
    if (!parameter->frozen) continue;
    const double saved =
        2.0 * static_cast<double>(parameter->shape.num_elems());
    flops.model -= saved;
    flops.causal -= saved;
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
      "mfu %.0f%% (causal %.0f%%%s)", 100 * mfu, 100 * mfu_causal,
      hfu > 0 ? absl::StrFormat(", hfu %.0f%%", 100 * hfu) : "");
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
