#include "engine/zero/executor.h"

#include <algorithm>
#include <utility>

#include "engine/base/exceptions.h"
#include "engine/base/hash.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {

struct Executor::UnitState {
  Unit* unit = nullptr;       // null: a table, which computes nothing
  std::vector<Segment> gaps;  // no gradient is ever written here
  // Between forward and backward of one micro-batch:
  Tensor input;  // the previous unit's output
  Tape tape;
  int input_slot = -1, output_slot = -1;
  // Sharded parameters, while gathered: [padded elems].
  Tensor gathered;
  Lookup lookup;  // of a table, until its unit has run
  // The gradients of a unit, by phase.
  struct Gradients {
    // [elems of the phase], from the first backward that writes one: replicated
    // gradients until the end of the step, sharded ones until they are reduced.
    Tensor flat;
    bool finished = false;  // they are complete, unwritten ones zero
  };
  std::vector<Gradients> gradients;
  // The rows of a table: this rank's from the first backward of a step on, and
  // all ranks' at its end.
  TableRows own_rows, all_rows;
  int64_t num_rows = 0;
  TableRows host_rows;  // of all ranks, if the host adds them
};

struct Executor::BegunStep {
  int64_t num_valid_targets = 0;
  Buffer scalars;               // StepScalars on the host,
  std::unique_ptr<Event> read;  // when this is done
  StepTimes times;
  std::vector<StepClock::TimedWork> timed;
};

// Measures the size of the states.
struct Executor::Sizing {
  std::unique_ptr<Device> meta;
  std::array<MemoryLedger, kNumMemories> ledgers;
  std::array<std::unique_ptr<Arena>, kNumMemories> arenas;
};

// ---- Making and ending ------------------------------------------------------

Executor::Executor(const Rank& rank, Model& model, const Plan& plan,
                   const ExecutorOptions& options)
    : rank_(&rank), model_(&model), options_(options), plan_(plan) {
  ZERO_CHECK_GE(plan_.num_computing, 2);
  ZERO_CHECK(plan.world == rank.world() && plan.shard.size == rank.shards())
      << "the plan is of other ranks";
  ZERO_CHECK(plan.world == 1 || plan.parameters.dtype == options.param_dtype)
      << "parameters travel as they lie";
}

