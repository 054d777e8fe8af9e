#include "engine/zero/model_states.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "kernels/check.h"
#include "kernels/rounding.h"

namespace zero {

std::vector<UnitSpec> DescribeUnits(const Model& model) {
  std::vector<UnitSpec> specs;
  for (const auto& unit : model.units()) {
    UnitSpec spec{.name = unit->name(),
                  .backward_reads_parameters = unit->BackwardReadsParameters()};
    for (const auto& parameter : unit->parameters()) {
      spec.parameters.push_back({parameter->name, parameter->stored_shape,
                                 parameter->decay, parameter->frozen,
                                 parameter->vocabulary, parameter->looked_up,
                                 parameter->phase});
    }
    for (const Parameter* parameter : unit->borrowed()) {
      spec.borrowed.push_back(parameter->name);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

namespace {

// Zeroes unit by unit, as the host updates: its threads touch first what they
// will update, so it lies near them.
// REQUIRES: the host is not using the state.
void ZeroOnHost(const FlatState& state, int num_units, Device& device) {
  if (!state.arrays()[static_cast<int>(Home::kHost)].defined()) return;
  const auto stream = device.MakeStream(StreamRole::kHost);
  for (int u = 0; u < num_units; ++u) {
    if (!state.OnHost(u)) continue;
    stream->Enqueue([ops = &device.host().ops(), &stream = *stream,
                     unit = state.Local(u).vector()] {
      ops->Fill(stream, {unit, 0});
    });
  }
  stream->Synchronize();
}

// REQUIRES: also that `stream` is done with the state.
void Zero(const FlatState& state, int num_units, Stream& stream) {
  ZeroOnHost(state, num_units, stream.device());
  const Tensor& array = state.arrays()[static_cast<int>(Home::kDevice)];
  if (!array.defined()) return;
  stream.device().ops().Fill(stream, {array.vector(), 0});
}

}  // namespace

ModelStates::ModelStates(const Plan& plan, int64_t rank, Model& model,
                         const StateOptions& options)
    : plan_(&plan), rank_(rank), options_(options) {
  std::map<std::string, Parameter*> by_name;
  for (Parameter* parameter : model.AllParameters()) {
    by_name[parameter->name] = parameter;
  }
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const PlannedUnit& planned = plan.units[u];
    for (int s = 0; s < static_cast<int>(planned.segments.size()); ++s) {
      segments_.push_back({u, s});
    }
    units_.emplace_back();
    for (const PlannedParameter& parameter : planned.parameters) {
      auto bound = std::make_unique<BoundParameter>();
      Parameter& of = *by_name.at(parameter.spec.name);
      bound->parameter = &of;
      bound->planned = &parameter;
      bound->unit = u;
      bound->sink.by_rows = planned.rows > 0;
      bound->sink.waits = planned.head_waits;
      bound->sink.phase = parameter.phase;
      const TablePart part = of.vocabulary ? planned.part : TablePart();
      if (part.number == 0) {
        of.weight = {};
        of.part_rows = part.rows;
        of.parts.assign(part.count > 1 ? part.count : 0, {});
      }
      bound->weight = part.count > 1 ? &of.parts[part.number] : &of.weight;
      if (options.train && !of.frozen) bound->weight->sink = &bound->sink;
      units_[u].push_back(std::move(bound));
    }
  }
}

ModelStates::~ModelStates() {
  for (BoundParameter* bound : this->bound()) {
    bound->parameter->weight = {};
    bound->parameter->parts.clear();
    bound->parameter->part_rows = 0;
  }
}

void ModelStates::Take(const HomeArenas& arenas, SwappedStates* swapped) {
  swapped_ = swapped;
  const StatePlacement& placement = plan_->placement;
  const auto make = [&](std::string name, Placement where, DType dtype,
                        MemoryCategory category, const FlatState::HomeOf& home,
                        FlatState::SwapPlace place = nullptr,
                        bool trained = true) {
    return FlatState(*plan_, rank_, std::move(name), where, trained, home,
                     arenas, dtype, category, std::move(place));
  };
  const auto parameters = [swapped](const SegmentRef& ref) {
    return swapped->Parameters(ref);
  };
  const auto of_optimizer = [](const PlannedUnit& unit) {
    return unit.homes.optimizer;
  };
  const auto on_host = [&](const PlannedUnit& unit) {
    return of_optimizer(unit) != Home::kDevice;
  };
  params_ = make(
      "parameters", placement.parameters, options_.param_dtype,
      MemoryCategory::kParameters,
      [](const PlannedUnit& unit) { return unit.homes.parameters; }, parameters,
      /*trained=*/false);
  if (!options_.train) return;
  HomeArenas lends = arenas;
  lends[static_cast<int>(Home::kDevice)] = nullptr;
  grads_ = FlatState(
      *plan_, rank_, "gradients", placement.gradients, /*trained=*/true,
      [&](const PlannedUnit& unit) {
        return plan_->AddsOnHost() && on_host(unit) ? Home::kHost
                                                    : Home::kDevice;
      },
      lends, options_.grad_dtype, MemoryCategory::kGradients);
  // The host also has copies of the device's states, with gradients in its
  // memory.
  host_params_ = make(
      "parameters of the host", placement.optimizer, options_.param_dtype,
      MemoryCategory::kParameters,
      [&](const PlannedUnit& unit) -> absl::optional<Home> {
        if (!on_host(unit) || (unit.homes.parameters != Home::kDevice &&
                               !options_.delayed_updates)) {
          return absl::nullopt;
        }
        return of_optimizer(unit);
      },
      parameters);
  host_grads_ = make("gradients of the host", placement.optimizer,
                     options_.grad_dtype, MemoryCategory::kGradients,
                     [&](const PlannedUnit& unit) -> absl::optional<Home> {
                       if (!on_host(unit) || plan_->AddsOnHost()) {
                         return absl::nullopt;
                       }
                       return Home::kHost;
                     });
  if (options_.delayed_updates) {
    const FlatState& first = host_grads();
    other_grads_ =
        make("second gradients of the host",
             first.sharded() ? Placement::kSharded : Placement::kReplicated,
             options_.grad_dtype, MemoryCategory::kGradients, of_optimizer);
  }
  if (options_.master_dtype) {
    master_ =
        make("master", placement.optimizer, *options_.master_dtype,
             MemoryCategory::kOptimizer, of_optimizer,
             [swapped](const SegmentRef& ref) { return swapped->Master(ref); });
  }
  optimizer_.clear();
  for (const std::string& name : options_.optimizer_arrays) {
    const int i = static_cast<int>(optimizer_.size());
    optimizer_.push_back(make(name, placement.optimizer, DType::kF32,
                              MemoryCategory::kOptimizer, of_optimizer,
                              [swapped, i](const SegmentRef& ref) {
                                return swapped->Array(ref, i);
                              }));
  }
}

void ModelStates::Bind(Stream& stream) {
  const int num_units = static_cast<int>(units_.size());
  for (int u = 0; u < num_units; ++u) {
    if (plan_->units[u].padded_elems == 0) continue;
    if (!params_.sharded()) BindValues(u, params_.Unit(u));
  }
  for (const FlatState* state : {&params_, &grads_, &master_, &host_params_,
                                 &host_grads_, &other_grads_}) {
    Zero(*state, num_units, stream);
  }
  for (const FlatState& state : optimizer_) {
    ZeroOnHost(state, num_units, stream.device());
  }
}

void ModelStates::CopyToHost(Stream& stream, bool to_disk) {
  params_are_ = Params::kEqual;
  if (!host_params_.defined()) return;
  for (const SegmentRef& ref : segments_) {
    if (!host_params_.Has(ref)) continue;
    const bool on_disk = host_params_.OnDisk(ref.unit);
    if (on_disk && !to_disk) continue;
    if (on_disk) Hold(ref, /*change=*/true, stream);
    CopyToHost(ref, stream);
  }
  Settle(stream);
}

void ModelStates::CopyToHost(const SegmentRef& ref, Stream& stream) {
  const Tensor to = host_params_.Shard(ref);
  stream.device().Copy(stream, to.data(), params_.Shard(ref).data(),
                       to.bytes());
}

void ModelStates::Exchange(BatchUpload& upload, Stream& stream) {
  params_are_ = params_are_ == Params::kOlder ? Params::kNewer : Params::kOlder;
  if (stream.device().kind() == DeviceKind::kMeta) return;
  for (const SegmentRef& ref : segments_) {
    if (!host_params_.Has(ref)) continue;
    const Tensor own = params_.Shard(ref), other = host_params_.Shard(ref);
    for (int64_t at = 0; at < own.num_elems(); at += kPieceElems) {
      const Shape run = {std::min(own.num_elems() - at, kPieceElems)};
      const Tensor a = own.Slice(at, run), b = other.Slice(at, run);
      upload.Stage([&](void* host) { std::memcpy(host, b.data(), b.bytes()); },
                   [&](const void* host) {
                     Device& device = stream.device();
                     device.Copy(stream, b.data(), a.data(), b.bytes());
                     device.Copy(stream, a.data(), host, a.bytes());
                   });
    }
  }
  stream.Synchronize();
}

void ModelStates::ReturnGradients() {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (!grads_.IsLent(u)) continue;
    const int num_phases = static_cast<int>(plan_->units[u].phases.size());
    for (int phase = 0; phase < num_phases; ++phase) {
      BindSinks(u, phase, Tensor());
    }
  }
  grads_.Return();
}

void ModelStates::AlternateGradients() {
  std::swap(host_grads(), other_grads_);
}

ModelStates::Readable ModelStates::readable(const SegmentRef& ref) const {
  if (options_.stochastic_rounding || !master_.defined() || !master_.Has(ref)) {
    return {&params_};
  }
  if (master_.dtype() == DType::kF32) return {&master_};
  return {&params_, &master_};
}

std::vector<ModelStates::KeptState> ModelStates::kept(
    const SegmentRef& ref) const {
  std::vector<KeptState> kept;
  const bool masters = master_.defined() && master_.Has(ref);
  const DType dtype = params_.dtype();
  if (masters && master_.dtype() == DType::kF32) {
    kept.push_back({"weight", DType::kF32, {&master_}});
    if (options_.stochastic_rounding) {
      kept.push_back({"rounded", dtype, {&params_}});
    }
  } else if (masters) {
    kept.push_back({"weight", DType::kF32, {&params_, &master_}});
  } else {
    kept.push_back({"weight", dtype, {&params_}});
  }
  for (const FlatState& state : optimizer_) {
    if (state.Has(ref)) kept.push_back({state.name(), DType::kF32, {&state}});
  }
  if (options_.delayed_updates && host_params_.Has(ref)) {
    kept.push_back({kStale, dtype, {&host_params_}});
  }
  return kept;
}

std::vector<BoundParameter*> ModelStates::bound() const {
  std::vector<BoundParameter*> all;
  for (const auto& unit : units_) {
    for (const auto& bound : unit) all.push_back(bound.get());
  }
  return all;
}

void ModelStates::BindValues(int unit, const Tensor& flat) {
  for (const auto& bound : units_[unit]) {
    bound->weight->value = flat.defined() ? flat.Slice(bound->planned->offset,
                                                       bound->planned->shape)
                                          : Tensor();
  }
}

void ModelStates::BindSinks(int unit, int phase, const Tensor& flat) {
  for (const auto& bound : units_[unit]) {
    const PlannedParameter& planned = *bound->planned;
    if (bound->parameter->frozen || planned.phase != phase) continue;
    bound->sink.grad =
        flat.defined() ? flat.Slice(planned.offset -
                                        plan_->units[unit].phases[phase].begin,
                                    planned.shape)
                       : Tensor();
  }
}

std::vector<const FlatState*> ModelStates::lasting() const {
  std::vector<const FlatState*> states = {&params_};
  if (master_.defined()) states.push_back(&master_);
  for (const FlatState& state : optimizer_) states.push_back(&state);
  return states;
}

Segment ModelStates::RangeOf(const FlatState& state, StatePart part,
                             const SegmentRef& ref) const {
  return part == StatePart::kLocal ? state.LocalRange(ref)
                                   : plan_->Shard(plan_->segment(ref), rank_);
}

void ModelStates::ForEachRun(const FlatState& state, StatePart part,
                             const VisitFn& visit) const {
  for (const SegmentRef& ref : segments_) {
    if (!state.Has(ref)) continue;
    const Segment range = RangeOf(state, part, ref);
    ForEachRun(ref, range, state.Values(ref, range), /*rest=*/{}, visit);
  }
}

void ModelStates::ForEachRun(const SegmentRef& ref, const Segment& range,
                             const Tensor& values, const Tensor& rest,
                             const VisitFn& visit) const {
  for (const auto& bound : units_[ref.unit]) {
    const int64_t offset = bound->planned->offset;
    const int64_t end = std::min(range.end(), offset + bound->num_elems());
    for (int64_t at = std::max(range.begin, offset); at < end;
         at += kPieceElems) {
      const Segment place{at, std::min(end - at, kPieceElems)};
      const auto slice = [&](const Tensor& of) {
        return of.Slice(at - range.begin, {place.elems});
      };
      visit({bound->parameter, bound->planned->first + at - offset,
             slice(values), ref, place,
             rest.defined() ? slice(rest) : Tensor()});
    }
  }
}

namespace {

// Rounds fp32 values into a state of `dtype`.
void Keep(absl::Span<const float> values, DType dtype, void* to) {
  auto* const half = static_cast<uint16_t*>(to);
  const auto keep = [&](auto part_of) {
    for (size_t i = 0; i < values.size(); ++i) half[i] = part_of(values[i]);
  };
  switch (dtype) {
    case DType::kBF16:
      return keep([](float value) { return SplitMaster(value).param; });
    case DType::kU16:
      return keep([](float value) { return SplitMaster(value).rest; });
    case DType::kF16:
      return keep(F32ToF16);
    default:
      ZERO_CHECK(dtype == DType::kF32) << dtype << " is not a model state's";
      std::memcpy(to, values.data(), values.size() * sizeof(float));
  }
}

}  // namespace

void ModelStates::Fill(StatePart part, const ValuesFn& values,
                       BatchUpload& upload, Stream& stream, const AddFn& add) {
  stream.Synchronize();
  for (const FlatState& state : optimizer_) {
    Zero(state, static_cast<int>(units_.size()), stream);
  }
  if (stream.device().kind() == DeviceKind::kMeta) return;
  if (swapped_ != nullptr) {
    swapped_->Clear();
  } else if (values == nullptr) {
    return;
  }
  std::vector<float> exact;
  const auto write = [&](int64_t from, const Tensor& to) {
    const absl::Span<const float> kept(&exact[from], to.num_elems());
    upload.Stage([&](void* host) { Keep(kept, to.dtype(), host); },
                 [&](const void* host) {
                   stream.device().Copy(stream, to.data(), host, to.bytes());
                 });
  };
  // A unit's master weights, or some of them, are stored with its parameters.
  const auto take = [&](const StateRun& run) {
    exact.resize(run.place.elems);
    values(*run.parameter, run.begin, run.place.elems, exact.data());
    write(0, run.values);
    if (!master_.defined() || !master_.Has(run.segment)) return;
    const Segment local = master_.LocalRange(run.segment);
    const int64_t begin = std::max(run.place.begin, local.begin);
    const int64_t end = std::min(run.place.end(), local.end());
    if (begin >= end) return;
    write(begin - run.place.begin,
          master_.Values(run.segment, {begin, end - begin}));
  };
  for (const SegmentRef& ref : segments_) {
    Hold(ref, /*change=*/true, stream);
    if (values == nullptr) continue;
    const Segment range = RangeOf(params_, part, ref);
    ForEachRun(ref, range, params_.Values(ref, range), /*rest=*/{}, take);
    if (host_params_.OnDisk(ref.unit) && host_params_.Has(ref)) {
      CopyToHost(ref, stream);
    }
    if (add) add(ref);
  }
  Settle(stream);
  stream.Synchronize();
}

}  // namespace zero
