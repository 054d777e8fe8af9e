#include "engine/zero/model_states.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zero {

std::vector<UnitSpec> DescribeUnits(const Model& model) {
  std::vector<UnitSpec> specs;
  for (const auto& unit : model.units()) {
    UnitSpec spec{.name = unit->name(),
                  .backward_reads_parameters = unit->BackwardReadsParameters()};
    for (const auto& parameter : unit->parameters()) {
      spec.parameters.push_back({parameter->name, parameter->stored_shape,
                                 parameter->decay, parameter->frozen,
                                 parameter->looked_up});
    }
    for (const Parameter* parameter : unit->borrowed()) {
      spec.borrowed.push_back(parameter->name);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

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
      bound->parameter = by_name.at(parameter.spec.name);
      bound->unit = u;
      bound->offset = parameter.offset;
      bound->parameter->weight = {};
      if (options.train && !bound->parameter->frozen) {
        bound->parameter->weight.sink = &bound->sink;
      }
      units_[u].push_back(std::move(bound));
    }
  }
}

ModelStates::~ModelStates() {
  for (BoundParameter* bound : this->bound()) bound->parameter->weight = {};
}

void ModelStates::Take(Arena& arena) {
  const StatePlacement& placement = plan_->placement;
  const auto make = [&](std::string name, Placement where, DType dtype,
                        MemoryCategory category) {
    const bool trained = category != MemoryCategory::kParameters;
    return FlatState(*plan_, rank_, std::move(name), where, trained, arena,
                     dtype, category);
  };
  params_ = make("parameters", placement.parameters, options_.param_dtype,
                 MemoryCategory::kParameters);
  if (!options_.train) return;
  grads_ = make("gradients", placement.gradients, options_.grad_dtype,
                MemoryCategory::kGradients);
  if (options_.param_dtype != DType::kF32) {
    master_ = make("master", placement.optimizer, DType::kF32,
                   MemoryCategory::kOptimizer);
  }
  optimizer_.clear();
  for (int i = 0; i < options_.num_optimizer_arrays; ++i) {
    optimizer_.push_back(make(absl::StrCat("optimizer.", i),
                              placement.optimizer, DType::kF32,
                              MemoryCategory::kOptimizer));
  }
}

void ModelStates::Bind(Ops& ops, Stream& stream) {
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    if (plan_->units[u].padded_elems == 0) continue;
    if (!params_.sharded()) BindValues(u, params_.Unit(u));
    if (grads_.defined() && !grads_.sharded()) BindSinks(u, grads_.Unit(u));
  }
  for (const FlatState* state : {&params_, &grads_, &master_}) {
    if (state->defined()) ops.Fill(stream, {state->data().vector(), 0});
  }
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
    bound->parameter->weight.value =
        flat.defined()
            ? flat.Slice(bound->offset, bound->parameter->stored_shape)
            : Tensor();
  }
}

void ModelStates::BindSinks(int unit, const Tensor& flat) {
  for (const auto& bound : units_[unit]) {
    if (bound->parameter->frozen) continue;
    bound->sink.grad =
        flat.defined()
            ? flat.Slice(bound->offset, bound->parameter->stored_shape)
            : Tensor();
  }
}

std::vector<const FlatState*> ModelStates::lasting() const {
  std::vector<const FlatState*> states = {&params_};
  if (master_.defined()) states.push_back(&master_);
  for (const FlatState& state : optimizer_) states.push_back(&state);
  return states;
}

void ModelStates::ForEachRun(const FlatState& state, StatePart part,
                             const VisitFn& visit) const {
  for (const SegmentRef& ref : segments_) {
    if (!state.Has(ref)) continue;
    const Segment range = part == StatePart::kHeld
                              ? state.HeldRange(ref)
                              : plan_->Piece(plan_->segment(ref), rank_);
    ForEachRun(ref, range, state.Values(ref, range), visit);
  }
}

void ModelStates::ForEachRun(const SegmentRef& ref, const Segment& range,
                             const Tensor& values, const VisitFn& visit) const {
  for (const auto& bound : units_[ref.unit]) {
    const int64_t end =
        std::min(range.end(), bound->offset + bound->num_elems());
    for (int64_t at = std::max(range.begin, bound->offset); at < end;
         at += kPieceElems) {
      const Segment place{at, std::min(end - at, kPieceElems)};
      visit({bound->parameter, at - bound->offset,
             values.Slice(at - range.begin, {place.elems}), ref, place});
    }
  }
}

// The device rounds: it reads memory of the host where that lies.
void ModelStates::Fill(StatePart part, const ValuesFn& values,
                       BatchUpload& upload, Stream& stream) {
  Ops& ops = stream.device().ops();
  for (const FlatState& state : optimizer_) {
    ops.Fill(stream, {state.data().vector(), 0});
  }
  if (values == nullptr || stream.device().kind() == DeviceKind::kMeta) return;
  // Where parameters lie, so do their master weights, or some of them.
  ForEachRun(params_, part, [&](const StateRun& run) {
    const auto write = [&](const float* from, const Tensor& to) {
      ops.Cast(stream, {{from, DType::kF32, to.num_elems()}, to.vector()});
    };
    upload.Stage(
        [&](void* host) {
          values(*run.parameter, run.begin, run.place.elems,
                 static_cast<float*>(host));
        },
        [&](const void* host) {
          const float* from = static_cast<const float*>(host);
          write(from, run.values);
          if (!master_.defined() || !master_.Has(run.segment)) return;
          const Segment held = master_.HeldRange(run.segment);
          const int64_t begin = std::max(run.place.begin, held.begin);
          const int64_t end = std::min(run.place.end(), held.end());
          if (begin >= end) return;
          write(from + begin - run.place.begin,
                master_.Values(run.segment, {begin, end - begin}));
        });
  });
  stream.Synchronize();
}

}  // namespace zero
