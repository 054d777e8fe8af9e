// One row of softmax cross-entropy, vectorized, on one thread.
#ifndef ZERO_KERNELS_CPU_SOFTMAX_H_
#define ZERO_KERNELS_CPU_SOFTMAX_H_

#include <cstdint>

#include "kernels/dtype.h"

namespace zero::cpu {

// Returns logsumexp(logits[0..n)) - logits[target]. The sum of exponentials is
// fp32 within blocks of 1024 and float64 across them.
//
// With `gradient`, replaces the row by (softmax - onehot(target)) * scale,
// stored as `dtype` from the row's first byte on: fp32 in place, bf16 in the
// first half. Without, the row is left as scratch.
double SoftmaxCrossEntropyRow(float* logits, int64_t n, int64_t target,
                              bool gradient, float scale, DType dtype);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_SOFTMAX_H_
