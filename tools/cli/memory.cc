// `zero memory`: what each ZeRO stage takes of a device and sends, side by
// side. Every row is a rehearsal of the very run on the meta device, which
// allocates nothing and reads no data; --measure holds a run against it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
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
#include "absl/types/optional.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/fit_search.h"
#include "engine/train/memory_fit.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/measured_run.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/page.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

struct MemoryFlags {
  RunOptions run;
  std::vector<std::string> more_configs;
  double device_memory = 0;  // bytes of a rank; 0: the device's
  bool json = false, csv = false, measure = false, fit = false;
  std::string fit_config;  // file to write; empty: none
  std::string html;        // page to write; empty: none
};

struct MemoryRow {
  RunOptions run;  // of this row, by its --set
  int stage;
  Recompute recompute;
  Rehearsal rehearsal;
  // By the closed formulas, with padding.
  int64_t formula_states;
  StepWire formula_wire;
  int64_t memory;  // that a rank may take
  absl::optional<MeasuredRun> measured;

  bool fits() const { return rehearsal.ledger.total_peak_bytes() <= memory; }
};

std::string NameOf(const MemoryRow& row) {
  return absl::StrCat(
      "stage ", row.stage,
      row.recompute == Recompute::kOff ? "" : ", recompute ",
      row.recompute == Recompute::kOff ? "" : RecomputeName(row.recompute));
}

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
  return divided(plan.padded_elems, 3) * DTypeBytes(options.param_dtype) +
         divided(plan.trained_elems, 2) * DTypeBytes(options.grad_dtype) +
         divided(plan.trained_elems, 1) * options.optimizer_bytes();
}

absl::StatusOr<MemoryRow> Predict(RunOptions run, const PlannedDevice& planned,
                                  int64_t memory, int stage,
                                  Recompute recompute) {
  run.sets.push_back(absl::StrCat("zero_optimization.stage=", stage));
  const bool enabled = recompute != Recompute::kOff;
  run.sets.push_back(absl::StrCat("activation_checkpointing.enabled=",
                                  enabled ? "true" : "false"));
  if (enabled) {
    run.sets.push_back(absl::StrCat("activation_checkpointing.granularity=",
                                    RecomputeName(recompute)));
  }
  // Groups shard something, which stage 0 does not.
  if (stage == 0) run.sets.push_back("zero_optimization.mics_shard_size=auto");
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  const Rank rank = planned.MakeRank(run, config);
  MemoryRow row{.run = run, .stage = stage, .recompute = recompute};
  ZERO_ASSIGN_OR_RETURN(
      row.rehearsal,
      RehearseRun(rank, config, MakeModelTools(), TrainingWorkload(config)));
  const Plan& plan = row.rehearsal.plan;
  row.formula_states = FormulaStates(plan,
                                     MakeExecutorOptions(config, /*train=*/true,
                                                         /*max_positions=*/0),
                                     stage);
  row.formula_wire = FormulaWire(plan, config.gradient_accumulation_steps);
  row.memory = memory;
  return row;
}

struct Compared {
  std::string name;
  int64_t predicted = 0;
  Json measured;  // null: was not run
};

// Bytes of a rank by category, with `fixed` as the operating system has it:
// what the process held beside the blocks of its arenas.
std::vector<Compared> Compare(const MemoryRow& row) {
  std::vector<Compared> compared;
  int64_t in_arenas = 0;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    Compared of{.name = MemoryCategoryName(category),
                .predicted = row.rehearsal.ledger.at_peak()[i]};
    if (row.measured.has_value()) {
      const auto peak = row.measured->peaks.find(of.name);
      const int64_t bytes = category == MemoryCategory::kFixed
                                ? row.measured->peak - in_arenas
                            : peak == row.measured->peaks.end() ? 0
                                                                : peak->second;
      in_arenas += bytes;
      of.measured = bytes;
    }
    compared.push_back(std::move(of));
  }
  return compared;
}

