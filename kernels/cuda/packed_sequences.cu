#include "kernels/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/packed_sequences.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;

unsigned NumBlocks(int64_t items) {
  return static_cast<unsigned>((items + kThreads - 1) / kThreads);
}

__device__ inline int64_t ThreadIndex() {
  return int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// A thread for each sequence, and one for the end of the last.
__global__ void __launch_bounds__(kThreads)
    SequenceTablesKernel(SequenceTables tables, int64_t table_stride) {
  const int64_t i = ThreadIndex();
  const int64_t n = tables.num_sequences;
  if (i > n) return;
  const int32_t first = tables.offsets[i];
  if (i < n) tables.lengths[i] = tables.offsets[i + 1] - first;
#pragma unroll
  for (int j = 0; j < kMaxOffsetTables; ++j) {
    if (j >= tables.num_tables) break;
    tables.elements[j * table_stride + i] = first * tables.token_strides[j];
  }
}

// A thread for each element, in the order in which they are written: a few
// bytes for each row of a head, which the cache holds while they are read
// across.
__global__ void __launch_bounds__(kThreads)
    TransposeKernel(const float* from, int64_t num_elements, int64_t rows,
                    int64_t cols, float* to) {
  const int64_t at = ThreadIndex();
  if (at >= num_elements) return;
  const int64_t i = at % rows;
  const int64_t j = at / rows % cols;
  const int64_t b = at / rows / cols;
  to[at] = from[(b * rows + i) * cols + j];
}

}  // namespace

void FillSequenceTables(cudaStream_t stream, const SequenceTables& tables) {
  ZERO_CHECK_LE(tables.num_tables, kMaxOffsetTables);
  Launch(SequenceTablesKernel, NumBlocks(tables.num_sequences + 1), kThreads, 0,
         stream, tables, OffsetTableStride(tables.num_sequences));
}

void TransposeStatistics(cudaStream_t stream, const float* from, int64_t batch,
                         int64_t rows, int64_t cols, float* to) {
  const int64_t num_elements = batch * rows * cols;
  Launch(TransposeKernel, NumBlocks(num_elements), kThreads, 0, stream, from,
         num_elements, rows, cols, to);
}

}  // namespace zero::cuda
