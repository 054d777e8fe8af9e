#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/attention_operands-inl.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/cpu/storage.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

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
// the tile, else kGroup, so that few masked scores are computed.
template <class Tiles>
HWY_INLINE int64_t GroupSize(int64_t rows, int64_t position, int64_t key,
                             int64_t keys, const int32_t* starts) {
  const FullKeys full = SeenByAll(key, keys, position, rows, starts);
  return full.end - full.begin == keys ? rows : Tiles::kGroup;
}

// The keys of a tile, counted from its first, that a group of queries is
// computed with: those beyond its last query, and before the first that any of
// it sees, are not touched at all.
struct KeyRange {
  int64_t begin, end;
};
template <class Tiles>
HWY_INLINE KeyRange KeysOf(int64_t first, int64_t last) {
  return {RoundUp(std::max<int64_t>(first + 1, 1), Tiles::kKeyStep) -
              Tiles::kKeyStep,
          RoundUp(std::max<int64_t>(last, 0), Tiles::kKeyStep)};
}

// The queries of the vector at column i of a group of n, at least one: columns
// beyond the group are computed too, and not used.
HWY_INLINE int64_t LanesAt(int64_t i, int64_t n) {
  return std::clamp<int64_t>(n - i, 1, NumLanes());
}

// One step of the online softmax over the scores of keys [at, at + keys) of the
// tile at `tile`, for n queries, whose first is column i0 and at `position`.
// Sets the weights e^(s - max) and, in alpha, the factor of the earlier sums.
template <class Tiles, class Weights>
HWY_INLINE void SoftmaxStep(const Weights& weights, float scale, int64_t tile,
                            int64_t at, int64_t keys, int64_t i0, int64_t n,
                            int64_t position, const int32_t* starts, float* max,
                            float* sum, float* alpha) {
  const VF minus_inf = hn::Set(df, -std::numeric_limits<float>::infinity());
  const VF factor = hn::Set(df, scale);
  const auto scaled = [&](VF s) ZERO_CPU_BODY {
    return Tiles::kScalesQueries ? s : hn::Mul(s, factor);
  };
  const int64_t key = tile + at;
  for (int64_t i = 0; i < RoundUp(n, Tiles::kColumns); i += NumLanes()) {
    float* column = weights.scores(at, i0 + i);
    const VF old_max = Load(max + i);
    VF m = old_max;
    const FullKeys full =
        SeenByAll(key, keys, position + i, LanesAt(i, n), starts + i);
    const auto mask = [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const VF s = hn::IfThenElse(Visible(key + p, position + i, starts + i),
                                    Load(column + p * kQueryTile), minus_inf);
        Store(s, column + p * kQueryTile);
        m = hn::Max(m, scaled(s));
      }
    };
    mask(0, full.begin);
    for (int64_t p = full.begin; p < full.end; ++p) {
      m = hn::Max(m, scaled(Load(column + p * kQueryTile)));
    }
    mask(full.end, keys);
    // A lane that has seen no key yet keeps sums of 0: e^(-inf - 0).
    const VF shift = hn::IfThenZeroElse(hn::Eq(m, minus_inf), m);
    const VF earlier = ExpOrZero(hn::Sub(old_max, shift));
    VF total = hn::Zero(df);
    for (int64_t p = 0; p < keys; p += Tiles::kRowsAtOnce) {
      VF e[Tiles::kRowsAtOnce];
#pragma GCC unroll 2
      for (int r = 0; r < Tiles::kRowsAtOnce; ++r) {
        const VF s = scaled(Load(column + (p + r) * kQueryTile));
        e[r] = ExpOrZero(hn::Sub(s, shift));
        total = hn::Add(total, e[r]);
      }
      weights.Put(at + p, i0 + i, e);
    }
    Store(m, max + i);
    Store(Fma(Load(sum + i), earlier, total), sum + i);
    Store(earlier, alpha + i);
  }
}

