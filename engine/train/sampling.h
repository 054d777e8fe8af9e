// Choosing the next token from logits.
#ifndef ZERO_ENGINE_TRAIN_SAMPLING_H_
#define ZERO_ENGINE_TRAIN_SAMPLING_H_

#include <cstdint>

#include "absl/types/span.h"

namespace zero {

struct SamplingOptions {
  double temperature = 0.8;  // 0: the most likely token
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;        // nucleus (Holtzman et al. 2019); 1: off
  uint64_t seed = 0;
};

// The token for position `index` of a text: a pure function of its arguments.
// Logits beyond `vocab_limit` ids (a padded vocabulary) are never chosen.
int32_t SampleToken(absl::Span<const float> logits, int64_t vocab_limit,
                    const SamplingOptions& options, uint64_t index);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_SAMPLING_H_
