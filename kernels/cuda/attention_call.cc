#include "kernels/cuda/attention_call.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/dtype.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

OperandPlace PlaceOf(AttentionOperand id, const char* name,
                     const MutableHeadsRef& x) {
  return {id, name, x.data, x.batch_stride, x.token_stride};
}
OperandPlace PlaceOf(AttentionOperand id, const char* name, const HeadsRef& x) {
  return {id, name, const_cast<void*>(x.data), x.batch_stride, x.token_stride};
}

bool IsOfKeys(AttentionOperand id) {
  return id == kK || id == kV || id == kDk || id == kDv;
}

}  // namespace

AttentionCall CallOf(const AttentionForwardArgs& args) {
  return {false,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out)},
          args.lse};
}
AttentionCall CallOf(const AttentionBackwardArgs& args) {
  return {true,
          args.shape,
          args.packed,
          {PlaceOf(kQ, "q", args.q), PlaceOf(kK, "k", args.k),
           PlaceOf(kV, "v", args.v), PlaceOf(kOut, "out", args.out),
           PlaceOf(kDout, "dout", args.dout), PlaceOf(kDq, "dq", args.dq),
           PlaceOf(kDk, "dk", args.dk), PlaceOf(kDv, "dv", args.dv)},
          const_cast<float*>(args.lse)};
}

int64_t NumHeads(const AttentionShape& shape, AttentionOperand id) {
  return IsOfKeys(id) ? shape.num_kv_heads : shape.num_heads;
}

// In packed graphs cuDNN sums dq in fp32 at the strides of dq, and where query
// heads share one of keys, it keeps the dk and dv of each query head at the
// strides of dk and dv times the number that share. For those of a packed
// projection that is many times the gradients' size: they are written side by
// side, then, and copied.
bool IsStaged(const AttentionCall& call, const OperandPlace& place) {
  const AttentionShape& s = call.shape;
  if (!call.is_packed()) return false;
  if (place.id == kDq) {
    return place.token_stride >= 2 * s.num_heads * s.head_dim;
  }
  return (place.id == kDk || place.id == kDv) && s.num_heads != s.num_kv_heads;
}

int64_t TokenStride(const AttentionCall& call, const OperandPlace& place) {
  return IsStaged(call, place)
             ? NumHeads(call.shape, place.id) * call.shape.head_dim
             : place.token_stride;
}
int64_t BatchStride(const AttentionCall& call, const OperandPlace& place) {
  return IsStaged(call, place) ? call.shape.q_len * TokenStride(call, place)
                               : place.batch_stride;
}

PackedSpace SpaceOf(const AttentionCall& call, int64_t num_sequences,
                    size_t graph_bytes) {
  const AttentionShape& s = call.shape;
  size_t end = 0;
  const auto take = [&end](int64_t count, size_t item) {
    const size_t at = end;
    end += RoundUp(static_cast<size_t>(count) * item, kWorkspaceAlignment);
    return at;
  };
  const auto num_tables = static_cast<int64_t>(call.places.size()) + 1;
  PackedSpace space;
  space.lengths = take(num_sequences, sizeof(int32_t));
  space.elements =
      take(num_tables * OffsetTableStride(num_sequences), sizeof(int64_t));
  space.lse =
      take(call.has_lse() ? call.num_tokens() * s.num_heads : 0, sizeof(float));
  for (const OperandPlace& place : call.places) {
    if (!IsStaged(call, place)) continue;
    space.staged[place.id] =
        take(call.num_tokens() * TokenStride(call, place), DTypeBytes(s.dtype));
  }
  space.graph = take(static_cast<int64_t>(graph_bytes), 1);
  space.end = end;
  return space;
}

// ---- What cuDNN is asked, and what it takes ---------------------------------

std::string CudnnVersionText(size_t version) {
  return absl::StrCat("cuDNN ", version / 10000, ".", version / 100 % 100, ".",
                      version % 100);
}

