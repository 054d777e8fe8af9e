#include "kernels/cpu/panels.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/storage.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/sizes.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// A panel has kRows rows of a or kCols columns of b: with three vectors of
// columns the sums fill the registers, 24 + 4 of AVX-512's 32, 12 + 4 of AVX2's
// 16.
inline constexpr int64_t kRows = kTileRows == 12 ? 8 : 4;
inline constexpr int64_t kCols = 3 * static_cast<int64_t>(kMaxLanes);

// Largest k of a panel: the larger, the less often sums go to c.
inline constexpr int64_t kDepth = 512;

// Sizes packed at a time, so that panels of both stay in the caches. Both are
// multiples of a vector: converting part of a vector of 16-bit values goes
// through memory, and took 5 % of the time of a weight's gradient.
inline constexpr int64_t kBlockRows = 8 * kRows;
inline constexpr int64_t kBlockCols = 3 * kCols;

// For so few rows packing adjacent columns does not pay.
inline constexpr int64_t kRowsInPlace = 18 * kRows;

// The parts of the scratch.
struct Panels {
  bool b_in_place;  // except last columns that fill no panel
  int64_t pieces;   // of k
  int64_t depth;    // of the longest
  float* a;         // of kBlockRows rows
  float* b;         // of all columns
  float* rows;      // of an operand, converted
  float* sums;      // of a 16-bit c, between the pieces
  int64_t size;     // floats of all parts

  Panels(const Product& tile, float* scratch) {
    const int64_t k = tile.a_transposed ? tile.a.rows : tile.a.cols;
    const int64_t m = tile.c.rows, n = tile.c.cols;
    b_in_place =
        m <= kRowsInPlace && !tile.b_transposed && tile.b.dtype == DType::kF32;
    pieces = std::max<int64_t>(1, CeilDiv(k, kDepth));
    depth = CeilDiv(k, pieces);
    size = 0;
    const auto take = [&](int64_t floats) {
      const int64_t at = size;
      size += RoundUp(floats, 16);
      return scratch == nullptr ? nullptr : scratch + at;
    };
    a = take(kBlockRows / kRows * Stride(kRows));
    b = take((b_in_place ? 1 : CeilDiv(n, kCols)) * Stride(kCols));
    rows = take(std::max({static_cast<int64_t>(kMaxLanes) * RowStride(),
                          kBlockRows, kBlockCols}));
    sums = take(tile.c.dtype == DType::kF32 || pieces == 1 ? 0 : m * n);
  }

  // Floats from a panel, or a row, to the next; seldom a multiple of 4 KiB,
  // which would fall into the same cache sets.
  int64_t Stride(int64_t width) const { return width * depth + 16; }
  int64_t RowStride() const { return RoundUp(depth, 16) + 16; }
  float* PanelOfB(int64_t col) const {
    return b + (b_in_place ? 0 : col / kCols * Stride(kCols));
  }
};

// Row [0, n) in fp32.
template <class T>
HWY_INLINE const float* Floats(const T* row, int64_t n, float* buffer) {
  ConvertSpan(row, buffer, 0, n);
  return buffer;
}
HWY_INLINE const float* Floats(const float* row, int64_t, float*) {
  return row;
}

// Prefetches a row.
template <class T>
HWY_INLINE void Prefetch(const T* row, int64_t n) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(row + i);
}

// x[k, n] to panels of kWidth columns, to[k, kWidth] each, with zeros after the
// last column.
template <int64_t kWidth, class T>
HWY_INLINE void PackColumns(const T* x, int64_t ld, int64_t k, int64_t n,
                            const Panels& panels, float* to) {
  for (int64_t p = 0; p < k; ++p) {
    Prefetch(x + (p + 32) * ld, n);
    const float* row = Floats(x + p * ld, n, panels.rows);
    float* panel = to + p * kWidth;
    int64_t j = 0;
    for (; j + kWidth <= n; j += kWidth) {
      std::memcpy(panel, row + j, kWidth * sizeof(float));
      panel += panels.Stride(kWidth);
    }
    if (j == n) continue;
    std::memcpy(panel, row + j, static_cast<size_t>(n - j) * sizeof(float));
    std::fill(panel + n - j, panel + kWidth, 0.0f);
  }
}

