// Rows between 16-bit storage and fp32, vectorized: the edges of a product
// that is computed in fp32. Every function takes one row on one thread.
#ifndef ZERO_KERNELS_CPU_CONVERT_H_
#define ZERO_KERNELS_CPU_CONVERT_H_

#include <cstdint>

#include "kernels/ops.h"

namespace zero::cpu {

// dst = round(((sum + bias) + residual) + (accumulate ? dst : 0)). bias and
// residual are of dst's dtype; null: none.
struct RoundRowArgs {
  DType dtype;
  const float* sum;
  const void* bias = nullptr;
  const void* residual = nullptr;
  bool accumulate = false;
  void* dst;
  int64_t n = 0;
};
void RoundRow(const RoundRowArgs& args);

// dst += src, both of `dtype`, rounded to nearest even.
void AddToRow(DType dtype, const void* src, void* dst, int64_t n);

// out[j] = sum over i < rows of src[i, j] for j < cols, in fp32: rows are
// added in order within blocks of 128, and the blocks' sums in order, whatever
// the SIMD width or number of threads.
void ColumnSums(DType dtype, const void* src, int64_t rows, int64_t cols,
                int64_t ld, float* out);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_CONVERT_H_
