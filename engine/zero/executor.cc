#include "engine/zero/executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/base/math.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {

// One parameter bound to its place in the flat buffers.
struct BoundParameter {
  Parameter* parameter = nullptr;
  int64_t offset = 0;  // over all units, in elements
  GradSink sink;
};

struct Executor::UnitState {
  Unit* unit = nullptr;
  std::vector<std::unique_ptr<BoundParameter>> parameters;
  std::vector<UpdateRange> ranges;  // relative to the unit's flat buffer
  // Between forward and backward of one micro-batch:
  Tensor input;  // kept only for recompute
  Tape tape;
  int input_slot = -1, output_slot = -1;
};

// Scalars that live on the device, so that a step never waits for the host.
struct Executor::Scalars {
  double loss_sum;
  double sum_squares;
  float seed;        // d(loss sum): loss scale / valid targets
  float norm;        // unscaled gradient norm
  float grad_scale;  // what the optimizer multiplies gradients by
  uint32_t found_non_finite;
};

namespace {

Tensor FlatTensor(Arena& arena, int64_t elems, DType dtype,
                  MemoryCategory category) {
  return Tensor::Empty(arena, {elems}, dtype, category);
}

// Parameters of equal decay that touch (but for alignment gaps, whose
// gradients are zero) update in one run.
std::vector<UpdateRange> MakeRanges(const PlannedUnit& unit,
                                    const ExecutorOptions& options) {
  // LAMB's ratio is per tensor, so there every parameter is its own range.
  const bool merge = options.optimizer.kind != OptimizerKind::kLamb;
  std::vector<UpdateRange> ranges;
  for (const PlannedParameter& parameter : unit.parameters) {
    if (parameter.spec.frozen) continue;
    const bool decays = parameter.spec.decay || options.decay_all;
    const UpdateRange range{
        .begin = parameter.offset,
        .end = parameter.offset + parameter.elems,
        .weight_decay =
            decays ? static_cast<float>(options.optimizer.weight_decay) : 0.0f};
    if (merge && !ranges.empty() &&
        ranges.back().weight_decay == range.weight_decay &&
        range.begin - ranges.back().end < Plan::kAlignElems) {
      ranges.back().end = range.end;
    } else {
      ranges.push_back(range);
    }
  }
  return ranges;
}

}  // namespace

