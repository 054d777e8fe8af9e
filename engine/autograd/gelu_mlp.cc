#include "engine/autograd/linear.h"
#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

Var GeluMlp(Context& ctx, const Var& x, const Weight& w1, const Weight* b1,
            Gelu act, const Weight& w2, const Weight* b2, const Var* residual) {
  const int residual_slot = residual == nullptr ? -1 : residual->slot;
  const bool record =
      WantsGrad(ctx, {x.slot, residual_slot}, {&w1, b1, &w2, b2});
  const bool keep = record && ctx.recompute < Recompute::kSelective;
  Tensor pre_act;
  Tensor hidden = LinearForward(ctx, x.value, w1.value, b1, nullptr, act,
                                keep ? &pre_act : nullptr);
  Tensor y = LinearForward(ctx, hidden, w2.value, b2,
                           residual == nullptr ? nullptr : &residual->value,
                           Gelu::kNone, nullptr);
  if (!record) return Var(y);

  const int slot = ctx.tape->NewSlot(), pre_slot = ctx.tape->NewSlot();
  SavedVar saved(std::move(pre_act));
  if (!keep) {
    saved = SavedVar(std::make_shared<Recipe>(
        [x = SavedVar(x), w1 = &w1, b1, act](Context& c) {
          std::vector<Tensor> pre_act(1);
          LinearForward(c, x.GetForRecipe(c), w1->value, b1, nullptr, act,
                        &pre_act[0]);
          return pre_act;
        }));
  }
  // The activation again: bit by bit where the forward kernel read pre_act as
  // it is stored (the CPU), to a rounding where GELU was the epilogue of the
  // product (cuBLASLt). One pass over memory, instead of keeping a quarter of
  // the block's activations.
  SavedVar hidden_again(PassRecipe(ctx, {hidden}, [act, saved](Context& c) {
    const Tensor& pre_act = saved.Get(c);
    std::vector<Tensor> hidden = {c.Empty(pre_act.shape(), pre_act.dtype())};
    c.ops().GeluForward(c.stream(),
                        {act, pre_act.vector(), hidden[0].vector()});
    return hidden;
  }));
  // Backward is two nodes, so that the second product's gradients come before
  // the first's.
  ctx.tape->Record("gelu_mlp_in", {&w1, b1},
                   [pre_slot, x = SavedVar(x), x_slot = x.slot, w1 = &w1,
                    b1_sink = SinkOf(b1)](Context& c, Tape& tape) {
                     const Tensor dpre = tape.Take(pre_slot);
                     if (!dpre.defined()) return;
                     LinearWeightGrad(c, dpre, x, w1->sink, b1_sink);
                     if (x_slot >= 0) {
                       tape.Accumulate(c, x_slot,
                                       LinearInputGrad(c, dpre, w1->value));
                     }
                   });
  ctx.tape->Record(
      "gelu_mlp_out", {&w2, b2},
      [slot, pre_slot, w2 = &w2, b2_sink = SinkOf(b2), act, residual_slot,
       saved = std::move(saved),
       hidden = std::move(hidden_again)](Context& c, Tape& tape) mutable {
        Tensor dy = tape.Take(slot);
        if (!dy.defined()) return;
        LinearWeightGrad(c, dy, hidden, w2->sink, b2_sink);
        hidden = SavedVar(Tensor());  // the next gradient may take its memory
        tape.Accumulate(c, pre_slot,
                        LinearInputGrad(c, dy, w2->value, act, saved.Get(c)));
        tape.Accumulate(c, residual_slot, std::move(dy));
      });
  return Var(y, slot);
}

}  // namespace zero
