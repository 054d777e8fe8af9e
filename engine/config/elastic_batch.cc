#include "engine/config/elastic_batch.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace zero {
namespace {

// OEIS A002182, up to the end of DeepSpeed's list.
constexpr int64_t kHighlyComposite[] = {
    1,      2,      4,      6,      12,     24,     36,     48,
    60,     120,    180,    240,    360,    720,    840,    1260,
    1680,   2520,   5040,   7560,   10080,  15120,  20160,  25200,
    27720,  45360,  50400,  55440,  83160,  110880, 166320, 221760,
    277200, 332640, 498960, 554400, 665280, 720720};

// The largest batch of `base` within `max`; 0: none.
int64_t ScaledBatch(int64_t base, int64_t max) {
  int64_t batch = 0;
  for (const int64_t number : kHighlyComposite) {
    if (base > max / number) break;
    batch = base * number;
  }
  return batch;
}

// The numbers of ranks that can share `batch`.
std::set<int64_t> WorldsOf(int64_t batch, const ElasticityConfig& config) {
  std::set<int64_t> worlds;
  const auto add = [&](int64_t world) {
    if (world >= config.min_gpus && world <= config.max_gpus) {
      worlds.insert(world);
    }
  };
  for (const int64_t size : config.micro_batch_sizes) {
    if (batch % size != 0) continue;
    const int64_t most = batch / size;
    for (int64_t d = 1; d * d <= most; ++d) {
      if (most % d != 0) continue;
      add(d);
      add(most / d);
    }
  }
  return worlds;
}

}  // namespace

ElasticBatch ChooseElasticBatch(const ElasticityConfig& config) {
  const int64_t max = config.max_train_batch_size;
  int64_t multiple = 1;  // of all sizes; beyond `max` it serves no batch
  std::set<int64_t> batches;
  for (const int64_t size : config.micro_batch_sizes) {
    batches.insert(ScaledBatch(size, max));
    if (multiple <= max) multiple = std::lcm(multiple, size);
  }
  batches.insert(ScaledBatch(multiple, max));
  batches.erase(0);

  ElasticBatch best;
  for (const int64_t batch : batches) {  // ascending
    const std::set<int64_t> worlds = WorldsOf(batch, config);
    const bool more = worlds.size() > best.worlds.size();
    const bool equal = worlds.size() == best.worlds.size() && !worlds.empty();
    if (more || (equal && config.prefer_larger_batch)) {
      best = {batch, {worlds.begin(), worlds.end()}};
    }
  }
  return best;
}

int64_t ElasticMicroBatch(const std::vector<int64_t>& sizes, int64_t share) {
  int64_t best = 0;
  for (const int64_t size : sizes) {
    if (share % size == 0) best = std::max(best, size);
  }
  return best;
}

}  // namespace zero