std::vector<UnitSpec> DescribeUnits(const Model& model) {
  std::vector<UnitSpec> specs;
  for (const auto& unit : model.units()) {
    UnitSpec spec{.name = unit->name()};
    for (const auto& parameter : unit->parameters()) {
      spec.parameters.push_back({parameter->name, parameter->stored_shape,
                                 parameter->decay, parameter->frozen});
    }
    for (const Parameter* parameter : unit->borrowed()) {
      spec.borrowed.push_back(parameter->name);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

Executor::Executor(Device& device, Model& model, const ExecutorOptions& options)
    : device_(&device),
      model_(&model),
      options_(options),
      plan_(MakePlan(DescribeUnits(model), /*world=*/1)) {
  ZERO_CHECK_GE(plan_.units.size(), size_t{2});
}

Executor::~Executor() {
  // The model outlives the memory it was bound to.
  for (Parameter* parameter : model_->AllParameters()) parameter->weight = {};
  model_->DropTables();
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Make(
    Device& device, Model& model, const ExecutorOptions& options,
    int64_t activation_bytes, MemoryLedger* ledger) {
  std::unique_ptr<Executor> executor(new Executor(device, model, options));
  ZERO_RETURN_IF_ERROR(executor->Reserve(activation_bytes, ledger));
  executor->BindParameters();
  return executor;
}

absl::Status Executor::Reserve(int64_t activation_bytes, MemoryLedger* ledger) {
  stream_ = device_->MakeStream(StreamRole::kCompute);
  const int64_t n = plan_.padded_elems;
  const bool train = options_.train;
  const bool has_master = train && options_.param_dtype != DType::kF32;
  const int num_states = train ? options_.optimizer.StateFloatsPerElement() : 0;
  const int64_t state_bytes =
      n * (DTypeBytes(options_.param_dtype) +
           (train ? DTypeBytes(options_.grad_dtype) : 0) +
           sizeof(float) * (num_states + (has_master ? 1 : 0))) +
      (num_states + 4) * Arena::kAlignment +
      model_->TableBytes(options_.max_positions);
  ZERO_ASSIGN_OR_RETURN(states_,
                        Arena::Make(*device_, MemoryKind::kDevice, state_bytes,
                                    "model states", ledger));
  ZERO_ASSIGN_OR_RETURN(
      activations_, Arena::Make(*device_, MemoryKind::kDevice, activation_bytes,
                                "activations and workspace", ledger));
  states_->Touch();
  activations_->Touch();

  params_ = FlatTensor(*states_, n, options_.param_dtype,
                       MemoryCategory::kParameters);
  if (train) {
    grads_ = FlatTensor(*states_, n, options_.grad_dtype,
                        MemoryCategory::kGradients);
  }
  if (has_master) {
    master_ = FlatTensor(*states_, n, DType::kF32, MemoryCategory::kOptimizer);
  }
  for (int i = 0; i < num_states; ++i) {
    optimizer_states_.push_back(
        FlatTensor(*states_, n, DType::kF32, MemoryCategory::kOptimizer));
  }
  scalars_ = Tensor::Empty(*states_, {static_cast<int64_t>(sizeof(Scalars))},
                           DType::kU8, MemoryCategory::kInputs);
  context_ = std::make_unique<Context>(*device_, *stream_, *activations_);
  model_->Prepare(*states_, *stream_, options_.max_positions);
  for (const Tensor& tensor : {params_, grads_, master_}) {
    if (!tensor.defined()) continue;
    context_->ops().Fill(*stream_, {tensor.vector(), 0});
  }
  return absl::OkStatus();
}

void Executor::BindParameters() {
  units_.resize(plan_.units.size());
  for (size_t u = 0; u < units_.size(); ++u) {
    const PlannedUnit& planned = plan_.units[u];
    UnitState& state = units_[u];
    state.unit = model_->units()[u].get();
    state.ranges = MakeRanges(planned, options_);
    for (size_t i = 0; i < planned.parameters.size(); ++i) {
      auto bound = std::make_unique<BoundParameter>();
      Parameter& parameter = *state.unit->parameters()[i];
      bound->parameter = &parameter;
      bound->offset = planned.offset + planned.parameters[i].offset;
      parameter.weight = {
          .value = params_.Slice(bound->offset, parameter.stored_shape)};
      if (options_.train && !parameter.frozen) {
        bound->sink.grad = grads_.Slice(bound->offset, parameter.stored_shape);
        parameter.weight.sink = &bound->sink;
      }
      state.parameters.push_back(std::move(bound));
    }
  }
}

void Executor::Initialize(uint64_t seed) {
  ClearOptimizer();
  if (device_->kind() == DeviceKind::kMeta) return;
  // In pieces: the embedding alone may be larger than the memory to spare.
  constexpr int64_t kChunk = 1 << 20;
  std::vector<float> host;
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      const int64_t n = bound->parameter->stored_shape.num_elems();
      for (int64_t begin = 0; begin < n; begin += kChunk) {
        host.resize(std::min(kChunk, n - begin));
        InitialValues(*bound->parameter, seed, begin, host.size(), host.data());
        WriteParameter(*bound, begin, host);
      }
    }
  }
}

void Executor::Load(
    const std::function<void(const Parameter&, float* out)>& values) {
  ClearOptimizer();
  if (device_->kind() == DeviceKind::kMeta) return;
  std::vector<float> host;
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      host.resize(bound->parameter->stored_shape.num_elems());
      values(*bound->parameter, host.data());
      WriteParameter(*bound, 0, host);
    }
  }
}

