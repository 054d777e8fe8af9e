#include <algorithm>
#include <type_traits>

#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/score_tiles.cuh"
#include "kernels/cuda/workspace.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

using namespace tiles;

// ---- Forward --------------------------------------------------------------

// A row's online softmax: the largest score so far, and this thread's part of
// the sum of e^(score - max).
struct Softmax {
  float max = -INFINITY;
  float sum = 0;
};

// Turns one row of scores into e^(score - max), hidden ones into 0: all but
// the columns `begin` to `end`, counted from this thread's first. Returns the
// factor of all that was summed before.
template <int kPer>
__device__ inline float SoftmaxStep(float (&s)[kPer], int begin, int end,
                                    Softmax& row) {
  float largest = row.max;
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    if (j * kSide < begin || j * kSide > end) s[j] = -INFINITY;
    largest = fmaxf(largest, s[j]);
  }
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
__device__ inline void ScaleRow(float factor, float4 (&sums)[L::kFours]) {
#pragma unroll
  for (int f = 0; f < L::kFours; ++f) {
    sums[f].x *= factor;
    sums[f].y *= factor;
    sums[f].z *= factor;
    sums[f].w *= factor;
  }
}

struct QueryTile {
  int64_t b, h, kv_head;
  int64_t q;  // the first query
  int rows;
};

// One block for each tile of queries of each head; the last tiles see the most
// keys and go first.
template <class L>
__device__ inline QueryTile QueriesOfBlock(const AttentionShape& shape) {
  const unsigned heads = static_cast<unsigned>(shape.batch * shape.num_heads);
  QueryTile tile;
  tile.b = blockIdx.x % heads / shape.num_heads;
  tile.h = blockIdx.x % heads % shape.num_heads;
  tile.kv_head = tile.h / (shape.num_heads / shape.num_kv_heads);
  tile.q =
      ((gridDim.x - 1 - blockIdx.x) / heads) * static_cast<int64_t>(L::kRows);
  tile.rows = static_cast<int>(
      tile.q + L::kRows <= shape.q_len ? L::kRows : shape.q_len - tile.q);
  return tile;
}

// A block is a QueryTile. Keys and then values pass through one tile.
template <class T, class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ForwardKernel(AttentionForwardArgs args, bool chunked) {
  DYNAMIC_SHARED(float, shared);
  float* const queries = shared;
  float* const keys = queries + L::kFloats;
  float* const scores = keys + L::kFloats;
  SHARED_ARRAY(int, starts, L::kRows);
  const AttentionShape& shape = args.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const auto [b, h, kv_head, q, rows] = QueriesOfBlock<L>(shape);
  // The position of this thread's first query.
  const int first_row = ThreadRow() * L::kPer;
  const int64_t position = shape.kv_len - shape.q_len + q + first_row;
  const int64_t num_keys = shape.kv_len - shape.q_len + q + rows;

  Softmax softmax[L::kPer];
  Sums<L> sums;
  Clear<L>(sums);
  LoadTile<L>(HeadRow<T>(args.q, b, q, h, dim), args.q.token_stride, rows, dim,
              chunked, shape.scale, queries);
  LoadStarts<L>(args, b, q, rows, starts);
  for (int64_t key = FirstKey(args, b, q); key < num_keys; key += L::kRows) {
    const int n = static_cast<int>(key + L::kRows <= num_keys ? L::kRows
                                                              : num_keys - key);
    __syncthreads();  // the values before are read
    LoadTile<L>(HeadRow<T>(args.k, b, key, kv_head, dim), args.k.token_stride,
                n, dim, chunked, 1.0f, keys);
    __syncthreads();
    float s[L::kPer][L::kPer];
    Scores<L>(queries, keys, dim, s);
    const int64_t first_key = key + ThreadColumn();
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
      const float factor =
          SoftmaxStep(s[i], static_cast<int>(starts[first_row + i] - first_key),
                      static_cast<int>(position + i - first_key), softmax[i]);
      ScaleRow<L>(factor, sums[i]);
    }
    PutScores<L>(s, scores);
    __syncthreads();  // the keys are read
    LoadTile<L>(HeadRow<T>(args.v, b, key, kv_head, dim), args.v.token_stride,
                n, dim, chunked, 1.0f, keys);
    __syncthreads();
    AddProduct<L>(scores, keys, n, dim, sums);
  }
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
    const float sum = WarpReduce<Plus, kSide>(softmax[i].sum);
    if (first_row + i >= rows) continue;
    const int64_t t = q + first_row + i;
    StoreRow<L>(sums[i], 1.0f / sum, dim, chunked,
                HeadRow<T>(args.out, b, t, h, dim));
    if (args.lse != nullptr && ThreadColumn() == 0) {
      args.lse[(b * shape.num_heads + h) * shape.q_len + t] =
          softmax[i].max + logf(sum);
    }
  }
}

