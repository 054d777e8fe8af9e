// Performs the schedule: one loop, one case per action.
//
// It has no case for a ZeRO stage: the plan and the schedule say what is
// gathered, reduced and updated where. It does not know why a step is taken,
// where data comes from or what is printed (engine/train).
// Order: all ranks make the same calls, in the same order.
// Start reading at Executor::Perform in executor.cc.
#ifndef ZERO_ENGINE_ZERO_EXECUTOR_H_
#define ZERO_ENGINE_ZERO_EXECUTOR_H_

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/autograd/context.h"
#include "engine/comm/rank.h"
#include "engine/nn/module.h"
#include "engine/tensor/arena.h"
#include "engine/zero/action_runner.h"
#include "engine/zero/batch_upload.h"
#include "engine/zero/model_states.h"
#include "engine/zero/options.h"
#include "engine/zero/plan.h"
#include "engine/zero/rank_numbers.h"
#include "engine/zero/state_access.h"
#include "engine/zero/step.h"
#include "engine/zero/step_clock.h"
#include "engine/zero/updater.h"
#include "engine/zero/wire.h"

namespace zero {

class Executor {
 public:
  // Reserves all memory of the run: states by `plan`, made for this model and
  // world, and the transient bytes that a rehearsal measured. `host_ledger`
  // counts the host's memory. Rank, model and ledgers must outlive the
  // executor.
  // Errors: ResourceExhausted, naming what did not fit.
  static absl::StatusOr<std::unique_ptr<Executor>> Make(
      const Rank& rank, Model& model, const Plan& plan,
      const ExecutorOptions& options, const TransientBytes& transient,
      MemoryLedger* ledger, MemoryLedger* host_ledger);
  ~Executor();

  // Takes one optimizer step over all micro-batches: Begin, then Finish.
  absl::StatusOr<StepOutput> Step(const StepInput& input);
  // Launches the step. An asynchronous device may still be running when this
  // returns, on copies of the micro-batches, whose memory may be reused. One
  // more step may begin after it (StepInput::inherits_skip), so that the device
  // never waits for the host to read results and launch kernels. Waits for a
  // device that is two micro-batches behind the host.
  // Errors: those of the communicators, here and below; the executor cannot be
  //         used after one. FailedPrecondition, on all ranks and before
  //         anything large moves, if their schedules differ.
  absl::Status Begin(const StepInput& input);
  // Waits until the device is done with the oldest unfinished step. All calls
  // except Begin require all steps to be finished.
  // Errors: those of the communicators up to then; an aborted collective leaves
  //         no valid result.
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

  // Parameters and the optimizer's arrays between steps: to fill, read, save
  // and hash. Later computation waits for work in flight. A delayed update is
  // finished first, here and before anything that reads parameters; the next
  // step still computes without it.
  // Order: then all ranks call it.
  StateAccess& states();

  // Parameters that no backward pass wrote in the last step begun; their
  // gradient counts as zero.
  std::vector<std::string> unused_parameters() const;
  const Plan& plan() const { return plan_; }
  const std::vector<Action>& schedule() const { return step_list_.actions; }
  // The times of the last finished step.
  const StepTimes& times() const { return times_; }
  // Numbers that ranks agree on between steps; times of waits and actions.
  RankNumbers& numbers() { return *numbers_; }
  StepClock& clock() { return *clock_; }

  TransientBytes high_water() const;
  // States on a disk; null: none.
  const SwappedStates* swapped() const { return swapped_.get(); }
  int64_t reserved_bytes() const;  // device memory of all arenas
  int64_t used_bytes() const;      // their peak so far
  // The part of the steps' arena that no block is in. The caller may overwrite
  // it until its next call to this executor. Waits for all streams: a
  // collective that has ended here is no longer read by other ranks either.
  absl::Span<char> UnusedMemory();
  std::array<Arena*, 2> arenas() const {
    return {persistent_.get(), transient_.get()};
  }
  const Arena* host_arena() const { return host_.get(); }  // null: none
  Arena& transient() { return *transient_; }

 private:
  struct UnitState;
  struct BegunStep;  // a step from Begin to Finish
  struct Sizing;