void Executor::ClearOptimizer() {
  for (const Tensor& state : optimizer_states_) {
    context_->ops().Fill(*stream_, {state.vector(), 0});
  }
}

void Executor::WriteParameter(const BoundParameter& bound, int64_t begin,
                              const std::vector<float>& values) {
  const Shape shape{static_cast<int64_t>(values.size())};
  if (master_.defined()) {
    UploadFromF32(values, master_.Slice(bound.offset + begin, shape));
  }
  UploadFromF32(values, params_.Slice(bound.offset + begin, shape));
}

void Executor::ReadParameter(const Parameter& parameter, float* out) {
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      if (bound->parameter != &parameter) continue;
      const int64_t n = parameter.stored_shape.num_elems();
      const Tensor from =
          (master_.defined() ? master_ : params_).Slice(bound->offset, {n});
      DownloadAsF32(from, out);
      return;
    }
  }
  ZERO_CHECK(false) << parameter.name << " is not a parameter of this model";
}

void Executor::UploadFromF32(const std::vector<float>& values,
                             const Tensor& to) {
  std::vector<uint16_t> half;
  const void* from = values.data();
  if (to.dtype() != DType::kF32) {
    half.resize(values.size());
    std::transform(values.begin(), values.end(), half.begin(),
                   to.dtype() == DType::kBF16 ? F32ToBF16 : F32ToF16);
    from = half.data();
  }
  device_->Copy(*stream_, to.data(), from, to.bytes());
  stream_->Synchronize();
}

void Executor::DownloadAsF32(const Tensor& from, float* out) {
  const int64_t n = from.num_elems();
  if (from.dtype() == DType::kF32) {
    device_->Copy(*stream_, out, from.data(), from.bytes());
    stream_->Synchronize();
    return;
  }
  std::vector<uint16_t> half(n);
  device_->Copy(*stream_, half.data(), from.data(), from.bytes());
  stream_->Synchronize();
  for (int64_t i = 0; i < n; ++i) {
    out[i] =
        from.dtype() == DType::kBF16 ? BF16ToF32(half[i]) : F16ToF32(half[i]);
  }
}

template <typename T>
T Executor::ReadScalar(const T* device_value) {
  T value{};
  if (device_->kind() == DeviceKind::kMeta) return value;
  device_->Copy(*stream_, &value, device_value, sizeof(T));
  stream_->Synchronize();
  return value;
}

void Executor::Upload(const HostBatch& batch, BatchView* view) {
  const int64_t tokens = batch.batch * batch.length;
  view->batch = batch.batch;
  view->length = batch.length;
  // One block: ids, positions, targets, then 8-byte row ids.
  const int64_t id_bytes = RoundUp(tokens * sizeof(int32_t), 64);
  batch_memory_ = Tensor();
  batch_memory_ = Tensor::Empty(*activations_, {3 * id_bytes + tokens * 8},
                                DType::kU8, MemoryCategory::kInputs);
  char* base = static_cast<char*>(batch_memory_.data());
  auto upload_ids = [&](int64_t place, const int32_t* ids) -> const int32_t* {
    if (ids == nullptr) return nullptr;
    void* to = base + place * id_bytes;
    device_->Copy(*stream_, to, ids, tokens * sizeof(int32_t));
    return static_cast<const int32_t*>(to);
  };
  view->tokens = upload_ids(0, batch.tokens);
  view->positions = upload_ids(1, batch.positions);
  view->targets = upload_ids(2, batch.targets);
  void* rows = base + 3 * id_bytes;
  view->row_ids = static_cast<const int64_t*>(rows);
  if (device_->kind() == DeviceKind::kMeta) return;  // nothing on the host
  std::vector<int64_t> row_ids(tokens);
  for (int64_t b = 0; b < batch.batch && batch.sample_ids != nullptr; ++b) {
    for (int64_t t = 0; t < batch.length; ++t) {
      row_ids[b * batch.length + t] = batch.sample_ids[b] * batch.length + t;
    }
  }
  device_->Copy(*stream_, rows, row_ids.data(), tokens * sizeof(int64_t));
  stream_->Synchronize();  // row_ids is about to go
}

