#include "engine/zero/schedule.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <map>
#include <utility>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "engine/base/hash.h"

namespace zero {
namespace {

// The names of actions, in the order of ActionKind.
constexpr const char* kKindNames[] = {"LoadBatch",
                                      "Forward",
                                      "ForwardBackward",
                                      "Backward",
                                      "ReadParameters",
                                      "Fetch",
                                      "Gather",
                                      "LookUp",
                                      "Release",
                                      "Reduce",
                                      "ReduceAcross",
                                      "Offload",
                                      "AddOffloaded",
                                      "ReleaseGradients",
                                      "AddRows",
                                      "SumSquares",
                                      "Norm",
                                      "ReadStates",
                                      "Moments",
                                      "TensorNorms",
                                      "Update",
                                      "WriteStates",
                                      "Upload",
                                      "GatherUpdated"};
static_assert(std::size(kKindNames) ==
              static_cast<size_t>(ActionKind::kGatherUpdated) + 1);

std::string BucketName(const std::vector<Bucket>& buckets, int index,
                       const Plan& plan) {
  const Bucket& bucket = buckets[index];
  if (bucket.is_rows()) {
    return absl::StrCat("bucket ", index, ": rows of ",
                        plan.units[bucket.unit].name);
  }
  const std::string& first = plan.units[bucket.segments.front().unit].name;
  const std::string& last = plan.units[bucket.segments.back().unit].name;
  return absl::StrCat("bucket ", index, ": ", first,
                      first == last ? "" : absl::StrCat(" to ", last));
}

bool Contains(const std::vector<int>& units, int unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

// The units whose parameters a computation reads.
const std::vector<int>& RequiredUnits(const Action& action, const Plan& plan) {
  const PlannedUnit& unit = plan.units[action.index];
  return action.kind == ActionKind::kBackward ? unit.backward_required_units
                                              : unit.required_units;
}

StreamRole StreamOf(const Action& action, const Plan& plan) {
  switch (action.kind) {
    case ActionKind::kGather:
    case ActionKind::kLookUp:
    case ActionKind::kGatherUpdated:
      return StreamRole::kGather;
    case ActionKind::kReduce:
    case ActionKind::kReduceAcross:
      return StreamRole::kReduce;
    case ActionKind::kReadParameters:
    case ActionKind::kReadStates:
      return StreamRole::kRead;
    case ActionKind::kWriteStates:
      return StreamRole::kWrite;
    case ActionKind::kFetch:
      return StreamRole::kUp;
    case ActionKind::kUpload:
      // The copy is within the host's memory if parameters live there.
      return plan.FetchesParameters(action.index) ? StreamRole::kHost
                                                  : StreamRole::kUp;
    case ActionKind::kOffload:
      return StreamRole::kDown;
    case ActionKind::kAddOffloaded:
    case ActionKind::kSumSquares:
      return StreamRole::kHost;
    case ActionKind::kAddRows:
    case ActionKind::kMoments:
    case ActionKind::kUpdate:
      return plan.UpdatesOnHost(action.index) ? StreamRole::kHost
                                              : StreamRole::kCompute;
    default:
      return StreamRole::kCompute;
  }
}

// Builds a schedule around its computations, in order: parameters are gathered
// ahead, and gradients are reduced as soon as a bucket is complete.
class Builder {
 public:
  Builder(const Plan& plan, const ScheduleOptions& options,
          std::vector<Action> computations)
      : plan_(plan),
        options_(options),
        computations_(std::move(computations)),
        shards_parameters_(plan.shards_parameters()),
        shards_gradients_(plan.shards_gradients()),
        units_(plan.units.size()) {
    if (shards_parameters_ || options.delayed_update) ListUses();
  }

  std::vector<Action> Build() {
    for (size_t i = 0; i < computations_.size(); ++i) {
      const Action& action = computations_[i];
      const bool backward = action.kind != ActionKind::kForward;
      LoadBatch(i, i);
      Gather(i);
      if (backward && shards_gradients_) ReleaseBuffersFor(action);
      actions_.push_back(action);
      const bool last_micro_step =
          action.micro_step == options_.micro_steps - 1;
      if (backward && (shards_gradients_ || last_micro_step)) {
        ReduceFrom(action, last_micro_step);
      }
      Release(i);
      if (options_.delayed_update) UploadAfter(i);
    }
    ReleaseAllBut(0);
    return std::move(actions_);
  }

 private:
  struct UnitUses {
    std::vector<size_t> computations;  // that need its parameters, ascending
    bool persistent = false;
    bool in_place = false;
    bool uploaded = false;
    int num_offloaded = 0;  // segments, in the last micro-step
  };

  // The units whose parameters computation i reads.
  const std::vector<int>& Needs(size_t i) const {
    return RequiredUnits(computations_[i], plan_);
  }

  int64_t Elems(int unit) const { return plan_.units[unit].padded_elems; }

  void ListUses() {
    used_elems_.push_back(0);
    for (size_t i = 0; i < computations_.size(); ++i) {
      used_elems_.push_back(used_elems_.back());
      for (int unit : Needs(i)) {
        if (computations_[i].phase == 0) used_elems_.back() += Elems(unit);
        units_[unit].computations.push_back(i);
      }
    }
    const std::vector<bool> persistent = PersistentUnits(plan_, policy_);
    for (size_t u = 0; u < units_.size(); ++u) {
      units_[u].persistent = persistent[u];
    }
  }

  // The first computation after i that needs a unit; the end if none does.
  size_t NextUse(int unit, size_t i) const {
    const std::vector<size_t>& uses = units_[unit].computations;
    const auto next = std::upper_bound(uses.begin(), uses.end(), i);
    return next == uses.end() ? computations_.size() : *next;
  }

  // The first computation after i of another unit.
  size_t NextUnit(size_t i) const {
    do {
      ++i;
    } while (i < computations_.size() && computations_[i].phase > 0);
    return i;
  }

  // Whether computation k's parameters may be gathered before computation i.
  bool MayPrefetch(size_t k, size_t i) const {
    if (!options_.overlap) return false;
    if (computations_[k].phase > 0) return true;
    return policy_.prefetch_elems == GatherPolicy::kAuto
               ? k == NextUnit(i)
               : used_elems_[k] - used_elems_[i + 1] < policy_.prefetch_elems;
  }

  // Whether a computation is of the model's first unit, which looks tokens up.
  bool IsLookup(const Action& action) const {
    return action.kind == ActionKind::kForward &&
           plan_.units[action.index].model_unit == 0;
  }

  // The tables that a computation reads by rows.
  std::vector<int> LookedUpBy(const Action& action) const {
    std::vector<int> tables;
    if (!IsLookup(action)) return tables;
    for (int t = plan_.num_computing; t < static_cast<int>(units_.size());
         ++t) {
      if (plan_.units[t].owner == action.index && plan_.LooksUpRows(t)) {
        tables.push_back(t);
      }
    }
    return tables;
  }

  // If computation `of` is a micro-step's first, loads its batch and looks the
  // tokens up, before computation `at`. One batch at a time waits for its
  // lookup.
  void LoadBatch(size_t of, size_t at) {
    const Action& action = computations_[of];
    const Action& before = computations_[at];
    const int64_t num_looked_up = before.micro_step + !IsLookup(before);
    if (!IsLookup(action) || num_loaded_ != action.micro_step ||
        num_loaded_ > num_looked_up) {
      return;
    }
    ++num_loaded_;
    actions_.push_back(
        {.kind = ActionKind::kLoadBatch, .micro_step = action.micro_step});
    for (const int table : LookedUpBy(action)) {
      actions_.push_back({ActionKind::kLookUp, table, action.micro_step});
    }
  }

  // Gathers computation i's parameters, and those needed soon after.
  void Gather(size_t i) {
    if (!shards_parameters_) return;
    MakeRoom(i, i);
    Gather(i, i);
    for (size_t k = i + 1; k < computations_.size() && MayPrefetch(k, i); ++k) {
      if (!MakeRoom(k, i)) return;
      LoadBatch(k, i);
      Gather(k, i);
    }
  }

  // Gathers the parameters of computation `of` before computation `at`.
  void Gather(size_t of, size_t at) {
    for (int unit : Needs(of)) {
      if (units_[unit].in_place || Elems(unit) == 0) continue;
      units_[unit].in_place = true;
      live_elems_ += Elems(unit);
      const int64_t micro_step = computations_[at].micro_step;
      if (plan_.ReadsParameters(unit)) {
        const int num_segments =
            static_cast<int>(plan_.units[unit].segments.size());
        for (int s = 0; s < num_segments; ++s) {
          for (const auto kind :
               {ActionKind::kReadParameters, ActionKind::kFetch}) {
            actions_.push_back({.kind = kind,
                                .index = unit,
                                .micro_step = micro_step,
                                .phase = s});
          }
        }
      } else if (plan_.FetchesParameters(unit)) {
        actions_.push_back({ActionKind::kFetch, unit, micro_step});
      }
      if (plan_.world > 1) {
        actions_.push_back({ActionKind::kGather, unit, micro_step});
      }
    }
  }

  void Drop(int unit, size_t i) {
    units_[unit].in_place = false;
    live_elems_ -= Elems(unit);
    actions_.push_back(
        {ActionKind::kRelease, unit, computations_[i].micro_step});
  }

  // Releases the units needed last, and not before computation `of`, until its
  // parameters fit; false if they do not.
  bool MakeRoom(size_t of, size_t at) {
    if (policy_.max_live_elems == GatherPolicy::kAuto) return true;
    int64_t missing = 0;
    for (int unit : Needs(of)) {
      if (!units_[unit].in_place) missing += Elems(unit);
    }
    while (live_elems_ + missing > policy_.max_live_elems) {
      int last = -1;
      size_t last_use = of;
      for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
        const bool idle = units_[u].in_place && !units_[u].persistent &&
                          !Contains(Needs(at), u) && !Contains(Needs(of), u);
        if (idle && NextUse(u, at) > last_use) {
          last = u;
          last_use = NextUse(u, at);
        }
      }
      if (last < 0) return false;
      Drop(last, at);
    }
    return true;
  }

  void Release(size_t i) {
    for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
      if (units_[u].in_place && !Stays(u, i)) Drop(u, i);
    }
  }

