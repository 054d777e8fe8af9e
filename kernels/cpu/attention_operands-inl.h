// The operands of attention's products, in the forms in which a product reads
// them.
//
// All products are one of three, with queries in the columns of scores, so that
// their softmax advances in the lanes of vectors:
//   scores = keys queries^T     [keys, queries]; dscores = values douts^T
//   out^T += values^T weights   [d, queries];    dq^T += keys^T dscores
//   dv += weights douts         [keys, d];       dk += dscores queries
// Fp32Tiles and PairTiles hold keys (or values), queries (or douts) and weights
// (or dscores) for them.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/pair_product.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/tile-inl.h"
#include "kernels/sizes.h"

#if defined(ZERO_KERNELS_CPU_ATTENTION_OPERANDS_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_ATTENTION_OPERANDS_INL_H_
#undef ZERO_KERNELS_CPU_ATTENTION_OPERANDS_INL_H_
#else
#define ZERO_KERNELS_CPU_ATTENTION_OPERANDS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// Columns are padded to whole vectors of any target.
inline constexpr int64_t kVector = 16;

// Hands out parts of a task's scratch, each from a cache line on. Without a
// base, it only counts.
class ScratchAllocator {
 public:
  explicit ScratchAllocator(float* base) : base_(base) {}

  template <class T>
  T* Take(int64_t num) {
    const int64_t at = floats_;
    floats_ += RoundUp(num * static_cast<int64_t>(sizeof(T)), 64) / 4;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  int64_t floats() const { return floats_; }

 private:
  float* base_;
  int64_t floats_ = 0;
};

// Row t of head h of batch b.
template <class T, class Data>
HWY_INLINE ConstAs<T, Data>* HeadRow(const HeadsView<Data>& x, int64_t b,
                                     int64_t t, int64_t h, int64_t d) {
  return static_cast<ConstAs<T, Data>*>(x.data) + b * x.batch_stride +
         t * x.token_stride + h * d;
}

// Rows [t, t + num) of head h of batch b, d wide.
struct Rows {
  const HeadsRef& x;
  int64_t b, h, t, num, d;
};

// Rows of one head are a whole token apart, often in different pages, which no
// hardware prefetcher follows: the next rows are prefetched here.
template <class T>
HWY_INLINE void PrefetchRow(const T* row, int64_t d) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < d; i += kLine) __builtin_prefetch(row + i);
}
constexpr int64_t kRowsAhead = 8;

// Calls fn(i, row i) for all rows.
template <class T, class Fn>
HWY_INLINE void ForEachRow(const Rows& rows, const Fn& fn) {
  const T* row = HeadRow<T>(rows.x, rows.b, rows.t, rows.h, rows.d);
  for (int64_t i = 0; i < rows.num; ++i) {
    if (i + kRowsAhead < rows.num) {
      PrefetchRow(row + kRowsAhead * rows.x.token_stride, rows.d);
    }
    fn(i, row);
    row += rows.x.token_stride;
  }
}

// to[j, i] = from[i, j] of 4 bytes each, for rows and columns up to the next
// multiples of kVector.
HWY_NOINLINE void Transpose(const float* from, int64_t rows, int64_t cols,
                            int64_t ld, float* to, int64_t to_ld) {
  rows = RoundUp(rows, kVector);
  cols = RoundUp(cols, kVector);
#if ZERO_CPU_EMULATED
  for (int64_t j = 0; j < cols; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + j * to_ld + i, from + i * ld + j, 4);  // of any type
    }
  }
#else
  const hn::FixedTag<float, 4> d4;
  for (int64_t i = 0; i < rows; i += 4) {
    for (int64_t j = 0; j < cols; j += 4) {
      TransposeFour(d4, from + i * ld + j, ld, to + j * to_ld + i, to_ld);
    }
  }
#endif
}

// The forms that an operand is needed in: as a matrix, by rows, or transposed,
// by columns.
enum Forms { kRowForm = 1, kColumnForm = 2, kBothForms = 3 };

// ---- fp32 ------------------------------------------------------------------

// Of any storage, converted to fp32. Queries are scaled. A left operand is only
// broadcast: transposing it is free.
template <class T>
struct Fp32Tiles {
  using Type = T;
  static constexpr bool kScalesQueries = true;
  // Queries computed together where a tile crosses the diagonal.
  static constexpr int64_t kGroup = 16;
  // Multiples in which queries and keys are computed.
  static constexpr int64_t kColumns = kVector;
  static constexpr int64_t kKeyStep = 1;
  static constexpr int kRowsAtOnce = 1;  // of weights
  static int64_t Width(int64_t d) { return RoundUp(d, kVector); }

  // c[m, n] (+)= a[m, k] b[k, n].
  HWY_INLINE void Product(int64_t m, int64_t n, int64_t k, const LeftTile& a,
                          const RightTile& b, float* c, int64_t ldc,
                          bool accumulate) const {
    TileProduct(m, RoundUp(n, kVector), k, a, b.data, b.ld, c, ldc, accumulate);
  }

