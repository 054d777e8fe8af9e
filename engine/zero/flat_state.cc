#include "engine/zero/flat_state.h"

#include "kernels/check.h"

namespace zero {

FlatState::FlatState(const Plan& plan, int64_t rank, std::string name,
                     Placement placement, bool trained, const HomeOf& home,
                     const HomeArenas& arenas, DType dtype,
                     MemoryCategory category, SwapPlace swap_place)
    : plan_(&plan),
      rank_(rank),
      name_(std::move(name)),
      placement_(placement),
      trained_(trained),
      dtype_(dtype),
      swap_place_(std::move(swap_place)) {
  std::array<int64_t, kNumMemories> elems = {};
  for (const PlannedUnit& unit : plan.units) {
    Place place{home(unit)};
    if (place.home.has_value() && *place.home != Home::kNvme) {
      int64_t& all = elems[static_cast<int>(*place.home)];
      place.range = {all, trained ? unit.trained_elems : unit.padded_elems};
      all = place.range.end();
      place.phases.resize(unit.phases.size());
    }
    places_.push_back(place);
  }
  for (int h = 0; h < kNumMemories; ++h) {
    lent_[h] = arenas[h] == nullptr;
    if (elems[h] == 0 || lent_[h]) continue;
    const Shape shape = {plan.StateElems(elems[h], placement, rank)};
    arrays_[h] = shape.num_elems() == 0
                     ? Tensor::Borrow(nullptr, shape, dtype)
                     : Tensor::Empty(*arenas[h], shape, dtype, category);
  }
}

Tensor FlatState::Part(int unit, int64_t begin, int64_t elems) const {
  const Place& place = places_[unit];
  ZERO_CHECK(place.home.has_value() && *place.home != Home::kNvme)
      << name_ << " has nothing of " << plan_->units[unit].name;
  if (lent_[static_cast<int>(*place.home)] && place.range.elems > 0) {
    const std::vector<Segment>& phases = plan_->units[unit].phases;
    size_t p = 0;
    while (plan_->StateElems(phases[p].begin, placement_, rank_) > begin) ++p;
    ZERO_CHECK(place.phases[p].defined())
        << name_ << " has nothing of " << plan_->units[unit].name << " now";
    return place.phases[p].Slice(
        begin - plan_->StateElems(phases[p].begin, placement_, rank_), {elems});
  }
  const Tensor& array = arrays_[static_cast<int>(*place.home)];
  // A unit without elements may be the only one in its memory.
  if (!array.defined()) return Tensor::Borrow(nullptr, {0}, dtype_);
  return array.Slice(
      plan_->StateElems(place.range.begin, placement_, rank_) + begin, {elems});
}

int64_t FlatState::LocalElems(int unit, int phase) const {
  return plan_->StateElems(plan_->units[unit].phases[phase].elems, placement_,
                           rank_);
}

void FlatState::Lend(int unit, int phase, Tensor elems) {
  ZERO_CHECK(IsLent(unit));
  ZERO_CHECK_EQ(elems.num_elems(), LocalElems(unit, phase));
  places_[unit].phases[phase] = std::move(elems);
}

void FlatState::Return() {
  for (Place& place : places_) {
    for (Tensor& phase : place.phases) phase = Tensor();
  }
}

Segment FlatState::LocalRange(const SegmentRef& ref) const {
  const Segment& segment = plan_->segment(ref);
  return sharded() ? plan_->Shard(segment, rank_) : segment;
}

Tensor FlatState::Values(const SegmentRef& ref, const Segment& range) const {
  const Segment local = LocalRange(ref);
  ZERO_CHECK(range.begin >= local.begin && range.end() <= local.end());
  if (OnDisk(ref.unit)) {
    return swap_place_(ref).Slice(range.begin - local.begin, {range.elems});
  }
  return Part(ref.unit,
              plan_->StateElems(plan_->segment(ref).begin, placement_, rank_) +
                  range.begin - local.begin,
              range.elems);
}

TablePieces FlatState::PiecesOf(int table) const {
  const PlannedUnit& unit = plan_->units[table];
  const PlannedParameter& rows = unit.parameters[0];
  const Segment own = LocalRange({table, 0});
  return {unit.segments[0].elems, own.begin, own.elems, rows.first,
          rows.first + rows.elems};
}

Tensor FlatState::Unit(int unit) const {
  ZERO_CHECK(!sharded());
  return Local(unit);
}

Tensor FlatState::Local(int unit) const {
  return Part(unit, 0,
              plan_->StateElems(places_[unit].range.elems, placement_, rank_));
}

}  // namespace zero
