#include <type_traits>

#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/score_tiles.cuh"
#include "kernels/cuda/workspace.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

using namespace tiles;

inline constexpr int kWarps = kThreads / kWarpSize;

// The tokens of a head from t on, at most kRows of them and none from `end` on.
template <int kRows>
__device__ inline HeadTile TileAt(int b, int h, int t, int64_t end) {
  return {b, h, t, t + kRows <= end ? kRows : static_cast<int>(end) - t};
}

// Tile `index` of a grid: the first tile of every head of every row of the
// batch, then the second, ...
template <int kRows>
__device__ inline HeadTile TileOfGrid(unsigned index, int64_t batch,
                                      int64_t num_heads, int64_t length) {
  const unsigned heads = static_cast<unsigned>(num_heads);
  const unsigned all = static_cast<unsigned>(batch) * heads;
  return TileAt<kRows>(static_cast<int>(index % all / heads),
                       static_cast<int>(index % heads),
                       static_cast<int>(index / all) * kRows, length);
}

// The block's tile of queries; the last tiles see the most keys and go first.
template <class L>
__device__ inline HeadTile QueriesOfBlock(const AttentionShape& shape) {
  return TileOfGrid<L::kRows>(gridDim.x - 1 - blockIdx.x, shape.batch,
                              shape.num_heads, shape.q_len);
}

__device__ inline int HeadsOfGroup(const AttentionShape& shape) {
  return static_cast<int>(shape.num_heads / shape.num_kv_heads);
}

// The index in [B, H, q_len] of a tile's first query.
__device__ inline int64_t FirstIndex(const HeadTile& queries,
                                     const AttentionShape& shape) {
  return (queries.b * shape.num_heads + queries.h) * shape.q_len + queries.t;
}

// The first key that query t of row b sees; no query after it sees an earlier
// one.
template <class Args>
__device__ inline int FirstKey(const Args& args, int b, int t) {
  if (args.packed.positions == nullptr) return 0;
  return t - args.packed.positions[b * args.shape.q_len + t];
}

// first_keys[i] = FirstKey of the tile's query i, 0 beyond the last; by the
// block's first threads.
template <class Args, int kRows>
__device__ inline void LoadFirstKeys(const Args& args, const HeadTile& queries,
                                     int (&first_keys)[kRows]) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kRows) return;
  first_keys[i] =
      i < queries.rows ? FirstKey(args, queries.b, queries.t + i) : 0;
}

// ---- Forward --------------------------------------------------------------

// A row's online softmax: the largest score so far, and this thread's part of
// the sum of e^(score - max).
struct Softmax {
  float max = -INFINITY;
  float sum = 0;
};

// Turns one row of scores into e^(score - max). Returns the factor of all that
// was summed before.
template <int kPer>
__device__ inline float SoftmaxStep(float (&s)[kPer], Softmax& row) {
  float largest = row.max;
#pragma unroll
  for (int j = 0; j < kPer; ++j) largest = fmaxf(largest, s[j]);
  largest = WarpReduce<Larger, kSide>(largest);
  // A row that has seen no key yet keeps sums of 0: e^(-inf - 0).
  const float shift = largest == -INFINITY ? 0.0f : largest;
  const float factor = expf(row.max - shift);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    s[j] = expf(s[j] - shift);
    sum += s[j];
  }
  row.max = largest;
  row.sum = fmaf(row.sum, factor, sum);
  return factor;
}

template <class L>
struct ForwardShared {
  L queries;
  L keys;  // and then their values
  typename L::AllScores scores;
  int first_keys[L::kRows];
};

// A block is a tile of queries of one head.
template <class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ForwardKernel(AttentionForwardArgs args, RowFormat format) {
  DYNAMIC_SHARED(ForwardShared<L>, shared);
  const AttentionShape& shape = args.shape;
  const HeadTile queries = QueriesOfBlock<L>(shape);
  // The key of the tile's first query itself, the last that it sees.
  const int own_key = static_cast<int>(shape.kv_len - shape.q_len) + queries.t;
  const int num_keys = own_key + queries.rows;

  Softmax softmax[L::kPer];
  typename L::Sums sums = {};
  LoadTile(args.q, queries, format, shared->queries, shape.scale);
  LoadFirstKeys(args, queries, shared->first_keys);
  for (int key = FirstKey(args, queries.b, queries.t); key < num_keys;
       key += L::kRows) {
    const HeadTile keys = TileAt<L::kRows>(
        queries.b, queries.h / HeadsOfGroup(shape), key, num_keys);
    __syncthreads();  // the values before are read
    LoadTile(args.k, keys, format, shared->keys);
    __syncthreads();
    typename L::Scores s = {};
    AddScores(shared->queries, shared->keys, format.dim, s);
    ForEachScore<L>([&](int i, int j, int row, int column) {
      const int at = key + column;
      const bool visible = shared->first_keys[row] <= at && at <= own_key + row;
      if (!visible) s[i][j] = -INFINITY;
    });
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
      Scale(SoftmaxStep(s[i], softmax[i]), sums[i]);
    }
    __syncthreads();  // the keys are read
    LoadTile(args.v, keys, format, shared->keys);
    __syncthreads();
    AddProduct(s, shared->scores, shared->keys, keys.rows, format.dim, sums);
  }
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
    const float sum = WarpReduce<Plus, kSide>(softmax[i].sum);
    Scale(1.0f / sum, sums[i]);
    const int row = ThreadRow() * L::kPer + i;
    if (args.lse != nullptr && row < queries.rows && ThreadColumn() == 0) {
      args.lse[FirstIndex(queries, shape) + row] = softmax[i].max + logf(sum);
    }
  }
  StoreTile<L>(sums, args.out, queries, format);
}

