#include "engine/zero/schedule.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/hash.h"

namespace zero {
namespace {

const char* KindName(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "Forward";
    case ActionKind::kForwardBackward:
      return "ForwardBackward";
    case ActionKind::kBackward:
      return "Backward";
    case ActionKind::kGather:
      return "Gather";
    case ActionKind::kRelease:
      return "Release";
    case ActionKind::kReduce:
      return "Reduce";
    case ActionKind::kAwaitReduce:
      return "AwaitReduce";
    case ActionKind::kNorm:
      return "Norm";
    case ActionKind::kUpdate:
      return "Update";
    case ActionKind::kGatherUpdated:
      return "GatherUpdated";
  }
  return "?";
}

std::string BucketName(const std::vector<Bucket>& buckets, int index,
                       const Plan& plan) {
  const Bucket& bucket = buckets[index];
  const std::string& first = plan.units[bucket.segments.front().unit].name;
  const std::string& last = plan.units[bucket.segments.back().unit].name;
  return absl::StrCat("bucket ", index, ": ", first,
                      first == last ? "" : absl::StrCat(" to ", last));
}

// Builds a schedule computation by computation, in the order given: what each
// needs is gathered one computation ahead, and gradients are reduced as soon
// as a bucket of them is complete.
class Builder {
 public:
  Builder(const Plan& plan, bool overlap)
      : plan_(plan),
        overlap_(overlap),
        shards_parameters_(plan.placement.parameters == Placement::kSharded),
        shards_gradients_(plan.placement.gradients == Placement::kSharded),
        resident_(plan.units.size()) {}

  std::vector<Action> Build(const std::vector<Action>& computations,
                            int64_t last_micro_step) {
    for (size_t i = 0; i < computations.size(); ++i) {
      const Action& action = computations[i];
      const bool backward = action.kind != ActionKind::kForward;
      Gather(action);
      if (overlap_ && i + 1 < computations.size()) Gather(computations[i + 1]);
      if (backward && shards_gradients_) AwaitBuffersFor(action);
      actions_.push_back(action);
      if (backward &&
          (shards_gradients_ || action.micro_step == last_micro_step)) {
        ReduceFrom(action);
      }
      Release(computations, i);
    }
    AwaitAllBut(0);
    return std::move(actions_);
  }

 private:
  void Gather(const Action& action) {
    if (!shards_parameters_) return;
    for (int unit : plan_.units[action.index].needs) {
      if (resident_[unit] || plan_.units[unit].padded_elems == 0) continue;
      resident_[unit] = true;
      actions_.push_back({ActionKind::kGather, unit, action.micro_step});
    }
  }

  bool Needs(const Action& action, int unit) const {
    const std::vector<int>& needs = plan_.units[action.index].needs;
    return std::find(needs.begin(), needs.end(), unit) != needs.end();
  }

  // Two computations ahead: the unit that turns from forward to backward, and
  // the first one between micro-batches, stay. Both would be gathered again
  // before their buffer was needed for anything else.
  void Release(const std::vector<Action>& computations, size_t i) {
    for (size_t u = 0; u < resident_.size(); ++u) {
      bool needed = !resident_[u];
      for (size_t k = i + 1; k < std::min(i + 3, computations.size()); ++k) {
        needed = needed || Needs(computations[k], static_cast<int>(u));
      }
      if (needed) continue;
      resident_[u] = false;
      actions_.push_back({ActionKind::kRelease, static_cast<int>(u),
                          computations[i].micro_step});
    }
  }

  // Starts every bucket that the backward pass of this unit completes.
  void ReduceFrom(const Action& action) {
    const int num_buckets = static_cast<int>(plan_.reduce_buckets.size());
    if (action.kind == ActionKind::kForwardBackward) next_bucket_ = 0;
    std::vector<int> started;
    while (next_bucket_ < num_buckets &&
           plan_.reduce_buckets[next_bucket_].segments.back().unit >=
               action.index) {
      actions_.push_back(
          {ActionKind::kReduce, next_bucket_, action.micro_step});
      started.push_back(next_bucket_++);
    }
    if (started.empty()) return;
    in_flight_.push_back({std::move(started), action.micro_step});
    if (!overlap_) AwaitAllBut(0);
  }

  // A backward pass takes gradient buffers: at most one unit's is still being
  // reduced beside it, and none that it needs itself (a tied embedding's, from
  // the micro-batch before).
  void AwaitBuffersFor(const Action& action) {
    AwaitAllBut(1);
    if (in_flight_.empty()) return;
    const int bucket = in_flight_.front().buckets.front();
    const int unit = plan_.reduce_buckets[bucket].segments.front().unit;
    if (Needs(action, unit)) AwaitAllBut(0);
  }

  // Waits for the reductions of all but the last `keep` units that have some.
  void AwaitAllBut(size_t keep) {
    while (in_flight_.size() > keep) {
      for (int bucket : in_flight_.front().buckets) {
        actions_.push_back(
            {ActionKind::kAwaitReduce, bucket, in_flight_.front().micro_step});
      }
      in_flight_.pop_front();
    }
  }

