#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/storage.h"
#include "kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// Queries of one group, where a tile crosses the diagonal.
constexpr int64_t kQueryGroup = 16;

// The panels' columns are padded to whole vectors of any target.
HWY_INLINE int64_t WholeVectors(int64_t n) { return (n + 15) / 16 * 16; }

// Row t of head h of batch b.
template <class T, class Data>
HWY_INLINE ConstAs<T, Data>* HeadRow(const HeadsView<Data>& x, int64_t b,
                                     int64_t t, int64_t h, int64_t d) {
  return static_cast<ConstAs<T, Data>*>(x.data) + b * x.batch_stride +
         t * x.token_stride + h * d;
}

// to = from * factor, with zeros up to the next multiple of 16 columns.
template <class T>
HWY_INLINE void ToPanelRow(const T* from, int64_t d, float factor, float* to) {
  ScaleSpan(from, d, factor, to);
  std::fill(to + d, to + WholeVectors(d), 0.0f);
}

// Rows of one head are a whole token apart, often in different pages, which no
// hardware prefetcher follows: the next rows are prefetched here.
template <class T>
HWY_INLINE void PrefetchRow(const T* row, int64_t d) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < d; i += kLine) __builtin_prefetch(row + i);
}
constexpr int64_t kRowsAhead = 8;

template <class T>
void ToPanel(const HeadsRef& x, int64_t b, int64_t h, int64_t t, int64_t rows,
             int64_t d, float factor, float* panel, int64_t ld) {
  const T* row = HeadRow<T>(x, b, t, h, d);
  for (int64_t i = 0; i < rows; ++i) {
    if (i + kRowsAhead < rows) {
      PrefetchRow(row + kRowsAhead * x.token_stride, d);
    }
    ToPanelRow(row, d, factor, panel + i * ld);
    row += x.token_stride;
  }
}

// to[j, i] = panel[i, j] with rows of kQueryTile, for all whole vectors of
// columns. Panel rows up to the next multiple of 16 are zeroed first.
HWY_NOINLINE void Transpose(float* panel, int64_t rows, int64_t d, int64_t ld,
                            float* to) {
  const int64_t padded = WholeVectors(rows);
  const int64_t width = WholeVectors(d);
  for (int64_t i = rows; i < padded; ++i) {
    std::fill(panel + i * ld, panel + i * ld + width, 0.0f);
  }
#if ZERO_CPU_EMULATED
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < padded; ++i) {
      to[j * kQueryTile + i] = panel[i * ld + j];
    }
  }
#else
  const hn::FixedTag<float, 4> d4;
  for (int64_t i = 0; i < padded; i += 4) {
    for (int64_t j = 0; j < width; j += 4) {
      TransposeFour(d4, panel + i * ld + j, ld, to + j * kQueryTile + i,
                    kQueryTile);
    }
  }
#endif
}

// Whether query lane i sees key `key`: key <= first_position + lane.
HWY_INLINE MF Visible(int64_t key, int64_t first_position) {
  const auto lane = hn::Iota(di, 0);
  // Clamped, so that any distance fits the lanes' type.
  const int64_t gap =
      std::clamp<int64_t>(key - first_position, -1, int64_t{1} << 20);
  return hn::RebindMask(
      df, hn::Gt(lane, hn::Set(di, static_cast<int32_t>(gap - 1))));
}

// starts[i] = the first key that query q + i sees; 0 beyond the last query.
template <class Args>
HWY_INLINE void FirstKeys(const Args& args, int64_t b, int64_t q, int64_t rows,
                          int32_t* starts) {
  for (int64_t i = 0; i < rows; ++i) {
    starts[i] = static_cast<int32_t>(FirstKey(args, b, q + i));
  }
  std::fill(starts + rows, starts + kQueryTile, 0);
}

// Whether the query of lane i sees key `key`: starts[i] <= key and, as above,
// key <= first_position + lane.
HWY_INLINE MF Visible(int64_t key, int64_t first_position,
                      const int32_t* starts) {
  const auto first = hn::LoadU(di, starts);
  const MF hidden =
      hn::RebindMask(df, hn::Gt(first, hn::Set(di, static_cast<int32_t>(key))));
  return hn::AndNot(hidden, Visible(key, first_position));
}