// One query, as in generation: a block for each head, whose warps take four
// keys at a time in turn and keep a softmax each. Lanes go along the rows of k
// and v, which are read where they lie, once for each head.
template <class T>
__global__ void __launch_bounds__(kThreads)
    OneQueryKernel(AttentionForwardArgs args) {
  constexpr int kWarps = kThreads / kWarpSize;
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
  const int64_t b = blockIdx.x / shape.num_heads;
  const int64_t h = blockIdx.x % shape.num_heads;
  const int64_t kv_head = h / (shape.num_heads / shape.num_kv_heads);
  const T* const q = HeadRow<T>(args.q, b, 0, h, dim);
  const T* const k = HeadRow<T>(args.k, b, 0, kv_head, dim);
  const T* const v = HeadRow<T>(args.v, b, 0, kv_head, dim);

  float query[kParts], sums[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int d = lane + i * kWarpSize;
    query[i] = d < dim ? ToFloat(q[d]) * shape.scale : 0.0f;
    sums[i] = 0;
  }
  float max = -INFINITY, sum = 0;
  for (int64_t key = warp * kKeys; key < shape.kv_len; key += kWarps * kKeys) {
    float s[kKeys];
    float largest = max;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const bool inside = key + j < shape.kv_len;
      const T* const row = k + (key + j) * args.k.token_stride;
      float part = 0;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int d = lane + i * kWarpSize;
        if (inside && d < dim) part = fmaf(query[i], ToFloat(row[d]), part);
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
      const T* const row = v + (key + j) * args.v.token_stride;
      const float e = expf(s[j] - largest);
      sum += e;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int d = lane + i * kWarpSize;
        if (d < dim) sums[i] = fmaf(e, ToFloat(row[d]), sums[i]);
      }
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
  if (d < dim) {
    HeadRow<T>(args.out, b, 0, h, dim)[d] = FromFloat<T>(out / total);
  }
  if (args.lse != nullptr && d == 0) {
    args.lse[b * shape.num_heads + h] = largest + logf(total);
  }
}

// ---- Backward -------------------------------------------------------------

// delta[b, h, t] = dout . out: one warp a row. Reads both once, which is little
// beside the tiles.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    DeltaKernel(AttentionBackwardArgs args, float* delta) {
  const AttentionShape& shape = args.shape;
  const int64_t num_rows = shape.batch * shape.num_heads * shape.q_len;
  const int64_t row = blockIdx.x * static_cast<int64_t>(kThreads / kWarpSize) +
                      threadIdx.x / kWarpSize;
  float sum = 0;
  if (row < num_rows) {
    const int64_t t = row % shape.q_len;
    const int64_t h = row / shape.q_len % shape.num_heads;
    const int64_t b = row / shape.q_len / shape.num_heads;
    const int dim = static_cast<int>(shape.head_dim);
    const T* const dout = HeadRow<T>(args.dout, b, t, h, dim);
    const T* const out = HeadRow<T>(args.out, b, t, h, dim);
    for (int d = threadIdx.x % kWarpSize; d < dim; d += kWarpSize) {
      sum = fmaf(ToFloat(dout[d]), ToFloat(out[d]), sum);
    }
  }
  sum = WarpReduce<Plus>(sum);
  if (row < num_rows && threadIdx.x % kWarpSize == 0) delta[row] = sum;
}

