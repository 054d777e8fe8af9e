// Elements of device memory as kernels see them: conversions, sums over warps
// and blocks, and the dispatch from DType to a C++ type.
#ifndef ZERO_KERNELS_CUDA_ELEMENTS_CUH_
#define ZERO_KERNELS_CUDA_ELEMENTS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/dtype.h"

namespace zero::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(Bf16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(F16 x) { return __half2float(x); }

// Rounds to nearest even.
template <class T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline Bf16 FromFloat<Bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline F16 FromFloat<F16>(float x) {
  return __float2half_rn(x);
}

inline constexpr unsigned kWholeWarp = 0xffffffffu;
inline constexpr int kWarpSize = 32;

struct Plus {
  template <class T>
  __device__ static T Of(T a, T b) {
    return a + b;
  }
};
struct Larger {
  __device__ static float Of(float a, float b) { return fmaxf(a, b); }
};

// Reduces (sum or maximum) over every kLanes neighbouring lanes of the warp, by
// a fixed tree; each of the lanes gets the result.
template <class Op, int kLanes = kWarpSize, class T>
__device__ inline T WarpReduce(T value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = Op::Of(value, __shfl_xor_sync(kWholeWarp, value, offset));
  }
  return value;
}

// The same over a block of kThreads threads (x only). `scratch`: shared,
// kThreads / 32 elements. Ends with a barrier, so that scratch may be used
// again at once.
template <class Op, int kThreads, class T>
__device__ inline T BlockReduce(T value, T* scratch) {
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024);
  constexpr int kWarps = kThreads / kWarpSize;
  value = WarpReduce<Op>(value);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  T result = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    result = Op::Of(result, scratch[warp]);
  }
  __syncthreads();
  return result;
}

}  // namespace zero::cuda

// Runs the statement with `Type` a name for the element type of `dtype`: fp32,
// bf16 or fp16.
#define ZERO_CUDA_WITH_FLOAT_TYPE(dtype, Type, ...)        \
  do {                                                     \
    const ::zero::DType zero_dtype = (dtype);              \
    if (zero_dtype == ::zero::DType::kF32) {               \
      using Type = float;                                  \
      __VA_ARGS__;                                         \
    } else if (zero_dtype == ::zero::DType::kBF16) {       \
      using Type = ::zero::cuda::Bf16;                     \
      __VA_ARGS__;                                         \
    } else {                                               \
      ZERO_CHECK(zero_dtype == ::zero::DType::kF16)        \
          << zero_dtype << " is not a type of parameters"; \
      using Type = ::zero::cuda::F16;                      \
      __VA_ARGS__;                                         \
    }                                                      \
  } while (false)

#endif  // ZERO_KERNELS_CUDA_ELEMENTS_CUH_
