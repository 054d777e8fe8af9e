// CUDA kernels' environment on the CPU: force-included before everything else
// into the sources of kernels/cuda, which g++ then compiles against CUDA's real
// headers. A launch goes into the queue of its (fake) stream; when the stream
// runs it, every CUDA thread is a fiber. See README.md.
//
// Only what kernels/cuda may use is here. All else deliberately does not
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

// A fence's ordering, and its visibility to atomic operations, for tsan.
void FenceRelease();
void FenceAcquire();

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

// Replaces *p by next(*p); the old value.
template <class T, class Next>
T AtomicUpdate(T* p, Next next) {
  FenceAcquire();
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, next(old), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

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

inline void __threadfence() { zero::emulator::FenceRelease(); }
inline void __threadfence_block() { zero::emulator::FenceRelease(); }
inline void __threadfence_system() { zero::emulator::FenceRelease(); }

template <zero::emulator::AtomicInteger T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  zero::emulator::FenceAcquire();
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}
template <zero::emulator::AtomicInteger T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  zero::emulator::FenceAcquire();
  return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);
}
template <zero::emulator::AtomicInteger T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  return zero::emulator::AtomicUpdate(
      p, [value](T old) { return old < value ? value : old; });
}
template <zero::emulator::AtomicInteger T>
T atomicMin(T* p, std::type_identity_t<T> value) {
  return zero::emulator::AtomicUpdate(
      p, [value](T old) { return value < old ? value : old; });
}
template <zero::emulator::AtomicInteger T>
T atomicOr(T* p, std::type_identity_t<T> value) {
  zero::emulator::FenceAcquire();
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}
template <zero::emulator::AtomicInteger T>
T atomicAnd(T* p, std::type_identity_t<T> value) {
  zero::emulator::FenceAcquire();
  return __atomic_fetch_and(p, value, __ATOMIC_RELAXED);
}
inline unsigned atomicInc(unsigned* p, unsigned last) {
  return zero::emulator::AtomicUpdate(
      p, [last](unsigned old) { return old >= last ? 0 : old + 1; });
}
template <zero::emulator::AtomicInteger T>
T atomicCAS(T* p, std::type_identity_t<T> expected,
            std::type_identity_t<T> desired) {
  zero::emulator::FenceAcquire();
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  return expected;
}

// Hints to the caches.
#define ZERO_EMULATOR_LOAD(name) \
  template <class T>             \
  T name(const T* p) {           \
    return *p;                   \
  }
#define ZERO_EMULATOR_STORE(name)                  \
  template <class T>                               \
  void name(T* p, std::type_identity_t<T> value) { \
    *p = value;                                    \
  }
ZERO_EMULATOR_LOAD(__ldg)
ZERO_EMULATOR_LOAD(__ldca)
ZERO_EMULATOR_LOAD(__ldcg)
ZERO_EMULATOR_LOAD(__ldcs)
ZERO_EMULATOR_LOAD(__ldcv)
ZERO_EMULATOR_LOAD(__ldlu)
ZERO_EMULATOR_STORE(__stwb)
ZERO_EMULATOR_STORE(__stcg)
ZERO_EMULATOR_STORE(__stcs)
ZERO_EMULATOR_STORE(__stwt)
#undef ZERO_EMULATOR_LOAD
#undef ZERO_EMULATOR_STORE

// ---- Arithmetic -------------------------------------------------------------
// The host's functions under the device's names: exact where the GPU's are
// (rn), better than the GPU's where those are approximate.

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }

inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x < y ? y : x; }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x < y ? y : x; }
inline int64_t min(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t max(int64_t x, int64_t y) { return x < y ? y : x; }

inline __nv_bfloat162 __hfma2(__nv_bfloat162 x, __nv_bfloat162 y,
                              __nv_bfloat162 z) {
  const float2 a = __bfloat1622float2(x), b = __bfloat1622float2(y),
               c = __bfloat1622float2(z);
  return __floats2bfloat162_rn(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
  const float2 a = __half22float2(x), b = __half22float2(y),
               c = __half22float2(z);
  return __floats2half2_rn(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((uint64_t{x} * y) >> 32);
}
[[noreturn]] inline void __trap() { __builtin_trap(); }

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_EMULATOR_H_