Executor::~Executor() {
  // Nothing may use the memory that is freed. A failed device reports its
  // failure again.
  const auto finish = [](Stream* stream) {
    if (stream == nullptr) return;
    CatchExceptions([&] {
      stream->Synchronize();
      return absl::OkStatus();
    }).IgnoreError();
  };
  for (const auto& stream : streams_) finish(stream.get());
  finish(compute_.get());
  model_->DropTables();
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Make(
    const Rank& rank, Model& model, const Plan& plan,
    const ExecutorOptions& options, const TransientBytes& transient,
    MemoryLedger* ledger, MemoryLedger* host_ledger) {
  std::unique_ptr<Executor> executor(new Executor(rank, model, plan, options));
  ZERO_RETURN_IF_ERROR(executor->Reserve(transient, ledger, host_ledger));
  return executor;
}

// Takes all permanent memory, in the same order as on the meta device, where
// its size is measured.
void Executor::TakeStates(const HomeArenas& arenas) {
  Arena& arena = *arenas[static_cast<int>(Home::kDevice)];
  if (swapped_ != nullptr) {
    swapped_->Take(*arenas[static_cast<int>(Home::kHost)]);
  }
  states_->Take(arenas, swapped_.get());
  numbers_->Take(arena);
  scalars_ = Tensor::Empty(arena, {static_cast<int64_t>(sizeof(StepScalars))},
                           DType::kU8, MemoryCategory::kInputs);
  if (!options_.train) return;
  updater_->Take(arenas);
  wire_->TakeStaging(arena);
  if (plan_.UpdatesOnHost()) {
    TakeHostBuffers(*arenas[static_cast<int>(Home::kHost)]);
  }
}

// Takes buffers for gradients on their way to the host's sums.
void Executor::TakeHostBuffers(Arena& arena) {
  const auto empty = [&](int64_t elems, DType dtype) {
    return Tensor::Empty(arena, {elems}, dtype, MemoryCategory::kReduceBuffers);
  };
  int64_t elems = 0;
  for (const Bucket& bucket : plan_.reduce_buckets) {
    if (bucket.is_rows() || !plan_.Offloads(bucket)) continue;
    elems = std::max(elems, bucket.elems);
  }
  if (plan_.AddsOnHost()) {
    for (Tensor& offloaded : offloaded_) {
      offloaded = empty(plan_.owners.OwnedElems(elems, rank_->rank()),
                        options_.grad_dtype);
    }
  }
  int64_t scratch = 0;
  for (size_t t = plan_.num_computing; t < units_.size(); ++t) {
    const PlannedUnit& table = plan_.units[t];
    if (table.rows == 0 || !plan_.UpdatesOnHost(t)) continue;
    if (table.part.number == 0) {
      units_[t].host_rows = EmptyRows(arena, t, plan_.world);
    }
    scratch = std::max<int64_t>(
        scratch, rank_->device->host().ops().EmbeddingBackwardWorkspaceBytes(
                     RowsArgs(t, units_[t - table.part.number].host_rows)));
  }
  if (scratch > 0) host_scratch_ = empty(scratch, DType::kU8);
}

void Executor::MakeStreams(MemoryLedger* ledger) {
  const auto make = [&](StreamRole role) {
    ledger->AddConstant(MemoryCategory::kFixed,
                        rank_->device->stream_bytes(role));
    return rank_->device->MakeStream(role);
  };
  const auto add = [&](StreamRole role) {
    streams_[static_cast<int>(role)] = make(role);
  };
  compute_ = make(StreamRole::kCompute);
  if (plan_.world > 1) {
    add(StreamRole::kGather);
    add(StreamRole::kReduce);
  }
  const bool host_updates = options_.train && plan_.UpdatesOnHost();
  if (host_updates || plan_.FetchesParameters()) add(StreamRole::kUp);
  if (swapped_ != nullptr) {
    add(StreamRole::kRead);
    add(StreamRole::kWrite);
  }
  if (host_updates) {
    add(StreamRole::kDown);
    add(StreamRole::kHost);
  }
}

absl::Status Executor::Reserve(const TransientBytes& transient,
                               MemoryLedger* ledger,
                               MemoryLedger* host_ledger) {
  const auto make_arena = [&](int64_t bytes, const char* name) {
    return Arena::Make(*rank_->device, MemoryKind::kDevice, bytes, name,
                       ledger);
  };
  const bool swaps =
      options_.train ? plan_.UsesDisk() : plan_.ReadsParameters();
  if (swaps) {
    swapped_ = std::make_unique<SwappedStates>(*rank_, plan_, options_);
  }
  MakeStreams(ledger);
  Stream* const gather = StreamFor(StreamRole::kGather);
  Stream* const reduce = StreamFor(StreamRole::kReduce);
  units_.resize(plan_.units.size());
  const absl::Span<const char* const> arrays =
      options_.train ? options_.optimizer.StateNames()
                     : absl::Span<const char* const>();
  states_ = std::make_unique<ModelStates>(
      plan_, rank_->rank(), *model_,
      StateOptions{.param_dtype = options_.param_dtype,
                   .grad_dtype = options_.grad_dtype,
                   .master_dtype = options_.master_dtype(),
                   .train = options_.train,
                   .stochastic_rounding = options_.stochastic_rounding,
                   .delayed_updates = options_.delayed_updates,
                   .optimizer_arrays = {arrays.begin(), arrays.end()}});
  upload_ = std::make_unique<BatchUpload>(*rank_->device, *compute_);
  clock_ = std::make_unique<StepClock>(*rank_->device, *compute_, plan_);
  numbers_ = std::make_unique<RankNumbers>(*rank_, *compute_, *clock_);
  wire_ = std::make_unique<Wire>(*rank_, plan_, options_.grad_dtype, gather,
                                 reduce);
  updater_ =
      std::make_unique<Updater>(*rank_, plan_, *states_, *numbers_, *compute_,
                                StreamFor(StreamRole::kHost), options_);
  RankStreams streams = {compute_.get()};
  for (int role = 1; role < kNumStreamRoles; ++role) {
    streams[role] = streams_[role].get();
  }
  runner_ = std::make_unique<ActionRunner>(*rank_, plan_, *clock_, streams);
  // The states' size is measured on the meta device.
  sizing_ = std::make_unique<Sizing>();
  sizing_->meta = MakeMetaDevice(*rank_->device);
  HomeArenas sizing;
  for (int home = 0; home < kNumMemories; ++home) {
    ZERO_ASSIGN_OR_RETURN(
        sizing_->arenas[home],
        Arena::Make(*sizing_->meta, MemoryKind::kDevice, int64_t{1} << 50,
                    "model states", &sizing_->ledgers[home]));
    sizing[home] = sizing_->arenas[home].get();
  }
  TakeStates(sizing);
  const int64_t state_bytes = sizing[0]->high_water_bytes() +
                              model_->TableBytes(options_.max_positions);
  ZERO_ASSIGN_OR_RETURN(persistent_, make_arena(state_bytes, "model states"));
  if (const int64_t bytes = sizing[1]->high_water_bytes(); bytes > 0) {
    ZERO_ASSIGN_OR_RETURN(host_,
                          Arena::Make(*rank_->device, MemoryKind::kHost, bytes,
                                      "model states of the host", host_ledger));
  }
  ZERO_ASSIGN_OR_RETURN(
      transient_,
      make_arena(transient.device, "activations, workspace and buffers"));
  access_ = std::make_unique<StateAccess>(*rank_, plan_, *states_, *upload_,
                                          *wire_, *numbers_, *transient_,
                                          *compute_, gather, reduce);
  for (Arena* arena : arenas()) arena->Touch();
  ZERO_RETURN_IF_ERROR(wire_->Register({persistent_.get(), transient_.get()}));
  TakeStates({persistent_.get(), host_.get()});
  sizing_.reset();
  model_->Prepare(*persistent_, *compute_, options_.max_positions);
  // The largest reads are the hashes that ranks compare, or logits.
  ZERO_RETURN_IF_ERROR(numbers_->Reserve(
      std::max(plan_.world * static_cast<int64_t>(HashOf("").size()),
               model_->vocab_size() * static_cast<int64_t>(sizeof(float)))));
  if (swapped_ != nullptr) {
    swapped_->RemoveStale();
    ZERO_RETURN_IF_ERROR(numbers_->Meet("stale files are removed"));
    ZERO_RETURN_IF_ERROR(swapped_->Open());
  }
  ZERO_RETURN_IF_ERROR(upload_->Reserve(std::max<int64_t>(
      transient.upload, ModelStates::kPieceElems * sizeof(float))));
  steps_.resize(2);
  for (BegunStep& step : steps_) {
    ZERO_ASSIGN_OR_RETURN(
        step.scalars,
        rank_->device->Allocate(sizeof(StepScalars), MemoryKind::kHost));
    step.read = rank_->device->MakeEvent();
  }
  context_ = std::make_unique<Context>(*rank_->device, *compute_, *transient_);
  context_->recompute = options_.recompute;
  context_->max_kept_logits_bytes = MaxKeptLogitsBytes(plan_, options_);
  states_->Bind(*compute_);
  // The threads that update the host's states touched those first, in Bind;
  // this touches the rest of the host's memory.
  if (host_ != nullptr) host_->Touch();
  for (size_t u = 0; u < units_.size(); ++u) {
    if (static_cast<int>(u) < plan_.num_computing) {
      units_[u].unit = model_->units()[plan_.units[u].model_unit].get();
    }
    units_[u].gaps = GapsOf(plan_.units[u]);
    units_[u].gradients.resize(plan_.units[u].phases.size());
  }
  return absl::OkStatus();
}

std::vector<std::string> Executor::unused_parameters() const {
  std::vector<std::string> unused;
  for (const BoundParameter* bound : states_->bound()) {
    if (bound->parameter->frozen || bound->used) continue;
    if (bound->planned->first > 0) continue;  // like its first part
    unused.push_back(bound->parameter->name);
  }
  return unused;
}

TransientBytes Executor::high_water() const {
  return {transient_->high_water_bytes(), upload_->bytes()};
}

int64_t Executor::reserved_bytes() const {
  int64_t bytes = 0;
  for (const Arena* arena : arenas()) bytes += arena->capacity_bytes();
  return bytes;
}

int64_t Executor::used_bytes() const {
  int64_t bytes = 0;
  for (const Arena* arena : arenas()) bytes += arena->high_water_bytes();
  return bytes;
}

absl::StatusOr<StepOutput> Executor::Step(const StepInput& input) {
  ZERO_RETURN_IF_ERROR(Begin(input));
  return Finish();
}

absl::Status Executor::Begin(const StepInput& input) {
  ZERO_CHECK(options_.train);
  states_->Settle(*compute_);
  ZERO_RETURN_IF_ERROR(upload_->Reserve(input.micro_batches));
  ZERO_CHECK_LT(num_begun_ - num_finished_, steps_.size()) << "not finished";
  ReturnGradients();  // of a step that is not finished
  ZERO_RETURN_IF_ERROR(ArrangeParameters(input.delayed_update));
  BegunStep& step = steps_[num_begun_ % steps_.size()];
  step.times = {};
  step.num_valid_targets = std::max<int64_t>(input.num_valid_targets, 1);
  StepScalars* scalars = this->scalars();
  const float seed = static_cast<float>(
      input.loss_scale / static_cast<double>(step.num_valid_targets));
  Ops& ops = rank_->device->ops();
  ops.Fill(*compute_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
  ops.Fill(*compute_, {{&scalars->seed, DType::kF32, 1}, seed});
  for (UnitState& unit : units_) {
    for (auto& gradients : unit.gradients) gradients.finished = false;
    unit.num_rows = 0;
  }
  for (BoundParameter* bound : states_->bound()) {
    bound->sink.written = false;
    bound->used = false;
  }
  ZERO_RETURN_IF_ERROR(MakeStepList(input));
  TakeSums();
  context_->training = true;
  context_->dropout_key = input.dropout_key;
  const absl::Status status =
      runner_->Run(step_list_, /*in_step=*/true, &step.times,
                   [&](const Action& action) { Perform(action, input); });
  context_->training = false;
  ZERO_RETURN_IF_ERROR(status);
  upload_->Drop();
  rank_->device->Copy(*compute_, step.scalars.data(), scalars_.data(),
                      sizeof(StepScalars));
  compute_->Record(*step.read);
  step.timed = clock_->Take();
  ++num_begun_;
  return absl::OkStatus();
}

absl::Status Executor::MakeStepList(const StepInput& input) {
  const auto micro_steps = static_cast<int64_t>(input.micro_batches.size());
  if (num_micro_steps_ == micro_steps &&
      delayed_update_ == input.delayed_update) {
    return absl::OkStatus();
  }
  runner_->Leave();
  num_micro_steps_ = micro_steps;
  delayed_update_ = input.delayed_update;
  step_list_ = runner_->MakeList(MakeSchedule(
      plan_, options_.schedule_options(micro_steps, delayed_update_)));
  return numbers_->CheckSchedule(ScheduleHash(plan_, step_list_.actions),
                                 *transient_);
}

absl::Status Executor::FinishUpdates() {
  if (states_->params_are() != ModelStates::Params::kOlder ||
      !rank_->status().ok()) {
    return rank_->status();
  }
  runner_->Leave();
  StreamFor(StreamRole::kHost)->Synchronize();
  return access_->Exchange();
}

absl::Status Executor::ArrangeParameters(bool delayed_update) {
  using Params = ModelStates::Params;
  ZERO_CHECK(options_.delayed_updates || !delayed_update);
  if (!options_.delayed_updates) return absl::OkStatus();
  if (!delayed_update) {
    ZERO_RETURN_IF_ERROR(FinishUpdates());
    if (states_->params_are() == Params::kNewer) {
      states_->CopyToHost(*compute_);
    }
    return absl::OkStatus();
  }
  states_->AlternateGradients();
  if (states_->params_are() == Params::kNewer) {
    runner_->Leave();
    return access_->Exchange();
  }
  if (states_->params_are() == Params::kEqual) {
    runner_->Leave();
    states_->CopyToHost(*compute_);
    states_->set_params_are(Params::kOlder);
  }
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> Executor::Finish() {
  ZERO_CHECK_LT(num_finished_, num_begun_);
  BegunStep& step = steps_[num_finished_++ % steps_.size()];
  const bool last = num_finished_ == num_begun_;
  if (rank_->device->kind() == DeviceKind::kMeta) {
    if (last) ReturnGradients();
    return StepOutput();
  }
  clock_->Read(*step.read, std::exchange(step.timed, {}));
  times_ = step.times;
  ZERO_RETURN_IF_ERROR(rank_->status());
  const auto& scalars = *static_cast<const StepScalars*>(step.scalars.data());
  StepOutput output{
      .loss = scalars.global_loss / static_cast<double>(step.num_valid_targets),
      .grad_norm = scalars.norm,
      .skipped = scalars.found_non_finite != 0};
  if (!last) return output;
  if (output.skipped) {
    // The numbers are read after pending work of the host and a disk.
    ZERO_ASSIGN_OR_RETURN(output.non_finite, states().FirstNonFiniteGradient());
  }
  ReturnGradients();
  return output;
}

void Executor::ReturnGradients() {
  for (UnitState& unit : units_) {
    for (auto& gradients : unit.gradients) gradients.flat = Tensor();
  }
  if (options_.train) states_->ReturnGradients();
}

void Executor::Perform(const Action& action, const StepInput& input) {
  const int i = action.index;
  const SegmentRef ref{i, action.phase};
  switch (action.kind) {
    case ActionKind::kLoadBatch:
      return upload_->Load(input.micro_batches[action.micro_step], *transient_);
    case ActionKind::kLookUp:
      return LookUp(i);
    case ActionKind::kForward:
      return Forward(i);
    case ActionKind::kForwardBackward:
    case ActionKind::kBackward:
      TakeGradientBuffers(i, action.phase);
      TakeRows(i);
      action.kind == ActionKind::kBackward ? Backward(i, action.phase)
                                           : ForwardBackwardHead(i);
      FinishRows(i);
      // Replicated gradients add up over micro-steps.
      if (plan_.shards_gradients() ||
          action.micro_step + 1 == num_micro_steps_) {
        FinishGradients(i, action.phase);
      }
      return;
    case ActionKind::kFetch:
      return Fetch(action);
    case ActionKind::kReadParameters:
      return StreamFor(StreamRole::kRead)->Enqueue([this, ref] {
        swapped_->ReadParameters(ref);
      });
    case ActionKind::kReadStates:
      return StreamFor(StreamRole::kRead)->Enqueue([this, ref] {
        swapped_->Read(ref);
      });
    case ActionKind::kWriteStates:
      return StreamFor(StreamRole::kWrite)->Enqueue([this, ref] {
        swapped_->Write(ref);
      });
    case ActionKind::kGather:
      return Gather(i);
    case ActionKind::kRelease:
      return Release(i);
    case ActionKind::kReduce: {
      const Bucket& bucket = plan_.reduce_buckets[i];
      UnitState& state = units_[bucket.unit];
      if (bucket.is_rows()) {
        state.all_rows = EmptyRows(*transient_, bucket.unit, plan_.world);
        // If a gather fails, missing tokens must still be valid ids.
        rank_->device->ops().Fill(*StreamFor(StreamRole::kReduce),
                                  {state.all_rows.ids.vector(), 0});
        return wire_->GatherRows(i, state.own_rows, state.all_rows);
      }
      const Wire::Sums sums = PlaceSums(bucket, action.micro_step);
      return wire_->Reduce(i, state.gradients[bucket.phase].flat,
                           states_->grads(), sums, *transient_);
    }
    case ActionKind::kReduceAcross: {
      const Bucket& bucket = plan_.reduce_buckets[i];
      if (bucket.is_rows()) {
        return wire_->GatherRowsAcross(i, units_[bucket.unit].all_rows);
      }
      return wire_->ReduceAcross(i, states_->grads(), *transient_);
    }
    case ActionKind::kOffload:
      return Offload(action);
    case ActionKind::kAddOffloaded:
      return AddOffloaded(i);
    case ActionKind::kReleaseGradients:
      return ReleaseGradients(i, action.phase);
    case ActionKind::kAddRows:
      return AddRows(i);
    case ActionKind::kSumSquares:
      return updater_->SumSquares(i);
    case ActionKind::kNorm:
      wire_->EndReductions();
      for (UnitState& unit : units_) unit.own_rows = unit.all_rows = {};
      return updater_->Norm(input, scalars());
    case ActionKind::kMoments:
      return updater_->Moments(i, action.phase, input);
    case ActionKind::kTensorNorms:
      return updater_->TensorNorms();
    case ActionKind::kUpdate:
      return updater_->Update(i, action.phase, input);
    case ActionKind::kUpload:
      return Upload(action);
    case ActionKind::kGatherUpdated:
      return wire_->GatherUpdated(i, states_->params());
  }
}

// ---- Forward and backward ---------------------------------------------------

void Executor::TakeParameterBuffer(int unit) {
  UnitState& state = units_[unit];
  const PlannedUnit& planned = plan_.units[unit];
  ZERO_CHECK(!state.gathered.defined()) << planned.name;
  state.gathered =
      Tensor::Empty(*transient_, {planned.padded_elems}, options_.param_dtype,
                    MemoryCategory::kGatheredParameters);
  states_->BindValues(unit, state.gathered);
}

Segment Executor::SegmentsOf(const Action& action, int num, bool one) const {
  return one ? Segment{action.phase, 1} : Segment{0, num};
}

void Executor::Fetch(const Action& action) {
  const int unit = action.index;
  const bool reads = plan_.ReadsParameters(unit);
  const PlannedUnit& planned = plan_.units[unit];
  if (action.phase == 0) TakeParameterBuffer(unit);
  const Segment segments = SegmentsOf(
      action, static_cast<int>(planned.segments.size()), /*one=*/reads);
  for (int s = segments.begin; s < segments.end(); ++s) {
    const Segment shard = plan_.Shard(planned.segments[s], rank_->rank());
    const Tensor to = units_[unit].gathered.Slice(shard.begin, {shard.elems});
    const SegmentRef ref{unit, s};
    Copy(StreamRole::kUp,
         reads ? swapped_->Fetched(ref) : states_->params().Shard(ref), to);
  }
}

void Executor::Gather(int unit) {
  if (!plan_.FetchesParameters(unit)) TakeParameterBuffer(unit);
  wire_->GatherUnit(unit, states_->params(), units_[unit].gathered);
}

void Executor::LookUp(int table) {
  Lookup& lookup = units_[table].lookup;
  lookup =
      wire_->LookUp(table, states_->params(), upload_->next(), *transient_);
  for (int part = 0; part < plan_.units[table].part.count; ++part) {
    states_->unit(table + part)[0]->weight->rows = lookup.rows;
  }
}

// Frees the rows that this unit has used; a table in parts has more units.
void Executor::EndLookUp(int unit) {
  for (size_t t = plan_.num_computing; t < units_.size(); ++t) {
    const PlannedUnit& table = plan_.units[t];
    if (table.owner != unit) continue;
    states_->unit(t)[0]->weight->rows = Tensor();
    if (table.part.number + 1 == table.part.count) {
      units_[t - table.part.number].lookup = {};
    }
  }
}

void Executor::Release(int unit) {
  states_->BindValues(unit, Tensor());
  units_[unit].gathered = Tensor();
}

// Units before the first trained one need no gradient.
Var Executor::WatchInput(int unit, Tensor input) {
  return unit > plan_.first_trained ? units_[unit].tape.Watch(std::move(input))
                                    : Var(std::move(input));
}

void Executor::Forward(int unit) {
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  if (unit == 0) ctx.batch = upload_->Use();
  ctx.part = plan_.units[unit].part.number;
  Tensor input = std::exchange(state.input, Tensor());
  ctx.tape = &state.tape;
  const Var in = WatchInput(unit, std::move(input));
  state.input_slot = in.slot;
  Var out = state.unit->Forward(ctx, in);
  EndLookUp(unit);
  state.output_slot = out.slot;
  units_[unit + 1].input = std::move(out.value);
}

void Executor::ForwardBackwardHead(int unit) {
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  StepScalars* scalars = this->scalars();
  ctx.batch.loss_sum = &scalars->loss_sum;
  ctx.batch.grad_scale = &scalars->seed;
  ctx.tape = &state.tape;
  ctx.part = plan_.units[unit].part.number;
  int slot;
  {
    const Var in = WatchInput(unit, std::exchange(state.input, Tensor()));
    slot = in.slot;
    state.unit->Forward(ctx, in);
  }
  state.tape.Backward(ctx);
  output_grad_ = state.tape.Take(slot);
  state.tape = Tape();
}

void Executor::Backward(int unit, int phase) {
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  ctx.tape = &state.tape;
  if (phase == 0) {
    state.tape.Accumulate(ctx, state.output_slot,
                          std::exchange(output_grad_, Tensor()));
  }
  state.tape.Backward(ctx, phase);
  if (phase + 1 < static_cast<int>(state.gradients.size())) return;
  output_grad_ = state.tape.Take(state.input_slot);
  state.tape = Tape();
}

// Takes memory for the gradients that this unit's backward writes: its own in
// this phase, and those of borrowed parameters. If replicated, it is the state
// itself, until the step ends.
void Executor::TakeGradientBuffers(int unit, int phase) {
  const bool rotates = plan_.shards_gradients();
  for (int u : plan_.units[unit].writes) {
    const PlannedUnit& planned = plan_.units[u];
    if (planned.trained_elems == 0) continue;
    const Segment& range = planned.phases[phase];
    auto& [flat, finished] = units_[u].gradients[phase];
    if (flat.defined()) {
      ZERO_CHECK(!finished) << planned.name << " is being reduced";
      continue;
    }
    flat = Tensor::Empty(
        *transient_, {range.elems}, options_.grad_dtype,
        rotates ? MemoryCategory::kReduceBuffers : MemoryCategory::kGradients);
    if (!rotates) states_->grads().Lend(u, phase, flat);
    for (const Segment& gap : units_[u].gaps) {
      if (gap.begin < range.begin || gap.begin >= range.end()) continue;
      const Tensor zeros = flat.Slice(gap.begin - range.begin, {gap.elems});
      rank_->device->ops().Fill(*compute_, {zeros.vector(), 0});
    }
    for (auto& bound : states_->unit(u)) {
      if (bound->planned->phase == phase) bound->sink.written = false;
    }
    finished = false;
    states_->BindSinks(u, phase, flat);
  }
}

// Finishes the gradients that this unit's backward completes. One that no
// backward pass wrote is zero.
void Executor::FinishGradients(int unit, int phase) {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (plan_.units[u].completed_by != unit) continue;
    if (plan_.units[u].trained_elems == 0) continue;
    if (std::exchange(units_[u].gradients[phase].finished, true)) continue;
    for (auto& bound : states_->unit(u)) {
      if (bound->parameter->frozen || bound->planned->phase != phase) continue;
      if (bound->sink.written) {
        bound->used = true;
      } else {
        rank_->device->ops().Fill(*compute_, {bound->sink.grad.vector(), 0});
      }
    }
  }
}

// ---- Rows of tables ---------------------------------------------------------

TableRows Executor::EmptyRows(Arena& arena, int table, int64_t ranks) const {
  const PlannedUnit& planned = plan_.units[table];
  const int64_t n = ranks * planned.rows;
  const auto empty = [&](const Shape& shape, DType dtype) {
    return Tensor::Empty(arena, shape, dtype, MemoryCategory::kReduceBuffers);
  };
  return {empty({n}, DType::kI32), empty({n, planned.width}, plan_.rows.dtype)};
}

// Takes memory for the rows that this unit's backward adds to its tables.
void Executor::TakeRows(int unit) {
  for (size_t t = plan_.num_computing; t < units_.size(); ++t) {
    const PlannedUnit& planned = plan_.units[t];
    if (planned.owner != unit || planned.rows == 0 || planned.part.number > 0) {
      continue;
    }
    UnitState& state = units_[t];
    if (!state.own_rows.rows.defined()) {
      state.own_rows = EmptyRows(*transient_, t, 1);
    }
    const BatchView& batch = context_->batch;
    const int64_t n = batch.num_tokens();
    ZERO_CHECK_GE(planned.rows - state.num_rows, n)
        << "the plan is of " << planned.rows << " tokens in a step";
    rank_->device->Copy(*compute_,
                        state.own_rows.ids.Slice(state.num_rows, {n}).data(),
                        batch.tokens, n * sizeof(int32_t));
    states_->unit(t)[0]->sink.rows = state.own_rows.rows.Slice(
        state.num_rows * planned.width, {n, planned.width});
    state.num_rows += n;
  }
}

void Executor::FinishRows(int unit) {
  for (size_t t = plan_.num_computing; t < units_.size(); ++t) {
    BoundParameter& table = *states_->unit(t)[0];
    if (plan_.units[t].owner != unit || !table.sink.rows.defined()) continue;
    if (std::exchange(table.sink.has_rows, false)) {
      table.used = true;
    } else {
      rank_->device->ops().Fill(*compute_, {table.sink.rows.vector(), 0});
    }
    table.sink.rows = Tensor();
  }
}

// Adds all rows to the reduced gradient stored here.
EmbeddingBackwardArgs Executor::RowsArgs(int table,
                                         const TableRows& rows) const {
  const PlannedUnit& planned = plan_.units[table];
  const FlatState& grads = states_->reduced_grads(table);
  const Tensor grad = grads.Local(table);
  const Shape& shape = planned.parameters[0].spec.shape;
  EmbeddingBackwardArgs args{
      .ids = rows.ids.As<int32_t>(),
      .dout = rows.rows.matrix(),
      .dtable = {grad.data(), grad.dtype(), shape[0], shape[1], shape[1]},
      .accumulate = true};
  if (grads.sharded() || planned.part.count > 1) {
    args.pieces = grads.PiecesOf(table);
  }
  return args;
}

// Adds all rows, in order. A table in parts has them at its first part.
void Executor::AddRows(int table) {
  const PlannedUnit& planned = plan_.units[table];
  UnitState& state = units_[table - planned.part.number];
  ZERO_CHECK_EQ(state.num_rows, planned.rows)
      << "the plan is of another number of tokens in a step";
  const bool on_host = plan_.UpdatesOnHost(table);
  if (FlatState& grads = states_->grads();
      !on_host && !grads.Lent(table, 0).defined()) {
    grads.Lend(table, 0, EmptySums(table, 0));
  }
  const EmbeddingBackwardArgs args =
      RowsArgs(table, on_host ? state.host_rows : state.all_rows);
  const auto add = [args, zero = planned.completed_by < 0,
                    grad = states_->reduced_grads(table).Local(table).vector()](
                       Ops& ops, Stream& stream, const Workspace& scratch) {
    if (zero) ops.Fill(stream, {grad, 0});
    ops.EmbeddingBackward(stream, args, scratch);
  };
  if (on_host) {
    return EnqueueOnHost(
        *rank_->device, *StreamFor(StreamRole::kHost),
        [add, scratch = AsWorkspace(host_scratch_)](Ops& ops, Stream& stream) {
          add(ops, stream, scratch);
        });
  }
  Ops& ops = rank_->device->ops();
  const Tensor scratch =
      context_->Scratch(ops.EmbeddingBackwardWorkspaceBytes(args));
  add(ops, *compute_, AsWorkspace(scratch));
  if (planned.part.number + 1 < planned.part.count) return;
  state.own_rows = state.all_rows = {};
}

// Sums kept for other micro-steps are allocated at the beginning, where they
// leave no holes. So are sums of a single one, if parameters are sharded over
// so many ranks that all sums together are small beside a unit's gradients:
// each in a hole of its own, they would divide the memory in which units'
// buffers take turns.
void Executor::TakeSums() {
  FlatState& grads = states_->grads();
  if (!plan_.shards_gradients()) return;
  if (num_micro_steps_ == 1 && !HasSmallSums()) return;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (!grads.IsLent(u)) continue;
    for (int p = 0; p < static_cast<int>(plan_.units[u].phases.size()); ++p) {
      grads.Lend(u, p, EmptySums(u, p));
    }
  }
}

// A quarter: there Llama-3.2-1B on 256 and 1,024 ranks takes 46 to 197 MiB
// less, Qwen3-0.6B on 256 and 512 between 20 less and 9 more; with more, Qwen3
// on 64 takes 36 more.
bool Executor::HasSmallSums() const {
  if (!plan_.shards_parameters()) return false;
  int64_t sums = 0, largest = 0;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (!states_->grads().IsLent(u)) continue;
    const std::vector<Segment>& phases = plan_.units[u].phases;
    for (int p = 0; p < static_cast<int>(phases.size()); ++p) {
      sums += states_->grads().LocalElems(u, p);
      largest = std::max(largest, phases[p].elems);
    }
  }
  return sums < largest / 4;
}

