#include <algorithm>
#include <cmath>

#include "engine/autograd/norm.h"
#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {
namespace {

// The layout of q, k and v of one call: element strides over tokens, heads
// first.
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

// The operands of one call, for forward, recompute and backward.
struct Call {
  Layout layout;
  AttentionShape shape;
  const RotaryTables* rotary = nullptr;
  bool has_norm = false;
  NormWeights q_norm, k_norm;

  // With a norm, q and k and their gradients are in separate tensors.
  int64_t qk_width() const {
    return has_norm ? layout.q_width() + layout.kv_width()
                    : layout.packed_width();
  }
};

// The tensors of a call that backward reads.
struct Saved {
  SavedVar qkv;
  int qkv_slot = -1;
  std::shared_ptr<Recipe> qk;   // of PrepareQk
  std::shared_ptr<Recipe> out;  // of Attend
};

// {qk, q_rstd, k_rstd}: q and k normalized and rotated. Without a norm {qkv},
// rotated in place; without `record` no rstd.
std::vector<Tensor> PrepareQk(Context& ctx, const Call& call, const Tensor& qkv,
                              bool record) {
  const Layout& layout = call.layout;
  const int64_t width = call.qk_width();
  std::vector<Tensor> results = {qkv};
  if (call.has_norm) {
    results[0] = ctx.Empty({layout.tokens(), width}, qkv.dtype());
    auto run = [&](const NormWeights& norm, int64_t column, int64_t heads) {
      NormForwardArgs args{
          .x = HeadRows(qkv, column, layout.packed_width(), heads, layout),
          .y = HeadRows(results[0], column, width, heads, layout)};
      if (record) {
        results.push_back(ctx.Empty({layout.tokens() * heads}, DType::kF32));
        args.rstd = results.back().As<float>();
      }
      NormRows(ctx, norm, args);
    };
    run(call.q_norm, 0, layout.q_heads);
    run(call.k_norm, layout.q_width(), layout.kv_heads);
  }
  if (call.rotary != nullptr) {
    Rotate(ctx, results[0], width, layout.q_heads + layout.kv_heads, layout,
           *call.rotary, /*inverse=*/false);
  }
  return results;
}

// q, k and v of a call, or their gradients.
struct Heads {
  MutableHeadsRef q, k, v;
};
Heads HeadsOf(const Call& call, const Tensor& qk, const Tensor& qkv) {
  const Layout& layout = call.layout;
  const int64_t k_column = layout.q_width();
  const int64_t v_column = k_column + layout.kv_width();
  return {HeadsAt(qk, 0, call.qk_width(), layout),
          HeadsAt(qk, k_column, call.qk_width(), layout),
          HeadsAt(qkv, v_column, layout.packed_width(), layout)};
}

// {out, lse}; without `record` no lse.
std::vector<Tensor> Attend(Context& ctx, const Call& call, const Heads& heads,
                           bool record) {
  const Layout& layout = call.layout;
  std::vector<Tensor> results = {
      ctx.Empty({layout.tokens(), layout.q_width()}, call.shape.dtype)};
  AttentionForwardArgs args{
      .shape = call.shape,
      .packed = ctx.batch.packed,
      .q = Const(heads.q),
      .k = Const(heads.k),
      .v = Const(heads.v),
      .out = HeadsAt(results[0], 0, layout.q_width(), layout)};
  if (record) {
    results.push_back(
        ctx.Empty({layout.batch, layout.q_heads, layout.length}, DType::kF32));
    args.lse = results[1].As<float>();
  }
  const Tensor scratch =
      ctx.Scratch(ctx.ops().AttentionForwardWorkspaceBytes(args));
  ctx.ops().AttentionForward(ctx.stream(), args, AsWorkspace(scratch));
  return results;
}

void NormQkBackward(Context& ctx, const Call& call, const Tensor& qkv,
                    const std::vector<Tensor>& qk, const Tensor& dqk,
                    const Tensor& dqkv) {
  const Layout& layout = call.layout;
  auto run = [&](const Weight& weight, int64_t column, int64_t heads,
                 const Tensor& rstd) {
    const int64_t packed = layout.packed_width();
    NormRowsBackward(
        ctx, weight.sink, nullptr,
        {.kind = NormKind::kRmsNorm,
         .dy = HeadRows(dqk, column, call.qk_width(), heads, layout),
         .sum = HeadRows(qkv, column, packed, heads, layout),
         .weight = weight.value.vector(),
         .rstd = rstd.As<float>(),
         .dx = HeadRows(dqkv, column, packed, heads, layout)});
  };
  run(*call.q_norm.weight, 0, layout.q_heads, qk[1]);
  run(*call.k_norm.weight, layout.q_width(), layout.kv_heads, qk[2]);
}

void Backward(Context& ctx, Tape& tape, const Call& call, const Saved& saved,
              const Tensor& dout) {
  const Layout& layout = call.layout;
  const std::vector<Tensor>& results = saved.out->Get(ctx);
  const std::vector<Tensor>& prepared = saved.qk->Get(ctx);
  const Tensor& qk = prepared[0];
  const Tensor& qkv = saved.qkv.Get(ctx);
  Tensor dqkv = ctx.Empty(qkv.shape(), qkv.dtype());
  const Tensor dqk = call.has_norm ? ctx.Empty(qk.shape(), qk.dtype()) : dqkv;

  const Heads heads = HeadsOf(call, qk, qkv), grads = HeadsOf(call, dqk, dqkv);
  AttentionBackwardArgs args{
      .shape = call.shape,
      .packed = ctx.batch.packed,
      .q = Const(heads.q),
      .k = Const(heads.k),
      .v = Const(heads.v),
      .out = Const(HeadsAt(results[0], 0, layout.q_width(), layout)),
      .dout = Const(HeadsAt(dout, 0, layout.q_width(), layout)),
      .lse = results[1].As<float>(),
      .dq = grads.q,
      .dk = grads.k,
      .dv = grads.v};
  {
    const Tensor scratch =
        ctx.Scratch(ctx.ops().AttentionBackwardWorkspaceBytes(args));
    ctx.ops().AttentionBackward(ctx.stream(), args, AsWorkspace(scratch));
  }
  if (call.rotary != nullptr) {
    Rotate(ctx, dqk, call.qk_width(), layout.q_heads + layout.kv_heads, layout,
           *call.rotary, /*inverse=*/true);
  }
  if (call.has_norm) NormQkBackward(ctx, call, qkv, prepared, dqk, dqkv);
  tape.Accumulate(ctx, saved.qkv_slot, std::move(dqkv));
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

  Call call{.layout = layout,
            .rotary = options.rotary,
            .has_norm = options.q_norm != nullptr};
  if (call.has_norm) {
    call.q_norm = *options.q_norm;
    call.k_norm = *options.k_norm;
  }
  std::vector<Tensor> prepared = PrepareQk(ctx, call, qkv.value, record);
  Heads heads = HeadsOf(call, prepared[0], qkv.value);
  int64_t kv_length = layout.length;
  if (ctx.kv_cache != nullptr) {
    KvCache& cache = *ctx.kv_cache;
    KvCache::Layer& layer = cache.layers[options.layer];
    kv_length = cache.length + layout.length;
    ZERO_CHECK_LE(kv_length, cache.capacity);
    ZERO_CHECK(ctx.batch.packed.positions == nullptr) << "not with a cache";
    ZERO_CHECK(!record) << "not with a cache";
    AppendToCache(ctx, cache, layer, heads.k, heads.v, layout, dtype);
    const int64_t row = layout.kv_width();
    heads.k = {layer.keys.data(), cache.capacity * row, row};
    heads.v = {layer.values.data(), cache.capacity * row, row};
  }

  call.shape = {.dtype = dtype,
                .batch = layout.batch,
                .q_len = layout.length,
                .kv_len = kv_length,
                .num_heads = layout.q_heads,
                .num_kv_heads = layout.kv_heads,
                .head_dim = layout.head_dim,
                .scale = static_cast<float>(
                    1.0 / std::sqrt(static_cast<double>(layout.head_dim)))};
  std::vector<Tensor> results = Attend(ctx, call, heads, record);
  Var out(results[0]);
  if (!record) return out;

  out.slot = ctx.tape->NewSlot();
  Saved saved{.qkv = SavedVar(qkv), .qkv_slot = qkv.slot};
  const auto prepare = [call, qkv = saved.qkv](Context& c) {
    return PrepareQk(c, call, qkv.Get(c), /*record=*/true);
  };
  // Without a norm, a qkv that is kept is rotated already.
  saved.qk = call.has_norm ? PassRecipe(ctx, std::move(prepared), prepare)
             : qkv.recipe != nullptr
                 ? std::make_shared<Recipe>(prepare)
                 : std::make_shared<Recipe>(std::move(prepared));
  saved.out = std::make_shared<Recipe>(std::move(results));
  if (ctx.recompute == Recompute::kFull) {
    saved.out = std::make_shared<Recipe>(
        [call, qk = saved.qk, qkv = saved.qkv](Context& c) {
          const Tensor prepared = qk->ValueForRecipe(c);
          return Attend(c, call, HeadsOf(call, prepared, qkv.Get(c)),
                        /*record=*/true);
        });
  }
  out.recipe = saved.out;
  ctx.tape->Record("self_attention", {call.q_norm.weight, call.k_norm.weight},
                   [call, saved = std::move(saved), slot = out.slot](
                       Context& c, Tape& tape) {
                     const Tensor dout = tape.Take(slot);
                     if (dout.defined()) Backward(c, tape, call, saved, dout);
                   });
  return out;
}

}  // namespace zero
