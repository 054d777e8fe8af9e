#include "engine/zero/model_states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"

namespace zero {

ModelStates::ModelStates(const Plan& plan, int64_t rank, Model& model,
                         const StateOptions& options)
    : plan_(&plan), rank_(rank), model_(&model), options_(options) {
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const PlannedUnit& planned = plan.units[u];
    units_.emplace_back();
    for (size_t i = 0; i < planned.parameters.size(); ++i) {
      auto bound = std::make_unique<BoundParameter>();
      bound->parameter = model.units()[u]->parameters()[i].get();
      bound->unit = u;
      bound->offset = planned.parameters[i].offset;
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
  const auto make = [&](Placement where, DType dtype, MemoryCategory category) {
    return FlatState(*plan_, rank_, where, arena, dtype, category);
  };
  params_ = make(placement.parameters, options_.param_dtype,
                 MemoryCategory::kParameters);
  if (!options_.train) return;
  grads_ = make(placement.gradients, options_.grad_dtype,
                MemoryCategory::kGradients);
  if (options_.param_dtype != DType::kF32) {
    master_ =
        make(placement.optimizer, DType::kF32, MemoryCategory::kOptimizer);
  }
  optimizer_.clear();
  for (int i = 0; i < options_.num_optimizer_arrays; ++i) {
    optimizer_.push_back(
        make(placement.optimizer, DType::kF32, MemoryCategory::kOptimizer));
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

const BoundParameter& ModelStates::BoundOf(const Parameter& parameter) const {
  const std::vector<BoundParameter*> all = bound();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const BoundParameter* bound) {
        return bound->parameter == &parameter;
      });
  ZERO_CHECK(found != all.end())
      << parameter.name << " is not a parameter of this model";
  return **found;
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

void ModelStates::Initialize(uint64_t seed, BatchUpload& upload,
                             Stream& stream) {
  ClearOptimizer(stream);
  if (stream.device().kind() == DeviceKind::kMeta) return;
  for (const BoundParameter* bound : this->bound()) {
    WriteInPieces(
        *bound,
        [&](int64_t begin, int64_t count, float* out) {
          InitialValues(*bound->parameter, seed, begin, count, out);
        },
        upload, stream);
  }
  stream.Synchronize();
}

void ModelStates::Load(
    const std::function<void(const Parameter&, float* out)>& values,
    BatchUpload& upload, Stream& stream) {
  ClearOptimizer(stream);
  if (stream.device().kind() == DeviceKind::kMeta) return;
  std::vector<float> host;
  for (const BoundParameter* bound : this->bound()) {
    host.resize(bound->num_elems());
    values(*bound->parameter, host.data());
    if (!stream.device().asynchronous()) {  // reads any memory, at once
      Write(*bound, 0, host, stream);
      continue;
    }
    WriteInPieces(
        *bound,
        [&](int64_t begin, int64_t count, float* out) {
          std::memcpy(out, host.data() + begin, count * sizeof(float));
        },
        upload, stream);
  }
  stream.Synchronize();
}

void ModelStates::ClearOptimizer(Stream& stream) {
  for (const FlatState& state : optimizer_) {
    stream.device().ops().Fill(stream, {state.data().vector(), 0});
  }
}

void ModelStates::WriteInPieces(const BoundParameter& bound, const FillFn& fill,
                                BatchUpload& upload, Stream& stream) {
  const int64_t n = bound.num_elems();
  for (int64_t begin = 0; begin < n; begin += kPieceElems) {
    const int64_t count = std::min(kPieceElems, n - begin);
    if (!Holds(bound, begin, begin + count)) continue;
    upload.Stage(
        [&](void* host) { fill(begin, count, static_cast<float*>(host)); },
        [&](const void* host) {
          Write(bound, begin,
                {static_cast<const float*>(host), static_cast<size_t>(count)},
                stream);
        });
  }
}

// The device rounds: it reads memory of the host where that lies.
void ModelStates::Write(const BoundParameter& bound, int64_t begin,
                        absl::Span<const float> values, Stream& stream) {
  const int64_t first = bound.offset + begin;
  const int64_t end = first + static_cast<int64_t>(values.size());
  for (const FlatState* state : {&master_, &params_}) {
    if (!state->defined()) continue;
    state->ForEachHeld(
        bound.unit, first, end, [&](const Tensor& to, int64_t at) {
          const ConstVector from = {values.data() + (at - first), DType::kF32,
                                    to.num_elems()};
          stream.device().ops().Cast(stream, {from, to.vector()});
        });
  }
}

bool ModelStates::Holds(const BoundParameter& bound, int64_t begin,
                        int64_t end) const {
  bool holds = false;
  for (const FlatState* state : {&master_, &params_}) {
    if (!state->defined()) continue;
    state->ForEachHeld(bound.unit, bound.offset + begin, bound.offset + end,
                       [&](const Tensor&, int64_t) { holds = true; });
  }
  return holds;
}

std::vector<StateArray> ModelStates::Arrays() const {
  std::vector<StateArray> arrays;
  for (int u = 0; u < static_cast<int>(plan_->units.size()); ++u) {
    const PlannedUnit& unit = plan_->units[u];
    if (unit.padded_elems == 0) continue;
    const auto add = [&](const FlatState& state, const std::string& what) {
      if (!state.defined()) return;
      arrays.push_back({absl::StrCat(unit.name, "/", what), state.Held(u)});
    };
    add(params_, "parameters");
    add(master_, "master");
    for (size_t i = 0; i < optimizer_.size(); ++i) {
      add(optimizer_[i], absl::StrCat("optimizer.", i));
    }
  }
  return arrays;
}

}  // namespace zero
