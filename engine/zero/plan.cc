#include "engine/zero/plan.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// Appends the parameters that are `frozen` or not, and of `phase` unless that
// is below 0.
void Append(bool frozen, int phase, const PlanOptions& options,
            PlannedUnit* unit) {
  const int64_t segment_align = Plan::kAlignElems * options.world;
  const int64_t start = unit->padded_elems;
  int64_t end = start;
  for (PlannedParameter& parameter : unit->parameters) {
    const ParameterSpec& spec = parameter.spec;
    if (spec.frozen != frozen || (phase >= 0 && spec.phase != phase)) continue;
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
  if (!frozen) {
    unit->phases.insert(unit->phases.begin(),
                        {start, unit->padded_elems - start});
  }
}

// The phase of backward that writes the gradient of `element`.
int PhaseOf(const PlannedUnit& unit, int64_t element) {
  const auto begins = [&](const Segment& phase) {
    return phase.begin <= element;
  };
  return static_cast<int>(
      std::find_if(unit.phases.begin(), unit.phases.end(), begins) -
      unit.phases.begin());
}
int PhaseOf(const Plan& plan, const SegmentRef& ref) {
  return PhaseOf(plan.units[ref.unit], plan.segment(ref).begin);
}

// How a table is divided. A part has no more elements than `largest`, and is
// a whole number of equal segments; logits of a part begin at a multiple of 64.
struct TableLayout {
  TablePart part;
  int64_t segment_elems = 0;
};

TableLayout LayoutOf(const Shape& table, int64_t largest,
                     const PlanOptions& options) {
  const int64_t rows = table[0], cols = table[1];
  const int64_t align = Plan::kAlignElems * options.world;
  if (options.segment_per_tensor) return {};
  for (int64_t count = CeilDiv(rows * cols, largest); count > 1; ++count) {
    const int64_t least = CeilDiv(rows, count);
    const int64_t num_segments = CeilDiv(least * cols, Plan::kMaxSegmentElems);
    const int64_t segment_align = align * num_segments;
    const int64_t multiple = std::lcm(
        Plan::kAlignElems, segment_align / std::gcd(cols, segment_align));
    const int64_t part = RoundUp(least, multiple);
    if (part < rows && part * cols <= largest &&
        part * cols <= num_segments * Plan::kMaxSegmentElems) {
      return {{.count = static_cast<int>(CeilDiv(rows, part)), .rows = part},
              part * cols / num_segments};
    }
    if (least <= multiple) break;
  }
  return {};
}

PlannedUnit PlanUnit(const UnitSpec& spec, const PlanOptions& options) {
  PlannedUnit unit{.name = spec.name, .borrowed = spec.borrowed};
  for (const ParameterSpec& parameter : spec.parameters) {
    unit.parameters.push_back(
        {parameter, 0, parameter.shape, 0, parameter.shape.num_elems()});
  }
  int64_t trained = 0;
  int last_phase = 0;
  for (const ParameterSpec& parameter : spec.parameters) {
    if (!parameter.frozen) trained += parameter.shape.num_elems();
    ZERO_CHECK_GE(parameter.phase, last_phase) << parameter.name;
    last_phase = parameter.phase;
  }
  const bool in_phases = trained > options.max_one_phase_elems;
  for (int phase = 0; in_phases && phase <= last_phase; ++phase) {
    Append(/*frozen=*/false, phase, options, &unit);
  }
  if (!in_phases) Append(/*frozen=*/false, /*phase=*/-1, options, &unit);
  unit.trained_elems = unit.padded_elems;
  unit.num_trained_segments = static_cast<int>(unit.segments.size());
  Append(/*frozen=*/true, /*phase=*/-1, options, &unit);
  return unit;
}

// Plans a table as one unit, or as one unit for each of its parts.
std::vector<PlannedUnit> PlanTable(const ParameterSpec& spec,
                                   const TableLayout& layout, bool in_parts,
                                   const PlanOptions& options) {
  if (layout.part.rows == 0) {
    return {PlanUnit({.name = spec.name, .parameters = {spec}}, options)};
  }
  const int count = in_parts ? layout.part.count : 1;
  const int64_t all = spec.shape[0], width = spec.shape[1];
  std::vector<PlannedUnit> units;
  for (int i = 0; i < count; ++i) {
    PlannedUnit unit{.name = spec.name, .part = {i, count, layout.part.rows}};
    if (in_parts) unit.name += absl::StrCat(".", i);
    const int64_t first = i * layout.part.rows;
    const int64_t rows =
        in_parts ? std::min(layout.part.rows, all - first) : all;
    unit.parameters = {{spec, 0, {rows, width}, first * width, rows * width}};
    while (unit.padded_elems < rows * width) {
      unit.segments.push_back({unit.padded_elems, layout.segment_elems});
      unit.padded_elems += layout.segment_elems;
    }
    if (!spec.frozen) {
      unit.trained_elems = unit.padded_elems;
      unit.num_trained_segments = static_cast<int>(unit.segments.size());
      unit.phases = {{0, unit.trained_elems}};
    }
    units.push_back(std::move(unit));
  }
  return units;
}

// The units that compute, then their tables. With a table in parts, each of its
// model units (the lookup and the head) becomes one computing unit per part.
// The first has the unit's other parameters.
std::vector<PlannedUnit> PlanUnits(const std::vector<UnitSpec>& specs,
                                   bool in_parts, const PlanOptions& options) {
  struct Table {
    ParameterSpec spec;
    int owner;
    TableLayout layout = {};
  };
  std::vector<Table> tables;
  std::vector<UnitSpec> rest = specs;
  int64_t largest = options.min_part_elems;
  for (int u = 0; u < static_cast<int>(specs.size()); ++u) {
    std::erase_if(rest[u].parameters, [&](const ParameterSpec& parameter) {
      if (!parameter.vocabulary) return false;
      tables.push_back({parameter, u});
      return true;
    });
    largest = std::max(largest, PlanUnit(rest[u], {}).padded_elems);
  }
  std::vector<PlannedUnit> units, behind;
  for (Table& table : tables) {
    table.layout = LayoutOf(table.spec.shape, largest, options);
  }
  // Owners as indices among the computing units.
  std::vector<int> place;
  for (int u = 0; u < static_cast<int>(specs.size()); ++u) {
    const auto reads = [&](const Table& table) {
      const std::vector<std::string>& borrowed = specs[u].borrowed;
      return table.layout.part.rows > 0 &&
             (table.owner == u ||
              std::count(borrowed.begin(), borrowed.end(), table.spec.name));
    };
    const auto table = std::find_if(tables.begin(), tables.end(), reads);
    const int count =
        in_parts && table != tables.end() ? table->layout.part.count : 1;
    place.push_back(static_cast<int>(units.size()));
    for (int i = 0; i < count; ++i) {
      UnitSpec spec = rest[u];
      if (i > 0) spec.parameters.clear();
      PlannedUnit unit = PlanUnit(spec, options);
      if (count > 1) {
        unit.name += absl::StrCat(".", i);
        unit.part = {i, count, table->layout.part.rows};
      }
      unit.owner = unit.completed_by = static_cast<int>(units.size());
      unit.model_unit = u;
      units.push_back(std::move(unit));
    }
  }
  for (const Table& table : tables) {
    for (PlannedUnit& unit :
         PlanTable(table.spec, table.layout, in_parts, options)) {
      unit.owner = unit.completed_by = place[table.owner] + unit.part.number;
      unit.model_unit = table.owner;
      behind.push_back(std::move(unit));
    }
  }
  units.insert(units.end(), behind.begin(), behind.end());
  return units;
}

void FindRequiredUnits(const std::vector<UnitSpec>& specs, Plan* plan) {
  std::map<std::string, int> place;  // the unit, or its first part's
  std::vector<PlannedUnit>& units = plan->units;
  const int num_units = static_cast<int>(units.size());
  for (int u = 0; u < plan->num_computing; ++u) {
    PlannedUnit& unit = units[u];
    std::vector<int>& required = unit.required_units;
    for (const std::string& name : unit.borrowed) {
      const auto found = place.find(name);
      ZERO_CHECK(found != place.end())
          << unit.name << " borrows " << name
          << ", which is not a parameter of an earlier unit";
      const bool parts = units[found->second].part.count > 1;
      required.push_back(found->second + (parts ? unit.part.number : 0));
    }
    for (int own = 0; own < num_units; ++own) {
      if (units[own].owner != u) continue;
      required.push_back(own);
      for (const PlannedParameter& parameter : units[own].parameters) {
        if (parameter.first == 0) place[parameter.spec.name] = own;
      }
    }
    std::sort(required.begin(), required.end());
    required.erase(std::unique(required.begin(), required.end()),
                   required.end());
    unit.writes = required;
    if (specs[unit.model_unit].backward_reads_parameters) {
      unit.backward_required_units = required;
    } else if (const int first = u - unit.part.number;
               first != u && units[first].padded_elems > 0) {
      // Each part of a lookup also adds positions.
      required.insert(required.begin(), first);
    }
    for (int table = num_units - 1; table >= plan->num_computing; --table) {
      if (units[table].owner == u) plan->forward_order.push_back(table);
    }
    plan->forward_order.push_back(u);
  }
}

// The device updates the rest of the host's share. Large units come first, so
// that small ones fill up the share; of equal ones the host gets the last,
// whose gradients are complete first and whose parameters are needed last.
void LeaveOnDevice(double host_share, Plan* plan) {
  struct Group {
    int first = 0, last = 0;
    int64_t elems = 0;
  };
  std::vector<Group> groups;
  for (int u = static_cast<int>(plan->units.size()) - 1; u >= 0; --u) {
    const PlannedUnit& unit = plan->units[u];
    if (unit.part.number + 1 == unit.part.count) groups.push_back({u, u, 0});
    groups.back().first = u;
    groups.back().elems += unit.trained_elems;
  }
  std::erase_if(groups, [](const Group& group) { return group.elems == 0; });
  std::stable_sort(
      groups.begin(), groups.end(),
      [](const Group& a, const Group& b) { return a.elems > b.elems; });
  auto room = static_cast<int64_t>(
      std::ceil(host_share * static_cast<double>(plan->trained_elems)));
  const int64_t all = room;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = groups[i];
    const bool last_chance = i + 1 == groups.size() && room == all;
    if (group.elems <= room || last_chance) {
      room -= group.elems;
      continue;
    }
    for (int u = group.first; u <= group.last; ++u) {
      plan->units[u].homes.optimizer = Home::kDevice;
    }
  }
}

