#include "engine/autograd/linear.h"

#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

Tensor LinearForward(Context& ctx, const Tensor& x, const Tensor& w,
                     const Weight* bias, const Tensor* residual, Gelu act,
                     Tensor* pre_act) {
  ZERO_CHECK_EQ(x.shape()[-1], w.shape()[1])
      << "Linear: x " << x.shape() << ", w " << w.shape();
  const int64_t rows = x.shape()[0], cols = w.shape()[0];
  LinearArgs args{.x = x.matrix(), .w = w.matrix(), .act = act};
  if (bias != nullptr) {
    ZERO_CHECK_EQ(bias->value.num_elems(), cols);
    args.bias = bias->value.vector();
  }
  if (residual != nullptr) {
    ZERO_CHECK_EQ(residual->shape(), Shape({rows, cols}));
    args.residual = residual->matrix();
  }
  Tensor y = ctx.Empty({rows, cols}, x.dtype());
  args.y = y.matrix();
  if (pre_act != nullptr) {
    *pre_act = ctx.Empty({rows, cols}, x.dtype());
    args.pre_act = pre_act->matrix();
  }
  const Tensor scratch = ctx.Scratch(ctx.ops().LinearWorkspaceBytes(args));
  ctx.ops().Linear(ctx.stream(), args, AsWorkspace(scratch));
  return y;
}

Tensor LinearInputGrad(Context& ctx, const Tensor& dy, const Tensor& w,
                       Gelu act, const Tensor& pre_act) {
  Tensor dx = ctx.Empty({dy.shape()[0], w.shape()[1]}, dy.dtype());
  LinearBackwardInputArgs args{
      .dy = dy.matrix(), .w = w.matrix(), .dx = dx.matrix(), .act = act};
  if (act != Gelu::kNone) args.pre_act = pre_act.matrix();
  const Tensor scratch =
      ctx.Scratch(ctx.ops().LinearBackwardInputWorkspaceBytes(args));
  ctx.ops().LinearBackwardInput(ctx.stream(), args, AsWorkspace(scratch));
  return dx;
}

void LinearWeightGrad(Context& ctx, const Tensor& dy, const SavedVar& x,
                      GradSink* w_sink, GradSink* bias_sink) {
  const SinkTarget dw = OpenSink(w_sink), dbias = OpenSink(bias_sink);
  if (!dw.grad.defined() && !dbias.grad.defined()) return;
  const LinearBackwardWeightArgs args{.dy = dy.matrix(),
                                      .x = x.Get(ctx).matrix(),
                                      .dw = dw.matrix(),
                                      .accumulate_dw = dw.accumulate,
                                      .dbias = dbias.vector(),
                                      .accumulate_dbias = dbias.accumulate};
  const Tensor scratch =
      ctx.Scratch(ctx.ops().LinearBackwardWeightWorkspaceBytes(args));
  ctx.ops().LinearBackwardWeight(ctx.stream(), args, AsWorkspace(scratch));
}

Var Linear(Context& ctx, const Var& x, const Weight& w, const Weight* bias,
           const Var* residual) {
  Var y(LinearForward(ctx, x.value, w.value, bias,
                      residual == nullptr ? nullptr : &residual->value,
                      Gelu::kNone, nullptr));
  const int residual_slot = residual == nullptr ? -1 : residual->slot;
  if (!WantsGrad(ctx, {x.slot, residual_slot}, {&w, bias})) return y;

  const int slot = y.slot = ctx.tape->NewSlot();
  // A product that adds a residual ends its unit, where no op reads it.
  if (ctx.recompute >= Recompute::kSelective && residual == nullptr) {
    y.recipe = std::make_shared<Recipe>(
        [x = SavedVar(x), w = &w, bias](Context& c) -> std::vector<Tensor> {
          return {LinearForward(c, x.GetForRecipe(c), w->value, bias, nullptr,
                                Gelu::kNone, nullptr)};
        });
  }
  ctx.tape->Record(
      "linear", {&w, bias},
      [slot, x = SavedVar(x), x_slot = x.slot, w = &w, bias_sink = SinkOf(bias),
       residual_slot](Context& c, Tape& tape) mutable {
        Tensor dy = tape.Take(slot);
        if (!dy.defined()) return;
        LinearWeightGrad(c, dy, x, w->sink, bias_sink);
        x = SavedVar(Tensor());  // dx may reuse its memory
        if (x_slot >= 0) {
          tape.Accumulate(c, x_slot, LinearInputGrad(c, dy, w->value));
        }
        tape.Accumulate(c, residual_slot, std::move(dy));
      });
  return y;
}

}  // namespace zero