// x[n, k] to panels of kWidth rows, to[k, kWidth] each, with zeros after the
// last row. D: the rows that are transposed together.
template <int64_t kWidth, class D, class T>
HWY_INLINE void PackRows([[maybe_unused]] D d, const T* x, int64_t ld,
                         int64_t k, int64_t n, const Panels& panels,
                         float* to) {
  for (int64_t j = 0; j < n; j += kWidth) {
    const int64_t width = std::min(kWidth, n - j);
    int64_t i = 0;
#if !ZERO_CPU_EMULATED
    const int64_t group = static_cast<int64_t>(hn::Lanes(d));
    for (; i + group <= width; i += group) {
      const T* rows = x + (j + i) * ld;
      const float* from = reinterpret_cast<const float*>(rows);
      int64_t from_ld = ld;
      if (sizeof(T) != sizeof(float)) {
        for (int64_t r = 0; r < group; ++r) {
          ConvertSpan(rows + r * ld, panels.rows + r * panels.RowStride(), 0,
                      k);
        }
        from = panels.rows;
        from_ld = panels.RowStride();
      }
      int64_t p = 0;
      for (; p + 4 <= k; p += 4) {
        if (p % 16 == 0) {
          for (int64_t r = 0; r < group; ++r) {
            __builtin_prefetch(rows + (group + r) * ld + p);
          }
        }
        TransposeFour(d, from + p, from_ld, to + p * kWidth + i, kWidth);
      }
      for (; p < k; ++p) {
        for (int64_t r = 0; r < group; ++r) {
          to[p * kWidth + i + r] = from[r * from_ld + p];
        }
      }
    }
#endif
    for (; i < kWidth; ++i) {
      const float* row =
          i < width ? Floats(x + (j + i) * ld, k, panels.rows) : nullptr;
      for (int64_t p = 0; p < k; ++p) {
        to[p * kWidth + i] = row == nullptr ? 0.0f : row[p];
      }
    }
    to += panels.Stride(kWidth);
  }
}

// A piece of k: [begin, begin + k).
struct Piece {
  int64_t begin, k;
  bool first, last;
};

// sums [rows, kCols] to c, or to the sums so far.
template <class T>
HWY_INLINE void AddBlock(const Product& tile, const Piece& piece, int64_t row,
                         int64_t rows, int64_t col, const float* sums,
                         float* total, int64_t total_ld) {
  const int64_t cols = std::min(kCols, tile.c.cols - col);
  const bool f32 = sizeof(T) == sizeof(float);
  const bool add = !piece.first || (f32 && tile.accumulate);
  const T* bias = nullptr;
  if (piece.last && tile.bias.data != nullptr) {
    bias = static_cast<const T*>(tile.bias.data) + col;
  }
  for (int64_t i = row; i < row + rows; ++i) {
    const T* residual = nullptr;
    if (piece.last && tile.residual.data != nullptr) {
      residual = static_cast<const T*>(tile.residual.Row(i)) + col;
    }
    float* const so_far = total + i * total_ld + col;
    T* const dst = static_cast<T*>(tile.c.Row(i)) + col;
    ForEachVector(0, cols, [&](auto at) ZERO_CPU_BODY {
      VF v = at.Load(sums);
      if (add) v = hn::Add(at.Load(so_far), v);
      if (!piece.last) return at.Store(v, so_far);
      if (bias != nullptr) v = hn::Add(v, at.Load(bias));
      if (residual != nullptr) v = hn::Add(v, at.Load(residual));
      if (!f32 && tile.accumulate) v = hn::Add(v, at.Load(dst));
      at.Store(v, dst);
    });
    sums += kCols;
  }
}

// The sums of a panel's rows and a panel's columns. A function by itself: with
// more around the loop, GCC 12 keeps too little of it in registers.
HWY_NOINLINE void MultiplyPanels(int64_t rows, int64_t k, const LeftTile& a,
                                 const float* b, int64_t ldb, float* to,
                                 int64_t ldc, bool add) {
  if (rows == kRows) {
    TileBlock<kRows, 3>(k, a, b, ldb, to, ldc, add);
  } else {
    TileRest<kRows - 1, 3>(rows, k, a, b, ldb, to, ldc, add);
  }
}

