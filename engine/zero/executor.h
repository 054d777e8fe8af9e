// Performs the schedule: one loop, one case per action.
//
// The executor owns the model states (flat buffers laid out by the plan), binds
// parameters and gradient sinks to them, drives the units forward and backward,
// starts collectives and calls the optimizer. It does not know why a step is
// taken, where data comes from or what is printed (engine/train), and it has
// no case for a ZeRO stage: what is gathered, reduced and updated where follows
// from the plan's placements and the schedule's actions.
// Streams: compute is the caller's; a collective starts when what it reads has
// been computed (an event), and computation waits for the events of what it
// needs. A buffer goes back to its arena only after that.
// Order: all ranks make the same calls, in the same order.
// Start reading at Executor::Step in executor.cc; executor_comm.cc has what is
// sent, executor_states.cc the states and their memory.
#ifndef ZERO_ENGINE_ZERO_EXECUTOR_H_
#define ZERO_ENGINE_ZERO_EXECUTOR_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/autograd/context.h"
#include "engine/comm/channel.h"
#include "engine/comm/rank.h"
#include "engine/nn/module.h"
#include "engine/tensor/arena.h"
#include "engine/zero/flat_state.h"
#include "engine/zero/plan.h"
#include "engine/zero/schedule.h"
#include "optim/optimizer.h"

namespace zero {

struct BoundParameter;  // a parameter and its place in the flat buffers

struct ExecutorOptions {
  // Changes results.
  DType param_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;    // gradients accumulate in it
  DType reduce_dtype = DType::kF32;  // and are sent, and rounded once, in it
  bool stochastic_rounding = false;  // of masters to 16-bit parameters
  OptimizerSpec optimizer;
  bool decay_all = false;   // weight decay on vectors too
  float max_grad_norm = 0;  // 0: no clipping
  // Changes memory and speed.
  StatePlacement placement;
  bool server = false;              // of PlanOptions
  bool segment_per_tensor = false;  // likewise
  int64_t reduce_bucket_elems = PlanOptions::kDefaultBucketElems;
  int64_t gather_bucket_elems = PlanOptions::kDefaultBucketElems;
  bool overlap = true;  // of communication with computation
  GatherPolicy gather;
  bool recompute = false;
  int64_t max_positions = 0;  // rotary tables reach this far
  bool train = true;          // false: no gradients, no optimizer state

