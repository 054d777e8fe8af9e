#include "tools/bench/memory_loops.h"

#include <omp.h>

#include <algorithm>

// The widest vectors of the machine, as the compiler makes them.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define ZERO_BENCH_CLONES \
  __attribute__((noinline, target_clones("avx512f", "avx2", "default")))
#else
#define ZERO_BENCH_CLONES __attribute__((noinline))
#endif

namespace zero::bench {
namespace {

ZERO_BENCH_CLONES void Copy(const float* __restrict in, float* __restrict out,
                            int64_t n) {
  // Not recognized as memcpy, which may use streaming stores.
  for (int64_t i = 0; i < n; ++i) out[i] = in[i] * 1.0625f;
}

ZERO_BENCH_CLONES int32_t Read(const float* __restrict in, int64_t n) {
  const int32_t* __restrict bits = reinterpret_cast<const int32_t*>(in);
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum ^= bits[i];
  return sum;
}

ZERO_BENCH_CLONES void Write(float* __restrict out, float value, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = value;
}

ZERO_BENCH_CLONES void Update(float* __restrict p, const float* __restrict g,
                              float* __restrict m, float* __restrict v,
                              int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    m[i] += g[i];
    v[i] += g[i];
    p[i] += g[i];
  }
}

// Not restrict: out may be a or b, at the same place.
ZERO_BENCH_CLONES void Add(const float* a, const float* b, float* out,
                           int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

// Calls fn(begin, end) with one contiguous piece of [0, n) per thread.
template <class Fn>
void OnThreads(int threads, int64_t n, const Fn& fn) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), rank = omp_get_thread_num();
    fn(n / 16 * rank / team * 16,
       rank + 1 == team ? n : n / 16 * (rank + 1) / team * 16);
  }
}

}  // namespace

void CopyLoop(int threads, const float* in, int64_t num_in, float* out,
              int64_t num_out) {
  // A piece of one and the same share of the other, so that reads and writes
  // are mixed as in a kernel.
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = std::max(num_in, num_out) / kPiece + 1;
  OnThreads(threads, pieces * 16, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin / 16; piece < end / 16; ++piece) {
      const int64_t r0 = num_in * piece / pieces;
      const int64_t r1 = num_in * (piece + 1) / pieces;
      const int64_t w0 = num_out * piece / pieces;
      const int64_t w1 = num_out * (piece + 1) / pieces;
      const int64_t both = std::min(r1 - r0, w1 - w0);
      Copy(in + r0, out + w0, both);
      if (r1 - r0 > both) {
        // Kept, though nobody wants the sum.
        asm volatile("" ::"r"(Read(in + r0 + both, r1 - r0 - both)));
      }
      if (w1 - w0 > both) Write(out + w0 + both, 1.0f, w1 - w0 - both);
    }
  });
}

void UpdateLoop(int threads, float* p, const float* g, float* m, float* v,
                int64_t n) {
  OnThreads(threads, n, [&](int64_t begin, int64_t end) {
    Update(p + begin, g + begin, m + begin, v + begin, end - begin);
  });
}

void SumLoop(absl::Span<const float* const> in, float* out, int64_t n) {
  // More than two are added in pieces that stay in the first cache, beside
  // the output: that may be one of the later inputs.
  constexpr int64_t kPiece = 1024;
  float sum[kPiece];
  if (in.size() == 2) return Add(in[0], in[1], out, n);
  for (int64_t i = 0; i < n; i += kPiece) {
    const int64_t piece = std::min(kPiece, n - i);
    std::copy_n(in[0] + i, piece, sum);
    for (const float* one : in.subspan(1)) Add(sum, one + i, sum, piece);
    std::copy_n(sum, piece, out + i);
  }
}

}  // namespace zero::bench
