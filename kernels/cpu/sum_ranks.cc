#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sum_ranks.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <class S, class D>
void SumSpan(absl::Span<const void* const> src, D* dst, int64_t size,
             bool accumulate) {
  const int64_t lanes = NumLanes();
  int64_t i = 0;
  for (; i + 4 * lanes <= size; i += 4 * lanes) {
    const S* s = static_cast<const S*>(src[0]) + i;
    VF v0 = Load(s);
    VF v1 = Load(s + lanes);
    VF v2 = Load(s + 2 * lanes);
    VF v3 = Load(s + 3 * lanes);
    for (size_t rank = 1; rank < src.size(); ++rank) {
      s = static_cast<const S*>(src[rank]) + i;
      v0 = hn::Add(v0, Load(s));
      v1 = hn::Add(v1, Load(s + lanes));
      v2 = hn::Add(v2, Load(s + 2 * lanes));
      v3 = hn::Add(v3, Load(s + 3 * lanes));
    }
    D* const d = dst + i;
    if (accumulate) {
      v0 = hn::Add(Load(d), v0);
      v1 = hn::Add(Load(d + lanes), v1);
      v2 = hn::Add(Load(d + 2 * lanes), v2);
      v3 = hn::Add(Load(d + 3 * lanes), v3);
    }
    Store(v0, d);
    Store(v1, d + lanes);
    Store(v2, d + 2 * lanes);
    Store(v3, d + 3 * lanes);
  }
  for (; i < size; i += lanes) {
    const int64_t n = std::min(lanes, size - i);
    VF v = LoadN(static_cast<const S*>(src[0]) + i, n);
    for (size_t rank = 1; rank < src.size(); ++rank) {
      v = hn::Add(v, LoadN(static_cast<const S*>(src[rank]) + i, n));
    }
    if (accumulate) v = hn::Add(LoadN(dst + i, n), v);
    StoreN(v, dst + i, n);
  }
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

// For the few float64 scalars of a step.
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
