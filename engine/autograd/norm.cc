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

// {y, rstd, mean} of a norm; without `record` only y.
std::vector<Tensor> RunNorm(Context& ctx, const NormWeights& norm,
                            const Tensor& x, bool record,
                            const Tensor& residual = {},
                            const Tensor& sum = {}) {
  std::vector<Tensor> results = {ctx.Empty(x.shape(), x.dtype())};
  NormForwardArgs args{.x = x.rows(), .y = results[0].rows()};
  if (residual.defined()) {
    args.residual = residual.rows();
    args.sum = sum.rows();
  }
  if (record) {
    const auto statistic = [&] {
      results.push_back(ctx.Empty({args.x.outer}, DType::kF32));
      return results.back().As<float>();
    };
    args.rstd = statistic();
    if (norm.kind == NormKind::kLayerNorm) args.mean = statistic();
  }
  NormRows(ctx, norm, args);
  return results;
}

// y = norm(sum) as a variable, of RunNorm's results: its recipe, and its
// backward on the tape; dx of the sum goes to every slot of `inputs`.
Var RecordNorm(Context& ctx, const NormWeights& norm, const Var& sum,
               std::vector<Tensor> results, std::vector<int> inputs) {
  Var y(results[0], ctx.tape->NewSlot());
  // The statistics are of the sum as it is stored: the same bits again.
  y.recipe = PassRecipe(ctx, std::move(results),
                        [norm, sum = SavedVar(sum)](Context& c) {
                          return RunNorm(c, norm, sum.Get(c), /*record=*/true);
                        });
  ctx.tape->Record(
      "norm", {norm.weight, norm.bias},
      [kind = norm.kind, weight = norm.weight, bias_sink = SinkOf(norm.bias),
       sum = SavedVar(sum), sum_slot = sum.slot, results = y.recipe,
       y_slot = y.slot, inputs = std::move(inputs)](Context& c, Tape& tape) {
        // The gradient that has reached the norm's input so far.
        Tensor dsum = tape.Take(sum_slot);
        const Tensor dy = tape.Take(y_slot);
        if (!dy.defined() && !dsum.defined()) return;
        // dx overwrites another tensor only if the arena has no hole for it.
        // dsum may be the last activation: while it stays there, gradients of
        // weights cannot take what backward frees below it.
        const bool in_place =
            dsum.defined() &&
            (!dy.defined() ||
             (dsum.unique() &&
              !c.arena().HasHole(dsum.bytes(), MemoryCategory::kActivations)));
        Tensor dx = in_place ? dsum : c.Empty(dy.shape(), dy.dtype());
        if (dy.defined()) {
          const std::vector<Tensor>& y = results->Get(c);
          NormBackwardArgs args{
              .kind = kind,
              .dy = dy.rows(),
              .sum = sum.Get(c).rows(),
              .weight = weight->value.vector(),
              .mean = y.size() > 2 ? y[2].As<float>() : nullptr,
              .rstd = y[1].As<float>(),
              .dx = dx.rows()};
          if (dsum.defined()) args.dsum = dsum.rows();
          NormRowsBackward(c, weight->sink, bias_sink, args);
        }
        dsum = Tensor();
        for (int input : inputs) tape.Accumulate(c, input, dx);
      });
  return y;
}

}  // namespace

Var Norm(Context& ctx, const Var& x, const NormWeights& norm) {
  const bool record = WantsGrad(ctx, {x.slot}, {norm.weight, norm.bias});
  std::vector<Tensor> results = RunNorm(ctx, norm, x.value, record);
  if (!record) return Var(results[0]);
  return RecordNorm(ctx, norm, x, std::move(results), {x.slot});
}

std::pair<Var, Var> AddNorm(Context& ctx, const Var& x, const Var& residual,
                            const NormWeights& norm) {
  ZERO_CHECK_EQ(x.shape(), residual.shape());
  const bool record =
      WantsGrad(ctx, {x.slot, residual.slot}, {norm.weight, norm.bias});
  Var sum(ctx.Empty(x.shape(), x.value.dtype()));
  std::vector<Tensor> results =
      RunNorm(ctx, norm, x.value, record, residual.value, sum.value);
  if (!record) return {sum, Var(results[0])};
  sum.slot = ctx.tape->NewSlot();
  if (ctx.recompute == Recompute::kFull) {
    sum.recipe = std::make_shared<Recipe>(
        [x = SavedVar(x), residual = SavedVar(residual)](Context& c) {
          const Tensor a = x.GetForRecipe(c), b = residual.GetForRecipe(c);
          Tensor sum = c.Empty(a.shape(), a.dtype());
          c.ops().Add(c.stream(), {a.vector(), b.vector(), sum.vector()});
          return std::vector<Tensor>{sum};
        });
  }
  return {sum, RecordNorm(ctx, norm, sum, std::move(results),
                          {x.slot, residual.slot})};
}

}  // namespace zero
