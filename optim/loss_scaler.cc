#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "absl/numeric/bits.h"

namespace zero {

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  state_.scale =
      options.static_scale > 0
          ? options.static_scale
          : std::ldexp(1.0, static_cast<int>(options.initial_scale_power));
  state_.hysteresis_left = options.hysteresis;
}

void LossScaler::Update(bool overflow) {
  if (options_.static_scale > 0) return;
  if (overflow) {
    if (state_.hysteresis_left <= 1) {
      state_.scale = std::max(state_.scale / 2, options_.min_loss_scale);
    } else {
      --state_.hysteresis_left;
    }
    state_.last_overflow_step = state_.steps;
  } else {
    const int64_t good_steps = state_.steps - state_.last_overflow_step;
    const bool window_is_full = good_steps % options_.loss_scale_window == 0;
    if (options_.consecutive_hysteresis || window_is_full) {
      state_.hysteresis_left = options_.hysteresis;
    }
    if (window_is_full) state_.scale *= 2;
  }
  ++state_.steps;
}

double LossScaleOfStep(double scale, int64_t num_sequences) {
  return scale * static_cast<double>(
                     absl::bit_floor(static_cast<uint64_t>(num_sequences)));
}

}  // namespace zero
