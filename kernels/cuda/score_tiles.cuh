// Tiles of attention scores in fp32, for attention_tiles.cu.
//
// A block of 16 x 16 threads computes a square tile of scores, kPer x kPer of
// them a thread (ForEachScore). The 16 threads of a row are one half of a warp,
// so that a row's softmax is four shuffles and its scores pass through shared
// memory behind a __syncwarp.
//
// The bound: 8 float4 reads of shared memory for 64 FMAs, so about half of the
// fp32 peak. Device memory is read once per tile, which is little beside that:
// hence its dtype is a value that is looked at once per tile, not a template
// parameter of the kernels.
#ifndef ZERO_KERNELS_CUDA_SCORE_TILES_CUH_
#define ZERO_KERNELS_CUDA_SCORE_TILES_CUH_

#include "kernels/cuda/slices.cuh"
#include "kernels/ops.h"

namespace zero::cuda::tiles {

inline constexpr int kThreads = 256;
inline constexpr int kSide = 16;
inline constexpr int kBlocks = 2;  // on an SM: at most 128 registers

// kRows rows of a head up to kWidth wide, in shared memory. They lie kLd floats
// apart, which puts the float4s of 8 neighboring rows in different banks.
template <int kRows_, int kWidth_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kLd = kWidth + 4;
  static constexpr int kPer = kRows / kSide;
  static constexpr int kFours = kWidth / (4 * kSide);

  // The scores of a tile of queries and a tile of keys: of the block, and a
  // thread's part of them.
  using AllScores = Tile<kRows, kRows>;
  using Scores = float[kPer][kPer];
  // A thread's part of a product of scores with a tile: its rows of scores,
  // columns tx * 4 + 64 * f and the next three.
  using Sums = Chunk<float>[kPer][kFours];

  alignas(16) float x[kRows][kLd];
};

// All fit 99 KiB of shared memory, two blocks on an SM of Hopper.
template <int kWidth>
using ForwardTile = Tile<(kWidth <= 128 ? 64 : 32), kWidth>;
template <int kWidth>
using BackwardTile = Tile<(kWidth <= 64    ? 64
                           : kWidth <= 128 ? 32
                                           : 16),
                          kWidth>;

// The four floats at p, which is shared memory.
__device__ inline Chunk<float> Four(const float* p) {
  return Load<true>(p, Slice<4>{0});
}

__device__ inline int ThreadRow() { return threadIdx.x / kSide; }
__device__ inline int ThreadColumn() { return threadIdx.x % kSide; }

// Calls fn(i, j, row, column) for each of this thread's scores: s[i][j] is at
// `row` and `column` of the block's.
template <class L, class Fn>
__device__ inline void ForEachScore(const Fn& fn) {
#pragma unroll
  for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
    for (int j = 0; j < L::kPer; ++j) {
      fn(i, j, ThreadRow() * L::kPer + i, ThreadColumn() + j * kSide);
    }
  }
}

// s += the products of rows of a with rows of b.
template <class L>
__device__ inline void AddScores(const L& a, const L& b, int dim,
                                 typename L::Scores& s) {
#pragma unroll 4 / L::kPer
  for (int d = 0; d < dim; d += 4) {
    Chunk<float> x[L::kPer], y[L::kPer];
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
      x[i] = Four(&a.x[ThreadRow() * L::kPer + i][d]);
      y[i] = Four(&b.x[ThreadColumn() + i * kSide][d]);
    }
    ForEachScore<L>([&](int i, int j, int, int) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][j] = fmaf(x[i].x[e], y[j].x[e], s[i][j]);
      }
    });
  }
}

// sums += s tile[:depth, :dim]; depth is rounded up to 4. The scores pass
// through `all`, which is for this alone.
template <class L>
__device__ inline void AddProduct(const typename L::Scores& s,
                                  typename L::AllScores& all, const L& tile,
                                  int depth, int dim, typename L::Sums& sums) {
  __syncwarp();  // the scores before are read
  ForEachScore<L>(
      [&](int i, int j, int row, int column) { all.x[row][column] = s[i][j]; });
  __syncwarp();
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    Chunk<float> x[L::kPer], y[4];
#pragma unroll
    for (int i = 0; i < L::kPer; ++i) {
      x[i] = Four(&all.x[ThreadRow() * L::kPer + i][k]);
    }
#pragma unroll
    for (int f = 0; f < L::kFours; ++f) {
      const int column = (ThreadColumn() + f * kSide) * 4;
      if (column >= dim) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = Four(&tile.x[k + e][column]);
#pragma unroll
      for (int i = 0; i < L::kPer; ++i) {
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          float& sum = sums[i][f].x[e % 4];
          sum = fmaf(x[i].x[e / 4], y[e / 4].x[e % 4], sum);
        }
      }
    }
  }
}

