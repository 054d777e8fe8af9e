// The loss of a model over validation data.
#ifndef ZERO_ENGINE_TRAIN_EVALUATE_H_
#define ZERO_ENGINE_TRAIN_EVALUATE_H_

#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/config/config.h"
#include "engine/data/loader.h"
#include "engine/train/run_data.h"
#include "engine/zero/executor.h"

namespace zero {

// The batch shape that a config gives a loader.
BatchShape BatchShapeOf(const Config& config, int world);

// A micro-batch in the executor's form; `batch` must outlive it.
HostBatch AsHostBatch(const Batch& batch);

// The config's validation batches, limited by training.eval_batches.
// `data`, whose validation is not null, must outlive the loader.
// Errors: those of EvalLoader.
absl::StatusOr<EvalLoader> MakeEvalLoader(const Config& config, int world,
                                          const RunData& data);

// Whether to stop now; the same answer on all ranks.
using ShouldStopFn = std::function<absl::StatusOr<bool>()>;

// Mean cross-entropy over all targets of the loader, of all ranks; changes no
// state. Empty when `should_stop` said so before the end.
absl::StatusOr<absl::optional<double>> MeanLoss(
    Executor& executor, const Rank& rank, const EvalLoader& loader,
    const ShouldStopFn& should_stop);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_EVALUATE_H_
