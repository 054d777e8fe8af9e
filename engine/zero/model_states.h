// The model states of a rank: parameters, gradients, master weights and the
// optimizer's arrays, as flat arrays laid out by the plan, and the model's
// parameters bound to them. Gradients in the device's memory have no array:
// they are lent from the backward of their unit to the end of the step.
#ifndef ZERO_ENGINE_ZERO_MODEL_STATES_H_
#define ZERO_ENGINE_ZERO_MODEL_STATES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "engine/autograd/tape.h"
#include "engine/nn/module.h"
#include "engine/tensor/arena.h"
#include "engine/zero/batch_upload.h"
#include "engine/zero/flat_state.h"
#include "engine/zero/plan.h"
#include "engine/zero/swapped_states.h"
#include "kernels/device.h"

namespace zero {

// The plan's view of a model.
std::vector<UnitSpec> DescribeUnits(const Model& model);

// A parameter and its place in the flat arrays.
struct BoundParameter {
  Parameter* parameter = nullptr;
  Weight* weight = nullptr;  // of the parameter, or of one part of it
  const PlannedParameter* planned = nullptr;
  int unit = 0;
  GradSink sink;
  bool used = false;  // some backward pass of this step wrote its gradient

  // Elements of it that have a value: a prefix of those that are stored.
  int64_t num_elems() const {
    return std::clamp<int64_t>(parameter->shape.num_elems() - planned->first, 0,
                               planned->elems);
  }
};

// Elements of a parameter that lie together in this rank's memory.
struct StateRun {
  const Parameter* parameter;
  int64_t begin;       // the first, in the parameter's own numbering
  Tensor values;       // [1 .. ModelStates::kPieceElems], device memory
  SegmentRef segment;  // that they lie in,
  Segment place;       // and where, in the unit's elements
  Tensor rest = {};    // that makes split masters of `values`; undefined: none
};

// Which elements: all that lie on a rank, or its own piece of every segment.
// The pieces of a group's ranks are the model, each element once.
enum class StatePart { kHeld, kOwned };

struct StateOptions {
  DType param_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;
  absl::optional<DType> master_dtype;         // of what is stored of masters
  bool train = true;                          // false: parameters alone
  bool stochastic_rounding = false;           // of masters to parameters
  bool delayed_updates = false;               // ExecutorOptions' own
  std::vector<std::string> optimizer_arrays;  // fp32, beside master weights
};

class ModelStates {
 public:
  // `plan` and `model` must outlive the states.
  ModelStates(const Plan& plan, int64_t rank, Model& model,
              const StateOptions& options);
  ~ModelStates();  // the model outlives the memory that it was bound to

  // Takes the arrays, in place of those that there were. `swapped`, null where
  // no state is on a disk, must outlive them.
  void Take(const HomeArenas& arenas, SwappedStates* swapped = nullptr);
  // Binds replicated parameters for the whole run, and zeroes what padding must
  // not find there.
  void Bind(Stream& stream);

  const FlatState& params() const { return params_; }
  // Where backward's sums over micro-batches, or of all ranks where they are
  // sharded, are.
  const FlatState& grads() const { return grads_; }
  FlatState& grads() { return grads_; }
  // Of all gradients on the device: the step is done with them.
  void ReturnGradients();
  // What the optimizer of a unit reads and writes: these two, or what the host
  // has of them.
  const FlatState& updated_params(int unit) const {
    const bool in_place =
        plan_->FetchesParameters(unit) && params_are_ == Params::kEqual;
    return host_params_.HasUnit(unit) && !in_place ? host_params_ : params_;
  }
  const FlatState& reduced_grads(int unit) const {
    return host_grads_.HasUnit(unit) ? host_grads_ : grads_;
  }
  // Launches what makes the host's parameters those of the device.
  void CopyToHost(Stream& stream);

