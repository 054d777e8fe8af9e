// The frame of the optimizers' loops: fp32 masters are updated and rounded to
// the parameters with the bits of kernels/rounding.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/philox-inl.h"
#include "kernels/cpu/storage.h"
#include "kernels/ops.h"
#include "kernels/rounding.h"

#if defined(ZERO_KERNELS_CPU_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_ROUNDING_INL_H_
#undef ZERO_KERNELS_CPU_ROUNDING_INL_H_
#else
#define ZERO_KERNELS_CPU_ROUNDING_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

#if ZERO_CPU_EMULATED
HWY_INLINE uint16_t RoundOne(float value, uint32_t word, BF16*) {
  return StochasticBF16(value, word);
}
HWY_INLINE uint16_t RoundOne(float value, uint32_t word, F16*) {
  return StochasticF16(value, word);
}
template <class T>
HWY_INLINE void StochasticStore(VF v, VU word, T* p) {
  HWY_ALIGN float values[HWY_MAX_BYTES];
  HWY_ALIGN uint32_t words[HWY_MAX_BYTES];
  hn::Store(v, df, values);
  hn::Store(word, du, words);
  for (int64_t i = 0; i < NumLanes(); ++i) {
    p[i].bits = RoundOne(values[i], words[i], p);
  }
}
#else
HWY_INLINE void StochasticStore(VF v, VU word, BF16* p) {
  const VU random = hn::And(word, hn::Set(du, 0xFFFF));
  Store(UnlessNaN(v, hn::Add(hn::BitCast(du, v), random)),
        reinterpret_cast<Upper16*>(p));
}

HWY_INLINE void StochasticStore(VF v, VU word, F16* p) {
  const VF size = hn::Abs(v);
  const VU bits = hn::BitCast(du, size);
  const VU normal = hn::ShiftRight<13>(
      hn::Sub(hn::Add(bits, hn::And(word, hn::Set(du, 0x1FFF))),
              hn::Set(du, 0x38000000)));
  const VU steps =
      hn::BitCast(du, hn::ConvertTo(di, hn::Mul(size, hn::Set(df, 0x1p45f))));
  const VU tiny =
      hn::ShiftRight<21>(hn::Add(steps, hn::And(word, hn::Set(du, 0x1FFFFF))));
  const VU payload = hn::And(hn::ShiftRight<13>(bits), hn::Set(du, 0x1FF));
  const auto is_normal = hn::Ge(size, hn::Set(df, 0x1p-14f));
  const auto is_large = hn::Ge(size, hn::Set(df, 65536.0f));
  VU result = hn::IfThenElse(hn::RebindMask(du, is_normal), normal, tiny);
  result =
      hn::IfThenElse(hn::RebindMask(du, is_large), hn::Set(du, 0x7C00), result);
  result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)),
                          hn::Or(payload, hn::Set(du, 0x7E00)), result);
  const VU sign =
      hn::And(hn::ShiftRight<16>(hn::BitCast(du, v)), hn::Set(du, 0x8000));
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, hn::Or(sign, result))), du16,
             reinterpret_cast<uint16_t*>(p));
}
#endif

template <class T>
void RoundSpan(const UpdateState& state, int64_t begin, int64_t end) {
  const int64_t lanes = NumLanes();
  const int64_t window = 4 * lanes;  // elements of one call of PhiloxWords
  T* const param = static_cast<T*>(state.param.data);
  const float* const master = static_cast<const float*>(state.master.data);
  HWY_ALIGN uint32_t words[5 * kMaxLanes] = {};  // the last vector may overlap
  HWY_ALIGN T tail[kMaxLanes];
  for (int64_t i = begin; i < end;) {
    const int64_t element = state.first_element + i;
    const int64_t base = element - element % window;
    PhiloxWords(state.rounding_key, static_cast<uint64_t>(base / 4), 0, words);
    const int64_t stop = std::min(end, i + (base + window - element));
    for (const uint32_t* word = words + (element - base); i < stop;
         word += lanes) {
      const VU random = hn::LoadU(du, word);
      const int64_t n = std::min(lanes, stop - i);
      if (n == lanes) {
        StochasticStore(Load(master + i), random, param + i);
      } else {
        StochasticStore(LoadN(master + i, n), random, tail);
        std::memcpy(param + i, tail, static_cast<size_t>(n) * sizeof(T));
      }
      i += n;
    }
  }
}

// Elements that are updated and then rounded while they are in the L1 cache.
inline constexpr int64_t kRoundingChunk = 1024;

// param[i] = master[i] for i in [begin, end), rounded stochastically.
HWY_INLINE void RoundStochastically(const UpdateState& state, int64_t begin,
                                    int64_t end) {
  if (state.param.dtype == DType::kBF16) {
    RoundSpan<BF16>(state, begin, end);
  } else {
    RoundSpan<F16>(state, begin, end);
  }
}

// ---- Where masters are ------------------------------------------------------

// Masters stored as they are: fp32 parameters, or masters whose parameters are
// not stored yet.
struct Masters {
  explicit Masters(const UpdateState& state)
      : master(static_cast<float*>(state.master.data != nullptr
                                       ? state.master.data
                                       : state.param.data)) {}

