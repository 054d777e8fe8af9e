// The record of one unit's forward pass, played backward.
//
// Define-by-run: every differentiable op records one node. Recording order is a
// topological order, so backward is a loop over the nodes from the last to the
// first, without recursion. Each node dies as soon as it has run, and the
// activations that only it held return to the arena. Start reading here, then
// ops.h and linear.cc for a typical op.
// Invariant: a gradient in a slot is complete when its producer's node runs.
#ifndef ZERO_ENGINE_AUTOGRAD_TAPE_H_
#define ZERO_ENGINE_AUTOGRAD_TAPE_H_

#include <climits>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "engine/tensor/tensor.h"

namespace zero {

class Context;

// Results of an op that backward reads, kept, or recomputed at first use, bit
// by bit, from values that are kept anyway. They live as long as their users.
// `cheap`: one pass over memory, so another recipe that reads the value reruns
// this one, and no result is held until backward.
class Recipe {
 public:
  using Compute = std::function<std::vector<Tensor>(Context&)>;

  explicit Recipe(Compute compute, bool cheap = false)
      : compute_(std::move(compute)), cheap_(cheap) {}
  explicit Recipe(std::vector<Tensor> kept) : results_(std::move(kept)) {}

  // The first is the value of the op's Var.
  const std::vector<Tensor>& Get(Context& ctx) {
    // Its inputs may be freed.
    if (compute_) results_ = std::exchange(compute_, nullptr)(ctx);
    return results_;
  }

  // The value, for another recipe.
  Tensor ValueForRecipe(Context& ctx) {
    return cheap_ && compute_ ? compute_(ctx)[0] : Get(ctx)[0];
  }

 private:
  Compute compute_;  // null: the results are here
  bool cheap_ = false;
  std::vector<Tensor> results_;
};

// A tensor in a computation. `slot` is where its gradient accumulates on the
// tape; -1: nothing upstream needs one.
struct Var {
  Tensor value;
  int slot = -1;
  std::shared_ptr<Recipe> recipe;  // null: backward keeps the value itself

  Var() = default;
  explicit Var(Tensor v, int s = -1) : value(std::move(v)), slot(s) {}
  const Shape& shape() const { return value.shape(); }
};

// The part of an input that an op keeps for its backward: its recipe if it has
// one, else the tensor.
class SavedVar {
 public:
  explicit SavedVar(Tensor value) : value_(std::move(value)) {}
  explicit SavedVar(std::shared_ptr<Recipe> recipe)
      : recipe_(std::move(recipe)) {}
  explicit SavedVar(const Var& var)
      : value_(var.recipe == nullptr ? var.value : Tensor()),
        recipe_(var.recipe) {}

  const Tensor& Get(Context& ctx) const {
    return recipe_ == nullptr ? value_ : recipe_->Get(ctx)[0];
  }
  Tensor GetForRecipe(Context& ctx) const {
    return recipe_ == nullptr ? value_ : recipe_->ValueForRecipe(ctx);
  }

 private:
  Tensor value_;
  std::shared_ptr<Recipe> recipe_;
};

// The destination of a parameter's gradient: memory owned elsewhere (a bucket,
// a flat gradient buffer). The first write of a step overwrites it and later
// ones accumulate, so no zeroing pass is needed.
struct GradSink {
  Tensor grad;           // fp32 or the parameter's dtype
  bool written = false;  // false: the next write overwrites
  int phase = 0;         // of Tape::Backward, in which `grad` may be written
  // Set for a table whose other writer runs at the end of backward: a loss
  // defers its write until then, so that `grad` is not needed earlier. The
  // writer runs `pending` first.
  bool waits = false;
  std::function<void(Context&)> pending;
  // Set for a table whose gradient is exchanged by rows. If `rows` [M, C] is
  // defined, it receives Embedding's addends to `grad`, row by row; their owner
  // adds them, by the batch's tokens.
  bool by_rows = false;
  Tensor rows;
  bool has_rows = false;
};

// A parameter as an op sees it. No sink: frozen. Ops keep its address until
// their backward has run, and reread `value` there.
struct Weight {
  Tensor value;
  GradSink* sink = nullptr;
  // The rows of the batch's tokens [M, C]; a lookup then reads no `value`.
  Tensor rows = {};
};

// The weights that an op reads and whose gradients it writes; null: none.
using Weights = std::initializer_list<const Weight*>;

class Tape {
 public:
  // Computes gradients of the inputs from the gradient of the output; ends
  // by Accumulate into the inputs' slots.
  using BackwardFn = std::function<void(Context&, Tape&)>;

  // A tensor that needs a gradient (a unit's input).
  Var Watch(Tensor value) { return Var(std::move(value), NewSlot()); }

  int NewSlot();

  // `name` is for traces and error messages. The weights are of one phase.
  void Record(const char* name, Weights weights, BackwardFn backward);

  // The gradient collected in `slot`, which is emptied; undefined when no
  // gradient reached it.
  Tensor Take(int slot);

  // Adds `grad` to `slot` (ignored for slot -1). Shared tensors are never
  // overwritten: the sum goes to whichever of the two is unique.
  void Accumulate(Context& context, int slot, Tensor grad);

  // Runs the nodes, last to first, up to the first that writes a gradient of a
  // later phase. Seed the outputs with Accumulate first.
  void Backward(Context& context, int phase = kAllPhases);
  static constexpr int kAllPhases = INT_MAX;
  static constexpr int kNoPhase = -1;

  int num_nodes() const { return static_cast<int>(nodes_.size()); }

 private:
  struct Node {
    const char* name;
    int phase;  // of the gradients that it writes
    BackwardFn backward;
  };
  std::vector<Node> nodes_;
  std::vector<Tensor> grads_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_TAPE_H_