Tensor Executor::EmptySums(int unit, int phase) const {
  return Tensor::Empty(*transient_, {states_->grads().LocalElems(unit, phase)},
                       options_.grad_dtype, MemoryCategory::kGradients);
}

// Chooses the place for the sums of a bucket. Those of a single micro-step take
// a hole. Until there is one, they are the front of the gradients' buffer,
// which shrinks to them if there is still none when it is released: sharded
// gradients never take more memory than full ones.
Wire::Sums Executor::PlaceSums(const Bucket& bucket, int64_t micro_step) {
  FlatState& grads = states_->grads();
  const int unit = bucket.unit, phase = bucket.phase;
  if (!plan_.shards_gradients() || !grads.IsLent(unit)) {
    return Wire::Sums::kInPlace;
  }
  if (micro_step > 0) return Wire::Sums::kAdded;
  const Tensor& flat = units_[unit].gradients[phase].flat;
  if (!grads.Lent(unit, phase).defined()) {
    const Tensor front = flat.Slice(0, {grads.LocalElems(unit, phase)});
    const bool fits =
        transient_->HasHole(front.bytes(), MemoryCategory::kGradients);
    grads.Lend(unit, phase, fits ? EmptySums(unit, phase) : front);
  }
  return grads.Lent(unit, phase).data() == flat.data() ? Wire::Sums::kPacked
                                                       : Wire::Sums::kKept;
}