  bool Stays(int unit, size_t i) const {
    const size_t next = NextUse(unit, i);
    if (next == computations_.size()) return false;
    // The unit would be gathered again at once.
    if (next == i + 1 || MayPrefetch(next, i + 1)) return true;
    if (units_[unit].persistent) return true;
    if (policy_.max_reuse_distance != GatherPolicy::kAuto) {
      return used_elems_[next] - used_elems_[i + 1] <
             policy_.max_reuse_distance;
    }
    if (policy_.max_live_elems != GatherPolicy::kAuto) return true;
    // A table shared by the embedding and the head. Memory peaks when it and
    // its gradients are in place, so until then there is room; gathered again
    // just before the head, the largest unit's gather would not be hidden.
    if (computations_[next].index != plan_.units[unit].owner &&
        plan_.units[unit].part.count == 1) {
      return true;
    }
    // The unit at the turn from forward to backward, and the first one between
    // micro-batches: they would be gathered again before their buffer was
    // needed for anything else.
    return next == i + 2;
  }

  // Starts every bucket that the backward pass of this unit completes. Groups
  // add up once per step, when each has the sum of all its micro-batches; rows
  // of all micro-batches are exchanged once.
  void ReduceFrom(const Action& action, bool last_micro_step) {
    const int num_buckets = static_cast<int>(plan_.reduce_buckets.size());
    if (action.kind == ActionKind::kForwardBackward) next_bucket_ = 0;
    std::vector<std::pair<int, int>> started;  // units and their phases
    while (next_bucket_ < num_buckets &&
           IsComplete(plan_.reduce_buckets[next_bucket_], action)) {
      const Bucket& bucket = plan_.reduce_buckets[next_bucket_];
      if (bucket.is_rows() && !last_micro_step) break;
      if (plan_.world > 1) {
        actions_.push_back(
            {ActionKind::kReduce, next_bucket_, action.micro_step});
      }
      if (last_micro_step && plan_.replicate.size > 1) {
        actions_.push_back(
            {ActionKind::kReduceAcross, next_bucket_, action.micro_step});
      }
      if (plan_.Offloads(bucket) && (last_micro_step || plan_.AddsOnHost())) {
        Offload(action.micro_step, last_micro_step);
      }
      ++next_bucket_;
      const std::pair buffer(bucket.unit, bucket.phase);
      if (!bucket.is_rows() && (started.empty() || started.back() != buffer)) {
        started.push_back(buffer);
      }
    }
    if (!shards_gradients_) return;
    for (const auto& [unit, phase] : started) {
      reducing_.push_back({.kind = ActionKind::kReleaseGradients,
                           .index = unit,
                           .micro_step = action.micro_step,
                           .phase = phase});
    }
    if (!options_.overlap && !started.empty()) ReleaseAllBut(0);
  }

