#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

Var Swiglu(Context& ctx, const Var& gate_up) {
  const Shape& shape = gate_up.shape();
  ZERO_CHECK_EQ(shape[1] % 2, 0) << "Swiglu: packed width of " << shape;
  Tensor y = ctx.Empty({shape[0], shape[1] / 2}, gate_up.value.dtype());
  ctx.ops().SwigluForward(ctx.stream(), {gate_up.value.matrix(), y.matrix()});
  if (!WantsGrad(ctx, {gate_up.slot}, {})) return Var(y);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record("swiglu", [slot, gate_up](Context& c, Tape& tape) {
    const Tensor dy = tape.Take(slot);
    if (!dy.defined()) return;
    const Tensor& x = gate_up.value;
    // Nobody reads gate and up after this: their gradients take their place.
    Tensor dx = x.unique() ? x : c.Empty(x.shape(), x.dtype());
    c.ops().SwigluBackward(c.stream(), {x.matrix(), dy.matrix(), dx.matrix()});
    tape.Accumulate(c, gate_up.slot, std::move(dx));
  });
  return Var(y, slot);
}

}  // namespace zero
