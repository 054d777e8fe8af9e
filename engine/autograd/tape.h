// The record of one unit's forward pass, played backward.
//
// Define-by-run: every op that has something to differentiate records one
// node. Recording order is a topological order, so backward is a loop over
// the nodes from the last to the first, without recursion. Each node dies as
// soon as it has run, and the activations that only it held go back to the
// arena. Start reading here, then ops.h and linear.cc for a typical op.
// Invariant: a gradient in a slot is complete when its producer's node runs.
#ifndef ZERO_ENGINE_AUTOGRAD_TAPE_H_
#define ZERO_ENGINE_AUTOGRAD_TAPE_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/tensor/tensor.h"

namespace zero {

class Context;

// How to compute an activation again, bit by bit, from what is kept anyway.
// The first use in backward does it; the result lives as long as users do.
struct Recipe {
  std::function<Tensor(Context&)> compute;
  Tensor value;
};

// A tensor in a computation. `slot` is where its gradient collects on the
// tape; -1 means that nothing upstream wants one.
struct Var {
  Tensor value;
  int slot = -1;
  std::shared_ptr<Recipe> recipe;  // null: backward keeps the value itself

  Var() = default;
  explicit Var(Tensor v, int s = -1) : value(std::move(v)), slot(s) {}
  const Shape& shape() const { return value.shape(); }
};

// What an op keeps of an input for its backward: its recipe if it has one,
// else the tensor.
class SavedVar {
 public:
  explicit SavedVar(Tensor value) : value_(std::move(value)) {}
  explicit SavedVar(const Var& var)
      : value_(var.recipe == nullptr ? var.value : Tensor()),
        recipe_(var.recipe) {}

  const Tensor& Get(Context& ctx) const {
    if (recipe_ == nullptr) return value_;
    if (!recipe_->value.defined()) recipe_->value = recipe_->compute(ctx);
    return recipe_->value;
  }

 private:
  Tensor value_;
  std::shared_ptr<Recipe> recipe_;
};

// Where a parameter's gradient goes: memory that somebody else owns (a bucket,
// a flat gradient buffer). The first write of a step overwrites it and later
// ones accumulate, so that no zeroing pass is needed.
struct GradSink {
  Tensor grad;           // fp32 or the parameter's dtype
  bool written = false;  // false: the next write overwrites
  // A table's, where defined: what Embedding would add to `grad`, row by row
  // [M, C], goes here instead. Who bound it adds the rows, by the batch's
  // tokens.
  Tensor rows;
  bool has_rows = false;
};

// A parameter as an op sees it. No sink: frozen. Ops keep its address until
// their backward has run, and read `value` anew there.
struct Weight {
  Tensor value;
  GradSink* sink = nullptr;
};

class Tape {
 public:
  // Computes gradients of the inputs from the gradient of the output; ends
  // by Accumulate into the inputs' slots.
  using BackwardFn = std::function<void(Context&, Tape&)>;

  // A tensor whose gradient is wanted (a unit's input).
  Var Watch(Tensor value) { return Var(std::move(value), NewSlot()); }

  int NewSlot();

  // `name` is for traces and error messages.
  void Record(const char* name, BackwardFn backward);

  // The gradient collected in `slot`, which is emptied; undefined when no
  // gradient reached it.
  Tensor Take(int slot);

  // Adds `grad` to `slot` (ignored for slot -1). Shared tensors are never
  // overwritten: the sum goes to whichever of the two is unique.
  void Accumulate(Context& context, int slot, Tensor grad);

  // Runs every node, last to first. Seed the outputs with Accumulate first.
  void Backward(Context& context);

  int num_nodes() const { return static_cast<int>(nodes_.size()); }

 private:
  struct Node {
    const char* name;
    BackwardFn backward;
  };
  std::vector<Node> nodes_;
  std::vector<Tensor> grads_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_TAPE_H_
