// Small helpers that the op files share.
#ifndef ZERO_ENGINE_AUTOGRAD_RECORD_H_
#define ZERO_ENGINE_AUTOGRAD_RECORD_H_

#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "engine/autograd/context.h"

namespace zero {

// True if a tape is set and some input or weight needs a gradient.
inline bool WantsGrad(const Context& ctx, std::initializer_list<int> slots,
                      Weights weights) {
  if (ctx.tape == nullptr) return false;
  for (int slot : slots) {
    if (slot >= 0) return true;
  }
  for (const Weight* weight : weights) {
    if (weight != nullptr && weight->sink != nullptr) return true;
  }
  return false;
}

// The sink's memory as a kernel output, and whether to accumulate; marks the
// sink written. Null data when the weight is frozen.
struct SinkTarget {
  Tensor grad;
  bool accumulate = false;

  Matrix matrix() const { return grad.defined() ? grad.matrix() : Matrix(); }
  Vector vector() const { return grad.defined() ? grad.vector() : Vector(); }
};

inline SinkTarget OpenSink(GradSink* sink) {
  if (sink == nullptr) return {};
  return {sink->grad, std::exchange(sink->written, true)};
}

inline GradSink* SinkOf(const Weight* weight) {
  return weight == nullptr ? nullptr : weight->sink;
}

inline ConstVector VectorOf(const Weight* weight) {
  return weight == nullptr ? ConstVector() : weight->value.vector();
}

// The recipe of an op that is one pass over memory: its results, kept, or
// `again`, which computes them.
inline std::shared_ptr<Recipe> PassRecipe(const Context& ctx,
                                          std::vector<Tensor> results,
                                          Recipe::Compute again) {
  return ctx.recompute == Recompute::kKeepAll
             ? std::make_shared<Recipe>(std::move(results))
             : std::make_shared<Recipe>(std::move(again), /*cheap=*/true);
}

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_RECORD_H_
