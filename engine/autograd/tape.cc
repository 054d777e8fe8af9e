#include "engine/autograd/tape.h"

#include <utility>

#include "engine/autograd/context.h"
#include "kernels/check.h"

namespace zero {

int Tape::NewSlot() {
  grads_.emplace_back();
  return static_cast<int>(grads_.size()) - 1;
}

void Tape::Record(const char* name, Weights weights, BackwardFn backward) {
  int phase = kNoPhase;
  for (const Weight* weight : weights) {
    if (weight == nullptr || weight->sink == nullptr) continue;
    ZERO_CHECK(phase == kNoPhase || phase == weight->sink->phase)
        << name << " has weights of two phases";
    phase = weight->sink->phase;
  }
  nodes_.push_back({name, phase, std::move(backward)});
}

Tensor Tape::Take(int slot) {
  if (slot < 0) return Tensor();
  return std::exchange(grads_[slot], Tensor());
}

void Tape::Accumulate(Context& context, int slot, Tensor grad) {
  if (slot < 0 || !grad.defined()) return;
  Tensor& sum = grads_[slot];
  if (!sum.defined()) {
    sum = std::move(grad);
    return;
  }
  ZERO_CHECK_EQ(sum.shape(), grad.shape());
  Tensor out = sum.unique()    ? sum
               : grad.unique() ? grad
                               : context.Empty(sum.shape(), sum.dtype());
  context.ops().Add(context.stream(),
                    {sum.vector(), grad.vector(), out.vector()});
  sum = std::move(out);
}

void Tape::Backward(Context& context, int phase) {
  while (!nodes_.empty() && nodes_.back().phase <= phase) {
    Node node = std::move(nodes_.back());
    nodes_.pop_back();
    ZERO_CHECK(node.phase == kNoPhase || phase == kAllPhases ||
               node.phase == phase)
        << node.name << " has a weight of an earlier phase";
    node.backward(context, *this);
  }
}

}  // namespace zero