  // Uploads the units whose last use is computation i, and adds the gather
  // buckets that they complete.
  void UploadAfter(size_t i) {
    const Action& action = computations_[i];
    std::vector<int> read = Needs(i);
    if (action.micro_step == options_.micro_steps - 1) {
      const std::vector<int> tables = LookedUpBy(action);
      read.insert(read.end(), tables.begin(), tables.end());
    }
    for (int unit : read) {
      if (!plan_.UpdatesOnHost(unit)) continue;
      if (NextUse(unit, i) < computations_.size()) continue;
      actions_.push_back({ActionKind::kUpload, unit, action.micro_step});
      units_[unit].uploaded = true;
      for (size_t b = 0; b < plan_.gather_buckets.size(); ++b) {
        const std::vector<SegmentRef>& segments =
            plan_.gather_buckets[b].segments;
        const auto has = [&](const SegmentRef& ref) {
          return ref.unit == unit;
        };
        const auto up = [&](const SegmentRef& ref) {
          return units_[ref.unit].uploaded;
        };
        if (std::any_of(segments.begin(), segments.end(), has) &&
            std::all_of(segments.begin(), segments.end(), up)) {
          actions_.push_back({ActionKind::kGatherUpdated, static_cast<int>(b),
                              action.micro_step});
        }
      }
    }
  }

  static bool IsComplete(const Bucket& bucket, const Action& action) {
    return bucket.completed_by > action.index ||
           (bucket.completed_by == action.index &&
            bucket.phase <= action.phase);
  }

  // Sends the next bucket to the host; once it has a unit's gradients, adds the
  // host's work on them.
  void Offload(int64_t micro_step, bool last_micro_step) {
    actions_.push_back({ActionKind::kOffload, next_bucket_, micro_step});
    if (AddsUp(actions_.back(), plan_)) {
      actions_.push_back({ActionKind::kAddOffloaded, next_bucket_, micro_step});
    }
    if (!last_micro_step) return;
    for (const SegmentRef& ref : plan_.reduce_buckets[next_bucket_].segments) {
      if (!plan_.UpdatesOnHost(ref.unit)) continue;
      const PlannedUnit& unit = plan_.units[ref.unit];
      // Rows are added last.
      if (++units_[ref.unit].num_offloaded == unit.num_trained_segments &&
          unit.rows == 0) {
        actions_.push_back({ActionKind::kSumSquares, ref.unit});
      }
    }
  }

  // A backward pass takes gradient buffers: at most one unit's is still being
  // reduced meanwhile, or a unit's and a table's, and none that it writes
  // itself (a shared table's, from the micro-batch before). A unit in phases
  // takes at most its own size, including all that is being reduced.
  void ReleaseBuffersFor(const Action& action) {
    const size_t size = reducing_.size();
    const PlannedUnit& unit = plan_.units[action.index];
    if (unit.phases.size() > 1) {
      int64_t room = unit.trained_elems - unit.phases[action.phase].elems;
      size_t keep = 0;
      for (; keep < size; ++keep) {
        const Action& buffer = reducing_[size - 1 - keep];
        room -= plan_.units[buffer.index].phases[buffer.phase].elems;
        const bool same =
            buffer.index == action.index && buffer.phase == action.phase;
        if (room < 0 || same) break;
      }
      return ReleaseAllBut(keep);
    }
    const auto is_table = [&](size_t i) {
      return reducing_[i].index >= plan_.num_computing;
    };
    const bool both = size > 1 && is_table(size - 1) != is_table(size - 2);
    ReleaseAllBut(both ? 2 : 1);
    for (size_t i = reducing_.size(); i > 0; --i) {
      if (Contains(plan_.units[action.index].writes, reducing_[i - 1].index)) {
        return ReleaseAllBut(reducing_.size() - i);
      }
    }
  }