  // `shards` ranks share the states, 0: all of them.
  PlanOptions plan_options(int world, int shards,
                           BulkAlgorithm algorithm) const {
    return {.world = world,
            .shards = shards,
            .server = server,
            .ring = algorithm == BulkAlgorithm::kRing,
            .placement = placement,
            .segment_per_tensor = segment_per_tensor,
            .reduce_bucket_elems = reduce_bucket_elems,
            .gather_bucket_elems = gather_bucket_elems};
  }
  ScheduleOptions schedule_options(int64_t micro_steps) const {
    return {.micro_steps = micro_steps,
            .overlap = overlap,
            .gather = gather,
            .tensor_norms = optimizer.needs_tensor_norms()};
  }
};

// One micro-batch in host memory. B rows of T tokens.
struct HostBatch {
  int64_t batch = 0;                    // B
  int64_t length = 0;                   // T
  const int32_t* tokens = nullptr;      // [B * T]
  const int32_t* targets = nullptr;     // [B * T]; < 0: ignored
  const int32_t* positions = nullptr;   // [B * T]
  const int64_t* sample_ids = nullptr;  // [B] global, keys of dropout
  // Of rows with several sequences; null: each is one (PackedSequences).
  const int32_t* offsets = nullptr;  // [B * T + 1]
  int64_t num_sequences = 0;
};

// What only the caller knows of a step.
struct StepInput {
  absl::Span<const HostBatch> micro_batches;
  int64_t num_valid_targets = 0;  // over the whole step and all ranks
  float lr = 0;
  float beta1 = -1;  // < 0: the optimizer's own (OneCycle cycles it)
  float loss_scale = 1;
  int64_t optimizer_step = 1;  // from 1; skipped steps do not count
  uint64_t dropout_key = 0;
  uint64_t rounding_key = 0;  // of (seed, step), for stochastic rounding
  // Of a step that begins before the results of the one before it are known:
  // where that one was skipped, this one is too, and has changed nothing.
  bool inherits_skip = false;
};

struct StepOutput {
  double loss = 0;       // mean over valid targets of all ranks
  double grad_norm = 0;  // before clipping, loss scale removed
  bool skipped = false;  // a gradient was not finite; nothing was updated
};

// Milliseconds of a step per kind of computation, for wall_clock_breakdown;
// what computation waited for other ranks is in them.
struct StepTimes {
  double forward_ms = 0, backward_ms = 0, optimizer_ms = 0;
};

// The name of one collective of every step, behind all its reductions.
inline constexpr char kStepCollective[] = "norm and loss";

// What a rehearsal on the meta device measures and a run reserves.
struct TransientBytes {
  int64_t activations = 0;  // and workspace
  int64_t rotating = 0;     // gathered parameters and gradients of units
  // The largest batch, or a piece of the weights, in host memory: twice.
  int64_t upload = 0;
};

// A named array of the model states as one rank holds it: of a unit the
// parameters, the master weights, or one array of the optimizer.
struct StateArray {
  std::string name;  // "block.0/parameters", "block.0/optimizer.1"
  Tensor values;     // device memory; what FlatState::Held says
};

class Executor {
 public:
  // Reserves all memory of the run: states by the plan, and the transient
  // bytes that a rehearsal measured. Rank, model and ledger must outlive the
  // executor. Errors: ResourceExhausted, naming what did not fit.
  static absl::StatusOr<std::unique_ptr<Executor>> Make(
      const Rank& rank, Model& model, const ExecutorOptions& options,
      const TransientBytes& transient, MemoryLedger* ledger);
  ~Executor();

  // Initial values: a pure function of (seed, parameter name, element).
  void Initialize(uint64_t seed);

  // Takes every parameter's fp32 values from `values(parameter, out)`, rounds
  // them to the parameter dtype and clears the optimizer state.
  void Load(const std::function<void(const Parameter&, float* out)>& values);

  // One optimizer step over all micro-batches: Begin, then Finish.
  absl::StatusOr<StepOutput> Step(const StepInput& input);
  // Launches the step. An asynchronous device may still be at work when this
  // returns, on copies of the micro-batches: their memory is free again. One
  // more step may begin behind it (StepInput::inherits_skip), so that the
  // device never waits for a host that reads results and launches kernels.
  // Waits for the device where the host would get more than two micro-batches
  // ahead of it.
  // Errors: those of the communicators, here and below; the executor can not
  //         be used after one. FailedPrecondition, on all ranks and before
  //         anything large moves, where their schedules differ.
  absl::Status Begin(const StepInput& input);
  // Waits until the device is done with the first step that was begun and is
  // not finished. All else but Begin wants all steps finished.
  // Errors: those of the communicators, until then: what a collective that was
  //         given up left behind is no result.
  absl::StatusOr<StepOutput> Finish();

  // Sum of the cross-entropy over the valid targets of this rank's batch;
  // changes no state. `losses` (may be null) receives one per token.
  absl::StatusOr<double> EvalLossSum(const HostBatch& batch,
                                     float* losses = nullptr);

  // Logits [V] fp32 of the last token of `batch` (B = 1), after appending its
  // tokens to `cache`; without a cache the tokens are the whole context.
  absl::Status LastLogits(const HostBatch& batch, KvCache* cache,
                          float* logits);
  KvCache MakeKvCache(int64_t capacity);
  int64_t logits_size() const { return model_->vocab_size(); }

