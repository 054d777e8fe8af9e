// The learning rate and the length of the run, once that is known: in the
// parser from training.steps, in the trainer from its data (training.epochs,
// lr_scaling.warmup_epochs).
#ifndef ZERO_ENGINE_CONFIG_RUN_LENGTH_H_
#define ZERO_ENGINE_CONFIG_RUN_LENGTH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config/config.h"

namespace zero {

// Sets total_num_steps and decay_num_steps if they are 0 and the schedule reads
// them. `run_steps` 0: not known yet.
void FillSchedule(int64_t run_steps, LrSchedule* schedule);

// One line for each setting in `config` that a run of `run_steps` steps does
// not reach. `scaling_warmup` is lr_scaling's warm-up in steps.
std::vector<std::string> ScheduleNotes(const Config& config,
                                       int64_t scaling_warmup,
                                       int64_t run_steps);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_RUN_LENGTH_H_
