// A call of attention in the form of cuDNN's graphs (cudnn_attention.cc). It
// says where operands lie, by the ids of a graph's tensors, and which tables,
// statistics and gradients of packed sequences lie in the workspace instead;
// whether cuDNN is asked; and the most memory it takes. Knows no type of cuDNN
// or CUDA and is in every build, so that a run can be planned without a GPU.
#ifndef ZERO_KERNELS_CUDA_ATTENTION_CALL_H_
#define ZERO_KERNELS_CUDA_ATTENTION_CALL_H_

#include <cstddef>
#include <cstdint>
#include <string>
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

// Heads of an operand: queries have H, keys and values K.
int64_t NumHeads(const AttentionShape& shape, AttentionOperand id);
// Whether an operand of a packed graph lies in the workspace (PackedSpace) and
// is copied to its own place.
bool IsStaged(const AttentionCall& call, const OperandPlace& place);
// Elements between an operand's tokens, and between its rows, as the graph sees
// them: for staged gradients (PackedSpace), those of the stage.
int64_t TokenStride(const AttentionCall& call, const OperandPlace& place);
int64_t BatchStride(const AttentionCall& call, const OperandPlace& place);

// The alignment that cudaMalloc promises and that cuDNN may rely on for its
// workspace; an arena aligns to 64 bytes.
inline constexpr size_t kWorkspaceAlignment = 256;

// The parts of a packed call's workspace, in bytes from its start. The start
// and every part lie on multiples of kWorkspaceAlignment. Gradients are staged
// side by side if the graph would otherwise need memory for the gaps between
// them.
struct PackedSpace {
  size_t lengths, elements, lse, graph, end;
  std::unordered_map<int64_t, size_t> staged;  // by operand
};
// graph_bytes: of cuDNN's own workspace.
PackedSpace SpaceOf(const AttentionCall& call, int64_t num_sequences,
                    size_t graph_bytes);

// Elements from one table of num_sequences + 1 offsets to the next. The number
// is even: cuDNN is promised multiples of 16 bytes.
constexpr int64_t OffsetTableStride(int64_t num_sequences) {
  return (num_sequences + 2) / 2 * 2;
}

// Alignment, in bytes, of the operands' rows, with which cuDNN plans.
inline constexpr int64_t kOperandAlignment = 16;
// With fewer tokens our own kernel is as good, and prompts of every length
// would build a graph each.
inline constexpr int64_t kMinCudnnTokens = 64;

// The facts, besides the call, that decide whether cuDNN is asked.
struct CudnnRules {
  bool deterministic;
  size_t version;  // cudnnGetVersion()
};
// "cuDNN 9.25.1" of 92501.
std::string CudnnVersionText(size_t version);
// Whether cuDNN is asked. If not, and why is not null, *why becomes the reason
// and what to do about it.
bool IsAsked(const AttentionCall& call, const CudnnRules& rules,
             std::string* why = nullptr);

// The graphs of a call, by their number of sequences, ascending; 0: not packed.
// Sequences that a batch does not have get no queries and no keys and lie
// behind its last token.
std::vector<int64_t> GraphsOf(const AttentionCall& call);

// Upper bound of a call's workspace if cuDNN is asked, else 0. A backward graph
// keeps: one float per query and head, for each row's tokens up to a multiple
// of 128; dq in fp32, or, if the order of summation is fixed, the gradients of
// all T x T scores in 16 bits; and dk and dv of every query head, in fp32 if
// query heads share a head of keys, else in 16 bits. This is from the source of
// the frontend (1.32). cuDNN 9.19 on Hopper asks for it within a MiB (B 8, H
// 32, T 4096, D 128: 1.1 GB, in a fixed order 9.1 GB).
size_t CudnnBound(const AttentionCall& call, const CudnnRules& rules);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_ATTENTION_CALL_H_
