// The ways of the emulated GPU: orders of the threads of a block.
#include <cuda_runtime_api.h>

#include <new>

#include "tests/kernels/kernel_test.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/waiting_ops.h"

namespace zero {
namespace {

using emulator::Order;

// tsan sees a race in any order, and asan an access: one order suffices, also
// for counting lines.
std::vector<Order> Orders() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || \
    defined(ZERO_ONE_ORDER)
  return {Order::kRandom};
#else
  return {Order::kForward, Order::kReverse, Order::kRandom};
#endif
}

const char* NameOf(Order order) {
  return order == Order::kForward   ? "emulated, threads forward"
         : order == Order::kReverse ? "emulated, threads in reverse"
                                    : "emulated, threads in random order";
}

void ForEach(const std::vector<Order>& orders,
             const std::function<void(const Path&)>& fn) {
  for (const Order order : orders) {
    emulator::SetOrder(order);
    auto device = MakeCudaDevice(0);
    ASSERT_TRUE(device.ok()) << device.status();
    // Waits for every op, so that the test may read its result.
    WaitingOps waiting((*device)->ops());
    const auto stream = (*device)->MakeStream(StreamRole::kCompute);
    SCOPED_TRACE(NameOf(order));
    fn({NameOf(order), **device, waiting, *stream});
  }
}

}  // namespace

void* AllocateTestMemory(size_t bytes) {
  void* data = nullptr;
  if (cudaMallocManaged(&data, bytes == 0 ? 1 : bytes) != cudaSuccess) {
    throw std::bad_alloc();
  }
  return data;
}
void FreeTestMemory(void* data) { cudaFree(data); }

void ForEachPath(const std::function<void(const Path&)>& fn) {
  ForEach(Orders(), fn);
}
void ForEachMatmulPath(const std::function<void(const Path&)>& fn) {
  ForEachPath(fn);
}
void OnPath(const std::function<void(const Path&)>& fn) {
  ForEach({Order::kRandom}, fn);
}

}  // namespace zero