// The first computing unit that writes a gradient.
int FirstTrained(const Plan& plan) {
  for (int u = 0; u < plan.num_computing; ++u) {
    for (const int written : plan.units[u].writes) {
      if (plan.units[written].trained_elems > 0) return u;
    }
  }
  return plan.num_computing;
}

// Chooses which tables are exchanged by rows, and which heads wait.
void ChooseRows(const PlanOptions& options, Plan* plan) {
  plan->rows = {DTypeBytes(plan->gradients.dtype) <
                        DTypeBytes(plan->parameters.dtype)
                    ? plan->gradients.dtype
                    : plan->parameters.dtype};
  const int num_units = static_cast<int>(plan->units.size());
  for (int t = plan->num_computing; t < num_units; ++t) {
    PlannedUnit& table = plan->units[t];
    const Shape& shape = table.parameters[0].spec.shape;
    const int64_t tokens = plan->world * options.tokens;
    if (!table.parameters[0].spec.looked_up || table.trained_elems == 0) {
      continue;
    }
    // A server's group has no equal owners to gather from.
    if (plan->world == 1 || !plan->owners.even() || tokens == 0 ||
        tokens >= shape[0]) {
      for (int u = table.owner + 1;
           u < plan->num_computing && table.part.count > 1; ++u) {
        if (std::erase(plan->units[u].writes, t) > 0) table.head_waits = true;
      }
      if (table.head_waits) {
        plan->units[table.owner].backward_required_units = {t};
      }
      continue;
    }
    table.rows = options.tokens;
    table.width = shape[1];
    std::erase(plan->units[table.owner].writes, t);
    table.completed_by = -1;
    for (int u = plan->num_computing - 1; u >= 0; --u) {
      const std::vector<int>& writes = plan->units[u].writes;
      if (std::count(writes.begin(), writes.end(), t) > 0) {
        table.completed_by = u;
      }
    }
  }
}

