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
  bool used = false;  // a backward pass of this step wrote its gradient

  // The elements with a value: a prefix of the stored ones.
  int64_t num_elems() const {
    return std::clamp<int64_t>(parameter->shape.num_elems() - planned->first, 0,
                               planned->elems);
  }
};

// Elements of a parameter that are contiguous in this rank's memory.
struct StateRun {
  const Parameter* parameter;
  int64_t begin;       // the first, numbered within the parameter
  Tensor values;       // [1 .. ModelStates::kPieceElems], device memory
  SegmentRef segment;  // containing them,
  Segment place;       // and their range in the unit
  Tensor rest = {};    // lower bits of split masters; undefined: none
};

// The elements meant: all that a rank stores, or its own shard of every
// segment. The shards of a group's ranks cover each element of the model once.
enum class StatePart { kLocal, kShard };

struct StateOptions {
  DType param_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;
  absl::optional<DType> master_dtype;         // of the stored masters
  bool train = true;                          // false: only parameters
  bool stochastic_rounding = false;           // of masters to parameters
  bool delayed_updates = false;               // as in ExecutorOptions
  std::vector<std::string> optimizer_arrays;  // fp32, besides master weights
};

class ModelStates {
 public:
  // `plan` and `model` must outlive the states.
  ModelStates(const Plan& plan, int64_t rank, Model& model,
              const StateOptions& options);
  ~ModelStates();  // unbinds: the model outlives its memory

  // Takes the arrays, replacing earlier ones. `swapped` must outlive them; null
  // if no state is on a disk.
  void Take(const HomeArenas& arenas, SwappedStates* swapped = nullptr);
  // Binds replicated parameters for the whole run, and zeroes all arrays, since
  // padding must be 0.
  void Bind(Stream& stream);

  const FlatState& params() const { return params_; }
  // Backward's sums over micro-batches; the sums over all ranks if sharded.
  const FlatState& grads() const { return grads_; }
  FlatState& grads() { return grads_; }
  // Frees all gradients on the device: the step is done with them.
  void ReturnGradients();
  // The parameters that a unit's optimizer reads and writes: these two, or the
  // host's.
  const FlatState& updated_params(int unit) const {
    const bool in_place =
        plan_->FetchesParameters(unit) && params_are_ == Params::kEqual;
    return host_params_.HasUnit(unit) && !in_place ? host_params_ : params_;
  }
  const FlatState& reduced_grads(int unit) const {
    return host_grads_.HasUnit(unit) ? host_grads_ : grads_;
  }
  // Launches the copy of the device's parameters to the host's; to those on a
  // disk only with `to_disk`.
  void CopyToHost(Stream& stream, bool to_disk = true);

  // Whether params() equal the host's latest (updated_params). With delayed
  // updates they may not.
  enum class Params {
    kEqual,  // the host has the same, except units it updates in place
    kOlder,  // the host's are newer: during delayed steps
    kNewer,  // exchanged between two delayed steps, for readers
  };
  Params params_are() const { return params_are_; }
  void set_params_are(Params are) { params_are_ = are; }
  // Launches the exchange of params() with the host's, which is its own
  // inverse. REQUIRES: the host is not updating them.
  void Exchange(BatchUpload& upload, Stream& stream);
  // Gives the next step other memory for host gradients than the previous one,
  // whose update is still pending.
  void AlternateGradients();
  // Loads a segment of a state on a disk to where FlatState::Values points,
  // until the next call; `change`: for writing. `stream` is the one that reads
  // and writes it. Called between steps.
  void Hold(const SegmentRef& ref, bool change, Stream& stream) const {
    if (swapped_ != nullptr) swapped_->Hold(ref, change, stream);
  }
  void Settle(Stream& stream) const {
    if (swapped_ != nullptr) swapped_->Settle(stream);
  }
  // fp32, or uint16: the lower bits of masters whose upper bits are the
  // parameters (SplitMaster in kernels/rounding.h).
  const FlatState& master() const { return master_; }
  const std::vector<FlatState>& optimizer() const { return optimizer_; }

