#include "kernels/cpu/softmax.h"

#include <cmath>

#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/storage.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

float RowMax(const float* row, int64_t n) {
  const int64_t lanes = NumLanes();
  float max = row[0];
  int64_t i = 0;
  if (n >= 4 * lanes) {
    VF m0 = Load(row), m1 = Load(row + lanes), m2 = Load(row + 2 * lanes),
       m3 = Load(row + 3 * lanes);
    for (i = 4 * lanes; i + 4 * lanes <= n; i += 4 * lanes) {
      m0 = hn::Max(m0, Load(row + i));
      m1 = hn::Max(m1, Load(row + i + lanes));
      m2 = hn::Max(m2, Load(row + i + 2 * lanes));
      m3 = hn::Max(m3, Load(row + i + 3 * lanes));
    }
    m0 = hn::Max(hn::Max(m0, m1), hn::Max(m2, m3));
    max = hn::GetLane(hn::MaxOfLanes(df, m0));
  }
  for (; i < n; ++i) max = row[i] > max ? row[i] : max;
  return max;
}

// row = e^(row - max); returns the sum.
double ExpSum(float* row, int64_t n, float max) {
  constexpr int64_t kBlock = 1024;
  const int64_t lanes = NumLanes();
  const VF shift = hn::Set(df, max);
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = n < begin + kBlock ? n : begin + kBlock;
    VF s0 = hn::Zero(df), s1 = s0;
    int64_t i = begin;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      const VF e0 = Exp(hn::Sub(Load(row + i), shift));
      const VF e1 = Exp(hn::Sub(Load(row + i + lanes), shift));
      Store(e0, row + i);
      Store(e1, row + i + lanes);
      s0 = hn::Add(s0, e0);
      s1 = hn::Add(s1, e1);
    }
    ForEachVector(i, end, [&](auto at) ZERO_CPU_BODY {
      const VF e = Exp(hn::Sub(at.Load(row), shift));
      at.Store(e, row);
      VF& sum = at.kWhole ? s0 : s1;
      sum = hn::Add(sum, at.Keep(e, hn::Zero(df)));
    });
    total += static_cast<double>(Sum(hn::Add(s0, s1)));
  }
  return total;
}

template <class T>
double CrossEntropyRow(float* logits, int64_t n, int64_t target, bool gradient,
                       float scale) {
  const float target_logit = logits[target];
  const float max = RowMax(logits, n);
  const double sum = ExpSum(logits, n, max);
  const double loss = static_cast<double>(max) + std::log(sum) -
                      static_cast<double>(target_logit);
  if (gradient) {
    // p - 1 at the target, without the cancellation of two roundings.
    const float at_target =
        static_cast<float>((static_cast<double>(logits[target]) / sum - 1.0) *
                           static_cast<double>(scale));
    ScaleSpan(logits, n, static_cast<float>(static_cast<double>(scale) / sum),
              reinterpret_cast<T*>(logits));
    const VF v = hn::Set(df, at_target);
    StoreN(v, reinterpret_cast<T*>(logits) + target, 1);
  }
  return loss;
}

double SoftmaxCrossEntropyRow(float* logits, int64_t n, int64_t target,
                              bool gradient, float scale, DType dtype) {
  double loss = 0;
  ZERO_CPU_WITH_FLOAT_TYPE(
      dtype, T, loss = CrossEntropyRow<T>(logits, n, target, gradient, scale));
  return loss;
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SoftmaxCrossEntropyRow);

double SoftmaxCrossEntropyRow(float* logits, int64_t n, int64_t target,
                              bool gradient, float scale, DType dtype) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxCrossEntropyRow)(logits, n, target,
                                                      gradient, scale, dtype);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
