#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

struct Constants : MomentConstants {
  Constants(const AdamWArgs& args, float weight_decay)
      : MomentConstants(args),
        step(hn::Set(df, static_cast<float>(
                             static_cast<double>(args.lr) /
                             static_cast<double>(args.bias_correction1)))),
        decay(hn::Set(df, args.adam_w ? static_cast<float>(
                                            1.0 - static_cast<double>(args.lr) *
                                                      weight_decay)
                                      : 1.0f)),
        l2(hn::Set(df, args.adam_w ? 0.0f : weight_decay)) {}

  VF step;   // lr / c1
  VF decay;  // 1 - lr wd, for AdamW
  VF l2;     // wd, for Adam
};

void AdamWRange(const AdamWArgs& args, size_t range, int64_t begin,
                int64_t end) {
  const Constants c(args, args.state.ranges[range].weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
    const G* HWY_RESTRICT grad = static_cast<const G*>(args.state.grad.data);
    const auto update = [&c, grad, m_ = args.m, v_ = args.v](
                            auto at, VF p) ZERO_CPU_BODY {
      __builtin_prefetch(m_ + at.i + kAhead);
      __builtin_prefetch(v_ + at.i + kAhead);
      __builtin_prefetch(grad + at.i + kAhead);
      const VF g = Fma(c.l2, p, hn::Mul(at.Load(grad), c.grad_scale));
      const auto [m, v] = c.Follow(at, g, m_, v_);
      const VF direction = hn::Div(m, c.Denominator(v));
      return NegFma(c.step, direction, hn::Mul(p, c.decay));
    };
    UpdateMasters(args.state, begin, end, update);
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(AdamWRange);

void CpuOps::AdamW(Stream&, const AdamWArgs& args) {
  UpdateRanges("AdamW", team(), args, HWY_DYNAMIC_DISPATCH(AdamWRange));
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
