// The emulated multiprocessor: runs one grid on the calling thread.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_MACHINE_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_MACHINE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace zero::emulator {

struct KernelLaunch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  const char* file = "";  // where it was launched
  int line = 0;
};

// Errors: a misuse of barriers, shuffles or shared memory prints the mistake,
//         launch, block and thread, and aborts.
// Threads: one kernel at a time in the program; callers hold a lock.
void RunKernel(const KernelLaunch& launch, const std::function<void()>& body);

}  // namespace zero::emulator

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_MACHINE_H_
