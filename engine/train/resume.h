// How a run goes on from a checkpoint of its own, or of another.
#ifndef ZERO_ENGINE_TRAIN_RESUME_H_
#define ZERO_ENGINE_TRAIN_RESUME_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/train/console.h"
#include "engine/train/run_data.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"

namespace zero {

struct ResumedRun {
  absl::optional<RunRecord> record;  // where the run was; none: it begins anew
  std::string run;                   // its id, on rank 0
  // It goes on in the folder of the run that it resumes. Of one that was read
  // elsewhere this run's folder has no checkpoint.
  bool in_place = false;
};

// What training.resume asks for: fills the model states. Rank 0, which has the
// run's folder to itself, looks and decides. Of later checkpoints in that
// folder the names are changed, last of all: an error leaves them.
// Order: all ranks make the same calls, in the same order.
// Errors: NotFound; FailedPrecondition where the checkpoint is of another run,
//         naming the first difference, or where this run would begin anew
//         beside the checkpoints of another, or where the run's
//         `total_steps` are over; those of CheckpointReader.
// A damaged one gives way to the one before, with a warning.
absl::StatusOr<ResumedRun> ResumeRun(Session& session, const RunData& data,
                                     int64_t total_steps, Console* console);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RESUME_H_