// Multiplies the columns of panel[rows, n] by their factors.
HWY_INLINE void ScaleColumns(float* panel, int64_t rows, int64_t n,
                             const float* factors) {
  for (int64_t i = 0; i < n; i += NumLanes()) {
    const VF f = Load(factors + i);
    for (int64_t j = 0; j < rows; ++j) {
      float* const at = panel + j * kQueryTile + i;
      Store(hn::Mul(Load(at), f), at);
    }
  }
}

template <class X, class Y>
HWY_INLINE float Dot(const X* x, const Y* y, int64_t n) {
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
  const int64_t width = RoundUp(d, kVector);
  const int64_t b = task.batch;
  const int64_t kv_head = task.head / (shape.num_heads / shape.num_kv_heads);
  const int64_t num_keys = shape.kv_len - shape.q_len + task.q_begin + 1;
  float* const query = scratch;
  float* const out = query + width;
  float* const scores = out + width;
  ScaleSpan(HeadRow<T>(args.q, b, task.q_begin, task.head, d), d, shape.scale,
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
      const VF e = ExpOrZero(hn::Sub(at.Load(scores), shift));
      at.Store(e, scores);
      total = hn::Add(total, at.Keep(e, hn::Zero(df)));
    });
    const float factor =
        hn::GetLane(ExpOrZero(hn::Sub(hn::Set(df, old_max), shift)));
    sum = sum * factor + Sum(total);
    ScaleSpan(out, d, factor, out);
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

// The memory of a forward task. Without a base, it only counts.
template <class Tiles>
struct ForwardMemory {
  // Of one tile of queries.
  struct State {
    typename Tiles::template Queries<kColumnForm> queries;
    float* out;       // [D, kQueryTile]
    float* max;       // [kQueryTile]
    float* sum;       // [kQueryTile]
    int32_t* starts;  // [kQueryTile] the first key each query sees

    State(ScratchAllocator& allocator, int64_t d)
        : queries(allocator, d),
          out(allocator.Take<float>(Tiles::Width(d) * kQueryTile)),
          max(allocator.Take<float>(kQueryTile)),
          sum(allocator.Take<float>(kQueryTile)),
          starts(allocator.Take<int32_t>(kQueryTile)) {}
  };

  typename Tiles::template Keys<kRowForm> keys;
  typename Tiles::template Keys<kColumnForm> values;
  typename Tiles::template Weights<kColumnForm> weights;
  float* alpha;  // [kQueryTile]
  float* rows;   // [kQueryTile, PanelLd(d)]
  ScratchAllocator states;

  ForwardMemory(ScratchAllocator& allocator, int64_t d, int64_t num_queries)
      : keys(allocator, kKeyTile, d),
        values(allocator, kKeyTile, d),
        weights(allocator),
        alpha(allocator.Take<float>(kQueryTile)),
        rows(allocator.Take<float>(kQueryTile * PanelLd(d))),
        states(allocator) {
    for (int64_t q = 0; q < num_queries; q += kQueryTile) State(allocator, d);
  }
};

// Writes the rows of panel^T, [D, kQueryTile], to a head. `rows`: scratch.
template <class T>
HWY_INLINE void StoreTransposed(const float* panel, int64_t num, int64_t d,
                                float factor, float* rows,
                                const MutableHeadsRef& to, int64_t b, int64_t h,
                                int64_t t) {
  const int64_t ld = PanelLd(d);
  Transpose(panel, d, num, kQueryTile, rows, ld);
  for (int64_t i = 0; i < num; ++i) {
    ScaleSpan(rows + i * ld, d, factor, HeadRow<T>(to, b, t + i, h, d));
  }
}