  // Releases the gradient buffers of all but the last `keep` units being
  // reduced.
  void ReleaseAllBut(size_t keep) {
    while (reducing_.size() > keep) {
      actions_.push_back(reducing_.front());
      reducing_.pop_front();
    }
  }

  const Plan& plan_;
  const ScheduleOptions options_;
  const GatherPolicy& policy_ = options_.gather;
  const std::vector<Action> computations_;
  const bool shards_parameters_, shards_gradients_;
  std::vector<UnitUses> units_;
  std::vector<int64_t> used_elems_;  // by computations 0 .. i - 1
  int64_t live_elems_ = 0;
  int64_t num_loaded_ = 0;  // batches
  int next_bucket_ = 0;
  std::deque<Action> reducing_;  // the releases of their buffers
  std::vector<Action> actions_;
};

// The end of a step: the optimizer's passes over all units. States on a disk
// are read as early as memory allows, the first segments during the last
// backward: earlier they would delay parameters that forward waits for.
class UpdateBuilder {
 public:
  UpdateBuilder(const Plan& plan, const ScheduleOptions& options)
      : plan_(plan),
        tensor_norms_(options.tensor_norms),
        delayed_(options.delayed_update),
        before_norm_(options.update_before_norm) {
    for (int pass = tensor_norms_ ? 0 : 1; pass < 2; ++pass) {
      for (const int u : plan.forward_order) {
        if (!plan.UpdatesFromDisk(u)) continue;
        for (int s = 0; s < plan.units[u].num_trained_segments; ++s) {
          visits_.push_back({u, s});
        }
      }
    }
    ZERO_CHECK(!before_norm_ ||
               (!tensor_norms_ && !delayed_ && visits_.empty()))
        << "updates that need a norm, or a disk";
  }

  // Adds the update's actions among and after `actions`.
  void AddTo(std::vector<Action>* actions) {
    std::vector<Action> first;
    out_ = &first;
    ReadAhead();
    const auto turn = std::find_if(
        actions->rbegin(), actions->rend(), [](const Action& action) {
          return action.kind == ActionKind::kForwardBackward;
        });
    actions->insert(turn.base(), first.begin(), first.end());
    if (before_norm_) UpdateBehindSquares(actions);
    out_ = actions;
    actions->push_back({ActionKind::kNorm});
    if (tensor_norms_) {
      for (const int u : plan_.forward_order) {
        if (plan_.units[u].trained_elems > 0) Pass(ActionKind::kMoments, u);
      }
      actions->push_back({ActionKind::kTensorNorms});
    }
    size_t next_bucket = 0;
    std::vector<bool> updated(plan_.units.size());
    for (const int u : plan_.forward_order) {
      if (!before_norm_ || !plan_.UpdatesOnHost(u)) {
        Pass(ActionKind::kUpdate, u);
      }
      if (delayed_) continue;  // its successors came before
      updated[u] = true;
      while (next_bucket < plan_.gather_buckets.size() &&
             updated[plan_.gather_buckets[next_bucket].segments.back().unit]) {
        actions->push_back(
            {ActionKind::kGatherUpdated, static_cast<int>(next_bucket++)});
      }
    }
  }

 private:
  void Add(ActionKind kind, int unit, int segment = 0) {
    out_->push_back({.kind = kind, .index = unit, .phase = segment});
  }

  void UpdateBehindSquares(std::vector<Action>* actions) {
    std::vector<Action> with;
    out_ = &with;
    for (const Action& action : *actions) {
      with.push_back(action);
      if (action.kind == ActionKind::kSumSquares) {
        Pass(ActionKind::kUpdate, action.index);
      }
    }
    *actions = std::move(with);
  }

  void Pass(ActionKind kind, int unit) {
    const bool uploads = kind == ActionKind::kUpdate && !delayed_ &&
                         plan_.UpdatesOnHost(unit) &&
                         !plan_.FetchesParameters(unit);
    if (!plan_.UpdatesFromDisk(unit)) {
      Add(kind, unit);
      if (uploads) Add(ActionKind::kUpload, unit);
      return;
    }
    for (int s = 0; s < plan_.units[unit].num_trained_segments; ++s) {
      Add(kind, unit, s);
      Add(ActionKind::kWriteStates, unit, s);
      if (uploads) Add(ActionKind::kUpload, unit, s);
      in_use_[plan_.SwapSlot({unit, s})] = false;
      ReadAhead();
    }
  }

  // Reads the next segments, until a needed place is in use.
  void ReadAhead() {
    for (; next_ < visits_.size(); ++next_) {
      const SegmentRef& visit = visits_[next_];
      if (std::exchange(in_use_[plan_.SwapSlot(visit)], true)) return;
      Add(ActionKind::kReadStates, visit.unit, visit.segment);
    }
  }

