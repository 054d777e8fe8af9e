// Every kernel: its arguments and what it computes are here; its name is in
// op_list.h. cpu/ and cuda/ implement the same names in files of the same name.
//
// The caller (engine/autograd) validates shapes and takes outputs and
// workspace from an arena; kernels trust their arguments and never allocate.
// Matrices are row-major. "Accumulate" means +=; otherwise the output is
// overwritten without being read. Results do not depend on the data's address
// or on earlier calls; they may depend on the number of compute threads of the
// device, which is fixed.
//
// Legend: B batch, T time, M = B * T tokens (rows), C channels, H query heads,
// K key/value heads, D head width, V vocabulary, F feed-forward width.
//
// To add an op: kernels/README.md.
#ifndef ZERO_KERNELS_OPS_H_
#define ZERO_KERNELS_OPS_H_

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/op_list.h"

namespace zero {

// T, const if Data is.
template <class T, class Data>
using ConstAs = std::conditional_t<std::is_const_v<Data>, const T, T>;

// The address of element i of an array.
template <class Data>
Data* ElementAt(Data* data, DType dtype, int64_t i) {
  return static_cast<ConstAs<char, Data>*>(data) +
         i * static_cast<int64_t>(DTypeBytes(dtype));
}

// A view of device memory: rows x cols elements, row i at data + i * ld.
template <class Data>
struct MatrixView {
  Data* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;  // elements; >= cols

  Data* Row(int64_t i) const { return ElementAt(data, dtype, i * ld); }
  MatrixView Rows(int64_t first, int64_t count) const {
    return {Row(first), dtype, count, cols, ld};
  }
  MatrixView Cols(int64_t first, int64_t count) const {
    return {ElementAt(data, dtype, first), dtype, rows, count, ld};
  }
  template <class Const>
  requires(std::is_const_v<Const> && !std::is_const_v<Data>)
  operator MatrixView<Const>() const {
    return {data, dtype, rows, cols, ld};
  }
};
using ConstMatrix = MatrixView<const void>;
using Matrix = MatrixView<void>;

template <class Data>
struct VectorView {
  Data* data = nullptr;
  DType dtype = DType::kF32;
  int64_t size = 0;

  template <class Const>
  requires(std::is_const_v<Const> && !std::is_const_v<Data>)
  operator VectorView<Const>() const {
    return {data, dtype, size};
  }
};
using ConstVector = VectorView<const void>;
using Vector = VectorView<void>;

// Scratch memory of one call, sized by the op's *WorkspaceBytes; 64-byte
// aligned. Contents are undefined before and after.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

enum class Gelu { kNone, kTanh, kErf };

// ---- Matrix products ------------------------------------------------------

// y[M,N] = act(x[M,K] w[N,K]^T + bias[N]) + residual[M,N].
// All of one dtype (fp32, bf16 or fp16); sums in fp32.
struct LinearArgs {
  ConstMatrix x;
  ConstMatrix w;
  ConstVector bias;      // data null: none
  ConstMatrix residual;  // data null: none; may not alias y
  Matrix y;
  Gelu act = Gelu::kNone;
  Matrix pre_act;  // with act: receives x w^T + bias when data is not null
};

// dx[M,K] = dy[M,N] w[N,K], times gelu'(pre_act) when act is set.
struct LinearBackwardInputArgs {
  ConstMatrix dy;
  ConstMatrix w;
  Matrix dx;
  bool accumulate = false;  // not together with act
  Gelu act = Gelu::kNone;
  ConstMatrix pre_act;  // [M,K]
};

// dw[N,K] (+)= dy[M,N]^T x[M,K]; dbias[N] (+)= column sums of dy.
// dw and dbias are fp32 or the dtype of dy, with sums in fp32.
struct LinearBackwardWeightArgs {
  ConstMatrix dy;
  ConstMatrix x;
  Matrix dw;  // data null: none
  bool accumulate_dw = false;
  Vector dbias;  // data null: none
  bool accumulate_dbias = false;
};

// The statistics of a row of logits that a loss needs, so far: the largest
// logit, the sum of e^(logit - max), and the target's logit. The largest starts
// finite so that e^(-inf - max) is 0.
struct LossRow {
  float max = -FLT_MAX;
  float target_logit = 0;
  double sum = 0;
};

// One part of a vocabulary table, computed part by part. The caller runs
// kStatistics for each part but the last, kAll for the last, then kGradients
// for the others, in reverse: together they compute the same bits as one op on
// the table with the same `part_rows`. dx is fp32 then; kAll writes it and
// kGradients adds to it. Without dx, kGradients computes only dw, for any part,
// at any time.
struct LossPart {
  enum class Work { kStatistics, kAll, kGradients };

