#include "engine/train/evaluate.h"

#include <algorithm>

#include "engine/base/status.h"

namespace zero {

BatchShape BatchShapeOf(const Config& config, int world) {
  return {.sequence_length = config.data.sequence_length,
          .micro_batch_size = config.train_micro_batch_size_per_gpu,
          .micro_steps = config.gradient_accumulation_steps,
          .world = world};
}

HostBatch AsHostBatch(const Batch& batch) {
  return {.batch = batch.batch_size,
          .length = batch.sequence_length,
          .tokens = batch.tokens.data(),
          .targets = batch.targets.data(),
          .positions = batch.positions.data(),
          .sample_ids = batch.sample_ids.data(),
          .offsets = batch.offsets.empty() ? nullptr : batch.offsets.data(),
          .num_sequences = batch.num_documents};
}

absl::StatusOr<EvalLoader> MakeEvalLoader(const Config& config, int world,
                                          const RunData& data) {
  // No more windows than tokens, so that the product fits.
  const int64_t max_windows =
      std::min(config.training.eval_batches, data.validation->size()) *
      config.train_micro_batch_size_per_gpu * world;
  return EvalLoader::Create(data.validation.get(), BatchShapeOf(config, world),
                            max_windows, data.document_token);
}

absl::StatusOr<absl::optional<double>> MeanLoss(
    Executor& executor, const Rank& rank, const EvalLoader& loader,
    const ShouldStopFn& should_stop) {
  double loss_sum = 0;
  Batch batch;
  for (int64_t i = 0; i < loader.num_batches(); ++i) {
    ZERO_ASSIGN_OR_RETURN(const bool stop, should_stop());
    if (stop) return absl::optional<double>();
    loader.Fill(i, rank.rank(), &batch);
    ZERO_ASSIGN_OR_RETURN(const double sum,
                          executor.EvalLossSum(AsHostBatch(batch)));
    loss_sum += sum;
  }
  ZERO_RETURN_IF_ERROR(executor.numbers().AllReduce(
      "validation loss", ReduceOp::kSum, {&loss_sum, 1}));
  return absl::optional<double>(loss_sum / loader.num_targets());
}

}  // namespace zero
