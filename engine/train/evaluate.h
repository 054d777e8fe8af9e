// The loss of a model over validation data.
#ifndef ZERO_ENGINE_TRAIN_EVALUATE_H_
#define ZERO_ENGINE_TRAIN_EVALUATE_H_

#include "absl/status/statusor.h"
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

// Mean cross-entropy over all targets of the loader; changes no state.
double MeanLoss(Executor& executor, const EvalLoader& loader);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_EVALUATE_H_
