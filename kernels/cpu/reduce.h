// The deterministic sum of squares, for kernels that need norms (lamb.cc).
#ifndef ZERO_KERNELS_CPU_REDUCE_H_
#define ZERO_KERNELS_CPU_REDUCE_H_

#include "kernels/ops.h"

namespace zero::cpu {

// Sum of squares of src in float64, with up to `num_threads` threads.
// Order: blocks of 64 elements, each in eight lanes (element k in lane k % 8)
// that are added as ((0+1)+(2+3))+((4+5)+(6+7)); block sums in order within
// runs of 256 blocks; runs in order. The same bits for any number of threads
// and on every SIMD target.
double SumSquares(int num_threads, const ConstVector& src);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_REDUCE_H_