  const Plan& plan_;
  const bool tensor_norms_, delayed_, before_norm_;
  std::vector<SegmentRef> visits_;  // in order, of all passes
  size_t next_ = 0;
  std::array<bool, Plan::kNumSwapSlots> in_use_ = {};
  std::vector<Action>* out_ = nullptr;
};

// Of units or actions, ascending. A std::set took half of the time of a
// rehearsal of 512 micro-steps.
using Indices = absl::btree_set<int>;

// Fills in every action's stream and waits.
class WaitFinder {
 public:
  WaitFinder(const Plan& plan, const ScheduleOptions& options,
             std::vector<Action>* actions)
      : plan_(plan),
        overlap_(options.overlap),
        delayed_(options.delayed_update),
        before_norm_(options.update_before_norm),
        actions_(*actions),
        size_(static_cast<int>(actions->size())),
        bringing_(plan.units.size()),
        offloading_(plan.units.size()),
        updated_(plan.units.size(), kNone),
        changed_(plan.units.size(), kNone) {
    for (Action& action : actions_) action.stream = StreamOf(action, plan);
  }

  // Searches in two passes: for the second, the first is the previous step.
  void Find() {
    for (int i = -size_; i < size_; ++i) {
      Action& action = At(i);
      waits_.clear();
      Visit(i, action);
      if (!overlap_ && i > -size_) Await(i - 1);
      Keep(action.stream, &action.waits);
      if (action.stream == StreamRole::kCompute) computed_ = i;
    }
  }

 private:
  static constexpr int kNone = INT32_MIN;

  Action& At(int i) { return actions_[i < 0 ? i + size_ : i]; }

  void Await(int i) {
    if (i != kNone) waits_.insert(i);
  }
  void AwaitAll(Indices* actions) {
    waits_.insert(actions->begin(), actions->end());
    actions->clear();
  }

  // Finds the waits of action i, and records it for those that wait for it.
  void Visit(int i, const Action& action) {
    const bool on_host = action.stream == StreamRole::kHost;
    switch (action.kind) {
      case ActionKind::kLoadBatch:
        break;
      case ActionKind::kLookUp:
        Await(computed_);
        for (int p = 0; p < plan_.units[action.index].part.count; ++p) {
          if (plan_.UpdatesOnHost(action.index + p)) {
            Await(changed_[action.index + p]);
          }
        }
        looked_up_ = i;
        break;
      case ActionKind::kForward:
      case ActionKind::kForwardBackward:
      case ActionKind::kBackward:
        VisitComputation(action);
        freed_ = i;
        break;
      case ActionKind::kReadParameters:
        AwaitLast(written_, action);
        AwaitAll(&fetch_slots_[SlotOf(action)]);
        break;
      case ActionKind::kFetch:
        if (action.phase == 0) AwaitForBuffer(action.index);
        if (plan_.ReadsParameters(action.index)) {
          Await(i - 1);
          fetch_slots_[SlotOf(action)] = {i};
        }
        bringing_[action.index] = {i};
        break;
      case ActionKind::kGather:
        if (plan_.FetchesParameters(action.index)) {
          AwaitAll(&bringing_[action.index]);
        } else {
          AwaitForBuffer(action.index);
        }
        bringing_[action.index] = {i};
        break;
      case ActionKind::kReduce:
      case ActionKind::kReduceAcross:
        Await(computed_);
        VisitReduction(i, plan_.reduce_buckets[action.index]);
        break;
      case ActionKind::kOffload:
        Await(plan_.world > 1 ? i - 1 : computed_);
        // The buffer that it copies to may still be in use.
        if (AddsUp(action, plan_)) Await(added_[0]);
        for (int unit : VisitReduction(i, plan_.reduce_buckets[action.index])) {
          // A delayed update reads other memory, and the previous one was done
          // before the last norm.
          if (!delayed_) Await(updated_[unit]);
          offloading_[unit].insert(i);
        }
        break;
      case ActionKind::kAddOffloaded:
        Await(i - 1);
        added_[0] = std::exchange(added_[1], i);
        break;
      case ActionKind::kSumSquares:
        AwaitAll(&offloading_[action.index]);
        summed_ = i;
        break;
      case ActionKind::kAddRows:
        AwaitAll(on_host ? &offloading_[action.index]
                         : &reducing_[{action.index, 0}]);
        if (!on_host) freed_ = i;
        break;
      case ActionKind::kReleaseGradients:
        AwaitAll(&reducing_[{action.index, action.phase}]);
        freed_ = i;
        break;
      case ActionKind::kNorm:
        for (auto& [buffer, reductions] : reducing_) AwaitAll(&reductions);
        Await(summed_);
        freed_ = i;
        break;
      case ActionKind::kReadStates:
        AwaitLast(written_, action);
        AwaitAll(&update_slots_[SlotOf(action)]);
        read_[SegmentOf(action)] = i;
        break;
      case ActionKind::kMoments:
        if (!on_host) break;
        Await(computed_);
        AwaitLast(read_, action);
        summed_ = i;
        break;
      case ActionKind::kTensorNorms:
        Await(summed_);
        break;
      case ActionKind::kUpdate:
        if (on_host) {
          // The norm. Before it, the sum of squares has made its waits.
          if (!before_norm_) Await(computed_);
        } else {
          freed_ = i;  // its gradients, at the end of the step
        }
        AwaitLast(read_, action);
        updated_[action.index] = i;
        if (on_host && delayed_) {
          // Its parameters are still being uploaded.
          Await(changed_[action.index]);
          break;
        }
        changed_[action.index] = i;
        bringing_[action.index].clear();
        break;
      case ActionKind::kWriteStates:
        Await(i - 1);
        written_[SegmentOf(action)] = i;
        update_slots_[SlotOf(action)].insert(i);
        break;
      case ActionKind::kUpload:
        Await(updated_[action.index]);
        if (plan_.UpdatesFromDisk(action.index)) {
          update_slots_[SlotOf(action)].insert(i);
        }
        if (delayed_ || before_norm_) Await(computed_);  // its last use
        if (!delayed_) updated_[action.index] = i;
        changed_[action.index] = i;
        bringing_[action.index] = {i};
        break;
      case ActionKind::kGatherUpdated:
        Await(computed_);
        for (const SegmentRef& ref :
             plan_.gather_buckets[action.index].segments) {
          if (plan_.UpdatesOnHost(ref.unit)) Await(changed_[ref.unit]);
          bringing_[ref.unit].insert(i);
        }
        break;
      case ActionKind::kRelease:
        freed_ = i;
        break;
    }
  }

