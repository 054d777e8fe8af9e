#include <algorithm>
#include <cmath>

#include "engine/autograd/norm.h"
#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {
namespace {

// Where q, k and v of one call live: element strides over tokens, heads first.
struct Layout {
  int64_t batch, length;  // B, T
  int64_t q_heads, kv_heads, head_dim;

  int64_t q_width() const { return q_heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t packed_width() const { return q_width() + 2 * kv_width(); }
  int64_t tokens() const { return batch * length; }
};

void* Offset(const Tensor& tensor, int64_t elems) {
  return static_cast<char*>(tensor.data()) + elems * DTypeBytes(tensor.dtype());
}

// `heads` heads at column `column` of a [tokens, width] tensor.
MutableHeadsRef HeadsAt(const Tensor& tensor, int64_t column, int64_t width,
                        const Layout& layout) {
  return {Offset(tensor, column), layout.length * width, width};
}
HeadsRef Const(const MutableHeadsRef& heads) {
  return {heads.data, heads.batch_stride, heads.token_stride};
}
Rows HeadRows(const Tensor& tensor, int64_t column, int64_t width,
              int64_t heads, const Layout& layout) {
  return {Offset(tensor, column), tensor.dtype(), layout.tokens(), heads,
          layout.head_dim,        width};
}

void Rotate(Context& ctx, const Tensor& qk, int64_t width, int64_t heads,
            const Layout& layout, const RotaryTables& tables, bool inverse) {
  ctx.ops().Rotary(ctx.stream(), {.x = HeadRows(qk, 0, width, heads, layout),
                                  .positions = ctx.batch.positions,
                                  .cos = tables.cos.As<float>(),
                                  .sin = tables.sin.As<float>(),
                                  .inverse = inverse});
}

// Appends this call's keys and values to the cache of one layer.
void AppendToCache(Context& ctx, KvCache& cache, KvCache::Layer& layer,
                   const MutableHeadsRef& k, const MutableHeadsRef& v,
                   const Layout& layout, DType dtype) {
  const int64_t item = DTypeBytes(dtype);
  const int64_t token_bytes = layout.kv_width() * item;
  auto append = [&](const Tensor& to, const MutableHeadsRef& from, int64_t b) {
    ctx.device().CopyRows(
        ctx.stream(),
        Offset(to, (b * cache.capacity + cache.length) * layout.kv_width()),
        token_bytes,
        static_cast<const char*>(from.data) + b * from.batch_stride * item,
        from.token_stride * item, token_bytes, layout.length);
  };
  for (int64_t b = 0; b < layout.batch; ++b) {
    append(layer.keys, k, b);
    append(layer.values, v, b);
  }
}

// What the backward pass needs of one call.
struct Saved {
  Layout layout;
  AttentionShape shape;
  Var qkv;
  Tensor qk;  // normalized q and k, [tokens, (H + K) D]; undefined: in qkv
  Tensor out, lse, q_rstd, k_rstd;
  const Weight* q_norm = nullptr;
  const Weight* k_norm = nullptr;
  bool has_norm = false;
  const RotaryTables* rotary = nullptr;
  int slot = -1;
};

// q and k with the norm applied, in a tensor of their own.
void NormQk(Context& ctx, const AttentionOptions& options, const Layout& layout,
            bool record, Saved* saved) {
  const Tensor& qkv = saved->qkv.value;
  const int64_t width = layout.q_width() + layout.kv_width();
  saved->qk = ctx.Empty({layout.tokens(), width}, qkv.dtype());
  auto run = [&](const NormWeights& norm, int64_t column, int64_t heads,
                 Tensor* rstd) {
    NormForwardArgs args{
        .x = HeadRows(qkv, column, layout.packed_width(), heads, layout),
        .y = HeadRows(saved->qk, column, width, heads, layout)};
    if (record) {
      *rstd = ctx.Empty({layout.tokens() * heads}, DType::kF32);
      args.rstd = rstd->As<float>();
    }
    NormRows(ctx, norm, args);
  };
  run(*options.q_norm, 0, layout.q_heads, &saved->q_rstd);
  run(*options.k_norm, layout.q_width(), layout.kv_heads, &saved->k_rstd);
  saved->has_norm = true;
  saved->q_norm = options.q_norm->weight;
  saved->k_norm = options.k_norm->weight;
}

void NormQkBackward(Context& ctx, const Saved& saved, const Tensor& dqk,
                    const Tensor& dqkv) {
  const Layout& layout = saved.layout;
  const int64_t width = layout.q_width() + layout.kv_width();
  auto run = [&](const Weight& weight, int64_t column, int64_t heads,
                 const Tensor& rstd) {
    const int64_t packed = layout.packed_width();
    NormRowsBackward(
        ctx, weight.sink, nullptr,
        {.kind = NormKind::kRmsNorm,
         .dy = HeadRows(dqk, column, width, heads, layout),
         .sum = HeadRows(saved.qkv.value, column, packed, heads, layout),
         .weight = weight.value.vector(),
         .rstd = rstd.As<float>(),
         .dx = HeadRows(dqkv, column, packed, heads, layout)});
  };
  run(*saved.q_norm, 0, layout.q_heads, saved.q_rstd);
  run(*saved.k_norm, layout.q_width(), layout.kv_heads, saved.k_rstd);
}

void Backward(Context& ctx, Tape& tape, Saved& saved) {
  const Tensor dout = tape.Take(saved.slot);
  if (!dout.defined()) return;
  const Layout& layout = saved.layout;
  const int64_t packed = layout.packed_width();
  const int64_t qk_width = layout.q_width() + layout.kv_width();
  const Tensor& qkv = saved.qkv.value;
  Tensor dqkv = ctx.Empty(qkv.shape(), qkv.dtype());
  Tensor dqk;
  if (saved.has_norm) dqk = ctx.Empty(saved.qk.shape(), qkv.dtype());
  // With a norm, q and k (and their gradients) live in a tensor of their own.
  const Tensor& qk = saved.has_norm ? saved.qk : qkv;
  const Tensor& dqk_or_dqkv = saved.has_norm ? dqk : dqkv;
  const int64_t width = saved.has_norm ? qk_width : packed;

  const int64_t k_column = layout.q_width(), v_column = qk_width;
  AttentionBackwardArgs args{
      .shape = saved.shape,
      .packed = ctx.batch.packed,
      .q = Const(HeadsAt(qk, 0, width, layout)),
      .k = Const(HeadsAt(qk, k_column, width, layout)),
      .v = Const(HeadsAt(qkv, v_column, packed, layout)),
      .out = Const(HeadsAt(saved.out, 0, layout.q_width(), layout)),
      .dout = Const(HeadsAt(dout, 0, layout.q_width(), layout)),
      .lse = saved.lse.As<float>(),
      .dq = HeadsAt(dqk_or_dqkv, 0, width, layout),
      .dk = HeadsAt(dqk_or_dqkv, k_column, width, layout),
      .dv = HeadsAt(dqkv, v_column, packed, layout)};
  {
    const Tensor scratch =
        ctx.Scratch(ctx.ops().AttentionBackwardWorkspaceBytes(args));
    ctx.ops().AttentionBackward(ctx.stream(), args, AsWorkspace(scratch));
  }
  if (saved.rotary != nullptr) {
    Rotate(ctx, dqk_or_dqkv, width, layout.q_heads + layout.kv_heads, layout,
           *saved.rotary, /*inverse=*/true);
  }
  if (saved.has_norm) NormQkBackward(ctx, saved, dqk, dqkv);
  tape.Accumulate(ctx, saved.qkv.slot, std::move(dqkv));
}

}  // namespace

Var SelfAttention(Context& ctx, const Var& qkv,
                  const AttentionOptions& options) {
  const Layout layout{.batch = ctx.batch.batch,
                      .length = ctx.batch.length,
                      .q_heads = options.num_heads,
                      .kv_heads = options.num_kv_heads,
                      .head_dim = options.head_dim};
  ZERO_CHECK_EQ(qkv.shape(), Shape({layout.tokens(), layout.packed_width()}));
  ZERO_CHECK_EQ(layout.q_heads % layout.kv_heads, 0);
  ZERO_CHECK_EQ(options.q_norm == nullptr, options.k_norm == nullptr);
  const DType dtype = qkv.value.dtype();
  const bool record =
      options.q_norm == nullptr
          ? WantsGrad(ctx, {qkv.slot}, {})
          : WantsGrad(ctx, {qkv.slot},
                      {options.q_norm->weight, options.k_norm->weight});

  Saved saved{.layout = layout, .qkv = qkv, .rotary = options.rotary};
  if (options.q_norm != nullptr) NormQk(ctx, options, layout, record, &saved);
  const int64_t packed = layout.packed_width();
  const int64_t qk_width = layout.q_width() + layout.kv_width();
  const Tensor& qk = saved.has_norm ? saved.qk : qkv.value;
  const int64_t width = saved.has_norm ? qk_width : packed;
  if (options.rotary != nullptr) {
    Rotate(ctx, qk, width, layout.q_heads + layout.kv_heads, layout,
           *options.rotary, /*inverse=*/false);
  }

  MutableHeadsRef k = HeadsAt(qk, layout.q_width(), width, layout);
  MutableHeadsRef v = HeadsAt(qkv.value, qk_width, packed, layout);
  int64_t kv_length = layout.length;
  if (ctx.kv_cache != nullptr) {
    KvCache& cache = *ctx.kv_cache;
    KvCache::Layer& layer = cache.layers[options.layer];
    kv_length = cache.length + layout.length;
    ZERO_CHECK_LE(kv_length, cache.capacity);
    ZERO_CHECK(ctx.batch.packed.positions == nullptr) << "not with a cache";
    AppendToCache(ctx, cache, layer, k, v, layout, dtype);
    const int64_t row = layout.kv_width();
    k = {layer.keys.data(), cache.capacity * row, row};
    v = {layer.values.data(), cache.capacity * row, row};
  }

  saved.shape = {.dtype = dtype,
                 .batch = layout.batch,
                 .q_len = layout.length,
                 .kv_len = kv_length,
                 .num_heads = layout.q_heads,
                 .num_kv_heads = layout.kv_heads,
                 .head_dim = layout.head_dim,
                 .scale = static_cast<float>(
                     1.0 / std::sqrt(static_cast<double>(layout.head_dim)))};
  saved.out = ctx.Empty({layout.tokens(), layout.q_width()}, dtype);
  if (record) {
    saved.lse =
        ctx.Empty({layout.batch, layout.q_heads, layout.length}, DType::kF32);
  }
  const AttentionForwardArgs args{
      .shape = saved.shape,
      .packed = ctx.batch.packed,
      .q = Const(HeadsAt(qk, 0, width, layout)),
      .k = Const(k),
      .v = Const(v),
      .out = HeadsAt(saved.out, 0, layout.q_width(), layout),
      .lse = record ? saved.lse.As<float>() : nullptr};
  {
    const Tensor scratch =
        ctx.Scratch(ctx.ops().AttentionForwardWorkspaceBytes(args));
    ctx.ops().AttentionForward(ctx.stream(), args, AsWorkspace(scratch));
  }
  if (!record) return Var(saved.out);

  saved.slot = ctx.tape->NewSlot();
  Var out(saved.out, saved.slot);
  ctx.tape->Record("self_attention",
                   [saved = std::move(saved)](Context& c, Tape& tape) mutable {
                     Backward(c, tape, saved);
                   });
  return out;
}

}  // namespace zero