// One query, as in generation: a block for each head, whose warps take four
// keys at a time in turn and keep a softmax each. Lanes go along the rows of k
// and v, which are read where they lie, once for each head. That is bound by
// the loads in flight: hence four blocks on an SM, and a kernel for each dtype.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    OneQueryKernel(AttentionForwardArgs args) {
  constexpr int kMaxDim = static_cast<int>(kMaxTiledHeadDim);
  constexpr int kParts = kMaxDim / kWarpSize;  // of a row, for each lane
  constexpr int kKeys = 4;
  SHARED_ARRAY(float, warp_out, kWarps* kMaxDim);
  SHARED_ARRAY(float, warp_max, kWarps);
  SHARED_ARRAY(float, warp_sum, kWarps);
  const AttentionShape& shape = args.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const HeadTile head =
      TileOfGrid<1>(blockIdx.x, shape.batch, shape.num_heads, 1);
  const HeadTile kv_head = {head.b, head.h / HeadsOfGroup(shape), 0, 1};
  const T* const k = FirstRow<T>(args.k, kv_head, dim);
  const T* const v = FirstRow<T>(args.v, kv_head, dim);
  // Calls fn(i, x) for the i-th of this lane's elements of a row.
  const auto for_each = [&](const T* row, const auto& fn) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int d = lane + i * kWarpSize;
      if (d < dim) fn(i, ToFloat(row[d]));
    }
  };

  float query[kParts] = {}, sums[kParts] = {};
  for_each(FirstRow<T>(args.q, head, dim),
           [&](int i, float x) { query[i] = x * shape.scale; });
  float max = -INFINITY, sum = 0;
  for (int64_t key = warp * kKeys; key < shape.kv_len; key += kWarps * kKeys) {
    float s[kKeys];
    float largest = max;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const bool inside = key + j < shape.kv_len;
      float part = 0;
      if (inside) {
        for_each(k + (key + j) * args.k.token_stride,
                 [&](int i, float x) { part = fmaf(query[i], x, part); });
      }
      part = WarpReduce<Plus>(part);
      s[j] = inside ? part : -INFINITY;
      largest = fmaxf(largest, s[j]);
    }
    const float factor = expf(max - largest);
    max = largest;
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sums[i] *= factor;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if (key + j >= shape.kv_len) break;
      const float e = expf(s[j] - largest);
      sum += e;
      for_each(v + (key + j) * args.v.token_stride,
               [&](int i, float x) { sums[i] = fmaf(e, x, sums[i]); });
    }
  }

#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    warp_out[warp * kMaxDim + lane + i * kWarpSize] = sums[i];
  }
  if (lane == 0) {
    warp_max[warp] = max;
    warp_sum[warp] = sum;
  }
  __syncthreads();
  // The first warp has at least one key, so the largest is finite.
  float largest = warp_max[0];
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, warp_max[w]);
  const int d = static_cast<int>(threadIdx.x);
  float total = 0, out = 0;
  for (int w = 0; w < kWarps; ++w) {
    const float factor = expf(warp_max[w] - largest);
    total = fmaf(warp_sum[w], factor, total);
    out = fmaf(warp_out[w * kMaxDim + d], factor, out);
  }
  if (d < dim) FirstRow<T>(args.out, head, dim)[d] = FromFloat<T>(out / total);
  if (args.lse != nullptr && d == 0) {
    args.lse[blockIdx.x] = largest + logf(total);
  }
}

// ---- Backward -------------------------------------------------------------