void Executor::ReleaseGradients(int unit, int phase) {
  states_->BindSinks(unit, phase, Tensor());
  const Tensor flat =
      std::exchange(units_[unit].gradients[phase].flat, Tensor());
  FlatState& grads = states_->grads();
  if (!grads.IsLent(unit)) return;
  const Tensor sums = grads.Lent(unit, phase);
  if (sums.data() != flat.data()) return;
  if (transient_->HasHole(sums.bytes(), MemoryCategory::kGradients)) {
    // There is a hole by now, and nothing may stay in the buffer's place.
    const Tensor moved = EmptySums(unit, phase);
    rank_->device->Copy(*compute_, moved.data(), sums.data(), sums.bytes());
    grads.Lend(unit, phase, moved);
  } else {
    sums.GiveBackRest(MemoryCategory::kGradients);
  }
}

// ---- To the host and back --------------------------------------------------

void Executor::Copy(StreamRole role, const Tensor& from, const Tensor& to) {
  Stream& stream = *StreamFor(role);
  const auto copy = [&] {
    rank_->device->Copy(stream, to.data(), from.data(), to.bytes());
  };
  if (!rank_->host_link.has_value()) return copy();
  EnqueueAtLeast(
      stream, LinkTime(*rank_->host_link, to.bytes()),
      [rank = rank_] { return !rank->status().ok(); }, copy);
}

