#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/check.h"
#include "kernels/cuda/sort.h"
#include "kernels/cuda/workspace.h"

namespace zero::cuda {

void SortPairs(cudaStream_t stream, const int32_t* keys_in,
               const int32_t* values_in, int32_t* keys_out, int32_t* values_out,
               int64_t n, int key_bits, void* temp) {
  size_t temp_bytes = SortPairsTempBytes(n);
  ZERO_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
      temp, temp_bytes, reinterpret_cast<const uint32_t*>(keys_in),
      reinterpret_cast<uint32_t*>(keys_out), values_in, values_out,
      static_cast<int>(n), 0, key_bits, stream));
}

}  // namespace zero::cuda
