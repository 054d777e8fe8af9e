#include "kernels/cuda/check.h"

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace zero::cuda {

void ThrowDeviceError(const char* call, const char* file, int line,
                      const std::string& what) {
  int device = -1;
  cudaGetDevice(&device);
  const char* slash = std::strrchr(file, '/');
  throw DeviceError(absl::StrCat("cuda:", device, ": ", call, " at ",
                                 slash == nullptr ? file : slash + 1, ":", line,
                                 ": ", what));
}

void ThrowCudaError(const char* call, const char* file, int line,
                    cudaError_t error) {
  ThrowDeviceError(call, file, line,
                   absl::StrCat(cudaGetErrorString(error), " (",
                                cudaGetErrorName(error), ")"));
}

}  // namespace zero::cuda