// dk and dv of one tile of keys: one block for each tile of each kv head, which
// goes through the heads of the group and, for each, through the queries that
// see the keys, in order: up to the first tile whose sequences begin after
// them. Scores lie transposed here: keys down.
template <class T, class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    KeyValueKernel(AttentionBackwardArgs args, const float* delta,
                   bool chunked) {
  DYNAMIC_SHARED(float, shared);
  float* const keys = shared;
  float* const values = keys + L::kFloats;
  float* const queries = values + L::kFloats;
  float* const douts = queries + L::kFloats;
  float* const scores = douts + L::kFloats;
  float* const tile_lse = scores + L::kScoreFloats;
  float* const tile_delta = tile_lse + L::kRows;
  SHARED_ARRAY(int, starts, L::kRows);
  const AttentionShape& shape = args.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const int64_t length = shape.q_len;
  const unsigned heads =
      static_cast<unsigned>(shape.batch * shape.num_kv_heads);
  const int64_t b = blockIdx.x % heads / shape.num_kv_heads;
  const int64_t kv_head = blockIdx.x % heads % shape.num_kv_heads;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t key = blockIdx.x / heads * static_cast<int64_t>(L::kRows);
  const int n =
      static_cast<int>(key + L::kRows <= length ? L::kRows : length - key);
  const int first_row = ThreadRow() * L::kPer;

  Sums<L> dk, dv;
  Clear<L>(dk);
  Clear<L>(dv);
  LoadTile<L>(HeadRow<T>(args.k, b, key, kv_head, dim), args.k.token_stride, n,
              dim, chunked, 1.0f, keys);
  LoadTile<L>(HeadRow<T>(args.v, b, key, kv_head, dim), args.v.token_stride, n,
              dim, chunked, 1.0f, values);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t q = key; q < length && FirstKey(args, b, q) < key + n;
         q += L::kRows) {
      const int rows =
          static_cast<int>(q + L::kRows <= length ? L::kRows : length - q);
      __syncthreads();  // the tile before is read
      LoadTile<L>(HeadRow<T>(args.q, b, q, h, dim), args.q.token_stride, rows,
                  dim, chunked, shape.scale, queries);
      LoadTile<L>(HeadRow<T>(args.dout, b, q, h, dim), args.dout.token_stride,
                  rows, dim, chunked, 1.0f, douts);
      LoadStarts<L>(args, b, q, rows, starts);
      if (threadIdx.x < L::kRows) {
        const int i = static_cast<int>(threadIdx.x);
        const int64_t at = (b * shape.num_heads + h) * length + q + i;
        // Queries beyond the last get p = e^(0 - inf) = 0.
        tile_lse[i] = i < rows ? args.lse[at] : INFINITY;
        tile_delta[i] = i < rows ? delta[at] : 0.0f;
      }
      __syncthreads();
      float p[L::kPer][L::kPer], ds[L::kPer][L::kPer];
      Scores<L>(keys, queries, dim, p);
      Scores<L>(values, douts, dim, ds);
#pragma unroll
      for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
        for (int j = 0; j < L::kPer; ++j) {
          const int column = ThreadColumn() + j * kSide;
          const int64_t at = key + first_row + i;
          const bool visible = starts[column] <= at && at <= q + column;
          p[i][j] = visible ? expf(p[i][j] - tile_lse[column]) : 0.0f;
          ds[i][j] = p[i][j] * (ds[i][j] - tile_delta[column]);
        }
      }
      PutScores<L>(p, scores);
      __syncwarp();
      AddProduct<L>(scores, douts, rows, dim, dv);
      __syncwarp();
      PutScores<L>(ds, scores);
      __syncwarp();
      AddProduct<L>(scores, queries, rows, dim, dk);
    }
  }
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
    if (first_row + i >= n) continue;
    const int64_t t = key + first_row + i;
    StoreRow<L>(dk[i], 1.0f, dim, chunked,
                HeadRow<T>(args.dk, b, t, kv_head, dim));
    StoreRow<L>(dv[i], 1.0f, dim, chunked,
                HeadRow<T>(args.dv, b, t, kv_head, dim));
  }
}

