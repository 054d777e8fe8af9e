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

void OpenGradient(const Weight& w, LinearCrossEntropyArgs* args) {
  const SinkTarget dw = OpenSink(w.sink);
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
    args.dx = dx.matrix();
    OpenGradient(w, &args);
    ctx.tape->Record("linear_cross_entropy", {&w},
                     [dx, slot = x.slot](Context& c, Tape& tape) mutable {
                       tape.Accumulate(c, slot, std::move(dx));
                     });
  }
  Run(ctx, args);
}

Var LinearCrossEntropyPart(Context& ctx, const Var& x, const Weight& w,
                           const TableSlice& slice, int64_t vocab) {
  LinearCrossEntropyArgs args = ArgsOf(ctx, x.value, w, vocab);
  const int64_t rows = w.value.shape()[0];
  const bool last = slice.first + rows == slice.rows;
  const bool wants_grad = WantsGrad(ctx, {x.slot}, {&w});
  const bool waits = w.sink != nullptr && w.sink->waits;
  if (slice.first == 0) {
    ctx.loss_rows = ctx.Scratch(args.x.rows * sizeof(LossRow));
  }
  const Tensor loss_rows =
      last ? std::exchange(ctx.loss_rows, Tensor()) : ctx.loss_rows;
  args.part = {.rows = slice.rows,
               .first = slice.first,
               .work = last ? Work::kAll : Work::kStatistics,
               .statistics = reinterpret_cast<LossRow*>(loss_rows.data())};
  Tensor logits, dx;
  if (!last && wants_grad && !waits) {
    const auto bytes = static_cast<int64_t>(ctx.ops().LossLogitsBytes(args));
    if (bytes * slice.rows / rows <= ctx.max_kept_logits_bytes) {
      logits = ctx.Empty({bytes}, DType::kU8);
      args.part.logits = logits.data();
    }
  }
  if (last && wants_grad) {
    ZERO_CHECK(ctx.batch.grad_scale != nullptr);
    dx = ctx.Empty(x.shape(), DType::kF32);
    args.dx = dx.matrix();
    if (!waits) OpenGradient(w, &args);
  }
  Run(ctx, args);
  if (!wants_grad) return last ? Var() : Var(x.value);

  const int slot = last ? -1 : ctx.tape->NewSlot();
  // The value is captured, not its recipe: all parts keep this one.
  ctx.tape->Record(
      "linear_cross_entropy", {&w},
      [x = x.value, x_slot = x.slot, &w, slot, loss_rows, logits, dx,
       part = args.part, waits, vocab](Context& c, Tape& tape) mutable {
        part.work = Work::kGradients;
        if (!dx.defined()) {
          dx = tape.Take(slot);
          ZERO_CHECK(dx.defined()) << "no later part had gradients";
          LinearCrossEntropyArgs args = ArgsOf(c, x, w, vocab);
          args.part = part;
          args.dx = dx.matrix();
          if (!waits) OpenGradient(w, &args);
          Run(c, args);
        }
        if (waits) {
          w.sink->pending = [x, &w, loss_rows, part, vocab](Context& late) {
            LinearCrossEntropyArgs args = ArgsOf(late, x, w, vocab);
            args.part = part;
            OpenGradient(w, &args);
            Run(late, args);
          };
        }
        if (part.first == 0 && x.dtype() != DType::kF32) {
          const Tensor sum = std::exchange(dx, c.Empty(dx.shape(), x.dtype()));
          c.ops().Cast(c.stream(), {sum.vector(), dx.vector()});
        }
        tape.Accumulate(c, x_slot, std::move(dx));
      });
  return last ? Var() : Var(x.value, slot);
}

}  // namespace zero
