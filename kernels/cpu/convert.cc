#include "kernels/cpu/convert.h"

#include "kernels/cpu/storage.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

constexpr int64_t kRowBlock = 128;  // rows summed before the sums are

template <class T>
void ToF32(const T* src, float* dst, int64_t n) {
  const int64_t lanes = NumLanes();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) Store(Load(src + i), dst + i);
  if (i < n) StoreN(LoadN(src + i, n - i), dst + i, n - i);
}

template <class T>
void FromF32(const float* src, T* dst, int64_t n) {
  const int64_t lanes = NumLanes();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) Store(Load(src + i), dst + i);
  if (i < n) StoreN(LoadN(src + i, n - i), dst + i, n - i);
}

template <class T>
void AddTo(const T* src, T* dst, int64_t n) {
  const int64_t lanes = NumLanes();
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    Store(hn::Add(Load(dst + i), Load(src + i)), dst + i);
  }
  if (i == n) return;
  StoreN(hn::Add(LoadN(dst + i, n - i), LoadN(src + i, n - i)), dst + i, n - i);
}

template <class T>
void RoundRowT(const RoundRowArgs& args) {
  const int64_t lanes = NumLanes();
  const T* bias = static_cast<const T*>(args.bias);
  const T* residual = static_cast<const T*>(args.residual);
  T* dst = static_cast<T*>(args.dst);
  int64_t i = 0;
  for (; i + lanes <= args.n; i += lanes) {
    VF v = Load(args.sum + i);
    if (bias != nullptr) v = hn::Add(v, Load(bias + i));
    if (residual != nullptr) v = hn::Add(v, Load(residual + i));
    if (args.accumulate) v = hn::Add(v, Load(dst + i));
    Store(v, dst + i);
  }
  if (i == args.n) return;
  const int64_t rest = args.n - i;
  VF v = LoadN(args.sum + i, rest);
  if (bias != nullptr) v = hn::Add(v, LoadN(bias + i, rest));
  if (residual != nullptr) v = hn::Add(v, LoadN(residual + i, rest));
  if (args.accumulate) v = hn::Add(v, LoadN(dst + i, rest));
  StoreN(v, dst + i, rest);
}

template <class T>
void SumColumns(const T* src, int64_t rows, int64_t cols, int64_t ld,
                float* out) {
  const int64_t lanes = NumLanes();
  int64_t j = 0;
  for (; j + 4 * lanes <= cols; j += 4 * lanes) {
    VF t0 = hn::Zero(df), t1 = t0, t2 = t0, t3 = t0;
    for (int64_t block = 0; block < rows; block += kRowBlock) {
      const int64_t end = block + kRowBlock < rows ? block + kRowBlock : rows;
      VF s0 = hn::Zero(df), s1 = s0, s2 = s0, s3 = s0;
      for (int64_t i = block; i < end; ++i) {
        const T* row = src + i * ld + j;
        s0 = hn::Add(s0, Load(row));
        s1 = hn::Add(s1, Load(row + lanes));
        s2 = hn::Add(s2, Load(row + 2 * lanes));
        s3 = hn::Add(s3, Load(row + 3 * lanes));
      }
      t0 = hn::Add(t0, s0);
      t1 = hn::Add(t1, s1);
      t2 = hn::Add(t2, s2);
      t3 = hn::Add(t3, s3);
    }
    Store(t0, out + j);
    Store(t1, out + j + lanes);
    Store(t2, out + j + 2 * lanes);
    Store(t3, out + j + 3 * lanes);
  }
  for (; j < cols; j += lanes) {
    const int64_t n = cols - j < lanes ? cols - j : lanes;
    VF total = hn::Zero(df);
    for (int64_t block = 0; block < rows; block += kRowBlock) {
      const int64_t end = block + kRowBlock < rows ? block + kRowBlock : rows;
      VF sum = hn::Zero(df);
      for (int64_t i = block; i < end; ++i) {
        sum = hn::Add(sum, LoadN(src + i * ld + j, n));
      }
      total = hn::Add(total, sum);
    }
    StoreN(total, out + j, n);
  }
}

void RowToF32(DType dtype, const void* src, float* dst, int64_t n) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, ToF32(static_cast<const T*>(src), dst, n));
}
void RowFromF32(DType dtype, const float* src, void* dst, int64_t n) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, FromF32(src, static_cast<T*>(dst), n));
}
void AddToRow(DType dtype, const void* src, void* dst, int64_t n) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      dtype, T, AddTo(static_cast<const T*>(src), static_cast<T*>(dst), n));
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

HWY_EXPORT(RowToF32);
HWY_EXPORT(RowFromF32);
HWY_EXPORT(AddToRow);
HWY_EXPORT(RoundRow);
HWY_EXPORT(ColumnSums);

void RowToF32(DType dtype, const void* src, float* dst, int64_t n) {
  HWY_DYNAMIC_DISPATCH(RowToF32)(dtype, src, dst, n);
}
void RowFromF32(DType dtype, const float* src, void* dst, int64_t n) {
  HWY_DYNAMIC_DISPATCH(RowFromF32)(dtype, src, dst, n);
}
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