// The keys of a tile, counted from its first, that every one of `queries`
// queries sees: [begin, end), where the first query is at `position`.
struct FullKeys {
  int64_t begin, end;
};
HWY_INLINE FullKeys SeenByAll(int64_t key, int64_t keys, int64_t position,
                              int64_t queries, const int32_t* starts) {
  FullKeys full;
  full.begin = std::clamp<int64_t>(starts[queries - 1] - key, 0, keys);
  full.end = std::clamp<int64_t>(position + 1 - key, full.begin, keys);
  return full;
}

// Queries of a tile that are computed together: all if each sees every key of
// the tile, else kQueryGroup, so that few masked scores are computed.
HWY_INLINE int64_t GroupSize(int64_t rows, int64_t position, int64_t key,
                             int64_t keys, const int32_t* starts) {
  const FullKeys full = SeenByAll(key, keys, position, rows, starts);
  return full.end - full.begin == keys ? rows : kQueryGroup;
}

// One step of the online softmax over `keys` rows of transposed scores, for
// queries whose first is at `position`, with keys from `key` on. Leaves e^(s -
// max) in the scores and, in alpha, the factor of the earlier sums.
HWY_INLINE void SoftmaxStep(float* scores, int64_t keys, int64_t queries,
                            int64_t key, int64_t position,
                            const int32_t* starts, float* max, float* sum,
                            float* alpha) {
  const VF minus_inf = hn::Set(df, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < queries; i += NumLanes()) {
    float* column = scores + i;
    const VF old_max = Load(max + i);
    VF m = old_max;
    const FullKeys full = SeenByAll(
        key, keys, position + i, std::min(NumLanes(), queries - i), starts + i);
    const auto mask = [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const VF s = hn::IfThenElse(Visible(key + p, position + i, starts + i),
                                    Load(column + p * kQueryTile), minus_inf);
        Store(s, column + p * kQueryTile);
        m = hn::Max(m, s);
      }
    };
    mask(0, full.begin);
    for (int64_t p = full.begin; p < full.end; ++p) {
      m = hn::Max(m, Load(column + p * kQueryTile));
    }
    mask(full.end, keys);
    // A lane that has seen no key yet keeps sums of 0: e^(-inf - 0).
    const VF shift = hn::IfThenZeroElse(hn::Eq(m, minus_inf), m);
    const VF factor = Exp(hn::Sub(old_max, shift));
    VF total = hn::Zero(df);
    for (int64_t p = 0; p < keys; ++p) {
      const VF e = Exp(hn::Sub(Load(column + p * kQueryTile), shift));
      Store(e, column + p * kQueryTile);
      total = hn::Add(total, e);
    }
    Store(m, max + i);
    Store(Fma(Load(sum + i), factor, total), sum + i);
    Store(factor, alpha + i);
  }
}

HWY_INLINE void ScaleRows(float* rows, int64_t num_rows, int64_t width,
                          int64_t ld, const float* factors) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const VF f = hn::Set(df, factors[i]);
    for (int64_t j = 0; j < width; j += NumLanes()) {
      Store(hn::Mul(Load(rows + i * ld + j), f), rows + i * ld + j);
    }
  }
}

template <class T>
HWY_INLINE float Dot(const float* x, const T* y, int64_t n) {
  VF sum = hn::Zero(df);
  ForEachVector(0, n, [&](auto at) ZERO_CPU_BODY {
    sum = Fma(at.Load(x), at.Load(y), sum);
  });
  return Sum(sum);
}

