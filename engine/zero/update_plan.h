// The elements that a rank updates, in runs, and the norms that it measures: a
// pure function of the plan.
//
// Four index spaces meet here. An element of a *unit* is counted in the unit's
// flat buffer. A rank's *local* elements are its shards of that buffer, laid
// end to end; in a replicated array they are the unit's.
// A *global* number, first_element plus the element of the unit, is the same
// for any number of ranks.
#ifndef ZERO_ENGINE_ZERO_UPDATE_PLAN_H_
#define ZERO_ENGINE_ZERO_UPDATE_PLAN_H_

#include <cstdint>
#include <vector>

#include "engine/zero/plan.h"
#include "kernels/ops.h"

namespace zero {

// The optimizer's requirements.
struct UpdateRules {
  float weight_decay = 0;
  bool decay_all = false;     // vectors too
  bool tensor_norms = false;  // of every parameter, before any update
};

struct UnitUpdate {
  int64_t first_element = 0;  // global number of the unit's element 0
  // Local elements of the optimizer's arrays. local + shift is the element of
  // the unit.
  std::vector<UpdateRange> ranges;
  // With tensor_norms, each range's slot for its squares, and the tensor whose
  // sums scale it.
  std::vector<TensorPart> norms;
};

struct UpdatePlan {
  std::vector<UnitUpdate> units;
  // Trained parameters. With tensor_norms, numbered in plan order.
  int64_t num_tensors = 0;
  // Slots [k * num_tensors + t], k < max_ranges, are this rank's own ranges of
  // tensor t, in order; later ones belong to other ranks' shards.
  int64_t max_ranges = 0;
  int64_t num_slots = 0;
};

UpdatePlan MakeUpdatePlan(const Plan& plan, int64_t rank,
                          const UpdateRules& rules);

// The part of a unit's update for local elements [begin, end), which are
// counted from `begin` on.
UnitUpdate UpdateWithin(const UnitUpdate& unit, int64_t begin, int64_t end);

// The padding elements of a unit's gradients.
std::vector<Segment> GapsOf(const PlannedUnit& unit);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_UPDATE_PLAN_H_
