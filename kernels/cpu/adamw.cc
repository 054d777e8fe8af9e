#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adamw.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// The step's constants as vectors. With b1, b2 as given in fp32, 1 - b1 and
// 1 - b2 are exact differences rounded once.
struct Constants {
  explicit Constants(const AdamWArgs& args, float weight_decay)
      : grad_scale(hn::Set(df, GradScale(args.state))),
        beta1(hn::Set(df, args.beta1)),
        beta2(hn::Set(df, args.beta2)),
        one_minus_beta1(hn::Set(df, static_cast<float>(1.0 - args.beta1))),
        one_minus_beta2(hn::Set(df, static_cast<float>(1.0 - args.beta2))),
        eps(hn::Set(df, args.eps)),
        v_scale(
            hn::Set(df, static_cast<float>(1.0 / std::sqrt(static_cast<double>(
                                                     args.bias_correction2))))),
        step(hn::Set(df, static_cast<float>(
                             static_cast<double>(args.lr) /
                             static_cast<double>(args.bias_correction1)))),
        decay(hn::Set(df, args.adam_w ? static_cast<float>(
                                            1.0 - static_cast<double>(args.lr) *
                                                      weight_decay)
                                      : 1.0f)),
        l2(hn::Set(df, args.adam_w ? 0.0f : weight_decay)) {}

  VF grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, v_scale;
  VF step;   // lr / c1
  VF decay;  // 1 - lr wd, for AdamW
  VF l2;     // wd, for Adam
};

struct Element {
  VF p, m, v;
};
HWY_INLINE Element UpdateElement(const Constants& c, VF p, VF m, VF v, VF g) {
  g = Fma(c.l2, p, hn::Mul(g, c.grad_scale));
  m = Fma(c.beta1, m, hn::Mul(c.one_minus_beta1, g));
  v = Fma(c.beta2, v, hn::Mul(hn::Mul(c.one_minus_beta2, g), g));
  const VF denominator = Fma(hn::Sqrt(v), c.v_scale, c.eps);
  const VF direction = hn::Div(m, denominator);
  return {NegFma(c.step, direction, hn::Mul(p, c.decay)), m, v};
}

// Elements to prefetch ahead: the root and the division of a vector fill the
// window of the out-of-order engine, so that it sees only a few lines of the
// four streams (measured: 0.93 of a plain loop's bandwidth without, 1.0 with).
constexpr int64_t kAhead = 256;

// kCopy: the parameter is stored beside its master.
template <bool kCopy, class P, class G>
void UpdateSpan(const AdamWArgs& args, const Constants& c, int64_t begin,
                int64_t end) {
  float* HWY_RESTRICT master = MasterOf(args.state);
  P* HWY_RESTRICT param = static_cast<P*>(args.state.param.data);
  const G* HWY_RESTRICT grad = static_cast<const G*>(args.state.grad.data);
  float* HWY_RESTRICT m = args.m;
  float* HWY_RESTRICT v = args.v;
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    hwy::Prefetch(master + i + kAhead);
    hwy::Prefetch(m + i + kAhead);
    hwy::Prefetch(v + i + kAhead);
    hwy::Prefetch(grad + i + kAhead);
    const Element e = UpdateElement(c, Load(master + i), Load(m + i),
                                    Load(v + i), Load(grad + i));
    Store(e.m, m + i);
    Store(e.v, v + i);
    Store(e.p, master + i);
    if constexpr (kCopy) Store(e.p, param + i);
  }
  if (const int64_t n = end - i; n > 0) {
    const Element e = UpdateElement(c, LoadN(master + i, n), LoadN(m + i, n),
                                    LoadN(v + i, n), LoadN(grad + i, n));
    StoreN(e.m, m + i, n);
    StoreN(e.v, v + i, n);
    StoreN(e.p, master + i, n);
    if constexpr (kCopy) StoreN(e.p, param + i, n);
  }
}

template <class G>
void UpdateAndRound(const AdamWArgs& args, const Constants& c, int64_t begin,
                    int64_t end) {
  for (int64_t i = begin; i < end; i += kRoundingChunk) {
    const int64_t stop = std::min(end, i + kRoundingChunk);
    UpdateSpan<false, float, G>(args, c, i, stop);
    RoundStochastically(args.state, i, stop);
  }
}

void AdamWRange(const AdamWArgs& args, float weight_decay, int64_t begin,
                int64_t end) {
  const Constants c(args, weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
    if (args.state.stochastic_rounding) {
      UpdateAndRound<G>(args, c, begin, end);
    } else if (args.state.master == nullptr) {
      UpdateSpan<false, float, G>(args, c, begin, end);
    } else {
      ZERO_CPU_WITH_FLOAT_TYPE(args.state.param.dtype, P,
                               UpdateSpan<true, P, G>(args, c, begin, end));
    }
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(AdamWRange);

void CpuOps::AdamW(Stream&, const AdamWArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("AdamW", args.state);
  const auto ranges = args.state.ranges;
  ForEachPiece(
      num_threads_, ranges, [&](size_t range, int64_t begin, int64_t end) {
        HWY_DYNAMIC_DISPATCH(AdamWRange)
        (ArgsOf(args, ranges[range]), ranges[range].weight_decay, begin, end);
      });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