// One query, as in generation: rows of k and v are read in place, once, and
// nothing is padded to a tile.
template <class T>
void ForwardOneQuery(const AttentionForwardArgs& args,
                     const AttentionForwardTask& task, float* scratch) {
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  const int64_t width = WholeVectors(d);
  const int64_t b = task.batch;
  const int64_t kv_head = task.head / (shape.num_heads / shape.num_kv_heads);
  const int64_t num_keys = shape.kv_len - shape.q_len + task.q_begin + 1;
  float* const query = scratch;
  float* const out = query + width;
  float* const scores = out + width;
  ToPanelRow(HeadRow<T>(args.q, b, task.q_begin, task.head, d), d, shape.scale,
             query);
  std::fill(out, out + width, 0.0f);
  float max = -std::numeric_limits<float>::infinity();
  float sum = 0;
  for (int64_t key = 0; key < num_keys; key += kKeyTile) {
    const int64_t keys = std::min(kKeyTile, num_keys - key);
    const float old_max = max;
    const T* row = HeadRow<T>(args.k, b, key, kv_head, d);
    for (int64_t j = 0; j < keys; ++j) {
      PrefetchRow(row + kRowsAhead * args.k.token_stride, d);
      scores[j] = Dot(query, row, d);
      max = scores[j] > max ? scores[j] : max;
      row += args.k.token_stride;
    }
    const VF shift = hn::Set(df, max);
    VF total = hn::Zero(df);
    ForEachVector(0, keys, [&](auto at) ZERO_CPU_BODY {
      const VF e = Exp(hn::Sub(at.Load(scores), shift));
      at.Store(e, scores);
      total = hn::Add(total, at.Keep(e, hn::Zero(df)));
    });
    const float factor = hn::GetLane(Exp(hn::Sub(hn::Set(df, old_max), shift)));
    sum = sum * factor + Sum(total);
    ScaleRows(out, 1, width, width, &factor);
    row = HeadRow<T>(args.v, b, key, kv_head, d);
    for (int64_t j = 0; j < keys; ++j) {
      PrefetchRow(row + kRowsAhead * args.v.token_stride, d);
      const VF weight = hn::Set(df, scores[j]);
      ForEachVector(0, d, [&](auto at) ZERO_CPU_BODY {
        at.Store(Fma(weight, at.Load(row), at.Load(out)), out);
      });
      row += args.v.token_stride;
    }
  }
  ScaleSpan(out, d, 1.0f / sum,
            HeadRow<T>(args.out, b, task.q_begin, task.head, d));
  if (args.lse != nullptr) {
    args.lse[(b * shape.num_heads + task.head) * shape.q_len + task.q_begin] =
        max + std::log(sum);
  }
}

// The forward pass's state of one query tile; see ForwardScratch.
struct QueryState {
  float* transposed;  // [D, kQueryTile], scaled
  float* out;         // [kQueryTile, ld]
  float* max;         // [kQueryTile]
  float* sum;         // [kQueryTile]
  int32_t* starts;    // [kQueryTile] the first key each query sees
};

