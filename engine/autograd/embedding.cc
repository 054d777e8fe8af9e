#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {
namespace {

void EmbeddingBackwardInto(Context& ctx, const int32_t* ids, const Tensor& dout,
                           GradSink* sink, const TableSlice* slice = nullptr) {
  const SinkTarget target = OpenSink(sink);
  if (!target.grad.defined()) return;
  EmbeddingBackwardArgs args{.ids = ids,
                             .dout = dout.matrix(),
                             .dtable = target.matrix(),
                             .accumulate = target.accumulate};
  if (slice != nullptr) {
    if (!target.accumulate) {
      ctx.ops().Fill(ctx.stream(), {target.vector(), 0});
      args.accumulate = true;
    }
    const int64_t elems = target.grad.num_elems();
    const int64_t first = slice->first * args.dtable.cols;
    args.dtable.rows = slice->rows;
    args.pieces = {elems, 0, elems, first, first + elems};
  }
  const Tensor scratch =
      ctx.Scratch(ctx.ops().EmbeddingBackwardWorkspaceBytes(args));
  ctx.ops().EmbeddingBackward(ctx.stream(), args, AsWorkspace(scratch));
}

// Adds a lookup of `ids` to the gradient of its table, or exports it by rows.
void AddTokens(Context& c, const int32_t* ids, const Tensor& dout,
               GradSink* sink, const TableSlice* slice = nullptr) {
  if (sink != nullptr && sink->pending) {
    std::exchange(sink->pending, nullptr)(c);
  }
  if (sink == nullptr || !sink->by_rows) {
    return EmbeddingBackwardInto(c, ids, dout, sink, slice);
  }
  if (!sink->rows.defined()) return;
  c.ops().Cast(c.stream(), {dout.vector(), sink->rows.vector()});
  sink->has_rows = true;
}

// The rows that a lookup reads.
const Tensor& TableOf(const Weight& tokens) {
  return tokens.rows.defined() ? tokens.rows : tokens.value;
}

// Rows of `out` whose tokens are in `tokens`, which is the table from row
// `first` on. If the rows are there already, the first part has all of them.
void LookUp(Context& ctx, const Weight& tokens, int64_t first,
            const Weight* positions, const Tensor& out) {
  const Tensor& table = TableOf(tokens);
  if (positions != nullptr) {
    ZERO_CHECK_EQ(positions->value.shape()[1], table.shape()[1]);
  }
  EmbeddingForwardArgs args{.ids = ctx.batch.tokens,
                            .table = table.matrix(),
                            .first = first,
                            .out = out.matrix()};
  if (tokens.rows.defined()) {
    if (first > 0) return;
    args.ids = nullptr;
  }
  if (positions != nullptr) {
    args.position_ids = ctx.batch.positions;
    args.position_table = positions->value.matrix();
  }
  ctx.ops().EmbeddingForward(ctx.stream(), args);
}

Tensor EmptyOut(const Context& ctx, const Weight& tokens) {
  const Tensor& table = TableOf(tokens);
  return ctx.Empty({ctx.batch.num_tokens(), table.shape()[1]}, table.dtype());
}

}  // namespace

Var Embedding(Context& ctx, const Weight& tokens, const Weight* positions) {
  const BatchView& batch = ctx.batch;
  const Tensor out = EmptyOut(ctx, tokens);
  LookUp(ctx, tokens, 0, positions, out);
  if (!WantsGrad(ctx, {}, {&tokens, positions})) return Var(out);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record("embedding", {&tokens, positions},
                   [slot, token_sink = tokens.sink,
                    position_sink = SinkOf(positions), ids = batch.tokens,
                    position_ids = batch.positions](Context& c, Tape& tape) {
                     const Tensor dout = tape.Take(slot);
                     if (!dout.defined()) return;
                     AddTokens(c, ids, dout, token_sink);
                     EmbeddingBackwardInto(c, position_ids, dout,
                                           position_sink);
                   });
  return Var(out, slot);
}

Var EmbeddingPart(Context& ctx, const Var& in, const Weight& tokens,
                  const TableSlice& slice, const Weight* positions) {
  const bool first = slice.first == 0;
  const Tensor out = first ? EmptyOut(ctx, tokens) : in.value;
  LookUp(ctx, tokens, slice.first, positions, out);
  GradSink* const position_sink = first ? SinkOf(positions) : nullptr;
  if (ctx.tape == nullptr) return Var(out);

  const int slot = ctx.tape->NewSlot();
  ctx.tape->Record(
      "embedding", {&tokens, positions},
      [slot, in_slot = in.slot, token_sink = tokens.sink, position_sink, slice,
       ids = ctx.batch.tokens,
       position_ids = ctx.batch.positions](Context& c, Tape& tape) {
        Tensor dout = tape.Take(slot);
        if (!dout.defined()) return;
        AddTokens(c, ids, dout, token_sink, &slice);
        EmbeddingBackwardInto(c, position_ids, dout, position_sink);
        tape.Accumulate(c, in_slot, std::move(dout));
      });
  return Var(out, slot);
}

}  // namespace zero
