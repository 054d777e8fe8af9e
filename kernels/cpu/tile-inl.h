// Products of small fp32 tiles in the L1 cache: the building blocks of
// attention and of large products' panels. One thread, no packing, no
// allocation.
#include "kernels/cpu/simd-inl.h"

#if defined(ZERO_KERNELS_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_TILE_INL_H_
#undef ZERO_KERNELS_CPU_TILE_INL_H_
#else
#define ZERO_KERNELS_CPU_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// Element (i, p) of the left operand is a[i * row + p * col]: transposing it is
// free, since it is only broadcast.
struct LeftTile {
  const float* data;
  int64_t row;
  int64_t col;
};
// Element (p, j) of the right operand is data[p * ld + j].
struct RightTile {
  const float* data;
  int64_t ld;
};

// Rows of sums that, with two vectors of columns, fill the registers: 12 + 3
// of AVX2's 16, 24 + 3 of AVX-512's 32.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif

template <int kRows, int kVectors>
HWY_INLINE void TileBlock(int64_t k, const LeftTile& a, const float* b,
                          int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  const int64_t lanes = NumLanes();
  VF sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[i][j] = hn::Zero(df);
  }
  const float* left = a.data;
  for (int64_t p = 0; p < k; ++p) {
    VF right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = Load(b + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const VF x = hn::Set(df, left[i * a.row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sums[i][j] = Fma(x, right[j], sums[i][j]);
      }
    }
    left += a.col;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* const to = c + i * ldc + j * lanes;
      Store(accumulate ? hn::Add(Load(to), sums[i][j]) : sums[i][j], to);
    }
  }
}

// The last rows: kRows or fewer.
template <int kRows, int kVectors>
HWY_INLINE void TileRest(int64_t rows, int64_t k, const LeftTile& a,
                         const float* b, int64_t ldb, float* c, int64_t ldc,
                         bool accumulate) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      TileBlock<kRows, kVectors>(k, a, b, ldb, c, ldc, accumulate);
    } else {
      TileRest<kRows - 1, kVectors>(rows, k, a, b, ldb, c, ldc, accumulate);
    }
  }
}

template <int kVectors>
HWY_INLINE void TileColumns(int64_t m, int64_t k, LeftTile a, const float* b,
                            int64_t ldb, float* c, int64_t ldc,
                            bool accumulate) {
  int64_t i = 0;
  for (; i + kTileRows <= m; i += kTileRows) {
    TileBlock<kTileRows, kVectors>(k, a, b, ldb, c, ldc, accumulate);
    a.data += kTileRows * a.row;
    c += kTileRows * ldc;
  }
  TileRest<kTileRows - 1, kVectors>(m - i, k, a, b, ldb, c, ldc, accumulate);
}

// c[m, n] (+)= a[m, k] b[k, n], each sum in order of k with one rounding per
// step. n must be a multiple of NumLanes(); b and c have rows ldb and ldc
// floats apart.
inline HWY_NOINLINE void TileProduct(int64_t m, int64_t n, int64_t k,
                                     const LeftTile& a, const float* b,
                                     int64_t ldb, float* c, int64_t ldc,
                                     bool accumulate) {
  const int64_t lanes = NumLanes();
  int64_t j = 0;
  for (; j + 2 * lanes <= n; j += 2 * lanes) {
    TileColumns<2>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  }
  for (; j < n; j += lanes) {
    TileColumns<1>(m, k, a, b + j, ldb, c + j, ldc, accumulate);
  }
}

#if !ZERO_CPU_EMULATED
// Rows 0, 4, 8, ... of x, four floats of each.
template <class D>
HWY_INLINE hn::Vec<D> EveryFourth(D d, const float* x, int64_t ld) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::LoadU(d, x);
  } else {
    const hn::Half<D> half;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(half));
    return hn::Combine(d, EveryFourth(half, x + lanes * ld, ld),
                       EveryFourth(half, x, ld));
  }
}

// to[p * to_ld + j] = x[j * ld + p] for four p and as many j as d has lanes.
template <class D>
HWY_INLINE void TransposeFour(D d, const float* x, int64_t ld, float* to,
                              int64_t to_ld) {
  const hn::RepartitionToWide<D> pairs;
  const auto r0 = EveryFourth(d, x, ld);
  const auto r1 = EveryFourth(d, x + ld, ld);
  const auto r2 = EveryFourth(d, x + 2 * ld, ld);
  const auto r3 = EveryFourth(d, x + 3 * ld, ld);
  const auto a0 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
  const auto b0 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
  const auto a1 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
  const auto b1 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
  const auto put = [&](int64_t p, auto v) ZERO_CPU_BODY {
    hn::StoreU(hn::BitCast(d, v), d, to + p * to_ld);
  };
  put(0, hn::InterleaveLower(pairs, a0, b0));
  put(1, hn::InterleaveUpper(pairs, a0, b0));
  put(2, hn::InterleaveLower(pairs, a1, b1));
  put(3, hn::InterleaveUpper(pairs, a1, b1));
}
#endif

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_TILE_INL_H_