template <class T>
void ForwardTask(const AttentionForwardArgs& args,
                 const AttentionForwardTask& task, float* scratch) {
  const AttentionShape& shape = args.shape;
  if (shape.q_len == 1) return ForwardOneQuery<T>(args, task, scratch);
  const int64_t d = shape.head_dim;
  const int64_t ld = PanelLd(d);
  const int64_t width = WholeVectors(d);
  const int64_t b = task.batch;
  const int64_t kv_head = task.head / (shape.num_heads / shape.num_kv_heads);
  const int64_t offset = shape.kv_len - shape.q_len;  // position of query 0

  float* const keys = scratch;
  float* const values = keys + kKeyTile * ld;
  float* const scores = values + kKeyTile * ld;
  float* const alpha = scores + kKeyTile * kQueryTile;
  float* const states = alpha + kQueryTile;
  const int64_t state_floats =
      width * kQueryTile + kQueryTile * ld + 3 * kQueryTile;
  const auto state = [&](int64_t q) {
    float* p = states + (q - task.q_begin) / kQueryTile * state_floats;
    QueryState s;
    s.out = p;
    s.transposed = p + kQueryTile * ld;
    s.max = s.transposed + width * kQueryTile;
    s.sum = s.max + kQueryTile;
    s.starts = reinterpret_cast<int32_t*>(s.sum + kQueryTile);
    return s;
  };
  // If sequences begin within a tile, a query's first keys may be beyond the
  // first tile: its sums begin at 0.
  const bool packed = args.packed.positions != nullptr;
  const int64_t first_key = FirstKeyTile(args, b, task.q_begin);

  for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
    const int64_t rows = std::min(kQueryTile, task.q_end - q);
    const QueryState s = state(q);
    ToPanel<T>(args.q, b, task.head, q, rows, d, shape.scale, s.out, ld);
    Transpose(s.out, rows, d, ld, s.transposed);
    FirstKeys(args, b, q, rows, s.starts);
    if (packed) std::fill(s.out, s.out + rows * ld, 0.0f);
    std::fill(s.max, s.max + kQueryTile,
              -std::numeric_limits<float>::infinity());
    std::fill(s.sum, s.sum + kQueryTile, 0.0f);
  }

  const int64_t num_keys = offset + task.q_end;  // visible to the last query
  for (int64_t key = first_key; key < num_keys; key += kKeyTile) {
    const int64_t tile_keys = std::min(kKeyTile, num_keys - key);
    const bool adds = packed || key > 0;
    ToPanel<T>(args.k, b, kv_head, key, tile_keys, d, 1.0f, keys, ld);
    ToPanel<T>(args.v, b, kv_head, key, tile_keys, d, 1.0f, values, ld);
    for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
      const int64_t rows = std::min(kQueryTile, task.q_end - q);
      const int64_t position = offset + q;
      const QueryState s = state(q);
      const int64_t group = GroupSize(rows, position, key, tile_keys, s.starts);
      for (int64_t i = 0; i < rows; i += group) {
        const int64_t n = std::min(group, rows - i);
        // Keys beyond the group's last query, and before the first that any
        // of it sees, are not touched at all.
        const int64_t end = std::min(tile_keys, position + i + n - key);
        const int64_t begin = std::max<int64_t>(0, s.starts[i] - key);
        if (end <= begin) continue;
        TileProduct(end - begin, WholeVectors(n), d, {keys + begin * ld, ld, 1},
                    s.transposed + i, kQueryTile, scores + i, kQueryTile,
                    false);
        SoftmaxStep(scores + i, end - begin, n, key + begin, position + i,
                    s.starts + i, s.max + i, s.sum + i, alpha + i);
        if (adds) ScaleRows(s.out + i * ld, n, width, ld, alpha + i);
        TileProduct(n, width, end - begin, {scores + i, 1, kQueryTile},
                    values + begin * ld, ld, s.out + i * ld, ld, adds);
      }
    }
  }

  for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
    const int64_t rows = std::min(kQueryTile, task.q_end - q);
    const QueryState s = state(q);
    for (int64_t i = 0; i < rows; ++i) {
      ScaleSpan(s.out + i * ld, d, 1.0f / s.sum[i],
                HeadRow<T>(args.out, b, q + i, task.head, d));
      if (args.lse != nullptr) {
        args.lse[(b * shape.num_heads + task.head) * shape.q_len + q + i] =
            s.max[i] + std::log(s.sum[i]);
      }
    }
  }
}

// Turns scores into p = e^(s - lse) and dp into ds = p (dp - delta); both are
// 0 where the query does not see the key.
HWY_INLINE void SoftmaxBackward(float* scores, float* dp, int64_t keys,
                                int64_t queries, int64_t key, int64_t position,
                                const int32_t* starts, const float* lse,
                                const float* delta) {
  for (int64_t i = 0; i < queries; i += NumLanes()) {
    const VF l = Load(lse + i);
    const VF dl = Load(delta + i);
    const FullKeys full = SeenByAll(
        key, keys, position + i, std::min(NumLanes(), queries - i), starts + i);
    for (int64_t j = 0; j < keys; ++j) {
      float* s = scores + j * kQueryTile + i;
      float* g = dp + j * kQueryTile + i;
      VF p = Exp(hn::Sub(Load(s), l));
      if (j < full.begin || j >= full.end) {
        p = hn::IfThenElseZero(Visible(key + j, position + i, starts + i), p);
      }
      Store(p, s);
      Store(hn::Mul(p, hn::Sub(Load(g), dl)), g);
    }
  }
}

