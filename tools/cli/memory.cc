// `zero memory`: what each ZeRO stage takes of a device and sends, side by
// side. Nothing is allocated and no data is read: every row is a rehearsal of
// the very step on the meta device.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/train/console.h"
#include "engine/train/memory_fit.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/page.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

struct MemoryFlags {
  RunOptions run;
  double device_memory = 0;  // bytes of a rank; 0: the device's
  bool json = false, csv = false;
  std::string html;  // page to write; empty: none
};

struct MemoryRow {
  int ranks;
  int stage;
  bool recompute;
  Rehearsal rehearsal;
  // By the closed formulas, with padding.
  int64_t formula_states;
  StepWire formula_wire;
  int64_t memory;  // that a rank may take

  bool fits() const { return rehearsal.ledger.total_peak_bytes() <= memory; }
};

// Of a size, in any case: powers of 1000 (MB) and of 1024 (MiB).
std::map<std::string, double> SizeUnits() {
  std::map<std::string, double> units = {{"b", 1}};
  double thousands = 1, binary = 1;
  for (const char* prefix : {"k", "m", "g", "t"}) {
    thousands *= 1000;
    binary *= 1024;
    units[absl::StrCat(prefix, "b")] = thousands;
    units[absl::StrCat(prefix, "ib")] = units[prefix] = binary;
  }
  return units;
}

// Bytes of parameters, gradients, master weights and moments on one rank: each
// stage divides one more of them by the shards (Rajbhandari et al. 2020,
// section 5).
int64_t FormulaStates(const Plan& plan, const ExecutorOptions& options,
                      int stage) {
  const auto divided = [&](int64_t elems, int from_stage) {
    return stage >= from_stage ? elems / plan.shard.size : elems;
  };
  const int64_t floats = options.optimizer.StateFloatsPerElement() +
                         (options.param_dtype == DType::kF32 ? 0 : 1);
  return divided(plan.padded_elems, 3) * DTypeBytes(options.param_dtype) +
         divided(plan.trained_elems, 2) * DTypeBytes(options.grad_dtype) +
         divided(plan.trained_elems, 1) * floats * sizeof(float);
}

absl::StatusOr<MemoryRow> Predict(const MemoryFlags& flags,
                                  const PlannedDevice& planned, int64_t memory,
                                  int stage, bool recompute) {
  RunOptions run = flags.run;
  run.sets.push_back(absl::StrCat("zero_optimization.stage=", stage));
  run.sets.push_back(absl::StrCat("activation_checkpointing.enabled=",
                                  recompute ? "true" : "false"));
  // Groups shard something, which stage 0 does not.
  if (stage == 0) run.sets.push_back("zero_optimization.mics_shard_size=auto");
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  const Rank rank = planned.MakeRank(run, config);
  MemoryRow row{.ranks = run.ranks, .stage = stage, .recompute = recompute};
  ZERO_ASSIGN_OR_RETURN(
      row.rehearsal,
      RehearseRun(rank, config, MakeModelTools(), {.train = true}));
  const Plan& plan = row.rehearsal.plan;
  row.formula_states = FormulaStates(plan,
                                     MakeExecutorOptions(config, /*train=*/true,
                                                         /*max_positions=*/0),
                                     stage);
  row.formula_wire = FormulaWire(plan, config.gradient_accumulation_steps);
  row.memory = memory;
  return row;
}

int64_t SentBytes(const StepWire& wire) {
  return wire.gathered + wire.reduced + wire.across;
}

Json AsJson(const MemoryRow& row) {
  const MemoryLedger& ledger = row.rehearsal.ledger;
  Json json = {{"ranks", row.ranks},
               {"stage", row.stage},
               {"recompute", row.recompute},
               {"peak_bytes", ledger.total_peak_bytes()},
               {"peak_action", row.rehearsal.peak_action},
               {"states_bytes_by_formula", row.formula_states},
               {"sent_bytes_per_step", SentBytes(row.rehearsal.wire)},
               {"sent_bytes_by_formula", SentBytes(row.formula_wire)},
               {"memory_bytes", row.memory},
               {"fits", row.fits()}};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    json[MemoryCategoryName(static_cast<MemoryCategory>(i))] =
        ledger.at_peak()[i];
  }
  return json;
}

