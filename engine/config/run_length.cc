#include "engine/config/run_length.h"

#include "absl/strings/str_cat.h"
#include "engine/config/json_text.h"

namespace zero {

void FillSchedule(int64_t run_steps, LrSchedule* schedule) {
  const LrScheduleKind kind = schedule->kind;
  const bool has_end = kind == LrScheduleKind::kWarmupDecayLr ||
                       kind == LrScheduleKind::kWarmupCosineLr ||
                       kind == LrScheduleKind::kWsd;
  if (has_end && schedule->total_num_steps == 0) {
    schedule->total_num_steps = run_steps;
  }
  if (kind == LrScheduleKind::kWsd && schedule->decay_num_steps == 0) {
    schedule->decay_num_steps = (schedule->total_num_steps + 9) / 10;
  }
}

std::vector<std::string> ScheduleNotes(const Config& config,
                                       int64_t scaling_warmup,
                                       int64_t run_steps) {
  LrSchedule s = config.scheduler;
  FillSchedule(run_steps, &s);
  std::string key;
  int64_t rise = 0;  // steps until the peak
  if (config.lr_scaling.active()) {
    const double epochs = config.lr_scaling.warmup_epochs;
    key = epochs > 0 ? absl::StrCat("lr_scaling.warmup_epochs ",
                                    JsonDouble(epochs), " =")
                     : "lr_scaling.warmup_steps";
    rise = scaling_warmup;
  } else if (s.kind == LrScheduleKind::kOneCycle) {
    key = "scheduler.params.cycle_first_step_size";
    rise = s.cycle_first_step_size;
  } else if (s.kind != LrScheduleKind::kConstant) {
    key = "scheduler.params.warmup_num_steps";
    rise = s.warmup_num_steps;
  }
  if (rise >= run_steps) {
    return {absl::StrCat(
        key, " ", rise,
        ": the learning rate rises until the run ends, at step ", run_steps)};
  }
  if (s.kind == LrScheduleKind::kWsd &&
      rise > s.total_num_steps - s.decay_num_steps) {
    return {absl::StrCat("scheduler.params.decay_num_steps ", s.decay_num_steps,
                         ": the decay starts before the warm-up of ", rise,
                         " steps ends; both fit into ", s.total_num_steps,
                         " steps only if one is shorter")};
  }
  return {};
}

}  // namespace zero
