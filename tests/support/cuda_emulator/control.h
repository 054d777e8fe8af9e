// What a test sets and asks of the emulated GPU. Everything is global: one
// machine, whose devices are used by all threads of the program.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_CONTROL_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_CONTROL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace zero::emulator {

// In which order the threads of a block run between two barriers, and the
// blocks of a grid one after the other. A warp that runs goes on as far as it
// can before another one is looked at (kRandom: any thread may be next).
enum class Order { kForward, kReverse, kRandom };

// For kernels that start later. `seed` matters to kRandom alone.
void SetOrder(Order order, uint64_t seed = 1);

// How queued work of streams is mixed when somebody waits: at random by this
// seed, half of the time as late as events allow.
void SetStreamSeed(uint64_t seed);

// How many devices there are (2 at first), before the first use of one.
void SetDeviceCount(int count);
// How much memory each has (8 GiB at first), from now on.
void SetDeviceMemory(int64_t bytes);

// The nth call from now on (1: the next) of the CUDA function `name` fails
// with `error`; of kernels, "launch".
void FailCall(const char* name, int nth, cudaError_t error);

// How often the CUDA function `name` has been called so far.
int64_t NumCalls(const char* name);

// Kernels that have run so far.
int64_t NumKernels();

}  // namespace zero::emulator

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_CONTROL_H_
