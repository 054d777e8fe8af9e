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

// Calls fn(first query, number, state) for all tiles of queries [begin, end),
// whose states are in `states`, one after the other.
template <class Memory, class Fn>
HWY_INLINE void ForEachQueryTile(ScratchAllocator states, int64_t d,
                                 int64_t begin, int64_t end, const Fn& fn) {
  for (int64_t q = begin; q < end; q += kQueryTile) {
    const typename Memory::State state(states, d);
    fn(q, std::min(kQueryTile, end - q), state);
  }
}

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
  const auto for_each_tile = [&](const auto& fn) {
    ForEachQueryTile<ForwardMemory<Tiles>>(memory.states, d, task.q_begin,
                                           task.q_end, fn);
  };
  // If sequences begin within a tile, a query's first keys may be beyond the
  // first tile: its sums begin at 0.
  const bool packed = args.packed.positions != nullptr;
  const int64_t first_key = FirstKeyTile(args, b, task.q_begin);

  for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
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
    for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
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

  for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
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
  // Of one tile of queries.
  struct State {
    typename Tiles::template Queries<kBothForms> queries, douts;
    float* dqueries;     // [D, kQueryTile]
    float *lse, *delta;  // [kQueryTile]
    int32_t* starts;     // [kQueryTile] the first key each query sees

    State(ScratchAllocator& allocator, int64_t d)
        : queries(allocator, d),
          douts(allocator, d),
          dqueries(allocator.Take<float>(Tiles::Width(d) * kQueryTile)),
          lse(allocator.Take<float>(kQueryTile)),
          delta(allocator.Take<float>(kQueryTile)),
          starts(allocator.Take<int32_t>(kQueryTile)) {}
  };

  typename Tiles::template Keys<kBothForms> keys;
  typename Tiles::template Keys<kRowForm> values;
  typename Tiles::template Weights<kRowForm> weights;
  typename Tiles::template Weights<kBothForms> dscores;
  int64_t panel_floats;
  float *dkeys, *dvalues;  // [tokens, D], rows padded to whole vectors
  float* rows;             // [kQueryTile, PanelLd(d)]
  ScratchAllocator states;

  BackwardMemory(ScratchAllocator& allocator, int64_t d, const BackwardCut& cut)
      : keys(allocator, cut.keys, d),
        values(allocator, cut.keys, d),
        weights(allocator),
        dscores(allocator),
        panel_floats(RoundUp(cut.tokens, Tiles::kKeyStep) *
                     RoundUp(d, kVector)),
        dkeys(allocator.Take<float>(panel_floats)),
        dvalues(allocator.Take<float>(panel_floats)),
        rows(allocator.Take<float>(kQueryTile * PanelLd(d))),
        states(allocator) {
    for (int64_t q = 0; q < cut.queries; q += kQueryTile) State(allocator, d);
  }
};

// Fills the state of the tile of queries [q, q + rows) of head h.
template <class Tiles>
void LoadQueries(const AttentionBackwardArgs& args, int64_t b, int64_t h,
                 int64_t q, int64_t rows,
                 const typename BackwardMemory<Tiles>::State& s) {
  using T = typename Tiles::Type;
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  FirstKeys(args, b, q, rows, s.starts);
  s.queries.Load(Rows{args.q, b, h, q, rows, d}, shape.scale);
  s.douts.Load(Rows{args.dout, b, h, q, rows, d}, 1);
  if (args.packed.positions != nullptr) {
    std::fill(s.dqueries, s.dqueries + Tiles::Width(d) * kQueryTile, 0.0f);
  }
  // Lanes beyond the last query get p = e^(0 - inf) = 0.
  std::fill(s.lse, s.lse + kQueryTile, std::numeric_limits<float>::infinity());
  std::fill(s.delta, s.delta + kQueryTile, 0.0f);
  const float* const lse =
      args.lse + (b * shape.num_heads + h) * shape.q_len + q;
  std::copy(lse, lse + rows, s.lse);
  const T* dout_row = HeadRow<T>(args.dout, b, q, h, d);
  ForEachRow<T>(Rows{args.out, b, h, q, rows, d},
                [&](int64_t i, const T* out_row) ZERO_CPU_BODY {
                  s.delta[i] = Dot(dout_row, out_row, d);
                  dout_row += args.dout.token_stride;
                });
}

// The first token of the task that sums dq of the block of queries at `begin`,
// which see keys from `first` on.
int64_t TaskOfQueries(const BackwardCut& cut, int64_t begin, int64_t first) {
  const int64_t own = begin / cut.tokens * cut.tokens;
  const int64_t before = std::max<int64_t>(own - cut.tokens, 0);
  const int64_t seen_before = own - std::max(first, before);
  const int64_t seen_own = begin + cut.queries - own;
  return cut.most_keys && seen_before > seen_own ? before : own;
}

