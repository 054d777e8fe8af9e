// Tiles of attention scores in fp32, for attention_tiles.cu.
//
// A block of 16 x 16 threads computes a square tile of scores, kPer x kPer of
// them a thread: rows ty * kPer + i, columns tx + 16 * j. The 16 threads of a
// row are one half of a warp, so that a row's softmax is four shuffles and its
// scores pass through shared memory behind a __syncwarp.
//
// The bound: 8 float4 reads of shared memory for 64 FMAs, so about half of the
// fp32 peak. Device memory is read once per tile of queries and tile of keys
// and does not matter.
#ifndef ZERO_KERNELS_CUDA_SCORE_TILES_CUH_
#define ZERO_KERNELS_CUDA_SCORE_TILES_CUH_

#include "kernels/cuda/elements.cuh"
#include "kernels/ops.h"

namespace zero::cuda::tiles {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 16;
inline constexpr int kBlocks = 2;  // on an SM: at most 128 registers

// Tiles of heads up to kWidth wide: kRows rows, kLd floats apart, which puts
// the float4s of 8 neighboring rows in different banks.
template <int kRows_, int kWidth_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kLd = kWidth + 4;
  static constexpr int kFloats = kRows * kLd;
  static constexpr int kPer = kRows / kSide;
  static constexpr int kFours = kWidth / (4 * kSide);  // of a thread and row
  static constexpr int kScoreLd = kRows + 4;
  static constexpr int kScoreFloats = kRows * kScoreLd;
};

// All fit 99 KiB of shared memory, two blocks on an SM of Hopper.
template <int kWidth>
using ForwardTile = Tile<(kWidth <= 128 ? 64 : 32), kWidth>;
template <int kWidth>
using BackwardTile = Tile<(kWidth <= 64    ? 64
                           : kWidth <= 128 ? 32
                                           : 16),
                          kWidth>;

__device__ inline int ThreadRow() { return threadIdx.x / kSide; }
__device__ inline int ThreadColumn() { return threadIdx.x % kSide; }

// Row t of one head.
template <class T, class Data>
__device__ inline ConstAs<T, Data>* HeadRow(const HeadsView<Data>& x, int64_t b,
                                            int64_t t, int64_t h, int64_t dim) {
  return static_cast<ConstAs<T, Data>*>(x.data) + b * x.batch_stride +
         t * x.token_stride + h * dim;
}

// tile = from * factor in fp32, with zeros beyond `rows` and, up to the next
// multiple of 4, beyond `dim`.
template <class L, class T>
__device__ inline void LoadTile(const T* from, int64_t stride, int rows,
                                int dim, bool chunked, float factor,
                                float* tile) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kChunks = L::kWidth / kSize;
  for (int i = threadIdx.x; i < L::kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int column = i % kChunks * kSize;
    if (column >= dim) continue;
    const T* const at = from + row * stride + column;
    Chunk<T> chunk;
    if (chunked && row < rows) {
      chunk = LoadChunk(at);
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        chunk.x[e] =
            row < rows && column + e < dim ? at[e] : FromFloat<T>(0.0f);
      }
    }
    float* const to = tile + row * L::kLd + column;
#pragma unroll
    for (int e = 0; e < kSize; e += 4) {
      *reinterpret_cast<float4*>(to + e) = make_float4(
          ToFloat(chunk.x[e]) * factor, ToFloat(chunk.x[e + 1]) * factor,
          ToFloat(chunk.x[e + 2]) * factor, ToFloat(chunk.x[e + 3]) * factor);
    }
  }
}

// The first key that query t of row b sees; no query after it sees an earlier
// one.
template <class Args>
__device__ inline int FirstKey(const Args& args, int64_t b, int64_t t) {
  if (args.packed.positions == nullptr) return 0;
  return static_cast<int>(t) - args.packed.positions[b * args.shape.q_len + t];
}

// starts[i] = FirstKey of query q + i, 0 beyond `rows`; by the block's first
// threads.
template <class L, class Args>
__device__ inline void LoadStarts(const Args& args, int64_t b, int64_t q,
                                  int rows, int* starts) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < L::kRows) starts[i] = i < rows ? FirstKey(args, b, q + i) : 0;
}

