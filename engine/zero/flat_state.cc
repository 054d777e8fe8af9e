#include "engine/zero/flat_state.h"

#include <algorithm>

#include "kernels/check.h"

namespace zero {

FlatState::FlatState(const Plan& plan, int64_t rank, Placement placement,
                     Arena& arena, DType dtype, MemoryCategory category)
    : plan_(&plan),
      rank_(rank),
      placement_(placement),
      data_(
          Tensor::Borrow(nullptr, {plan.StateElems(placement, rank)}, dtype)) {
  if (data_.num_elems() == 0) return;
  data_ = Tensor::Empty(arena, data_.shape(), dtype, category);
}

Tensor FlatState::Piece(const SegmentRef& ref) const {
  const PlannedUnit& unit = plan_->units[ref.unit];
  const Segment& segment = plan_->segment(ref);
  const Segment piece = plan_->Piece(segment, rank_);
  const int64_t offset = sharded() ? plan_->ShardOffset(unit, segment, rank_)
                                   : unit.offset + piece.begin;
  return data_.Slice(offset, {piece.elems});
}

Tensor FlatState::Whole(const SegmentRef& ref) const {
  ZERO_CHECK(!sharded());
  const Segment& segment = plan_->segment(ref);
  return data_.Slice(plan_->units[ref.unit].offset + segment.begin,
                     {segment.elems});
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

void FlatState::ForEachHeld(
    int unit, int64_t begin, int64_t end,
    const std::function<void(const Tensor& values, int64_t begin)>& part)
    const {
  const PlannedUnit& planned = plan_->units[unit];
  if (!sharded()) {
    part(data_.Slice(planned.offset + begin, {end - begin}), begin);
    return;
  }
  for (const Segment& segment : planned.segments) {
    const Segment piece = plan_->Piece(segment, rank_);
    const int64_t from = std::max(begin, piece.begin);
    const int64_t to = std::min(end, piece.end());
    if (from >= to) continue;
    const int64_t offset =
        plan_->ShardOffset(planned, segment, rank_) + from - piece.begin;
    part(data_.Slice(offset, {to - from}), from);
  }
}

}  // namespace zero
