#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reduce.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

constexpr int64_t kBlock = 64;

using DD = hn::CappedTag<double, 8>;
using VD = hn::Vec<DD>;

// The eight lanes of a block, in as few vectors as the target has.
inline constexpr DD dd;
constexpr size_t kVectors = 8 / hn::MaxLanes(DD());

// The sum of the squares of 64 elements.
HWY_INLINE double BlockSquares(const float* HWY_RESTRICT x) {
  const hn::Rebind<float, DD> half;
  const size_t lanes = hn::Lanes(dd);
  VD sums[kVectors];
#pragma GCC unroll 8
  for (size_t j = 0; j < kVectors; ++j) sums[j] = hn::Zero(dd);
#pragma GCC unroll 8
  for (size_t k = 0; k < kBlock; k += 8) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kVectors; ++j) {
      const VD v = hn::PromoteTo(dd, hn::LoadU(half, x + k + j * lanes));
      sums[j] = Fma(v, v, sums[j]);
    }
  }
  HWY_ALIGN double sum[8];
#pragma GCC unroll 8
  for (size_t j = 0; j < kVectors; ++j) {
    hn::Store(sums[j], dd, sum + j * lanes);
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) +
         ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// The first n <= 64 elements at src as fp32, the others zero.
template <class T>
HWY_INLINE void BlockToF32(const T* src, int64_t n, float* HWY_RESTRICT dst) {
  const int64_t lanes = NumLanes();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) Store(Load(src + i), dst + i);
  if (i < n) {
    Store(LoadN(src + i, n - i), dst + i);
    i += lanes;
  }
  for (; i < kBlock; i += lanes) Store(hn::Zero(df), dst + i);
}

template <class T>
double SumSquaresSpan(const T* src, int64_t begin, int64_t end) {
  HWY_ALIGN float block[kBlock];
  double sum = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    const float* x = block;
    if (sizeof(T) == sizeof(float) && i + kBlock <= end) {
      x = reinterpret_cast<const float*>(src + i);
    } else {
      BlockToF32(src + i, std::min(kBlock, end - i), block);
    }
    sum += BlockSquares(x);
  }
  return sum;
}

double SumSquaresRange(const ConstVector& src, int64_t begin, int64_t end) {
  double sum = 0;
  ZERO_CPU_WITH_FLOAT_TYPE(
      src.dtype, T,
      sum = SumSquaresSpan(static_cast<const T*>(src.data), begin, end));
  return sum;
}

// NaN or infinite: all exponent bits set, seen on the fp32 value.
HWY_INLINE VU NonFinite(VF v) {
  const VU exponent = hn::Set(du, 0x7F800000u);
  const VU bits = hn::And(hn::BitCast(du, v), exponent);
  return hn::IfThenElseZero(hn::Eq(bits, exponent), hn::Set(du, 1));
}

template <class T>
int64_t CountNonFiniteSpan(const T* src, int64_t begin, int64_t end) {
  // A lane counts one per vector and is emptied long before 2^32.
  constexpr int64_t kRun = int64_t{1} << 28;
  const int64_t lanes = NumLanes();
  int64_t count = 0;
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = std::min(end, run + kRun);
    VU sums = hn::Zero(du);
    int64_t i = run;
    for (; i + lanes <= stop; i += lanes) {
      sums = hn::Add(sums, NonFinite(Load(src + i)));
    }
    if (i < stop) sums = hn::Add(sums, NonFinite(LoadN(src + i, stop - i)));
    count += hn::GetLane(hn::SumOfLanes(du, sums));
  }
  return count;
}

int64_t CountNonFiniteRange(const ConstVector& src, int64_t begin,
                            int64_t end) {
  int64_t count = 0;
  ZERO_CPU_WITH_FLOAT_TYPE(
      src.dtype, T,
      count = CountNonFiniteSpan(static_cast<const T*>(src.data), begin, end));
  return count;
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SumSquaresRange);
HWY_EXPORT(CountNonFiniteRange);

namespace {

constexpr int64_t kRunElements = 256 * 64;

// Runs whose sums are on the stack at a time; the total is formed from them in
// order, so that the size of the array changes nothing.
constexpr int64_t kRunsAtATime = 1024;

}  // namespace

double SumSquares(int num_threads, const ConstVector& src) {
  double total = 0;
  double runs[kRunsAtATime];
  const int64_t num_runs = (src.size + kRunElements - 1) / kRunElements;
  for (int64_t first = 0; first < num_runs; first += kRunsAtATime) {
    const int64_t count = std::min(kRunsAtATime, num_runs - first);
    ParallelRanges(num_threads, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t run = begin; run < end; ++run) {
        const int64_t start = (first + run) * kRunElements;
        runs[run] = HWY_DYNAMIC_DISPATCH(SumSquaresRange)(
            src, start, std::min(src.size, start + kRunElements));
      }
    });
    for (int64_t run = 0; run < count; ++run) total += runs[run];
  }
  return total;
}

void CpuOps::Sum(Stream&, const SumArgs& args) {
  double sum = 0;
  for (int64_t i = 0; i < args.size; ++i) sum += args.src[i];
  *args.out = sum;
}

void CpuOps::SumSquares(Stream&, const SumSquaresArgs& args) {
  *args.out = cpu::SumSquares(num_threads_, args.src);
}

void CpuOps::CountNonFinite(Stream&, const CountNonFiniteArgs& args) {
  int64_t total = 0;
  ParallelRanges(num_threads_, args.src.size, kElementGrain,
                 [&](int64_t begin, int64_t end) {
                   const int64_t count = HWY_DYNAMIC_DISPATCH(
                       CountNonFiniteRange)(args.src, begin, end);
#pragma omp atomic
                   total += count;
                 });
  *args.out = total;
}

void CpuOps::Clip(Stream&, const ClipArgs& args) {
  const double norm = std::sqrt(*args.sum_squares) * args.inverse_scale;
  double coefficient = 1;
  if (args.max_norm > 0) {
    coefficient = std::min(1.0, args.max_norm / (norm + 1e-6));
  }
  // Judged as the fp32 number that is reported.
  *args.norm = static_cast<float>(norm);
  *args.grad_scale = static_cast<float>(args.inverse_scale * coefficient);
  const bool found = args.keep_found && *args.found_non_finite != 0;
  *args.found_non_finite = found || !std::isfinite(*args.norm) ? 1 : 0;
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
