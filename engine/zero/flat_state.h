// A model state (parameters, gradients, moments) in flat arrays laid out by the
// plan, one for every home that some unit has: all elements of its units, or
// only this rank's shards of them. A home without an arena has no array: memory
// for a unit's elements is lent phase by phase (Lend, Return).
#ifndef ZERO_ENGINE_ZERO_FLAT_STATE_H_
#define ZERO_ENGINE_ZERO_FLAT_STATE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/optional.h"
#include "engine/tensor/arena.h"
#include "engine/tensor/tensor.h"
#include "engine/zero/plan.h"
#include "kernels/ops.h"

namespace zero {

// One arena for each Home.
using HomeArenas = std::array<Arena*, kNumMemories>;

class FlatState {
 public:
  // The home of a unit's elements; none: the state lacks this unit.
  using HomeOf = std::function<absl::optional<Home>(const PlannedUnit&)>;

  FlatState() = default;  // undefined

  // The place of elements of segments on a disk while they are in use.
  using SwapPlace = std::function<Tensor(const SegmentRef&)>;

  // Takes memory for `rank`'s part of all elements, or of the `trained` ones.
  // `plan` must outlive the state.
  FlatState(const Plan& plan, int64_t rank, std::string name,
            Placement placement, bool trained, const HomeOf& home,
            const HomeArenas& arenas, DType dtype, MemoryCategory category,
            SwapPlace swap_place = nullptr);

  bool defined() const { return plan_ != nullptr; }
  const std::string& name() const { return name_; }  // "master"
  DType dtype() const { return dtype_; }
  bool sharded() const { return placement_ == Placement::kSharded; }
  // One array for each Home; undefined where no unit lives.
  const std::array<Tensor, kNumMemories>& arrays() const { return arrays_; }
  bool OnDisk(int unit) const {
    return defined() && places_[unit].home == Home::kNvme;
  }
  bool OnHost(int unit) const {
    return defined() && places_[unit].home == Home::kHost;
  }
  // Whether a unit's elements exist only while memory is lent.
  bool IsLent(int unit) const {
    return defined() && places_[unit].home.has_value() &&
           lent_[static_cast<int>(*places_[unit].home)];
  }
  bool HasUnit(int unit) const {
    return defined() && places_[unit].home.has_value();
  }
  bool Has(const SegmentRef& ref) const {
    return HasUnit(ref.unit) &&
           (!trained_ ||
            ref.segment < plan_->units[ref.unit].num_trained_segments);
  }

  // The elements of a segment stored here: all, or this rank's shard.
  Segment LocalRange(const SegmentRef& ref) const;
  // Elements `range` of a unit; for a unit on a disk, where they are in use.
  // REQUIRES: they are within LocalRange(ref).
  Tensor Values(const SegmentRef& ref, const Segment& range) const;

  // This rank's shard of a segment, wherever it is stored.
  Tensor Shard(const SegmentRef& ref) const {
    return Values(ref, plan_->Shard(plan_->segment(ref), rank_));
  }
  // A full segment, a full unit. REQUIRES: !sharded().
  Tensor Full(const SegmentRef& ref) const {
    return Values(ref, plan_->segment(ref));
  }
  Tensor Unit(int unit) const;

  // This rank's elements of a unit: all, or its shards in segment order.
  // REQUIRES: !OnDisk(unit).
  Tensor Local(int unit) const;
  // Elements `local` of Local(unit). If they are lent, no phase boundary may
  // divide them.
  Tensor Local(int unit, const Segment& local) const {
    return Part(unit, local.begin, local.elems);
  }

  // The stored pieces of a table, or of the part of it that a unit is.
  TablePieces PiecesOf(int table) const;

  // Lends memory: `elems` holds this rank's elements of a unit's phase until
  // Return, which ends all loans. REQUIRES: IsLent(unit).
  void Lend(int unit, int phase, Tensor elems);
  // The memory lent for a unit's phase; undefined if none was.
  const Tensor& Lent(int unit, int phase) const {
    return places_[unit].phases[phase];
  }
  void Return();
  // The number of a phase's elements stored here.
  int64_t LocalElems(int unit, int phase) const;

 private:
  // A unit's home, and its offset among the units there.
  struct Place {
    absl::optional<Home> home;
    Segment range;
    std::vector<Tensor> phases;  // lent memory
  };
  // `elems` elements from `begin`, among a unit's elements stored here.
  Tensor Part(int unit, int64_t begin, int64_t elems) const;

  const Plan* plan_ = nullptr;
  int64_t rank_ = 0;
  std::string name_;
  Placement placement_ = Placement::kReplicated;
  bool trained_ = false;
  DType dtype_ = DType::kF32;
  std::vector<Place> places_;  // by unit
  std::array<Tensor, kNumMemories> arrays_;
  std::array<bool, kNumMemories> lent_ = {};
  SwapPlace swap_place_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_FLAT_STATE_H_
