// A model state (parameters, gradients, moments) in one flat array laid out by
// the plan: the elements of all units, or only this rank's pieces of them.
#ifndef ZERO_ENGINE_ZERO_FLAT_STATE_H_
#define ZERO_ENGINE_ZERO_FLAT_STATE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/plan.h"

namespace zero {

class FlatState {
 public:
  FlatState() = default;  // undefined

  // Takes what `rank` holds of all elements, or of those that are `trained`,
  // from `arena`. `plan` must outlive the state.
  FlatState(const Plan& plan, int64_t rank, std::string name,
            Placement placement, bool trained, Arena& arena, DType dtype,
            MemoryCategory category);

  bool defined() const { return plan_ != nullptr; }
  const std::string& name() const { return name_; }  // "master"
  bool sharded() const { return placement_ == Placement::kSharded; }
  const Tensor& data() const { return data_; }
  bool Has(const SegmentRef& ref) const {
    return !trained_ ||
           ref.segment < plan_->units[ref.unit].num_trained_segments;
  }

  // The elements of a segment that lie here: all, or this rank's piece.
  Segment HeldRange(const SegmentRef& ref) const;
  // Elements `range` of a unit. REQUIRES: they are within HeldRange(ref).
  Tensor Values(const SegmentRef& ref, const Segment& range) const;

  // This rank's piece of a segment, wherever it lies.
  Tensor Piece(const SegmentRef& ref) const {
    return Values(ref, plan_->Piece(plan_->segment(ref), rank_));
  }
  // A whole segment, a whole unit. REQUIRES: !sharded().
  Tensor Whole(const SegmentRef& ref) const {
    return Values(ref, plan_->segment(ref));
  }
  Tensor Unit(int unit) const;

  // This rank's elements of a unit: all, or its pieces in segment order.
  Tensor Held(int unit) const;

 private:
  // A unit's place among all units, and where what lies here of it begins.
  Segment PlaceOf(int unit) const;
  int64_t OffsetOf(int unit, int64_t begin) const;

  const Plan* plan_ = nullptr;
  int64_t rank_ = 0;
  std::string name_;
  Placement placement_ = Placement::kReplicated;
  bool trained_ = false;
  Tensor data_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_FLAT_STATE_H_