  int64_t rows = 0;   // of the table; 0: w is the table
  int64_t first = 0;  // w is rows [first, first + w.rows)
  Work work = Work::kAll;
  // Both are the caller's from the first op to the last.
  LossRow* statistics = nullptr;  // [M], of all parts
  // This part's logits, LossLogitsBytes: written by kStatistics, destroyed by
  // kGradients. Null: logits are recomputed.
  void* logits = nullptr;
};

// Softmax cross-entropy of logits = x[M,C] w[V,C]^T against targets[M], in
// row chunks so that the logits of the whole batch never exist; the gradients
// of a chunk follow its losses. A target < 0 is ignored: loss and gradient 0.
// Loss of a row = logsumexp(logits) - logits[target], in fp32 or better.
// With `part_rows`, products and softmax take that many rows of w at a time,
// and dx is summed over them in fp32, from the last part to the first.
// Source: chunked head as in Liger Kernel / llm.c's fused classifier.
struct LinearCrossEntropyArgs {
  ConstMatrix x;                      // [M, C]
  ConstMatrix w;                      // [>= V, C]
  int64_t vocab;                      // V; later rows are not in the softmax
  const int32_t* targets;             // [M]
  float* losses = nullptr;            // [M] per-row losses; null: none
  double* loss_sum = nullptr;         // += sum of the losses, in row order
  const float* grad_scale = nullptr;  // device scalar; d(loss_sum) seed
  Matrix dx;                          // [M, C]; data null: none
  Matrix dw;                          // as w, 0 beyond V; data null: frozen
  bool accumulate_dw = false;
  int64_t part_rows = 0;  // 0: all; else a multiple of 64
  LossPart part = {};

  // Rows of the whole table.
  int64_t rows() const { return part.rows == 0 ? w.rows : part.rows; }
};

// ---- Attention ------------------------------------------------------------

// Element (b, t, h, d) of an operand is at
// data + b * batch_stride + t * token_stride + h * D + d (elements).
template <class Data>
struct HeadsView {
  Data* data = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
};
using HeadsRef = HeadsView<const void>;
using MutableHeadsRef = HeadsView<void>;

struct AttentionShape {
  DType dtype = DType::kF32;
  int64_t batch = 0;
  int64_t q_len = 0;   // query tokens
  int64_t kv_len = 0;  // key tokens; query i sees keys 0 .. kv_len-q_len+i
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_heads; head h uses h / (H / K)
  int64_t head_dim = 0;
  float scale = 1.0f;  // usually 1 / sqrt(D)
};

// The sequences of packed rows (variable lengths, like FlashAttention's
// cu_seqlens). A row of T tokens holds one or more, and none crosses rows. With
// them, token t of a row sees the keys t - position .. t; q_len == kv_len.
struct PackedSequences {
  // [B * T], of each token in its sequence; null: every row is one sequence
  const int32_t* positions = nullptr;
  // [B * T + 1]: the first token of each sequence, counted over the batch, in
  // order; from entry `count` on B * T
  const int32_t* offsets = nullptr;
  int64_t count = 0;  // of sequences; on the host
};

// Causal softmax(q k^T * scale) v; the T x T matrix of the batch never exists.
struct AttentionForwardArgs {
  AttentionShape shape;
  PackedSequences packed;
  HeadsRef q, k, v;
  MutableHeadsRef out;
  float* lse = nullptr;  // [B, H, q_len] log-sum-exp; null: none
};

struct AttentionBackwardArgs {
  AttentionShape shape;  // q_len == kv_len
  PackedSequences packed;
  HeadsRef q, k, v, out, dout;
  const float* lse = nullptr;  // [B, H, T]
  MutableHeadsRef dq, dk, dv;  // overwritten
};

// ---- Rows -----------------------------------------------------------------

// Rows of `width` elements: row (o, i) is at data + o * stride + i * width.
// With inner = 1 this is a matrix with a leading dimension; with inner = H it
// is the heads of a packed projection.
template <class Data>
struct RowsView {
  Data* data = nullptr;
  DType dtype = DType::kF32;
  int64_t outer = 0;
  int64_t inner = 1;
  int64_t width = 0;
  int64_t stride = 0;  // elements between outer rows