void Executor::Offload(const Action& action) {
  const Bucket& bucket = plan_.reduce_buckets[action.index];
  const UnitState& state = units_[bucket.unit];
  const auto copy = [&](const Tensor& from, const Tensor& to) {
    Copy(StreamRole::kDown, from, to);
  };
  if (bucket.is_rows()) {
    copy(state.all_rows.ids, state.host_rows.ids);
    copy(state.all_rows.rows, state.host_rows.rows);
    return;
  }
  const bool in_buffer = plan_.AddsOnHost();  // else the device adds up
  const bool adds = AddsUp(action, plan_);
  if (adds) ++num_offloaded_;
  const int64_t phase = plan_.units[bucket.unit].phases[bucket.phase].begin;
  int64_t begin = 0;
  for (const SegmentRef& ref : bucket.segments) {
    if (!plan_.UpdatesOnHost(ref.unit)) continue;
    const Segment shard = plan_.Shard(plan_.segment(ref), rank_->rank());
    copy(in_buffer ? state.gradients[bucket.phase].flat.Slice(
                         shard.begin - phase, {shard.elems})
                   : states_->grads().Shard(ref),
         adds ? offloaded().Slice(begin, {shard.elems})
              : states_->reduced_grads(ref.unit).Shard(ref));
    begin += shard.elems;
  }
}

