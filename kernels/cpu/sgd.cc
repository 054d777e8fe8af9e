#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sgd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
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
        has_buffer(args.momentum_buffer != nullptr),
        first_step(args.first_step),
        nesterov(args.nesterov) {}

  VF grad_scale, weight_decay, lr, momentum, one_minus_dampening;
  bool has_buffer, first_step, nesterov;
};

struct Element {
  VF p, buffer;
};
HWY_INLINE Element UpdateElement(const Constants& c, VF p, VF buffer, VF g) {
  g = Fma(c.weight_decay, p, hn::Mul(g, c.grad_scale));
  VF direction = g;
  if (c.has_buffer) {
    buffer = c.first_step
                 ? g
                 : Fma(c.momentum, buffer, hn::Mul(c.one_minus_dampening, g));
    direction = c.nesterov ? Fma(c.momentum, buffer, g) : buffer;
  }
  return {NegFma(c.lr, direction, p), buffer};
}

// copy: null where the parameter is not stored beside its master.
template <class P, class G>
void UpdateSpan(const SgdArgs& args, const Constants& c, P* copy, int64_t begin,
                int64_t end) {
  float* master = MasterOf(args.state);
  const G* grad = static_cast<const G*>(args.state.grad.data);
  float* buffer = args.momentum_buffer;
  const bool read_buffer = c.has_buffer && !c.first_step;
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const VF old = read_buffer ? Load(buffer + i) : hn::Zero(df);
    const Element e = UpdateElement(c, Load(master + i), old, Load(grad + i));
    if (c.has_buffer) Store(e.buffer, buffer + i);
    Store(e.p, master + i);
    if (copy != nullptr) Store(e.p, copy + i);
  }
  if (const int64_t n = end - i; n > 0) {
    const VF old = read_buffer ? LoadN(buffer + i, n) : hn::Zero(df);
    const Element e =
        UpdateElement(c, LoadN(master + i, n), old, LoadN(grad + i, n));
    if (c.has_buffer) StoreN(e.buffer, buffer + i, n);
    StoreN(e.p, master + i, n);
    if (copy != nullptr) StoreN(e.p, copy + i, n);
  }
}

template <class G>
void UpdateAndRound(const SgdArgs& args, const Constants& c, int64_t begin,
                    int64_t end) {
  for (int64_t i = begin; i < end; i += kRoundingChunk) {
    const int64_t stop = std::min(end, i + kRoundingChunk);
    UpdateSpan<float, G>(args, c, nullptr, i, stop);
    RoundStochastically(args.state, i, stop);
  }
}

void SgdRange(const SgdArgs& args, float weight_decay, int64_t begin,
              int64_t end) {
  const Constants c(args, weight_decay);
  ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
    if (args.state.stochastic_rounding) {
      UpdateAndRound<G>(args, c, begin, end);
    } else {
      ZERO_CPU_WITH_FLOAT_TYPE(
          args.state.param.dtype, P,
          UpdateSpan<P, G>(args, c, CopyOf<P>(args.state), begin, end));
    }
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SgdRange);

void CpuOps::Sgd(Stream&, const SgdArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("Sgd", args.state);
  const auto ranges = args.state.ranges;
  ForEachPiece(
      num_threads_, ranges, [&](size_t range, int64_t begin, int64_t end) {
        HWY_DYNAMIC_DISPATCH(SgdRange)
        (ArgsOf(args, ranges[range]), ranges[range].weight_decay, begin, end);
      });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