template <class T>
void BackwardTask(const AttentionBackwardArgs& args,
                  const AttentionBackwardTask& task, float* scratch) {
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  const int64_t ld = PanelLd(d);
  const int64_t width = WholeVectors(d);
  const int64_t b = task.batch;
  const int64_t kv_head =
      task.head_begin / (shape.num_heads / shape.num_kv_heads);
  const int64_t num_keys = task.kv_end - task.kv_begin;

  float* p = scratch;
  const auto take = [&p](int64_t floats) {
    float* taken = p;
    p += (floats + 15) / 16 * 16;
    return taken;
  };
  float* const keys = take(num_keys * ld);
  float* const values = take(num_keys * ld);
  float* const dkeys = take(num_keys * ld);
  float* const dvalues = take(num_keys * ld);
  float* const queries = take(kQueryTile * ld);
  float* const douts = take(kQueryTile * ld);
  float* const dqueries = take(kQueryTile * ld);
  float* const queries_t = take(width * kQueryTile);
  float* const douts_t = take(width * kQueryTile);
  float* const scores = take(kKeyTile * kQueryTile);
  float* const dscores = take(kKeyTile * kQueryTile);
  float* const lse = take(kQueryTile);
  float* const delta = take(kQueryTile);
  int32_t* const starts = reinterpret_cast<int32_t*>(take(kQueryTile));
  const bool packed = args.packed.positions != nullptr;

  ToPanel<T>(args.k, b, kv_head, task.kv_begin, num_keys, d, 1.0f, keys, ld);
  ToPanel<T>(args.v, b, kv_head, task.kv_begin, num_keys, d, 1.0f, values, ld);
  if (task.write_dkv) {
    std::fill(dkeys, dkeys + num_keys * ld, 0.0f);
    std::fill(dvalues, dvalues + num_keys * ld, 0.0f);
  }

  for (int64_t h = task.head_begin; h < task.head_end; ++h) {
    for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
      const int64_t rows = std::min(kQueryTile, task.q_end - q);
      // Query i sees keys up to i: training has as many queries as keys.
      if (q + rows <= task.kv_begin) continue;
      FirstKeys(args, b, q, rows, starts);
      if (starts[0] >= task.kv_end) break;  // the keys' sequences are over
      if (packed && task.write_dq) {
        std::fill(dqueries, dqueries + rows * ld, 0.0f);
      }
      ToPanel<T>(args.q, b, h, q, rows, d, shape.scale, queries, ld);
      ToPanel<T>(args.dout, b, h, q, rows, d, 1.0f, douts, ld);
      Transpose(queries, rows, d, ld, queries_t);
      Transpose(douts, rows, d, ld, douts_t);
      // Lanes beyond the last query get p = e^(0 - inf) = 0.
      std::fill(lse, lse + kQueryTile, std::numeric_limits<float>::infinity());
      std::fill(delta, delta + kQueryTile, 0.0f);
      const float* const tile_lse =
          args.lse + (b * shape.num_heads + h) * shape.q_len + q;
      std::copy(tile_lse, tile_lse + rows, lse);
      const T* out_row = HeadRow<T>(args.out, b, q, h, d);
      for (int64_t i = 0; i < rows; ++i) {
        if (i + kRowsAhead < rows) {
          PrefetchRow(out_row + kRowsAhead * args.out.token_stride, d);
        }
        delta[i] = Dot(douts + i * ld, out_row, d);
        out_row += args.out.token_stride;
      }
      for (int64_t key = task.kv_begin; key < task.kv_end; key += kKeyTile) {
        const int64_t tile_keys =
            std::min({kKeyTile, task.kv_end - key, q + rows - key});
        if (tile_keys <= 0) break;
        if (key + tile_keys <= starts[0]) continue;
        const int64_t at = (key - task.kv_begin) * ld;
        const int64_t group = GroupSize(rows, q, key, tile_keys, starts);
        for (int64_t i = 0; i < rows; i += group) {
          const int64_t n = std::min(group, rows - i);
          const int64_t end = std::min(tile_keys, q + i + n - key);
          const int64_t begin = std::clamp<int64_t>(starts[i] - key, 0,
                                                    std::max<int64_t>(0, end));
          // Keys before the group's first sequence add nothing to dk and dv.
          for (int64_t j = 0; j < begin; ++j) {
            for (float* const s : {scores, dscores}) {
              float* const row = s + j * kQueryTile + i;
              std::fill(row, row + WholeVectors(n), 0.0f);
            }
          }
          if (end <= begin) continue;
          const int64_t from = begin * kQueryTile + i;
          const int64_t panel = at + begin * ld;
          TileProduct(end - begin, WholeVectors(n), d, {keys + panel, ld, 1},
                      queries_t + i, kQueryTile, scores + from, kQueryTile,
                      false);
          TileProduct(end - begin, WholeVectors(n), d, {values + panel, ld, 1},
                      douts_t + i, kQueryTile, dscores + from, kQueryTile,
                      false);
          SoftmaxBackward(scores + from, dscores + from, end - begin, n,
                          key + begin, q + i, starts + i, lse + i, delta + i);
          if (task.write_dq) {
            TileProduct(n, width, end - begin, {dscores + from, 1, kQueryTile},
                        keys + panel, ld, dqueries + i * ld, ld,
                        packed || key > task.kv_begin);
          }
        }
        if (!task.write_dkv) continue;
        // All queries see the first keys; each further group of keys is seen by
        // one group of queries fewer. Tiles begin at multiples of groups.
        const int64_t full = std::clamp<int64_t>(q - key, 0, tile_keys);
        for (int64_t j = 0, i = 0; j < tile_keys;) {
          const int64_t m =
              j == 0 && full > 0 ? full : std::min(kQueryGroup, tile_keys - j);
          const int64_t from = j * kQueryTile + i;
          TileProduct(m, width, rows - i, {scores + from, kQueryTile, 1},
                      douts + i * ld, ld, dvalues + at + j * ld, ld, true);
          TileProduct(m, width, rows - i, {dscores + from, kQueryTile, 1},
                      queries + i * ld, ld, dkeys + at + j * ld, ld, true);
          j += m;
          i = j - full;
        }
      }
      if (!task.write_dq) continue;
      for (int64_t i = 0; i < rows; ++i) {
        ScaleSpan(dqueries + i * ld, d, shape.scale,
                  HeadRow<T>(args.dq, b, q + i, h, d));
      }
    }
  }

  if (!task.write_dkv) return;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t t = task.kv_begin + j;
    ScaleSpan(dkeys + j * ld, d, 1.0f, HeadRow<T>(args.dk, b, t, kv_head, d));
    ScaleSpan(dvalues + j * ld, d, 1.0f, HeadRow<T>(args.dv, b, t, kv_head, d));
  }
}