  static HWY_INLINE void LoadPanel(const Rows& rows, float factor, float* panel,
                                   int64_t ld) {
    ForEachRow<T>(rows, [&](int64_t i, const T* row) ZERO_CPU_BODY {
      float* const to = panel + i * ld;
      ScaleSpan(row, rows.d, factor, to);
      std::fill(to + rows.d, to + Width(rows.d), 0.0f);
    });
  }

  template <Forms>
  struct Keys {
    int64_t ld;
    float* data;

    Keys(ScratchAllocator& scratch, int64_t num, int64_t d)
        : ld(PanelLd(d)), data(scratch.Take<float>(num * ld)) {}
    HWY_INLINE void Load(const Rows& rows) const {
      LoadPanel(rows, 1, data, ld);
    }
    LeftTile rows(int64_t key) const { return {data + key * ld, ld, 1}; }
    LeftTile columns(int64_t key) const { return {data + key * ld, 1, ld}; }
  };

  template <Forms>
  struct Queries {
    int64_t ld;
    float* row_form;
    float* column_form;

    Queries(ScratchAllocator& scratch, int64_t d)
        : ld(PanelLd(d)),
          row_form(scratch.Take<float>(kQueryTile * ld)),
          column_form(scratch.Take<float>(Width(d) * kQueryTile)) {}
    HWY_INLINE void Load(const Rows& rows, float factor) const {
      LoadPanel(rows, factor, row_form, ld);
      std::fill(row_form + rows.num * ld,
                row_form + RoundUp(rows.num, kVector) * ld, 0.0f);
      Transpose(row_form, rows.num, rows.d, ld, column_form, kQueryTile);
    }
    RightTile rows(int64_t query) const { return {row_form + query * ld, ld}; }
    RightTile columns(int64_t query) const {
      return {column_form + query, kQueryTile};
    }
  };

  // [kKeyTile, kQueryTile]: first the scores, then in their place the weights.
  template <Forms>
  struct Weights {
    float* data;

    explicit Weights(ScratchAllocator& scratch)
        : data(scratch.Take<float>(kKeyTile * kQueryTile)) {}
    float* scores(int64_t key, int64_t query) const {
      return data + key * kQueryTile + query;
    }
    LeftTile rows(int64_t key, int64_t query) const {
      return {scores(key, query), kQueryTile, 1};
    }
    RightTile columns(int64_t key, int64_t query) const {
      return {scores(key, query), kQueryTile};
    }
    // Sets the weights of a vector of queries.
    HWY_INLINE void Put(int64_t key, int64_t query,
                        const VF (&weights)[1]) const {
      Store(weights[0], scores(key, query));
    }
    // Zeroes those of keys [0, keys) for n queries.
    void Clear(int64_t keys, int64_t query, int64_t n) const {
      for (int64_t j = 0; j < keys; ++j) {
        std::fill_n(scores(j, query), RoundUp(n, kColumns), 0.0f);
      }
    }
  };
};

// ---- Pairs of bf16 ---------------------------------------------------------

// As they are stored, multiplied by PairProducts; weights are rounded to bf16.
// Scores are scaled.
struct PairTiles {
  using Type = BF16;
  static constexpr bool kScalesQueries = false;
  static constexpr int64_t kGroup = kPairDepth;
  static constexpr int64_t kColumns = kPairDepth;
  static constexpr int64_t kKeyStep = kPairDepth;
  static constexpr int kRowsAtOnce = 2;
  static int64_t Width(int64_t d) { return RoundUp(d, kPairDepth); }

  PairProducts products{PairIsas().front()};

  void Product(int64_t m, int64_t n, int64_t k, const PairLeft& a,
               const PairRight& b, float* c, int64_t ldc,
               bool accumulate) const {
    products.Run(RoundUp(m, kPairRows), RoundUp(n, kPairRows),
                 RoundUp(k, kPairDepth), a, b, c, ldc, accumulate);
  }

  // panel[rows, ld] = the rows, with zeros up to multiples of kPairDepth.
  static HWY_INLINE void LoadPanel(const Rows& rows, uint16_t* panel,
                                   int64_t ld) {
    const int64_t width = Width(rows.d);
    ForEachRow<BF16>(rows, [&](int64_t i, const BF16* row) {
      std::memcpy(panel + i * ld, row, static_cast<size_t>(rows.d) * 2);
      std::fill(panel + i * ld + rows.d, panel + i * ld + width, uint16_t{0});
    });
    std::fill(panel + rows.num * ld, panel + RoundUp(rows.num, kPairDepth) * ld,
              uint16_t{0});
  }

