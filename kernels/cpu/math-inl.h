// exp, sigmoid and the normal distribution on vectors of fp32. Coefficients
// are Chebyshev fits made for this file (mpmath.chebyfit, 40 digits); errors
// were measured against float64 (tests/kernels/gelu_test.cc).
#include "kernels/cpu/simd-inl.h"

#if defined(ZERO_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_MATH_INL_H_
#undef ZERO_KERNELS_CPU_MATH_INL_H_
#else
#define ZERO_KERNELS_CPU_MATH_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// The vector is second: x86 returns the second operand if one is NaN.
HWY_INLINE VF Clamp(VF v, float lo, float hi) {
  return hn::Min(hn::Set(df, hi), hn::Max(hn::Set(df, lo), v));
}

// e^x = mantissa * 2^exponent, mantissa in [0.7, 1.42], for |x| <= 105.
struct SplitExp {
  VF mantissa;
  VI exponent;
};
HWY_INLINE SplitExp ExpParts(VF x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const VF magic = hn::Set(df, 12582912.0f);
  const VF shifted = Fma(x, hn::Set(df, 1.44269504f), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = NegFma(n, hn::Set(df, 0.693145752f), x);
  r = NegFma(n, hn::Set(df, 1.42860677e-6f), r);
  VF p = hn::Set(df, 0.001392692661f);
  p = Fma(p, r, hn::Set(df, 0.008363773874f));
  p = Fma(p, r, hn::Set(df, 0.04166655011f));
  p = Fma(p, r, hn::Set(df, 0.1666657338f));
  p = Fma(p, r, hn::Set(df, 0.5f));
  p = Fma(hn::Mul(r, r), p, hn::Add(r, hn::Set(df, 1.0f)));
  return {p, hn::ConvertTo(di, n)};
}

// 2^n within the normal range.
HWY_INLINE VF PowerOfTwo(VI n) {
  return hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
}

// e^x to about 1 ulp for x <= 88; 0 below -104, infinity above 89. Results
// below the normal range are rounded into it gradually. NaN stays NaN.
HWY_INLINE VF Exp(VF x) {
  const SplitExp e = ExpParts(Clamp(x, -105.0f, 90.0f));
  // 2^n as a product of two, so that neither factor leaves the normal range.
  const VI half = hn::ShiftRight<1>(e.exponent);
  const VF result = hn::Mul(hn::Mul(e.mantissa, PowerOfTwo(half)),
                            PowerOfTwo(hn::Sub(e.exponent, half)));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// The same, but infinity above 88.4 and 0 below -87.3, where results leave the
// normal range: it costs an x86 some hundred cycles to make a subnormal one, or
// to underflow to 0, and attention masks scores by -infinity.
HWY_INLINE VF ExpOrZero(VF x) {
  const VF least = hn::Set(df, -87.3f);
  const SplitExp e = ExpParts(Clamp(x, -87.3f, 89.0f));
  const VF result = hn::Mul(e.mantissa, PowerOfTwo(e.exponent));
  const VF other = hn::IfThenElseZero(hn::IsNaN(x), x);
  return hn::IfThenElse(hn::Ge(x, least), result, other);
}

// 1 / (1 + e^-x) and its complement, each with a small relative error.
struct SigmoidPair {
  VF value;
  VF complement;  // 1 - value
};
HWY_INLINE SigmoidPair Sigmoid(VF x) {
  const VF one = hn::Set(df, 1.0f);
  const VF e = Exp(hn::Neg(hn::Abs(x)));
  const VF large = hn::Div(one, hn::Add(one, e));
  const VF small = hn::Mul(e, large);
  const MF negative = hn::Lt(x, hn::Zero(df));
  return {hn::IfThenElse(negative, small, large),
          hn::IfThenElse(negative, large, small)};
}

// The standard normal's distribution function and e^(-x^2/2), both with a
// small relative error in both tails.
//
// Phi(-a) = e^(-a^2/2) M(a) for a >= 0, with M(a) = erfcx(a / sqrt 2) / 2 as
// t times a polynomial in t = 1 / (1 + a/4). The rounding error of a^2 is
// carried in a second word, since the exponential would magnify it.
struct NormalPair {
  VF cdf;
  VF bell;  // e^(-x^2/2)
};
HWY_INLINE NormalPair Normal(VF x) {
  const VF one = hn::Set(df, 1.0f);
  const VF a = hn::Min(hn::Abs(x), hn::Set(df, 15.0f));
  const VF square = hn::Mul(a, a);
  const VF low = Fma(a, a, hn::Neg(square));
  const VF half = hn::Set(df, -0.5f);
  VF bell = Exp(hn::Mul(square, half));
  bell = Fma(hn::Mul(low, half), bell, bell);
  const VF t = hn::Div(one, Fma(a, hn::Set(df, 0.25f), one));
  VF p = hn::Set(df, 0.0157418441f);
  p = Fma(p, t, hn::Set(df, -0.05837097996f));
  p = Fma(p, t, hn::Set(df, 0.04158928633f));
  p = Fma(p, t, hn::Set(df, 0.04136780965f));
  p = Fma(p, t, hn::Set(df, 0.002400358572f));
  p = Fma(p, t, hn::Set(df, 0.09193209488f));
  p = Fma(p, t, hn::Set(df, 0.07027288219f));
  p = Fma(p, t, hn::Set(df, 0.09586338536f));
  p = Fma(p, t, hn::Set(df, 0.09945356608f));
  p = Fma(p, t, hn::Set(df, 0.09974975536f));
  const VF tail = hn::Mul(hn::Mul(p, t), bell);
  const VF cdf =
      hn::IfThenElse(hn::Lt(x, hn::Zero(df)), tail, hn::Sub(one, tail));
  return {hn::IfThenElse(hn::IsNaN(x), x, cdf), bell};
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_MATH_INL_H_
