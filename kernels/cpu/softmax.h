// Softmax cross-entropy of a row of logits, vectorized, on one thread.
#ifndef ZERO_KERNELS_CPU_SOFTMAX_H_
#define ZERO_KERNELS_CPU_SOFTMAX_H_

#include <cstdint>

#include "kernels/ops.h"

namespace zero::cpu {

// Adds logits[0..n) to the row's max and sum, in one pass. The sum of
// exponentials is fp32 within blocks of 1024 and float64 across them.
void AddToLossRow(const float* logits, int64_t n, LossRow* row);

// Replaces logits[0..n) by (softmax - onehot(target)) * scale, stored as
// `dtype` from their first byte on: fp32 in place, bf16 in the first half. A
// target outside [0, n) matches none of them.
void LossRowGradient(float* logits, int64_t n, const LossRow& row,
                     int64_t target, float scale, DType dtype);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_SOFTMAX_H_