  // The segment of an action on one segment.
  static std::pair<int, int> SegmentOf(const Action& action) {
    return {action.index, action.phase};
  }
  int SlotOf(const Action& action) const {
    return plan_.SwapSlot({action.index, action.phase});
  }
  // Waits for the last action on this action's segment, if any.
  void AwaitLast(const std::map<std::pair<int, int>, int>& last,
                 const Action& action) {
    const auto found = last.find(SegmentOf(action));
    if (found != last.end()) Await(found->second);
  }

  void VisitComputation(const Action& action) {
    if (action.kind == ActionKind::kForward && action.index == 0) {
      Await(std::exchange(looked_up_, kNone));
    }
    for (int needed : RequiredUnits(action, plan_)) {
      waits_.insert(bringing_[needed].begin(), bringing_[needed].end());
    }
  }

  // Visits an action that reduces a bucket or takes it to the host. Returns its
  // units.
  Indices VisitReduction(int i, const Bucket& bucket) {
    Indices units = {bucket.unit};
    for (const SegmentRef& ref : bucket.segments) units.insert(ref.unit);
    for (int unit : units) reducing_[{unit, bucket.phase}].insert(i);
    return units;
  }

  // Filling a buffer of gathered parameters waits for their update, and for the
  // last user of the memory.
  void AwaitForBuffer(int unit) {
    const int changed = changed_[unit];
    if (plan_.UpdatesOnHost(unit)) {
      Await(changed);
      Await(freed_);
    } else {
      Await(std::max(changed, freed_));
    }
  }

  // Keeps the waits_ that `stream` has not made yet.
  void Keep(StreamRole stream, std::vector<int>* waits) {
    Indices& made = made_[stream];
    waits->clear();
    for (int i : waits_) {
      const StreamRole of = At(i).stream;
      if (of == stream) continue;
      if (of == StreamRole::kCompute) {
        int& last = computed_for_.emplace(stream, kNone).first->second;
        if (i <= last) continue;
        last = i;
      } else if (!made.insert(i).second) {
        continue;
      }
      waits->push_back(i);
    }
  }

  const Plan& plan_;
  const bool overlap_, delayed_, before_norm_;
  std::vector<Action>& actions_;
  const int size_;
  // For each unit, the last action that gathers its parameters, that takes its
  // gradients to the host, that updates it, and that uploads the result.
  std::vector<Indices> bringing_, offloading_;
  std::vector<int> updated_, changed_;
  // For each unit and phase, the last action that reduces its gradients or
  // takes them to the host.
  std::map<std::pair<int, int>, Indices> reducing_;
  // For each segment, the last action that reads it for an update, and that
  // writes it.
  std::map<std::pair<int, int>, int> read_, written_;
  // The last users of the places for segments of a disk.
  std::array<Indices, Plan::kNumSwapSlots> fetch_slots_, update_slots_;
  int computed_ = kNone;   // the last action of the compute stream
  int looked_up_ = kNone;  // a lookup for which no forward has waited
  int freed_ = kNone;      // the last one that freed memory
  int summed_ = kNone;     // the last of the host's sums
  // The last two actions on the host's buffers of a micro-step's gradients.
  int added_[2] = {kNone, kNone};
  Indices waits_;  // of the current action
  // For each stream, the collectives that it has waited for, and the last
  // action of the compute stream.
  std::map<StreamRole, Indices> made_;
  std::map<StreamRole, int> computed_for_;
};

// Whether an action is on one segment, on a disk.
bool ReadsSegment(const Action& action, const Plan& plan) {
  switch (action.kind) {
    case ActionKind::kReadParameters:
    case ActionKind::kReadStates:
    case ActionKind::kWriteStates:
      return true;
    case ActionKind::kFetch:
      return plan.ReadsParameters(action.index);
    case ActionKind::kMoments:
    case ActionKind::kUpdate:
    case ActionKind::kUpload:
      return plan.UpdatesFromDisk(action.index);
    default:
      return false;
  }
}

}  // namespace

std::string ActionName(const Action& action, const Plan& plan) {
  std::string name = kKindNames[static_cast<int>(action.kind)];
  if (action.index < 0) return name;
  switch (action.kind) {
    case ActionKind::kReduce:
    case ActionKind::kReduceAcross:
    case ActionKind::kOffload:
    case ActionKind::kAddOffloaded:
      return absl::StrCat(
          name, "(", BucketName(plan.reduce_buckets, action.index, plan), ")");
    case ActionKind::kGatherUpdated:
      return absl::StrCat(
          name, "(", BucketName(plan.gather_buckets, action.index, plan), ")");
    default: {
      const PlannedUnit& unit = plan.units[action.index];
      const bool in_phases = action.kind == ActionKind::kBackward ||
                             action.kind == ActionKind::kReleaseGradients;
      const bool of_segment = ReadsSegment(action, plan);
      const size_t count = in_phases    ? unit.phases.size()
                           : of_segment ? unit.segments.size()
                                        : 1;
      return absl::StrCat(
          name, "(", unit.name,
          count > 1 ? absl::StrCat(", ", action.phase + 1, " of ", count) : "",
          ")");
    }
  }
}