void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, float* scratch) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.shape.dtype, T,
                           ForwardTask<T>(args, task, scratch));
}
void RunBackwardTask(const AttentionBackwardArgs& args,
                     const AttentionBackwardTask& task, float* scratch) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.shape.dtype, T,
                           BackwardTask<T>(args, task, scratch));
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(RunForwardTask);
HWY_EXPORT(RunBackwardTask);

void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunForwardTask)(args, task, scratch);
}
void RunBackwardTask(const AttentionBackwardArgs& args,
                     const AttentionBackwardTask& task, float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunBackwardTask)(args, task, scratch);
}

int64_t ForwardScratch(const AttentionShape& shape, int64_t num_queries) {
  const int64_t ld = PanelLd(shape.head_dim);
  const int64_t width = (shape.head_dim + 15) / 16 * 16;
  const int64_t tiles = (num_queries + kQueryTile - 1) / kQueryTile;
  return 2 * kKeyTile * ld + kKeyTile * kQueryTile + kQueryTile +
         tiles * (width * kQueryTile + kQueryTile * ld + 3 * kQueryTile);
}

int64_t BackwardScratch(const AttentionShape& shape, int64_t num_keys) {
  const int64_t ld = PanelLd(shape.head_dim);
  const int64_t width = (shape.head_dim + 15) / 16 * 16;
  return 4 * num_keys * ld + 3 * kQueryTile * ld + 2 * width * kQueryTile +
         2 * kKeyTile * kQueryTile + 3 * kQueryTile;
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
