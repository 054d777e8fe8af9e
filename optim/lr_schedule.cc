#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>

namespace zero {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr double kLargestMomentum = 0.999;

// In (0, 1] within the warm-up, 1 after it.
double WarmupGamma(const LrSchedule& s, int64_t step) {
  if (step + 1 >= s.warmup_num_steps) return 1;
  const double steps = static_cast<double>(s.warmup_num_steps);
  if (s.warmup_type == LrWarmupType::kLinear) {
    return static_cast<double>(step + 1) / steps;
  }
  return std::min(1.0,
                  std::log(static_cast<double>(step + 2)) / std::log(steps));
}

double WarmupLr(const LrSchedule& s, int64_t step) {
  return s.warmup_min_lr +
         (s.warmup_max_lr - s.warmup_min_lr) * WarmupGamma(s, step);
}

// 0 at step `begin`, 1 at `end` and beyond.
double Progress(int64_t step, int64_t begin, int64_t end) {
  const double length = static_cast<double>(std::max<int64_t>(1, end - begin));
  return std::clamp(static_cast<double>(step - begin) / length, 0.0, 1.0);
}

double Cosine(double progress) { return (1 + std::cos(kPi * progress)) / 2; }

double WarmupDecayLr(const LrSchedule& s, int64_t step) {
  if (step < s.warmup_num_steps) return WarmupLr(s, step);
  const double progress = Progress(step, s.warmup_num_steps, s.total_num_steps);
  return s.warmup_min_lr + (s.warmup_max_lr - s.warmup_min_lr) * (1 - progress);
}

double WarmupCosineLr(const LrSchedule& s, int64_t step) {
  if (step < s.warmup_num_steps) {
    return s.lr * (s.warmup_min_ratio +
                   (1 - s.warmup_min_ratio) * WarmupGamma(s, step));
  }
  const double progress = Progress(step, s.warmup_num_steps, s.total_num_steps);
  return s.lr * (s.cos_min_ratio + (1 - s.cos_min_ratio) * Cosine(progress));
}

double DecayShape(LrDecayType type, double progress) {
  switch (type) {
    case LrDecayType::kLinear:
      return 1 - progress;
    case LrDecayType::kCosine:
      return Cosine(progress);
    case LrDecayType::kOneMinusSqrt:
      return 1 - std::sqrt(progress);
  }
  return 1;
}

// A decay longer than the steps after the warm-up takes over where they meet.
double Wsd(const LrSchedule& s, int64_t step) {
  const double progress =
      Progress(step, s.total_num_steps - s.decay_num_steps, s.total_num_steps);
  const double shape = DecayShape(s.decay_type, progress);
  const double decayed =
      s.warmup_max_lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * shape);
  return std::min(WarmupLr(s, step), decayed);
}

double RoundUpToStair(double height, int64_t count) {
  if (count <= 0) return height;
  const double stairs = static_cast<double>(count);
  return std::ceil(height * stairs) / stairs;
}

int64_t CycleSize(const LrSchedule& s) {
  return s.cycle_first_step_size + s.cycle_second_step_size;
}

// Height of the cycle in [0, 1]; 0 after it.
double CycleHeight(const LrSchedule& s, int64_t step) {
  if (step < s.cycle_first_step_size) {
    const double height = static_cast<double>(step + 1) /
                          static_cast<double>(s.cycle_first_step_size);
    return RoundUpToStair(height, s.cycle_first_stair_count);
  }
  const double height =
      1 - Progress(step, s.cycle_first_step_size, CycleSize(s));
  return RoundUpToStair(height, s.cycle_second_stair_count);
}

// Decay intervals passed since the end of the cycle.
double CycleIntervals(const LrSchedule& s, int64_t step) {
  if (s.decay_step_size <= 0 || step <= CycleSize(s)) return 0;
  return static_cast<double>(step - CycleSize(s)) /
         static_cast<double>(s.decay_step_size);
}

double OneCycleLr(const LrSchedule& s, int64_t step) {
  const double lr =
      s.cycle_min_lr + (s.cycle_max_lr - s.cycle_min_lr) * CycleHeight(s, step);
  return lr / (1 + s.decay_lr_rate * CycleIntervals(s, step));
}

}  // namespace

double LrSchedule::LrAt(int64_t step) const {
  switch (kind) {
    case LrScheduleKind::kConstant:
      return lr;
    case LrScheduleKind::kWarmupLr:
      return WarmupLr(*this, step);
    case LrScheduleKind::kWarmupDecayLr:
      return WarmupDecayLr(*this, step);
    case LrScheduleKind::kWarmupCosineLr:
      return WarmupCosineLr(*this, step);
    case LrScheduleKind::kOneCycle:
      return OneCycleLr(*this, step);
    case LrScheduleKind::kWsd:
      return Wsd(*this, step);
  }
  return lr;
}

double LrSchedule::MomentumAt(int64_t step) const {
  if (kind != LrScheduleKind::kOneCycle || !cycle_momentum) return -1;
  const double momentum = cycle_max_mom - (cycle_max_mom - cycle_min_mom) *
                                              CycleHeight(*this, step);
  const double growth = 1 + decay_mom_rate * CycleIntervals(*this, step);
  return growth > 1 ? std::min(kLargestMomentum, momentum * growth) : momentum;
}

}  // namespace zero
