// Sums of squares in the order of kernels/cpu/reduce-inl.h, so that they have
// the CPU's bits: every block of one kernel leaves the sum of a run in the
// stream's scratch, and a second kernel adds the runs in order.
#ifndef ZERO_KERNELS_CUDA_PARTIALS_CUH_
#define ZERO_KERNELS_CUDA_PARTIALS_CUH_

#include <cstdint>

#include "kernels/cuda/elements.cuh"

namespace zero::cuda {

// Threads of the kernels that square.
inline constexpr int kSumThreads = 256;

// start + src[0] + src[stride] + ... (n of them), in that order, in all lanes
// of the warp that calls it. Loads go 32 at a time; an addition takes about
// 5 ns.
__device__ inline double OrderedSum(const double* src, int64_t n, int stride,
                                    double start) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  double sum = start;
  int64_t i = 0;
  // Unrolled, shuffles run ahead and an addition waits only for the one before.
  for (; i + kWarpSize <= n; i += kWarpSize) {
    const double mine = src[(i + lane) * stride];
#pragma unroll
    for (int k = 0; k < kWarpSize; ++k) {
      sum += __shfl_sync(kWholeWarp, mine, k);
    }
  }
  const int left = static_cast<int>(n - i);
  const double mine = lane < left ? src[(i + lane) * stride] : 0.0;
  for (int k = 0; k < left; ++k) sum += __shfl_sync(kWholeWarp, mine, k);
  return sum;
}

// The order in which squares are added: eight lanes in a block of 64 elements,
// 256 blocks in a run, then the runs in order.
inline constexpr int kSquareBlock = 64;
inline constexpr int64_t kRunElems = 256 * kSquareBlock;
inline constexpr int kRunBlocks = 256;

inline int64_t NumRuns(int64_t elems) {
  return (elems + kRunElems - 1) / kRunElems;
}

// A tile of a run: kSumThreads threads read it at once, eight elements each.
inline constexpr int kTileElems = kSumThreads * 8;
inline constexpr int kTileBlocks = kTileElems / kSquareBlock;

// Words of shared memory in which a tile is transposed from the order of loads
// to that of sums. Eight words of padding per block of 64 spread the 32 lanes
// that read four neighbouring blocks over 32 banks.
inline constexpr int kTileWords = kTileBlocks * (kSquareBlock + 8);
__device__ inline int TileWord(int k) { return k + k / kSquareBlock * 8; }

// Sets sums[0 .. kTileBlocks) to the sums of squares of the blocks of `tile`.
// `left`: elements of the run from the tile's first on; blocks beyond are 0.
// All threads call it, with a barrier before and after.
__device__ inline void SumTileSquares(const float* tile, int64_t left,
                                      double* sums) {
  const int elems = left < 0            ? 0
                    : left < kTileElems ? static_cast<int>(left)
                                        : kTileElems;
  const int block = static_cast<int>(threadIdx.x) / 8;
  const int lane = static_cast<int>(threadIdx.x) % 8;
  double sum = 0;
#pragma unroll
  for (int j = 0; j < kSquareBlock; j += 8) {
    const int k = block * kSquareBlock + j + lane;
    const double x = k < elems ? tile[TileWord(k)] : 0.0f;
    sum = fma(x, x, sum);
  }
  // ((0+1)+(2+3))+((4+5)+(6+7)), in every lane.
  for (int offset = 1; offset < 8; offset *= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, offset);
  }
  if (lane == 0) sums[block] = sum;
}

// start + the sums of kNum blocks of a run, in order.
template <int kNum>
__device__ inline double AddBlocks(const double* sums, double start) {
  double sum = start;
#pragma unroll 8
  for (int block = 0; block < kNum; ++block) sum += sums[block];
  return sum;
}

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_PARTIALS_CUH_
