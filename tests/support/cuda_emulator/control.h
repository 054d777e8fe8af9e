// Settings and counters of the emulated GPU for tests. Everything is global:
// one machine, whose devices are used by all threads of the program.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_CONTROL_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_CONTROL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace zero::emulator {

// The order of a block's threads between two barriers, and of a grid's blocks.
// A running warp continues as far as it can before another one runs (kRandom:
// any thread may be next).
enum class Order { kForward, kReverse, kRandom };

// For kernels that start later. `seed` matters to kRandom alone.
void SetOrder(Order order, uint64_t seed = 1);

// How queued work of streams is interleaved when a thread waits: at random by
// this seed, half of the time as late as events allow.
void SetStreamSeed(uint64_t seed);

// Sets the number of devices (default: EMULATED_GPUS of the environment, or 2),
// before the first use of one.
void SetDeviceCount(int count);
// Sets the memory of each (default 8 GiB), from now on.
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
