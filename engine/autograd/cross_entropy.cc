#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

void LinearCrossEntropy(Context& ctx, const Var& x, const Weight& w,
                        int64_t vocab) {
  ZERO_CHECK_EQ(x.shape()[1], w.value.shape()[1]);
  ZERO_CHECK_LE(vocab, w.value.shape()[0]);
  ZERO_CHECK_EQ(x.shape()[0], ctx.batch.num_tokens());
  ZERO_CHECK(ctx.batch.targets != nullptr);
  LinearCrossEntropyArgs args{.x = x.value.matrix(),
                              .w = w.value.matrix(),
                              .vocab = vocab,
                              .targets = ctx.batch.targets,
                              .losses = ctx.batch.losses,
                              .loss_sum = ctx.batch.loss_sum,
                              .grad_scale = ctx.batch.grad_scale};
  Tensor dx;
  if (WantsGrad(ctx, {x.slot}, {&w})) {
    ZERO_CHECK(ctx.batch.grad_scale != nullptr);
    dx = ctx.Empty(x.shape(), x.value.dtype());
    const SinkTarget dw = OpenSink(w.sink);
    args.dx = dx.matrix();
    args.dw = dw.matrix();
    args.accumulate_dw = dw.accumulate;
    ctx.tape->Record("linear_cross_entropy",
                     [dx, slot = x.slot](Context& c, Tape& tape) mutable {
                       tape.Accumulate(c, slot, std::move(dx));
                     });
  }
  const Tensor scratch =
      ctx.Scratch(ctx.ops().LinearCrossEntropyWorkspaceBytes(args));
  ctx.ops().LinearCrossEntropy(ctx.stream(), args, AsWorkspace(scratch));
}

}  // namespace zero