  // fp32 values [begin, begin + count) of a parameter: the master copy where
  // there is one, unless parameters are rounded stochastically: rounding the
  // masters again would give other values than those that were evaluated.
  // Cheapest in plan order, where neighbours share what is gathered. `out` is
  // not touched on the meta device.
  absl::Status ReadParameter(const Parameter& parameter, int64_t begin,
                             int64_t count, float* out);
  // All of it.
  absl::Status ReadParameter(const Parameter& parameter, float* out) {
    return ReadParameter(parameter, 0, parameter.stored_shape.num_elems(), out);
  }

  // All that outlives a step and that a later run needs, in plan order; per
  // unit parameters, master weights, optimizer. A rank calls it alone.
  std::vector<StateArray> StateArrays();
  // Between host memory and (a slice of) such an array, in its dtype.
  void CopyOut(const Tensor& values, void* out);
  void CopyIn(const void* from, const Tensor& values);

  // The first parameter (in plan order) whose gradient is not finite on any
  // rank, or "".
  absl::StatusOr<std::string> FirstNonFiniteGradient();
  // The same of parameters that are trained (the master copy where there is
  // one).
  absl::StatusOr<std::string> FirstNonFiniteParameter();

  // Reduces a few numbers over the ranks, in place: StartAllReduce, then
  // FinishAllReduce.
  absl::Status AllReduce(const std::string& name, ReduceOp op,
                         absl::Span<double> values);
  // Behind what was launched so far, before what is launched later. One at a
  // time: another one takes the place of one that was not finished, once the
  // device is done with it.
  void StartAllReduce(const std::string& name, ReduceOp op,
                      absl::Span<const double> values);
  // Waits for as many numbers, and no step that began behind them.
  absl::Status FinishAllReduce(absl::Span<double> values);

  // Parameters that no backward pass wrote in the last step; their gradient
  // counts as zero.
  const std::vector<std::string>& unused_parameters() const { return unused_; }

  const Plan& plan() const { return plan_; }
  // The actions of the last step.
  const std::vector<Action>& schedule() const { return schedule_; }
  // Of the step that was finished last.
  const StepTimes& times() const { return times_; }
  // What computation has waited for other ranks since the executor was made,
  // between steps too.
  const WaitTimes& waited() const { return waited_; }
  // Whether a step is being taken.
  bool in_step() const { return context_->training; }
  // Called before and after every action: hooks at unit boundaries. Those of a
  // pass without gradients are outside of a step.
  using ActionHook = std::function<void(const Action&, bool done)>;
  void set_hook(ActionHook hook) { hook_ = std::move(hook); }
  using TimePoint = std::chrono::steady_clock::time_point;
  // Called after computation has waited for communication: of a unit's
  // parameters, of the bucket whose first unit it is, or of an agreement.
  using WaitHook = std::function<void(Channel, const std::string& name,
                                      TimePoint begin, TimePoint end)>;
  void set_wait_hook(WaitHook hook) { wait_hook_ = std::move(hook); }
  // Called with the time of every action on the device. It, times(), waited()
  // and the wait hook hear of an asynchronous device when the host has waited
  // for it: in Finish, and at the end of a pass without gradients.
  using TimeHook = std::function<void(const Action&, bool in_step,
                                      TimePoint begin, TimePoint end)>;
  void set_time_hook(TimeHook hook) { time_hook_ = std::move(hook); }

  TransientBytes high_water() const {
    return {activations_->high_water_bytes(), rotating_->high_water_bytes(),
            upload_bytes_};
  }
  // Bytes of the device that all arenas together hold.
  int64_t reserved_bytes() const {
    return states_->capacity_bytes() + activations_->capacity_bytes() +
           rotating_->capacity_bytes();
  }
  Arena& activations() { return *activations_; }
  Arena& rotating() { return *rotating_; }

