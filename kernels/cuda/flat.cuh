// Element-wise passes over flat spans and over rows: which thread works on
// which elements. A thread takes a slice of a few neighbours, in 16-byte
// accesses if addresses allow, else one by one, with the same bits.
//
// A pass is a struct `Op` of pointers and constants, given to the kernel by
// value, with a method that does one slice:
//
//   template <bool kWhole> __device__ void Run(const Slice<N>& slice) const;
//
// in which loads of several operands come before the first use of any, so that
// they are in flight together.
#ifndef ZERO_KERNELS_CUDA_FLAT_CUH_
#define ZERO_KERNELS_CUDA_FLAT_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/check.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/ops.h"
#include "kernels/sizes.h"

namespace zero::cuda {

// The elements [base + from, base + to) of N neighbours; base is a multiple of
// N. A whole slice has all N, at addresses aligned for vector access.
template <int N>
struct Slice {
  int64_t base;
  int from;
  int to;

  __device__ bool Has(int k) const { return k >= from && k < to; }
};

// The part of [begin, end) that is in the slice at `base`.
template <int N>
__device__ inline Slice<N> SliceOf(int64_t base, int64_t begin, int64_t end) {
  return {base, static_cast<int>(begin > base ? begin - base : 0),
          static_cast<int>(end - base < N ? end - base : N)};
}
template <int N>
__device__ inline bool IsFull(const Slice<N>& slice) {
  return slice.from == 0 && slice.to == N;
}

// N elements as the machine moves them: 16 bytes at a time, or 8.
template <class T, int N>
struct Packed {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(kBytes % sizeof(Word) == 0);

  union {
    Word words[kWords];
    T x[N];
  };
  __device__ Packed() {}
};

// Loads the slice of p without converting it, so that loads do not wait for
// each other. Elements beyond a partial slice are zeros.
template <bool kWhole, int N, class T>
__device__ inline Packed<T, N> Load(const T* p, const Slice<N>& slice) {
  Packed<T, N> packed;
  p += slice.base;
  if constexpr (kWhole) {
    using Word = typename Packed<T, N>::Word;
#pragma unroll
    for (int w = 0; w < Packed<T, N>::kWords; ++w) {
      packed.words[w] = reinterpret_cast<const Word*>(p)[w];
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      packed.x[k] = slice.Has(k) ? p[k] : T{};
    }
  }
  return packed;
}

// Stores go to L2 anyway; __stcg keeps nvcc from splitting them.
template <bool kWhole, int N, class T>
__device__ inline void Store(T* p, const Slice<N>& slice,
                             const Packed<T, N>& packed) {
  p += slice.base;
  if constexpr (kWhole) {
    using Word = typename Packed<T, N>::Word;
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

// Bytes to which the base pointer of a span must be aligned for whole slices.
template <int N>
inline bool IsSliceAligned(const void* p, DType dtype) {
  const uintptr_t bytes = std::min<uintptr_t>(N * DTypeBytes(dtype), 16);
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Finds the span that a block works on, if one launch covers several spans.
// first_block[0 .. count) begins with 0 and grows; returns the last index whose
// value is at most `block`.
__device__ inline int FindSpan(const uint32_t* first_block, int count,
                               uint32_t block) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

inline constexpr int kFlatThreads = 256;

// Elements of a slice of the passes below: 16 bytes of a 16-bit type.
inline constexpr int kFlatElems = 8;

template <class Op>
__global__ void __launch_bounds__(kFlatThreads)
    FlatKernel(Op op, int64_t size, bool aligned) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * kFlatThreads + threadIdx.x;
  const Slice<kFlatElems> slice =
      SliceOf<kFlatElems>(index * kFlatElems, 0, size);
  if (slice.to <= 0) return;
  if (aligned && IsFull(slice)) {
    op.template Run<true>(slice);
  } else {
    op.template Run<false>(slice);
  }
}

// Calls op.Run over [0, size). `aligned`: all its spans are IsSliceAligned.
template <class Op>
void MapFlat(cudaStream_t stream, int64_t size, bool aligned, const Op& op) {
  constexpr int64_t kElems = int64_t{kFlatThreads} * kFlatElems;
  Launch(FlatKernel<Op>, NumBlocks(size, kElems), kFlatThreads, 0, stream, op,
         size, aligned);
}

// dst[i] = Fn::Of(src[0][i], src[1][i], ...) in fp32.
template <class Fn, class D, class S, int kNum>
struct SpanPass {
  D* dst;
  const S* src[kNum];

  template <bool kWhole>
  __device__ void Run(const Slice<kFlatElems>& slice) const {
    Packed<S, kFlatElems> in[kNum];
#pragma unroll
    for (int i = 0; i < kNum; ++i) in[i] = Load<kWhole>(src[i], slice);
    Packed<D, kFlatElems> out;
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) {
      float x[kNum];
#pragma unroll
      for (int i = 0; i < kNum; ++i) x[i] = ToFloat(in[i].x[k]);
      out.x[k] = FromFloat<D>(Fn::Of(x));
    }
    Store<kWhole>(dst, slice, out);
  }
};

// The same for spans of one dtype. dst may be one of src.
template <class Fn, class... Src>
void MapSpans(cudaStream_t stream, const Vector& dst, const Src&... src) {
  const bool aligned = (IsSliceAligned<kFlatElems>(dst.data, dst.dtype) &&
                        ... && IsSliceAligned<kFlatElems>(src.data, src.dtype));
  ZERO_CUDA_WITH_FLOAT_TYPE(dst.dtype, T,
                            MapFlat(stream, dst.size, aligned,
                                    SpanPass<Fn, T, T, sizeof...(src)>{
                                        static_cast<T*>(dst.data),
                                        {static_cast<const T*>(src.data)...}}));
}

template <class Op>
__global__ void __launch_bounds__(kFlatThreads)
    RowsKernel(Op op, uint32_t num_slices, uint32_t slices_per_row,
               int64_t cols, bool aligned) {
  const uint32_t index = blockIdx.x * kFlatThreads + threadIdx.x;
  if (index >= num_slices) return;
  const uint32_t row = index / slices_per_row;
  const int64_t base =
      static_cast<int64_t>(index - row * slices_per_row) * kFlatElems;
  const Slice<kFlatElems> slice = SliceOf<kFlatElems>(base, 0, cols);
  if (aligned && IsFull(slice)) {
    op.template Run<true>(row, slice);
  } else {
    op.template Run<false>(row, slice);
  }
}

// Calls op.Run(row, slice) over rows x cols. `aligned`: whole slices of every
// row of every operand are aligned for vector access.
template <class Op>
void MapRows(cudaStream_t stream, int64_t rows, int64_t cols, bool aligned,
             const Op& op) {
  const int64_t slices_per_row = CeilDiv(cols, kFlatElems);
  const int64_t num_slices = rows * slices_per_row;
  // Threads of the last block count on to its end, in 32 bits.
  ZERO_CHECK_LE(num_slices, (int64_t{1} << 32) - kFlatThreads)
      << "slices of a matrix";
  Launch(RowsKernel<Op>, NumBlocks(num_slices, kFlatThreads), kFlatThreads, 0,
         stream, op, static_cast<uint32_t>(num_slices),
         static_cast<uint32_t>(slices_per_row), cols, aligned);
}

// Whether every row may begin with a whole slice.
inline bool AreRowsAligned(const ConstMatrix& x) {
  return IsSliceAligned<kFlatElems>(x.data, x.dtype) &&
         x.ld * static_cast<int64_t>(DTypeBytes(x.dtype)) % 16 == 0;
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_FLAT_CUH_
