// What surrounds the graph of a packed attention call (attention_call.h):
// computes what the graph reads from the workspace, and afterwards copies what
// it wrote there to its place. Tests run a reference instead of the graph.
//
// A graph has a fixed number of sequences, their lengths, and for every operand
// the offset of each one's first element; its statistics lie token by token.
#ifndef ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_
#define ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <unordered_map>

#include "kernels/cuda/attention_call.h"

namespace zero::cuda {

// Addresses by the ids of operands and of their tables.
using OperandPointers = std::unordered_map<int64_t, void*>;
OperandPointers PointersOf(const AttentionCall& call);

// Computes what a packed graph of `num_sequences` reads into its workspace and
// points it there. Tables: lengths int32 [num_sequences]; of each operand
// int64 [num_sequences + 1], elements from its pointer to a sequence's first
// token. Statistics: fp32 [B * T, H], as new ones are expected.
void BeforePacked(cudaStream_t stream, const AttentionCall& call,
                  int64_t num_sequences, const PackedSpace& space,
                  char* workspace, OperandPointers& pointers);

// Copies what a packed graph has written to where the call wants it.
void AfterPacked(cudaStream_t stream, const AttentionCall& call,
                 const OperandPointers& pointers);

// ---- Its kernels ------------------------------------------------------------

// The most tables that one call asks for.
inline constexpr int kMaxOffsetTables = 9;

struct SequenceTables {
  // PackedSequences::offsets, at least num_sequences + 1. Sequences beyond the
  // batch's have length 0 and lie behind its last token.
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

#endif  // ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_