 private:
  Executor(const Rank& rank, Model& model, const ExecutorOptions& options);
  int64_t ReduceStagingBytes() const;
  absl::Status Reserve(const TransientBytes& transient, MemoryLedger* ledger);
  void BindParameters();
  void BindValues(int unit, const Tensor& flat);
  void BindSinks(int unit, const Tensor& flat);
  absl::Status HoldRegistered();
  // Room for batches of `bytes`, where there is not.
  absl::Status ReserveUploads(int64_t bytes);
  void Upload(const HostBatch& batch, BatchView* view);
  void PerformTimed(const Action& action, const StepInput& input,
                    StepTimes* times);
  void Perform(const Action& action, const StepInput& input);
  void Gather(int unit);
  void Release(int unit);
  void AwaitParameters(int unit);
  void AwaitAllParameters();
  void Forward(int unit);
  void ForwardBackwardHead(int unit);
  void Backward(int unit);
  void TakeGradientBuffers(int unit);
  void FinishGradients(int unit);
  void Reduce(int bucket, int64_t micro_step);
  struct Conversion;
  void TakeSentGradients();
  void ConvertForReduce(std::vector<Conversion> conversions);
  void ReduceAcross(int bucket);
  struct ReducePart;
  void ReduceParts(Communicator& comm, const std::string& name,
                   const std::vector<ReducePart>& parts, bool all,
                   bool accumulate);
  void AwaitReduce(int bucket);
  void GatherUpdated(int bucket);
  // Starts bringing the owners' pieces (send) of whole segments (recv) to all.
  void GatherPieces(const std::string& name, DType dtype,
                    std::vector<CollectiveSegment> segments);
  // Other groups have the same pieces: those of the first one count where all
  // ranks add up what they have.
  bool CountsPieces() const { return rank_->rank() < plan_.pieces(); }
  void Norm(const StepInput& input);
  void ListUnused();
  void Moments(const StepInput& input);
  void Update(int unit, const StepInput& input);
  void ClearOptimizer();
  absl::StatusOr<std::string> FirstNonFinite(const FlatState& state,
                                             const char* name);
  // Launches the writing of a parameter whose elements [begin, begin + count)
  // `fill` computes. Its memory is free again when the next but one is asked
  // for. Elements that this rank does not hold may be left out.
  using FillFn = std::function<void(int64_t begin, int64_t count, float* out)>;
  void WriteInPieces(const BoundParameter& bound, const FillFn& fill);
  // The same of elements from `begin` on. REQUIRES: kernels of the device can
  // read `values`, and may until the stream is done.
  void WriteParameter(const BoundParameter& bound, int64_t begin,
                      absl::Span<const float> values);
  bool Holds(const BoundParameter& bound, int64_t begin, int64_t end) const;
  void DownloadAsF32(const Tensor& from, float* out);
  // What ReadParameter reads.
  const FlatState& readable() const {
    const bool masters = master_.defined() && !options_.stochastic_rounding;
    return masters ? master_ : params_;
  }
  absl::Status StageSegment(const SegmentRef& ref);
  // Copies from the device to host_numbers_, behind all computation, and waits
  // for that: where it is. At most host_numbers_.bytes().
  const void* ReadNumbers(const void* from, int64_t bytes);
  // Into the caller's memory, of any size. `to` is not touched on the meta
  // device.
  void ReadNumbers(const Tensor& from, float* to);
  template <typename T>
  T ReadScalar(const T* device_value);
  // Holds a new schedule against the other ranks'.
  absl::Status AgreeOnSchedule();
  // Makes `stream` wait for everything computed so far.
  void FollowCompute(Stream& stream);
  // Computation waits for what `name` brings on `channel`.
  void AwaitEvent(Event& event, Channel channel, const std::string& name);
  // Runs `work`, which makes computation wait, and counts that.
  template <typename Work>
  void Wait(Channel channel, const std::string& name, const Work& work);
  // Runs `work` and calls count(begin, end): when the compute stream was there.
  // On an asynchronous device ReadTimes does, at once for all.
  using CountFn = std::function<void(TimePoint begin, TimePoint end)>;
  template <typename Work>
  void Timed(const Work& work, CountFn count);
  std::unique_ptr<Event> MarkTime();
  // Work of an asynchronous device whose time is yet to be read.
  struct TimedWork {
    std::unique_ptr<Event> begin, end;
    CountFn count;
  };
  // Reads it, of work that is done when `last` is: for that it waits.
  void ReadTimes(Event& last, std::vector<TimedWork>* timed);
  // Of what runs through `hook_` and a profiler.
  template <typename Work>
  void Announced(const Action& action, const Work& work);
  // Reduces float64 numbers on the device over all ranks; computation waits.
  void ReduceNumbers(const std::string& name, ReduceOp op,
                     const Tensor& numbers);
  // Runs all units; the last is `head(input)`.
  template <typename Head>
  absl::Status RunUnits(Context& ctx, const Head& head);

