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

// The sum of e^(row - max).
double ExpSum(const float* row, int64_t n, float max) {
  const int64_t lanes = NumLanes();
  const VF shift = hn::Set(df, max);
  VF s0 = hn::Zero(df), s1 = s0;
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    s0 = hn::Add(s0, Exp(hn::Sub(Load(row + i), shift)));
    s1 = hn::Add(s1, Exp(hn::Sub(Load(row + i + lanes), shift)));
  }
  ForEachVector(i, n, [&](auto at) ZERO_CPU_BODY {
    const VF e = Exp(hn::Sub(at.Load(row), shift));
    VF& sum = at.kWhole ? s0 : s1;
    sum = hn::Add(sum, at.Keep(e, hn::Zero(df)));
  });
  return static_cast<double>(Sum(hn::Add(s0, s1)));
}

void AddToLossRow(const float* logits, int64_t n, LossRow* row) {
  constexpr int64_t kBlock = 1024;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = n - begin < kBlock ? n - begin : kBlock;
    const float max = RowMax(logits + begin, size);
    if (max > row->max) {
      row->sum *=
          std::exp(static_cast<double>(row->max) - static_cast<double>(max));
      row->max = max;
    }
    row->sum += ExpSum(logits + begin, size, row->max);
  }
}

template <class T>
void Gradient(float* logits, int64_t n, const LossRow& row, int64_t target,
              float scale) {
  const VF shift = hn::Set(df, row.max);
  const VF factor =
      hn::Set(df, static_cast<float>(static_cast<double>(scale) / row.sum));
  // No write overtakes a pending read.
  ForEachVector(0, n, [&](auto at) ZERO_CPU_BODY {
    const VF e = Exp(hn::Sub(at.Load(logits), shift));
    at.Store(hn::Mul(e, factor), reinterpret_cast<T*>(logits));
  });
  if (target < 0 || target >= n) return;
  // p - 1 at the target, without the cancellation of two roundings.
  const double p = std::exp(static_cast<double>(row.target_logit) -
                            static_cast<double>(row.max)) /
                   row.sum;
  const VF v =
      hn::Set(df, static_cast<float>((p - 1.0) * static_cast<double>(scale)));
  StoreN(v, reinterpret_cast<T*>(logits) + target, 1);
}

void LossRowGradient(float* logits, int64_t n, const LossRow& row,
                     int64_t target, float scale, DType dtype) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T,
                           Gradient<T>(logits, n, row, target, scale));
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(AddToLossRow);
HWY_EXPORT(LossRowGradient);

void AddToLossRow(const float* logits, int64_t n, LossRow* row) {
  HWY_DYNAMIC_DISPATCH(AddToLossRow)(logits, n, row);
}
void LossRowGradient(float* logits, int64_t n, const LossRow& row,
                     int64_t target, float scale, DType dtype) {
  HWY_DYNAMIC_DISPATCH(LossRowGradient)(logits, n, row, target, scale, dtype);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
