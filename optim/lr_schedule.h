// The learning rate as a pure function of the step.
//
// Schedulers carry DeepSpeed's names and parameters. Steps count optimizer
// steps from 0; WarmupLR and its kin are evaluated at step + 1, so that the
// first step moves (DeepSpeed's first step has the schedule's value at 0).
// The linear-scaling warm-up (lr_scaling.h) is applied around this.
#ifndef ZERO_OPTIM_LR_SCHEDULE_H_
#define ZERO_OPTIM_LR_SCHEDULE_H_

#include <cstdint>

namespace zero {

enum class LrScheduleKind {
  kConstant,
  kWarmupLr,
  kWarmupDecayLr,
  kWarmupCosineLr,
  kOneCycle,
  kWsd,
};
enum class LrWarmupType { kLog, kLinear };
enum class LrDecayType { kLinear, kCosine, kOneMinusSqrt };

// Parameters under DeepSpeed's names; a kind reads its own only.
struct LrSchedule {
  LrScheduleKind kind = LrScheduleKind::kConstant;
  double lr = 1e-3;  // kConstant; base of the ratios of kWarmupCosineLr
  // WarmupLR, WarmupDecayLR, WSD.
  double warmup_min_lr = 0;
  double warmup_max_lr = 1e-3;
  int64_t warmup_num_steps = 1000;
  LrWarmupType warmup_type = LrWarmupType::kLog;
  // WarmupDecayLR, WarmupCosineLR, WSD.
  int64_t total_num_steps = 0;
  // WarmupCosineLR, as ratios of lr.
  double warmup_min_ratio = 0;
  double cos_min_ratio = 0.0001;
  // WSD: the last decay_num_steps of total_num_steps fall to
  // min_lr_ratio * warmup_max_lr.
  int64_t decay_num_steps = 0;
  LrDecayType decay_type = LrDecayType::kOneMinusSqrt;
  double min_lr_ratio = 0;
  // OneCycle.
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  int64_t cycle_second_step_size = 2000;
  int64_t cycle_first_stair_count = 0;
  int64_t cycle_second_stair_count = 0;
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;

  // The learning rate of optimizer step `step` (from 0).
  double LrAt(int64_t step) const;
  // beta1 (Adam) or momentum (SGD) of that step; < 0: not cycled.
  double MomentumAt(int64_t step) const;
};

}  // namespace zero

#endif  // ZERO_OPTIM_LR_SCHEDULE_H_
