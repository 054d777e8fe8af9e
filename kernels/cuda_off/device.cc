// Linked if CUDA is not built.
#include "kernels/device.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zero {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index,
                                                       const CudaOptions&,
                                                       int) {
  return absl::UnimplementedError(absl::StrCat(
      "device cuda:", index,
      ": this program has no CUDA backend, since tools/configure found no nvcc "
      "or was told --cuda off; install the CUDA toolkit, run "
      "tools/configure and ninja, or use --device cpu"));
}

int NumCudaDevices() { return 0; }

}  // namespace zero
