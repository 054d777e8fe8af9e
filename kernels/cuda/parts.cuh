// Rows of any length at any address, a chunk at a time.
//
// Which thread owns which element, and so every order of summation, is the same
// for aligned and unaligned rows; only the instruction that moves a chunk
// differs. So bits do not depend on addresses.
#ifndef ZERO_KERNELS_CUDA_PARTS_CUH_
#define ZERO_KERNELS_CUDA_PARTS_CUH_

#include <cstdint>

#include "kernels/cuda/elements.cuh"

namespace zero::cuda {

// Whether rows of `width` elements, `stride` apart, consist of whole aligned
// chunks. Called on the host.
template <class T>
bool HasAlignedRows(const void* data, int64_t stride, int64_t width) {
  constexpr int64_t kSize = Chunk<T>::kSize;
  return IsChunkAligned(data) && stride % kSize == 0 && width % kSize == 0;
}

// The chunk at p, of which n elements exist; zeros beyond. n may be negative.
// REQUIRES: with kAligned, p is a multiple of 16 bytes and n of kSize.
template <bool kAligned, class T>
__device__ inline Chunk<T> LoadPart(const T* p, int64_t n) {
  Chunk<T> chunk;
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(&chunk) = make_uint4(0, 0, 0, 0);
    if (n > 0) chunk = LoadChunk(p);
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) {
      chunk.x[i] = i < n ? p[i] : FromFloat<T>(0);
    }
  }
  return chunk;
}
template <bool kAligned, class T>
__device__ inline void StorePart(T* p, const Chunk<T>& chunk, int64_t n) {
  if constexpr (kAligned) {
    if (n > 0) StoreChunk(p, chunk);
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) {
      if (i < n) p[i] = chunk.x[i];
    }
  }
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_PARTS_CUH_
