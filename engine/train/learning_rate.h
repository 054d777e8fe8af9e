// Turns a config's "scheduler" and "lr_scaling" into the optimizer room's
// values.
#ifndef ZERO_ENGINE_TRAIN_LEARNING_RATE_H_
#define ZERO_ENGINE_TRAIN_LEARNING_RATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "optim/lr_scaling.h"
#include "optim/lr_schedule.h"

namespace zero {

// `steps_per_epoch` turns warmup_epochs into steps.
LrScaling MakeLrScaling(const Config& config, int64_t steps_per_epoch);

// `total_steps` is used if the config names no total. With lr_scaling active
// the schedule applies to the scaled rate.
// Errors: InvalidArgument if the decay is longer than the run, when the data
//         decides the run's length.
absl::StatusOr<LrSchedule> MakeLrSchedule(const Config& config,
                                          const LrScaling& scaling,
                                          int64_t total_steps);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_LEARNING_RATE_H_