  template <class Const>
  requires(std::is_const_v<Const> && !std::is_const_v<Data>)
  operator RowsView<Const>() const {
    return {data, dtype, outer, inner, width, stride};
  }
};
using ConstRows = RowsView<const void>;
using Rows = RowsView<void>;

// LayerNorm: Ba et al. 2016; RMSNorm: Zhang and Sennrich 2019.
enum class NormKind { kLayerNorm, kRmsNorm };

// sum = x + residual; y = (sum - mean) * rstd * weight + bias over each row;
// for RMSNorm mean is 0. Statistics in fp32.
struct NormForwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  ConstRows x;
  ConstRows residual;  // data null: none, then sum is x and is not written
  Rows sum;            // may alias x or residual
  ConstVector weight;  // [width]
  ConstVector bias;    // [width]; data null: none
  Rows y;
  float* mean = nullptr;  // [outer * inner]; LayerNorm only; null: none
  float* rstd = nullptr;  // [outer * inner]; null: none
  float eps = 1e-5f;
};

// dx = d(norm)/d(sum) of dy, plus dsum (the gradient that reaches `sum` on
// the residual path). dweight, dbias (+)= sums over rows, in fp32, in an order
// that does not depend on the number of threads.
struct NormBackwardArgs {
  NormKind kind = NormKind::kLayerNorm;
  ConstRows dy;
  ConstRows sum;
  ConstVector weight;
  const float* mean = nullptr;
  const float* rstd = nullptr;
  ConstRows dsum;  // data null: none; may alias dx
  Rows dx;
  Vector dweight;  // fp32 or the dtype of dy; data null: frozen
  bool accumulate_dweight = false;
  Vector dbias;
  bool accumulate_dbias = false;
};

// Rotates pairs (d, d + D/2) of each head by the angle of its position; the
// inverse rotation is the backward pass. Half-split layout as in Hugging
// Face's Llama. Source: Su et al. 2021 (RoFormer).
struct RotaryArgs {
  Rows x;                      // outer tokens, inner heads, width D; in place
  const int32_t* positions;    // [outer]
  const float* cos = nullptr;  // [max_position, D/2]
  const float* sin = nullptr;  // [max_position, D/2]
  bool inverse = false;
};

// The pieces of a table [V, C] that are stored, end to end: [begin, begin +
// elems) of every `period` of its elements [first, last) in row-major order.
// REQUIRES: all are multiples of 64; `last` too, if it cuts the table.
struct TablePieces {
  int64_t period = 0;  // 0: all of it, with a leading dimension
  int64_t begin = 0, elems = 0;
  int64_t first = 0, last = INT64_MAX;
};

// out[i] = table[ids[i]] (+ positions_table[position_ids[i]]).
struct EmbeddingForwardArgs {
  const int32_t* ids;  // [M]; null: 0, 1, ...
  ConstMatrix table;   // [V, C]
  // `table` is rows [first, first + V) of a larger one; rows of `out` for other
  // ids are unchanged.
  int64_t first = 0;
  // Only these pieces of the table are stored. Elements in other pieces are -0
  // in `out`, since x + -0 is x for every x: the outputs for the pieces of all
  // ranks add up to the rows. Those outside of [first, last) are unchanged.
  // REQUIRES: ids, first = 0, no position table.
  TablePieces pieces = {};
  const int32_t* position_ids = nullptr;  // [M]; null: no position table
  ConstMatrix position_table;             // [P, C]
  Matrix out;                             // [M, C]
};

// dtable[v] (+)= sum over i with ids[i] = v of dout[i], in order of i (on a GPU
// in parts of 256 of them, which are then added in order).
// Overwrite zeroes every row first.
struct EmbeddingBackwardArgs {
  const int32_t* ids;  // [M]
  ConstMatrix dout;    // [M, C]
  Matrix dtable;       // [V, C]; fp32 or the dtype of dout
  bool accumulate = false;
  TablePieces pieces = {};  // REQUIRES: accumulate, unless all
};

