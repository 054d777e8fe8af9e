// Steps and runs that went wrong: non-finite gradients, losses and parameters,
// and parameters that nothing trains. All ranks make the same calls.
#ifndef ZERO_ENGINE_TRAIN_DIVERGENCE_H_
#define ZERO_ENGINE_TRAIN_DIVERGENCE_H_

#include "absl/status/status.h"
#include "engine/config/config.h"
#include "engine/train/console.h"
#include "engine/train/run_folder.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"
#include "engine/zero/executor.h"

namespace zero {

// Checks after the first step that gradients reach every parameter.
// Errors: FailedPrecondition with the parameters that none reaches, unless the
//         config allows them; then they are noted.
absl::Status CheckUnused(const Executor& executor, const Config& config,
                         Console* console);

// Reports a skipped step with the tensor to blame; called after every step.
// Errors: Aborted at training.max_consecutive_skips.
absl::Status CheckSkips(const Config& config, const RunRecord& record,
                        Console* console);

// Checks the weights after the last step.
// Errors: Aborted if the run diverged, so that its weights replace no good
//         ones.
absl::Status CheckFinite(Executor& executor, const Config& config,
                         const RunRecord& record);

// If `status`, the run's end, is an error: saves the weights in final.failed/
// if they are finite and all ranks are still there. Returns `status` with a
// note on that.
absl::Status Rescue(const absl::Status& status, Session& session,
                    const RunRecord& record, RunFolder* folder);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_DIVERGENCE_H_