// dq of one tile of queries: one block for each tile of each head, which goes
// through the keys in order.
template <class T, class L>
__global__ void __launch_bounds__(kThreads, kBlocks)
    QueryKernel(AttentionBackwardArgs args, const float* delta, bool chunked) {
  DYNAMIC_SHARED(float, shared);
  float* const keys = shared;
  float* const values = keys + L::kFloats;
  float* const queries = values + L::kFloats;
  float* const douts = queries + L::kFloats;
  float* const scores = douts + L::kFloats;
  SHARED_ARRAY(int, starts, L::kRows);
  const AttentionShape& shape = args.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const auto [b, h, kv_head, q, rows] = QueriesOfBlock<L>(shape);
  const int first_row = ThreadRow() * L::kPer;
  float row_lse[L::kPer], row_delta[L::kPer];
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
    const bool inside = first_row + i < rows;
    const int64_t at =
        (b * shape.num_heads + h) * shape.q_len + q + first_row + i;
    row_lse[i] = inside ? args.lse[at] : INFINITY;
    row_delta[i] = inside ? delta[at] : 0.0f;
  }

  Sums<L> dq;
  Clear<L>(dq);
  LoadTile<L>(HeadRow<T>(args.q, b, q, h, dim), args.q.token_stride, rows, dim,
              chunked, shape.scale, queries);
  LoadTile<L>(HeadRow<T>(args.dout, b, q, h, dim), args.dout.token_stride, rows,
              dim, chunked, 1.0f, douts);
  LoadStarts<L>(args, b, q, rows, starts);
  for (int64_t key = FirstKey(args, b, q); key < q + rows; key += L::kRows) {
    const int n = static_cast<int>(key + L::kRows <= q + rows ? L::kRows
                                                              : q + rows - key);
    __syncthreads();  // the tile before is read
    LoadTile<L>(HeadRow<T>(args.k, b, key, kv_head, dim), args.k.token_stride,
                n, dim, chunked, 1.0f, keys);
    LoadTile<L>(HeadRow<T>(args.v, b, key, kv_head, dim), args.v.token_stride,
                n, dim, chunked, 1.0f, values);
    __syncthreads();
    float p[L::kPer][L::kPer], ds[L::kPer][L::kPer];
    Scores<L>(queries, keys, dim, p);
    Scores<L>(douts, values, dim, ds);
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
      for (int j = 0; j < L::kPer; ++j) {
        const int64_t at = key + ThreadColumn() + j * kSide;
        const bool visible =
            starts[first_row + i] <= at && at <= q + first_row + i;
        const float e = visible ? expf(p[i][j] - row_lse[i]) : 0.0f;
        ds[i][j] = e * (ds[i][j] - row_delta[i]);
      }
    }
    PutScores<L>(ds, scores);
    __syncwarp();
    AddProduct<L>(scores, keys, n, dim, dq);
  }
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
    if (first_row + i >= rows) continue;
    StoreRow<L>(dq[i], shape.scale, dim, chunked,
                HeadRow<T>(args.dq, b, q + first_row + i, h, dim));
  }
}

// ---- Launches -------------------------------------------------------------

