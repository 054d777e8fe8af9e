#include "engine/zero/flat_state.h"

#include "kernels/check.h"

namespace zero {

FlatState::FlatState(const Plan& plan, int64_t rank, std::string name,
                     Placement placement, bool trained, Arena& arena,
                     DType dtype, MemoryCategory category)
    : plan_(&plan),
      rank_(rank),
      name_(std::move(name)),
      placement_(placement),
      trained_(trained) {
  const int64_t elems = trained ? plan.trained_elems : plan.padded_elems;
  const Shape shape = {plan.StateElems(elems, placement, rank)};
  data_ = shape.num_elems() == 0 ? Tensor::Borrow(nullptr, shape, dtype)
                                 : Tensor::Empty(arena, shape, dtype, category);
}

Segment FlatState::PlaceOf(int unit) const {
  const PlannedUnit& planned = plan_->units[unit];
  return trained_ ? Segment{planned.trained_offset, planned.trained_elems}
                  : Segment{planned.offset, planned.padded_elems};
}

int64_t FlatState::OffsetOf(int unit, int64_t begin) const {
  return plan_->StateElems(PlaceOf(unit).begin + begin, placement_, rank_);
}

Segment FlatState::HeldRange(const SegmentRef& ref) const {
  const Segment& segment = plan_->segment(ref);
  return sharded() ? plan_->Piece(segment, rank_) : segment;
}

Tensor FlatState::Values(const SegmentRef& ref, const Segment& range) const {
  const Segment held = HeldRange(ref);
  ZERO_CHECK(range.begin >= held.begin && range.end() <= held.end());
  return data_.Slice(
      OffsetOf(ref.unit, plan_->segment(ref).begin) + range.begin - held.begin,
      {range.elems});
}

Tensor FlatState::Unit(int unit) const {
  ZERO_CHECK(!sharded());
  return Held(unit);
}

Tensor FlatState::Held(int unit) const {
  return data_.Slice(OffsetOf(unit, 0), {plan_->StateElems(PlaceOf(unit).elems,
                                                           placement_, rank_)});
}

}  // namespace zero
