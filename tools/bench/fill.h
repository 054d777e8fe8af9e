// Input data: small random numbers, since zeros and denormals have their own
// speeds.
#ifndef ZERO_TOOLS_BENCH_FILL_H_
#define ZERO_TOOLS_BENCH_FILL_H_

#include <cstdint>

#include "kernels/check.h"
#include "kernels/dtype.h"

namespace zero::bench {

// Uniform values in [lowest, lowest + 1), the same on every run.
inline void FillRandom(void* data, DType dtype, int64_t size,
                       float lowest = -0.5f) {
  uint32_t state = 1;
  const auto next = [&state, lowest] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) * 0x1p-24f + lowest;
  };
  if (dtype == DType::kF32) {
    float* const to = static_cast<float*>(data);
    for (int64_t i = 0; i < size; ++i) to[i] = next();
  } else {
    ZERO_CHECK_EQ(dtype, DType::kBF16);
    uint16_t* const to = static_cast<uint16_t*>(data);
    for (int64_t i = 0; i < size; ++i) to[i] = F32ToBF16(next());
  }
}

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_FILL_H_