// ---- Element-wise ---------------------------------------------------------

// y = gelu(x), of one dtype and size. kTanh: Hendrycks and Gimpel's tanh
// approximation (gelu_new); kErf: exact.
struct GeluForwardArgs {
  Gelu kind;
  ConstVector x;
  Vector y;
};
struct GeluBackwardArgs {
  Gelu kind;
  ConstVector x;
  ConstVector dy;
  Vector dx;  // may alias dy
};

// y[M,F] = silu(gate) * up with gate = x[:, :F], up = x[:, F:2F].
// Source: Shazeer 2020.
struct SwigluForwardArgs {
  ConstMatrix x;  // [M, 2F]
  Matrix y;       // [M, F]
};
struct SwigluBackwardArgs {
  ConstMatrix x;   // [M, 2F]
  ConstMatrix dy;  // [M, F]
  Matrix dx;       // [M, 2F]; may alias x
};

// y = x kept with probability 1 - p and scaled by 1 / (1 - p), else 0. The
// mask is a pure function of (key, row_ids[row], column), so it is the same
// for any world size and on recompute; the backward pass is the same call.
// RNG: Philox-4x32-10 (Salmon et al. 2011), see kernels/philox.h.
struct DropoutArgs {
  ConstMatrix x;  // [rows, cols]
  Matrix y;       // may alias x
  float probability = 0;
  uint64_t key = 0;        // of (seed, step, site)
  const int64_t* row_ids;  // [rows]; global id of each row
};

struct AddArgs {  // y = a + b (same dtype; sums in fp32)
  ConstVector a, b;
  Vector y;  // may alias a or b
};
struct CastArgs {  // dst = src to nearest even; one of them fp32, or one dtype
  ConstVector src;
  Vector dst;
};
struct FillArgs {
  Vector dst;
  float value = 0;
};

// ---- Reductions over flat spans -------------------------------------------

struct SquaredSpan {
  ConstVector src;
  double* out;
};

// For every span, out[0] = sum of squares of src in float64: serial within
// fixed blocks of 64 elements (in eight fixed lanes), then over runs of blocks
// and over runs, each in order (cpu/reduce-inl.h), so it does not depend on the
// number of threads or on the other spans. Non-finite input gives a non-finite
// sum, and finite fp32 input cannot overflow it. Many short spans in one call
// cost a GPU as much as one long one.
struct SumSquaresArgs {
  absl::Span<const SquaredSpan> spans;  // of one dtype
};

// out[0] = src[0] + src[1] + ... in that order, in float64: for sums over
// ranks.
struct SumArgs {
  const double* src;
  int64_t size;
  double* out;
};

// out[0] = number of elements of src that are NaN or infinite.
struct CountNonFiniteArgs {
  ConstVector src;
  int64_t* out;
};

// norm = sqrt(sum_squares) * inverse_scale; grad_scale = inverse_scale *
// min(1, max_norm / (norm + 1e-6)); max_norm <= 0 means no clipping.
// found_non_finite = 1 when the norm is not finite, else 0 (with keep_found:
// unchanged).
// Source: torch.nn.utils.clip_grad_norm_.
struct ClipArgs {
  const double* sum_squares;
  float max_norm = 0;
  float inverse_scale = 1;     // 1 / loss scale
  bool keep_found = false;     // found_non_finite stays 1 if it is 1
  float* norm;                 // out
  float* grad_scale;           // out: factor the optimizer applies
  uint32_t* found_non_finite;  // out
};

// dst[i] (+)= src[0][i] + src[1][i] + ..., one source per rank, in that order:
// sums in fp32 and one rounding to nearest even, or float64 throughout. With
// accumulate the sum is formed first, then added to dst. With one source it is
// a conversion that a communication thread may do.
// Threads: serial on the CPU, on any thread: communication threads, which must
//          not enter OpenMP, call it.
struct SumRanksArgs {
  absl::Span<const void* const> src;  // >= 1 of dst.size elements each
  DType src_dtype = DType::kF32;
  Vector dst;  // may be one of src if the dtypes are equal
  bool accumulate = false;
};

// ---- Optimizers: one fused pass over flat spans ---------------------------