// For a page: moments of a step, of many neighbors the highest one, and the
// bytes of each category where they change.
Json Timeline(const std::vector<Rehearsal::Moment>& moments) {
  constexpr size_t kMaxMoments = 2000;
  const size_t group = moments.size() / kMaxMoments + 1;
  Json actions = Json::array();
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
  }
  Json timeline = {{"actions", std::move(actions)}, {"bytes", Json::object()}};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const char* name = MemoryCategoryName(static_cast<MemoryCategory>(i));
    timeline["bytes"][name] = std::move(changes[i]);
  }
  return timeline;
}

// Of page.h.
Json PageRow(const MemoryRow& row, const std::string& config) {
  Json json = {{"config", config}};
  json.update(AsJson(row));
  json["timeline"] = Timeline(row.rehearsal.timeline);
  return json;
}

void PrintCsv(const std::vector<MemoryRow>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const Json row = AsJson(rows[i]);
    std::vector<std::string> names, values;
    for (const auto& [name, value] : row.items()) {
      names.push_back(name);
      values.push_back(value.dump());
    }
    if (i == 0) absl::PrintF("%s\n", absl::StrJoin(names, ","));
    absl::PrintF("%s\n", absl::StrJoin(values, ","));
  }
}

// One line per row; columns as wide as what is in them.
void PrintColumns(const std::vector<std::vector<std::string>>& lines) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      widths[c] = std::max(widths[c], line[c].size());
    }
  }
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      absl::PrintF("%s%*s", c == 0 ? "" : "  ", static_cast<int>(widths[c]),
                   line[c]);
    }
    absl::PrintF("\n");
  }
}

void PrintTable(const std::vector<MemoryRow>& rows) {
  const auto bytes = [](int64_t n) {
    return n == 0 ? "-" : HumanBytes(static_cast<double>(n));
  };
  std::vector<std::vector<std::string>> lines(1);
  lines[0] = {"stage", "recompute"};
  MemoryLedger::ByCategory used = {};  // by any row
  for (const MemoryRow& row : rows) {
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] += row.rehearsal.ledger.at_peak()[i];
    }
  }
  for (const auto& [name, total] : MemoryLedger::Parts(used)) {
    lines[0].push_back(name);
  }
  for (const char* name : {"peak", "in", "sent/step", "fits"}) {
    lines[0].push_back(name);
  }
  for (const MemoryRow& row : rows) {
    const MemoryLedger& ledger = row.rehearsal.ledger;
    std::vector<std::string> line = {absl::StrCat(row.stage),
                                     row.recompute ? "on" : "off"};
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i] > 0) line.push_back(bytes(ledger.at_peak()[i]));
    }
    line.insert(
        line.end(),
        {bytes(ledger.total_peak_bytes()), row.rehearsal.peak_action,
         bytes(SentBytes(row.rehearsal.wire)), row.fits() ? "yes" : "no"});
    lines.push_back(std::move(line));
  }
  PrintColumns(lines);
}

// Why a rank sends something else than the formula.
void PrintWireNotes(const std::vector<MemoryRow>& rows) {
  for (const MemoryRow& row : rows) {
    const StepWire &sent = row.rehearsal.wire, &formula = row.formula_wire;
    if (SentBytes(sent) == SentBytes(formula)) continue;
    absl::PrintF("note: at stage %d%s a rank gathers %s bytes%s\n", row.stage,
                 row.recompute ? " with recompute" : "",
                 WithCommas(sent.gathered),
                 AgainstFormula(sent.gathered, formula.gathered));
  }
}

