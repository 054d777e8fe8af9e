#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {
namespace {

void EmbeddingBackwardInto(Context& ctx, const int32_t* ids, const Tensor& dout,
                           GradSink* sink) {
  const SinkTarget target = OpenSink(sink);
  if (!target.grad.defined()) return;
  const EmbeddingBackwardArgs args{.ids = ids,
                                   .dout = dout.matrix(),
                                   .dtable = target.matrix(),
                                   .accumulate = target.accumulate};
  const Tensor scratch =
      ctx.Scratch(ctx.ops().EmbeddingBackwardWorkspaceBytes(args));
  ctx.ops().EmbeddingBackward(ctx.stream(), args, AsWorkspace(scratch));
}

}  // namespace

Var Embedding(Context& ctx, const Weight& tokens, const Weight* positions) {
  const BatchView& batch = ctx.batch;
  const int64_t channels = tokens.value.shape()[1];
  if (positions != nullptr) {
    ZERO_CHECK_EQ(positions->value.shape()[1], channels);
  }
  Tensor out = ctx.Empty({batch.num_tokens(), channels}, tokens.value.dtype());
  EmbeddingForwardArgs args{
      .ids = batch.tokens, .table = tokens.value.matrix(), .out = out.matrix()};
  if (positions != nullptr) {
    args.position_ids = batch.positions;
    args.position_table = positions->value.matrix();
  }
  ctx.ops().EmbeddingForward(ctx.stream(), args);
  if (!WantsGrad(ctx, {}, {&tokens, positions})) return Var(out);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record(
      "embedding", [slot, token_sink = tokens.sink,
                    position_sink = SinkOf(positions), ids = batch.tokens,
                    position_ids = batch.positions](Context& c, Tape& tape) {
        const Tensor dout = tape.Take(slot);
        if (!dout.defined()) return;
        if (token_sink != nullptr && token_sink->rows.defined()) {
          c.ops().Cast(c.stream(), {dout.vector(), token_sink->rows.vector()});
          token_sink->has_rows = true;
        } else {
          EmbeddingBackwardInto(c, ids, dout, token_sink);
        }
        EmbeddingBackwardInto(c, position_ids, dout, position_sink);
      });
  return Var(out, slot);
}

}  // namespace zero