// Rows [row, row + rows) and columns [col, col + cols) of c.
template <class T>
void MultiplyBlock(const Product& tile, const Piece& piece, int64_t row,
                   int64_t rows, int64_t col, int64_t cols,
                   const Panels& panels) {
  const bool f32 = sizeof(T) == sizeof(float);
  float* const total = f32 ? static_cast<float*>(tile.c.data) : panels.sums;
  const int64_t total_ld = f32 ? tile.c.ld : tile.c.cols;
  HWY_ALIGN float sums[kRows * kCols];
  for (int64_t j = col; j < col + cols; j += kCols) {
    const bool in_place = panels.b_in_place && j + kCols <= tile.c.cols;
    const float* const b =
        in_place ? static_cast<const float*>(tile.b.Row(piece.begin)) + j
                 : panels.PanelOfB(j);
    const int64_t ldb = in_place ? tile.b.ld : kCols;
    for (int64_t i = 0; i < rows; i += kRows) {
      const int64_t left = std::min<int64_t>(kRows, rows - i);
      for (int64_t x = row + i; x < row + i + left; ++x) {
        Prefetch(total + x * total_ld + j, kCols);
        if (tile.residual.data != nullptr) {
          Prefetch(static_cast<const T*>(tile.residual.Row(x)) + j, kCols);
        }
      }
      const LeftTile a = {panels.a + i / kRows * panels.Stride(kRows), 1,
                          kRows};
      // Straight into the sums if nothing else is added.
      const bool direct = j + kCols <= tile.c.cols &&
                          (!piece.last || (f32 && tile.bias.data == nullptr &&
                                           tile.residual.data == nullptr));
      float* const to = direct ? total + (row + i) * total_ld + j : sums;
      const int64_t ldc = direct ? total_ld : kCols;
      const bool add = direct && (!piece.first || (f32 && tile.accumulate));
      MultiplyPanels(left, piece.k, a, b, ldb, to, ldc, add);
      if (direct) continue;
      AddBlock<T>(tile, piece, row + i, left, j, sums, total, total_ld);
    }
  }
}

template <class A>
void PackA(const Product& tile, const Piece& piece, int64_t row, int64_t rows,
           const Panels& panels) {
  if (tile.a_transposed) {
    PackColumns<kRows>(static_cast<const A*>(tile.a.Row(piece.begin)) + row,
                       tile.a.ld, piece.k, rows, panels, panels.a);
  } else {
    PackRows<kRows>(hn::CappedTag<float, 4>(),
                    static_cast<const A*>(tile.a.Row(row)) + piece.begin,
                    tile.a.ld, piece.k, rows, panels, panels.a);
  }
}

template <class B>
void PackB(const Product& tile, const Piece& piece, int64_t col, int64_t cols,
           const Panels& panels) {
  if (panels.b_in_place) {
    const int64_t whole = cols / kCols * kCols;
    col += whole;
    cols -= whole;
  }
  float* const to = panels.PanelOfB(col);
  if (tile.b_transposed) {
    PackRows<kCols>(df, static_cast<const B*>(tile.b.Row(col)) + piece.begin,
                    tile.b.ld, piece.k, cols, panels, to);
  } else {
    PackColumns<kCols>(static_cast<const B*>(tile.b.Row(piece.begin)) + col,
                       tile.b.ld, piece.k, cols, panels, to);
  }
}

void RunPanels(const Product& tile, float* scratch) {
  const int64_t m = tile.c.rows, n = tile.c.cols;
  const int64_t k = tile.a_transposed ? tile.a.rows : tile.a.cols;
  const Panels panels(tile, scratch);
  for (int64_t i = 0; i < panels.pieces; ++i) {
    const int64_t begin = k * i / panels.pieces;
    const int64_t end = k * (i + 1) / panels.pieces;
    const Piece piece = {begin, end - begin, begin == 0, end == k};
    for (int64_t row = 0; row < m; row += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, m - row);
      ZERO_CPU_WITH_FLOAT_TYPE(tile.a.dtype, T,
                               PackA<T>(tile, piece, row, rows, panels));
      for (int64_t col = 0; col < n; col += kBlockCols) {
        const int64_t cols = std::min(kBlockCols, n - col);
        if (row == 0) {
          ZERO_CPU_WITH_FLOAT_TYPE(tile.b.dtype, T,
                                   PackB<T>(tile, piece, col, cols, panels));
        }
        ZERO_CPU_WITH_FLOAT_TYPE(
            tile.c.dtype, T,
            MultiplyBlock<T>(tile, piece, row, rows, col, cols, panels));
      }
    }
  }
}

int64_t ScratchFloats(const Product& tile) {
  return Panels(tile, nullptr).size;
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(RunPanels);
HWY_EXPORT(ScratchFloats);

size_t PanelProductBytes(const Product& tile) {
  return static_cast<size_t>(HWY_DYNAMIC_DISPATCH(ScratchFloats)(tile)) *
         sizeof(float);
}

void PanelProduct(const Product& tile, void* scratch) {
  HWY_DYNAMIC_DISPATCH(RunPanels)(tile, static_cast<float*>(scratch));
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
