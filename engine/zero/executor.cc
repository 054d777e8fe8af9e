#include "engine/zero/executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/math.h"
#include "engine/base/status.h"
#include "engine/zero/executor_internal.h"
#include "kernels/check.h"

namespace zero {
namespace {

OptimizerStepOptions OptionsOf(const StepInput& input) {
  return {.lr = input.lr, .beta1 = input.beta1, .step = input.optimizer_step};
}

// A batch as one block: tokens, positions, targets, of packed rows the offsets
// of their sequences, then 8-byte row ids.
struct BatchLayout {
  int64_t tokens;
  int64_t id_bytes;      // of each of the first three
  int64_t offset_bytes;  // 0: none

  int64_t offsets() const { return 3 * id_bytes; }
  int64_t row_ids() const { return offsets() + offset_bytes; }
  int64_t bytes() const { return row_ids() + tokens * 8; }

  void Fill(const HostBatch& batch, char* to) const {
    for (const int32_t* ids : {batch.tokens, batch.positions, batch.targets}) {
      if (ids != nullptr) std::memcpy(to, ids, tokens * sizeof(int32_t));
      to += id_bytes;
    }
    if (batch.offsets != nullptr) {
      std::memcpy(to, batch.offsets, (tokens + 1) * sizeof(int32_t));
    }
    int64_t* const row_ids = reinterpret_cast<int64_t*>(to + offset_bytes);
    for (int64_t i = 0; i < tokens; ++i) {
      row_ids[i] = batch.sample_ids == nullptr
                       ? 0
                       : batch.sample_ids[i / batch.length] * batch.length +
                             i % batch.length;
    }
  }
};

BatchLayout LayoutOf(const HostBatch& batch) {
  const int64_t tokens = batch.batch * batch.length;
  const int64_t id_bytes = RoundUp(tokens * sizeof(int32_t), 64);
  const int64_t offset_bytes =
      batch.offsets == nullptr ? 0
                               : RoundUp((tokens + 1) * sizeof(int32_t), 64);
  return {tokens, id_bytes, offset_bytes};
}

int64_t LargestUpload(absl::Span<const HostBatch> batches) {
  int64_t bytes = 0;
  for (const HostBatch& batch : batches) {
    bytes = std::max(bytes, LayoutOf(batch).bytes());
  }
  return bytes;
}

double* SpentOn(ActionKind kind, StepTimes* times) {
  switch (kind) {
    case ActionKind::kForward:
      return &times->forward_ms;
    case ActionKind::kForwardBackward:
    case ActionKind::kBackward:
      return &times->backward_ms;
    case ActionKind::kNorm:
    case ActionKind::kMoments:
    case ActionKind::kUpdate:
      return &times->optimizer_ms;
    default:
      return nullptr;  // no computation
  }
}

}  // namespace

absl::Status Executor::ReserveUploads(int64_t bytes) {
  upload_bytes_ = std::max(upload_bytes_, bytes);
  for (HostStaging& upload : uploads_) {
    if (upload.sent == nullptr) upload.sent = device_->MakeEvent();
    if (static_cast<int64_t>(upload.memory.bytes()) >= bytes) continue;
    upload.sent->Synchronize();
    ZERO_ASSIGN_OR_RETURN(upload.memory,
                          device_->Allocate(bytes, MemoryKind::kHost));
  }
  return absl::OkStatus();
}

void Executor::Upload(const HostBatch& batch, BatchView* view) {
  const BatchLayout layout = LayoutOf(batch);
  view->batch = batch.batch;
  view->length = batch.length;
  batch_memory_ = Tensor();
  batch_memory_ = Tensor::Empty(*activations_, {layout.bytes()}, DType::kU8,
                                MemoryCategory::kInputs);
  const char* const base = static_cast<const char*>(batch_memory_.data());
  const auto ids_at = [&](int64_t place, const int32_t* ids) {
    const char* const at = base + place * layout.id_bytes;
    return ids == nullptr ? nullptr : reinterpret_cast<const int32_t*>(at);
  };
  view->tokens = ids_at(0, batch.tokens);
  view->positions = ids_at(1, batch.positions);
  view->targets = ids_at(2, batch.targets);
  view->packed = {};
  if (batch.offsets != nullptr) {
    view->packed = {
        .positions = view->positions,
        .offsets = reinterpret_cast<const int32_t*>(base + layout.offsets()),
        .count = batch.num_sequences};
  }
  view->row_ids = reinterpret_cast<const int64_t*>(base + layout.row_ids());
  if (device_->kind() == DeviceKind::kMeta) return;  // nothing on the host
  HostStaging& upload = uploads_[next_upload_];
  next_upload_ = (next_upload_ + 1) % uploads_.size();
  // The batch before the last one must be there: mostly it is, or the host
  // waits for a device that is two micro-batches behind.
  if (!upload.sent->IsDone()) upload.sent->Synchronize();
  layout.Fill(batch, static_cast<char*>(upload.memory.data()));
  device_->Copy(*stream_, batch_memory_.data(), upload.memory.data(),
                layout.bytes());
  stream_->Record(*upload.sent);
}

absl::StatusOr<StepOutput> Executor::Step(const StepInput& input) {
  ZERO_RETURN_IF_ERROR(Begin(input));
  return Finish();
}

absl::Status Executor::Begin(const StepInput& input) {
  ZERO_CHECK(options_.train);
  ZERO_RETURN_IF_ERROR(ReserveUploads(LargestUpload(input.micro_batches)));
  ZERO_CHECK_LT(num_begun_ - num_finished_, steps_.size()) << "not finished";
  BegunStep& step = steps_[num_begun_ % steps_.size()];
  step.times = {};
  step.num_valid_targets = std::max<int64_t>(input.num_valid_targets, 1);
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  const float seed = static_cast<float>(
      input.loss_scale / static_cast<double>(step.num_valid_targets));
  context_->ops().Fill(*stream_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
  context_->ops().Fill(*stream_, {{&scalars->seed, DType::kF32, 1}, seed});
  context_->training = true;
  context_->dropout_key = input.dropout_key;
  staged_ = Tensor();
  for (UnitState& unit : units_) {
    unit.finished = false;
    for (auto& bound : unit.parameters) {
      bound->sink.written = false;
      bound->used = false;
    }
  }
  const int64_t micro_steps = input.micro_batches.size();
  if (schedule_.empty() || scheduled_micro_steps_ != micro_steps) {
    schedule_ = MakeSchedule(plan_, options_.schedule_options(micro_steps));
    scheduled_micro_steps_ = micro_steps;
    ZERO_RETURN_IF_ERROR(AgreeOnSchedule());
  }
  for (const Action& action : schedule_) {
    Announced(action, [&] { PerformTimed(action, input, &step.times); });
    ZERO_RETURN_IF_ERROR(rank_->status());
  }
  context_->training = false;
  batch_memory_ = Tensor();
  device_->Copy(*stream_, step.scalars.data(), scalars_.data(),
                sizeof(Scalars));
  stream_->Record(*step.read);
  step.timed = std::exchange(timed_, {});
  ++num_begun_;
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> Executor::Finish() {
  ZERO_CHECK_LT(num_finished_, num_begun_);
  BegunStep& step = steps_[num_finished_++ % steps_.size()];
  if (device_->kind() == DeviceKind::kMeta) return StepOutput();
  ReadTimes(*step.read, &step.timed);
  times_ = step.times;
  ZERO_RETURN_IF_ERROR(rank_->status());
  const auto& scalars = *static_cast<const Scalars*>(step.scalars.data());
  return StepOutput{
      .loss = scalars.global_loss / static_cast<double>(step.num_valid_targets),
      .grad_norm = scalars.norm,
      .skipped = scalars.found_non_finite != 0};
}

void Executor::PerformTimed(const Action& action, const StepInput& input,
                            StepTimes* times) {
  double* const spent = SpentOn(action.kind, times);
  if (spent == nullptr) return Perform(action, input);
  Timed([&] { Perform(action, input); },
        [spent](TimePoint begin, TimePoint end) {
          *spent += Millis(end - begin);
        });
}

void Executor::Perform(const Action& action, const StepInput& input) {
  switch (action.kind) {
    case ActionKind::kForward:
      if (action.index == 0) {
        Upload(input.micro_batches[action.micro_step], &context_->batch);
      }
      Forward(action.index);
      break;
    case ActionKind::kForwardBackward:
      ForwardBackwardHead(action.index);
      break;
    case ActionKind::kBackward:
      Backward(action.index);
      break;
    case ActionKind::kGather:
      Gather(action.index);
      break;
    case ActionKind::kRelease:
      Release(action.index);
      break;
    case ActionKind::kReduce:
      Reduce(action.index, action.micro_step);
      break;
    case ActionKind::kReduceAcross:
      ReduceAcross(action.index);
      break;
    case ActionKind::kAwaitReduce:
      AwaitReduce(action.index);
      break;
    case ActionKind::kNorm:
      sent_gradients_ = Tensor();
      for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
        FinishGradients(u);
      }
      Norm(input);
      ListUnused();
      break;
    case ActionKind::kMoments:
      Moments(input);
      break;
    case ActionKind::kUpdate:
      Update(action.index, input);
      break;
    case ActionKind::kGatherUpdated:
      GatherUpdated(action.index);
      break;
  }
}

// ---- Forward and backward -------------------------------------------------

void Executor::Forward(int unit) {
  AwaitParameters(unit);
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  Tensor input = std::exchange(state.input, Tensor());
  Var out;
  if (options_.recompute && plan_.units[unit].backward_reads_parameters) {
    ctx.tape = nullptr;
    out = state.unit->Forward(ctx, Var(input));
    state.input = std::move(input);
  } else {
    ctx.tape = &state.tape;
    const Var in = unit == 0 ? Var() : state.tape.Watch(std::move(input));
    state.input_slot = in.slot;
    out = state.unit->Forward(ctx, in);
    state.output_slot = out.slot;
  }
  units_[unit + 1].input = std::move(out.value);
}

void Executor::ForwardBackwardHead(int unit) {
  AwaitParameters(unit);
  TakeGradientBuffers(unit);
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  ctx.batch.loss_sum = &scalars->loss_sum;
  ctx.batch.grad_scale = &scalars->seed;
  ctx.tape = &state.tape;
  int slot;
  {
    const Var in = state.tape.Watch(std::exchange(state.input, Tensor()));
    slot = in.slot;
    state.unit->Forward(ctx, in);
  }
  state.tape.Backward(ctx);
  output_grad_ = state.tape.Take(slot);
  state.tape = Tape();
}

void Executor::Backward(int unit) {
  const bool reads_parameters = plan_.units[unit].backward_reads_parameters;
  if (reads_parameters) AwaitParameters(unit);
  TakeGradientBuffers(unit);
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  ctx.tape = &state.tape;
  if (options_.recompute && reads_parameters) {
    const Var in = unit == 0
                       ? Var()
                       : state.tape.Watch(std::exchange(state.input, Tensor()));
    state.input_slot = in.slot;
    state.output_slot = state.unit->Forward(ctx, in).slot;
  }
  state.tape.Accumulate(ctx, state.output_slot,
                        std::exchange(output_grad_, Tensor()));
  state.tape.Backward(ctx);
  output_grad_ = state.tape.Take(state.input_slot);
  state.tape = Tape();
}

// Rotating memory for the gradients that this unit's backward writes: its own
// and those of the parameters it borrows.
void Executor::TakeGradientBuffers(int unit) {
  if (!grads_.sharded()) return;
  for (int u : plan_.units[unit].needs) {
    UnitState& state = units_[u];
    const PlannedUnit& planned = plan_.units[u];
    if (planned.padded_elems == 0) continue;
    if (state.gradients.defined()) {
      ZERO_CHECK(!state.finished) << planned.name << " is being reduced";
      continue;
    }
    state.gradients =
        Tensor::Empty(*rotating_, {planned.padded_elems}, options_.grad_dtype,
                      MemoryCategory::kReduceBuffers);
    for (const Segment& gap : state.gaps) {
      context_->ops().Fill(
          *stream_,
          {state.gradients.Slice(gap.begin, {gap.elems}).vector(), 0});
    }
    for (auto& bound : state.parameters) bound->sink.written = false;
    state.finished = false;
    state.buckets_to_reduce = 0;
    for (const Bucket& bucket : plan_.reduce_buckets) {
      if (bucket.segments.front().unit == u) ++state.buckets_to_reduce;
    }
    BindSinks(u, state.gradients);
  }
}

// A gradient that no backward pass wrote is zero.
void Executor::FinishGradients(int unit) {
  UnitState& state = units_[unit];
  if (std::exchange(state.finished, true)) return;
  for (auto& bound : state.parameters) {
    if (bound->parameter->frozen) continue;
    if (bound->sink.written) {
      bound->used = true;
    } else {
      context_->ops().Fill(*stream_, {bound->sink.grad.vector(), 0});
    }
  }
}

void Executor::ListUnused() {
  unused_.clear();
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      if (bound->parameter->frozen || bound->used) continue;
      unused_.push_back(bound->parameter->name);
    }
  }
}