// Chooses which tables are looked up by rows: where a rank sends fewer bytes.
void ChooseLookups(const PlanOptions& options, Plan* plan) {
  using Kind = Transfer::Kind;
  const int64_t ranks = plan->shard.size;
  const int64_t tokens = ranks * options.micro_tokens;
  if (!plan->shards_parameters() || ranks == 1 || tokens == 0) return;
  const auto sent = [&](Kind kind, int64_t elems, const Codec& codec) {
    return Transfer{kind, plan->owners, elems, codec}.BytesOf(0).sent;
  };
  for (int t = plan->num_computing; t < static_cast<int>(plan->units.size());
       ++t) {
    PlannedUnit& table = plan->units[t];
    const ParameterSpec& spec = table.parameters[0].spec;
    const int64_t rows = spec.shape[0], width = spec.shape[1];
    if (!spec.looked_up || plan->FetchesParameters(t) ||
        sent(Kind::kGather, tokens, {DType::kI32}) +
                sent(Kind::kSum, tokens * width, plan->parameters) >=
            sent(Kind::kGather, rows * width, plan->parameters)) {
      continue;
    }
    const auto reads = [&](const PlannedUnit& unit) {
      const std::vector<int>& required = unit.required_units;
      return std::count(required.begin(), required.end(), t) > 0;
    };
    const bool in_parts = table.part.count > 1;
    if (!in_parts &&
        std::count_if(plan->units.begin(), plan->units.end(), reads) > 1) {
      continue;
    }
    std::erase(plan->units[table.owner].required_units, t);
    if (table.part.number > 0) continue;
    const int64_t at_once = (in_parts ? table.part.rows : rows) / 4;
    table.lookup_tokens = std::max<int64_t>(1, at_once / ranks);
    for (int64_t begin = 0; begin < options.micro_tokens;
         begin += table.lookup_tokens) {
      const int64_t asked =
          ranks * std::min(table.lookup_tokens, options.micro_tokens - begin);
      table.lookup.push_back(
          {Kind::kGather, plan->owners, asked, {DType::kI32}});
      table.lookup.push_back(
          {Kind::kSum, plan->owners, asked * width, plan->parameters});
    }
  }
}

