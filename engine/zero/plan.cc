#include "engine/zero/plan.h"

#include <algorithm>
#include <initializer_list>
#include <map>

#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// Lays out the parameters that are `frozen` or not behind what there is.
void Append(bool frozen, const PlanOptions& options, PlannedUnit* unit) {
  const int64_t segment_align = Plan::kAlignElems * options.world;
  const int64_t start = unit->padded_elems;
  int64_t end = start;
  for (PlannedParameter& parameter : unit->parameters) {
    if (parameter.spec.frozen != frozen) continue;
    parameter.offset = end;
    end =
        RoundUp(end + parameter.elems,
                options.segment_per_tensor ? segment_align : Plan::kAlignElems);
    if (options.segment_per_tensor && end > parameter.offset) {
      unit->segments.push_back({parameter.offset, end - parameter.offset});
    }
  }
  if (end == start) return;
  if (!options.segment_per_tensor) {
    const int64_t num_segments = CeilDiv(end - start, Plan::kMaxSegmentElems);
    const int64_t elems =
        RoundUp(CeilDiv(end - start, num_segments), segment_align);
    for (int64_t begin = start; begin < end; begin += elems) {
      unit->segments.push_back({begin, elems});
    }
  }
  unit->padded_elems = unit->segments.back().end();
}

PlannedUnit PlanUnit(const UnitSpec& spec, const PlanOptions& options) {
  PlannedUnit unit{.name = spec.name,
                   .borrowed = spec.borrowed,
                   .backward_reads_parameters = spec.backward_reads_parameters};
  for (const ParameterSpec& parameter : spec.parameters) {
    unit.parameters.push_back({parameter, 0, parameter.shape.num_elems()});
  }
  Append(/*frozen=*/false, options, &unit);
  unit.trained_elems = unit.padded_elems;
  unit.num_trained_segments = static_cast<int>(unit.segments.size());
  Append(/*frozen=*/true, options, &unit);
  return unit;
}

void FindNeeds(Plan* plan) {
  std::map<std::string, int> owner;
  for (int u = 0; u < static_cast<int>(plan->units.size()); ++u) {
    PlannedUnit& unit = plan->units[u];
    for (const std::string& name : unit.borrowed) {
      const auto found = owner.find(name);
      ZERO_CHECK(found != owner.end())
          << unit.name << " borrows " << name
          << ", which is no parameter of an earlier unit";
      unit.needs.push_back(found->second);
    }
    unit.needs.push_back(u);
    std::sort(unit.needs.begin(), unit.needs.end());
    unit.needs.erase(std::unique(unit.needs.begin(), unit.needs.end()),
                     unit.needs.end());
    for (const PlannedParameter& parameter : unit.parameters) {
      owner[parameter.spec.name] = u;
    }
  }
}

// Cuts a sequence of segments into buckets of at most `limit` elements. The
// first and the last segment are buckets of their own where buckets may cross
// units: nothing hides the first until it is full, or the last at all.
class BucketMaker {
 public:
  BucketMaker(const Plan& plan, int64_t limit, bool cross_units)
      : plan_(plan), limit_(limit), cross_units_(cross_units) {}

  std::vector<Bucket> Make(const std::vector<SegmentRef>& order) {
    for (size_t i = 0; i < order.size(); ++i) {
      const bool edge = cross_units_ && (i == 1 || i + 1 == order.size());
      const int64_t elems = plan_.segment(order[i]).elems;
      if (buckets_.empty() || edge || !Fits(order[i], elems)) {
        buckets_.push_back({});
      }
      buckets_.back().segments.push_back(order[i]);
      buckets_.back().elems += elems;
    }
    return std::move(buckets_);
  }

 private:
  bool Fits(const SegmentRef& segment, int64_t elems) const {
    const Bucket& bucket = buckets_.back();
    return bucket.elems + elems <= limit_ &&
           (cross_units_ || bucket.segments.back().unit == segment.unit);
  }

  const Plan& plan_;
  int64_t limit_;
  bool cross_units_;
  std::vector<Bucket> buckets_;
};

std::vector<SegmentRef> ForwardOrder(const Plan& plan) {
  std::vector<SegmentRef> order;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    for (int s = 0; s < plan.units[u].num_trained_segments; ++s) {
      order.push_back({static_cast<int>(u), s});
    }
  }
  return order;
}

// Units from the last to the first; a unit's own segments ascend, since all of
// them are complete at the same moment.
std::vector<SegmentRef> BackwardOrder(const Plan& plan) {
  std::vector<SegmentRef> order = ForwardOrder(plan);
  std::stable_sort(
      order.begin(), order.end(),
      [](const SegmentRef& a, const SegmentRef& b) { return a.unit > b.unit; });
  return order;
}

