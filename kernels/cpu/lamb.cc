#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/lamb.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

struct MomentConstants {
  MomentConstants(const LambMomentsArgs& args, float weight_decay)
      : grad_scale(hn::Set(df, GradScale(args.state))),
        weight_decay(hn::Set(df, weight_decay)),
        beta1(hn::Set(df, args.beta1)),
        beta2(hn::Set(df, args.beta2)),
        one_minus_beta1(hn::Set(df, static_cast<float>(1.0 - args.beta1))),
        one_minus_beta2(hn::Set(df, static_cast<float>(1.0 - args.beta2))),
        eps(hn::Set(df, args.eps)),
        m_scale(
            hn::Set(df, static_cast<float>(
                            1.0 / static_cast<double>(args.bias_correction1)))),
        v_scale(hn::Set(
            df, static_cast<float>(1.0 / std::sqrt(static_cast<double>(
                                             args.bias_correction2))))) {}

  VF grad_scale, weight_decay, beta1, beta2, one_minus_beta1, one_minus_beta2;
  VF eps, m_scale, v_scale;
};

struct Moments {
  VF m, v, update;
};
HWY_INLINE Moments MomentElement(const MomentConstants& c, VF p, VF m, VF v,
                                 VF g) {
  g = hn::Mul(g, c.grad_scale);
  m = Fma(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
  v = Fma(c.beta2, v, hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
  const VF denominator = Fma(hn::Sqrt(v), c.v_scale, c.eps);
  const VF direction = hn::Div(hn::Mul(m, c.m_scale), denominator);
  return {m, v, Fma(c.weight_decay, p, direction)};
}

template <class G>
void MomentSpan(const LambMomentsArgs& args, const MomentConstants& c,
                int64_t begin, int64_t end) {
  const float* master = MasterOf(args.state);
  const G* grad = static_cast<const G*>(args.state.grad.data);
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const Moments e = MomentElement(c, Load(master + i), Load(args.m + i),
                                    Load(args.v + i), Load(grad + i));
    Store(e.m, args.m + i);
    Store(e.v, args.v + i);
    Store(e.update, args.update + i);
  }
  if (const int64_t n = end - i; n > 0) {
    const Moments e =
        MomentElement(c, LoadN(master + i, n), LoadN(args.m + i, n),
                      LoadN(args.v + i, n), LoadN(grad + i, n));
    StoreN(e.m, args.m + i, n);
    StoreN(e.v, args.v + i, n);
    StoreN(e.update, args.update + i, n);
  }
}

void MomentRange(const LambMomentsArgs& args, float weight_decay, int64_t begin,
                 int64_t end) {
  const MomentConstants c(args, weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G,
                           MomentSpan<G>(args, c, begin, end));
}

// p -= step * update, with step = lr * trust ratio.
template <class P>
void ApplySpan(const LambApplyArgs& args, float step, int64_t begin,
               int64_t end) {
  float* master = MasterOf(args.state);
  P* copy = args.state.master != nullptr
                ? static_cast<P*>(args.state.param.data)
                : nullptr;
  const VF scale = hn::Set(df, step);
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const VF p = NegFma(scale, Load(args.update + i), Load(master + i));
    Store(p, master + i);
    if (copy != nullptr) Store(p, copy + i);
  }
  if (const int64_t n = end - i; n > 0) {
    const VF p = NegFma(scale, LoadN(args.update + i, n), LoadN(master + i, n));
    StoreN(p, master + i, n);
    if (copy != nullptr) StoreN(p, copy + i, n);
  }
}

void ApplyRange(const LambApplyArgs& args, float step, int64_t begin,
                int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.param.dtype, P,
                           ApplySpan<P>(args, step, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(MomentRange);
HWY_EXPORT(ApplyRange);

void CpuOps::LambMoments(Stream&, const LambMomentsArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("LambMoments", args.state);
  const auto ranges = args.state.ranges;
  ForEachPiece(num_threads_, ranges,
               [&](size_t range, int64_t begin, int64_t end) {
                 HWY_DYNAMIC_DISPATCH(MomentRange)
                 (args, ranges[range].weight_decay, begin, end);
               });
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int64_t begin = ranges[i].begin;
    const int64_t size = ranges[i].end - begin;
    args.norms[2 * i] += cpu::SumSquares(
        num_threads_, {MasterOf(args.state) + begin, DType::kF32, size});
    args.norms[2 * i + 1] +=
        cpu::SumSquares(num_threads_, {args.update + begin, DType::kF32, size});
  }
}

namespace {

double TrustRatio(const LambApplyArgs& args, size_t range) {
  const double p = std::sqrt(args.norms[2 * range]);
  const double update = std::sqrt(args.norms[2 * range + 1]);
  if (p == 0 || update == 0) return 1;
  return std::clamp(p / update, static_cast<double>(args.min_coeff),
                    static_cast<double>(args.max_coeff));
}

}  // namespace

void CpuOps::LambApply(Stream&, const LambApplyArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("LambApply", args.state);
  ForEachPiece(num_threads_, args.state.ranges,
               [&](size_t range, int64_t begin, int64_t end) {
                 const double step = args.lr * TrustRatio(args, range);
                 HWY_DYNAMIC_DISPATCH(ApplyRange)
                 (args, static_cast<float>(step), begin, end);
               });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
