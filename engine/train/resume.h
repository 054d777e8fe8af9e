// How a run resumes from its own checkpoint, or another's.
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
  absl::optional<RunRecord> record;  // where the run was; none: it starts over
  std::string run;                   // its id, on rank 0
  // It resumes in the run's own folder. A checkpoint read elsewhere is not in
  // this run's folder.
  bool in_place = false;
};

// Fills the model states as training.resume asks. Rank 0, which holds the run's
// folder, chooses the checkpoint. Later checkpoints in that folder are renamed,
// as the last step: an error leaves them.
// Order: all ranks make the same calls, in the same order.
// Errors: NotFound; FailedPrecondition if the checkpoint is from another run,
//         naming the first difference, if this run would start over next to
//         another's checkpoints, or if the run's `total_steps` are over; those
//         of CheckpointReader.
// If one is damaged, the previous one is used, with a warning.
absl::StatusOr<ResumedRun> ResumeRun(Session& session, const RunData& data,
                                     int64_t total_steps, Console* console);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RESUME_H_