void ListTransfers(Plan* plan) {
  using Kind = Transfer::Kind;
  const auto list = [](const Partition& partition, int64_t elems,
                       const Codec& codec, std::initializer_list<Kind> kinds) {
    std::vector<Transfer> transfers;
    for (Kind kind : kinds)
      transfers.push_back({kind, partition, elems, codec});
    return transfers;
  };
  if (plan->placement.parameters == Placement::kSharded) {
    for (PlannedUnit& unit : plan->units) {
      unit.gather = list(plan->owners, unit.padded_elems, plan->parameters,
                         {Kind::kGather});
    }
  }
  for (Bucket& bucket : plan->gather_buckets) {
    bucket.transfers =
        list(plan->owners, bucket.elems, plan->parameters, {Kind::kGather});
  }
  const Axis& groups = plan->replicate;
  for (Bucket& bucket : plan->reduce_buckets) {
    bucket.transfers =
        list(plan->owners, bucket.elems, plan->gradients, {Kind::kSum});
    // Who updates all parameters needs all gradients.
    if (plan->placement.optimizer == Placement::kReplicated) {
      bucket.transfers.push_back(bucket.transfers.back());
      bucket.transfers.back().kind = Kind::kGather;
    }
    if (groups.size == 1) continue;
    bucket.across = list({groups, groups.size}, bucket.elems / plan->shard.size,
                         plan->gradients, {Kind::kSum, Kind::kGather});
  }
}

}  // namespace

// A rank keeps what it owns and gets the rest: of a gather from the owners, of
// a sum from all others what they have of its piece.
Transfer::Bytes Transfer::BytesOf(int64_t rank) const {
  const int64_t others = partition.axis.size - 1;
  if (others == 0) return {};
  const int64_t item = DTypeBytes(codec.dtype);
  const int64_t own = partition.OwnedElems(elems, rank);
  const int64_t given = own * others * item, rest = (elems - own) * item;
  if (kind == Kind::kGather) return {.sent = given, .received = rest};
  // Around a ring the first hop is of elements, the others are of sums.
  const int64_t hops =
      own * (others - 1) * (DTypeBytes(codec.partial_sums) - item);
  return {.sent = rest + hops, .received = given + hops};
}

StatePlacement PlacementOfStage(int stage) {
  ZERO_CHECK_GE(stage, 0);
  ZERO_CHECK_GE(3, stage);
  constexpr Placement R = Placement::kReplicated, S = Placement::kSharded;
  constexpr StatePlacement kTable[] = {
      // parameters, gradients, optimizer
      {R, R, R},
      {R, R, S},
      {R, S, S},
      {S, S, S},
  };
  return kTable[stage];
}

Plan MakePlan(const std::vector<UnitSpec>& units, const PlanOptions& options) {
  ZERO_CHECK_GE(options.world, 1);
  ZERO_CHECK(options.homes == StateHomes())
      << "states live on the device; offload is not built yet";
  Plan plan{.world = options.world,
            .parameters = options.parameters,
            .gradients = options.gradients};
  const int64_t shards = options.shards == 0 ? options.world : options.shards;
  ZERO_CHECK(shards > 0 && plan.world % shards == 0)
      << shards << " shards do not divide " << plan.world << " ranks";
  plan.shard.size = plan.replicate.stride = shards;
  plan.replicate.size = plan.world / shards;
  plan.owners = {plan.shard, options.owners == 0 ? shards : options.owners};
  ZERO_CHECK(plan.owners.even() ||
             (plan.owners.owners == 1 && plan.replicate.size == 1 &&
              options.placement == PlacementOfServer()))
      << "a server owns everything, alone";
  if (shards > 1) plan.placement = options.placement;
  for (const UnitSpec& spec : units) {
    PlannedUnit unit = PlanUnit(spec, options);
    unit.offset = plan.padded_elems;
    unit.homes = options.homes;
    unit.trained_offset = plan.trained_elems;
    plan.padded_elems += unit.padded_elems;
    plan.trained_elems += unit.trained_elems;
    plan.num_trained_segments += unit.num_trained_segments;
    plan.units.push_back(std::move(unit));
  }
  FindNeeds(&plan);
  if (plan.world == 1) return plan;
  plan.reduce_buckets =
      BucketMaker(plan, options.reduce_bucket_elems,
                  plan.placement.gradients == Placement::kReplicated)
          .Make(BackwardOrder(plan));
  if (plan.placement.parameters == Placement::kReplicated &&
      plan.placement.optimizer == Placement::kSharded) {
    plan.gather_buckets =
        BucketMaker(plan, options.gather_bucket_elems, /*cross_units=*/true)
            .Make(ForwardOrder(plan));
  }
  ListTransfers(&plan);
  return plan;
}

}  // namespace zero