void Executor::AddOffloaded(int bucket) {
  std::vector<std::pair<ConstVector, Vector>> sums;
  int64_t begin = 0;
  for (const SegmentRef& ref : plan_.reduce_buckets[bucket].segments) {
    const Tensor to = states_->reduced_grads(ref.unit).Shard(ref);
    sums.emplace_back(offloaded().Slice(begin, to.shape()).vector(),
                      to.vector());
    begin += to.num_elems();
  }
  EnqueueOnHost(*rank_->device, *StreamFor(StreamRole::kHost),
                [sums = std::move(sums)](Ops& ops, Stream& stream) {
                  for (const auto& [from, to] : sums) {
                    ops.SumRanks(stream, {.src = {&from.data, 1},
                                          .src_dtype = from.dtype,
                                          .dst = to,
                                          .accumulate = true});
                  }
                });
}

void Executor::Upload(const Action& action) {
  const int unit = action.index;
  const bool within_host = plan_.FetchesParameters(unit);
  const Segment segments =
      SegmentsOf(action, plan_.units[unit].num_trained_segments,
                 /*one=*/plan_.UpdatesFromDisk(unit));
  for (int s = segments.begin; s < segments.end(); ++s) {
    const Tensor from = states_->updated_params(unit).Shard({unit, s});
    const Tensor to = states_->params().Shard({unit, s});
    if (within_host) {
      rank_->device->host().Copy(*StreamFor(StreamRole::kHost), to.data(),
                                 from.data(), to.bytes());
    } else {
      Copy(StreamRole::kUp, from, to);
    }
  }
}

