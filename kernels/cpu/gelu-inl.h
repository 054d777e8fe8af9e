// GELU and its derivative on vectors.
//
// Accuracy in fp32, relative to the result: kErf 4 ulp everywhere; kTanh 4 ulp
// for x >= -1 and 4 + 2 |2u| ulp below, where 2u is the argument of the
// exponential (26 ulp at x = -4, a result of -7e-5).
#include "kernels/cpu/math-inl.h"
#include "kernels/ops.h"

#if defined(ZERO_KERNELS_CPU_GELU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_GELU_INL_H_
#undef ZERO_KERNELS_CPU_GELU_INL_H_
#else
#define ZERO_KERNELS_CPU_GELU_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// 0.5 (1 + tanh u) = sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3). Beyond
// |x| = 16 the sigmoid is 0 or 1 and x^3 could overflow, hence the clamp.
inline constexpr float kGeluSlope = 1.595769122f;   // 2 sqrt(2/pi)
inline constexpr float kGeluCubic = 0.0713548163f;  // 0.044715 * slope

template <Gelu kKind>
HWY_INLINE VF GeluValue(VF x) {
  if constexpr (kKind == Gelu::kTanh) {
    const VF c = Clamp(x, -16.0f, 16.0f);
    const VF slope =
        Fma(hn::Mul(c, c), hn::Set(df, kGeluCubic), hn::Set(df, kGeluSlope));
    return hn::Mul(x, Sigmoid(hn::Mul(c, slope)).value);
  } else {
    return hn::Mul(x, Normal(x).cdf);
  }
}

template <Gelu kKind>
HWY_INLINE VF GeluDerivative(VF x) {
  if constexpr (kKind == Gelu::kTanh) {
    const VF c = Clamp(x, -16.0f, 16.0f);
    const VF square = hn::Mul(c, c);
    const VF slope =
        Fma(square, hn::Set(df, kGeluCubic), hn::Set(df, kGeluSlope));
    const SigmoidPair s = Sigmoid(hn::Mul(c, slope));
    const VF inner =
        Fma(square, hn::Set(df, 3 * kGeluCubic), hn::Set(df, kGeluSlope));
    const VF factor = Fma(hn::Mul(c, inner), s.complement, hn::Set(df, 1.0f));
    return hn::Mul(s.value, factor);
  } else {
    const NormalPair n = Normal(x);
    const VF c = Clamp(x, -16.0f, 16.0f);
    return Fma(hn::Mul(c, hn::Set(df, 0.3989422804f)), n.bell, n.cdf);
  }
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_GELU_INL_H_
