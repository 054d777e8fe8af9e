#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

double SumSquaresRange(const ConstVector& src, int64_t begin, int64_t end) {
  double sum = 0;
  ZERO_CPU_WITH_FLOAT_TYPE(
      src.dtype, T,
      sum = AddSquares(0, static_cast<const T*>(src.data), begin, end));
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
  int64_t count = 0;
  for (int64_t run = begin; run < end; run += kRun) {
    const int64_t stop = std::min(end, run + kRun);
    VU sums = hn::Zero(du);
    ForEachVector(run, stop, [&](auto at) ZERO_CPU_BODY {
      sums = hn::Add(sums, NonFinite(at.Load(src)));
    });
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

// Runs whose sums are on the stack at a time; the total is formed from them in
// order, so the size of the array changes nothing.
constexpr int64_t kRunsAtATime = 1024;

double SumOfSquares(int num_threads, const ConstVector& src) {
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

}  // namespace

void CpuOps::Sum(Stream&, const SumArgs& args) {
  double sum = 0;
  for (int64_t i = 0; i < args.size; ++i) sum += args.src[i];
  *args.out = sum;
}

void CpuOps::SumSquares(Stream&, const SumSquaresArgs& args) {
  for (const SquaredSpan& span : args.spans) {
    *span.out = SumOfSquares(num_threads_, span.src);
  }
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
  // The test is of the fp32 number that is reported.
  *args.norm = static_cast<float>(norm);
  *args.grad_scale = static_cast<float>(args.inverse_scale * coefficient);
  const bool found = args.keep_found && *args.found_non_finite != 0;
  *args.found_non_finite = found || !std::isfinite(*args.norm) ? 1 : 0;
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