absl::StatusOr<std::vector<MemoryRow>> PredictAll(const MemoryFlags& flags,
                                                  const PlannedDevice& planned,
                                                  int64_t memory) {
  std::vector<MemoryRow> rows;
  for (const bool recompute : {false, true}) {
    for (int stage = 0; stage <= 3; ++stage) {
      ZERO_ASSIGN_OR_RETURN(MemoryRow row,
                            Predict(flags, planned, memory, stage, recompute));
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

absl::Status ShowMemory(MemoryFlags flags) {
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(flags.run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  if (config.communication.algorithm ==
      CommunicationAlgorithm::kParameterServer) {
    return absl::InvalidArgumentError(
        "communication.algorithm: a parameter server has no stages to compare; "
        "zero plan shows what it and its workers take");
  }
  const PlannedDevice planned(flags.run, config);
  const DeviceInfo info = planned.device->info();
  // Ranks on the CPU are threads that share its memory; a GPU's kernels load
  // late.
  const bool on_gpu = planned.device->kind() == DeviceKind::kCuda;
  const int64_t device_memory =
      flags.device_memory > 0
          ? static_cast<int64_t>(flags.device_memory)
          : info.memory_bytes / (on_gpu ? 1 : flags.run.ranks);
  const int64_t memory =
      std::max<int64_t>(device_memory - (on_gpu ? kLateKernelsBytes : 0), 0);
  ZERO_ASSIGN_OR_RETURN(const std::vector<MemoryRow> rows,
                        PredictAll(flags, planned, memory));
  if (!flags.html.empty()) {
    Json document = {{"kind", "memory"},
                     {"title", absl::StrCat("Memory of ", flags.run.config)},
                     {"notes", planned.notes},
                     {"rows", Json::array()}};
    for (const MemoryRow& row : rows) {
      document["rows"].push_back(PageRow(row, flags.run.config));
    }
    ZERO_RETURN_IF_ERROR(WritePage(flags.html, document));
  }
  if (flags.csv) {
    PrintCsv(rows);
    return absl::OkStatus();
  }
  if (flags.json) {
    for (const MemoryRow& row : rows) absl::PrintF("%s\n", ToLine(AsJson(row)));
    return absl::OkStatus();
  }
  absl::PrintF(
      "memory of each of %d rank(s) at the peak of a step: micro-batch %d x %d "
      "tokens, on %s, where a rank may take %s\n",
      flags.run.ranks, config.train_micro_batch_size_per_gpu,
      config.data.sequence_length, info.name,
      HumanBytes(static_cast<double>(memory)));
  PrintTable(rows);
  PrintWireNotes(rows);
  for (const std::string& note : planned.notes) {
    absl::PrintF("note: %s\n", note);
  }
  return absl::OkStatus();
}

}  // namespace

Command AddMemory(CLI::App& app) {
  auto flags = std::make_shared<MemoryFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/true);
  AddRanksOption(app, &flags->run);
  app.add_option(
         "--device-memory", flags->device_memory,
         "memory of a rank's device, as 80GiB (default: this device's; on the "
         "CPU its share of the machine's)")
      ->transform(CLI::AsNumberWithUnit(SizeUnits()))
      ->check(CLI::Validator(
          [](const std::string& bytes) {
            return std::atof(bytes.c_str()) > 0
                       ? std::string()
                       : std::string("want a size above 0, such as 80GiB");
          },
          ""))
      ->type_name("SIZE");
  app.add_option("--html", flags->html, "write a page to look at")
      ->type_name("FILE");
  CLI::Option* const json =
      app.add_flag("--json", flags->json, "one JSON object per row, in bytes");
  app.add_flag("--csv", flags->csv, "comma-separated values, in bytes")
      ->excludes(json);
  return [flags] { return ShowMemory(*flags); };
}

}  // namespace zero
