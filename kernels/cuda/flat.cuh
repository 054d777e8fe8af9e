// Element-wise passes over flat spans and over rows: which thread works on
// which slice.
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

#include <cstdint>

#include "kernels/check.h"
#include "kernels/cuda/slices.cuh"
#include "kernels/ops.h"
#include "kernels/sizes.h"

namespace zero::cuda {

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
  const auto slice = SliceOf<kFlatElems>(index * kFlatElems, size);
  if (slice.IsEmpty()) return;
  if (aligned && slice.IsWhole()) {
    op.template Run<true>(slice);
  } else {
    op.template Run<false>(slice);
  }
}

// Calls op.Run over [0, size). `aligned`: all its spans are (IsAligned).
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
  const bool aligned = (IsAligned(dst.data) && ... && IsAligned(src.data));
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
  const auto slice = SliceOf<kFlatElems>(base, cols);
  if (aligned && slice.IsWhole()) {
    op.template Run<true>(row, slice);
  } else {
    op.template Run<false>(row, slice);
  }
}

// Calls op.Run(row, slice) over rows x cols. `aligned`: all rows are
// IsAligned.
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

inline bool AreRowsAligned(const ConstMatrix& x) {
  return IsAligned(x.data, x.dtype, x.ld);
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_FLAT_CUH_
