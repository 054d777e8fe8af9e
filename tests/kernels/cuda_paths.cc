// The way of a GPU. Without one every test is skipped, by name.
#include <cuda_runtime_api.h>

#include "tests/kernels/kernel_test.h"
#include "tests/support/waiting_ops.h"

namespace zero {

void* AllocateTestMemory(size_t bytes) {
  void* data = nullptr;
  if (cudaMallocManaged(&data, bytes + 1) != cudaSuccess) {
    throw std::bad_alloc();
  }
  return data;
}
void FreeTestMemory(void* data) { cudaFree(data); }

void ForEachPath(const std::function<void(const Path&)>& fn) {
  auto device = MakeCudaDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  // Waits for every op, so that the host may read its result.
  WaitingOps waiting((*device)->ops());
  const auto stream = (*device)->MakeStream(StreamRole::kCompute);
  SCOPED_TRACE((*device)->info().name);
  fn({"cuda:0", **device, waiting, *stream});
}

void ForEachMatmulPath(const std::function<void(const Path&)>& fn) {
  ForEachPath(fn);
}
void OnPath(const std::function<void(const Path&)>& fn) { ForEachPath(fn); }

}  // namespace zero