// delta[b, h, t] = dout . out, a warp per row. Reads both once, which is little
// beside the tiles.
__global__ void __launch_bounds__(kThreads, 5)
    DeltaKernel(AttentionBackwardArgs args, float* delta) {
  const AttentionShape& shape = args.shape;
  const HeadTile tile =
      TileOfGrid<kWarps>(blockIdx.x, shape.batch, shape.num_heads, shape.q_len);
  const int row = static_cast<int>(threadIdx.x) / kWarpSize;
  float sum = 0;
  if (row < tile.rows) {
    const HeadTile at = {tile.b, tile.h, tile.t + row, 1};
    const int dim = static_cast<int>(shape.head_dim);
    WithType(shape.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* const dout = FirstRow<T>(args.dout, at, dim);
      const T* const out = FirstRow<T>(args.out, at, dim);
      for (int d = threadIdx.x % kWarpSize; d < dim; d += kWarpSize) {
        sum = fmaf(ToFloat(dout[d]), ToFloat(out[d]), sum);
      }
    });
  }
  sum = WarpReduce<Plus>(sum);
  if (row < tile.rows && threadIdx.x % kWarpSize == 0) {
    delta[FirstIndex(tile, shape) + row] = sum;
  }
}

// The shared memory of the two kernels below: KeyValueKernel keeps a tile of
// keys and values and loads tiles of queries in turn, QueryKernel the reverse.
template <class L>
struct BackwardShared {
  L keys, values;
  L queries, douts;
  typename L::AllScores scores;
  // Of the queries.
  int first_keys[L::kRows];
  float lse[L::kRows];
  float delta[L::kRows];

  __device__ void LoadKeys(const AttentionBackwardArgs& args,
                           const HeadTile& at, const RowFormat& format) {
    LoadTile(args.k, at, format, keys);
    LoadTile(args.v, at, format, values);
  }

  // all_deltas: of DeltaKernel.
  __device__ void LoadQueries(const AttentionBackwardArgs& args,
                              const float* all_deltas, const HeadTile& at,
                              const RowFormat& format) {
    LoadTile(args.q, at, format, queries, args.shape.scale);
    LoadTile(args.dout, at, format, douts);
    LoadFirstKeys(args, at, first_keys);
    const int i = static_cast<int>(threadIdx.x);
    if (i >= L::kRows) return;
    const int64_t index = FirstIndex(at, args.shape) + i;
    // Queries beyond the last get p = e^(0 - inf) = 0.
    lse[i] = i < at.rows ? args.lse[index] : INFINITY;
    delta[i] = i < at.rows ? all_deltas[index] : 0.0f;
  }

  // p = the probabilities and ds = the gradients of this thread's scores, keys
  // down and queries across, or (kKeysDown false) the reverse. The tiles begin
  // at the tokens `key` and `query`.
  template <bool kKeysDown>
  __device__ void Differentiate(int key, int query, int dim,
                                typename L::Scores& p,
                                typename L::Scores& ds) const {
    AddScores(kKeysDown ? keys : queries, kKeysDown ? queries : keys, dim, p);
    AddScores(kKeysDown ? values : douts, kKeysDown ? douts : values, dim, ds);
    ForEachScore<L>([&](int i, int j, int row, int column) {
      const int at = key + (kKeysDown ? row : column);
      const int q = kKeysDown ? column : row;
      const bool visible = first_keys[q] <= at && at <= query + q;
      p[i][j] = visible ? expf(p[i][j] - lse[q]) : 0.0f;
      ds[i][j] = p[i][j] * (ds[i][j] - delta[q]);
    });
  }
};

// dk and dv, by a block for each tile of keys of each kv head. For each head of
// the group in turn, it goes through the queries that see the keys, in order,
// and ends at the first tile whose sequences begin after the keys.
template <class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    KeyValueKernel(AttentionBackwardArgs args, const float* delta,
                   RowFormat format) {
  DYNAMIC_SHARED(BackwardShared<L>, shared);
  const AttentionShape& shape = args.shape;
  const int length = static_cast<int>(shape.q_len);
  const HeadTile keys =
      TileOfGrid<L::kRows>(blockIdx.x, shape.batch, shape.num_kv_heads, length);
  const int group = HeadsOfGroup(shape);

  typename L::Sums dk = {}, dv = {};
  shared->LoadKeys(args, keys, format);
  for (int h = keys.h * group; h < (keys.h + 1) * group; ++h) {
    for (int q = keys.t;
         q < length && FirstKey(args, keys.b, q) < keys.t + keys.rows;
         q += L::kRows) {
      const HeadTile queries = TileAt<L::kRows>(keys.b, h, q, length);
      __syncthreads();  // the tile before is read
      shared->LoadQueries(args, delta, queries, format);
      __syncthreads();
      typename L::Scores p = {}, ds = {};
      shared->template Differentiate<true>(keys.t, q, format.dim, p, ds);
      AddProduct(p, shared->scores, shared->douts, queries.rows, format.dim,
                 dv);
      AddProduct(ds, shared->scores, shared->queries, queries.rows, format.dim,
                 dk);
    }
  }
  StoreTile<L>(dk, args.dk, keys, format);
  StoreTile<L>(dv, args.dv, keys, format);
}

