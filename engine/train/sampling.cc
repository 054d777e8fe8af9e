#include "engine/train/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/philox.h"

namespace zero {
namespace {

double Uniform(const SamplingOptions& options, uint64_t index) {
  const PhiloxBlock bits = Philox(MixKey(options.seed, 0x5A4D), index, 0);
  return (bits.x[0] + 0.5) * 0x1.0p-32;
}

// Works without sorting the tokens.
int32_t DrawFromAll(absl::Span<const float> logits,
                    const SamplingOptions& options, uint64_t index) {
  const int64_t size = static_cast<int64_t>(logits.size());
  const float largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> sums(size);
  double total = 0;
  for (int64_t i = 0; i < size; ++i) {
    total += std::exp((logits[i] - largest) / options.temperature);
    sums[i] = total;
  }
  const double target = Uniform(options, index) * total;
  const auto found = std::lower_bound(sums.begin(), sums.end(), target);
  return static_cast<int32_t>(
      std::min<int64_t>(found - sums.begin(), size - 1));
}

}  // namespace

int32_t SampleToken(absl::Span<const float> logits, int64_t vocab_limit,
                    const SamplingOptions& options, uint64_t index) {
  const int64_t vocab = std::min<int64_t>(logits.size(), vocab_limit);
  if (options.temperature <= 0) {
    return static_cast<int32_t>(
        std::max_element(logits.begin(), logits.begin() + vocab) -
        logits.begin());
  }
  if (options.top_k <= 0 && options.top_p >= 1) {
    return DrawFromAll(logits.first(vocab), options, index);
  }
  std::vector<int32_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  auto more_likely = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  int64_t kept = vocab;
  if (options.top_k > 0) kept = std::min(vocab, options.top_k);
  std::partial_sort(order.begin(), order.begin() + kept, order.end(),
                    more_likely);
  std::vector<double> weights(kept);
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) {
    weights[i] =
        std::exp((logits[order[i]] - logits[order[0]]) / options.temperature);
    total += weights[i];
  }
  // The smallest set of most likely tokens that holds top_p of the mass.
  double mass = 0;
  for (int64_t i = 0; i < kept; ++i) {
    mass += weights[i];
    if (mass >= options.top_p * total) {
      kept = i + 1;
      break;
    }
  }
  double target = Uniform(options, index) * mass;
  for (int64_t i = 0; i < kept; ++i) {
    target -= weights[i];
    if (target <= 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace zero
