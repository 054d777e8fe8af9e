// GELU over one contiguous span on the calling thread, for kernels that fuse
// it behind a matrix product (linear.cc).
//
// Accuracy in fp32, relative to the result: kErf 4 ulp everywhere; kTanh 4 ulp
// for x >= -1 and 4 + 2 |2u| ulp below, where 2u is the argument of the
// exponential (26 ulp at x = -4, a result of -7e-5).
#ifndef ZERO_KERNELS_CPU_GELU_H_
#define ZERO_KERNELS_CPU_GELU_H_

#include <cstdint>

#include "kernels/ops.h"

namespace zero::cpu {

// y[i] = gelu(x[i]) for i in [begin, end). x and y of one float dtype; y may
// alias x.
void GeluForwardRange(Gelu kind, DType dtype, const void* x, void* y,
                      int64_t begin, int64_t end);

// dx[i] = dy[i] * gelu'(x[i]) for i in [begin, end). dx may alias dy or x.
void GeluBackwardRange(Gelu kind, DType dtype, const void* x, const void* dy,
                       void* dx, int64_t begin, int64_t end);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_GELU_H_
