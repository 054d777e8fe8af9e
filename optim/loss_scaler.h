// The fp16 loss scale: a pure state machine with DeepSpeed's keys.
//
// One difference from DeepSpeed: at min_loss_scale it raises; here the scale
// stays, and the trainer stops after max_consecutive_skips with the name of the
// first non-finite tensor.
// Source: Micikevicius et al. 2018; DeepSpeed's DynamicLossScaler.
#ifndef ZERO_OPTIM_LOSS_SCALER_H_
#define ZERO_OPTIM_LOSS_SCALER_H_

#include <cstdint>

namespace zero {

struct LossScalerOptions {
  double static_scale = 0;  // > 0: constant
  int64_t initial_scale_power = 16;
  int64_t loss_scale_window = 1000;
  int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;

  bool operator==(const LossScalerOptions&) const = default;
};

// The state in a checkpoint.
struct LossScalerState {
  double scale = 1;
  int64_t steps = 0;                // Update calls so far
  int64_t last_overflow_step = -1;  // value of `steps` at the last overflow
  int64_t hysteresis_left = 1;      // overflows until the scale is halved
};

class LossScaler {
 public:
  explicit LossScaler(const LossScalerOptions& options);

  double scale() const { return state_.scale; }

  // After each step: halves the scale once `hysteresis` overflows have been
  // seen (and at each one after that), doubles it after loss_scale_window good
  // steps in a row. The hysteresis is refilled when the scale doubles, or,
  // with consecutive_hysteresis, by every good step. Does nothing if the scale
  // is static.
  void Update(bool overflow);

  const LossScalerState& state() const { return state_; }
  void Restore(const LossScalerState& state) { state_ = state; }

 private:
  LossScalerOptions options_;
  LossScalerState state_;
};

// The loss of a step is a mean over its `num_sequences`, of all ranks and
// micro-batches. Multiplied by this, each sequence's own loss is scaled by
// scale / 2 to scale, however many there are: gradients do not shrink as ranks
// are added. This is `scale` times a power of two.
double LossScaleOfStep(double scale, int64_t num_sequences);

}  // namespace zero

#endif  // ZERO_OPTIM_LOSS_SCALER_H_
