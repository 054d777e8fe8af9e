#include "engine/train/evaluate.h"

namespace zero {

BatchShape BatchShapeOf(const Config& config) {
  return {.sequence_length = config.data.sequence_length,
          .micro_batch_size = config.train_micro_batch_size_per_gpu,
          .micro_steps = config.gradient_accumulation_steps,
          .world = 1};
}

HostBatch AsHostBatch(const Batch& batch) {
  return {.batch = batch.batch_size,
          .length = batch.sequence_length,
          .tokens = batch.tokens.data(),
          .targets = batch.targets.data(),
          .positions = batch.positions.data(),
          .sample_ids = batch.sample_ids.data()};
}

absl::StatusOr<EvalLoader> MakeEvalLoader(const Config& config,
                                          const TokenSource* source) {
  const int64_t max_windows =
      config.training.eval_batches * config.train_micro_batch_size_per_gpu;
  return EvalLoader::Create(source, BatchShapeOf(config), max_windows);
}

absl::optional<double> MeanLoss(Executor& executor, const EvalLoader& loader,
                                const std::atomic<bool>* stop) {
  double loss_sum = 0;
  Batch batch;
  for (int64_t i = 0; i < loader.num_batches(); ++i) {
    if (stop != nullptr && stop->load()) return absl::nullopt;
    loader.Fill(i, /*rank=*/0, &batch);
    loss_sum += executor.EvalLossSum(AsHostBatch(batch));
  }
  return loss_sum / loader.num_targets();
}

}  // namespace zero