  void Prefetch(int64_t i) const { __builtin_prefetch(master + i); }
  template <class At>
  HWY_INLINE VF Load(At at) const {
    return at.Load(master);
  }
  template <class At>
  HWY_INLINE void Store(At at, VF v) const {
    at.Store(v, master);
  }

  float* master;
};

// Rounds as SplitMaster does, in the upper half.
HWY_INLINE VF RoundedMaster(VF v) {
  return UnlessNaN(v, hn::Add(hn::BitCast(du, v), hn::Set(du, 0x8000)));
}

// Whole masters, with separate parameters of type P.
template <class P>
struct MastersBeside : Masters {
  explicit MastersBeside(const UpdateState& state)
      : Masters(state), param(static_cast<P*>(state.param.data)) {}

  template <class At>
  HWY_INLINE void Store(At at, VF v) const {
    at.Store(v, master);
    if constexpr (std::is_same_v<P, BF16>) {
      at.Store(RoundedMaster(v), reinterpret_cast<Upper16*>(param));
    } else {
      at.Store(v, param);
    }
  }

  P* param;
};

// Masters split into bf16 parameters and the rest of SplitMaster.
struct SplitMasters {
  explicit SplitMasters(const UpdateState& state)
      : param(static_cast<Upper16*>(state.param.data)),
        rest(static_cast<Upper16*>(state.master.data)) {}

  void Prefetch(int64_t i) const {
    __builtin_prefetch(param + i);
    __builtin_prefetch(rest + i);
  }
  template <class At>
  HWY_INLINE VF Load(At at) const {
    const VI rounded_off = hn::ShiftRight<16>(hn::BitCast(di, at.Load(rest)));
    return hn::BitCast(df,
                       hn::Add(hn::BitCast(di, at.Load(param)), rounded_off));
  }
  template <class At>
  HWY_INLINE void Store(At at, VF v) const {
    at.Store(RoundedMaster(v), param);
    at.Store(hn::BitCast(df, hn::ShiftLeft<16>(hn::BitCast(du, v))), rest);
  }

  Upper16 *param, *rest;
};

// Elements to prefetch ahead, here and by updates of many streams: a root and
// a division fill the window of the out-of-order engine, so that it sees only a
// few lines of each stream (measured for AdamW: 0.93 of a plain loop's
// bandwidth without, 1.0 with).
inline constexpr int64_t kAhead = 256;

template <class M, class Update>
HWY_INLINE void UpdateSpan(const M& masters, int64_t begin, int64_t end,
                           const Update& update) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    masters.Prefetch(at.i + kAhead);
    masters.Store(at, update(at, masters.Load(at)));
  });
}

// Masters [begin, end) become update(at, master), and the parameters follow.
template <class Update>
HWY_INLINE void UpdateMasters(const UpdateState& state, int64_t begin,
                              int64_t end, const Update& update) {
  if (state.stochastic_rounding) {
    for (int64_t i = begin; i < end; i += kRoundingChunk) {
      const int64_t stop = std::min(end, i + kRoundingChunk);
      UpdateSpan(Masters(state), i, stop, update);
      RoundStochastically(state, i, stop);
    }
  } else if (state.splits_master()) {
    UpdateSpan(SplitMasters(state), begin, end, update);
  } else if (state.param.dtype == DType::kBF16) {
    UpdateSpan(MastersBeside<BF16>(state), begin, end, update);
  } else if (state.param.dtype == DType::kF16) {
    UpdateSpan(MastersBeside<F16>(state), begin, end, update);
  } else {
    UpdateSpan(Masters(state), begin, end, update);
  }
}

// The constants that the rules with moments share, as vectors. With b1, b2 as
// given in fp32, 1 - b1 and 1 - b2 are exact differences rounded once.
struct MomentConstants {
  explicit MomentConstants(const MomentArgs& args)
      : grad_scale(hn::Set(df, GradScale(args.state))),
        beta1(hn::Set(df, args.beta1)),
        beta2(hn::Set(df, args.beta2)),
        one_minus_beta1(hn::Set(df, static_cast<float>(1.0 - args.beta1))),
        one_minus_beta2(hn::Set(df, static_cast<float>(1.0 - args.beta2))),
        eps(hn::Set(df, args.eps)),
        v_scale(hn::Set(
            df, static_cast<float>(1.0 / std::sqrt(static_cast<double>(
                                             args.bias_correction2))))) {}

  struct Moments {
    VF m, v;
  };
  // The moments at `at` follow the gradient g.
  template <class At>
  HWY_INLINE Moments Follow(At at, VF g, float* m_, float* v_) const {
    const VF m = Fma(beta1, at.Load(m_), hn::Mul(one_minus_beta1, g));
    const VF v =
        Fma(beta2, at.Load(v_), hn::Mul(hn::Mul(one_minus_beta2, g), g));
    at.Store(m, m_);
    at.Store(v, v_);
    return {m, v};
  }
  HWY_INLINE VF Denominator(VF v) const {
    return Fma(hn::Sqrt(v), v_scale, eps);
  }

  VF grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, v_scale;
};

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_ROUNDING_INL_H_