  struct InFlight {
    std::vector<int> buckets;
    int64_t micro_step;
  };

  const Plan& plan_;
  bool overlap_, shards_parameters_, shards_gradients_;
  std::vector<bool> resident_;
  int next_bucket_ = 0;
  std::deque<InFlight> in_flight_;
  std::vector<Action> actions_;
};

}  // namespace

std::string ActionName(const Action& action, const Plan& plan) {
  std::string name = KindName(action.kind);
  if (action.index < 0) return name;
  switch (action.kind) {
    case ActionKind::kReduce:
    case ActionKind::kAwaitReduce:
      return absl::StrCat(
          name, "(", BucketName(plan.reduce_buckets, action.index, plan), ")");
    case ActionKind::kGatherUpdated:
      return absl::StrCat(
          name, "(", BucketName(plan.gather_buckets, action.index, plan), ")");
    default:
      return absl::StrCat(name, "(", plan.units[action.index].name, ")");
  }
}

std::vector<Action> MakeSchedule(const Plan& plan,
                                 const ScheduleOptions& options) {
  const int num_units = static_cast<int>(plan.units.size());
  const int last = num_units - 1;
  std::vector<Action> computations;
  for (int64_t micro = 0; micro < options.micro_steps; ++micro) {
    for (int u = 0; u < last; ++u) {
      computations.push_back({ActionKind::kForward, u, micro});
    }
    computations.push_back({ActionKind::kForwardBackward, last, micro});
    for (int u = last - 1; u >= 0; --u) {
      computations.push_back({ActionKind::kBackward, u, micro});
    }
  }
  std::vector<Action> actions =
      Builder(plan, options.overlap)
          .Build(computations, options.micro_steps - 1);
  actions.push_back({ActionKind::kNorm});
  size_t next_bucket = 0;
  for (int u = 0; u < num_units; ++u) {
    actions.push_back({ActionKind::kUpdate, u});
    while (next_bucket < plan.gather_buckets.size() &&
           plan.gather_buckets[next_bucket].segments.back().unit <= u) {
      actions.push_back(
          {ActionKind::kGatherUpdated, static_cast<int>(next_bucket++)});
    }
  }
  return actions;
}

std::vector<Action> MakeForwardSchedule(const Plan& plan, bool overlap) {
  std::vector<Action> computations;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    computations.push_back({ActionKind::kForward, static_cast<int>(u)});
  }
  return Builder(plan, overlap).Build(computations, /*last_micro_step=*/-1);
}

StepWire CountWire(const Plan& plan, const std::vector<Action>& actions,
                   int64_t parameter_bytes, int64_t gradient_bytes) {
  const bool all_update = plan.placement.optimizer == Placement::kReplicated;
  const auto sent = [&](int64_t elems) {
    return elems / plan.world * (plan.world - 1);
  };
  StepWire wire;
  for (const Action& action : actions) {
    switch (action.kind) {
      case ActionKind::kGather:
        wire.gathered +=
            sent(plan.units[action.index].padded_elems) * parameter_bytes;
        break;
      case ActionKind::kGatherUpdated:
        wire.gathered +=
            sent(plan.gather_buckets[action.index].elems) * parameter_bytes;
        break;
      case ActionKind::kReduce:
        wire.reduced += sent(plan.reduce_buckets[action.index].elems) *
                        gradient_bytes * (all_update ? 2 : 1);
        break;
      default:
        break;
    }
  }
  return wire;
}

StepWire FormulaWire(const Plan& plan, int64_t micro_steps,
                     int64_t parameter_bytes, int64_t gradient_bytes) {
  const StatePlacement& placement = plan.placement;
  const bool shards_optimizer = placement.optimizer == Placement::kSharded;
  const int64_t sent = plan.padded_elems / plan.world * (plan.world - 1);
  StepWire wire;
  wire.reduced =
      sent * gradient_bytes *
      (placement.gradients == Placement::kSharded ? micro_steps : 1) *
      (shards_optimizer ? 1 : 2);
  if (placement.parameters == Placement::kSharded) {
    wire.gathered = 2 * micro_steps * sent * parameter_bytes;
  } else if (shards_optimizer) {
    wire.gathered = sent * parameter_bytes;
  }
  return wire;
}

std::string ScheduleHash(const Plan& plan, const std::vector<Action>& actions) {
  Hasher hasher;
  hasher.Update(absl::StrCat(plan.world, " ranks\n"));
  for (const PlannedUnit& unit : plan.units) {
    for (const Segment& segment : unit.segments) {
      hasher.Update(absl::StrCat(unit.name, " ", segment.begin, " ",
                                 segment.elems, "\n"));
    }
  }
  for (const Action& action : actions) {
    hasher.Update(
        absl::StrCat(ActionName(action, plan), " ", action.micro_step, "\n"));
  }
  return hasher.HexDigest();
}

}  // namespace zero
