// Slices: the few neighbouring elements that a thread works on at a time, moved
// as words of 16 or 8 bytes if addresses allow, else one by one, with the same
// bits.
#ifndef ZERO_KERNELS_CUDA_SLICES_CUH_
#define ZERO_KERNELS_CUDA_SLICES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/elements.cuh"
#include "kernels/dtype.h"

namespace zero::cuda {

// The elements [base + from, base + to) of N neighbours at `base`; none if `to`
// is not above `from`.
template <int N>
struct Slice {
  int64_t base;
  int from = 0;
  int to = N;

  __device__ bool Has(int k) const { return k >= from && k < to; }
  __device__ bool IsEmpty() const { return to <= from; }
  __device__ bool IsWhole() const { return from == 0 && to == N; }
  // None of its elements unless `exists`.
  __device__ Slice If(bool exists) const {
    return {base, from, exists ? to : 0};
  }
};

// The part before `end` of the slice at `base`.
template <int N, class Int>
__device__ inline Slice<N> SliceOf(Int base, std::type_identity_t<Int> end) {
  return {base, 0, static_cast<int>(end - base < N ? end - base : N)};
}

// The part of [begin, end) in it.
template <int N>
__device__ inline Slice<N> SliceOf(int64_t base, int64_t begin, int64_t end) {
  return {base, static_cast<int>(begin > base ? begin - base : 0),
          SliceOf<N>(base, end).to};
}

// N elements as the machine moves them.
template <class T, int N>
struct Packed {
  static constexpr int kSize = N;
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(kBytes % sizeof(Word) == 0);

  union {
    Word words[kWords];
    T x[N];
  };
};

// As many elements as one access moves.
template <class T>
using Chunk = Packed<T, 16 / sizeof(T)>;

// Loads the slice of p, with zeros beyond it, without converting it, so that
// loads do not wait for each other.
// REQUIRES: with kWhole, the slice is whole, at an aligned address, or empty.
template <bool kWhole, int N, class T>
__device__ inline Packed<T, N> Load(const T* p, const Slice<N>& slice) {
  using Word = typename Packed<T, N>::Word;
  Packed<T, N> packed;
  p += slice.base;
  if constexpr (kWhole) {
#pragma unroll
    for (int w = 0; w < Packed<T, N>::kWords; ++w) {
      packed.words[w] =
          slice.IsEmpty() ? Word{} : reinterpret_cast<const Word*>(p)[w];
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) packed.x[k] = slice.Has(k) ? p[k] : T{};
  }
  return packed;
}

// Stores go to L2 anyway; __stcg keeps nvcc from splitting them.
template <bool kWhole, int N, class T>
__device__ inline void Store(T* p, const Slice<N>& slice,
                             const Packed<T, N>& packed) {
  using Word = typename Packed<T, N>::Word;
  p += slice.base;
  if constexpr (kWhole) {
    if (slice.IsEmpty()) return;
#pragma unroll
    for (int w = 0; w < Packed<T, N>::kWords; ++w) {
      __stcg(reinterpret_cast<Word*>(p) + w, packed.words[w]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (slice.Has(k)) p[k] = packed.x[k];
    }
  }
}

// Whether words of 16 bytes may be moved at `p`, and at any multiple of the
// distances, in elements of `dtype`, from it. Called on the host.
inline bool IsAligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
template <class... Distances>
bool IsAligned(const void* p, DType dtype, Distances... distances) {
  const int64_t bytes = static_cast<int64_t>(DTypeBytes(dtype));
  return IsAligned(p) && ((distances * bytes % 16 == 0) && ...);
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_SLICES_CUH_
