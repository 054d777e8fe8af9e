// Packed sequences (kernels/ops.h) as cuDNN wants them: a graph has a fixed
// number of sequences, their lengths, and for every operand the offset of each
// one's first element; its statistics lie token by token.
#ifndef ZERO_KERNELS_CUDA_PACKED_SEQUENCES_H_
#define ZERO_KERNELS_CUDA_PACKED_SEQUENCES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/attention_call.h"

namespace zero::cuda {

// The most tables that one call asks for.
inline constexpr int kMaxOffsetTables = 9;

struct SequenceTables {
  // PackedSequences::offsets, num_sequences + 1 of them at least. Sequences
  // beyond the batch's have length 0 and lie behind its last token.
  const int32_t* offsets;
  int64_t num_sequences;
  int num_tables;                           // at most kMaxOffsetTables
  int64_t token_strides[kMaxOffsetTables];  // elements
  int32_t* lengths;                         // out: [num_sequences]
  int64_t* elements;  // out: [num_tables, OffsetTableStride(num_sequences)]
};

// lengths[i] = offsets[i + 1] - offsets[i];
// elements[j, i] = offsets[i] * token_strides[j], i <= num_sequences.
void FillSequenceTables(cudaStream_t stream, const SequenceTables& tables);

// to[b, j, i] = from[b, i, j].
// Shapes: from [batch, rows, cols], to [batch, cols, rows]; contiguous.
void TransposeStatistics(cudaStream_t stream, const float* from, int64_t batch,
                         int64_t rows, int64_t cols, float* to);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_PACKED_SEQUENCES_H_
