#include "optim/lr_scaling.h"

#include <cmath>

#include "kernels/check.h"

namespace zero {

double LrScaling::Factor() const {
  if (rule == LrScaleRule::kNone) return 1;
  ZERO_CHECK_GT(base_batch_size, 0);
  ZERO_CHECK_GT(global_batch_size, 0);
  const double ratio = static_cast<double>(global_batch_size) /
                       static_cast<double>(base_batch_size);
  return rule == LrScaleRule::kLinear ? ratio : std::sqrt(ratio);
}

double LrScaling::LrAt(int64_t step, double base_lr,
                       double scheduled_lr) const {
  if (step >= warmup_steps) return scheduled_lr;
  const double scaled = base_lr * Factor();
  return base_lr + (scaled - base_lr) * static_cast<double>(step) /
                       static_cast<double>(warmup_steps);
}

}  // namespace zero