// A gradient that every rank has in full, or that another unit also writes, is
// written in one phase.
void ChoosePhases(Plan* plan) {
  const bool sharded = plan->shards_gradients();
  const int num_units = static_cast<int>(plan->units.size());
  for (int u = 0; u < num_units; ++u) {
    PlannedUnit& unit = plan->units[u];
    bool alone = sharded && u + 1 != plan->num_computing &&
                 unit.writes == std::vector<int>{u};
    for (int other = 0; other < num_units; ++other) {
      const std::vector<int>& writes = plan->units[other].writes;
      alone &= other == u || std::count(writes.begin(), writes.end(), u) == 0;
    }
    if (!alone && unit.phases.size() > 1) {
      unit.phases = {{0, unit.trained_elems}};
    }
    for (PlannedParameter& parameter : unit.parameters) {
      if (parameter.spec.frozen) continue;
      parameter.phase = PhaseOf(unit, parameter.offset);
    }
  }
}

// Cuts a sequence of segments into buckets of at most `limit` elements. If
// buckets may cross units, the first and the last segment are separate buckets:
// nothing hides the first until it is full, or the last at all.
class BucketMaker {
 public:
  BucketMaker(const Plan& plan, int64_t limit, bool cross_units)
      : plan_(plan), limit_(limit), cross_units_(cross_units) {}

  std::vector<Bucket> Make(const std::vector<SegmentRef>& order) {
    for (size_t i = 0; i < order.size(); ++i) {
      const bool edge = cross_units_ && (i == 1 || i + 1 == order.size());
      const int64_t elems = plan_.segment(order[i]).elems;
      if (buckets_.empty() || edge || !Fits(order[i], elems)) {
        buckets_.push_back(
            {.unit = order[i].unit, .phase = PhaseOf(plan_, order[i])});
      }
      buckets_.back().segments.push_back(order[i]);
      buckets_.back().elems += elems;
      buckets_.back().completed_by = plan_.units[order[i].unit].completed_by;
    }
    return std::move(buckets_);
  }

