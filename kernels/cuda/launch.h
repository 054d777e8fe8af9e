// The one place with <<<>>>: how kernels are launched and get shared memory.
// tests/support/cuda_emulator defines the same three names for the CPU, so that
// a .cu file compiles there too. Hence these rules for every kernel:
//
//   * shared memory only through SHARED_ARRAY and DYNAMIC_SHARED;
//   * no thread returns before a barrier or a shuffle of its block or warp;
//   * no cooperative groups, CUB or pipelines; PTX only under __CUDA_ARCH__
//     and with a C++ fallback; fmaxf, not max; no -use_fast_math;
//   * at most 1024 threads in a block, in multiples of 32.
#ifndef ZERO_KERNELS_CUDA_LAUNCH_H_
#define ZERO_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include "kernels/cuda/check.h"

#ifndef ZERO_CUDA_EMULATOR

// T name[n] in shared memory; n is a constant.
#define SHARED_ARRAY(T, name, n) __shared__ T name[n]

// T* name: the dynamic shared memory of the launch, 16-byte aligned.
#define DYNAMIC_SHARED(T, name)                                        \
  extern __shared__ __align__(16) unsigned char zero_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(zero_dynamic_shared)

#ifdef __CUDACC__
namespace zero::cuda {

// Launches `kernel` on `stream`; arguments are converted to the kernel's
// parameter types. A grid with an empty dimension launches nothing.
template <class... Params, class... Args>
void Launch(void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  // The driver grants more than 48 KiB of shared memory only on request.
  if (shared_bytes > 48 * 1024) {
    ZERO_CUDA_CHECK(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
        static_cast<int>(shared_bytes)));
  }
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Params>(args)...);
  ZERO_CUDA_CHECK(cudaGetLastError());
}

}  // namespace zero::cuda
#endif  // __CUDACC__
#endif  // ZERO_CUDA_EMULATOR

#endif  // ZERO_KERNELS_CUDA_LAUNCH_H_