// Calls fn(std::integral_constant<int, W>) with the narrowest width of tiles
// that holds the heads.
template <class Fn>
void WithWidth(int64_t head_dim, const Fn& fn) {
  ZERO_CHECK_LE(head_dim, kMaxTiledHeadDim) << "heads are too wide";
  if (head_dim <= 64) {
    fn(std::integral_constant<int, 64>());
  } else if (head_dim <= 128) {
    fn(std::integral_constant<int, 128>());
  } else {
    fn(std::integral_constant<int, 256>());
  }
}

// Whether every row of the heads can be read and written in 16-byte chunks.
template <class... Ref>
bool AreChunked(const AttentionShape& shape, const Ref&... x) {
  const int64_t size = 16 / static_cast<int64_t>(DTypeBytes(shape.dtype));
  return shape.head_dim % size == 0 &&
         ((IsChunkAligned(x.data) && x.batch_stride % size == 0 &&
           x.token_stride % size == 0) &&
          ...);
}

template <class L>
unsigned NumTiles(int64_t length, int64_t heads) {
  return static_cast<unsigned>(CeilDiv(length, L::kRows) * heads);
}

}  // namespace

void TiledAttentionForward(cudaStream_t stream,
                           const AttentionForwardArgs& args) {
  const AttentionShape& shape = args.shape;
  if (args.packed.positions != nullptr) {
    ZERO_CHECK_EQ(shape.q_len, shape.kv_len) << "packed sequences";
  }
  const bool chunked = AreChunked(shape, args.q, args.k, args.v, args.out);
  if (shape.q_len == 1) {
    ZERO_CHECK_LE(shape.head_dim, kMaxTiledHeadDim) << "heads are too wide";
    ZERO_CUDA_WITH_FLOAT_TYPE(
        shape.dtype, T,
        Launch(OneQueryKernel<T>,
               static_cast<unsigned>(shape.batch * shape.num_heads), kThreads,
               0, stream, args));
    return;
  }
  ZERO_CUDA_WITH_FLOAT_TYPE(
      shape.dtype, T, WithWidth(shape.head_dim, [&](auto width) {
        using L = ForwardTile<decltype(width)::value>;
        Launch(ForwardKernel<T, L>,
               NumTiles<L>(shape.q_len, shape.batch * shape.num_heads),
               kThreads, (2 * L::kFloats + L::kScoreFloats) * sizeof(float),
               stream, args, chunked);
      }));
}

void TiledAttentionBackward(cudaStream_t stream,
                            const AttentionBackwardArgs& args,
                            Workspace workspace) {
  const AttentionShape& shape = args.shape;
  const bool chunked = AreChunked(shape, args.q, args.k, args.v, args.dout,
                                  args.dq, args.dk, args.dv);
  ZERO_CHECK_GE(workspace.bytes, TiledAttentionBackwardBytes(shape));
  float* const delta = static_cast<float*>(workspace.data);
  const int64_t heads = shape.batch * shape.num_heads;
  constexpr int kRowsOfBlock = kThreads / kWarpSize;
  const unsigned delta_blocks = NumBlocks(heads * shape.q_len, kRowsOfBlock);
  ZERO_CUDA_WITH_FLOAT_TYPE(shape.dtype, T, {
    Launch(DeltaKernel<T>, delta_blocks, kThreads, 0, stream, args, delta);
    WithWidth(shape.head_dim, [&](auto width) {
      using L = BackwardTile<decltype(width)::value>;
      constexpr size_t kShared =
          (4 * L::kFloats + L::kScoreFloats) * sizeof(float);
      Launch(KeyValueKernel<T, L>,
             NumTiles<L>(shape.kv_len, shape.batch * shape.num_kv_heads),
             kThreads, kShared + 2 * L::kRows * sizeof(float), stream, args,
             delta, chunked);
      Launch(QueryKernel<T, L>, NumTiles<L>(shape.q_len, heads), kThreads,
             kShared, stream, args, delta, chunked);
    });
  });
}

}  // namespace zero::cuda
