// Sigmoid, the normal distribution and GELU on fp32 values, with small relative
// errors in both tails; the same formulas as kernels/cpu/math-inl.h, whose
// comments say why. The exponential is the machine's, so that bits differ from
// the CPU's by a few units in the last place.
#ifndef ZERO_KERNELS_CUDA_MATH_CUH_
#define ZERO_KERNELS_CUDA_MATH_CUH_

#include "kernels/cuda/launch.h"
#include "kernels/ops.h"

namespace zero::cuda {

// 1 / x for x in [1, 2^126], to a little over half an ulp: the hardware's
// estimate and one Newton step, without the special cases of a division.
__device__ inline float Reciprocal(float x) {
  const float r = __fdividef(1.0f, x);
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// Limits x to [-limit, limit]; NaN stays NaN, which fminf would drop.
__device__ inline float Clamp(float x, float limit) {
  return fabsf(x) > limit ? copysignf(limit, x) : x;
}

// 1 / (1 + e^-x) and 1 minus it.
struct SigmoidPair {
  float value;
  float complement;
};
__device__ inline SigmoidPair Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  const float large = Reciprocal(1.0f + e);
  const float small = e * large;
  return x < 0 ? SigmoidPair{small, large} : SigmoidPair{large, small};
}

// The standard normal's distribution function and e^(-x^2/2).
struct NormalPair {
  float cdf;
  float bell;
};
__device__ inline NormalPair Normal(float x) {
  const float a = fabsf(Clamp(x, 15.0f));
  const float square = a * a;
  const float low = fmaf(a, a, -square);
  float bell = expf(-0.5f * square);
  bell = fmaf(-0.5f * low, bell, bell);
  const float t = Reciprocal(fmaf(a, 0.25f, 1.0f));
  float p = 0.0157418441f;
  p = fmaf(p, t, -0.05837097996f);
  p = fmaf(p, t, 0.04158928633f);
  p = fmaf(p, t, 0.04136780965f);
  p = fmaf(p, t, 0.002400358572f);
  p = fmaf(p, t, 0.09193209488f);
  p = fmaf(p, t, 0.07027288219f);
  p = fmaf(p, t, 0.09586338536f);
  p = fmaf(p, t, 0.09945356608f);
  p = fmaf(p, t, 0.09974975536f);
  const float tail = p * t * bell;
  return {x < 0 ? tail : 1.0f - tail, bell};
}

// 2 sqrt(2/pi), and 0.044715 times it.
inline constexpr float kGeluSlope = 1.595769122f;
inline constexpr float kGeluCubic = 0.0713548163f;

template <Gelu kKind>
__device__ inline float GeluValue(float x) {
  if constexpr (kKind == Gelu::kTanh) {
    const float c = Clamp(x, 16.0f);
    return x * Sigmoid(c * fmaf(c * c, kGeluCubic, kGeluSlope)).value;
  } else {
    return x * Normal(x).cdf;
  }
}

template <Gelu kKind>
__device__ inline float GeluDerivative(float x) {
  const float c = Clamp(x, 16.0f);
  if constexpr (kKind == Gelu::kTanh) {
    const float square = c * c;
    const SigmoidPair s = Sigmoid(c * fmaf(square, kGeluCubic, kGeluSlope));
    const float inner = fmaf(square, 3 * kGeluCubic, kGeluSlope);
    return s.value * fmaf(c * inner, s.complement, 1.0f);
  } else {
    const NormalPair n = Normal(x);
    return fmaf(c * 0.3989422804f, n.bell, n.cdf);
  }
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_MATH_CUH_
