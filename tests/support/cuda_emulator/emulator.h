// CUDA kernels' environment on the CPU: force-included before everything else
// into the sources of kernels/cuda, which g++ then compiles against CUDA's real
// headers. A launch goes into the queue of its (fake) stream; when the stream
// runs it, every CUDA thread is a fiber. See README.md.
//
// Only what kernels/cuda and the emulator's test use is here; an intrinsic that
// a kernel needs is added next to similar ones. These deliberately do not
// compile: float atomics (their sums depend on timing), __shared__ (use
// SHARED_ARRAY), __activemask (its result is not guaranteed).
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_EMULATOR_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_EMULATOR_H_

#include <cuda_runtime.h>
// cuda_runtime.h comes first: the others expect its attributes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/cuda/check.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ "use SHARED_ARRAY or DYNAMIC_SHARED" ~

// The registers of the running thread.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

namespace zero::emulator {

// A grid and the place in the source that launches it.
struct Grid : dim3 {
  template <std::convertible_to<dim3> D>
  Grid(const D& dim, const char* file = __builtin_FILE(),
       int line = __builtin_LINE())
      : dim3(dim), file(file), line(line) {}
  Grid(unsigned x, unsigned y, unsigned z = 1,
       const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : dim3(x, y, z), file(file), line(line) {}

  const char* file;
  int line;
};

// Queues a kernel: `body` is what each thread calls.
cudaError_t EnqueueKernel(cudaStream_t stream, const Grid& grid, dim3 block,
                          size_t shared_bytes, std::function<void()> body);

void BlockBarrier(const char* file, int line);

// Waits for all lanes of `mask`; every lane then has what lane `source` gave
// (kShuffle), the bits of lanes whose value is not 0 (kBallot), or 0 (kSync).
enum class WarpOp : uint8_t { kSync, kShuffle, kBallot };
uint64_t WarpExchange(WarpOp op, unsigned mask, uint64_t value, int source,
                      const char* file, int line);
int LaneId();

// The block's array of this declaration; `key` is its own address.
void* SharedArray(const void* key, size_t bytes, size_t alignment);
void* DynamicShared();

template <class T>
T Shuffle(unsigned mask, T value, int source, const char* file, int line) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = WarpExchange(WarpOp::kShuffle, mask, bits, source, file, line);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

template <class T>
concept AtomicInteger = std::same_as<T, int> || std::same_as<T, unsigned> ||
    std::same_as<T, unsigned long long>;

}  // namespace zero::emulator

// ---- The three names of kernels/cuda/launch.h -----------------------------

#define SHARED_ARRAY(T, name, n)                             \
  static const char zero_key_of_##name = 0;                  \
  T(&name)                                                   \
  [n] = *static_cast<T(*)[n]>(::zero::emulator::SharedArray( \
      &zero_key_of_##name, sizeof(T) * (n), alignof(T)))

#define DYNAMIC_SHARED(T, name) \
  T* const name = static_cast<T*>(::zero::emulator::DynamicShared())

namespace zero::cuda {

template <class... Params, class... Args>
void Launch(void (*kernel)(Params...), emulator::Grid grid, dim3 block,
            size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  using Arguments = std::tuple<std::decay_t<Params>...>;
  static_assert(sizeof(Arguments) <= 4096, "kernel parameters over 4 KB");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  auto arguments = std::make_shared<const Arguments>(
      static_cast<std::decay_t<Params>>(args)...);
  ZERO_CUDA_CHECK(emulator::EnqueueKernel(
      stream, grid, block, shared_bytes,
      [kernel, arguments] { std::apply(kernel, *arguments); }));
}

}  // namespace zero::cuda

// ---- Barriers, shuffles, votes --------------------------------------------

// A call's source position, as its last two arguments.
#define ZERO_EMULATOR_PLACE \
  const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(ZERO_EMULATOR_PLACE) {
  zero::emulator::BlockBarrier(file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, ZERO_EMULATOR_PLACE) {
  zero::emulator::WarpExchange(zero::emulator::WarpOp::kSync, mask, 0, 0, file,
                               line);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              ZERO_EMULATOR_PLACE) {
  const int first = zero::emulator::LaneId() & ~(width - 1);
  return zero::emulator::Shuffle(mask, value, first + (source & (width - 1)),
                                 file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 ZERO_EMULATOR_PLACE) {
  const int lane = zero::emulator::LaneId();
  const int source = lane - static_cast<int>(delta);
  return zero::emulator::Shuffle(
      mask, value, source < (lane & ~(width - 1)) ? lane : source, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   ZERO_EMULATOR_PLACE) {
  const int lane = zero::emulator::LaneId();
  const int source = lane + static_cast<int>(delta);
  return zero::emulator::Shuffle(
      mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  ZERO_EMULATOR_PLACE) {
  const int lane = zero::emulator::LaneId();
  const int source = lane ^ lane_mask;
  return zero::emulator::Shuffle(
      mask, value, source > (lane | (width - 1)) ? lane : source, file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              ZERO_EMULATOR_PLACE) {
  return static_cast<unsigned>(
      zero::emulator::WarpExchange(zero::emulator::WarpOp::kBallot, mask,
                                   predicate != 0 ? 1 : 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, ZERO_EMULATOR_PLACE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, ZERO_EMULATOR_PLACE) {
  return __ballot_sync(mask, predicate, file, line) == mask;
}

// ---- Memory ----------------------------------------------------------------

template <zero::emulator::AtomicInteger T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

// A hint to the caches.
template <class T>
void __stcg(T* p, std::type_identity_t<T> value) {
  *p = value;
}

// ---- Arithmetic -------------------------------------------------------------
// The host's functions under the device's names: exact, where the GPU's are
// approximate.

inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline int __popc(unsigned x) { return std::popcount(x); }

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_EMULATOR_H_