// ---- Without gradients ------------------------------------------------------

// `head` is called for every part of the last unit.
template <typename Head>
absl::Status Executor::RunUnits(Context& ctx, const HostBatch& batch,
                                const Head& head) {
  ZERO_RETURN_IF_ERROR(upload_->Reserve({&batch, 1}));
  ZERO_RETURN_IF_ERROR(FinishUpdates());
  states_->Settle(*compute_);
  if (forward_list_.actions.empty()) {
    forward_list_ = runner_->MakeList(
        MakeForwardSchedule(plan_, options_.schedule_options(1)));
  }
  Unit& last = *model_->units().back();
  Tensor x;
  return runner_->Run(forward_list_, /*in_step=*/false, /*times=*/nullptr,
                      [&](const Action& action) {
                        const int u = action.index;
                        if (action.kind == ActionKind::kLoadBatch) {
                          return upload_->Load(batch, *transient_);
                        }
                        if (action.kind != ActionKind::kForward) {
                          return Perform(action, StepInput());
                        }
                        if (u == 0) ctx.batch = upload_->Use();
                        ctx.part = plan_.units[u].part.number;
                        Unit& unit = *units_[u].unit;
                        x = &unit == &last
                                ? head(unit, std::move(x))
                                : unit.Forward(ctx, Var(std::move(x))).value;
                        EndLookUp(u);
                      });
}