// ---- Norm and update ------------------------------------------------------

// Every rank sums the squares of its own pieces, also where it has all of
// them, and all add them up in (segment, shard) order: the same bits at every
// stage.
void Executor::Norm(const StepInput& input) {
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  Ops& ops = context_->ops();
  const int64_t pieces = plan_.pieces();
  double* sums = sums_.As<double>();
  double* losses = sums + plan_.num_segments * pieces;
  ops.Fill(*stream_, {sums_.vector(), 0});
  std::vector<SquaredSpan> spans;
  double* sum = sums + rank_->rank();
  const int num_units = static_cast<int>(plan_.units.size());
  for (int u = 0; u < num_units && CountsPieces(); ++u) {
    const int num_segments = static_cast<int>(plan_.units[u].segments.size());
    for (int s = 0; s < num_segments; ++s, sum += pieces) {
      spans.push_back({.src = grads_.Piece({u, s}).vector(), .out = sum});
    }
  }
  ops.SumSquares(*stream_, {.spans = spans});
  device_->Copy(*stream_, losses + rank_->rank(), &scalars->loss_sum,
                sizeof(double));
  ReduceNumbers(kStepCollective, ReduceOp::kSum, sums_);
  ops.Sum(*stream_, {.src = sums,
                     .size = plan_.num_segments * pieces,
                     .out = &scalars->sum_squares});
  ops.Sum(*stream_,
          {.src = losses, .size = plan_.world, .out = &scalars->global_loss});
  ops.Clip(*stream_, {.sum_squares = &scalars->sum_squares,
                      .max_norm = options_.max_grad_norm,
                      .inverse_scale = 1.0f / input.loss_scale,
                      .keep_found = input.inherits_skip,
                      .norm = &scalars->norm,
                      .grad_scale = &scalars->grad_scale,
                      .found_non_finite = &scalars->found_non_finite});
}

