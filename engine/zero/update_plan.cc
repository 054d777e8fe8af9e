#include "engine/zero/update_plan.h"

#include <algorithm>
#include <utility>

namespace zero {
namespace {

// A run of a unit's elements, of parameter `tensor` (the first of several).
struct Run {
  UpdateRange range;
  int64_t tensor = 0;
  bool own = true;  // in one of this rank's shards
};

// Adjacent parameters of equal decay (except alignment gaps, whose gradients
// are zero) update in one run, unless each has its own norm.
std::vector<Run> RunsOfUnit(const PlannedUnit& unit, const UpdateRules& rules,
                            int64_t* num_tensors) {
  std::vector<Run> runs;
  for (const PlannedParameter& parameter : unit.parameters) {
    if (parameter.spec.frozen) continue;
    // The parts of a table are one tensor.
    const int64_t tensor = *num_tensors - (parameter.first > 0 ? 1 : 0);
    *num_tensors = tensor + 1;
    const int64_t end = parameter.offset + parameter.elems;
    const bool decays = parameter.spec.decay || rules.decay_all;
    const float decay = decays ? rules.weight_decay : 0.0f;
    if (!rules.tensor_norms && !runs.empty() &&
        runs.back().range.weight_decay == decay &&
        parameter.offset - runs.back().range.end < Plan::kAlignElems) {
      runs.back().range.end = end;
    } else {
      runs.push_back({{parameter.offset, end, decay}, tensor});
    }
  }
  return runs;
}

// Cuts every run where a segment or this rank's shard of it begins or ends.
std::vector<Run> CutAtOwnShards(const Plan& plan, const PlannedUnit& unit,
                                int64_t rank, const std::vector<Run>& runs) {
  std::vector<Run> parts;
  for (const Run& run : runs) {
    for (const Segment& segment : unit.segments) {
      const Segment shard = plan.Shard(segment, rank);
      const int64_t cuts[] = {segment.begin, shard.begin, shard.end(),
                              segment.end()};
      for (int i = 0; i < 3; ++i) {
        Run part = run;
        part.own = i == 1;
        part.range.begin = std::max(run.range.begin, cuts[i]);
        part.range.end = std::min(run.range.end, cuts[i + 1]);
        if (part.range.begin < part.range.end) parts.push_back(part);
      }
    }
  }
  return parts;
}

// The runs in this rank's shards, as local elements.
std::vector<Run> OwnRuns(const Plan& plan, const PlannedUnit& unit,
                         int64_t rank, const std::vector<Run>& runs) {
  std::vector<Run> own;
  for (const Segment& segment : unit.segments) {
    const Segment shard = plan.Shard(segment, rank);
    const int64_t shift =
        shard.begin - plan.owners.OwnedElems(segment.begin, rank);
    for (Run run : runs) {
      run.range.begin = std::max(run.range.begin, shard.begin) - shift;
      run.range.end = std::min(run.range.end, shard.end()) - shift;
      run.range.shift = shift;
      if (run.range.begin < run.range.end) own.push_back(run);
    }
  }
  return own;
}

// Segments that hold elements of one parameter, at most.
int64_t MaxRanges(const Plan& plan) {
  int64_t most = 0, count = 0;
  for (const PlannedUnit& unit : plan.units) {
    for (const PlannedParameter& parameter : unit.parameters) {
      if (parameter.spec.frozen) continue;
      if (parameter.first == 0) count = 0;
      const int64_t end = parameter.offset + parameter.elems;
      count += std::count_if(unit.segments.begin(), unit.segments.end(),
                             [&](const Segment& segment) {
                               return segment.begin < end &&
                                      parameter.offset < segment.end();
                             });
      most = std::max(most, count);
    }
  }
  return most;
}

}  // namespace

UpdatePlan MakeUpdatePlan(const Plan& plan, int64_t rank,
                          const UpdateRules& rules) {
  UpdatePlan update;
  std::vector<std::vector<Run>> runs(plan.units.size());
  for (size_t u = 0; u < plan.units.size(); ++u) {
    const PlannedUnit& unit = plan.units[u];
    runs[u] = RunsOfUnit(unit, rules, &update.num_tensors);
    if (plan.placement.optimizer == Placement::kSharded) {
      runs[u] = OwnRuns(plan, unit, rank, runs[u]);
    } else if (rules.tensor_norms) {
      runs[u] = CutAtOwnShards(plan, unit, rank, runs[u]);
    }
  }
  if (rules.tensor_norms) update.max_ranges = MaxRanges(plan);
  update.num_slots = update.max_ranges * update.num_tensors;
  std::vector<int64_t> num_own(update.num_tensors, 0);
  for (size_t u = 0; u < plan.units.size(); ++u) {
    UnitUpdate unit{.first_element = plan.units[u].first_element};
    for (const Run& run : runs[u]) {
      unit.ranges.push_back(run.range);
      if (!rules.tensor_norms) continue;
      const int64_t t = run.tensor;
      const int64_t slot =
          run.own ? num_own[t]++ * update.num_tensors + t : update.num_slots++;
      unit.norms.push_back({slot, t, t + 1});
    }
    update.units.push_back(std::move(unit));
  }
  return update;
}

UnitUpdate UpdateWithin(const UnitUpdate& unit, int64_t begin, int64_t end) {
  UnitUpdate within{.first_element = unit.first_element};
  for (size_t i = 0; i < unit.ranges.size(); ++i) {
    UpdateRange range = unit.ranges[i];
    range.begin = std::max(range.begin, begin) - begin;
    range.end = std::min(range.end, end) - begin;
    range.shift += begin;
    if (range.begin >= range.end) continue;
    within.ranges.push_back(range);
    if (!unit.norms.empty()) within.norms.push_back(unit.norms[i]);
  }
  return within;
}

std::vector<Segment> GapsOf(const PlannedUnit& unit) {
  std::vector<Segment> gaps;
  int64_t end = 0;
  const auto add = [&](int64_t begin) {
    if (begin > end) gaps.push_back({end, begin - end});
  };
  for (const PlannedParameter& parameter : unit.parameters) {
    if (parameter.spec.frozen) continue;
    add(parameter.offset);
    end = parameter.offset + parameter.elems;
  }
  add(unit.trained_elems);
  return gaps;
}

}  // namespace zero
