#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/slices.cuh"
#include "kernels/cuda/workspace.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// partials[y, j] = sum of column j over the rows of block y: warp w takes rows
// w, w + 8, ..., a chunk of columns per lane, and the warps are added in order.
// Moves the matrix once: 2 or 4 bytes per element.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    ColumnPartialsKernel(const T* dy, int64_t num_rows, int64_t num_cols,
                         int64_t ld, int64_t rows_per_block, float* partials) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kColumns = kWarpSize * kSize;
  SHARED_ARRAY(float, sums, kWarps* kColumns);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t first_column = int64_t{blockIdx.x} * kColumns;
  const auto slice = SliceOf<kSize>(first_column + lane * kSize, num_cols);
  const int64_t begin = int64_t{blockIdx.y} * rows_per_block;
  const int64_t end =
      begin + rows_per_block < num_rows ? begin + rows_per_block : num_rows;

  float sum[kSize] = {};
#pragma unroll 4
  for (int64_t row = begin + warp; row < end; row += kWarps) {
    const auto x = Load<kAligned>(dy + row * ld, slice);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] += ToFloat(x.x[i]);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    sums[warp * kColumns + i * kWarpSize + lane] = sum[i];
  }
  __syncthreads();
  // Column `offset` is element offset % kSize of lane offset / kSize.
  const int offset = static_cast<int>(threadIdx.x);
  const int slot = offset % kSize * kWarpSize + offset / kSize;
  if (offset < kColumns && first_column + offset < num_cols) {
    float total = sums[slot];
    for (int w = 1; w < kWarps; ++w) total += sums[w * kColumns + slot];
    partials[int64_t{blockIdx.y} * num_cols + first_column + offset] = total;
  }
}

// 8 columns (a sector of 32 bytes) by 32 slices: slice s adds partials s,
// s + 32, ..., and the 32 sums are added in order.
constexpr int kLanes = 8;
constexpr int kSlices = 32;

template <class T>
__global__ void __launch_bounds__(kLanes* kSlices)
    SumPartialsKernel(const float* partials, int64_t count, int64_t width,
                      T* out, bool accumulate) {
  SHARED_ARRAY(float, sums, kLanes* kSlices);
  const int lane = threadIdx.x % kLanes;
  const int slice = threadIdx.x / kLanes;
  const int64_t column = int64_t{blockIdx.x} * kLanes + lane;
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t k = slice; k < count; k += kSlices) {
      sum += partials[k * width + column];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (slice == 0 && column < width) {
    for (int k = 1; k < kSlices; ++k) sum += sums[k * kLanes + lane];
    if (accumulate) sum += ToFloat(out[column]);
    out[column] = FromFloat<T>(sum);
  }
}

}  // namespace

void SumPartials(cudaStream_t stream, const float* partials, int64_t count,
                 const Vector& out, bool accumulate) {
  ZERO_CUDA_WITH_FLOAT_TYPE(
      out.dtype, T,
      Launch(SumPartialsKernel<T>, NumBlocks(out.size, kLanes),
             kLanes * kSlices, 0, stream, partials, count, out.size,
             static_cast<T*>(out.data), accumulate));
}

void ColumnSums(cudaStream_t stream, const ConstMatrix& dy, const Vector& out,
                bool accumulate, void* workspace) {
  ZERO_CHECK_EQ(dy.cols, out.size);
  const RowBlocks blocks = ColumnSumBlocks(dy.rows);
  float* const partials = static_cast<float*>(workspace);
  ZERO_CUDA_WITH_FLOAT_TYPE(dy.dtype, T, {
    const dim3 grid(NumBlocks(dy.cols, kWarpSize * Chunk<T>::kSize),
                    static_cast<unsigned>(blocks.count));
    const auto kernel = IsAligned(dy.data, dy.dtype, dy.ld, dy.cols)
                            ? ColumnPartialsKernel<T, true>
                            : ColumnPartialsKernel<T, false>;
    Launch(kernel, grid, kThreads, 0, stream, static_cast<const T*>(dy.data),
           dy.rows, dy.cols, dy.ld, blocks.rows, partials);
  });
  SumPartials(stream, partials, blocks.count, out, accumulate);
}

}  // namespace zero::cuda