template <class Tiles>
void ForwardTask(const AttentionForwardArgs& args,
                 const AttentionForwardTask& task, float* scratch) {
  using T = typename Tiles::Type;
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  const int64_t b = task.batch;
  const int64_t kv_head = task.head / (shape.num_heads / shape.num_kv_heads);
  const int64_t offset = shape.kv_len - shape.q_len;  // position of query 0
  const Tiles tiles;
  ScratchAllocator allocator(scratch);
  ForwardMemory<Tiles> memory(allocator, d, task.q_end - task.q_begin);
  const auto& weights = memory.weights;
  // Calls fn(first query, number, state) for all tiles of queries.
  const auto for_each_tile = [&](const auto& fn) {
    ScratchAllocator states = memory.states;
    for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
      typename ForwardMemory<Tiles>::State state(states, d);
      fn(q, std::min(kQueryTile, task.q_end - q), state);
    }
  };
  // If sequences begin within a tile, a query's first keys may be beyond the
  // first tile: its sums begin at 0.
  const bool packed = args.packed.positions != nullptr;
  const int64_t first_key = FirstKeyTile(args, b, task.q_begin);

  for_each_tile([&](int64_t q, int64_t rows, auto& s) {
    s.queries.Load(Rows{args.q, b, task.head, q, rows, d}, shape.scale);
    FirstKeys(args, b, q, rows, s.starts);
    if (packed) std::fill(s.out, s.out + Tiles::Width(d) * kQueryTile, 0.0f);
    std::fill(s.max, s.max + kQueryTile,
              -std::numeric_limits<float>::infinity());
    std::fill(s.sum, s.sum + kQueryTile, 0.0f);
  });

  const int64_t num_keys = offset + task.q_end;  // visible to the last query
  for (int64_t key = first_key; key < num_keys; key += kKeyTile) {
    const int64_t tile_keys = std::min(kKeyTile, num_keys - key);
    const bool adds = packed || key > 0;
    memory.keys.Load(Rows{args.k, b, kv_head, key, tile_keys, d});
    memory.values.Load(Rows{args.v, b, kv_head, key, tile_keys, d});
    for_each_tile([&](int64_t q, int64_t rows, auto& s) {
      const int64_t position = offset + q;
      const int64_t group =
          GroupSize<Tiles>(rows, position, key, tile_keys, s.starts);
      for (int64_t i = 0; i < rows; i += group) {
        const int64_t n = std::min(group, rows - i);
        const KeyRange range = KeysOf<Tiles>(
            s.starts[i] - key, std::min(tile_keys, position + i + n - key));
        const int64_t num = range.end - range.begin;
        if (num <= 0) continue;
        const int64_t columns = RoundUp(n, Tiles::kColumns);
        tiles.Product(num, columns, d, memory.keys.rows(range.begin),
                      s.queries.columns(i), weights.scores(range.begin, i),
                      kQueryTile, false);
        SoftmaxStep<Tiles>(weights, shape.scale, key, range.begin, num, i, n,
                           position + i, s.starts + i, s.max + i, s.sum + i,
                           memory.alpha + i);
        if (adds) ScaleColumns(s.out + i, d, columns, memory.alpha + i);
        tiles.Product(d, columns, num, memory.values.columns(range.begin),
                      weights.columns(range.begin, i), s.out + i, kQueryTile,
                      adds);
      }
    });
  }

  for_each_tile([&](int64_t q, int64_t rows, auto& s) {
    float* const inverse = memory.alpha;
    for (int64_t i = 0; i < rows; ++i) {
      inverse[i] = 1.0f / s.sum[i];
      if (args.lse != nullptr) {
        args.lse[(b * shape.num_heads + task.head) * shape.q_len + q + i] =
            s.max[i] + std::log(s.sum[i]);
      }
    }
    ScaleColumns(s.out, d, rows, inverse);
    StoreTransposed<T>(s.out, rows, d, 1, memory.rows, args.out, b, task.head,
                       q);
  });
}

