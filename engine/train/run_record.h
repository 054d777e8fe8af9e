// A run's progress, as a plain value. The step loop (trainer.h) fills it;
// report.h, divergence.h and a resumed run read it.
#ifndef ZERO_ENGINE_TRAIN_RUN_RECORD_H_
#define ZERO_ENGINE_TRAIN_RUN_RECORD_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "engine/comm/channel.h"
#include "engine/zero/executor.h"
#include "engine/zero/schedule.h"
#include "optim/loss_scaler.h"

namespace zero {

inline constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();

// Bytes that one step sent and received on this rank, and its waits.
struct StepCommunication {
  StepWire wire;
  int64_t collectives = 0;
  WaitTimes waited;

  StepCommunication operator-(const StepCommunication& before) const {
    return {.wire = {.gathered = wire.gathered - before.wire.gathered,
                     .reduced = wire.reduced - before.wire.reduced,
                     .across = wire.across - before.wire.across,
                     .received = wire.received - before.wire.received},
            .collectives = collectives - before.collectives,
            .waited = waited - before.waited};
  }
};

struct StepRecord {
  StepOutput output = {.loss = kNotKnown};
  double lr = 0;
  double num_targets = 0;  // counted targets of all ranks
  double seconds = 0;
  StepCommunication communication;
};

// Everything else for resuming follows from this, the config and the model
// states: learning rates from optimizer_steps; data and dropout masks,
// functions of (seed, step), from `step`.
struct RunRecord {
  int64_t step = 0;             // steps taken: the position in the data
  int64_t optimizer_steps = 0;  // those that updated
  int64_t consecutive_skips = 0;
  LossScalerState scaler;
  StepRecord last;  // the last step
  double first_loss = kNotKnown;
  double train_seconds = 0;
  WaitTimes waited;  // in steps
  double validation_loss = kNotKnown;
  int64_t last_eval_step = -1, last_sample_step = -1;  // -1: none
  std::vector<int64_t> resumed_at;  // the steps where parts of the run began

  // The step at which this part of the run began.
  int64_t first_step() const {
    return resumed_at.empty() ? 0 : resumed_at.back();
  }

  void Add(const StepRecord& taken) {
    const bool skipped = taken.output.skipped;
    if (++step == 1) first_loss = taken.output.loss;
    optimizer_steps += skipped ? 0 : 1;
    consecutive_skips = skipped ? consecutive_skips + 1 : 0;
    train_seconds += taken.seconds;
    waited += taken.communication.waited;
    last = taken;
  }
};

// Whether `done` is a multiple of `every` (0: never).
inline bool Due(int64_t every, int64_t done) {
  return every > 0 && done % every == 0;
}

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_RECORD_H_