__device__ inline float4 Four(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

// s = the products of this thread's rows of a with its columns' rows of b.
template <class L>
__device__ inline void Scores(const float* a, const float* b, int dim,
                              float (&s)[L::kPer][L::kPer]) {
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
    for (int j = 0; j < L::kPer; ++j) s[i][j] = 0;
  }
  a += ThreadRow() * L::kPer * L::kLd;
  b += ThreadColumn() * L::kLd;
#pragma unroll 4 / L::kPer
  for (int d = 0; d < dim; d += 4) {
    float4 x[L::kPer], y[L::kPer];
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
      x[i] = Four(a + i * L::kLd + d);
      y[i] = Four(b + i * kSide * L::kLd + d);
    }
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
      for (int j = 0; j < L::kPer; ++j) {
        s[i][j] = fmaf(x[i].x, y[j].x, s[i][j]);
        s[i][j] = fmaf(x[i].y, y[j].y, s[i][j]);
        s[i][j] = fmaf(x[i].z, y[j].z, s[i][j]);
        s[i][j] = fmaf(x[i].w, y[j].w, s[i][j]);
      }
    }
  }
}

template <class L>
__device__ inline void PutScores(const float (&s)[L::kPer][L::kPer],
                                 float* scores) {
  scores += ThreadRow() * L::kPer * L::kScoreLd + ThreadColumn();
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
    for (int j = 0; j < L::kPer; ++j) {
      scores[i * L::kScoreLd + j * kSide] = s[i][j];
    }
  }
}

// A thread's part of a product of scores with a tile: its rows, columns
// tx * 4 + 64 * f and the next three.
template <class L>
using Sums = float4[L::kPer][L::kFours];

template <class L>
__device__ inline void Clear(Sums<L>& sums) {
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
    for (int f = 0; f < L::kFours; ++f) sums[i][f] = make_float4(0, 0, 0, 0);
  }
}

__device__ inline void AddTimes(float factor, float4 x, float4& sum) {
  sum.x = fmaf(factor, x.x, sum.x);
  sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z);
  sum.w = fmaf(factor, x.w, sum.w);
}

// sums += scores[:, :depth] tile[:depth, :dim]; depth is rounded up to 4.
template <class L>
__device__ inline void AddProduct(const float* scores, const float* tile,
                                  int depth, int dim, Sums<L>& sums) {
  scores += ThreadRow() * L::kPer * L::kScoreLd;
  const int column = ThreadColumn() * 4;
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    float4 x[L::kPer];
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) x[i] = Four(scores + i * L::kScoreLd + k);
#pragma unroll
    for (int f = 0; f < L::kFours; ++f) {
      const int at = column + f * 4 * kSide;
      if (at >= dim) break;
      const float* const row = tile + k * L::kLd + at;
      const float4 y0 = Four(row), y1 = Four(row + L::kLd);
      const float4 y2 = Four(row + 2 * L::kLd), y3 = Four(row + 3 * L::kLd);
#pragma unroll
      for (int i = 0; i < L::kPer; ++i) {
        AddTimes(x[i].x, y0, sums[i][f]);
        AddTimes(x[i].y, y1, sums[i][f]);
        AddTimes(x[i].z, y2, sums[i][f]);
        AddTimes(x[i].w, y3, sums[i][f]);
      }
    }
  }
}

template <class T>
struct alignas(4 * sizeof(T)) FourOf {
  T x[4];
};

// Writes row i of this thread's sums, times factor, to a row of a head.
template <class L, class T>
__device__ inline void StoreRow(const float4 (&sums)[L::kFours], float factor,
                                int dim, bool chunked, T* row) {
#pragma unroll
  for (int f = 0; f < L::kFours; ++f) {
    const int column = ThreadColumn() * 4 + f * 4 * kSide;
    const float4 sum = sums[f];
    const FourOf<T> four = {
        {FromFloat<T>(sum.x * factor), FromFloat<T>(sum.y * factor),
         FromFloat<T>(sum.z * factor), FromFloat<T>(sum.w * factor)}};
    if (chunked) {
      if (column < dim) *reinterpret_cast<FourOf<T>*>(row + column) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e < dim) row[column + e] = four.x[e];
      }
    }
  }
}

}  // namespace zero::cuda::tiles

#endif  // ZERO_KERNELS_CUDA_SCORE_TILES_CUH_
