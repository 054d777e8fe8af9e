// Learning-rate scaling with the batch size and its gradual warm-up.
// Source: Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.
#ifndef ZERO_OPTIM_LR_SCALING_H_
#define ZERO_OPTIM_LR_SCALING_H_

#include <cstdint>

namespace zero {

enum class LrScaleRule { kNone, kLinear, kSqrt };

struct LrScaling {
  LrScaleRule rule = LrScaleRule::kNone;
  int64_t base_batch_size = 0;  // sequences
  int64_t global_batch_size = 0;
  int64_t warmup_steps = 0;

  // global / base for linear, its square root for sqrt, 1 for none.
  double Factor() const;

  // The learning rate of step `step` (from 0): a line from base_lr towards
  // base_lr * Factor(), reached at step warmup_steps, then `scheduled_lr`, the
  // scheduler's for the scaled learning rate.
  double LrAt(int64_t step, double base_lr, double scheduled_lr) const;
};

}  // namespace zero

#endif  // ZERO_OPTIM_LR_SCALING_H_
