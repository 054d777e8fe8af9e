#include "engine/zero/plan.h"

#include <algorithm>

#include "engine/base/math.h"
#include "kernels/check.h"

namespace zero {
namespace {

PlannedUnit PlanUnit(const UnitSpec& spec, int64_t world) {
  PlannedUnit unit{.name = spec.name, .borrowed = spec.borrowed};
  int64_t end = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    const int64_t elems = parameter.shape.num_elems();
    unit.parameters.push_back({parameter, end, elems});
    end = RoundUp(end + elems, Plan::kAlignElems);
  }
  if (end == 0) return unit;
  const int64_t num_segments = CeilDiv(end, Plan::kMaxSegmentElems);
  const int64_t elems =
      RoundUp(CeilDiv(end, num_segments), Plan::kAlignElems * world);
  for (int64_t begin = 0; begin < end; begin += elems) {
    unit.segments.push_back({begin, elems});
  }
  unit.padded_elems = unit.segments.back().begin + elems;
  return unit;
}

}  // namespace

Plan MakePlan(const std::vector<UnitSpec>& units, int64_t world) {
  ZERO_CHECK_GE(world, 1);
  Plan plan{.world = world};
  for (const UnitSpec& spec : units) {
    PlannedUnit unit = PlanUnit(spec, world);
    unit.offset = plan.padded_elems;
    plan.padded_elems += unit.padded_elems;
    for (const PlannedParameter& parameter : unit.parameters) {
      plan.num_parameters += parameter.elems;
    }
    plan.units.push_back(std::move(unit));
  }
  return plan;
}

}  // namespace zero
