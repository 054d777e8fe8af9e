// A call of attention as cuDNN's graphs have it (cudnn_attention.cc): where its
// operands lie, by the ids of a graph's tensors, and of packed sequences the
// tables, statistics and gradients that lie in the workspace instead. Knows no
// type of cuDNN, so that tests run a reference in a graph's place.
#ifndef ZERO_KERNELS_CUDA_ATTENTION_CALL_H_
#define ZERO_KERNELS_CUDA_ATTENTION_CALL_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kernels/ops.h"

namespace zero::cuda {

enum AttentionOperand : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDq,
  kDk,
  kDv,
  kQueryLengths,  // of packed sequences
  kKeyLengths,
};
// The id of an operand's table of offsets, in a packed graph.
constexpr int64_t OffsetsOf(AttentionOperand id) { return 100 + id; }

// Where an operand's heads lie; its pointer comes with each call.
struct OperandPlace {
  AttentionOperand id;
  const char* name;
  void* data;  // inputs are only read
  int64_t batch_stride;
  int64_t token_stride;
};

// A call of either direction.
struct AttentionCall {
  bool is_backward;
  AttentionShape shape;
  PackedSequences packed;
  // q, k, v, out; backward dout, dq, dk, dv behind them
  std::vector<OperandPlace> places;
  float* lse;  // null: not wanted; backward only reads it

  bool is_packed() const { return packed.positions != nullptr; }
  bool has_lse() const { return is_backward || lse != nullptr; }
  int64_t num_tokens() const { return shape.batch * shape.q_len; }
};
AttentionCall CallOf(const AttentionForwardArgs& args);
AttentionCall CallOf(const AttentionBackwardArgs& args);

// Of an operand: queries have H heads, keys and values K.
int64_t NumHeads(const AttentionShape& shape, AttentionOperand id);
// Elements between an operand's tokens and between its rows as the graph sees
// them: of gradients that are staged (PackedSpace) those of the stage.
int64_t TokenStride(const AttentionCall& call, const OperandPlace& place);
int64_t BatchStride(const AttentionCall& call, const OperandPlace& place);

// cudaMalloc's promise, which cuDNN may rely on for its workspace; an arena's
// is 64 bytes.
inline constexpr size_t kWorkspaceAlignment = 256;

// The parts of a packed call's workspace: bytes from its start, which lies on a
// multiple of kWorkspaceAlignment, as they do. Gradients are staged, side by
// side, where the graph would take memory for their gaps.
struct PackedSpace {
  size_t lengths, elements, lse, graph, end;
  std::unordered_map<int64_t, size_t> staged;  // by operand
};
// graph_bytes: of cuDNN's own workspace.
PackedSpace SpaceOf(const AttentionCall& call, int64_t num_sequences,
                    size_t graph_bytes);

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

#endif  // ZERO_KERNELS_CUDA_ATTENTION_CALL_H_
