// A global batch that many numbers of ranks can share: DeepSpeed's
// "elasticity", version 0.1. Pure functions of the config, so every start of a
// run finds the same batch, with any number of ranks.
#ifndef ZERO_ENGINE_CONFIG_ELASTIC_BATCH_H_
#define ZERO_ENGINE_CONFIG_ELASTIC_BATCH_H_

#include <cstdint>
#include <vector>

#include "engine/config/config.h"

namespace zero {

struct ElasticBatch {
  int64_t train_batch_size = 0;  // 0: none
  // Numbers of ranks n that can share it, ascending: n * m divides
  // train_batch_size for a micro-batch size m.
  std::vector<int64_t> worlds;
};

// Candidates are c * k, with c one of micro_batch_sizes or their least common
// multiple, and k the largest highly composite number (with more divisors than
// any smaller number) for which c * k <= max_train_batch_size. Chooses the one
// that the most numbers of ranks in [min_gpus, max_gpus] can share; of equals
// the largest, or the smallest without prefer_larger_batch.
// REQUIRES: micro_batch_sizes are >= 1.
ElasticBatch ChooseElasticBatch(const ElasticityConfig& config);

// The largest of `sizes` that divides the `share` of a rank; 0: none does.
int64_t ElasticMicroBatch(const std::vector<int64_t>& sizes, int64_t share);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_ELASTIC_BATCH_H_
