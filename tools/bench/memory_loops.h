// Plain loops over memory on all threads: the ceiling of every kernel that
// reads and writes more than it computes. Vectorized by the compiler, without
// prefetches or streaming stores: the obvious code.
#ifndef ZERO_TOOLS_BENCH_MEMORY_LOOPS_H_
#define ZERO_TOOLS_BENCH_MEMORY_LOOPS_H_

#include <cstdint>

#include "absl/types/span.h"

namespace zero::bench {

// Reads `num_in` floats and writes `num_out`, each once, in step: the first
// min(num_in, num_out) are copied, the others summed or filled.
void CopyLoop(int threads, const float* in, int64_t num_in, float* out,
              int64_t num_out);

// Reads four arrays and writes three of them: Adam's traffic.
void UpdateLoop(int threads, float* p, const float* g, float* m, float* v,
                int64_t n);

// out = in[0] + in[1] + ... on the calling thread; out may be one of them.
void SumLoop(absl::Span<const float* const> in, float* out, int64_t n);

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_MEMORY_LOOPS_H_