StepOutput Executor::Step(const StepInput& input) {
  ZERO_CHECK(options_.train);
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  const float seed = static_cast<float>(
      input.loss_scale / std::max<double>(input.num_valid_targets, 1));
  context_->ops().Fill(*stream_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
  context_->ops().Fill(*stream_, {{&scalars->seed, DType::kF32, 1}, seed});
  context_->training = true;
  context_->dropout_key = input.dropout_key;
  times_ = {};
  for (UnitState& unit : units_) {
    for (auto& bound : unit.parameters) bound->sink.written = false;
  }
  for (const Action& action : MakeSchedule(plan_, input.micro_batches.size())) {
    if (hook_) hook_(action, /*done=*/false);
    Perform(action, input);
    if (hook_) hook_(action, /*done=*/true);
  }
  context_->training = false;
  batch_memory_ = Tensor();
  return {.loss = ReadScalar(&scalars->loss_sum) /
                  std::max<double>(input.num_valid_targets, 1),
          .grad_norm = ReadScalar(&scalars->norm),
          .skipped = ReadScalar(&scalars->found_non_finite) != 0};
}

void Executor::Perform(const Action& action, const StepInput& input) {
  const auto start = std::chrono::steady_clock::now();
  double* spent = &times_.optimizer_ms;
  switch (action.kind) {
    case ActionKind::kForward:
      if (action.unit == 0) {
        Upload(input.micro_batches[action.micro_step], &context_->batch);
      }
      Forward(action.unit);
      spent = &times_.forward_ms;
      break;
    case ActionKind::kForwardBackward:
      ForwardBackwardHead(action.unit);
      spent = &times_.backward_ms;
      break;
    case ActionKind::kBackward:
      Backward(action.unit);
      spent = &times_.backward_ms;
      break;
    case ActionKind::kNorm:
      ZeroUnusedGradients();
      Norm(input);
      break;
    case ActionKind::kUpdate:
      Update(action.unit, input);
      break;
  }
  *spent += std::chrono::duration<double, std::milli>(
                std::chrono::steady_clock::now() - start)
                .count();
}

void Executor::Forward(int unit) {
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  Tensor input = std::exchange(state.input, Tensor());
  Var out;
  if (options_.recompute) {
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
  UnitState& state = units_[unit];
  Context& ctx = *context_;
  ctx.tape = &state.tape;
  if (options_.recompute) {
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

void Executor::ZeroUnusedGradients() {
  unused_.clear();
  for (UnitState& unit : units_) {
    for (auto& bound : unit.parameters) {
      if (bound->parameter->frozen || bound->sink.written) continue;
      context_->ops().Fill(*stream_, {bound->sink.grad.vector(), 0});
      unused_.push_back(bound->parameter->name);
    }
  }
}

void Executor::Norm(const StepInput& input) {
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  bool accumulate = false;
  for (const PlannedUnit& unit : plan_.units) {
    for (const Segment& segment : unit.segments) {
      for (int64_t rank = 0; rank < plan_.world; ++rank) {
        const Segment piece = plan_.Piece(segment, rank);
        context_->ops().SumSquares(
            *stream_,
            {.src = grads_.Slice(unit.offset + piece.begin, {piece.elems})
                        .vector(),
             .out = &scalars->sum_squares,
             .accumulate = std::exchange(accumulate, true)});
      }
    }
  }
  context_->ops().Clip(*stream_,
                       {.sum_squares = &scalars->sum_squares,
                        .max_norm = options_.max_grad_norm,
                        .inverse_scale = 1.0f / input.loss_scale,
                        .norm = &scalars->norm,
                        .grad_scale = &scalars->grad_scale,
                        .found_non_finite = &scalars->found_non_finite});
}

void Executor::Update(int unit, const StepInput& input) {
  const PlannedUnit& planned = plan_.units[unit];
  if (planned.padded_elems == 0) return;
  const Shape shape{planned.padded_elems};
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  const UpdateState state{
      .param = params_.Slice(planned.offset, shape).vector(),
      .master = master_.defined()
                    ? master_.Slice(planned.offset, shape).As<float>()
                    : nullptr,
      .grad = grads_.Slice(planned.offset, shape).vector(),
      .grad_scale = &scalars->grad_scale,
      .found_non_finite = &scalars->found_non_finite,
      .ranges = units_[unit].ranges};
  std::vector<float*> arrays;
  for (const Tensor& array : optimizer_states_) {
    arrays.push_back(array.Slice(planned.offset, shape).As<float>());
  }
  const Tensor scratch = context_->Scratch(options_.optimizer.ScratchBytes(
      planned.padded_elems, units_[unit].ranges.size()));
  OptimizerStep(
      context_->ops(), *stream_, options_.optimizer, state, arrays,
      {.lr = input.lr, .beta1 = input.beta1, .step = input.optimizer_step},
      AsWorkspace(scratch));
}

Tensor Executor::RunUnits(Context& ctx) {
  ctx.tape = nullptr;
  ctx.training = false;
  Tensor x;
  for (size_t u = 0; u + 1 < units_.size(); ++u) {
    x = units_[u].unit->Forward(ctx, Var(std::move(x))).value;
  }
  return x;
}

double Executor::EvalLossSum(const HostBatch& batch, float* losses) {
  Scalars* scalars = reinterpret_cast<Scalars*>(scalars_.data());
  Context ctx(*device_, *stream_, *activations_);
  Upload(batch, &ctx.batch);
  Tensor x = RunUnits(ctx);
  ctx.ops().Fill(*stream_, {{&scalars->loss_sum, DType::kF64, 1}, 0.0f});
  ctx.batch.loss_sum = &scalars->loss_sum;
  const int64_t tokens = ctx.batch.num_tokens();
  const Tensor per_token = ctx.Empty({tokens}, DType::kF32);
  ctx.batch.losses = per_token.As<float>();
  units_.back().unit->Forward(ctx, Var(std::move(x)));
  if (losses != nullptr) {
    device_->Copy(*stream_, losses, per_token.data(), per_token.bytes());
  }
  batch_memory_ = Tensor();
  return ReadScalar(&scalars->loss_sum);
}

KvCache Executor::MakeKvCache(int64_t capacity) {
  return model_->MakeKvCache(*context_, /*batch=*/1, capacity,
                             options_.param_dtype);
}

void Executor::LastLogits(const HostBatch& batch, KvCache* cache,
                          float* logits) {
  ZERO_CHECK_EQ(batch.batch, 1);
  Context ctx(*device_, *stream_, *activations_);
  ctx.kv_cache = cache;
  Upload(batch, &ctx.batch);
  const Tensor x = RunUnits(ctx);
  const int64_t channels = x.shape()[1];
  const Tensor last = x.Slice((batch.length - 1) * channels, {1, channels});
  const Tensor out = units_.back().unit->Logits(ctx, Var(last)).value;
  Tensor fp32 = ctx.Empty(out.shape(), DType::kF32);
  ctx.ops().Cast(*stream_, {out.vector(), fp32.vector()});
  device_->Copy(*stream_, logits, fp32.data(), fp32.bytes());
  stream_->Synchronize();
  if (cache != nullptr) cache->length += batch.length;
  batch_memory_ = Tensor();
}

std::string Executor::FirstNonFiniteGradient() {
  const Tensor count = context_->Empty({1}, DType::kI64);
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      if (bound->parameter->frozen) continue;
      context_->ops().CountNonFinite(
          *stream_, {bound->sink.grad.vector(), count.As<int64_t>()});
      if (ReadScalar(count.As<int64_t>()) > 0) return bound->parameter->name;
    }
  }
  return "";
}

}  // namespace zero
