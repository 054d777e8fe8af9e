// Parameters that belong together, and how layers hand them to the ops.
#ifndef ZERO_MODELS_LAYERS_PARAMS_H_
#define ZERO_MODELS_LAYERS_PARAMS_H_

#include "engine/autograd/ops.h"
#include "engine/nn/module.h"

namespace zero {

// The bound weight of a parameter; null for a layer without it.
inline const Weight* WeightOf(const Parameter* parameter) {
  return parameter == nullptr ? nullptr : &parameter->weight;
}

// The rows of tokens, without padding rows. No gradient.
inline Weight WordsOf(const Parameter& table) {
  return {.value = table.weight.value.Slice(0, table.shape)};
}

// The part of a table that the current unit computes with (Context::part), as a
// weight and as rows of the table.
inline const Weight& PartOf(const Context& ctx, const Parameter& table) {
  return table.parts[ctx.part];
}
inline TableSlice SliceOf(const Context& ctx, const Parameter& table) {
  return {ctx.part * table.part_rows, table.stored_shape[0]};
}
inline bool HasMoreParts(const Context& ctx, const Parameter& table) {
  return ctx.part + 1 < static_cast<int>(table.parts.size());
}

// x w^T + b with w [out, in].
struct LinearParams {
  Parameter* weight = nullptr;
  Parameter* bias = nullptr;

  Var operator()(Context& ctx, const Var& x,
                 const Var* residual = nullptr) const {
    return Linear(ctx, x, weight->weight, WeightOf(bias), residual);
  }
};

struct NormParams {
  NormKind kind = NormKind::kLayerNorm;
  Parameter* weight = nullptr;
  Parameter* bias = nullptr;
  float eps = 1e-5f;

  NormWeights weights() const {
    return {kind, &weight->weight, WeightOf(bias), eps};
  }
};

}  // namespace zero

#endif  // ZERO_MODELS_LAYERS_PARAMS_H_
