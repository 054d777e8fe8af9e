// The executor's model states: memory, binding, and values in and out.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/exceptions.h"
#include "engine/base/hash.h"
#include "engine/base/status.h"
#include "engine/zero/executor_internal.h"
#include "kernels/check.h"

namespace zero {
namespace {

// Weights are made in pieces: the embedding alone may be larger than the
// memory to spare.
constexpr int64_t kPieceElems = int64_t{1} << 19;

// Parameters of equal decay that touch (but for alignment gaps, whose
// gradients are zero) update in one run.
std::vector<UpdateRange> RangesOfUnit(const PlannedUnit& unit,
                                      const ExecutorOptions& options) {
  const bool merge = !options.optimizer.needs_tensor_norms();
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

// Cuts every range (a parameter) where another shard's piece begins, and
// numbers the parts from `first`: the order in which their squares are added.
void CutAtPieces(const Plan& plan, const PlannedUnit& unit, int64_t first,
                 UnitUpdate* whole) {
  std::vector<UpdateRange> parts;
  for (const UpdateRange& range : whole->ranges) {
    const int64_t begin = first + static_cast<int64_t>(parts.size());
    for (const Segment& segment : unit.segments) {
      for (int64_t owner = 0; owner < plan.pieces(); ++owner) {
        const Segment piece = plan.Piece(segment, owner);
        UpdateRange part = range;
        part.begin = std::max(range.begin, piece.begin);
        part.end = std::min(range.end, piece.end());
        if (part.begin < part.end) parts.push_back(part);
      }
    }
    const int64_t end = first + static_cast<int64_t>(parts.size());
    for (int64_t own = begin; own < end; ++own) {
      whole->norms.push_back({own, begin, end});
    }
  }
  whole->ranges = std::move(parts);
}

// What of `whole` is in this rank's pieces, which lie one behind the other.
UnitUpdate OwnPieces(const Plan& plan, const PlannedUnit& unit, int64_t rank,
                     const UnitUpdate& whole) {
  UnitUpdate own{.first_element = whole.first_element};
  for (const Segment& segment : unit.segments) {
    const Segment piece = plan.Piece(segment, rank);
    const int64_t shift = piece.begin - plan.OwnedElems(segment.begin, rank);
    for (size_t i = 0; i < whole.ranges.size(); ++i) {
      UpdateRange range = whole.ranges[i];
      range.begin = std::max(range.begin, piece.begin) - shift;
      range.end = std::min(range.end, piece.end()) - shift;
      range.shift = shift;
      if (range.begin >= range.end) continue;
      own.ranges.push_back(range);
      if (!whole.norms.empty()) own.norms.push_back(whole.norms[i]);
    }
  }
  return own;
}

// Elements are numbered by unit: no unit has as many.
constexpr int64_t kUnitElements = int64_t{1} << 40;

// `num_tensor_parts` counts on from unit to unit.
UnitUpdate UpdateOf(const Plan& plan, int u, int64_t rank,
                    const ExecutorOptions& options, int64_t* num_tensor_parts) {
  const PlannedUnit& unit = plan.units[u];
  UnitUpdate whole{.first_element = u * kUnitElements,
                   .ranges = RangesOfUnit(unit, options)};
  if (options.optimizer.needs_tensor_norms()) {
    CutAtPieces(plan, unit, *num_tensor_parts, &whole);
    *num_tensor_parts += static_cast<int64_t>(whole.norms.size());
  }
  if (plan.placement.optimizer == Placement::kReplicated) return whole;
  return OwnPieces(plan, unit, rank, whole);
}

// What lies between and behind the parameters that get gradients.
std::vector<Segment> GapsOf(const PlannedUnit& unit) {
  std::vector<Segment> gaps;
  int64_t end = 0;
  const auto add = [&](int64_t begin) {
    if (begin > end) gaps.push_back({end, begin - end});
  };
  for (const PlannedParameter& parameter : unit.parameters) {
    if (parameter.spec.frozen) continue;
    add(parameter.offset);
    end = parameter.offset + parameter.elems;
  }
  add(unit.padded_elems);
  return gaps;
}

}  // namespace

std::vector<UnitSpec> DescribeUnits(const Model& model) {
  std::vector<UnitSpec> specs;
  for (const auto& unit : model.units()) {
    UnitSpec spec{.name = unit->name(),
                  .backward_reads_parameters = unit->BackwardReadsParameters()};
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

Executor::Executor(const Rank& rank, Model& model,
                   const ExecutorOptions& options)
    : rank_(&rank),
      device_(rank.device),
      model_(&model),
      options_(options),
      plan_(MakePlan(DescribeUnits(model),
                     options.plan_options(rank.world(), rank.shards(),
                                          rank.reduce->algorithm()))) {
  ZERO_CHECK_GE(plan_.units.size(), size_t{2});
  units_.resize(plan_.units.size());
  if (!options_.train) return;
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    units_[u].update =
        UpdateOf(plan_, u, rank.rank(), options_, &num_tensor_parts_);
  }
}

Executor::~Executor() {
  // Nothing may be at work on the memory that goes. A device that has failed
  // says so once more.
  for (Stream* stream :
       {gather_stream_.get(), reduce_stream_.get(), stream_.get()}) {
    if (stream == nullptr) continue;
    CatchExceptions([&] {
      stream->Synchronize();
      return absl::OkStatus();
    }).IgnoreError();
  }
  // The model outlives the memory it was bound to.
  for (Parameter* parameter : model_->AllParameters()) parameter->weight = {};
  model_->DropTables();
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Make(
    const Rank& rank, Model& model, const ExecutorOptions& options,
    const TransientBytes& transient, MemoryLedger* ledger) {
  std::unique_ptr<Executor> executor(new Executor(rank, model, options));
  ZERO_RETURN_IF_ERROR(executor->Reserve(transient, ledger));
  executor->BindParameters();
  return executor;
}

// Buckets are reduced one after the other, each within the group first.
int64_t Executor::ReduceStagingBytes() const {
  const DType dtype = options_.reduce_dtype;
  int64_t most = 0;
  for (const Bucket& bucket : plan_.reduce_buckets) {
    most = std::max(
        {most, rank_->reduce->StagingBytes(dtype, bucket.elems),
         rank_->across->StagingBytes(dtype, bucket.elems / plan_.shards)});
  }
  return most;
}

absl::Status Executor::Reserve(const TransientBytes& transient,
                               MemoryLedger* ledger) {
  const auto make_stream = [&](StreamRole role) {
    ledger->AddFixed(device_->stream_bytes());
    return device_->MakeStream(role);
  };
  stream_ = make_stream(StreamRole::kCompute);
  if (plan_.world > 1) {
    gather_stream_ = make_stream(StreamRole::kGather);
    reduce_stream_ = make_stream(StreamRole::kReduce);
  }
  computed_ = device_->MakeEvent();
  const StatePlacement& placement = plan_.placement;
  const bool train = options_.train;
  const bool has_master = train && options_.param_dtype != DType::kF32;
  const int num_states = train ? options_.optimizer.StateFloatsPerElement() : 0;
  const int64_t num_sums = plan_.num_segments * plan_.pieces() + plan_.world;
  constexpr int64_t kAgreed = 64;
  const int64_t num_doubles = num_sums + 2 * num_tensor_parts_ + kAgreed;
  const int64_t staging_bytes = train ? ReduceStagingBytes() : 0;
  const auto elems_of = [&](Placement where) {
    return plan_.StateElems(where, rank_->rank());
  };
  const int64_t state_bytes =
      elems_of(placement.parameters) * DTypeBytes(options_.param_dtype) +
      (train ? elems_of(placement.gradients) * DTypeBytes(options_.grad_dtype)
             : 0) +
      elems_of(placement.optimizer) * static_cast<int64_t>(sizeof(float)) *
          (num_states + (has_master ? 1 : 0)) +
      num_doubles * static_cast<int64_t>(sizeof(double)) + staging_bytes +
      (num_states + 10) * Arena::kAlignment +
      model_->TableBytes(options_.max_positions);
  ZERO_ASSIGN_OR_RETURN(states_,
                        Arena::Make(*device_, MemoryKind::kDevice, state_bytes,
                                    "model states", ledger));
  ZERO_ASSIGN_OR_RETURN(
      activations_,
      Arena::Make(*device_, MemoryKind::kDevice, transient.activations,
                  "activations and workspace", ledger));
  ZERO_ASSIGN_OR_RETURN(
      rotating_, Arena::Make(*device_, MemoryKind::kDevice, transient.rotating,
                             "gathered parameters and gradients", ledger));
  for (Arena* arena : {states_.get(), activations_.get(), rotating_.get()}) {
    arena->Touch();
  }
  ZERO_RETURN_IF_ERROR(HoldRegistered());

  const auto make = [&](Placement where, DType dtype, MemoryCategory category) {
    return FlatState(plan_, rank_->rank(), where, *states_, dtype, category);
  };
  params_ = make(placement.parameters, options_.param_dtype,
                 MemoryCategory::kParameters);
  if (train) {
    grads_ = make(placement.gradients, options_.grad_dtype,
                  MemoryCategory::kGradients);
  }
  if (has_master) {
    master_ =
        make(placement.optimizer, DType::kF32, MemoryCategory::kOptimizer);
  }
  for (int i = 0; i < num_states; ++i) {
    optimizer_states_.push_back(
        make(placement.optimizer, DType::kF32, MemoryCategory::kOptimizer));
  }
  scalars_ = Tensor::Empty(*states_, {static_cast<int64_t>(sizeof(Scalars))},
                           DType::kU8, MemoryCategory::kInputs);
  sums_ =
      Tensor::Empty(*states_, {num_sums}, DType::kF64, MemoryCategory::kInputs);
  if (num_tensor_parts_ > 0) {
    tensor_norms_ = Tensor::Empty(*states_, {2 * num_tensor_parts_},
                                  DType::kF64, MemoryCategory::kInputs);
  }
  agreed_ =
      Tensor::Empty(*states_, {kAgreed}, DType::kF64, MemoryCategory::kInputs);
  if (staging_bytes > 0) {
    staging_ = Tensor::Empty(*states_, {staging_bytes}, DType::kU8,
                             MemoryCategory::kReduceBuffers);
  }
  ZERO_ASSIGN_OR_RETURN(host_agreed_,
                        device_->Allocate(agreed_.bytes(), MemoryKind::kHost));
  agreed_read_ = device_->MakeEvent();
  for (BegunStep& step : steps_) {
    ZERO_ASSIGN_OR_RETURN(
        step.scalars, device_->Allocate(sizeof(Scalars), MemoryKind::kHost));
    step.read = device_->MakeEvent();
  }
  // The largest are the hashes that AgreeOnSchedule gathers, or logits.
  ZERO_ASSIGN_OR_RETURN(
      host_numbers_,
      device_->Allocate(
          std::max(
              plan_.world * static_cast<int64_t>(Hasher().HexDigest().size()),
              logits_size() * static_cast<int64_t>(sizeof(float))),
          MemoryKind::kHost));
  ZERO_RETURN_IF_ERROR(ReserveUploads(std::max(
      transient.upload, kPieceElems * static_cast<int64_t>(sizeof(float)))));
  read_ = device_->MakeEvent();
  context_ = std::make_unique<Context>(*device_, *stream_, *activations_);
  model_->Prepare(*states_, *stream_, options_.max_positions);
  for (const FlatState* state : {&params_, &grads_, &master_}) {
    if (!state->defined()) continue;
    context_->ops().Fill(*stream_, {state->data().vector(), 0});
  }
  return absl::OkStatus();
}

// What bulk collectives send and receive lies in these arenas, on all ranks
// alike: where one rank can not register its memory, none may. A rank that is
// alone in a channel sends nothing there.
absl::Status Executor::HoldRegistered() {
  std::vector<std::pair<Arena*, std::shared_ptr<void>>> registered;
  bool all = true;
  for (Arena* arena : {states_.get(), rotating_.get()}) {
    for (Communicator* comm :
         {rank_->gather.get(), rank_->reduce.get(), rank_->across.get()}) {
      if (comm->world() == 1) continue;
      auto held = comm->Register(arena->data(), arena->capacity_bytes());
      all = all && held != nullptr;
      registered.emplace_back(arena, std::move(held));
    }
  }
  if (rank_->agree) {
    ZERO_ASSIGN_OR_RETURN(all, rank_->agree("memory is registered", all));
  }
  if (!all) return absl::OkStatus();
  for (auto& [arena, held] : registered) arena->Hold(std::move(held));
  return absl::OkStatus();
}

void Executor::BindParameters() {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    const PlannedUnit& planned = plan_.units[u];
    UnitState& state = units_[u];
    state.unit = model_->units()[u].get();
    state.gaps = GapsOf(planned);
    state.gather_done = device_->MakeEvent();
    for (size_t i = 0; i < planned.parameters.size(); ++i) {
      auto bound = std::make_unique<BoundParameter>();
      Parameter& parameter = *state.unit->parameters()[i];
      bound->parameter = &parameter;
      bound->unit = u;
      bound->offset = planned.parameters[i].offset;
      parameter.weight = {};
      if (options_.train && !parameter.frozen) {
        parameter.weight.sink = &bound->sink;
      }
      state.parameters.push_back(std::move(bound));
    }
    if (planned.padded_elems == 0) continue;
    if (!params_.sharded()) BindValues(u, params_.Unit(u));
    if (options_.train && !grads_.sharded()) BindSinks(u, grads_.Unit(u));
  }
  for (size_t b = 0; b < plan_.reduce_buckets.size(); ++b) {
    reduced_.push_back(device_->MakeEvent());
    if (plan_.groups() > 1) reduced_across_.push_back(device_->MakeEvent());
  }
  for (size_t b = 0; b < plan_.gather_buckets.size(); ++b) {
    updated_.push_back(device_->MakeEvent());
  }
}

// Undefined `flat`: nothing to read, and whoever reads crashes at once.
void Executor::BindValues(int unit, const Tensor& flat) {
  for (const auto& bound : units_[unit].parameters) {
    bound->parameter->weight.value =
        flat.defined()
            ? flat.Slice(bound->offset, bound->parameter->stored_shape)
            : Tensor();
  }
}

void Executor::BindSinks(int unit, const Tensor& flat) {
  for (const auto& bound : units_[unit].parameters) {
    if (bound->parameter->frozen) continue;
    bound->sink.grad =
        flat.defined()
            ? flat.Slice(bound->offset, bound->parameter->stored_shape)
            : Tensor();
  }
}

void Executor::Initialize(uint64_t seed) {
  ClearOptimizer();
  if (device_->kind() == DeviceKind::kMeta) return;
  for (const UnitState& unit : units_) {
    for (const auto& bound : unit.parameters) {
      WriteInPieces(*bound, [&](int64_t begin, int64_t count, float* out) {
        InitialValues(*bound->parameter, seed, begin, count, out);
      });
    }
  }
  stream_->Synchronize();
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
      if (!device_->asynchronous()) {  // reads any memory, at once
        WriteParameter(*bound, 0, host);
        continue;
      }
      WriteInPieces(*bound, [&](int64_t begin, int64_t count, float* out) {
        std::memcpy(out, host.data() + begin, count * sizeof(float));
      });
    }
  }
  stream_->Synchronize();
}

void Executor::ClearOptimizer() {
  staged_ = Tensor();
  for (const FlatState& state : optimizer_states_) {
    context_->ops().Fill(*stream_, {state.data().vector(), 0});
  }
}

void Executor::WriteInPieces(const BoundParameter& bound, const FillFn& fill) {
  const int64_t n = bound.parameter->stored_shape.num_elems();
  for (int64_t begin = 0; begin < n; begin += kPieceElems) {
    const int64_t count = std::min(kPieceElems, n - begin);
    if (!Holds(bound, begin, begin + count)) continue;
    HostStaging& piece = uploads_[next_upload_];
    next_upload_ = (next_upload_ + 1) % uploads_.size();
    piece.sent->Synchronize();
    float* const values = static_cast<float*>(piece.memory.data());
    fill(begin, count, values);
    WriteParameter(bound, begin, {values, static_cast<size_t>(count)});
    stream_->Record(*piece.sent);
  }
}

// The device rounds: it reads memory of the host where that lies.
void Executor::WriteParameter(const BoundParameter& bound, int64_t begin,
                              absl::Span<const float> values) {
  const int64_t first = bound.offset + begin;
  const int64_t end = first + static_cast<int64_t>(values.size());
  for (const FlatState* state : {&master_, &params_}) {
    if (!state->defined()) continue;
    state->ForEachHeld(bound.unit, first, end,
                       [&](const Tensor& to, int64_t at) {
                         const ConstVector from = {values.data() + (at - first),
                                                   DType::kF32, to.num_elems()};
                         context_->ops().Cast(*stream_, {from, to.vector()});
                       });
  }
}

bool Executor::Holds(const BoundParameter& bound, int64_t begin,
                     int64_t end) const {
  bool holds = false;
  for (const FlatState* state : {&master_, &params_}) {
    if (!state->defined()) continue;
    state->ForEachHeld(bound.unit, bound.offset + begin, bound.offset + end,
                       [&](const Tensor&, int64_t) { holds = true; });
  }
  return holds;
}

absl::Status Executor::ReadParameter(const Parameter& parameter, int64_t first,
                                     int64_t count, float* out) {
  AwaitAllParameters();
  const BoundParameter* bound = nullptr;
  for (const UnitState& unit : units_) {
    for (const auto& candidate : unit.parameters) {
      if (candidate->parameter == &parameter) bound = candidate.get();
    }
  }
  ZERO_CHECK(bound != nullptr)
      << parameter.name << " is not a parameter of this model";
  const FlatState& state = readable();
  ZERO_CHECK_GE(first, 0);
  ZERO_CHECK_LE(first + count, parameter.stored_shape.num_elems());
  const int64_t begin = bound->offset + first;
  const int64_t end = begin + count;
  if (!state.sharded()) {
    DownloadAsF32(state.Unit(bound->unit).Slice(begin, {end - begin}), out);
    return rank_->status();
  }
  const std::vector<Segment>& segments = plan_.units[bound->unit].segments;
  for (size_t s = 0; s < segments.size(); ++s) {
    const int64_t from = std::max(begin, segments[s].begin);
    const int64_t to = std::min(end, segments[s].end());
    if (from >= to) continue;
    ZERO_RETURN_IF_ERROR(StageSegment({bound->unit, static_cast<int>(s)}));
    DownloadAsF32(staged_.Slice(from - segments[s].begin, {to - from}),
                  out + (from - begin));
  }
  return absl::OkStatus();
}

// Gathers a segment of the sharded state that ReadParameter reads.
absl::Status Executor::StageSegment(const SegmentRef& ref) {
  if (staged_.defined() && staged_ref_ == ref) return absl::OkStatus();
  const FlatState& state = readable();
  const Tensor piece = state.Piece(ref);
  const int64_t elems = plan_.segment(ref).elems;
  staged_ = Tensor();
  staged_ = Tensor::Empty(*activations_, {elems}, piece.dtype(),
                          MemoryCategory::kGatheredParameters);
  staged_ref_ = ref;
  GatherPieces(plan_.units[ref.unit].name, piece.dtype(),
               {{piece.data(), staged_.data(), elems}});
  gather_stream_->Synchronize();
  return rank_->status();
}

std::vector<StateArray> Executor::StateArrays() {
  AwaitAllParameters();
  std::vector<StateArray> arrays;
  for (int u = 0; u < static_cast<int>(plan_.units.size()); ++u) {
    const PlannedUnit& unit = plan_.units[u];
    if (unit.padded_elems == 0) continue;
    const auto add = [&](const FlatState& state, const std::string& what) {
      if (!state.defined()) return;
      arrays.push_back({absl::StrCat(unit.name, "/", what), state.Held(u)});
    };
    add(params_, "parameters");
    add(master_, "master");
    for (size_t i = 0; i < optimizer_states_.size(); ++i) {
      add(optimizer_states_[i], absl::StrCat("optimizer.", i));
    }
  }
  return arrays;
}

void Executor::CopyOut(const Tensor& values, void* out) {
  device_->Copy(*stream_, out, values.data(), values.bytes());
  stream_->Synchronize();
}

void Executor::CopyIn(const void* from, const Tensor& values) {
  staged_ = Tensor();  // may be older now
  device_->Copy(*stream_, values.data(), from, values.bytes());
  stream_->Synchronize();
}

void Executor::DownloadAsF32(const Tensor& from, float* out) {
  if (device_->kind() == DeviceKind::kMeta) return;
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

}  // namespace zero
