// The loss of a model over validation data.
#ifndef ZERO_ENGINE_TRAIN_EVALUATE_H_
#define ZERO_ENGINE_TRAIN_EVALUATE_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/config/config.h"
#include "engine/data/loader.h"
#include "engine/zero/executor.h"

namespace zero {

// What a loader needs to know of a config, for one rank.
BatchShape BatchShapeOf(const Config& config);

// A micro-batch in the form that the executor takes; `batch` must outlive it.
HostBatch AsHostBatch(const Batch& batch);

// The config's validation batches, limited by training.eval_batches.
// `source` must outlive the loader. Errors: those of EvalLoader.
absl::StatusOr<EvalLoader> MakeEvalLoader(const Config& config,
                                          const TokenSource* source);

// Mean cross-entropy over all targets of the loader; changes no state. Empty
// when `stop` (may be null) was set before the end.
absl::optional<double> MeanLoss(Executor& executor, const EvalLoader& loader,
                                const std::atomic<bool>* stop);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_EVALUATE_H_
