#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"
#include "kernels/philox.h"

namespace zero {

Var Dropout(Context& ctx, const Var& x, double probability, uint64_t site) {
  if (!ctx.training || probability == 0) return x;
  const uint64_t key = MixKey(ctx.dropout_key, site);
  const float p = static_cast<float>(probability);
  const auto drop = [p, key, row_ids = ctx.batch.row_ids](
                        Context& c, const Tensor& from, const Tensor& to) {
    c.ops().Dropout(c.stream(), {.x = from.matrix(),
                                 .y = to.matrix(),
                                 .probability = p,
                                 .key = key,
                                 .row_ids = row_ids});
  };
  Var y(ctx.Empty(x.shape(), x.value.dtype()));
  drop(ctx, x.value, y.value);
  if (!WantsGrad(ctx, {x.slot}, {})) return y;

  y.slot = ctx.tape->NewSlot();
  if (x.recipe != nullptr) {
    y.recipe =
        PassRecipe(ctx, {y.value}, [drop, saved = SavedVar(x)](Context& c) {
          const Tensor from = saved.GetForRecipe(c);
          std::vector<Tensor> y = {c.Empty(from.shape(), from.dtype())};
          drop(c, from, y[0]);
          return y;
        });
  }
  ctx.tape->Record(
      "dropout", {},
      [slot = y.slot, x_slot = x.slot, drop](Context& c, Tape& tape) {
        Tensor dy = tape.Take(slot);
        if (!dy.defined()) return;
        Tensor dx = dy.unique() ? dy : c.Empty(dy.shape(), dy.dtype());
        drop(c, dy, dx);
        dy = Tensor();
        tape.Accumulate(c, x_slot, std::move(dx));
      });
  return y;
}

Var Add(Context& ctx, const Var& a, const Var& b) {
  ZERO_CHECK_EQ(a.shape(), b.shape());
  Tensor y = ctx.Empty(a.shape(), a.value.dtype());
  ctx.ops().Add(ctx.stream(), {a.value.vector(), b.value.vector(), y.vector()});
  if (!WantsGrad(ctx, {a.slot, b.slot}, {})) return Var(y);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record(
      "add", {},
      [slot, a_slot = a.slot, b_slot = b.slot](Context& c, Tape& tape) {
        Tensor dy = tape.Take(slot);
        tape.Accumulate(c, a_slot, dy);
        tape.Accumulate(c, b_slot, std::move(dy));
      });
  return Var(y, slot);
}

}  // namespace zero
