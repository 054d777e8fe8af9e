#include <utility>

#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {
namespace {

using Work = LossPart::Work;

void Run(Context& ctx, const LinearCrossEntropyArgs& args) {
  const Tensor scratch =
      ctx.Scratch(ctx.ops().LinearCrossEntropyWorkspaceBytes(args));
  ctx.ops().LinearCrossEntropy(ctx.stream(), args, AsWorkspace(scratch));
}

LinearCrossEntropyArgs ArgsOf(const Context& ctx, const Tensor& x,
                              const Weight& w, int64_t vocab) {
  ZERO_CHECK_EQ(x.shape()[1], w.value.shape()[1]);
  ZERO_CHECK_EQ(x.shape()[0], ctx.batch.num_tokens());
  ZERO_CHECK(ctx.batch.targets != nullptr);
  return {.x = x.matrix(),
          .w = w.value.matrix(),
          .vocab = vocab,
          .targets = ctx.batch.targets,
          .losses = ctx.batch.losses,
          .loss_sum = ctx.batch.loss_sum,
          .grad_scale = ctx.batch.grad_scale};
}

void OpenGradients(const Weight& w, const Tensor& dx,
                   LinearCrossEntropyArgs* args) {
  const SinkTarget dw = OpenSink(w.sink);
  args->dx = dx.matrix();
  args->dw = dw.matrix();
  args->accumulate_dw = dw.accumulate;
}

}  // namespace

void LinearCrossEntropy(Context& ctx, const Var& x, const Weight& w,
                        int64_t vocab, int64_t part_rows) {
  ZERO_CHECK_LE(vocab, w.value.shape()[0]);
  LinearCrossEntropyArgs args = ArgsOf(ctx, x.value, w, vocab);
  args.part_rows = part_rows;
  Tensor dx;
  if (WantsGrad(ctx, {x.slot}, {&w})) {
    ZERO_CHECK(ctx.batch.grad_scale != nullptr);
    dx = ctx.Empty(x.shape(), x.value.dtype());
    OpenGradients(w, dx, &args);
    ctx.tape->Record("linear_cross_entropy",
                     [dx, slot = x.slot](Context& c, Tape& tape) mutable {
                       tape.Accumulate(c, slot, std::move(dx));
                     });
  }
  Run(ctx, args);
}

Var LinearCrossEntropyPart(Context& ctx, const Var& x, const Weight& w,
                           const TableSlice& slice, int64_t vocab) {
  LinearCrossEntropyArgs args = ArgsOf(ctx, x.value, w, vocab);
  const bool last = slice.first + w.value.shape()[0] == slice.rows;
  const bool wants_grad = WantsGrad(ctx, {x.slot}, {&w});
  args.part = {.rows = slice.rows,
               .first = slice.first,
               .work = last ? Work::kAll : Work::kLogits};
  if (slice.first == 0) {
    args.part.logits = &args;  // there will be some
    ctx.logits = ctx.Empty(
        {static_cast<int64_t>(ctx.ops().LossLogitsBytes(args))}, DType::kU8);
  }
  const Tensor logits = last ? std::exchange(ctx.logits, Tensor()) : ctx.logits;
  args.part.logits = logits.data();
  Tensor dx;
  if (last && wants_grad) {
    ZERO_CHECK(ctx.batch.grad_scale != nullptr);
    dx = ctx.Empty(x.shape(), DType::kF32);
    OpenGradients(w, dx, &args);
  }
  Run(ctx, args);
  if (!wants_grad) return last ? Var() : Var(x.value);

  const int slot = last ? -1 : ctx.tape->NewSlot();
  ctx.tape->Record(
      "linear_cross_entropy",
      [x = SavedVar(x), x_slot = x.slot, &w, slot, logits, dx, part = args.part,
       vocab](Context& c, Tape& tape) mutable {
        const Tensor& in = x.Get(c);
        if (!dx.defined()) {
          dx = tape.Take(slot);
          ZERO_CHECK(dx.defined()) << "no part behind had gradients";
          LinearCrossEntropyArgs args = ArgsOf(c, in, w, vocab);
          args.part = part;
          args.part.work = Work::kGradients;
          OpenGradients(w, dx, &args);
          Run(c, args);
        }
        if (part.first == 0 && in.dtype() != DType::kF32) {
          const Tensor sum = std::exchange(dx, c.Empty(dx.shape(), in.dtype()));
          c.ops().Cast(c.stream(), {sum.vector(), dx.vector()});
        }
        tape.Accumulate(c, x_slot, std::move(dx));
      });
  return last ? Var() : Var(x.value, slot);
}

}  // namespace zero