  Executor(const Rank& rank, Model& model, const Plan& plan,
           const ExecutorOptions& options);
  absl::Status Reserve(const TransientBytes& transient, MemoryLedger* ledger,
                       MemoryLedger* host_ledger);
  void MakeStreams(MemoryLedger* ledger);
  // Makes params() the newest ones, or those that the next step computes with.
  absl::Status FinishUpdates();
  absl::Status ArrangeParameters(bool delayed_update);
  absl::Status MakeStepList(const StepInput& input);
  Stream* StreamFor(StreamRole role) const {
    return streams_[static_cast<int>(role)].get();
  }
  void TakeStates(const HomeArenas& arenas);
  void TakeHostBuffers(Arena& arena);
  void Perform(const Action& action, const StepInput& input);
  void TakeParameterBuffer(int unit);
  void Fetch(const Action& action);
  void Gather(int unit);
  void LookUp(int table);
  void EndLookUp(int unit);
  void Release(int unit);
  Var WatchInput(int unit, Tensor input);
  void Forward(int unit);
  void ForwardBackwardHead(int unit);
  void Backward(int unit, int phase);
  void TakeGradientBuffers(int unit, int phase);
  TableRows EmptyRows(Arena& arena, int table, int64_t ranks) const;
  EmbeddingBackwardArgs RowsArgs(int table, const TableRows& rows) const;
  void TakeRows(int unit);
  void FinishRows(int unit);
  void AddRows(int table);
  void FinishGradients(int unit, int phase);
  void TakeSums();
  bool HasSmallSums() const;
  Tensor EmptySums(int unit, int phase) const;
  Wire::Sums PlaceSums(const Bucket& bucket, int64_t micro_step);
  void ReleaseGradients(int unit, int phase);
  void ReturnGradients();
  // Copies on the stream of `role`, slowed down to rank.host_link if that is
  // set.
  void Copy(StreamRole role, const Tensor& from, const Tensor& to);
  void Offload(const Action& action);
  void AddOffloaded(int bucket);
  void Upload(const Action& action);
  // The segments of an action on a unit, or on one segment of it.
  Segment SegmentsOf(const Action& action, int num, bool one) const;
  const Tensor& offloaded() const {
    return offloaded_[num_offloaded_ % offloaded_.size()];
  }
  StepScalars* scalars() const {
    return reinterpret_cast<StepScalars*>(scalars_.data());
  }
  template <typename Head>
  absl::Status RunUnits(Context& ctx, const HostBatch& batch, const Head& head);

  const Rank* rank_;
  Model* model_;
  const ExecutorOptions options_;
  const Plan plan_;
  std::unique_ptr<Stream> compute_;
  std::unique_ptr<Sizing> sizing_;     // outlives its arenas' tensors
  std::unique_ptr<Arena> persistent_;  // states
  std::unique_ptr<Arena> host_;       // states in the host's memory; null: none
  std::unique_ptr<Arena> transient_;  // memory that a step takes and returns
  std::unique_ptr<SwappedStates> swapped_;  // null: none is on a disk
  std::unique_ptr<ModelStates> states_;
  std::unique_ptr<BatchUpload> upload_;
  std::unique_ptr<StepClock> clock_;
  std::unique_ptr<RankNumbers> numbers_;
  std::unique_ptr<Wire> wire_;
  std::unique_ptr<StateAccess> access_;
  std::unique_ptr<Updater> updater_;
  std::unique_ptr<ActionRunner> runner_;
  std::unique_ptr<Context> context_;
  std::vector<UnitState> units_;
  ActionList step_list_, forward_list_;  // made when first used
  int64_t num_micro_steps_ = 0;          // of step_list_,
  bool delayed_update_ = false;          // and whether its update is
  Tensor scalars_;                       // StepScalars
  std::vector<BegunStep> steps_;         // two in turn
  size_t num_begun_ = 0, num_finished_ = 0;
  Tensor output_grad_;  // of the unit whose backward is next
  StepTimes times_;
  // A micro-step's addends to gradients on the host: two buckets in turn.
  std::array<Tensor, 2> offloaded_;
  size_t num_offloaded_ = 0;
  Tensor host_scratch_;
  // Streams by role, without kCompute; null: not used. They are the last
  // member: their queues finish before the memory above is freed.
  std::array<std::unique_ptr<Stream>, kNumStreamRoles> streams_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_EXECUTOR_H_
