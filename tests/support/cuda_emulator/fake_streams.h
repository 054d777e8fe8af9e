// Queues of the fake CUDA runtime, for fake libraries that add work to a
// stream.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_STREAMS_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_STREAMS_H_

#include <cuda_runtime_api.h>

#include <functional>

namespace zero::emulator {

// Adds `work` to the queue: it runs when a thread waits, on that thread, after
// everything before it on this stream, while no other work runs. It must not
// call CUDA or block.
// Errors: cudaErrorInvalidResourceHandle if there is no such stream.
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);

// The same, but not before ready() is true: asked under the same lock, again
// after anything was queued or has run. For operations of several streams.
cudaError_t EnqueueWhen(cudaStream_t stream, std::function<bool()> ready,
                        std::function<void()> work);

// Counts a call of `name`, and returns whether FailCall makes it fail; for the
// functions of a fake library.
cudaError_t Called(const char* name);

}  // namespace zero::emulator

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_STREAMS_H_
