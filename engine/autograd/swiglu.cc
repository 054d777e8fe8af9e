#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

Var Swiglu(Context& ctx, const Var& gate_up) {
  const Shape& shape = gate_up.shape();
  ZERO_CHECK_EQ(shape[1] % 2, 0) << "Swiglu: packed width of " << shape;
  const auto forward = [](Context& c, const Tensor& x) {
    Tensor y = c.Empty({x.shape()[0], x.shape()[1] / 2}, x.dtype());
    c.ops().SwigluForward(c.stream(), {x.matrix(), y.matrix()});
    return y;
  };
  Var y(forward(ctx, gate_up.value));
  if (!WantsGrad(ctx, {gate_up.slot}, {})) return y;

  y.slot = ctx.tape->NewSlot();
  y.recipe = PassRecipe(
      ctx, {y.value},
      [forward, x = SavedVar(gate_up)](Context& c) -> std::vector<Tensor> {
        return {forward(c, x.Get(c))};
      });
  ctx.tape->Record("swiglu", {},
                   [slot = y.slot, saved = SavedVar(gate_up),
                    x_slot = gate_up.slot](Context& c, Tape& tape) {
                     const Tensor dy = tape.Take(slot);
                     if (!dy.defined()) return;
                     const Tensor& x = saved.Get(c);
                     // gate and up are not read after this: their gradients
                     // replace them.
                     Tensor dx = x.unique() ? x : c.Empty(x.shape(), x.dtype());
                     c.ops().SwigluBackward(
                         c.stream(), {x.matrix(), dy.matrix(), dx.matrix()});
                     tape.Accumulate(c, x_slot, std::move(dx));
                   });
  return y;
}

}  // namespace zero
