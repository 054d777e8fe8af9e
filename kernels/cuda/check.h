// Device faults go through one macro, which names the call, its place and the
// device. The caller that runs the rank names the rank
// (engine/comm/local_ranks).
#ifndef ZERO_KERNELS_CUDA_CHECK_H_
#define ZERO_KERNELS_CUDA_CHECK_H_

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace zero::cuda {

// A fault of the device or of a library on it. Its context cannot be trusted
// afterwards: the rank ends.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws DeviceError: "cuda:0: cudaMalloc(&p, n) at device.cc:12: out of
// memory (cudaErrorMemoryAllocation)".
[[noreturn]] void ThrowDeviceError(const char* call, const char* file, int line,
                                   const std::string& what);
[[noreturn]] void ThrowCudaError(const char* call, const char* file, int line,
                                 cudaError_t error);

}  // namespace zero::cuda

#define ZERO_CUDA_CHECK(call)                                 \
  do {                                                        \
    const cudaError_t zero_cuda_error = (call);               \
    if (zero_cuda_error != cudaSuccess) {                     \
      ::zero::cuda::ThrowCudaError(#call, __FILE__, __LINE__, \
                                   zero_cuda_error);          \
    }                                                         \
  } while (false)

#endif  // ZERO_KERNELS_CUDA_CHECK_H_
