// The model states of a rank: parameters, gradients, master weights and the
// optimizer's arrays, as flat arrays laid out by the plan, and the model's
// parameters bound to them.
#ifndef ZERO_ENGINE_ZERO_MODEL_STATES_H_
#define ZERO_ENGINE_ZERO_MODEL_STATES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "engine/autograd/tape.h"
#include "engine/nn/module.h"
#include "engine/tensor/arena.h"
#include "engine/zero/batch_upload.h"
#include "engine/zero/flat_state.h"
#include "engine/zero/plan.h"
#include "kernels/device.h"

namespace zero {

// A parameter and its place in the flat arrays.
struct BoundParameter {
  Parameter* parameter = nullptr;
  int unit = 0;
  int64_t offset = 0;  // in the unit, in elements
  GradSink sink;
  bool used = false;  // some backward pass of this step wrote its gradient

  // Elements that have a value: a prefix of those that are stored.
  int64_t num_elems() const { return parameter->shape.num_elems(); }
};

// A named array of the model states as one rank holds it: of a unit the
// parameters, the master weights, or one array of the optimizer.
struct StateArray {
  std::string name;  // "block.0/parameters", "block.0/optimizer.1"
  Tensor values;     // device memory; what FlatState::Held says
};

struct StateOptions {
  DType param_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;
  bool train = true;                 // false: parameters alone
  bool stochastic_rounding = false;  // of masters to parameters
  int num_optimizer_arrays = 0;      // fp32, beside master weights
};

class ModelStates {
 public:
  // `plan` and `model` must outlive the states.
  ModelStates(const Plan& plan, int64_t rank, Model& model,
              const StateOptions& options);
  ~ModelStates();  // the model outlives the memory that it was bound to

  // Takes the arrays from `arena`, in place of those that there were.
  void Take(Arena& arena);
  // Binds what is replicated for the whole run, and zeroes what padding must
  // not find there.
  void Bind(Ops& ops, Stream& stream);

  const FlatState& params() const { return params_; }
  const FlatState& grads() const { return grads_; }
  const FlatState& master() const { return master_; }
  const std::vector<FlatState>& optimizer() const { return optimizer_; }
  // The values that training moves: the master weights where there are some.
  const FlatState& trained() const {
    return master_.defined() ? master_ : params_;
  }

  // The values that a file gets: those, unless parameters are rounded
  // stochastically. Rounding the masters again would give other values than
  // those that were evaluated.
  const FlatState& readable() const {
    return options_.stochastic_rounding ? params_ : trained();
  }

  const std::vector<std::unique_ptr<BoundParameter>>& unit(int u) const {
    return units_[u];
  }
  // All, in plan order.
  std::vector<BoundParameter*> bound() const;
  const BoundParameter& BoundOf(const Parameter& parameter) const;

  // Binds a unit's values or gradients to `flat` [padded elems]. Undefined:
  // nothing to read, and whoever reads crashes at once.
  void BindValues(int unit, const Tensor& flat);
  void BindSinks(int unit, const Tensor& flat);

  // Fills every parameter that has elements here with its initial value: a
  // pure function of (seed, parameter name, element).
  void Initialize(uint64_t seed, BatchUpload& upload, Stream& stream);
  // Takes every parameter's fp32 values from `values(parameter, out)` and
  // rounds them to the parameter dtype.
  void Load(const std::function<void(const Parameter&, float* out)>& values,
            BatchUpload& upload, Stream& stream);
  // Weights are written in pieces of this many elements: the embedding alone
  // may be larger than the memory to spare.
  static constexpr int64_t kPieceElems = int64_t{1} << 19;

  void ClearOptimizer(Stream& stream);

  // All that outlives a step and that a later run needs, in plan order.
  std::vector<StateArray> Arrays() const;

 private:
  using FillFn = std::function<void(int64_t begin, int64_t count, float* out)>;
  // Launches the writing of elements that `fill` computes. Pieces of which
  // this rank holds nothing are left out.
  void WriteInPieces(const BoundParameter& bound, const FillFn& fill,
                     BatchUpload& upload, Stream& stream);
  // Writes elements from `begin` on. REQUIRES: kernels of the device can read
  // `values`, and may until the stream is done.
  void Write(const BoundParameter& bound, int64_t begin,
             absl::Span<const float> values, Stream& stream);
  bool Holds(const BoundParameter& bound, int64_t begin, int64_t end) const;

  const Plan* plan_;
  int64_t rank_;
  Model* model_;
  StateOptions options_;
  std::vector<std::vector<std::unique_ptr<BoundParameter>>> units_;
  FlatState params_, grads_, master_;
  std::vector<FlatState> optimizer_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_MODEL_STATES_H_
