// A stable sort of keys with their values, on the device. It has its own file
// because it calls CUB, which no emulator runs: tests/support/cuda_emulator has
// a twin of it.
#ifndef ZERO_KERNELS_CUDA_SORT_H_
#define ZERO_KERNELS_CUDA_SORT_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace zero::cuda {

// Sorts n pairs by the low `key_bits` bits of the key; equal keys keep their
// order. The inputs are left as they are.
// REQUIRES: device memory; out may not overlap in; 0 < n < 2^31; temp is of
//           SortPairsTempBytes(n) bytes (workspace.h); 0 <= key < 2^key_bits,
//           key_bits > 0.
void SortPairs(cudaStream_t stream, const int32_t* keys_in,
               const int32_t* values_in, int32_t* keys_out, int32_t* values_out,
               int64_t n, int key_bits, void* temp);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_SORT_H_
