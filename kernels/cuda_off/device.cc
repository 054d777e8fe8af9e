// Linked where CUDA is not built.
#include "kernels/device.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zero {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index) {
  return absl::UnimplementedError(absl::StrCat(
      "device cuda:", index,
      ": this binary was built without CUDA; install the CUDA toolkit (nvcc "
      "on PATH), run tools/configure and ninja again, or use --device cpu"));
}

}  // namespace zero