Json AsJson(const MemoryRow& row, bool measures) {
  const MemoryLedger& ledger = row.rehearsal.ledger;
  Json json = {{"config", row.run.config},
               {"ranks", row.run.ranks},
               {"stage", row.stage},
               {"recompute", RecomputeName(row.recompute)},
               {"peak_bytes", ledger.total_peak_bytes()},
               {"peak_action", row.rehearsal.peak_action},
               {"states_bytes_by_formula", row.formula_states},
               {"sent_bytes_per_step", row.rehearsal.wire.sent()},
               {"sent_bytes_by_formula", row.formula_wire.sent()},
               {"memory_bytes", row.memory},
               {"fits", row.fits()}};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    json[MemoryCategoryName(static_cast<MemoryCategory>(i))] =
        ledger.at_peak()[i];
  }
  if (!measures) return json;
  Json& measured = json["measured"];
  for (const Compared& of : Compare(row)) measured[of.name] = of.measured;
  measured["total"] = row.measured ? Json(row.measured->peak) : Json();
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

void PrintCsv(const std::vector<MemoryRow>& rows, bool measures) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const Json row = AsJson(rows[i], measures);
    std::vector<std::string> names, values;
    const auto add = [&](const std::string& name, const Json& value) {
      names.push_back(name);
      values.push_back(value.is_null() ? "" : value.dump());
    };
    for (const auto& [name, value] : row.items()) {
      if (name != "measured") add(name, value);
    }
    if (measures) {
      for (const auto& [name, value] : row.at("measured").items()) {
        add("measured_" + name, value);
      }
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
                                     RecomputeName(row.recompute)};
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i] > 0) line.push_back(bytes(ledger.at_peak()[i]));
    }
    line.insert(line.end(),
                {bytes(ledger.total_peak_bytes()), row.rehearsal.peak_action,
                 bytes(row.rehearsal.wire.sent()), row.fits() ? "yes" : "no"});
    lines.push_back(std::move(line));
  }
  PrintColumns(lines);
}

// What a run of each row took, beside what was predicted.
void PrintMeasured(const std::vector<MemoryRow>& rows) {
  const auto mib = [](int64_t bytes) {
    return absl::StrFormat("%.1f MiB", bytes / 1048576.0);
  };
  for (const MemoryRow& row : rows) {
    const std::string name = NameOf(row);
    if (!row.measured.has_value()) {
      absl::PrintF("%s: does not fit, so it was not run\n", name);
      continue;
    }
    std::vector<std::vector<std::string>> lines = {
        {name, "predicted", "measured", "difference", ""}};
    const auto add = [&](const std::string& what, int64_t predicted,
                         int64_t measured) {
      if (predicted == 0 && measured == 0) return;
      const int64_t more = measured - predicted;
      lines.push_back({what, mib(predicted), mib(measured), mib(more),
                       absl::StrFormat("%+.2f %%", 100.0 * more / predicted)});
    };
    for (const Compared& of : Compare(row)) {
      add(of.name, of.predicted, of.measured);
    }
    add("peak", row.rehearsal.ledger.total_peak_bytes(), row.measured->peak);
    PrintColumns(lines);
    for (const auto& [arena, bytes] : row.measured->resident) {
      absl::PrintF("  resident in the arena of %s: %s\n", arena, mib(bytes));
    }
  }
}

// Why a rank sends something else than the formula.
void PrintWireNotes(const std::vector<MemoryRow>& rows) {
  for (const MemoryRow& row : rows) {
    const StepWire &sent = row.rehearsal.wire, &formula = row.formula_wire;
    if (sent.sent() == formula.sent()) continue;
    absl::PrintF("note: at %s a rank gathers %s bytes%s\n", NameOf(row),
                 WithCommas(sent.gathered),
                 AgainstFormula(sent.gathered, formula.gathered));
  }
}