// Turns the scores of n queries into p = e^(s - lse), and dp into ds = p (dp -
// delta); both are 0 where the query does not see the key. Arguments as in
// SoftmaxStep.
template <class Tiles, class P, class DS>
HWY_INLINE void SoftmaxBackward(const P& ps, const DS& dss, float scale,
                                int64_t tile, int64_t at, int64_t keys,
                                int64_t i0, int64_t n, int64_t position,
                                const int32_t* starts, const float* lse,
                                const float* delta) {
  const VF factor = hn::Set(df, scale);
  const int64_t key = tile + at;
  for (int64_t i = 0; i < RoundUp(n, Tiles::kColumns); i += NumLanes()) {
    const VF l = Load(lse + i);
    const VF dl = Load(delta + i);
    const FullKeys full =
        SeenByAll(key, keys, position + i, LanesAt(i, n), starts + i);
    for (int64_t j = 0; j < keys; j += Tiles::kRowsAtOnce) {
      VF p[Tiles::kRowsAtOnce], ds[Tiles::kRowsAtOnce];
#pragma GCC unroll 2
      for (int r = 0; r < Tiles::kRowsAtOnce; ++r) {
        VF s = Load(ps.scores(at + j + r, i0 + i));
        if (!Tiles::kScalesQueries) s = hn::Mul(s, factor);
        p[r] = ExpOrZero(hn::Sub(s, l));
        if (j + r < full.begin || j + r >= full.end) {
          p[r] = hn::IfThenElseZero(
              Visible(key + j + r, position + i, starts + i), p[r]);
        }
        ds[r] =
            hn::Mul(p[r], hn::Sub(Load(dss.scores(at + j + r, i0 + i)), dl));
      }
      ps.Put(at + j, i0 + i, p);
      dss.Put(at + j, i0 + i, ds);
    }
  }
}

// The memory of a backward task. Without a base, it only counts.
template <class Tiles>
struct BackwardMemory {
  typename Tiles::template Keys<kBothForms> keys;
  typename Tiles::template Keys<kRowForm> values;
  typename Tiles::template Queries<kBothForms> queries, douts;
  typename Tiles::template Weights<kRowForm> weights;
  typename Tiles::template Weights<kBothForms> dscores;
  float *dkeys, *dvalues;  // [keys, PanelLd(d)]
  float* dqueries;         // [D, kQueryTile]
  float* rows;             // [kQueryTile, PanelLd(d)]
  float *lse, *delta;      // [kQueryTile]
  int32_t* starts;         // [kQueryTile]

  BackwardMemory(ScratchAllocator& allocator, int64_t d, int64_t num_keys)
      : keys(allocator, num_keys, d),
        values(allocator, num_keys, d),
        queries(allocator, d),
        douts(allocator, d),
        weights(allocator),
        dscores(allocator),
        dkeys(allocator.Take<float>(PanelFloats(num_keys, d))),
        dvalues(allocator.Take<float>(PanelFloats(num_keys, d))),
        dqueries(allocator.Take<float>(Tiles::Width(d) * kQueryTile)),
        rows(allocator.Take<float>(kQueryTile * PanelLd(d))),
        lse(allocator.Take<float>(kQueryTile)),
        delta(allocator.Take<float>(kQueryTile)),
        starts(allocator.Take<int32_t>(kQueryTile)) {}

  static int64_t PanelFloats(int64_t num_keys, int64_t d) {
    return RoundUp(num_keys, Tiles::kKeyStep) * PanelLd(d);
  }
};

