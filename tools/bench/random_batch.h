// What step_bench and ranks_bench train on.
#ifndef ZERO_TOOLS_BENCH_RANDOM_BATCH_H_
#define ZERO_TOOLS_BENCH_RANDOM_BATCH_H_

#include <cstdint>
#include <random>
#include <vector>

#include "engine/config/config.h"
#include "engine/zero/executor.h"

namespace zero::bench {

// One micro-batch of random tokens per rank; the work does not depend on
// which.
struct RandomBatch {
  explicit RandomBatch(const Config& config, int rank = 0) {
    const int64_t batch = config.train_micro_batch_size_per_gpu;
    const int64_t length = config.data.sequence_length;
    std::mt19937 random(1 + rank);
    for (int64_t i = 0; i < batch * length; ++i) {
      tokens.push_back(random() % config.model.vocab_size);
      positions.push_back(i % length);
    }
    for (int64_t i = 0; i < batch; ++i) sample_ids.push_back(rank * batch + i);
    targets = tokens;
    host = {.batch = batch,
            .length = length,
            .tokens = tokens.data(),
            .targets = targets.data(),
            .positions = positions.data(),
            .sample_ids = sample_ids.data()};
  }
  RandomBatch(const RandomBatch&) = delete;

  // `step` counts from 1.
  StepInput Input(const Config& config, int64_t step, int world = 1) const {
    return {.micro_batches = {&host, 1},
            .num_valid_targets = world * static_cast<int64_t>(targets.size()),
            .lr = static_cast<float>(config.optimizer.lr),
            .optimizer_step = step};
  }

  std::vector<int32_t> tokens, targets, positions;
  std::vector<int64_t> sample_ids;
  HostBatch host;
};

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_RANDOM_BATCH_H_