  // The values for files: the masters if there are any, unless parameters are
  // rounded stochastically: rounding the masters again would give other values
  // than the evaluated ones.
  struct Readable {
    const FlatState* values;
    const FlatState* rest = nullptr;  // of split masters; null: none
  };
  Readable readable(const SegmentRef& ref) const;

  const std::vector<std::unique_ptr<BoundParameter>>& unit(int u) const {
    return units_[u];
  }
  // All bound parameters, in plan order.
  std::vector<BoundParameter*> bound() const;

  // Binds a unit's values [padded elems], or the gradients [elems] of one of
  // its phases. Undefined: unbinds; a later read crashes at once.
  void BindValues(int unit, const Tensor& flat);
  void BindSinks(int unit, int phase, const Tensor& flat);

  // The states that outlive a step and that a later run needs.
  std::vector<const FlatState*> lasting() const;

  // The same states in a checkpoint's form, however masters are stored here.
  // "weight": in fp32 if there are masters, else the parameter. "rounded", with
  // stochastic rounding: the parameter. The optimizer's arrays. kStale, with
  // delayed updates: the previous update's parameter, which the next step
  // computes with; requires that params_are() is not kOlder.
  struct KeptState {
    std::string name;
    DType dtype;
    Readable from;
  };
  std::vector<KeptState> kept(const SegmentRef& ref) const;

  static constexpr char kStale[] = "stale_weight";
  bool keeps_stale() const { return options_.delayed_updates; }
  const FlatState& stale() const { return host_params_; }

  // The only way to values: calls `visit` for the runs of a part of a state, in
  // plan order, without padding. Readers and writers of values must hold their
  // segment.
  using VisitFn = std::function<void(const StateRun&)>;
  void ForEachRun(const FlatState& state, StatePart part,
                  const VisitFn& visit) const;
  // The same for elements `range` of a segment, given in `values` and, for
  // split masters, in `rest`.
  void ForEachRun(const SegmentRef& ref, const Segment& range,
                  const Tensor& values, const Tensor& rest,
                  const VisitFn& visit) const;
  const std::vector<SegmentRef>& segments() const { return segments_; }
  // Values pass in pieces of at most this many elements: the embedding may be
  // larger than the spare memory.
  static constexpr int64_t kPieceElems = int64_t{1} << 19;

  // Writes the fp32 values [begin, begin + count) of a parameter to `out`.
  using ValuesFn = std::function<void(const Parameter&, int64_t begin,
                                      int64_t count, float* out)>;
  // Launches writing `values` to a part of the parameters and master weights,
  // rounded to their dtypes, and zeroes the optimizer's arrays. `values` is
  // asked once for every element of the part; null: none. What is on a disk is
  // written once per segment: with the host's copies of the values, and with
  // what `add`, called while the segment is held, has written to it.
  using AddFn = std::function<void(const SegmentRef&)>;
  void Fill(StatePart part, const ValuesFn& values, BatchUpload& upload,
            Stream& stream, const AddFn& add = nullptr);

 private:
  // The gradients that the host's optimizer reads.
  FlatState& host_grads() { return plan_->AddsOnHost() ? grads_ : host_grads_; }
  void CopyToHost(const SegmentRef& ref, Stream& stream);
  Segment RangeOf(const FlatState& state, StatePart part,
                  const SegmentRef& ref) const;

  const Plan* plan_;
  int64_t rank_;
  StateOptions options_;
  std::vector<std::vector<std::unique_ptr<BoundParameter>>> units_;
  std::vector<SegmentRef> segments_;  // of all units, in plan order
  FlatState params_, grads_, master_;
  std::vector<FlatState> optimizer_;
  // The host's copy of this rank's part of the units that it updates, if the
  // device has one too.
  FlatState host_params_, host_grads_;
  FlatState other_grads_;  // of AlternateGradients
  Params params_are_ = Params::kEqual;
  SwappedStates* swapped_ = nullptr;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_MODEL_STATES_H_