template <class Tiles>
void BackwardTask(const AttentionBackwardArgs& args,
                  const AttentionBackwardTask& task, float* scratch) {
  using T = typename Tiles::Type;
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  const int64_t ld = PanelLd(d);
  const int64_t b = task.batch;
  const int64_t kv_head =
      task.head_begin / (shape.num_heads / shape.num_kv_heads);
  const int64_t num_keys = task.kv_end - task.kv_begin;
  const bool packed = args.packed.positions != nullptr;
  const Tiles tiles;
  ScratchAllocator allocator(scratch);
  BackwardMemory<Tiles> memory(allocator, d, num_keys);
  const auto& [keys, values, queries, douts, weights, dscores, dkeys, dvalues,
               dqueries, rows_scratch, lse, delta, starts] = memory;

  memory.keys.Load(Rows{args.k, b, kv_head, task.kv_begin, num_keys, d});
  memory.values.Load(Rows{args.v, b, kv_head, task.kv_begin, num_keys, d});
  if (task.write_dkv) {
    const int64_t floats = memory.PanelFloats(num_keys, d);
    std::fill(dkeys, dkeys + floats, 0.0f);
    std::fill(dvalues, dvalues + floats, 0.0f);
  }

  for (int64_t h = task.head_begin; h < task.head_end; ++h) {
    for (int64_t q = task.q_begin; q < task.q_end; q += kQueryTile) {
      const int64_t rows = std::min(kQueryTile, task.q_end - q);
      // Query i sees keys up to i: training has as many queries as keys.
      if (q + rows <= task.kv_begin) continue;
      FirstKeys(args, b, q, rows, starts);
      if (starts[0] >= task.kv_end) break;  // the keys' sequences are over
      if (packed && task.write_dq) {
        std::fill(dqueries, dqueries + Tiles::Width(d) * kQueryTile, 0.0f);
      }
      memory.queries.Load(Rows{args.q, b, h, q, rows, d}, shape.scale);
      memory.douts.Load(Rows{args.dout, b, h, q, rows, d}, 1);
      // Lanes beyond the last query get p = e^(0 - inf) = 0.
      std::fill(lse, lse + kQueryTile, std::numeric_limits<float>::infinity());
      std::fill(delta, delta + kQueryTile, 0.0f);
      const float* const tile_lse =
          args.lse + (b * shape.num_heads + h) * shape.q_len + q;
      std::copy(tile_lse, tile_lse + rows, lse);
      const T* dout_row = HeadRow<T>(args.dout, b, q, h, d);
      ForEachRow<T>(Rows{args.out, b, h, q, rows, d},
                    [&](int64_t i, const T* out_row) ZERO_CPU_BODY {
                      delta[i] = Dot(dout_row, out_row, d);
                      dout_row += args.dout.token_stride;
                    });
      for (int64_t key = task.kv_begin; key < task.kv_end; key += kKeyTile) {
        const int64_t tile_keys =
            std::min({kKeyTile, task.kv_end - key, q + rows - key});
        if (tile_keys <= 0) break;
        if (key + tile_keys <= starts[0]) continue;
        const int64_t at = key - task.kv_begin;
        const int64_t group = GroupSize<Tiles>(rows, q, key, tile_keys, starts);
        for (int64_t i = 0; i < rows; i += group) {
          const int64_t n = std::min(group, rows - i);
          const int64_t last = std::min(tile_keys, q + i + n - key);
          const KeyRange range =
              KeysOf<Tiles>(std::min(starts[i] - key, last), last);
          // Keys before the group's first sequence add nothing to dk and dv.
          weights.Clear(range.begin, i, n);
          dscores.Clear(range.begin, i, n);
          const int64_t num = range.end - range.begin;
          if (num <= 0) continue;
          const int64_t columns = RoundUp(n, Tiles::kColumns);
          tiles.Product(num, columns, d, keys.rows(at + range.begin),
                        queries.columns(i), weights.scores(range.begin, i),
                        kQueryTile, false);
          tiles.Product(num, columns, d, values.rows(at + range.begin),
                        douts.columns(i), dscores.scores(range.begin, i),
                        kQueryTile, false);
          SoftmaxBackward<Tiles>(weights, dscores, shape.scale, key,
                                 range.begin, num, i, n, q + i, starts + i,
                                 lse + i, delta + i);
          if (task.write_dq) {
            tiles.Product(d, columns, num, keys.columns(at + range.begin),
                          dscores.columns(range.begin, i), dqueries + i,
                          kQueryTile, packed || key > task.kv_begin);
          }
        }
        if (!task.write_dkv) continue;
        // All queries see the first keys; each further group of keys is seen by
        // one group of queries fewer. Tiles begin at multiples of groups.
        const int64_t full = std::clamp<int64_t>(q - key, 0, tile_keys);
        for (int64_t j = 0, i = 0; j < tile_keys;) {
          const int64_t m = j == 0 && full > 0
                                ? full
                                : std::min(Tiles::kGroup, tile_keys - j);
          const int64_t panel = (at + j) * ld;
          tiles.Product(m, d, rows - i, weights.rows(j, i), douts.rows(i),
                        dvalues + panel, ld, true);
          tiles.Product(m, d, rows - i, dscores.rows(j, i), queries.rows(i),
                        dkeys + panel, ld, true);
          j += m;
          i = j - full;
        }
      }
      if (!task.write_dq) continue;
      StoreTransposed<T>(dqueries, rows, d, shape.scale, rows_scratch, args.dq,
                         b, h, q);
    }
  }

  if (!task.write_dkv) return;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t t = task.kv_begin + j;
    ScaleSpan(dkeys + j * ld, d, Tiles::kScalesQueries ? 1.0f : shape.scale,
              HeadRow<T>(args.dk, b, t, kv_head, d));
    ScaleSpan(dvalues + j * ld, d, 1.0f, HeadRow<T>(args.dv, b, t, kv_head, d));
  }
}

