#include "engine/zero/flat_state.h"

#include "kernels/check.h"

namespace zero {

FlatState::FlatState(const Plan& plan, int64_t rank, std::string name,
                     Placement placement, Arena& arena, DType dtype,
                     MemoryCategory category)
    : plan_(&plan),
      rank_(rank),
      name_(std::move(name)),
      placement_(placement),
      data_(
          Tensor::Borrow(nullptr, {plan.StateElems(placement, rank)}, dtype)) {
  if (data_.num_elems() == 0) return;
  data_ = Tensor::Empty(arena, data_.shape(), dtype, category);
}

Segment FlatState::HeldRange(const SegmentRef& ref) const {
  const Segment& segment = plan_->segment(ref);
  return sharded() ? plan_->Piece(segment, rank_) : segment;
}

Tensor FlatState::Values(const SegmentRef& ref, const Segment& range) const {
  const PlannedUnit& unit = plan_->units[ref.unit];
  const Segment held = HeldRange(ref);
  ZERO_CHECK(range.begin >= held.begin && range.end() <= held.end());
  const int64_t begin =
      sharded() ? plan_->ShardOffset(unit, plan_->segment(ref), rank_)
                : unit.offset + held.begin;
  return data_.Slice(begin + range.begin - held.begin, {range.elems});
}

Tensor FlatState::Unit(int unit) const {
  ZERO_CHECK(!sharded());
  const PlannedUnit& planned = plan_->units[unit];
  return data_.Slice(planned.offset, {planned.padded_elems});
}

Tensor FlatState::Held(int unit) const {
  const PlannedUnit& planned = plan_->units[unit];
  if (!sharded()) return Unit(unit);
  const Partition& owners = plan_->owners;
  return data_.Slice(owners.OwnedElems(planned.offset, rank_),
                     {owners.OwnedElems(planned.padded_elems, rank_)});
}

}  // namespace zero
