// Vectors of fp32 loaded from and stored to fp32, bf16 and fp16 memory, and the
// few functions that Highway 1.0.3 rounds differently from our promise.
// A source that includes it (or another -inl.h) is compiled once per SIMD
// target and looks like kernels/cpu/elementwise.cc.
//
// Invariant: every function but Sum, whose order follows the number of lanes,
// gives the same bits on every target.
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/storage.h"

// Includes the compiled source, from its first line, for every target but the
// last. There this header does nothing before highway.h.
#define HWY_TARGET_INCLUDE __BASE_FILE__
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#if defined(ZERO_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_SIMD_INL_H_
#undef ZERO_KERNELS_CPU_SIMD_INL_H_
#else
#define ZERO_KERNELS_CPU_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using DU16 = hn::Rebind<uint16_t, DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VI = hn::Vec<DI>;
using MF = hn::Mask<DF>;

// Room for one vector of fp32 of any length on this target.
inline constexpr size_t kMaxLanes = hn::MaxLanes(DF());

inline constexpr DF df;
inline constexpr DU du;
inline constexpr DI di;
inline constexpr DU16 du16;

// Lanes of a vector, as the signed type of all our counts.
HWY_INLINE int64_t NumLanes() { return static_cast<int64_t>(hn::Lanes(df)); }

// Gives a lambda on vectors the target of the enclosing function, and inlines
// it.
#undef ZERO_CPU_BODY
#define ZERO_CPU_BODY HWY_ATTR __attribute__((always_inline))

#undef ZERO_CPU_EMULATED
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
#define ZERO_CPU_EMULATED 1
#else
#define ZERO_CPU_EMULATED 0
#endif

// ---- Fused multiply-add, one rounding on every target ----------------------