// dq, by a block for each tile of queries of each head, which goes through the
// keys in order.
template <class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    QueryKernel(AttentionBackwardArgs args, const float* delta,
                RowFormat format) {
  DYNAMIC_SHARED(BackwardShared<L>, shared);
  const AttentionShape& shape = args.shape;
  const HeadTile queries = QueriesOfBlock<L>(shape);
  const int num_keys = queries.t + queries.rows;

  typename L::Sums dq = {};
  shared->LoadQueries(args, delta, queries, format);
  for (int key = FirstKey(args, queries.b, queries.t); key < num_keys;
       key += L::kRows) {
    const HeadTile keys = TileAt<L::kRows>(
        queries.b, queries.h / HeadsOfGroup(shape), key, num_keys);
    __syncthreads();  // the tile before is read
    shared->LoadKeys(args, keys, format);
    __syncthreads();
    typename L::Scores p = {}, ds = {};
    shared->template Differentiate<false>(key, queries.t, format.dim, p, ds);
    AddProduct(ds, shared->scores, shared->keys, keys.rows, format.dim, dq);
  }
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) Scale(shape.scale, dq[i]);
  StoreTile<L>(dq, args.dq, queries, format);
}

// ---- Launches -------------------------------------------------------------

// Calls fn(std::integral_constant<int, W>) with the narrowest width of tiles
// that holds the heads.
template <class Fn>
void WithWidth(int64_t head_dim, const Fn& fn) {
  ZERO_CHECK_LE(head_dim, kMaxTiledHeadDim) << "heads are too wide";
  if (head_dim <= 64) return fn(std::integral_constant<int, 64>());
  if (head_dim <= 128) return fn(std::integral_constant<int, 128>());
  fn(std::integral_constant<int, 256>());
}

template <class... Ref>
RowFormat FormatOf(const AttentionShape& shape, const Ref&... x) {
  return {shape.dtype, static_cast<int>(shape.head_dim),
          (IsAligned(x.data, shape.dtype, x.batch_stride, x.token_stride,
                     shape.head_dim) &&
           ...)};
}

// Tiles of kRows rows of all heads: blocks of a grid.
template <int kRows>
unsigned NumTiles(int64_t length, int64_t heads) {
  return static_cast<unsigned>(CeilDiv(length, kRows) * heads);
}

}  // namespace

void TiledAttentionForward(cudaStream_t stream,
                           const AttentionForwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t heads = shape.batch * shape.num_heads;
  if (args.packed.positions != nullptr) {
    ZERO_CHECK_EQ(shape.q_len, shape.kv_len) << "packed sequences";
  }
  if (shape.q_len == 1) {
    ZERO_CHECK_LE(shape.head_dim, kMaxTiledHeadDim) << "heads are too wide";
    ZERO_CUDA_WITH_FLOAT_TYPE(
        shape.dtype, T,
        Launch(OneQueryKernel<T>, static_cast<unsigned>(heads), kThreads, 0,
               stream, args));
    return;
  }
  const RowFormat format = FormatOf(shape, args.q, args.k, args.v, args.out);
  WithWidth(shape.head_dim, [&](auto width) {
    using L = ForwardTile<decltype(width)::value>;
    Launch(ForwardKernel<L>, NumTiles<L::kRows>(shape.q_len, heads), kThreads,
           sizeof(ForwardShared<L>), stream, args, format);
  });
}

void TiledAttentionBackward(cudaStream_t stream,
                            const AttentionBackwardArgs& args,
                            Workspace workspace) {
  const AttentionShape& shape = args.shape;
  const RowFormat format = FormatOf(shape, args.q, args.k, args.v, args.dout,
                                    args.dq, args.dk, args.dv);
  ZERO_CHECK_GE(workspace.bytes, TiledAttentionBackwardBytes(shape));
  float* const delta = static_cast<float*>(workspace.data);
  const int64_t heads = shape.batch * shape.num_heads;
  Launch(DeltaKernel, NumTiles<kWarps>(shape.q_len, heads), kThreads, 0, stream,
         args, delta);
  WithWidth(shape.head_dim, [&](auto width) {
    using L = BackwardTile<decltype(width)::value>;
    const unsigned key_tiles =
        NumTiles<L::kRows>(shape.kv_len, shape.batch * shape.num_kv_heads);
    Launch(KeyValueKernel<L>, key_tiles, kThreads, sizeof(BackwardShared<L>),
           stream, args, delta, format);
    Launch(QueryKernel<L>, NumTiles<L::kRows>(shape.q_len, heads), kThreads,
           sizeof(BackwardShared<L>), stream, args, delta, format);
  });
}

}  // namespace zero::cuda