// All stages, at every level of recompute.
absl::StatusOr<std::vector<MemoryRow>> PredictAll(const RunOptions& run,
                                                  const PlannedDevice& planned,
                                                  int64_t memory) {
  std::vector<MemoryRow> rows;
  for (const Recompute recompute : kRecomputeLevels) {
    for (int stage = 0; stage <= 3; ++stage) {
      ZERO_ASSIGN_OR_RETURN(MemoryRow row,
                            Predict(run, planned, memory, stage, recompute));
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

absl::Status MeasureAll(MeasureFolder& folder, std::vector<MemoryRow>* rows) {
  for (MemoryRow& row : *rows) {
    if (!row.fits()) continue;
    absl::FPrintF(stderr, "zero: measuring %s, %s\n", row.run.config,
                  NameOf(row));
    ZERO_ASSIGN_OR_RETURN(row.measured, folder.Measure(row.run));
  }
  return absl::OkStatus();
}

// The rows of one config.
struct Memory {
  std::string title;
  std::vector<MemoryRow> rows;
  std::vector<std::string> notes;
  Config config;
  std::vector<FitProposal> fits;  // with --fit
  AssumedSpeed speed = {};        // of their prices
};

// How the config may run in the memory there is.
void PrintFits(const Memory& memory) {
  const std::string limit =
      HumanBytes(static_cast<double>(memory.rows.front().memory));
  if (memory.fits.empty()) {
    absl::PrintF(
        "fit: no stage, recompute or micro-batch of this global batch fits %s; "
        "take more ranks, a shorter data.sequence_length or a smaller model\n",
        limit);
    return;
  }
  absl::PrintF(
      "fit: ways to run the same training in %s a rank, the cheapest first\n",
      limit);
  std::vector<std::vector<std::string>> lines = {
      {"peak", "sent/step", "FLOP/step", "seconds", ""}};
  for (const FitProposal& fit : memory.fits) {
    const std::string patch = fit.Patch(memory.config);
    lines.push_back({HumanBytes(static_cast<double>(fit.peak_bytes)),
                     HumanBytes(static_cast<double>(fit.sent_bytes)),
                     absl::StrFormat("%.2e", fit.flops),
                     absl::StrFormat("%.3g", fit.seconds),
                     patch.empty() ? "as it is" : patch});
  }
  PrintColumns(lines);
  absl::PrintF(
      "note: seconds are for comparison: at %s GFLOP/s and %.0f GB/s a rank, "
      "nothing hidden\n",
      WithCommas(std::llround(1e-9 * memory.speed.flops_per_second)),
      1e-9 * memory.speed.bytes_per_second);
}

absl::StatusOr<Memory> MemoryOf(RunOptions run, const MemoryFlags& flags,
                                MeasureFolder* folder) {
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  if (config.communication.algorithm ==
      CommunicationAlgorithm::kParameterServer) {
    return absl::InvalidArgumentError(
        "communication.algorithm: a parameter server has no stages to compare; "
        "zero plan shows what it and its workers take");
  }
  if (folder != nullptr) {
    ZERO_RETURN_IF_ERROR(folder->GiveData(config, &run));
  }
  const PlannedDevice planned(run, config);
  const Rank rank = planned.MakeRank(run, config);
  const bool on_gpu = planned.device->kind() == DeviceKind::kCuda;
  const int64_t asked = static_cast<int64_t>(flags.device_memory) -
                        (on_gpu ? kLateKernelsBytes : 0);
  const int64_t memory = flags.device_memory > 0 ? std::max<int64_t>(asked, 0)
                                                 : TakeableBytes(rank);
  Memory result{.notes = planned.notes};
  ZERO_ASSIGN_OR_RETURN(result.rows, PredictAll(run, planned, memory));
  if (flags.fit) {
    result.config = config;
    result.speed = AssumedSpeedOf(*planned.device);
    ZERO_ASSIGN_OR_RETURN(result.fits,
                          ProposeFits(rank, config, MakeModelTools(), memory));
  }
  if (folder != nullptr) {
    ZERO_RETURN_IF_ERROR(MeasureAll(*folder, &result.rows));
  }
  result.title = absl::StrFormat(
      "memory of each of %d rank(s) at the peak of a step: micro-batch %d x %d "
      "tokens, on %s, where a rank may take %s",
      run.ranks, config.train_micro_batch_size_per_gpu,
      config.data.sequence_length, planned.device->info().name,
      HumanBytes(static_cast<double>(memory)));
  return result;
}

// Of page.h.
Json PageOf(const std::vector<Memory>& memories, const MemoryFlags& flags) {
  Json page = {
      {"kind", "memory"},
      {"title", absl::StrCat("Memory of ", flags.run.config,
                             memories.size() > 1 ? " and others" : "")},
      {"notes", Json::array()},
      {"rows", Json::array()}};
  for (const Memory& memory : memories) {
    for (const std::string& note : memory.notes) page["notes"].push_back(note);
    for (const MemoryRow& row : memory.rows) {
      Json json = AsJson(row, flags.measure);
      json["timeline"] = Timeline(row.rehearsal.timeline);
      page["rows"].push_back(std::move(json));
    }
  }
  return page;
}

// The config as its cheapest proposal has it, complete.
absl::Status WriteFitConfig(const Memory& memory, const MemoryFlags& flags) {
  if (memory.fits.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--fit-config: nothing fits, so ", flags.fit_config,
                     " is not written"));
  }
  const Config fitting = WithProposal(memory.config, memory.fits.front());
  return WriteFileAtomically(flags.fit_config, PrintResolvedJson(fitting));
}

absl::Status ShowMemory(MemoryFlags flags) {
  if (!flags.html.empty()) ZERO_RETURN_IF_ERROR(CheckPage(flags.html));
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  std::unique_ptr<MeasureFolder> folder;
  if (flags.measure) {
    ZERO_ASSIGN_OR_RETURN(folder, MeasureFolder::Make());
  }
  std::vector<Memory> memories;
  std::vector<std::string> configs = {flags.run.config};
  configs.insert(configs.end(), flags.more_configs.begin(),
                 flags.more_configs.end());
  for (const std::string& config : configs) {
    RunOptions run = flags.run;
    run.config = config;
    ZERO_ASSIGN_OR_RETURN(Memory memory, MemoryOf(run, flags, folder.get()));
    memories.push_back(std::move(memory));
  }
  if (!flags.html.empty()) {
    ZERO_RETURN_IF_ERROR(WritePage(flags.html, PageOf(memories, flags)));
  }
  if (!flags.fit_config.empty()) {
    ZERO_RETURN_IF_ERROR(WriteFitConfig(memories.front(), flags));
  }
  if (flags.csv || flags.json) {
    std::vector<MemoryRow> rows;
    for (Memory& memory : memories) {
      std::move(memory.rows.begin(), memory.rows.end(),
                std::back_inserter(rows));
    }
    if (flags.csv) PrintCsv(rows, flags.measure);
    for (const MemoryRow& row : rows) {
      if (flags.json) {
        absl::PrintF("%s\n", ToLine(AsJson(row, flags.measure)));
      }
    }
    return absl::OkStatus();
  }
  for (const Memory& memory : memories) {
    if (memories.size() > 1) {
      absl::PrintF("%s: ", memory.rows.front().run.config);
    }
    absl::PrintF("%s\n", memory.title);
    PrintTable(memory.rows);
    PrintWireNotes(memory.rows);
    for (const std::string& note : memory.notes) {
      absl::PrintF("note: %s\n", note);
    }
    if (flags.measure) PrintMeasured(memory.rows);
    if (flags.fit) PrintFits(memory);
  }
  return absl::OkStatus();
}

}  // namespace

Command AddMemory(CLI::App& app) {
  auto flags = std::make_shared<MemoryFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/true);
  app.add_option("MORE", flags->more_configs, "further config files");
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
  app.add_flag("--measure", flags->measure,
               "run two steps of every row that fits, and compare");
  CLI::Option* const fit = app.add_flag(
      "--fit", flags->fit,
      "also say what to change so that the run fits, the cheapest first");
  app.add_option("--fit-config", flags->fit_config,
                 "write the config with the cheapest change to this file")
      ->needs(fit)
      ->type_name("FILE");
  return [flags] { return ShowMemory(*flags); };
}

}  // namespace zero
