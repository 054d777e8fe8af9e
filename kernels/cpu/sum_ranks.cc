#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// The elements of kVectors vectors from `at` on.
template <int kVectors, class S, class At, class D>
HWY_INLINE void SumVectors(absl::Span<const void* const> src, D* dst, At at,
                           bool accumulate) {
  const int64_t lanes = NumLanes();
  VF v[kVectors];
  const S* s = static_cast<const S*>(src[0]);
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) v[k] = at.Load(s + k * lanes);
  for (size_t rank = 1; rank < src.size(); ++rank) {
    s = static_cast<const S*>(src[rank]);
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) {
      v[k] = hn::Add(v[k], at.Load(s + k * lanes));
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) {
    if (accumulate) v[k] = hn::Add(at.Load(dst + k * lanes), v[k]);
    at.Store(v[k], dst + k * lanes);
  }
}

template <class S, class D>
void SumSpan(absl::Span<const void* const> src, D* dst, int64_t size,
             bool accumulate) {
  const int64_t step = 4 * NumLanes();
  int64_t i = 0;
  for (; i + step <= size; i += step) {
    SumVectors<4, S>(src, dst, WholeVector{i}, accumulate);
  }
  ForEachVector(i, size, [&](auto at) ZERO_CPU_BODY {
    SumVectors<1, S>(src, dst, at, accumulate);
  });
}

void SumFloats(const SumRanksArgs& args) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      args.src_dtype, S,
      ZERO_CPU_WITH_FLOAT_TYPE(
          args.dst.dtype, D,
          SumSpan<S>(args.src, static_cast<D*>(args.dst.data), args.dst.size,
                     args.accumulate)));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SumFloats);

namespace {

// Sums the few float64 scalars of a step.
void SumDoubles(const SumRanksArgs& args) {
  double* const dst = static_cast<double*>(args.dst.data);
  for (int64_t i = 0; i < args.dst.size; ++i) {
    double sum = static_cast<const double*>(args.src[0])[i];
    for (size_t rank = 1; rank < args.src.size(); ++rank) {
      sum += static_cast<const double*>(args.src[rank])[i];
    }
    dst[i] = args.accumulate ? dst[i] + sum : sum;
  }
}

}  // namespace

void CpuOps::SumRanks(Stream&, const SumRanksArgs& args) {
  ZERO_CHECK_GE(args.src.size(), 1u);
  if (args.src_dtype == DType::kF64 && args.dst.dtype == DType::kF64) {
    SumDoubles(args);
  } else {
    HWY_DYNAMIC_DISPATCH(SumFloats)(args);
  }
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