absl::StatusOr<double> Executor::EvalLossSum(const HostBatch& batch,
                                             float* losses) {
  StepScalars* scalars = this->scalars();
  Context ctx(*rank_->device, *compute_, *transient_);
  Tensor per_token;
  ZERO_RETURN_IF_ERROR(RunUnits(ctx, batch, [&](Unit& unit, Tensor x) {
    if (ctx.part == 0) {
      ctx.ops().Fill(*compute_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
      ctx.batch.loss_sum = &scalars->loss_sum;
      per_token = ctx.Empty({ctx.batch.num_tokens()}, DType::kF32);
      ctx.batch.losses = per_token.As<float>();
    }
    return unit.Forward(ctx, Var(std::move(x))).value;
  }));
  upload_->Drop();
  if (losses != nullptr) numbers_->Read(per_token, losses);
  const double loss_sum = numbers_->ReadScalar(&scalars->loss_sum);
  clock_->Read(numbers_->read(), clock_->Take());
  ZERO_RETURN_IF_ERROR(rank_->status());
  return loss_sum;
}

KvCache Executor::MakeKvCache(int64_t capacity) {
  return model_->MakeKvCache(*context_, /*batch=*/1, capacity,
                             options_.param_dtype);
}

absl::Status Executor::LastLogits(const HostBatch& batch, KvCache* cache,
                                  float* logits) {
  ZERO_CHECK_EQ(batch.batch, 1);
  Context ctx(*rank_->device, *compute_, *transient_);
  ctx.kv_cache = cache;
  Tensor out;
  ZERO_RETURN_IF_ERROR(RunUnits(ctx, batch, [&](Unit& unit, Tensor x) {
    if (ctx.part == 0) {
      const int64_t channels = x.shape()[1];
      x = x.Slice((batch.length - 1) * channels, {1, channels});
    }
    out = unit.Logits(ctx, Var(std::move(x))).value;
    return out;
  }));
  const Tensor fp32 = ctx.Empty(out.shape(), DType::kF32);
  ctx.ops().Cast(*compute_, {out.vector(), fp32.vector()});
  numbers_->Read(fp32, logits);
  clock_->Read(numbers_->read(), clock_->Take());
  if (cache != nullptr) cache->length += batch.length;
  upload_->Drop();
  return rank_->status();
}

absl::Span<char> Executor::UnusedMemory() {
  for (const auto& stream : streams_) {
    if (stream != nullptr) stream->Synchronize();
  }
  compute_->Synchronize();
  return transient_->unused();
}

// ---- States between steps ---------------------------------------------------

StateAccess& Executor::states() {
  FinishUpdates().IgnoreError();  // it stays the rank's
  runner_->Leave();
  // The calling thread now reads and refills the host's places. It waits for
  // all that uses them: updates, files, and uploads, for which so far only the
  // compute stream waits.
  for (const StreamRole role : {StreamRole::kHost, StreamRole::kRead,
                                StreamRole::kWrite, StreamRole::kUp}) {
    if (Stream* const stream = StreamFor(role)) stream->Synchronize();
  }
  return *access_;
}

}  // namespace zero
