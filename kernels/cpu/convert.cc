#include "kernels/cpu/convert.h"

#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/storage.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

constexpr int64_t kRowBlock = 128;  // rows summed before the sums are

template <class T>
void RoundRowT(const RoundRowArgs& args) {
  const T* bias = static_cast<const T*>(args.bias);
  const T* residual = static_cast<const T*>(args.residual);
  T* dst = static_cast<T*>(args.dst);
  ForEachVector(0, args.n, [&](auto at) ZERO_CPU_BODY {
    VF v = at.Load(args.sum);
    if (bias != nullptr) v = hn::Add(v, at.Load(bias));
    if (residual != nullptr) v = hn::Add(v, at.Load(residual));
    if (args.accumulate) v = hn::Add(v, at.Load(dst));
    at.Store(v, dst);
  });
}

// The columns of kVectors vectors from `at` on.
template <int kVectors, class At, class T>
HWY_INLINE void SumVectors(const T* src, int64_t rows, int64_t ld, At at,
                           float* out) {
  const int64_t lanes = NumLanes();
  VF totals[kVectors], sums[kVectors];
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) totals[k] = hn::Zero(df);
  for (int64_t block = 0; block < rows; block += kRowBlock) {
    const int64_t end = block + kRowBlock < rows ? block + kRowBlock : rows;
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) sums[k] = hn::Zero(df);
    for (int64_t i = block; i < end; ++i) {
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        sums[k] = hn::Add(sums[k], at.Load(src + i * ld + k * lanes));
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) totals[k] = hn::Add(totals[k], sums[k]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) at.Store(totals[k], out + k * lanes);
}

template <class T>
void SumColumns(const T* src, int64_t rows, int64_t cols, int64_t ld,
                float* out) {
  const int64_t step = 4 * NumLanes();
  int64_t j = 0;
  for (; j + step <= cols; j += step) {
    SumVectors<4>(src, rows, ld, WholeVector{j}, out);
  }
  ForEachVector(j, cols, [&](auto at) ZERO_CPU_BODY {
    SumVectors<1>(src, rows, ld, at, out);
  });
}

void AddToRow(DType dtype, const void* src, void* dst, int64_t n) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, {
    T* const sum = static_cast<T*>(dst);
    AddSpans(sum, static_cast<const T*>(src), sum, 0, n);
  });
}
void RoundRow(const RoundRowArgs& args) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.dtype, T, RoundRowT<T>(args));
}
void ColumnSums(DType dtype, const void* src, int64_t rows, int64_t cols,
                int64_t ld, float* out) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      dtype, T, SumColumns(static_cast<const T*>(src), rows, cols, ld, out));
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(AddToRow);
HWY_EXPORT(RoundRow);
HWY_EXPORT(ColumnSums);

void AddToRow(DType dtype, const void* src, void* dst, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddToRow)(dtype, src, dst, n);
}
void RoundRow(const RoundRowArgs& args) {
  HWY_DYNAMIC_DISPATCH(RoundRow)(args);
}
void ColumnSums(DType dtype, const void* src, int64_t rows, int64_t cols,
                int64_t ld, float* out) {
  HWY_DYNAMIC_DISPATCH(ColumnSums)(dtype, src, rows, cols, ld, out);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