 private:
  bool Fits(const SegmentRef& segment, int64_t elems) const {
    const Bucket& bucket = buckets_.back();
    return bucket.elems + elems <= limit_ &&
           (cross_units_ || (bucket.unit == segment.unit &&
                             bucket.phase == PhaseOf(plan_, segment)));
  }

  const Plan& plan_;
  int64_t limit_;
  bool cross_units_;
  std::vector<Bucket> buckets_;
};

std::vector<SegmentRef> ForwardOrder(const Plan& plan) {
  std::vector<SegmentRef> order;
  for (int u : plan.forward_order) {
    for (int s = 0; s < plan.units[u].num_trained_segments; ++s) {
      order.push_back({u, s});
    }
  }
  return order;
}

// Segments in the order in which backward completes them. Among those completed
// together, units precede tables, which are larger; a phase's own segments
// ascend.
std::vector<SegmentRef> BackwardOrder(const Plan& plan) {
  std::vector<SegmentRef> order = ForwardOrder(plan);
  const auto key = [&](const SegmentRef& ref) {
    const PlannedUnit& unit = plan.units[ref.unit];
    return std::tuple(-unit.completed_by, ref.unit, PhaseOf(plan, ref));
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](const SegmentRef& a, const SegmentRef& b) {
                     return key(a) < key(b);
                   });
  std::erase_if(order, [&](const SegmentRef& ref) {
    return plan.units[ref.unit].completed_by < 0;
  });
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
  if (plan->shards_parameters()) {
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
    if (bucket.is_rows()) {
      // Tokens, then rows: of the group, then of all groups.
      const int64_t ids = bucket.elems / plan->units[bucket.unit].width;
      for (const auto& [elems, codec] : {std::pair(ids, Codec{DType::kI32}),
                                         std::pair(bucket.elems, plan->rows)}) {
        bucket.transfers.push_back(
            {Kind::kGather, plan->owners, elems / groups.size, codec});
        if (groups.size == 1) continue;
        bucket.across.push_back(
            {Kind::kGather, {groups, groups.size}, elems, codec});
      }
      continue;
    }
    bucket.transfers =
        list(plan->owners, bucket.elems, plan->gradients, {Kind::kSum});
    // A rank that updates all parameters needs all gradients.
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

// A rank keeps its own shard and receives the rest: in a gather from the
// owners, in a sum all others' addends to its shard.
Transfer::Bytes Transfer::BytesOf(int64_t rank) const {
  const int64_t others = partition.axis.size - 1;
  if (others == 0) return {};
  const int64_t item = DTypeBytes(codec.dtype);
  const int64_t own = partition.OwnedElems(elems, rank);
  const int64_t given = own * others * item, rest = (elems - own) * item;
  if (kind == Kind::kGather) return {.sent = given, .received = rest};
  // Around a ring the first hop carries elements, the others sums.
  const int64_t hops =
      own * (others - 1) * (DTypeBytes(codec.partial_sums) - item);
  return {.sent = rest + hops, .received = given + hops};
}

bool Plan::Offloads(const Bucket& bucket) const {
  if (bucket.is_rows()) return UpdatesOnHost(bucket.unit);
  return std::any_of(
      bucket.segments.begin(), bucket.segments.end(),
      [&](const SegmentRef& ref) { return UpdatesOnHost(ref.unit); });
}

int64_t Plan::HostUpdatedElems() const {
  int64_t elems = 0;
  for (const PlannedUnit& unit : units) {
    if (unit.homes.optimizer != Home::kDevice) elems += unit.trained_elems;
  }
  return elems;
}

bool Plan::UpdatesOnHost() const {
  return std::any_of(units.begin(), units.end(), [](const PlannedUnit& unit) {
    return unit.homes.optimizer != Home::kDevice;
  });
}

bool Plan::FetchesParameters() const {
  return std::any_of(units.begin(), units.end(), [](const PlannedUnit& unit) {
    return unit.homes.parameters != Home::kDevice;
  });
}

bool Plan::UsesDisk() const {
  return std::any_of(units.begin(), units.end(), [](const PlannedUnit& unit) {
    return unit.homes.parameters == Home::kNvme ||
           unit.homes.optimizer == Home::kNvme;
  });
}

bool Plan::ReadsParameters() const {
  return std::any_of(units.begin(), units.end(), [](const PlannedUnit& unit) {
    return unit.homes.parameters == Home::kNvme;
  });
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
  const bool host_updates = options.homes.optimizer != Home::kDevice;
  const bool fetches = options.homes.parameters != Home::kDevice;
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
  ZERO_CHECK(!(host_updates || fetches) || plan.owners.even())
      << "a server's states are not in host memory";
  ZERO_CHECK(options.host_share > 0 && options.host_share <= 1 &&
             !(fetches && options.host_share < 1))
      << options.host_share;
  ZERO_CHECK(!fetches || options.placement.parameters == Placement::kSharded)
      << "parameters in host memory are sharded";
  if (shards > 1) {
    plan.placement = options.placement;
  } else {
    if (fetches) plan.placement.parameters = Placement::kSharded;
    // A single rank's gradients go to the host micro-step by micro-step, as if
    // they were sharded. Those of groups of one are added up on the device
    // (AddsOnHost).
    if (host_updates && options.host_share == 1 && plan.world == 1) {
      plan.placement.gradients = options.placement.gradients;
    }
  }
  // With full gradients, parts gain nothing on one rank; with only parameters
  // sharded, among one, they would be fetched more often than the table.
  const bool in_parts = options.vocabulary_parts &&
                        (plan.shards_gradients() ||
                         (plan.world > 1 && !plan.shards_parameters()));
  int64_t number = 0;  // of units that have parameters, a table's parts as one
  for (PlannedUnit& unit : PlanUnits(units, in_parts, options)) {
    if (unit.owner == static_cast<int>(plan.units.size())) ++plan.num_computing;
    unit.offset = plan.padded_elems;
    unit.homes = options.homes;
    if (unit.padded_elems > 0 && unit.parameters[0].first == 0) ++number;
    unit.first_element = number << 40;
    if (unit.padded_elems > 0) unit.first_element += unit.parameters[0].first;
    plan.padded_elems += unit.padded_elems;
    plan.trained_elems += unit.trained_elems;
    unit.first_trained_segment = plan.num_trained_segments;
    plan.num_trained_segments += unit.num_trained_segments;
    plan.units.push_back(std::move(unit));
  }
  if (host_updates) LeaveOnDevice(options.host_share, &plan);
  FindRequiredUnits(units, &plan);
  plan.first_trained = FirstTrained(plan);
  int64_t num_segments = 0;
  for (const int u : plan.forward_order) {
    plan.units[u].first_segment = num_segments;
    num_segments += static_cast<int64_t>(plan.units[u].segments.size());
  }
  ChooseRows(options, &plan);
  ChooseLookups(options, &plan);
  ChoosePhases(&plan);
  if (plan.world == 1 && !host_updates) return plan;
  plan.reduce_buckets = BucketMaker(plan, options.reduce_bucket_elems,
                                    /*cross_units=*/!plan.shards_gradients())
                            .Make(BackwardOrder(plan));
  for (int u = plan.num_computing; u < static_cast<int>(plan.units.size());
       ++u) {
    const PlannedUnit& table = plan.units[u];
    if (table.rows == 0 || table.part.number > 0) continue;
    plan.reduce_buckets.push_back(
        {.elems = plan.world * table.rows * table.width,
         .unit = u,
         .completed_by = table.owner});
  }
  if (!plan.shards_parameters() &&
      plan.placement.optimizer == Placement::kSharded) {
    plan.gather_buckets =
        BucketMaker(plan, options.gather_bucket_elems, /*cross_units=*/true)
            .Make(ForwardOrder(plan));
  }
  if (plan.world > 1) ListTransfers(&plan);
  return plan;
}

}  // namespace zero
