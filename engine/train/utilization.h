// How much of the device's arithmetic a run uses.
#ifndef ZERO_ENGINE_TRAIN_UTILIZATION_H_
#define ZERO_ENGINE_TRAIN_UTILIZATION_H_

#include <string>

#include "engine/nn/module.h"
#include "engine/train/metrics.h"

namespace zero {

// Training FLOPs per token. N: parameters without embedding tables, a tied
// head counted once; L layers; q = heads * head width; s: sequence length, even
// if documents in a sequence are kept apart: attention is then less work than
// counted, and shares of the peak are upper bounds.
// Source: PaLM (Chowdhery et al. 2022), appendix B.
struct TokenFlops {
  double model = 0;       // 6 N + 12 L q s
  double causal = 0;      // 6 N + 6 L q s: no token looks ahead
  double recomputed = 0;  // in backward
};

// The FLOPs of a run that trains `model`. A frozen weight costs 4 operations
// per element and token instead of 6, since it has no gradient. Frozen units
// before the first trained one have no backward and cost a third.
TokenFlops WithoutFrozen(TokenFlops flops, const Model& model);

// Shares of a peak rate; all 0 if the peak is unknown, NaN if the run is faster
// than the peak, whose measurement other work disturbed.
struct Utilization {
  double mfu = 0;         // TokenFlops::model
  double mfu_causal = 0;  // TokenFlops::causal
  double hfu = 0;         // model + recomputed; 0: nothing is recomputed

  bool known() const;
  // Adds mfu, mfu_causal and, with recompute, hfu; null if unknown.
  void AddTo(nlohmann::ordered_json* line) const;
  // "mfu 45%", "mfu 45% (hfu 58%)", or that it is not known.
  std::string ToString() const;
};

// `peak_flops` per second; <= 0: not known.
Utilization UtilizationAt(double tokens_per_second, const TokenFlops& flops,
                          double peak_flops);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_UTILIZATION_H_
