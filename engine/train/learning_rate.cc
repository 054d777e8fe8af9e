#include "engine/train/learning_rate.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/config/run_length.h"
#include "engine/train/console.h"

namespace zero {

LrScaling MakeLrScaling(const Config& config, int64_t steps_per_epoch) {
  const LrScalingConfig& from = config.lr_scaling;
  return {
      .rule = from.rule,
      .base_batch_size = from.base_batch_size,
      .global_batch_size = config.train_batch_size,
      .warmup_steps = from.warmup_epochs > 0
                          ? std::llround(from.warmup_epochs * steps_per_epoch)
                          : from.warmup_steps};
}

absl::StatusOr<LrSchedule> MakeLrSchedule(const Config& config,
                                          const LrScaling& scaling,
                                          int64_t total_steps) {
  LrSchedule schedule = config.scheduler;
  FillSchedule(total_steps, &schedule);
  if (schedule.decay_num_steps > schedule.total_num_steps) {
    return absl::InvalidArgumentError(absl::StrCat(
        "scheduler.params.decay_num_steps: ", schedule.decay_num_steps,
        " is more than the ", Counted(schedule.total_num_steps, "step"),
        " of the run; lower it, or raise training.epochs"));
  }
  if (config.lr_scaling.active()) {
    // The scheduler applies to the scaled rate. Its warm-up is the scaling's:
    // its earlier values are never read, and its decay starts there.
    schedule.lr *= scaling.Factor();
    schedule.warmup_max_lr = schedule.lr;
    schedule.warmup_num_steps = scaling.warmup_steps;
  }
  return schedule;
}

}  // namespace zero
