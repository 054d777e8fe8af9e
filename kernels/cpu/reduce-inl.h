// The deterministic sum of squares, for SumSquares (reduce.cc) and for kernels
// that need norms (lamb.cc).
//
// Order: blocks of 64 elements, each in eight lanes (element k in lane k % 8)
// that are added as ((0+1)+(2+3))+((4+5)+(6+7)); block sums in order within
// runs of 256 blocks; runs in order. The same bits for any number of threads
// and on every SIMD target.
#include <algorithm>
#include <cstdint>

#include "kernels/cpu/simd-inl.h"

#ifndef ZERO_KERNELS_CPU_REDUCE_INL_H_ONCE_
#define ZERO_KERNELS_CPU_REDUCE_INL_H_ONCE_
namespace zero::cpu {

inline constexpr int64_t kSquareBlock = 64;
inline constexpr int64_t kRunElements = 256 * kSquareBlock;

}  // namespace zero::cpu
#endif  // ZERO_KERNELS_CPU_REDUCE_INL_H_ONCE_

#if defined(ZERO_KERNELS_CPU_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_REDUCE_INL_H_
#undef ZERO_KERNELS_CPU_REDUCE_INL_H_
#else
#define ZERO_KERNELS_CPU_REDUCE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

using DD = hn::CappedTag<double, 8>;
using VD = hn::Vec<DD>;

// The eight lanes of a block, in as few vectors as the target has.
inline constexpr DD dd;
inline constexpr size_t kVectors = 8 / hn::MaxLanes(DD());

// The sum of the squares of 64 elements.
HWY_INLINE double BlockSquares(const float* HWY_RESTRICT x) {
  const hn::Rebind<float, DD> half;
  const size_t lanes = hn::Lanes(dd);
  VD sums[kVectors];
#pragma GCC unroll 8
  for (size_t j = 0; j < kVectors; ++j) sums[j] = hn::Zero(dd);
#pragma GCC unroll 8
  for (size_t k = 0; k < kSquareBlock; k += 8) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kVectors; ++j) {
      const VD v = hn::PromoteTo(dd, hn::LoadU(half, x + k + j * lanes));
      sums[j] = Fma(v, v, sums[j]);
    }
  }
  HWY_ALIGN double sum[8];
#pragma GCC unroll 8
  for (size_t j = 0; j < kVectors; ++j) {
    hn::Store(sums[j], dd, sum + j * lanes);
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) +
         ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// The first n <= 64 elements at src as fp32, the others zero.
template <class T>
HWY_INLINE void BlockToF32(const T* src, int64_t n, float* HWY_RESTRICT dst) {
  ConvertSpan(src, dst, 0, n);
  std::fill(dst + n, dst + kSquareBlock, 0.0f);
}

// Returns sum + the squares of src[begin, end), added up in blocks that start
// at `begin`. Gives the same for a run as for its parts, if they are cut at
// blocks.
template <class T>
HWY_INLINE double AddSquares(double sum, const T* src, int64_t begin,
                             int64_t end) {
  HWY_ALIGN float block[kSquareBlock];
  for (int64_t i = begin; i < end; i += kSquareBlock) {
    const float* x = block;
    if (sizeof(T) == sizeof(float) && i + kSquareBlock <= end) {
      x = reinterpret_cast<const float*>(src + i);
    } else {
      BlockToF32(src + i, std::min(kSquareBlock, end - i), block);
    }
    sum += BlockSquares(x);
  }
  return sum;
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_REDUCE_INL_H_
