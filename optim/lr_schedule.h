// The learning rate as a pure function of the step.
//
// Schedulers carry DeepSpeed's names and parameters. Steps count optimizer
// steps from 0. A warm-up is evaluated at step + 1, so that the first step
// moves; a decay at the step itself, so that the last one does:
//
//   step s < W:  gamma = (s + 1) / W, or log(s + 2) / log(W), at most 1
//   step s >= W: progress = (s - W) / (total - W), from 0, clamped to 1
//
// DeepSpeed evaluates its formulas at s - 1 (the scheduler steps after the
// optimizer), so steps 0 and 1 have warmup_min_lr: our warm-up is two steps
// ahead of it, the linear decay one, and the cosine and OneCycle's fall are the
// same. DeepSpeed's cosine rises again beyond total_num_steps; ours stays.
// Source: deepspeed/runtime/lr_schedules.py; WSD: Hu et al. 2024 (MiniCPM), its
// 1 - sqrt decay: Haegele et al. 2024.
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

// Parameters under DeepSpeed's names; a kind reads only its own.
struct LrSchedule {
  LrScheduleKind kind = LrScheduleKind::kConstant;
  double lr = 1e-3;  // kConstant; base of the ratios of kWarmupCosineLr
  // WarmupLR, WarmupDecayLR, WSD.
  double warmup_min_lr = 0;
  double warmup_max_lr = 1e-3;
  int64_t warmup_num_steps = 1000;  // 0: none. DeepSpeed makes 1 a 2
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
  // OneCycle: up from cycle_min_lr in cycle_first_step_size steps, down in
  // cycle_second_step_size, then cycle_min_lr / (1 + rate * intervals) with
  // decay_step_size steps per interval (0: no decay). A stair count rounds the
  // height up to that many levels; DeepSpeed has the keys and ignores them.
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
  // beta1 (Adam) or momentum (SGD) of that step; < 0: not cycled. Runs against
  // the learning rate, from cycle_max_mom down to cycle_min_mom and back; its
  // growth by decay_mom_rate ends at 0.999.
  double MomentumAt(int64_t step) const;

  bool operator==(const LrSchedule&) const = default;
};

}  // namespace zero

#endif  // ZERO_OPTIM_LR_SCHEDULE_H_
