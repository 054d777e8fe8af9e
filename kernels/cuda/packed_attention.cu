#include "kernels/check.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/packed_attention.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;

// A thread for each sequence, and one for the end of the last.
__global__ void __launch_bounds__(kThreads)
    SequenceTablesKernel(SequenceTables tables, int64_t table_stride) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
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

constexpr int kTile = 32;

// One block for each tile of a matrix. A tile goes through shared memory, so
// that neighbours are read and neighbours written; an extra column keeps banks
// apart.
__global__ void __launch_bounds__(kThreads)
    TransposeKernel(const float* from, int64_t rows, int64_t cols, float* to) {
  constexpr int kStep = kThreads / kTile;
  SHARED_ARRAY(float, tile, kTile*(kTile + 1));
  const int x = static_cast<int>(threadIdx.x) % kTile;
  const int y = static_cast<int>(threadIdx.x) / kTile;
  const int64_t row = int64_t{blockIdx.y} * kTile;
  const int64_t col = int64_t{blockIdx.x} * kTile;
  const int64_t matrix = int64_t{blockIdx.z} * rows * cols;
  for (int i = y; i < kTile; i += kStep) {
    if (row + i < rows && col + x < cols) {
      tile[i * (kTile + 1) + x] = from[matrix + (row + i) * cols + col + x];
    }
  }
  __syncthreads();
  for (int j = y; j < kTile; j += kStep) {
    if (col + j < cols && row + x < rows) {
      to[matrix + (col + j) * rows + row + x] = tile[x * (kTile + 1) + j];
    }
  }
}

}  // namespace

void FillSequenceTables(cudaStream_t stream, const SequenceTables& tables) {
  ZERO_CHECK_LE(tables.num_tables, kMaxOffsetTables);
  Launch(SequenceTablesKernel, NumBlocks(tables.num_sequences + 1, kThreads),
         kThreads, 0, stream, tables, OffsetTableStride(tables.num_sequences));
}

void TransposeStatistics(cudaStream_t stream, const float* from, int64_t batch,
                         int64_t rows, int64_t cols, float* to) {
  ZERO_CHECK_LT(batch, 1 << 16) << "rows of packed sequences";
  const dim3 grid(NumBlocks(cols, kTile), NumBlocks(rows, kTile),
                  static_cast<unsigned>(batch));
  Launch(TransposeKernel, grid, kThreads, 0, stream, from, rows, cols, to);
}

OperandPointers PointersOf(const AttentionCall& call) {
  OperandPointers pointers;
  for (const OperandPlace& place : call.places) {
    pointers[place.id] = place.data;
  }
  if (call.lse != nullptr) pointers[kLse] = call.lse;
  return pointers;
}

void BeforePacked(cudaStream_t stream, const AttentionCall& call,
                  int64_t num_sequences, const PackedSpace& space,
                  char* workspace, OperandPointers& pointers) {
  const AttentionShape& s = call.shape;
  SequenceTables tables = {};
  tables.offsets = call.packed.offsets;
  tables.num_sequences = num_sequences;
  tables.lengths = reinterpret_cast<int32_t*>(workspace + space.lengths);
  tables.elements = reinterpret_cast<int64_t*>(workspace + space.elements);
  const auto add_table = [&](AttentionOperand id, int64_t token_stride) {
    ZERO_CHECK_LT(tables.num_tables, kMaxOffsetTables);
    pointers[OffsetsOf(id)] =
        tables.elements + tables.num_tables * OffsetTableStride(num_sequences);
    tables.token_strides[tables.num_tables++] = token_stride;
  };
  for (const OperandPlace& place : call.places) {
    add_table(place.id, TokenStride(call, place));
  }
  pointers[kQueryLengths] = pointers[kKeyLengths] = tables.lengths;
  if (call.has_lse()) {
    add_table(kLse, s.num_heads);
    float* const lse = reinterpret_cast<float*>(workspace + space.lse);
    pointers[kLse] = lse;
    if (call.is_backward) {
      TransposeStatistics(stream, call.lse, s.batch, s.num_heads, s.q_len, lse);
    }
  }
  for (const auto& [id, at] : space.staged) pointers[id] = workspace + at;
  FillSequenceTables(stream, tables);
}

void AfterPacked(cudaStream_t stream, const AttentionCall& call,
                 const OperandPointers& pointers) {
  const AttentionShape& s = call.shape;
  if (!call.is_backward && call.has_lse()) {
    TransposeStatistics(stream, static_cast<const float*>(pointers.at(kLse)),
                        s.batch, s.q_len, s.num_heads, call.lse);
  }
  const size_t item = DTypeBytes(s.dtype);
  for (const OperandPlace& place : call.places) {
    if (!IsStaged(call, place)) continue;
    const size_t row = static_cast<size_t>(TokenStride(call, place)) * item;
    ZERO_CUDA_CHECK(cudaMemcpy2DAsync(
        place.data, static_cast<size_t>(place.token_stride) * item,
        pointers.at(place.id), row, row, static_cast<size_t>(call.num_tokens()),
        cudaMemcpyDeviceToDevice, stream));
  }
}

}  // namespace zero::cuda
