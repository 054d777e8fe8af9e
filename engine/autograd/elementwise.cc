#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"
#include "kernels/philox.h"

namespace zero {

Var Dropout(Context& ctx, const Var& x, double probability, uint64_t site) {
  if (!ctx.training || probability == 0) return x;
  const uint64_t key = MixKey(ctx.dropout_key, site);
  const float p = static_cast<float>(probability);
  Tensor y = ctx.Empty(x.shape(), x.value.dtype());
  ctx.ops().Dropout(ctx.stream(), {.x = x.value.matrix(),
                                   .y = y.matrix(),
                                   .probability = p,
                                   .key = key,
                                   .row_ids = ctx.batch.row_ids});
  if (!WantsGrad(ctx, {x.slot}, {})) return Var(y);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record(
      "dropout", [slot, x_slot = x.slot, p, key, row_ids = ctx.batch.row_ids](
                     Context& c, Tape& tape) {
        Tensor dy = tape.Take(slot);
        if (!dy.defined()) return;
        Tensor dx = dy.unique() ? dy : c.Empty(dy.shape(), dy.dtype());
        c.ops().Dropout(c.stream(), {.x = dy.matrix(),
                                     .y = dx.matrix(),
                                     .probability = p,
                                     .key = key,
                                     .row_ids = row_ids});
        dy = Tensor();
        tape.Accumulate(c, x_slot, std::move(dx));
      });
  return Var(y, slot);
}

Var Add(Context& ctx, const Var& a, const Var& b) {
  ZERO_CHECK_EQ(a.shape(), b.shape());
  Tensor y = ctx.Empty(a.shape(), a.value.dtype());
  ctx.ops().Add(ctx.stream(), {a.value.vector(), b.value.vector(), y.vector()});
  if (!WantsGrad(ctx, {a.slot, b.slot}, {})) return Var(y);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record(
      "add", [slot, a_slot = a.slot, b_slot = b.slot](Context& c, Tape& tape) {
        Tensor dy = tape.Take(slot);
        tape.Accumulate(c, a_slot, dy);
        tape.Accumulate(c, b_slot, std::move(dy));
      });
  return Var(y, slot);
}

}  // namespace zero