  // Interleaves each pair of rows: to[i, j] = (panel[2i, j], panel[2i + 1, j]).
  static HWY_INLINE void PairRows(const uint16_t* panel, int64_t rows,
                                  int64_t width, uint32_t* to) {
    for (int64_t i = 0; i < rows; i += 2) {
      const uint16_t* const first = panel + i * width;
      const uint16_t* const second = first + width;
      for (int64_t j = 0; j < width; j += NumLanes()) {
        const VU low = hn::PromoteTo(du, hn::LoadU(du16, first + j));
        const VU high = hn::PromoteTo(du, hn::LoadU(du16, second + j));
        hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), du,
                   to + i / 2 * width + j);
      }
    }
  }
  static HWY_INLINE void TransposeWords(const void* from, int64_t rows,
                                        int64_t cols, int64_t ld, void* to,
                                        int64_t to_ld) {
    Transpose(static_cast<const float*>(from), rows, cols, ld,
              static_cast<float*>(to), to_ld);
  }

  template <Forms kForms>
  struct Keys {
    int64_t width, ld;  // ld: of the column form
    uint16_t* row_form;
    uint32_t* pairs = nullptr;
    uint16_t* column_form = nullptr;

    Keys(ScratchAllocator& scratch, int64_t num, int64_t d)
        : width(Width(d)),
          // Columns not a multiple of 512 bytes apart.
          ld(RoundUp(num, kPairDepth) + kPairDepth),
          row_form(scratch.Take<uint16_t>(RoundUp(num, kPairDepth) * width)) {
      if (kForms == kRowForm) return;
      pairs = scratch.Take<uint32_t>(kKeyTile / 2 * width);
      column_form = scratch.Take<uint16_t>(width * ld);
    }
    HWY_INLINE void Load(const Rows& rows) const {
      LoadPanel(rows, row_form, width);
      if (kForms == kRowForm) return;
      for (int64_t j = 0; j < rows.num; j += kKeyTile) {
        const int64_t num =
            std::min(kKeyTile, RoundUp(rows.num, kPairDepth) - j);
        PairRows(row_form + j * width, num, width, pairs);
        TransposeWords(pairs, num / 2, width, width, column_form + j, ld / 2);
      }
    }
    PairLeft rows(int64_t key) const { return {row_form + key * width, width}; }
    PairLeft columns(int64_t key) const { return {column_form + key, ld}; }
  };

  template <Forms kForms>
  struct Queries {
    int64_t width;
    uint16_t* panel;
    uint32_t* column_form;
    uint32_t* row_form = nullptr;

    Queries(ScratchAllocator& scratch, int64_t d)
        : width(Width(d)),
          panel(scratch.Take<uint16_t>(kQueryTile * width)),
          column_form(scratch.Take<uint32_t>(width / 2 * kQueryTile)) {
      if (kForms != kColumnForm) {
        row_form = scratch.Take<uint32_t>(kQueryTile / 2 * width);
      }
    }
    HWY_INLINE void Load(const Rows& rows, float) const {
      LoadPanel(rows, panel, width);
      const int64_t num = RoundUp(rows.num, kPairDepth);
      TransposeWords(panel, num, width / 2, width / 2, column_form, kQueryTile);
      if (kForms != kColumnForm) PairRows(panel, num, width, row_form);
    }
    PairRight rows(int64_t query) const {
      return {row_form + query / 2 * width, width};
    }
    PairRight columns(int64_t query) const {
      return {column_form + query, kQueryTile};
    }
  };

  template <Forms kForms>
  struct Weights {
    float* data;  // the scores
    BF16* row_form = nullptr;
    uint32_t* column_form = nullptr;

    explicit Weights(ScratchAllocator& scratch)
        : data(scratch.Take<float>(kKeyTile * kQueryTile)) {
      if (kForms & kRowForm) {
        row_form = scratch.Take<BF16>(kKeyTile * kQueryTile);
      }
      if (kForms & kColumnForm) {
        column_form = scratch.Take<uint32_t>(kKeyTile / 2 * kQueryTile);
      }
    }
    float* scores(int64_t key, int64_t query) const {
      return data + key * kQueryTile + query;
    }
    PairLeft rows(int64_t key, int64_t query) const {
      return {reinterpret_cast<const uint16_t*>(row_form) + key * kQueryTile +
                  query,
              kQueryTile};
    }
    PairRight columns(int64_t key, int64_t query) const {
      return {column_form + key / 2 * kQueryTile + query, kQueryTile};
    }
    HWY_INLINE void Put(int64_t key, int64_t query,
                        const VF (&weights)[2]) const {
      const VU low = hn::BitCast(du, RoundToUpper16(weights[0]));
      const VU high = hn::BitCast(du, RoundToUpper16(weights[1]));
      if (kForms & kRowForm) {
        BF16* const to = row_form + key * kQueryTile + query;
        Store(hn::BitCast(df, low), reinterpret_cast<Upper16*>(to));
        Store(hn::BitCast(df, high),
              reinterpret_cast<Upper16*>(to + kQueryTile));
      }
      if (kForms & kColumnForm) {
        const VU upper = hn::And(high, hn::Set(du, 0xFFFF0000));
        hn::StoreU(hn::Or(hn::ShiftRight<16>(low), upper), du,
                   column_form + key / 2 * kQueryTile + query);
      }
    }
    void Clear(int64_t keys, int64_t query, int64_t n) const {
      for (int64_t j = 0; j < keys; ++j) {
        std::fill_n(row_form + j * kQueryTile + query, RoundUp(n, kColumns),
                    BF16{});
      }
    }
  };
};

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_ATTENTION_OPERANDS_INL_H_