Executor::UpdateView Executor::View(int unit, const StepInput& input) const {
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  const UnitUpdate& update = units_[unit].update;
  UpdateView view;
  view.state = {
      .param = params_.Held(unit).vector(),
      .master = master_.defined() ? master_.Held(unit).As<float>() : nullptr,
      .grad = grads_.Held(unit).vector(),
      .grad_scale = &scalars->grad_scale,
      .found_non_finite = &scalars->found_non_finite,
      .ranges = update.ranges,
      .whole_param = !params_.sharded(),
      .whole_grad = !grads_.sharded(),
      .stochastic_rounding = options_.stochastic_rounding,
      .rounding_key = input.rounding_key,
      .first_element = update.first_element};
  for (const FlatState& array : optimizer_states_) {
    view.arrays.push_back(array.Held(unit).As<float>());
  }
  if (num_tensor_parts_ > 0) {
    view.norms = {update.norms, tensor_norms_.As<double>()};
  }
  return view;
}

// Who has all of a parameter measures each owner's part of it, so that the
// sums have the same bits at every stage.
void Executor::Moments(const StepInput& input) {
  context_->ops().Fill(*stream_, {tensor_norms_.vector(), 0});
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (units_[u].update.ranges.empty()) continue;
    const UpdateView view = View(u, input);
    OptimizerMoments(context_->ops(), *stream_, options_.optimizer, view.state,
                     view.arrays, OptionsOf(input), view.norms);
  }
  if (plan_.placement.optimizer == Placement::kReplicated) return;
  if (!CountsPieces()) {
    context_->ops().Fill(*stream_, {tensor_norms_.vector(), 0});
  }
  ReduceNumbers("tensor norms", ReduceOp::kSum, tensor_norms_);
}

