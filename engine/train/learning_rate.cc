#include "engine/train/learning_rate.h"

#include <cmath>

namespace zero {

LrScaling MakeLrScaling(const Config& config, int64_t steps_per_epoch) {
  const LrScalingConfig& from = config.lr_scaling;
  LrScaling scaling;
  switch (from.rule) {
    case LrScalingRule::kNone:
      scaling.rule = LrScaleRule::kNone;
      break;
    case LrScalingRule::kLinear:
      scaling.rule = LrScaleRule::kLinear;
      break;
    case LrScalingRule::kSqrt:
      scaling.rule = LrScaleRule::kSqrt;
      break;
  }
  scaling.base_batch_size = from.base_batch_size;
  scaling.global_batch_size = config.train_batch_size;
  scaling.warmup_steps =
      from.warmup_epochs > 0
          ? std::llround(from.warmup_epochs * steps_per_epoch)
          : from.warmup_steps;
  return scaling;
}

// The config's words in the optimizer room's terms; the lists are the same.
static_assert(static_cast<int>(SchedulerType::kWsd) ==
              static_cast<int>(LrScheduleKind::kWsd));
static_assert(static_cast<int>(DecayType::kOneMinusSqrt) ==
              static_cast<int>(LrDecayType::kOneMinusSqrt));

LrSchedule MakeLrSchedule(const Config& config, const LrScaling& scaling,
                          int64_t total_steps) {
  const SchedulerConfig& from = config.scheduler;
  LrSchedule schedule;
  schedule.kind = static_cast<LrScheduleKind>(from.type);
  schedule.lr = config.optimizer.lr;
  schedule.warmup_min_lr = from.warmup_min_lr;
  schedule.warmup_max_lr = from.warmup_max_lr;
  schedule.warmup_num_steps = from.warmup_num_steps;
  schedule.warmup_type = static_cast<LrWarmupType>(from.warmup_type);
  schedule.total_num_steps =
      from.total_num_steps > 0 ? from.total_num_steps : total_steps;
  schedule.warmup_min_ratio = from.warmup_min_ratio;
  schedule.cos_min_ratio = from.cos_min_ratio;
  schedule.decay_num_steps = from.decay_num_steps > 0
                                 ? from.decay_num_steps
                                 : (schedule.total_num_steps + 9) / 10;
  schedule.decay_type = static_cast<LrDecayType>(from.decay_type);
  schedule.min_lr_ratio = from.min_lr_ratio;
  schedule.cycle_min_lr = from.cycle_min_lr;
  schedule.cycle_max_lr = from.cycle_max_lr;
  schedule.decay_lr_rate = from.decay_lr_rate;
  schedule.cycle_first_step_size = from.cycle_first_step_size;
  schedule.cycle_second_step_size = from.cycle_second_step_size;
  schedule.cycle_first_stair_count = from.cycle_first_stair_count;
  schedule.cycle_second_stair_count = from.cycle_second_stair_count;
  schedule.decay_step_size = from.decay_step_size;
  schedule.cycle_momentum = from.cycle_momentum;
  schedule.cycle_min_mom = from.cycle_min_mom;
  schedule.cycle_max_mom = from.cycle_max_mom;
  schedule.decay_mom_rate = from.decay_mom_rate;
  if (config.lr_scaling.active()) {
    // The scheduler works on the scaled rate. Its warm-up is the scaling's:
    // what it says before the scaled rate is reached is never read, and its
    // decay starts there.
    schedule.lr *= scaling.Factor();
    schedule.warmup_max_lr = schedule.lr;
    schedule.warmup_num_steps = scaling.warmup_steps;
  }
  return schedule;
}

}  // namespace zero
