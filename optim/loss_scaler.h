// The fp16 loss scale: a pure state machine with DeepSpeed's keys.
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
};

class LossScaler {
 public:
  explicit LossScaler(const LossScalerOptions& options);

  double scale() const { return scale_; }

  // After each step: halves the scale once `hysteresis` overflows have been
  // seen, doubles it after loss_scale_window good steps in a row.
  void Update(bool overflow);

 private:
  LossScalerOptions options_;
  double scale_;
  int64_t steps_ = 0;
  int64_t last_overflow_step_ = -1;
  int64_t hysteresis_left_;
};

}  // namespace zero

#endif  // ZERO_OPTIM_LOSS_SCALER_H_