void Executor::Update(int unit, const StepInput& input) {
  if (units_[unit].update.ranges.empty()) return;
  const UpdateView view = View(unit, input);
  OptimizerStep(context_->ops(), *stream_, options_.optimizer, view.state,
                view.arrays, OptionsOf(input), view.norms);
}

// ---- Without gradients ----------------------------------------------------

template <typename Head>
absl::Status Executor::RunUnits(Context& ctx, const Head& head) {
  if (forward_schedule_.empty()) {
    forward_schedule_ =
        MakeForwardSchedule(plan_, options_.schedule_options(1));
  }
  staged_ = Tensor();
  Tensor x;
  for (const Action& action : forward_schedule_) {
    Announced(action, [&] {
      switch (action.kind) {
        case ActionKind::kGather:
          Gather(action.index);
          break;
        case ActionKind::kRelease:
          Release(action.index);
          break;
        default:
          AwaitParameters(action.index);
          if (action.index + 1 < static_cast<int>(units_.size())) {
            const Var in(std::move(x));
            x = units_[action.index].unit->Forward(ctx, in).value;
          } else {
            head(std::move(x));
          }
      }
    });
    ZERO_RETURN_IF_ERROR(rank_->status());
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Executor::EvalLossSum(const HostBatch& batch,
                                             float* losses) {
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  Context ctx(*device_, *stream_, *activations_);
  ZERO_RETURN_IF_ERROR(ReserveUploads(LayoutOf(batch).bytes()));
  Upload(batch, &ctx.batch);
  Tensor per_token;
  ZERO_RETURN_IF_ERROR(RunUnits(ctx, [&](Tensor x) {
    ctx.ops().Fill(*stream_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
    ctx.batch.loss_sum = &scalars->loss_sum;
    const int64_t tokens = ctx.batch.num_tokens();
    per_token = ctx.Empty({tokens}, DType::kF32);
    ctx.batch.losses = per_token.As<float>();
    units_.back().unit->Forward(ctx, Var(std::move(x)));
  }));
  batch_memory_ = Tensor();
  if (losses != nullptr) ReadNumbers(per_token, losses);
  const double loss_sum = ReadScalar(&scalars->loss_sum);
  ReadTimes(*read_, &timed_);
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
  Context ctx(*device_, *stream_, *activations_);
  ctx.kv_cache = cache;
  ZERO_RETURN_IF_ERROR(ReserveUploads(LayoutOf(batch).bytes()));
  Upload(batch, &ctx.batch);
  Tensor fp32;
  ZERO_RETURN_IF_ERROR(RunUnits(ctx, [&](Tensor x) {
    const int64_t channels = x.shape()[1];
    const Tensor last = x.Slice((batch.length - 1) * channels, {1, channels});
    const Tensor out = units_.back().unit->Logits(ctx, Var(last)).value;
    fp32 = ctx.Empty(out.shape(), DType::kF32);
    ctx.ops().Cast(*stream_, {out.vector(), fp32.vector()});
  }));
  ReadNumbers(fp32, logits);
  ReadTimes(*read_, &timed_);
  if (cache != nullptr) cache->length += batch.length;
  batch_memory_ = Tensor();
  return rank_->status();
}

}  // namespace zero
