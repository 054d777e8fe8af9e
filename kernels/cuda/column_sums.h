// Column sums of a matrix: gradients of biases.
#ifndef ZERO_KERNELS_CUDA_COLUMN_SUMS_H_
#define ZERO_KERNELS_CUDA_COLUMN_SUMS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace zero::cuda {

// out[j] (+)= sum over i of dy[i, j], in fp32: first over fixed blocks of rows,
// then over the blocks in order. Bits depend on the shape and the values alone.
// Shapes: dy [M, N] of fp32, bf16 or fp16; out [N] of fp32 or dy's dtype,
//         rounded once. M = 0 gives zeros.
// REQUIRES: `workspace` is 4-byte aligned device memory of ColumnSumBytes
//           (workspace.h).
void ColumnSums(cudaStream_t stream, const ConstMatrix& dy, const Vector& out,
                bool accumulate, void* workspace);

// The second half of a sum over rows: out[j] (+)= partials[0, j] +
// partials[1, j] + ..., in an order fixed by `count`, rounded once.
// Shapes: partials [count, N], contiguous; out [N] of fp32, bf16 or fp16.
void SumPartials(cudaStream_t stream, const float* partials, int64_t count,
                 const Vector& out, bool accumulate);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_COLUMN_SUMS_H_