  struct UnitState;
  struct UpdateView;
  struct Scalars;  // device scalars, in scalars_
  UpdateView View(int unit, const StepInput& input) const;

  const Rank* rank_;
  Device* device_;
  Model* model_;
  ExecutorOptions options_;
  Plan plan_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Arena> states_;       // persistent
  std::unique_ptr<Arena> activations_;  // activations, workspace, inputs
  std::unique_ptr<Arena> rotating_;     // what units hold for a while
  FlatState params_, grads_, master_;
  std::vector<FlatState> optimizer_states_;
  std::vector<Action> schedule_, forward_schedule_;  // made when first used
  int64_t scheduled_micro_steps_ = 0;
  Tensor scalars_;
  // Per (segment, shard) the sum of squares, then per rank the loss sum: what
  // ranks add up, in this order. Float64.
  Tensor sums_;
  // Two sums of squares of every part of a parameter (TensorPart), float64.
  Tensor tensor_norms_;
  int64_t num_tensor_parts_ = 0;
  // AllReduce's numbers, float64, and on the host.
  Tensor agreed_;
  Buffer host_agreed_;
  std::unique_ptr<Event> agreed_read_;
  std::vector<UnitState> units_;
  // One bucket of gradients as they are sent, where that is not as they are
  // accumulated; [elems of the largest bucket], from the first reduction of a
  // step to the last. Only work of the reduce stream touches it.
  Tensor sent_gradients_;
  std::vector<std::unique_ptr<Event>> reduced_;  // per reduce bucket
  // Likewise, where there are several groups.
  std::vector<std::unique_ptr<Event>> reduced_across_;
  std::vector<std::unique_ptr<Event>> updated_;  // per gather bucket
  std::unique_ptr<Event> computed_;
  std::unique_ptr<Context> context_;
  Tensor batch_memory_;
  // Where batches and weights are put together on the host: two in turn, so
  // that one is filled while the other is on its way.
  struct HostStaging {
    Buffer memory;
    std::unique_ptr<Event> sent;
  };
  std::array<HostStaging, 2> uploads_;
  size_t next_upload_ = 0;
  int64_t upload_bytes_ = 0;  // of each, at least
  Buffer host_numbers_;       // what ReadNumbers and AgreeOnSchedule read
  std::unique_ptr<Event> read_;
  std::vector<TimedWork> timed_;  // of no step yet
  std::vector<std::unique_ptr<Event>> idle_events_;
  // A step from Begin to Finish: two in turn.
  struct BegunStep {
    int64_t num_valid_targets = 0;
    Buffer scalars;               // Scalars on the host,
    std::unique_ptr<Event> read;  // when this is done
    StepTimes times;
    std::vector<TimedWork> timed;
  };
  std::array<BegunStep, 2> steps_;
  size_t num_begun_ = 0, num_finished_ = 0;
  Tensor output_grad_;  // of the unit whose backward comes next
  Tensor staging_;      // of reductions that need memory of their own
  Tensor staged_;       // a whole segment of a sharded state, gathered to read
  SegmentRef staged_ref_;
  std::vector<std::string> unused_;
  StepTimes times_;
  WaitTimes waited_;
  ActionHook hook_;
  WaitHook wait_hook_;
  TimeHook time_hook_;
  // Last: they finish what is queued before the memory above goes.
  std::unique_ptr<Stream> gather_stream_, reduce_stream_;
};

// The plan's view of a model.
std::vector<UnitSpec> DescribeUnits(const Model& model);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_EXECUTOR_H_
