#include "tools/cli/memory_rows.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tools/cli/model_tools.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// Bytes of parameters, gradients, master weights and moments on a device: each
// stage divides one more of them by the shards (Rajbhandari et al. 2020,
// section 5).
int64_t FormulaStates(const Plan& plan, const ExecutorOptions& options,
                      int stage, Offload offload) {
  const auto divided = [&](int64_t elems, int from_stage) {
    return stage >= from_stage ? elems / plan.shard.size : elems;
  };
  // Without the host's part, except that unsharded gradients, and those of
  // several groups, are summed here first.
  const int64_t updated = plan.trained_elems - plan.HostUpdatedElems();
  const bool keeps = offload != Offload::kAll;
  const int64_t summed = plan.AddsOnHost() ? updated : plan.trained_elems;
  return keeps * divided(plan.padded_elems, 3) *
             DTypeBytes(options.param_dtype) +
         divided(summed, 2) * DTypeBytes(options.grad_dtype) +
         divided(updated, 1) * options.optimizer_bytes();
}

// The purpose of an action; page/memory.js draws each in a color.
const char* PurposeOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kLoadBatch:
    case ActionKind::kForward:
    case ActionKind::kForwardBackward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kSumSquares:
    case ActionKind::kNorm:
    case ActionKind::kMoments:
    case ActionKind::kTensorNorms:
    case ActionKind::kUpdate:
      return "norm and update";
    case ActionKind::kGather:
    case ActionKind::kLookUp:
    case ActionKind::kGatherUpdated:
      return "gather parameters";
    case ActionKind::kReduce:
    case ActionKind::kReduceAcross:
    case ActionKind::kAddRows:
      return "reduce gradients";
    case ActionKind::kRelease:
    case ActionKind::kReleaseGradients:
      return "release";
    case ActionKind::kReadParameters:
    case ActionKind::kFetch:
    case ActionKind::kOffload:
    case ActionKind::kAddOffloaded:
    case ActionKind::kReadStates:
    case ActionKind::kWriteStates:
    case ActionKind::kUpload:
      return "host and disk";
  }
  ZERO_CHECK(false);
  return "";
}

absl::StatusOr<MemoryRow> Predict(RunOptions run, FitSearch& search,
                                  const ZeroConfig& configured, int stage,
                                  Recompute recompute, Offload offload) {
  // States that the config has on a disk stay there if offloaded.
  const auto device = [&](Offload from, OffloadDevice configured) {
    return absl::StrCat(".device=", offload < from ? "none"
                                    : configured == OffloadDevice::kNvme
                                        ? "nvme"
                                        : "cpu");
  };
  run.sets.push_back("zero_optimization.offload_optimizer" +
                     device(Offload::kOptimizer, configured.offload_optimizer));
  run.sets.push_back("zero_optimization.offload_param" +
                     device(Offload::kAll, configured.offload_param));
  if (offload == Offload::kAll) {
    run.sets.push_back("zero_optimization.offload_optimizer.ratio=1");
  }
  if (offload == Offload::kNone) {
    run.sets.push_back(
        "zero_optimization.offload_optimizer.delayed_update.enabled=false");
  }
  run.sets.push_back(absl::StrCat("zero_optimization.stage=", stage));
  const bool enabled = recompute > Recompute::kOff;
  run.sets.push_back(absl::StrCat("activation_checkpointing.enabled=",
                                  enabled ? "true" : "false"));
  run.sets.push_back(
      enabled
          ? absl::StrCat("activation_checkpointing.granularity=",
                         RecomputeName(recompute))
          : absl::StrCat("activation_checkpointing.keep_all=",
                         recompute == Recompute::kKeepAll ? "true" : "false"));
  // Groups need states to shard; stage 0 shards none.
  if (stage == 0) {
    run.sets.push_back("zero_optimization.mics_shard_size=auto");
  }
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  MemoryRow row{.run = run,
                .stage = stage,
                .recompute = recompute,
                .offload = offload,
                .config = config};
  ZERO_ASSIGN_OR_RETURN(row.rehearsal, search.Rehearse(SettingsOf(config)));
  const Plan& plan = row.rehearsal.plan;
  row.formula_states = FormulaStates(plan,
                                     MakeExecutorOptions(config, /*train=*/true,
                                                         /*max_positions=*/0),
                                     stage, offload);
  row.formula_wire = FormulaWire(plan, config.gradient_accumulation_steps);
  row.rows_wire = RowsWire(plan, config.gradient_accumulation_steps);
  return row;
}

}  // namespace

std::string MemoryRow::Name() const {
  std::string name =
      absl::StrCat("stage ", stage, ", recompute ", RecomputeName(recompute));
  if (offload != Offload::kNone) {
    absl::StrAppend(&name, ", offload ",
                    kOffloadNames[static_cast<int>(offload)]);
  }
  return name;
}

int64_t MemoryRow::states_bytes() const {
  int64_t bytes = 0;
  for (const MemoryCategory category :
       {MemoryCategory::kParameters, MemoryCategory::kGradients,
        MemoryCategory::kOptimizer}) {
    bytes += rehearsal.ledger.peak_bytes(category);
  }
  return bytes;
}