std::vector<bool> PersistentUnits(const Plan& plan,
                                  const GatherPolicy& policy) {
  std::vector<bool> persistent;
  int64_t elems = 0;
  for (const PlannedUnit& unit : plan.units) {
    int64_t largest = 0;
    for (const PlannedParameter& parameter : unit.parameters) {
      largest = std::max(largest, parameter.spec.shape.num_elems());
    }
    persistent.push_back(largest < policy.persistence_threshold &&
                         unit.padded_elems <=
                             policy.max_persistent_elems - elems);
    if (persistent.back()) elems += unit.padded_elems;
  }
  return persistent;
}

std::vector<Action> MakeSchedule(const Plan& plan,
                                 const ScheduleOptions& options) {
  const int last = plan.num_computing - 1;
  std::vector<Action> computations;
  for (int64_t micro = 0; micro < options.micro_steps; ++micro) {
    for (int u = 0; u < last; ++u) {
      computations.push_back({ActionKind::kForward, u, micro});
    }
    computations.push_back({ActionKind::kForwardBackward, last, micro});
    for (int u = last - 1; u >= plan.first_trained; --u) {
      Action action{ActionKind::kBackward, u, micro};
      do {
        computations.push_back(action);
      } while (++action.phase < static_cast<int>(plan.units[u].phases.size()));
    }
  }
  std::vector<Action> actions =
      Builder(plan, options, std::move(computations)).Build();
  for (const Bucket& bucket : plan.reduce_buckets) {
    if (!bucket.is_rows()) continue;
    for (int part = 0; part < plan.units[bucket.unit].part.count; ++part) {
      actions.push_back({ActionKind::kAddRows, bucket.unit + part});
      if (plan.UpdatesOnHost(bucket.unit + part)) {
        actions.push_back({ActionKind::kSumSquares, bucket.unit + part});
      }
    }
  }
  UpdateBuilder(plan, options).AddTo(&actions);
  WaitFinder(plan, options, &actions).Find();
  return actions;
}

std::vector<Action> MakeForwardSchedule(const Plan& plan,
                                        const ScheduleOptions& options) {
  std::vector<Action> computations;
  for (int u = 0; u < plan.num_computing; ++u) {
    computations.push_back({ActionKind::kForward, u});
  }
  std::vector<Action> actions =
      Builder(plan, options, std::move(computations)).Build();
  WaitFinder(plan, options, &actions).Find();
  return actions;
}

bool AddsUp(const Action& offload, const Plan& plan) {
  return plan.AddsOnHost() && offload.micro_step > 0 &&
         !plan.reduce_buckets[offload.index].is_rows();
}

absl::Span<const Transfer> TransfersOf(const Action& action, const Plan& plan) {
  switch (action.kind) {
    case ActionKind::kGather:
      return plan.units[action.index].gather;
    case ActionKind::kLookUp:
      return plan.units[action.index].lookup;
    case ActionKind::kGatherUpdated:
      return plan.gather_buckets[action.index].transfers;
    case ActionKind::kReduce:
      return plan.reduce_buckets[action.index].transfers;
    case ActionKind::kReduceAcross:
      return plan.reduce_buckets[action.index].across;
    default:
      return {};
  }
}

StepWire CountWire(const Plan& plan, const std::vector<Action>& actions,
                   int64_t rank) {
  StepWire wire;
  for (const Action& action : actions) {
    int64_t& sent = action.kind == ActionKind::kReduce         ? wire.reduced
                    : action.kind == ActionKind::kReduceAcross ? wire.across
                                                               : wire.gathered;
    for (const Transfer& transfer : TransfersOf(action, plan)) {
      const Transfer::Bytes bytes = transfer.BytesOf(rank);
      sent += bytes.sent;
      wire.received += bytes.received;
    }
  }
  return wire;
}

HostTraffic CountHostTraffic(const Plan& plan,
                             const std::vector<Action>& actions, int64_t rank,
                             DType param_dtype, DType grad_dtype) {
  const auto owned = [&](int64_t elems, DType dtype) {
    return plan.StateElems(elems, plan.placement.optimizer, rank) *
           static_cast<int64_t>(DTypeBytes(dtype));
  };
  HostTraffic traffic;
  for (const Action& action : actions) {
    const int i = action.index;
    if (ReadsSegment(action, plan)) {
      if (action.kind == ActionKind::kFetch ||
          action.kind == ActionKind::kUpload) {
        traffic.up += owned(plan.segment({i, action.phase}).elems, param_dtype);
      }
    } else if (action.kind == ActionKind::kFetch) {
      traffic.up += owned(plan.units[i].padded_elems, param_dtype);
    } else if (action.kind == ActionKind::kUpload &&
               action.stream == StreamRole::kUp) {
      traffic.up += owned(plan.units[i].trained_elems, param_dtype);
    } else if (action.kind == ActionKind::kOffload) {
      const Bucket& bucket = plan.reduce_buckets[i];
      if (bucket.is_rows()) {
        const int64_t ids = bucket.elems / plan.units[bucket.unit].width;
        traffic.down += ids * DTypeBytes(DType::kI32) +
                        bucket.elems * DTypeBytes(plan.rows.dtype);
      } else {
        for (const SegmentRef& ref : bucket.segments) {
          if (!plan.UpdatesOnHost(ref.unit)) continue;
          traffic.down += owned(plan.segment(ref).elems, grad_dtype);
        }
      }
    }
  }
  return traffic;
}

