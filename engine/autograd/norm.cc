#include "engine/autograd/norm.h"

#include "engine/autograd/ops.h"
#include "engine/autograd/record.h"

namespace zero {

void NormRows(Context& ctx, const NormWeights& norm, NormForwardArgs args) {
  ZERO_CHECK_EQ(norm.weight->value.num_elems(), args.x.width);
  args.kind = norm.kind;
  args.weight = norm.weight->value.vector();
  args.bias = VectorOf(norm.bias);
  args.eps = norm.eps;
  ctx.ops().NormForward(ctx.stream(), args);
}

void NormRowsBackward(Context& ctx, GradSink* weight_sink, GradSink* bias_sink,
                      NormBackwardArgs args) {
  const SinkTarget dweight = OpenSink(weight_sink), dbias = OpenSink(bias_sink);
  args.dweight = dweight.vector();
  args.accumulate_dweight = dweight.accumulate;
  args.dbias = dbias.vector();
  args.accumulate_dbias = dbias.accumulate;
  const Tensor scratch =
      ctx.Scratch(ctx.ops().NormBackwardWorkspaceBytes(args));
  ctx.ops().NormBackward(ctx.stream(), args, AsWorkspace(scratch));
}

namespace {

struct NormState {
  Tensor y, mean, rstd;
};

// y = norm(sum) as a variable: its recipe, and its backward on the tape; dx of
// the sum goes to every slot of `inputs`.
Var RecordNorm(Context& ctx, const NormWeights& norm, const Var& sum,
               const NormState& state, std::vector<int> inputs) {
  Var y(state.y, ctx.tape->NewSlot());
  // The statistics are of the sum as it is stored: the same bits again.
  y.recipe = std::make_shared<Recipe>();
  y.recipe->compute = [norm, sum = sum.value](Context& c) {
    Tensor again = c.Empty(sum.shape(), sum.dtype());
    NormRows(c, norm, {.x = sum.rows(), .y = again.rows()});
    return again;
  };
  ctx.tape->Record("norm", [kind = norm.kind, weight = norm.weight,
                            bias_sink = SinkOf(norm.bias), sum, y_slot = y.slot,
                            inputs = std::move(inputs), mean = state.mean,
                            rstd = state.rstd](Context& c, Tape& tape) {
    const bool is_input = inputs.size() == 1 && inputs[0] == sum.slot;
    Tensor dsum = is_input ? Tensor() : tape.Take(sum.slot);
    const Tensor dy = tape.Take(y_slot);
    if (!dy.defined() && !dsum.defined()) return;
    Tensor dx = dsum.defined() && (dsum.unique() || !dy.defined())
                    ? dsum
                    : c.Empty(dy.shape(), dy.dtype());
    if (dy.defined()) {
      NormBackwardArgs args{.kind = kind,
                            .dy = dy.rows(),
                            .sum = sum.value.rows(),
                            .weight = weight->value.vector(),
                            .mean = mean.defined() ? mean.As<float>() : nullptr,
                            .rstd = rstd.As<float>(),
                            .dx = dx.rows()};
      if (dsum.defined()) args.dsum = dsum.rows();
      NormRowsBackward(c, weight->sink, bias_sink, args);
    }
    dsum = Tensor();
    for (int input : inputs) tape.Accumulate(c, input, dx);
  });
  return y;
}

NormState RunNorm(Context& ctx, const Tensor& x, const Tensor* residual,
                  const Tensor* sum, const NormWeights& norm, bool record) {
  NormState state{.y = ctx.Empty(x.shape(), x.dtype())};
  NormForwardArgs args{.x = x.rows(), .y = state.y.rows()};
  if (residual != nullptr) {
    args.residual = residual->rows();
    args.sum = sum->rows();
  }
  if (record) {
    const int64_t rows = args.x.outer;
    state.rstd = ctx.Empty({rows}, DType::kF32);
    args.rstd = state.rstd.As<float>();
    if (norm.kind == NormKind::kLayerNorm) {
      state.mean = ctx.Empty({rows}, DType::kF32);
      args.mean = state.mean.As<float>();
    }
  }
  NormRows(ctx, norm, args);
  return state;
}

}  // namespace

Var Norm(Context& ctx, const Var& x, const NormWeights& norm) {
  const bool record = WantsGrad(ctx, {x.slot}, {norm.weight, norm.bias});
  const NormState state = RunNorm(ctx, x.value, nullptr, nullptr, norm, record);
  if (!record) return Var(state.y);
  return RecordNorm(ctx, norm, x, state, {x.slot});
}

std::pair<Var, Var> AddNorm(Context& ctx, const Var& x, const Var& residual,
                            const NormWeights& norm) {
  ZERO_CHECK_EQ(x.shape(), residual.shape());
  const bool record =
      WantsGrad(ctx, {x.slot, residual.slot}, {norm.weight, norm.bias});
  Tensor sum = ctx.Empty(x.shape(), x.value.dtype());
  const NormState state =
      RunNorm(ctx, x.value, &residual.value, &sum, norm, record);
  if (!record) return {Var(sum), Var(state.y)};
  Var sum_var(sum, ctx.tape->NewSlot());
  return {sum_var,
          RecordNorm(ctx, norm, sum_var, state, {x.slot, residual.slot})};
}

}  // namespace zero
