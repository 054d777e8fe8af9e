// The differentiable ops that models are written in.
//
// Each checks its arguments (and prints both values), takes its output from
// the context's arena, calls the kernel, and, if a tape is set and a gradient
// is needed, records its backward, which is next to its forward in the file of
// the same name. Weight gradients go straight into the weight's sink. A Weight
// is kept by address and read again in backward, so it may be released and
// gathered elsewhere in between; it must outlive the tape. Activations have the
// dtype of the weights.
//
// Legend: B batch, T time, M = B * T tokens, C channels, H query heads, K
// key/value heads, D head width, V vocabulary, F feed-forward width.
//
// To add an op: NAME.cc here with forward and backward, a kernel in
// kernels/ops.h, a finite-difference test in tests/engine/autograd.
#ifndef ZERO_ENGINE_AUTOGRAD_OPS_H_
#define ZERO_ENGINE_AUTOGRAD_OPS_H_

#include <utility>

#include "engine/autograd/context.h"
#include "engine/autograd/tape.h"

namespace zero {

// Token embedding plus, if `positions` is not null, learned positions.
// Shapes: out [M, C], tokens table [V, C], positions table [P, C].
Var Embedding(Context& ctx, const Weight& tokens, const Weight* positions);

// Rows [first, first + rows of the weight) of a table of `rows` rows.
struct TableSlice {
  int64_t first = 0, rows = 0;
};

// The same with one part of the tokens table: writes the rows of its tokens.
// `in` is the previous part's result, undefined for the first part, which alone
// writes the gradient of positions.
Var EmbeddingPart(Context& ctx, const Var& in, const Weight& tokens,
                  const TableSlice& slice, const Weight* positions);

// x w^T + bias (+ residual).
// Shapes: x [M, C], w [N, C], bias [N], residual [M, N] -> [M, N].
Var Linear(Context& ctx, const Var& x, const Weight& w,
           const Weight* bias = nullptr, const Var* residual = nullptr);

// GPT-2's feed-forward layer: gelu(x w1^T + b1) w2^T + b2 (+ residual). It is
// one op, so that the activation's derivative rides on the second layer's
// backward. Of the two [M, F] tensors only the input of the activation is kept,
// unless nothing may be recomputed.
// Shapes: x [M, C], w1 [F, C], w2 [C, F] -> [M, C].
Var GeluMlp(Context& ctx, const Var& x, const Weight& w1, const Weight* b1,
            Gelu act, const Weight& w2, const Weight* b2,
            const Var* residual = nullptr);

// silu(gate) * up of a packed [M, 2F] -> [M, F].
Var Swiglu(Context& ctx, const Var& gate_up);

// A normalization layer: bias only for LayerNorm.
struct NormWeights {
  NormKind kind = NormKind::kLayerNorm;
  const Weight* weight = nullptr;  // [C]
  const Weight* bias = nullptr;    // [C] or null
  float eps = 1e-5f;
};

// Normalizes each row of x [M, C].
Var Norm(Context& ctx, const Var& x, const NormWeights& norm);

// {x + residual, norm(x + residual)} in one pass.
std::pair<Var, Var> AddNorm(Context& ctx, const Var& x, const Var& residual,
                            const NormWeights& norm);

// Rotary tables for positions 0 .. P-1: [P, D/2] fp32 each, on the device.
struct RotaryTables {
  Tensor cos, sin;
};

struct AttentionOptions {
  int64_t num_heads = 0;                 // H
  int64_t num_kv_heads = 0;              // K
  int64_t head_dim = 0;                  // D
  const RotaryTables* rotary = nullptr;  // null: none
  const NormWeights* q_norm = nullptr;   // over D, before rotary (Qwen3)
  const NormWeights* k_norm = nullptr;
  int layer = 0;  // index into the context's KvCache
};

// Causal self-attention from packed projections: everything between the
// q/k/v projection and the output projection.
// Shapes: qkv [M, (H + 2K) D], heads q then k then v -> [M, H D].
// In place: with rotary and without q/k norm, qkv itself is rotated, so its
// producer must not need its value (Linear does not).
Var SelfAttention(Context& ctx, const Var& qkv,
                  const AttentionOptions& options);

// Inverted dropout while training; `site` distinguishes the places in a model.
Var Dropout(Context& ctx, const Var& x, double probability, uint64_t site);

Var Add(Context& ctx, const Var& a, const Var& b);

// Adds the sum over tokens of the cross-entropy of x w^T against the batch's
// targets to batch.loss_sum. With a tape the gradients (seeded with
// *batch.grad_scale) are computed at once, in row chunks.
// Shapes: x [M, C], w [>= V, C]: rows beyond the V of `vocab` are no tokens,
//         and their gradient is zero. Products are of `part_rows` rows of w (0:
//         all).
void LinearCrossEntropy(Context& ctx, const Var& x, const Weight& w,
                        int64_t vocab, int64_t part_rows = 0);

// The same with one part of w, bit by bit: from the first part to the last,
// which computes the loss, and back, where each recomputes its logits if those
// of all parts exceed ctx.max_kept_logits_bytes. Returns x for the next part;
// undefined for the last. A waiting sink gets the gradient when its other
// writer runs.
Var LinearCrossEntropyPart(Context& ctx, const Var& x, const Weight& w,
                           const TableSlice& slice, int64_t vocab);

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_OPS_H_
