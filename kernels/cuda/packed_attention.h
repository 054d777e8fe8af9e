// A call of packed attention around its graph (attention_call.h): what a graph
// reads from the workspace is computed before it, and what it wrote there
// brought home after it. Tests run a reference in the graph's place.
#ifndef ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_
#define ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <unordered_map>

#include "kernels/cuda/attention_call.h"

namespace zero::cuda {

// By the ids of operands and of their tables.
using OperandPointers = std::unordered_map<int64_t, void*>;
OperandPointers PointersOf(const AttentionCall& call);

// Computes what a packed graph of `num_sequences` reads into its workspace and
// points it there. Tables: lengths int32 [num_sequences]; of each operand
// int64 [num_sequences + 1], elements from its pointer to a sequence's first
// token. Statistics: fp32 [B * T, H], as new ones are expected.
void BeforePacked(cudaStream_t stream, const AttentionCall& call,
                  int64_t num_sequences, const PackedSpace& space,
                  char* workspace, OperandPointers& pointers);

// Brings what a packed graph has written to where the call wants it.
void AfterPacked(cudaStream_t stream, const AttentionCall& call,
                 const OperandPointers& pointers);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_PACKED_ATTENTION_H_