template <class Tiles>
void BackwardTask(const AttentionBackwardArgs& args, const BackwardCut& cut,
                  const AttentionBackwardTask& task, float* scratch) {
  using T = typename Tiles::Type;
  const AttentionShape& shape = args.shape;
  const int64_t d = shape.head_dim;
  const int64_t ld = RoundUp(d, kVector);
  const int64_t b = task.batch;
  const int64_t kv_head = task.kv_head;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t num_tokens = task.end - task.begin;
  const bool packed = args.packed.positions != nullptr;
  const Tiles tiles;
  ScratchAllocator allocator(scratch);
  BackwardMemory<Tiles> memory(allocator, d, cut);
  const auto& [keys, values, weights, dscores, panel_floats, dkeys, dvalues,
               rows_scratch, states] = memory;
  std::fill(dkeys, dkeys + panel_floats, 0.0f);
  std::fill(dvalues, dvalues + panel_floats, 0.0f);

  // Adds the tile of queries [q, q + rows) and keys from `key` on, of those
  // [block, block_end) that are loaded.
  const auto add_tile = [&](int64_t block, int64_t block_end, int64_t key,
                            int64_t q, int64_t rows, bool own, const auto& s) {
    const int64_t tile_keys =
        std::min({kKeyTile, block_end - key, q + rows - key});
    if (tile_keys <= 0 || key + tile_keys <= s.starts[0]) return;
    const int64_t at = key - block;
    const int64_t group = GroupSize<Tiles>(rows, q, key, tile_keys, s.starts);
    for (int64_t i = 0; i < rows; i += group) {
      const int64_t n = std::min(group, rows - i);
      const int64_t last = std::min(tile_keys, q + i + n - key);
      const KeyRange range =
          KeysOf<Tiles>(std::min(s.starts[i] - key, last), last);
      // Keys before the group's first sequence add nothing to dk and dv.
      weights.Clear(range.begin, i, n);
      dscores.Clear(range.begin, i, n);
      const int64_t num = range.end - range.begin;
      if (num <= 0) continue;
      const int64_t columns = RoundUp(n, Tiles::kColumns);
      tiles.Product(num, columns, d, keys.rows(at + range.begin),
                    s.queries.columns(i), weights.scores(range.begin, i),
                    kQueryTile, false);
      tiles.Product(num, columns, d, values.rows(at + range.begin),
                    s.douts.columns(i), dscores.scores(range.begin, i),
                    kQueryTile, false);
      SoftmaxBackward<Tiles>(weights, dscores, shape.scale, key, range.begin,
                             num, i, n, q + i, s.starts + i, s.lse + i,
                             s.delta + i);
      if (own) {
        tiles.Product(d, columns, num, keys.columns(at + range.begin),
                      dscores.columns(range.begin, i), s.dqueries + i,
                      kQueryTile, packed || key > 0);
      }
    }
    if (key < task.begin || key >= task.end) return;
    // All queries see the first keys; each further group of keys is seen by
    // one group of queries fewer. Tiles begin at multiples of groups.
    const int64_t full = std::clamp<int64_t>(q - key, 0, tile_keys);
    for (int64_t j = 0, i = 0; j < tile_keys;) {
      const int64_t m =
          j == 0 && full > 0 ? full : std::min(Tiles::kGroup, tile_keys - j);
      const int64_t panel = (key - task.begin + j) * ld;
      tiles.Product(m, d, rows - i, weights.rows(j, i), s.douts.rows(i),
                    dvalues + panel, ld, true);
      tiles.Product(m, d, rows - i, dscores.rows(j, i), s.queries.rows(i),
                    dkeys + panel, ld, true);
      j += m;
      i = j - full;
    }
  };

  int64_t loaded = -1;  // the first key of the panels
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t begin = task.begin; begin < shape.q_len;
         begin += cut.queries) {
      const int64_t end = std::min(shape.q_len, begin + cut.queries);
      // Queries whose dq the task sums go through all keys that they see,
      // others through the task's. Query i sees keys up to i: training has as
      // many queries as keys.
      const int64_t first = FirstKey(args, b, begin) / cut.keys * cut.keys;
      const bool own = TaskOfQueries(cut, begin, first) == task.begin;
      const int64_t key_begin = own ? first : std::max(first, task.begin);
      const int64_t key_end = own ? end : std::min(end, task.end);
      if (key_begin >= key_end) break;  // the keys' sequences are over
      const auto for_each_tile = [&](const auto& fn) {
        ForEachQueryTile<BackwardMemory<Tiles>>(states, d, begin, end, fn);
      };
      for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
        LoadQueries<Tiles>(args, b, h, q, rows, s);
      });
      for (int64_t block = key_begin; block < key_end; block += cut.keys) {
        const int64_t block_end = std::min(shape.kv_len, block + cut.keys);
        if (block != loaded) {
          const int64_t num = block_end - block;
          keys.Load(Rows{args.k, b, kv_head, block, num, d});
          values.Load(Rows{args.v, b, kv_head, block, num, d});
          loaded = block;
        }
        for (int64_t key = block; key < std::min(block_end, end);
             key += kKeyTile) {
          for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
            add_tile(block, block_end, key, q, rows, own, s);
          });
        }
      }
      if (!own) continue;
      for_each_tile([&](int64_t q, int64_t rows, const auto& s) {
        StoreTransposed<T>(s.dqueries, rows, d, shape.scale, rows_scratch,
                           args.dq, b, h, q);
      });
    }
  }

  for (int64_t j = 0; j < num_tokens; ++j) {
    const int64_t t = task.begin + j;
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
void RunBackwardTask(const AttentionBackwardArgs& args, const BackwardCut& cut,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch) {
  WithTiles(args.shape, pairs, [&]<class Tiles>() {
    BackwardTask<Tiles>(args, cut, task, scratch);
  });
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
void RunBackwardTask(const AttentionBackwardArgs& args, const BackwardCut& cut,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch) {
  HWY_DYNAMIC_DISPATCH(RunBackwardTask)(args, cut, task, pairs, scratch);
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
int64_t BackwardScratch(const AttentionShape& shape, const BackwardCut& cut,
                        bool pairs) {
  HWY_NAMESPACE::ScratchAllocator allocator(nullptr);
  HWY_NAMESPACE::WithTiles(shape, pairs, [&]<class Tiles>() {
    HWY_NAMESPACE::BackwardMemory<Tiles>(allocator, shape.head_dim, cut);
  });
  return allocator.floats();
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
