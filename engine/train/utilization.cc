#include "engine/train/utilization.h"

#include "absl/strings/str_format.h"

namespace zero {

void Utilization::AddTo(JsonLine* line) const {
  line->Add("mfu", mfu).Add("mfu_causal", mfu_causal);
  if (hfu > 0) line->Add("hfu", hfu);
}

std::string Utilization::ToString() const {
  return absl::StrFormat(
      "mfu %.0f%% (causal %.0f%%%s)", 100 * mfu, 100 * mfu_causal,
      hfu > 0 ? absl::StrFormat(", hfu %.0f%%", 100 * hfu) : "");
}

Utilization UtilizationAt(double tokens_per_second, const TokenFlops& flops,
                          bool recompute, double peak_flops) {
  if (peak_flops <= 0) return {};
  const double share = tokens_per_second / peak_flops;
  return {.mfu = share * flops.model,
          .mfu_causal = share * flops.causal,
          .hfu = recompute ? share * (flops.model + flops.recomputed) : 0};
}

}  // namespace zero
