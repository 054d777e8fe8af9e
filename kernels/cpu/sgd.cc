#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

struct Constants {
  Constants(const SgdArgs& args, float weight_decay)
      : grad_scale(hn::Set(df, GradScale(args.state))),
        weight_decay(hn::Set(df, weight_decay)),
        lr(hn::Set(df, args.lr)),
        momentum(hn::Set(df, args.momentum)),
        one_minus_dampening(
            hn::Set(df, static_cast<float>(1.0 - args.dampening))),
        first_step(args.first_step),
        nesterov(args.nesterov) {}

  VF grad_scale, weight_decay, lr, momentum, one_minus_dampening;
  bool first_step, nesterov;
};

void SgdRange(const SgdArgs& args, size_t range, int64_t begin, int64_t end) {
  const Constants c(args, args.state.ranges[range].weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
    const G* grad = static_cast<const G*>(args.state.grad.data);
    const auto update = [&c, grad, buffer_ = args.momentum_buffer](
                            auto at, VF p) ZERO_CPU_BODY {
      const VF g = Fma(c.weight_decay, p, hn::Mul(at.Load(grad), c.grad_scale));
      VF direction = g;
      if (buffer_ != nullptr) {
        const VF buffer = c.first_step ? g
                                       : Fma(c.momentum, at.Load(buffer_),
                                             hn::Mul(c.one_minus_dampening, g));
        at.Store(buffer, buffer_);
        direction = c.nesterov ? Fma(c.momentum, buffer, g) : buffer;
      }
      return NegFma(c.lr, direction, p);
    };
    UpdateMasters(args.state, begin, end, update);
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SgdRange);

void CpuOps::Sgd(Stream&, const SgdArgs& args) {
  UpdateRanges("Sgd", team(), args, HWY_DYNAMIC_DISPATCH(SgdRange));
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