absl::StatusOr<std::vector<MemoryRow>> PredictRows(const RunOptions& run,
                                                   const Config& config,
                                                   bool offloads,
                                                   FitSearch& search) {
  std::vector<MemoryRow> rows;
  for (const Offload offload : kOffloads) {
    if (offload != Offload::kNone && !offloads) continue;
    for (const Recompute recompute : kRecomputeLevels) {
      for (int stage = FirstStageOf(offload); stage <= 3; ++stage) {
        ZERO_ASSIGN_OR_RETURN(
            MemoryRow row, Predict(run, search, config.zero_optimization, stage,
                                   recompute, offload));
        row.as_configured = stage == config.zero_optimization.stage &&
                            recompute == config.recompute() &&
                            offload == config.zero_optimization.offload();
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

std::vector<Compared> Compare(const MemoryRow& row) {
  std::vector<Compared> compared;
  Compared host{.name = "host_bytes", .predicted = row.rehearsal.host_bytes()};
  if (row.measured.has_value()) host.measured = row.measured->host;
  int64_t in_arenas = row.run.device == "cpu" ? host.measured.value_or(0) : 0;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    Compared of{.name = MemoryCategoryName(category),
                .predicted = row.rehearsal.ledger.at_peak()[i]};
    if (category == MemoryCategory::kFixed) {
      // The runs that are measured end before they write files.
      of.predicted -= row.rehearsal.writers;
    }
    if (row.measured.has_value()) {
      const auto peak = row.measured->peaks.find(of.name);
      of.measured = category == MemoryCategory::kFixed
                        ? row.measured->peak - in_arenas
                    : peak == row.measured->peaks.end() ? 0
                                                        : peak->second;
      in_arenas += *of.measured;
    }
    compared.push_back(std::move(of));
  }
  compared.push_back(std::move(host));
  return compared;
}

Json AsJson(const MemoryRow& row, bool measures) {
  const MemoryLedger& ledger = row.rehearsal.ledger;
  const Config& config = row.config;
  Json json = {{"config", row.run.config},
               {"device", row.device},
               {"ranks", row.run.ranks},
               {"dtype", DTypeName(config.param_dtype())},
               {"micro_batch", config.train_micro_batch_size_per_gpu},
               {"micro_steps", config.gradient_accumulation_steps},
               {"sequence_length", config.data.sequence_length},
               {"stage", row.stage},
               {"recompute", RecomputeName(row.recompute)},
               {"offload", kOffloadNames[static_cast<int>(row.offload)]},
               {"as_configured", row.as_configured},
               {"peak_bytes", ledger.total_peak_bytes()},
               {"host_bytes", row.rehearsal.host_bytes()},
               {"peak_action", row.rehearsal.peak_action},
               {"states_bytes", row.states_bytes()},
               {"states_bytes_by_formula", row.formula_states},
               {"sent_bytes_per_step", row.rehearsal.wire.sent()},
               {"from_host_bytes_per_step", row.rehearsal.host_traffic.up},
               {"to_host_bytes_per_step", row.rehearsal.host_traffic.down},
               {"disk_bytes", row.rehearsal.disk_bytes},
               {"from_disk_bytes_per_step", row.rehearsal.disk_traffic.read},
               {"to_disk_bytes_per_step", row.rehearsal.disk_traffic.written},
               {"offload_seconds_per_step", row.offload_seconds},
               {"sent_bytes_by_formula", row.formula_wire.sent()},
               {"memory_bytes", row.limits.device},
               {"host_memory_bytes",
                row.rehearsal.one_memory ? Json() : Json(row.limits.host)},
               {"disk_free_bytes",
                row.limits.disk == INT64_MAX ? Json() : Json(row.limits.disk)},
               {"fits", row.fits()},
               {"fits_barely", row.fits_barely()}};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    json[MemoryCategoryName(static_cast<MemoryCategory>(i))] =
        ledger.at_peak()[i];
  }
  if (!measures) return json;
  Json& measured = json["measured"];
  for (const Compared& of : Compare(row)) {
    measured[of.name] = of.measured ? Json(*of.measured) : Json();
  }
  measured["total"] = row.measured ? Json(row.measured->peak) : Json();
  return json;
}

Json Timeline(const MemoryRow& row) {
  const std::vector<Rehearsal::Moment>& moments = row.rehearsal.timeline;
  constexpr size_t kMaxMoments = 2000;
  const size_t group = moments.size() / kMaxMoments + 1;
  Json actions = Json::array(), purposes = Json::array();
  std::array<Json, kNumMemoryCategories> changes;
  MemoryLedger::ByCategory last;
  last.fill(-1);
  for (size_t begin = 0; begin < moments.size(); begin += group) {
    const size_t end = std::min(begin + group, moments.size());
    const Rehearsal::Moment& highest = *std::max_element(
        moments.begin() + begin, moments.begin() + end,
        [](const Rehearsal::Moment& a, const Rehearsal::Moment& b) {
          return absl::c_accumulate(a.bytes, int64_t{0}) <
                 absl::c_accumulate(b.bytes, int64_t{0});
        });
    for (int i = 0; i < kNumMemoryCategories; ++i) {
      const int64_t bytes = highest.bytes[i];
      if (std::exchange(last[i], bytes) == bytes) continue;
      changes[i].push_back({actions.size(), bytes});
    }
    actions.push_back(highest.action);
    purposes.push_back(PurposeOf(highest.kind));
  }
  Json timeline = {{"actions", std::move(actions)},
                   {"purposes", std::move(purposes)},
                   {"bytes", Json::object()}};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const char* name = MemoryCategoryName(static_cast<MemoryCategory>(i));
    timeline["bytes"][name] = std::move(changes[i]);
  }
  return timeline;
}

}  // namespace zero
