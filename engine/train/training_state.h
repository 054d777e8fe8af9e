// What a rank must keep to go on training as if it had never stopped.
#ifndef ZERO_ENGINE_TRAIN_TRAINING_STATE_H_
#define ZERO_ENGINE_TRAIN_TRAINING_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/comm/channel.h"
#include "optim/loss_scaler.h"

namespace zero {

// Where a run is. All else follows from these and the config: learning rates
// from optimizer_steps; the data and dropout masks, which are functions of
// (seed, step), from `step`.
struct TrainingProgress {
  int64_t step = 0;             // steps taken: the position in the data
  int64_t optimizer_steps = 0;  // those that updated
  int64_t consecutive_skips = 0;
  LossScalerState scaler;
  // For the summary only.
  double train_seconds = 0;
  WaitTimes waited;
  double first_loss = 0, last_loss = 0;
  double validation_loss = 0;  // NaN: not evaluated
  int64_t last_eval_step = -1, last_sample_step = -1;
};

// Between two steps, in memory. `arrays` are those of Executor::StateArrays,
// in its order: this rank's part of the model states.
struct TrainingState {
  struct Array {
    std::string name;
    std::string bytes;
    bool operator==(const Array&) const = default;
  };
  TrainingProgress progress;
  std::vector<Array> arrays;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRAINING_STATE_H_