// a * b + c.
template <class V>
HWY_INLINE V Fma(V a, V b, V c) {
#if ZERO_CPU_EMULATED
  const hn::DFromV<V> d;
  HWY_ALIGN hn::TFromV<V> x[HWY_MAX_BYTES], y[HWY_MAX_BYTES], z[HWY_MAX_BYTES];
  hn::Store(a, d, x);
  hn::Store(b, d, y);
  hn::Store(c, d, z);
  for (size_t i = 0; i < hn::Lanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::Load(d, z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

// c - a * b.
template <class V>
HWY_INLINE V NegFma(V a, V b, V c) {
#if ZERO_CPU_EMULATED
  return Fma(hn::Neg(a), b, c);
#else
  return hn::NegMulAdd(a, b, c);
#endif
}

// ---- Loads ----------------------------------------------------------------

HWY_INLINE VF Load(const float* p) { return hn::LoadU(df, p); }

HWY_INLINE VF Load(const Upper16* p) {
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

HWY_INLINE VF Load(const BF16* p) {
  return Load(reinterpret_cast<const Upper16*>(p));
}

HWY_INLINE VF Load(const F16* p) {
#if ZERO_CPU_EMULATED
  HWY_ALIGN float lanes[HWY_MAX_BYTES];
  for (int64_t i = 0; i < NumLanes(); ++i) lanes[i] = F16ToF32(p[i].bits);
  return hn::Load(df, lanes);
#else
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(
      df, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

// ---- Stores, rounding to nearest even --------------------------------------

HWY_INLINE void Store(VF v, float* p) { hn::StoreU(v, df, p); }

HWY_INLINE void Store(VF v, Upper16* p) {
  const VU top = hn::ShiftRight<16>(hn::BitCast(du, v));
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, top)), du16,
             reinterpret_cast<uint16_t*>(p));
}

// `sums` of v's bits and their rounding at bit 16, or a quiet NaN if v is NaN.
HWY_INLINE VF UnlessNaN(VF v, VU sums) {
  const VU quiet = hn::Or(hn::BitCast(du, v), hn::Set(du, 0x00400000));
  const auto nan = hn::RebindMask(du, hn::IsNaN(v));
  return hn::BitCast(df, hn::IfThenElse(nan, quiet, sums));
}

// bf16 in the upper half of each lane; the lower half is undefined. Not
// AVX-512's own conversion: it flushes subnormals to zero.
HWY_INLINE VF RoundToUpper16(VF v) {
  const VU bits = hn::BitCast(du, v);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return UnlessNaN(v, hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd));
}

HWY_INLINE void Store(VF v, BF16* p) {
  Store(RoundToUpper16(v), reinterpret_cast<Upper16*>(p));
}

HWY_INLINE void Store(VF v, F16* p) {
#if ZERO_CPU_EMULATED
  HWY_ALIGN float lanes[HWY_MAX_BYTES];
  hn::Store(v, df, lanes);
  for (int64_t i = 0; i < NumLanes(); ++i) p[i].bits = F32ToF16(lanes[i]);
#else
  const hn::Rebind<hwy::float16_t, DF> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

// ---- The last, partial vector of a span -----------------------------------

// The first `n` lanes of *p, the others zero; n < NumLanes().
template <class T>
HWY_INLINE VF LoadN(const T* p, int64_t n) {
  HWY_ALIGN T lanes[kMaxLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
  return Load(lanes);
}

template <class T>
HWY_INLINE void StoreN(VF v, T* p, int64_t n) {
  HWY_ALIGN T lanes[kMaxLanes];
  Store(v, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}

// ---- Loops over spans ------------------------------------------------------

// The vector of a span's elements [i, i + NumLanes()).
struct WholeVector {
  static constexpr bool kWhole = true;
  int64_t i;

  template <class T>
  HWY_INLINE VF Load(const T* span) const {
    return HWY_NAMESPACE::Load(span + i);
  }
  template <class T>
  HWY_INLINE void Store(VF v, T* span) const {
    HWY_NAMESPACE::Store(v, span + i);
  }
  // `v` in the span's lanes, `other` in the rest.
  HWY_INLINE VF Keep(VF v, VF) const { return v; }
};

// The last, partial vector of a span: [i, i + n), n < NumLanes(). Lanes beyond
// the span are loaded as zero and not stored.
struct LastVector {
  static constexpr bool kWhole = false;
  int64_t i, n;

  template <class T>
  HWY_INLINE VF Load(const T* span) const {
    return LoadN(span + i, n);
  }
  template <class T>
  HWY_INLINE void Store(VF v, T* span) const {
    StoreN(v, span + i, n);
  }
  HWY_INLINE VF Keep(VF v, VF other) const {
    return hn::IfThenElse(hn::FirstN(df, static_cast<size_t>(n)), v, other);
  }
};

// Calls body(at) with the vectors of [begin, end), one after the other. The
// body is a generic lambda, compiled for either kind of vector:
//   [&](auto at) ZERO_CPU_BODY { at.Store(hn::Add(at.Load(a), ...), y); }
template <class Body>
HWY_INLINE void ForEachVector(int64_t begin, int64_t end, const Body& body) {
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) body(WholeVector{i});
  if (i < end) body(LastVector{i, end - i});
}

// dst = src, exactly or rounded to nearest even.
template <class S, class D>
HWY_INLINE void ConvertSpan(const S* src, D* dst, int64_t begin, int64_t end) {
  ForEachVector(begin, end,
                [&](auto at) ZERO_CPU_BODY { at.Store(at.Load(src), dst); });
}

// y = a + b; y may be a or b.
template <class A, class B, class Y>
HWY_INLINE void AddSpans(const A* a, const B* b, Y* y, int64_t begin,
                         int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    at.Store(hn::Add(at.Load(a), at.Load(b)), y);
  });
}

// to = from * factor. `to` may be `from`, narrowed in place: no write overtakes
// a pending read.
template <class S, class D>
HWY_INLINE void ScaleSpan(const S* from, int64_t n, float factor, D* to) {
  const VF f = hn::Set(df, factor);
  ForEachVector(0, n, [&](auto at) ZERO_CPU_BODY {
    at.Store(hn::Mul(at.Load(from), f), to);
  });
}

// ---- Sums over lanes --------------------------------------------------------

HWY_INLINE float Sum(VF v) { return hn::GetLane(hn::SumOfLanes(df, v)); }

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_SIMD_INL_H_