// A run of the flat span that shares its weight decay and (LAMB) one tensor.
// If the span is pieces of a whole, end to end, element i of the range is
// element i + shift of the whole; a range is within one piece.
struct UpdateRange {
  int64_t begin = 0;
  int64_t end = 0;  // exclusive
  float weight_decay = 0;
  int64_t shift = 0;
};

// The flat state that an optimizer updates. master is null if param is fp32 and
// so its own master; fp32; or, with bf16, the uint16 rest that completes param
// to masters (SplitMaster in kernels/rounding.h, which rounds bf16 parameters
// in either case). Masters and the optimizer's arrays hold only the span;
// parameters and gradients may be whole arrays, in which the same elements are
// updated. Nothing is written when *found_non_finite != 0.
struct UpdateState {
  Vector param;                                // fp32, bf16 or fp16
  Vector master;                               // data null: none
  ConstVector grad;                            // fp32, or as param
  const float* grad_scale = nullptr;           // device scalar; null: 1
  const uint32_t* found_non_finite = nullptr;  // device scalar; null: 0
  absl::Span<const UpdateRange> ranges;
  bool whole_param = false;  // param is of the whole: i + shift is its index
  bool whole_grad = false;   // likewise
  // Stochastic rounding of the master to a 16-bit param: away from zero with
  // the probability of the part cut off, by the random word of element
  // first_element + i + shift under rounding_key (kernels/rounding.h), so the
  // bits do not depend on ranks or cuts.
  bool stochastic_rounding = false;
  uint64_t rounding_key = 0;  // of (seed, step)
  int64_t first_element = 0;  // global index of the whole's first element

  bool splits_master() const { return master.dtype == DType::kU16; }
};

// Arguments of the rules that keep means of the gradient and of its square.
struct MomentArgs {
  UpdateState state;
  float* m;
  float* v;
  float lr = 0, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^step
};

// Decoupled weight decay, Loshchilov and Hutter 2019:
//   m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   p -= lr wd p;  p -= lr (m / c1) / (sqrt(v / c2) + eps), c = 1 - b^step.
// With adam_w false the decay is added to g instead (Adam with L2).
struct AdamWArgs : MomentArgs {
  bool adam_w = true;
};

// buf = momentum buf + (g + wd p), first step buf = g + wd p;
// p -= lr (nesterov ? g + wd p + momentum buf : buf). torch.optim.SGD.
struct SgdArgs {
  UpdateState state;
  float* momentum_buffer = nullptr;  // null: no momentum
  float lr = 0, momentum = 0, dampening = 0;
  bool nesterov = false;
  bool first_step = false;
};

// A range as a part of its tensor: the tensor's parts are [begin, end), and
// this range's is `own`.
struct TensorPart {
  int64_t own = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// LAMB (You et al. 2020) in two passes over the same ranges, so the norms of a
// tensor that is split over ranks can be summed between them. Pass 1,
// LambMoments: updates m and v; of part k = own of a range,
//   norms[2 k] += |p|^2, norms[2 k + 1] += |update|^2,
//   update = (m/c1) / (sqrt(v/c2) + eps) + wd p.
// Pass 2, LambApply: p -= lr * ratio * update, recomputed;
//   ratio = clamp(|p| / |update|, min, max) of the whole tensor, whose parts
//   are added in order; 1 if either norm is 0.
struct LambArgs : MomentArgs {
  absl::Span<const TensorPart> parts;  // of every range; no two own the same
  double* norms;                       // two of every part
  float min_coeff = 0.01f, max_coeff = 10.0f;
};

// Workspace sizes of a device's ops: functions of shapes, strides, dtypes and
// the operands present.
class OpSizes {
 public:
  virtual ~OpSizes() = default;

#define ZERO_OP(Name, Args) \
  virtual size_t Name##WorkspaceBytes(const Args&) const = 0;
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
  // Bytes of LossPart::logits, for the x and the w of `args`.
  virtual size_t LossLogitsBytes(const LinearCrossEntropyArgs& args) const = 0;
};

// The kernels of one device. Calls are asynchronous on `stream` on CUDA and
// run on the calling thread on the CPU.
class Ops : public OpSizes {
 public:
#define ZERO_OP(Name, Args) \
  virtual void Name(Stream&, const Args&, Workspace) = 0;
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args) virtual void Name(Stream&, const Args&) = 0;
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP
};

}  // namespace zero

#endif  // ZERO_KERNELS_OPS_H_
