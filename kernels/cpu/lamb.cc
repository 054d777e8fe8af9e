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
#include "kernels/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

struct Constants {
  Constants(const LambArgs& args, float weight_decay)
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

// Both passes compute it: the same bits.
HWY_INLINE VF UpdateElement(const Constants& c, VF p, VF m, VF v) {
  const VF denominator = Fma(hn::Sqrt(v), c.v_scale, c.eps);
  const VF direction = hn::Div(hn::Mul(m, c.m_scale), denominator);
  return Fma(c.weight_decay, p, direction);
}

struct Moments {
  VF m, v, update;
};
HWY_INLINE Moments MomentElement(const Constants& c, VF p, VF m, VF v, VF g) {
  g = hn::Mul(g, c.grad_scale);
  m = Fma(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
  v = Fma(c.beta2, v, hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
  return {m, v, UpdateElement(c, p, m, v)};
}

template <class G>
void MomentSpan(const LambArgs& args, const Constants& c, int64_t begin,
                int64_t end) {
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

void MomentRange(const LambArgs& args, float weight_decay, int64_t begin,
                 int64_t end) {
  const Constants c(args, weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G,
                           MomentSpan<G>(args, c, begin, end));
}

// p -= step * update, with step = lr * trust ratio. copy: null where the
// parameter is not stored beside its master.
template <class P>
void ApplySpan(const LambArgs& args, const Constants& c, float step, P* copy,
               int64_t begin, int64_t end) {
  float* master = MasterOf(args.state);
  const VF scale = hn::Set(df, step);
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    VF p = Load(master + i);
    p = NegFma(scale, UpdateElement(c, p, Load(args.m + i), Load(args.v + i)),
               p);
    Store(p, master + i);
    if (copy != nullptr) Store(p, copy + i);
  }
  if (const int64_t n = end - i; n > 0) {
    VF p = LoadN(master + i, n);
    p = NegFma(scale,
               UpdateElement(c, p, LoadN(args.m + i, n), LoadN(args.v + i, n)),
               p);
    StoreN(p, master + i, n);
    if (copy != nullptr) StoreN(p, copy + i, n);
  }
}

void ApplyRange(const LambArgs& args, float weight_decay, float step,
                int64_t begin, int64_t end) {
  const Constants c(args, weight_decay);
  if (args.state.stochastic_rounding) {
    for (int64_t i = begin; i < end; i += kRoundingChunk) {
      const int64_t stop = std::min(end, i + kRoundingChunk);
      ApplySpan<float>(args, c, step, nullptr, i, stop);
      RoundStochastically(args.state, i, stop);
    }
    return;
  }
  ZERO_CPU_WITH_FLOAT_TYPE(
      args.state.param.dtype, P,
      ApplySpan<P>(args, c, step, CopyOf<P>(args.state), begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(MomentRange);
HWY_EXPORT(ApplyRange);

void CpuOps::LambMoments(Stream&, const LambArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("LambMoments", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  const auto ranges = args.state.ranges;
  ForEachPiece(num_threads_, ranges,
               [&](size_t range, int64_t begin, int64_t end) {
                 HWY_DYNAMIC_DISPATCH(MomentRange)
                 (args, ranges[range].weight_decay, begin, end);
               });
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int64_t begin = ranges[i].begin;
    const int64_t size = ranges[i].end - begin;
    double* const norms = args.norms + 2 * args.parts[i].own;
    norms[0] += cpu::SumSquares(
        num_threads_, {MasterOf(args.state) + begin, DType::kF32, size});
    norms[1] +=
        cpu::SumSquares(num_threads_, {args.update + begin, DType::kF32, size});
  }
}

namespace {

double TrustRatio(const LambArgs& args, const TensorPart& part) {
  double p = 0, update = 0;
  for (int64_t k = part.begin; k < part.end; ++k) {
    p += args.norms[2 * k];
    update += args.norms[2 * k + 1];
  }
  if (p == 0 || update == 0) return 1;
  return std::clamp(std::sqrt(p) / std::sqrt(update),
                    static_cast<double>(args.min_coeff),
                    static_cast<double>(args.max_coeff));
}

}  // namespace

void CpuOps::LambApply(Stream&, const LambArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("LambApply", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  const auto ranges = args.state.ranges;
  ForEachPiece(
      num_threads_, ranges, [&](size_t range, int64_t begin, int64_t end) {
        const double step = args.lr * TrustRatio(args, args.parts[range]);
        HWY_DYNAMIC_DISPATCH(ApplyRange)
        (args, ranges[range].weight_decay, static_cast<float>(step), begin,
         end);
      });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
