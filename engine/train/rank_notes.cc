#include "engine/train/rank_notes.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/config/keys.h"
#include "engine/train/console.h"
#include "engine/train/session.h"
#include "engine/zero/schedule.h"

namespace zero {
namespace {

// Keys of a kind that are set to other values than their defaults.
std::vector<std::string> KeysSet(const LoadedConfig& loaded,
                                 bool KeySpec::*of_kind) {
  std::vector<std::string> paths;
  for (const KeySpec& key : AllKeys()) {
    if (!(key.*of_kind) || !key.IsRead(loaded.config)) continue;
    if (key.get(loaded.config) == key.get(Config())) continue;
    const auto origin = loaded.origins.find(key.path);
    if (origin != loaded.origins.end() &&
        absl::StartsWith(origin->second, "derived")) {
      continue;
    }
    paths.push_back(key.path);
  }
  return paths;
}

// No line if there are no keys.
std::vector<std::string> NothingChanges(const std::vector<std::string>& keys,
                                        const char* why) {
  if (keys.empty()) return {};
  return {absl::StrCat(absl::StrJoin(keys, ", "),
                       keys.size() == 1 ? " changes" : " change", " nothing ",
                       why)};
}

int64_t SmallestSegment(const Plan& plan) {
  int64_t smallest = INT64_MAX;
  for (const PlannedUnit& unit : plan.units) {
    for (const Segment& segment : unit.segments) {
      smallest = std::min(smallest, segment.elems);
    }
  }
  return smallest;
}

std::string DelayNote(const Config& config) {
  const int64_t warmup = config.zero_optimization.delayed_update_warmup_steps;
  const int64_t steps = config.training.steps;
  constexpr char kKey[] = "zero_optimization.offload_optimizer.delayed_update";
  if (steps > 0 && warmup >= steps) {
    return absl::StrCat(kKey, " begins after ", Counted(warmup, "step"),
                        ", but the run has ", steps);
  }
  return absl::StrCat(kKey, " changes results: after step ", warmup,
                      " gradients are those of parameters one update behind");
}

std::string RatioNote(const Plan& plan, double ratio) {
  std::vector<std::string> names;
  size_t num_units = 0;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    if (plan.units[u].trained_elems == 0) continue;
    ++num_units;
    if (plan.UpdatesOnHost(u)) names.push_back(plan.units[u].name);
  }
  return absl::StrFormat(
      "zero_optimization.offload_optimizer.ratio %g holds for whole units: the "
      "host updates %d of %d (%s; %.1f %% of the elements)",
      ratio, names.size(), num_units, absl::StrJoin(names, ", "),
      100.0 * static_cast<double>(plan.HostUpdatedElems()) /
          static_cast<double>(plan.trained_elems));
}

std::string PersistenceNote(const Plan& plan, const GatherPolicy& policy) {
  const std::vector<bool> persistent = PersistentUnits(plan, policy);
  int64_t num_units = 0, elems = 0;
  std::vector<std::string> names;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    const PlannedUnit& unit = plan.units[u];
    if (unit.padded_elems == 0) continue;
    ++num_units;
    if (!persistent[u]) continue;
    names.push_back(unit.name);
    elems += unit.padded_elems;
  }
  return absl::StrCat(
      "zero_optimization.stage3_param_persistence_threshold ",
      policy.persistence_threshold,
      " holds for whole units, all of whose parameters must be smaller: ",
      names.size(), " of ", num_units, " stay in place",
      names.empty() ? ""
                    : absl::StrCat(" (", absl::StrJoin(names, ", "), "; ",
                                   WithCommas(elems), " elements)"));
}

}  // namespace

std::vector<std::string> RankNotes(const LoadedConfig& loaded,
                                   const Plan& plan) {
  const ZeroConfig& zero = loaded.config.zero_optimization;
  std::vector<std::string> notes;
  if (plan.world == 1 && zero.offload() == Offload::kNone) {
    return NothingChanges(KeysSet(loaded, &KeySpec::between_ranks),
                          "on one rank, which has no other to share with or "
                          "talk to; start several with --ranks N");
  }
  if (zero.delayed_update) notes.push_back(DelayNote(loaded.config));
  if (zero.update_before_norm && zero.offload() != Offload::kNone) {
    notes.push_back(
        "zero_optimization.offload_optimizer.update_before_norm: a gradient "
        "that is not finite ends the run");
  }
  if (zero.offload() != Offload::kNone && zero.offload_optimizer_ratio < 1) {
    notes.push_back(RatioNote(plan, zero.offload_optimizer_ratio));
  }
  const int64_t smallest = SmallestSegment(plan);
  const auto add_bucket_note = [&](const char* path, int64_t elems,
                                   const std::vector<Bucket>& buckets) {
    if (buckets.empty() || elems >= smallest) return;
    notes.push_back(
        absl::StrCat(path, " ", elems,
                     " puts every segment into a bucket of its own: segments "
                     "are not cut, and this model's smallest one has ",
                     WithCommas(smallest), " elements"));
  };
  add_bucket_note("zero_optimization.reduce_bucket_size",
                  zero.reduce_bucket_size, plan.reduce_buckets);
  add_bucket_note("zero_optimization.allgather_bucket_size",
                  zero.allgather_bucket_size, plan.gather_buckets);
  const GatherPolicy policy =
      MakeExecutorOptions(loaded.config, /*train=*/true, /*max_positions=*/0)
          .gather;
  if (plan.placement.parameters == Placement::kSharded &&
      policy.persistence_threshold > 0) {
    notes.push_back(PersistenceNote(plan, policy));
  }
  if (plan.in_parts()) {
    const TablePart& part = plan.units[plan.num_computing - 1].part;
    notes.push_back(absl::StrCat("the vocabulary is in ", part.count,
                                 " parts of ", WithCommas(part.rows),
                                 " rows: zero_optimization.vocabulary_parts"));
  } else if (zero.vocabulary_parts == VocabularyParts::kOn) {
    notes.push_back(
        "zero_optimization.vocabulary_parts on changes nothing: the table is "
        "no larger than a part, or no other rank shares it");
  }
  return notes;
}

std::vector<std::string> DeviceNotes(const LoadedConfig& loaded,
                                     const Device& device) {
  if (device.kind() == DeviceKind::kCuda) return {};
  return NothingChanges(KeysSet(loaded, &KeySpec::of_gpu),
                        "on the CPU; they are for --device cuda");
}

}  // namespace zero