StepWire RowsWire(const Plan& plan, int64_t micro_steps) {
  StepWire wire;
  if (!plan.owners.even()) return wire;
  int64_t bytes = 0;
  for (const PlannedUnit& unit : plan.units) {
    for (const Transfer& transfer : unit.lookup) {
      wire.gathered += micro_steps * transfer.BytesOf(/*rank=*/0).sent;
    }
    if (unit.rows == 0 || unit.part.number > 0) continue;
    bytes += unit.rows * (DTypeBytes(DType::kI32) +
                          unit.width * DTypeBytes(plan.rows.dtype));
  }
  const int64_t n = plan.shard.size, m = plan.replicate.size;
  wire.reduced = (n - 1) * bytes;
  wire.across = (m - 1) * n * bytes;
  wire.received = wire.gathered + wire.reduced + wire.across;
  return wire;
}

StepWire FormulaWire(const Plan& plan, int64_t micro_steps, int64_t rank) {
  const auto is_sharded = [](Placement state) {
    return state == Placement::kSharded;
  };
  const StatePlacement& placement = plan.placement;
  const int64_t n = plan.shard.size, m = plan.replicate.size;
  int64_t psi = 0;  // of reduced gradients
  for (const PlannedUnit& unit : plan.units) {
    if (unit.completed_by >= 0) psi += unit.trained_elems;
  }
  const int64_t p = DTypeBytes(plan.parameters.dtype);
  const int64_t r = DTypeBytes(plan.gradients.dtype);
  const int64_t ring = DTypeBytes(plan.gradients.partial_sums) - r;
  int64_t gathered = is_sharded(placement.optimizer) ? plan.trained_elems : 0;
  if (is_sharded(placement.parameters)) {
    gathered = 0;
    for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
      const PlannedUnit& unit = plan.units[u];
      const bool shared = std::any_of(
          plan.units.begin(), plan.units.end(), [&](const PlannedUnit& other) {
            return !unit.parameters.empty() &&
                   std::count(other.borrowed.begin(), other.borrowed.end(),
                              unit.parameters[0].spec.name) > 0;
          });
      int times = shared || unit.owner >= plan.first_trained ? 2 : 1;
      if (unit.part.count > 1 && shared) times += unit.head_waits ? 2 : 1;
      if (plan.LooksUpRows(u)) times = shared ? times - 1 : 0;
      gathered += times * micro_steps * unit.padded_elems;
    }
  }
  const int64_t reductions = is_sharded(placement.gradients) ? micro_steps : 1;
  StepWire wire = RowsWire(plan, micro_steps);
  if (!plan.owners.even()) {  // a server sends to all; a worker, to the server
    const bool server = rank == 0;
    wire.gathered = server ? (n - 1) * psi * p : 0;
    wire.reduced = server ? 0 : psi * r;
    wire.received = server ? (n - 1) * psi * r : psi * p;
    return wire;
  }
  const int64_t k = n - 1, hops = std::max<int64_t>(n - 2, 0);
  wire.gathered += gathered / n * k * p;
  wire.reduced += reductions * psi / n * (k * r + hops * ring);
  if (!is_sharded(placement.optimizer)) wire.reduced += psi / n * k * r;
  wire.across +=
      psi / n / m * (2 * (m - 1) * r + std::max<int64_t>(m - 2, 0) * ring);
  wire.received = wire.gathered + wire.reduced + wire.across;
  return wire;
}

int64_t NumbersWire(const Plan& plan, bool tensor_norms) {
  int64_t numbers = 2 + kNumAgreed;
  for (const PlannedUnit& unit : plan.units) {
    for (const PlannedParameter& parameter : unit.parameters) {
      if (!tensor_norms || parameter.spec.frozen) continue;
      if (parameter.first == 0) numbers += 2;
    }
  }
  return (plan.world - 1) * numbers * static_cast<int64_t>(sizeof(double));
}

std::string ScheduleHash(const Plan& plan, const std::vector<Action>& actions) {
  std::string text = absl::StrCat(plan.world, " ranks, ", plan.shard.size,
                                  " shards, ", plan.owners.owners, " owners");
  for (const Codec& codec : {plan.parameters, plan.gradients}) {
    absl::StrAppend(&text, ", ", DTypeName(codec.dtype), " in ",
                    DTypeName(codec.partial_sums));
  }
  for (Placement placement :
       {plan.placement.parameters, plan.placement.gradients,
        plan.placement.optimizer}) {
    text += placement == Placement::kSharded ? " sharded" : " replicated";
  }
  text += "\n";
  for (const PlannedUnit& unit : plan.units) {
    for (Home home : {unit.homes.parameters, unit.homes.optimizer}) {
      constexpr const char* kNames[] = {"device ", "host ", "nvme "};
      text += kNames[static_cast<int>(home)];
    }
    for (const Segment& segment : unit.segments) {
      absl::StrAppend(&text, unit.name, " ", segment.begin, " ", segment.elems,
                      "\n");
    }
  }
  for (const auto* buckets : {&plan.reduce_buckets, &plan.gather_buckets}) {
    for (const Bucket& bucket : *buckets) {
      absl::StrAppend(&text, "bucket of ", bucket.elems);
      for (const SegmentRef& ref : bucket.segments) {
        absl::StrAppend(&text, " ", ref.unit, ".", ref.segment);
      }
      text += "\n";
    }
  }
  for (const Action& action : actions) {
    absl::StrAppend(&text, ActionName(action, plan), " ", action.micro_step,
                    " ", absl::StrJoin(action.waits, " "), "\n");
  }
  return HashOf(text);
}

}  // namespace zero