  // Of delayed updates: whether params() are those that the host has updated
  // last (updated_params).
  enum class Params {
    kEqual,  // the host has the same, but what it updates in place
    kOlder,  // on the host they are newer: while such steps are taken
    kNewer,  // exchanged between two such steps, to be read as at any time
  };
  Params params_are() const { return params_are_; }
  void set_params_are(Params are) { params_are_ = are; }
  // Launches the exchange of params() with the host's, which is its own
  // inverse. REQUIRES: the host is not at work on them.
  void Exchange(BatchUpload& upload, Stream& stream);
  // The step that begins has other memory for the gradients of the host than
  // the one before, whose update is still to come.
  void AlternateGradients();
  // Between steps: brings a segment of a state that is on a disk to where
  // FlatState::Values says it is, until the next call; `change`: to write
  // there. `stream` is what reads and writes it.
  void Hold(const SegmentRef& ref, bool change, Stream& stream) const {
    if (swapped_ != nullptr) swapped_->Hold(ref, change, stream);
  }
  void Settle(Stream& stream) const {
    if (swapped_ != nullptr) swapped_->Settle(stream);
  }
  // fp32, or uint16: the rest of masters whose upper part are the parameters
  // (SplitMaster in kernels/rounding.h).
  const FlatState& master() const { return master_; }
  const std::vector<FlatState>& optimizer() const { return optimizer_; }

  // The values that a file gets: the masters where there are some, unless
  // parameters are rounded stochastically. Rounding the masters again would
  // give other values than those that were evaluated.
  struct Readable {
    const FlatState* values;
    const FlatState* rest = nullptr;  // of split masters; null: none
  };
  Readable readable(const SegmentRef& ref) const;

  const std::vector<std::unique_ptr<BoundParameter>>& unit(int u) const {
    return units_[u];
  }
  // All, in plan order.
  std::vector<BoundParameter*> bound() const;

  // Binds a unit's values [padded elems], or the gradients [elems] of one of
  // its phases. Undefined: nothing to read, and whoever reads crashes at once.
  void BindValues(int unit, const Tensor& flat);
  void BindSinks(int unit, int phase, const Tensor& flat);

  // The states that outlive a step and that a later run needs.
  std::vector<const FlatState*> lasting() const;

  // The same as a checkpoint has it, whatever is stored here of masters:
  // "weight", fp32 where there are masters, else the parameter; where masters
  // are rounded stochastically "rounded", the parameter; the optimizer's
  // arrays; and with delayed updates kStale, the parameter of the update
  // before, with which the next step computes. REQUIRES for that: params_are()
  // not kOlder.
  struct KeptState {
    std::string name;
    DType dtype;
    Readable from;
  };
  std::vector<KeptState> kept(const SegmentRef& ref) const;

  static constexpr char kStale[] = "stale_weight";
  bool keeps_stale() const { return options_.delayed_updates; }
  const FlatState& stale() const { return host_params_; }

  // The door through which values go in and out: calls `visit` for the runs of
  // a part of a state, in plan order, without padding. Who reads or writes
  // their values holds their segment.
  using VisitFn = std::function<void(const StateRun&)>;
  void ForEachRun(const FlatState& state, StatePart part,
                  const VisitFn& visit) const;
  // The same of elements `range` of a segment, which are in `values` and, of
  // split masters, in `rest`.
  void ForEachRun(const SegmentRef& ref, const Segment& range,
                  const Tensor& values, const Tensor& rest,
                  const VisitFn& visit) const;
  const std::vector<SegmentRef>& segments() const { return segments_; }
  // What goes through it goes in pieces of at most this many elements: the
  // embedding alone may be larger than the memory to spare.
  static constexpr int64_t kPieceElems = int64_t{1} << 19;

  // Writes the fp32 values [begin, begin + count) of a parameter to `out`.
  using ValuesFn = std::function<void(const Parameter&, int64_t begin,
                                      int64_t count, float* out)>;
  // Launches the writing of `values` to a part of the parameters and of the
  // master weights, as their dtypes keep them; the optimizer's arrays become
  // zero. `values` is asked once for every element of the part; null: none.
  void Fill(StatePart part, const ValuesFn& values, BatchUpload& upload,
            Stream& stream);

 private:
  // Those that the host's optimizer reads.
  FlatState& host_grads() { return plan_->AddsOnHost() ? grads_ : host_grads_; }
  Segment RangeOf(const FlatState& state, StatePart part,
                  const SegmentRef& ref) const;

  const Plan* plan_;
  int64_t rank_;
  StateOptions options_;
  std::vector<std::vector<std::unique_ptr<BoundParameter>>> units_;
  std::vector<SegmentRef> segments_;  // of all units, in plan order
  FlatState params_, grads_, master_;
  std::vector<FlatState> optimizer_;
  // What this rank owns, of units that the host updates, where the device has
  // it too.
  FlatState host_params_, host_grads_;
  FlatState other_grads_;  // of AlternateGradients
  Params params_are_ = Params::kEqual;
  SwappedStates* swapped_ = nullptr;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_MODEL_STATES_H_