namespace {

constexpr int64_t kMaxHeadDim = 256;

// Tokens of the sequences for which a packed graph of its own is built: a graph
// launches blocks for q_len tokens of as many sequences as it has, so the
// shorter they may be, the more blocks find nothing to do. Shorter ones than
// the last on average run on our own kernel.
constexpr int64_t kTokensOfSequences[] = {256, 128, 64, 32};
// cudnnGetVersion() of the first library that is asked for packed sequences.
// Below 9.25 their graphs work with sequences of at least one token only, by
// the frontend's own tests: an empty one made gradients wrong on Hopper with
// 9.22 (its issue 943, where there were queries without keys), and ours have
// empty ones. (TransformerEngine's have them too, of no queries and no keys,
// with older libraries.) Below 9.18 a workspace on Hopper was not cleared
// (TransformerEngine's issue 2186), and by its release notes 9.18 has no
// backward pass where queries and keys are one token, as a packed document may
// be.
constexpr size_t kPackedVersion = 92500;

// cudnnGetVersion() of the last library for whose backward pass the frontend
// puts the lengths of rows that are not packed into the workspace, where T is
// no multiple of 128.
constexpr size_t kLastWithLengths = 91500;

// false, with the text that `parts` make where it is wanted.
template <class... Parts>
bool No(std::string* why, const Parts&... parts) {
  if (why != nullptr) *why = absl::StrCat(parts...);
  return false;
}

// IsAsked of a call with packed sequences.
bool IsPackedAsked(const AttentionCall& call, const CudnnRules& rules,
                   std::string* why) {
  if (call.is_backward && rules.deterministic) {
    return No(
        why,
        "with a fixed order of summation cuDNN needs memory for the T x T "
        "scores of every sequence; allow any order, or do not pack");
  }
  // The frontend then drops max_total_seq_len.
  if (call.is_backward && call.shape.head_dim % 16 != 0) {
    return No(why, "head_dim ", call.shape.head_dim,
              " is not a multiple of 16, and cuDNN's backward pass "
              "would take memory for T tokens of every sequence; "
              "choose one that is, or do not pack");
  }
  for (const OperandPlace& place : call.places) {
    if (place.batch_stride == call.shape.q_len * place.token_stride) continue;
    return No(why, "rows of ", place.name, " are ", place.batch_stride,
              " elements apart, not T times its token stride ",
              place.token_stride, "; leave no gap");
  }
  if (rules.version < kPackedVersion) {
    return No(why, CudnnVersionText(rules.version),
              " may give wrong gradients of packed sequences; "
              "install cuDNN 9.25 or newer");
  }
  return true;
}

// Backward the frontend's own part of the workspace comes first, and cuDNN's
// engine gets what lies right behind it, not rounded up (as of 1.32). In it are
// a float per query and head, up to cuDNN 9.15 two lengths per row, and nothing
// else whose size is not a multiple of 16 bytes. cuDNN does not say what an
// engine does with a misaligned address.
bool IsAlignedBackward(const AttentionCall& call, const CudnnRules& rules,
                       std::string* why) {
  const bool has_lengths = rules.version <= kLastWithLengths &&
                           !call.is_packed() && call.shape.kv_len % 128 != 0;
  const int64_t bytes = 4 * call.num_tokens() * call.shape.num_heads +
                        (has_lengths ? 8 * call.shape.batch : 0);
  if (bytes % kOperandAlignment == 0) return true;
  return No(why, "cuDNN's frontend puts ", bytes,
            " bytes before its engine's workspace, whose address is "
            "then not a multiple of ",
            kOperandAlignment, " bytes; choose T as a multiple of ",
            has_lengths ? 128 : 4);
}

// The most workspace that the graph itself takes.
size_t GraphBound(const AttentionCall& call, bool deterministic) {
  constexpr int64_t kEngineBytes = int64_t{1} << 20;
  if (!call.is_backward) return kEngineBytes;
  const AttentionShape& s = call.shape;
  const int64_t length = RoundUp(s.q_len, 128);
  const int64_t queries = s.batch * length * s.num_heads;
  const OperandPlace& dq = call.places[5];
  int64_t dq_bytes = 4 * queries * s.head_dim;
  if (deterministic) {
    dq_bytes = 2 * queries * length;
  } else if (call.is_packed()) {  // at the strides of dq
    dq_bytes = 4 * call.num_tokens() * TokenStride(call, dq);
  }
  const int64_t item = s.num_heads == s.num_kv_heads ? 2 : 4;
  const int64_t dk_dv_bytes = 2 * item * queries * s.head_dim;
  return static_cast<size_t>(4 * queries + dq_bytes + dk_dv_bytes +
                             kEngineBytes);
}

}  // namespace

bool IsAsked(const AttentionCall& call, const CudnnRules& rules,
             std::string* why) {
  const AttentionShape& s = call.shape;
  if (s.num_kv_heads <= 0 || s.num_heads % s.num_kv_heads != 0) {
    return No(why, "num_kv_heads ", s.num_kv_heads,
              " does not divide num_heads ", s.num_heads,
              "; every kv head must serve the same number of query heads");
  }
  if (s.dtype != DType::kBF16 && s.dtype != DType::kF16) {
    return No(why, "cuDNN computes bf16 and fp16; train in bf16 to use it");
  }
  if (s.head_dim <= 0 || s.head_dim % 8 != 0) {
    return No(why, "head_dim ", s.head_dim,
              " is not a multiple of 8; choose one that is");
  }
  if (s.head_dim > kMaxHeadDim) {
    return No(why, "head_dim ", s.head_dim, " is more than ", kMaxHeadDim,
              "; use more and narrower heads");
  }
  if (s.q_len != s.kv_len) {
    return No(why,
              "a cache of keys grows with every token, but a graph has a fixed "
              "length; generation runs on our own kernel");
  }
  if (s.q_len < kMinCudnnTokens) {
    return No(why, "fewer than ", kMinCudnnTokens,
              " tokens run on our own kernel");
  }
  for (const OperandPlace& place : call.places) {
    for (const int64_t stride : {place.batch_stride, place.token_stride}) {
      if (stride % 8 == 0) continue;
      return No(why, "a stride of ", place.name, " is ", stride,
                " elements, not a multiple of 8; pad its rows to ",
                kOperandAlignment, " bytes");
    }
  }
  if (call.is_backward && !IsAlignedBackward(call, rules, why)) return false;
  return !call.is_packed() || IsPackedAsked(call, rules, why);
}

std::vector<int64_t> GraphsOf(const AttentionCall& call) {
  if (!call.is_packed()) return {0};
  std::vector<int64_t> numbers;
  for (const int64_t tokens : kTokensOfSequences) {
    const int64_t n = std::max(call.shape.batch, call.num_tokens() / tokens);
    if (numbers.empty() || n > numbers.back()) numbers.push_back(n);
  }
  return numbers;
}

size_t CudnnBound(const AttentionCall& call, const CudnnRules& rules) {
  if (!IsAsked(call, rules)) return 0;
  size_t bytes = GraphBound(call, rules.deterministic);
  if (call.is_packed()) {
    bytes = SpaceOf(call, GraphsOf(call).back(), bytes).end;
  }
  return bytes + kWorkspaceAlignment - 1;
}

}  // namespace zero::cuda