// Calls fn.operator()<Tiles>().
template <class Fn>
HWY_INLINE void WithTiles(const AttentionShape& shape, bool pairs,
                          const Fn& fn) {
  if (pairs) return fn.template operator()<PairTiles>();
  ZERO_CPU_WITH_FLOAT_TYPE(shape.dtype, T,
                           fn.template operator()<Fp32Tiles<T>>());
}

void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, bool pairs,
                    float* scratch) {
  if (args.shape.q_len == 1) {
    ZERO_CPU_WITH_FLOAT_TYPE(args.shape.dtype, T,
                             ForwardOneQuery<T>(args, task, scratch));
    return;
  }
  WithTiles(args.shape, pairs,
            [&]<class Tiles>() { ForwardTask<Tiles>(args, task, scratch); });
}
void RunBackwardTask(const AttentionBackwardArgs& args,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch) {
  WithTiles(args.shape, pairs,
            [&]<class Tiles>() { BackwardTask<Tiles>(args, task, scratch); });
}

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(RunForwardTask);
HWY_EXPORT(RunBackwardTask);

void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, bool pairs,
                    float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunForwardTask)(args, task, pairs, scratch);
}
void RunBackwardTask(const AttentionBackwardArgs& args,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunBackwardTask)(args, task, pairs, scratch);
}

// Padding is the same on every target, and so is the memory of a task.
int64_t ForwardScratch(const AttentionShape& shape, int64_t num_queries,
                       bool pairs) {
  HWY_NAMESPACE::ScratchAllocator allocator(nullptr);
  HWY_NAMESPACE::WithTiles(shape, pairs, [&]<class Tiles>() {
    HWY_NAMESPACE::ForwardMemory<Tiles>(allocator, shape.head_dim, num_queries);
  });
  return allocator.floats();
}
int64_t BackwardScratch(const AttentionShape& shape, int64_t num_keys,
                        bool pairs) {
  HWY_NAMESPACE::ScratchAllocator allocator(nullptr);
  HWY_NAMESPACE::WithTiles(shape, pairs, [&]<class Tiles>() {
    HWY_NAMESPACE::BackwardMemory<Tiles>(allocator, shape.head_dim, num_keys);
  });
  return allocator.floats();
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