template <int kFours>
__device__ inline void Scale(float factor, Chunk<float> (&row)[kFours]) {
#pragma unroll
  for (int e = 0; e < 4 * kFours; ++e) row[e / 4].x[e % 4] *= factor;
}

// ---- Device memory ----------------------------------------------------------

// How the rows of heads lie in device memory.
struct RowFormat {
  DType dtype;
  int dim;
  bool chunked;  // every row consists of whole aligned chunks of 16 bytes
};

// Calls fn with a zero of the element type of `dtype`: fp32, bf16 or fp16.
template <class Fn>
__device__ inline void WithType(DType dtype, const Fn& fn) {
  if (dtype == DType::kF32) {
    fn(0.0f);
  } else if (dtype == DType::kBF16) {
    fn(Bf16());
  } else {
    fn(F16());
  }
}

// The tokens t .. t + rows - 1 of head h in row b of the batch.
struct HeadTile {
  int b, h, t, rows;
};

template <class T, class Data>
__device__ inline ConstAs<T, Data>* FirstRow(const HeadsView<Data>& x,
                                             const HeadTile& at, int dim) {
  return static_cast<ConstAs<T, Data>*>(x.data) + at.b * x.batch_stride +
         at.t * x.token_stride + at.h * dim;
}

// tile = the rows `at` of x, times factor; zeros beyond them and, up to the
// next multiple of 4, beyond the width of the heads.
template <class L>
__device__ inline void LoadTile(const HeadsRef& x, const HeadTile& at,
                                const RowFormat& format, L& tile,
                                float factor = 1) {
  WithType(format.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kSize = Chunk<T>::kSize;
    constexpr int kChunks = L::kWidth / kSize;
    const T* const first = FirstRow<T>(x, at, format.dim);
    for (int i = threadIdx.x; i < L::kRows * kChunks; i += kThreads) {
      const int row = i / kChunks;
      const int column = i % kChunks * kSize;
      if (column >= format.dim) continue;
      const T* const from = first + row * x.token_stride;
      const auto slice = SliceOf<kSize>(column, format.dim).If(row < at.rows);
      const Chunk<T> chunk =
          format.chunked ? Load<true>(from, slice) : Load<false>(from, slice);
#pragma unroll
      for (int begin = 0; begin < kSize; begin += 4) {
        Chunk<float> four;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          four.x[e] = ToFloat(chunk.x[begin + e]) * factor;
        }
        reinterpret_cast<Chunk<float>&>(tile.x[row][column + begin]) = four;
      }
    }
  });
}

// Writes this thread's part of the rows `at` of x.
template <class L>
__device__ inline void StoreTile(const typename L::Sums& sums,
                                 const MutableHeadsRef& x, const HeadTile& at,
                                 const RowFormat& format) {
  WithType(format.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* const first = FirstRow<T>(x, at, format.dim);
#pragma unroll
    for (int i = 0; i < L::kPer * L::kFours; ++i) {
      const int row = ThreadRow() * L::kPer + i / L::kFours;
      const int column = (ThreadColumn() + i % L::kFours * kSide) * 4;
      if (row >= at.rows) continue;
      const auto slice = SliceOf<4>(column, format.dim);
      Packed<T, 4> four;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four.x[e] = FromFloat<T>(sums[i / L::kFours][i % L::kFours].x[e]);
      }
      T* const to = first + row * x.token_stride;
      if (format.chunked) {
        Store<true>(to, slice, four);
      } else {
        Store<false>(to, slice, four);
      }
    }
  });
}

}  // namespace zero::cuda::tiles

#endif  // ZERO_KERNELS_CUDA_SCORE_TILES_CUH_
