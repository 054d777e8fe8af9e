// A model state (parameters, gradients, moments) in one flat array laid out by
// the plan: the elements of all units, or only this rank's pieces of them.
#ifndef ZERO_ENGINE_ZERO_FLAT_STATE_H_
#define ZERO_ENGINE_ZERO_FLAT_STATE_H_

#include <cstdint>
#include <functional>

#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/plan.h"

namespace zero {

class FlatState {
 public:
  FlatState() = default;  // undefined

  // Takes plan.StateElems(placement, rank) elements of `arena`. `plan` must
  // outlive the state.
  FlatState(const Plan& plan, int64_t rank, Placement placement, Arena& arena,
            DType dtype, MemoryCategory category);

  bool defined() const { return plan_ != nullptr; }
  bool sharded() const { return placement_ == Placement::kSharded; }
  const Tensor& data() const { return data_; }

  // This rank's piece of a segment, wherever it lies.
  Tensor Piece(const SegmentRef& ref) const;
  // A whole segment, a whole unit. REQUIRES: !sharded().
  Tensor Whole(const SegmentRef& ref) const;
  Tensor Unit(int unit) const;

  // This rank's elements of a unit: all, or its pieces in segment order.
  Tensor Held(int unit) const;

  // Calls `part(values, begin)` for every run of elements of `unit` within
  // [begin, end) that this rank holds; `begin` is the run's first element.
  void ForEachHeld(int unit, int64_t begin, int64_t end,
                   const std::function<void(const Tensor& values,
                                            int64_t begin)>& part) const;

 private:
  const Plan* plan_ = nullptr;
  int64_t rank_ = 0;
  Placement placement_ = Placement::kReplicated;
  Tensor data_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_FLAT_STATE_H_
