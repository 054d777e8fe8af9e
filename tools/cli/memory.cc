// `zero memory`: the memory and traffic of each ZeRO stage, side by side, from
// rehearsals of the run; --measure compares them with runs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/fit_search.h"
#include "engine/train/memory_fit.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/measured_run.h"
#include "tools/cli/memory_rows.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/page.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

struct MemoryFlags {
  RunOptions run;
  std::vector<std::string> more_configs;
  bool json = false, csv = false, measure = false, fit = false, offload = false;
  std::string fit_config;  // file to write; empty: none
  std::string html;        // page to write; empty: none
};

// One line per row; columns as wide as their content. `ends_in_text`: the last
// column is aligned to the left.
void PrintColumns(const std::vector<std::vector<std::string>>& lines,
                  bool ends_in_text = false) {
  std::vector<size_t> widths(lines.front().size(), 0);
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      widths[c] = std::max(widths[c], line[c].size());
    }
  }
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      const bool is_text = ends_in_text && c + 1 == line.size();
      absl::PrintF("%s%*s", c == 0 ? "" : "  ",
                   is_text ? 0 : static_cast<int>(widths[c]), line[c]);
    }
    absl::PrintF("\n");
  }
}

void PrintTable(const std::vector<MemoryRow>& rows) {
  const auto bytes = [](int64_t n) {
    return n == 0 ? "-" : HumanBytes(static_cast<double>(n));
  };
  struct Column {
    std::string title;
    std::function<std::string(const MemoryRow& row)> text;
    bool of_offload = false;  // shown if any row offloads
    bool of_disk = false;     // shown if any row uses one
  };
  std::vector<Column> columns = {
      {"stage",
       [](const MemoryRow& row) {
         return absl::StrCat(row.as_configured ? "*" : "", row.stage);
       }},
      {"recompute",
       [](const MemoryRow& row) { return RecomputeName(row.recompute); }},
      {"offload",
       [](const MemoryRow& row) {
         return kOffloadNames[static_cast<int>(row.offload)];
       },
       /*of_offload=*/true},
      {"peak",
       [&](const MemoryRow& row) {
         return bytes(row.rehearsal.ledger.total_peak_bytes());
       }},
      {"host",
       [&](const MemoryRow& row) { return bytes(row.rehearsal.host_bytes()); },
       /*of_offload=*/true},
      {"fits",
       [](const MemoryRow& row) {
         return row.fits_barely() ? "barely" : row.fits() ? "yes" : "no";
       }},
      {"sent/step",
       [&](const MemoryRow& row) { return bytes(row.rehearsal.wire.sent()); }},
      {"from host",
       [&](const MemoryRow& row) {
         return bytes(row.rehearsal.host_traffic.up);
       },
       /*of_offload=*/true},
      {"to host",
       [&](const MemoryRow& row) {
         return bytes(row.rehearsal.host_traffic.down);
       },
       /*of_offload=*/true},
      {"+s/step",
       [](const MemoryRow& row) {
         return row.offload == Offload::kNone
                    ? "-"
                    : absl::StrFormat("%.3g", row.offload_seconds);
       },
       /*of_offload=*/true},
      {"disk",
       [&](const MemoryRow& row) { return bytes(row.rehearsal.disk_bytes); },
       /*of_offload=*/true, /*of_disk=*/true},
      {"from disk",
       [&](const MemoryRow& row) {
         return bytes(row.rehearsal.disk_traffic.read);
       },
       /*of_offload=*/true, /*of_disk=*/true},
      {"to disk",
       [&](const MemoryRow& row) {
         return bytes(row.rehearsal.disk_traffic.written);
       },
       /*of_offload=*/true, /*of_disk=*/true},
      {"in", [](const MemoryRow& row) { return row.rehearsal.peak_action; }}};
  const bool offloads = std::any_of(
      rows.begin(), rows.end(),
      [](const MemoryRow& row) { return row.offload != Offload::kNone; });
  const bool swaps = std::any_of(
      rows.begin(), rows.end(),
      [](const MemoryRow& row) { return row.rehearsal.disk_bytes > 0; });
  std::erase_if(columns, [&](const Column& column) {
    return (column.of_offload && !offloads) || (column.of_disk && !swaps);
  });
  MemoryLedger::ByCategory used = {};  // by any row
  for (const MemoryRow& row : rows) {
    for (size_t i = 0; i < used.size(); ++i) {
      used[i] += row.rehearsal.ledger.at_peak()[i];
    }
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] == 0) continue;
    columns.push_back({MemoryCategoryName(static_cast<MemoryCategory>(i)),
                       [&, i](const MemoryRow& row) {
                         return bytes(row.rehearsal.ledger.at_peak()[i]);
                       }});
  }
  std::vector<std::vector<std::string>> lines(1);
  for (const Column& column : columns) lines[0].push_back(column.title);
  for (const MemoryRow& row : rows) {
    lines.emplace_back();
    for (const Column& column : columns) {
      lines.back().push_back(column.text(row));
    }
  }
  PrintColumns(lines);
}

// Prints the memory of a run of each row next to the prediction.
void PrintMeasured(const std::vector<MemoryRow>& rows) {
  const auto mib = [](int64_t bytes) {
    return absl::StrFormat("%.1f MiB", bytes / 1048576.0);
  };
  for (const MemoryRow& row : rows) {
    if (!row.measured.has_value()) {
      absl::PrintF("%s: not run: %s\n", row.Name(),
                   row.failure.empty() ? "stopped before" : row.failure);
      continue;
    }
    std::vector<std::vector<std::string>> lines = {
        {row.Name(), "predicted", "measured", "difference", ""}};
    const auto add = [&](const std::string& what, int64_t predicted,
                         int64_t measured) {
      if (predicted == 0 && measured == 0) return;
      const int64_t more = measured - predicted;
      lines.push_back({what, mib(predicted), mib(measured), mib(more),
                       absl::StrFormat("%+.2f %%", 100.0 * more / predicted)});
    };
    const std::vector<Compared> compared = Compare(row);
    for (const Compared& of : compared) {
      add(of.name, of.predicted, *of.measured);
    }
    add("peak", row.ResidentBytes() - row.rehearsal.writers,
        row.measured->peak);
    PrintColumns(lines);
    const auto& resident = row.measured->resident;
    for (const auto& [holder, bytes] : resident) {
      absl::PrintF("  resident: %s %s\n", holder, mib(bytes));
    }
    if (const auto files = resident.find("code and files");
        files != resident.end()) {
      const Compared& fixed =
          compared[static_cast<int>(MemoryCategory::kFixed)];
      absl::PrintF("  the rest of fixed, heaps and stacks: %s\n",
                   mib(*fixed.measured - files->second));
    }
  }
}

// More than 0.1 %; paddings are less, except in a tiny model.
bool Differs(int64_t bytes, int64_t formula) {
  return 1000 * std::abs(bytes - formula) > formula;
}

// Explains why a rank holds or sends something other than the formulas say.
void PrintFormulaNotes(const std::vector<MemoryRow>& rows) {
  std::set<std::pair<int, int64_t>> gathered;
  for (const MemoryRow& row : rows) {
    const int64_t states = row.states_bytes();
    if (Differs(states, row.formula_states)) {
      absl::PrintF(
          "note: at %s the states of a rank are %s bytes, by ZeRO's formula "
          "%s\n",
          row.Name(), WithCommas(states), WithCommas(row.formula_states));
    }
    const StepWire &sent = row.rehearsal.wire, &formula = row.formula_wire;
    // The same with every recompute and offload.
    if (!Differs(sent.sent(), formula.sent()) ||
        !gathered.insert({row.stage, sent.gathered}).second) {
      continue;
    }
    absl::PrintF("note: at stage %d a rank gathers %s bytes%s\n", row.stage,
                 WithCommas(sent.gathered),
                 AgainstFormula(sent.gathered, formula.gathered,
                                row.rows_wire.gathered));
  }
}

// A row that cannot be run keeps the reason; the others continue.
absl::Status MeasureAll(MeasureFolder& folder, int64_t machine,
                        std::vector<MemoryRow>* rows) {
  for (size_t i = 0; i < rows->size(); ++i) {
    MemoryRow& row = (*rows)[i];
    if (!row.fits() || row.ResidentBytes() > machine) {
      row.failure = row.fits() ? "it does not fit this machine's memory"
                               : "it does not fit";
      continue;
    }
    absl::FPrintF(stderr, "zero: measuring %d of %d: %s, %s\n", i + 1,
                  rows->size(), row.run.config, row.Name());
    absl::StatusOr<MeasuredRun> run = folder.Measure(row.config, row.run);
    if (run.ok()) {
      row.measured = *std::move(run);
    } else {
      row.failure = std::string(run.status().message());
      if (absl::IsCancelled(run.status())) return run.status();
    }
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
  FitProposal own = {};           // the config's settings, with --fit
  MachineSpeed speed = {};        // of their prices
  bool fits_barely = false;       // some fit, but none leaves RoomBytes
  std::string nothing_fits;       // advice if there are none
  absl::Status stopped;           // of --measure, by a signal
};

void PrintCsv(const std::vector<Memory>& memories, bool measures) {
  std::vector<Json> rows;
  for (const Memory& memory : memories) {
    for (const MemoryRow& row : memory.rows) {
      rows.push_back(AsJson(row, measures));
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const Json& row = rows[i];
    std::vector<std::string> names, values;
    const auto add = [&](const std::string& name, const Json& value) {
      names.push_back(name);
      std::string text = value.is_null() ? "" : value.dump();
      if (value.is_string()) {  // quotes are doubled, nothing else is escaped
        text = absl::StrCat(
            "\"",
            absl::StrReplaceAll(value.get<std::string>(), {{"\"", "\"\""}}),
            "\"");
      }
      values.push_back(std::move(text));
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

// The row of the config's own settings.
const MemoryRow& OwnRow(const std::vector<MemoryRow>& rows) {
  const auto own = absl::c_find_if(
      rows, [](const MemoryRow& row) { return row.as_configured; });
  ZERO_CHECK(own != rows.end());
  return *own;
}

// RoomBytes in words.
constexpr char kRoom[] =
    "the 3 MiB by which two starts of the program may differ";

// How the config can run in the available memory.
void PrintFits(const Memory& memory) {
  const std::string limit =
      HumanBytes(static_cast<double>(memory.rows.front().limits.device));
  if (memory.fits.empty()) {
    absl::PrintF("fit: %s\n", memory.nothing_fits);
    return;
  }
  absl::PrintF(
      "fit: ways to run the same training in %s a rank; %s; cheapest first; "
      "above them the config as it is, to compare\n",
      limit,
      memory.fits_barely ? absl::StrCat("none leaves free ", kRoom,
                                        ", so zero train may refuse them")
                         : "each leaves some memory free");
  std::vector<std::vector<std::string>> lines = {
      {"peak", "host", "disk", "sent/step", "FLOP/step", "seconds", ""}};
  const auto bytes = [](int64_t n) {
    return n == 0 ? "-" : HumanBytes(static_cast<double>(n));
  };
  const auto add = [&](const FitProposal& fit, const std::string& what) {
    lines.push_back({HumanBytes(static_cast<double>(fit.peak_bytes)),
                     bytes(fit.host_bytes), bytes(fit.disk_bytes),
                     bytes(fit.sent_bytes), absl::StrFormat("%.2e", fit.flops),
                     absl::StrFormat("%.3g", fit.seconds), what});
  };
  add(memory.own,
      OwnRow(memory.rows).fits() ? "as it is" : "as it is (does not fit)");
  for (const FitProposal& fit : memory.fits) {
    const std::string patch = fit.Patch(memory.config);
    if (!patch.empty()) add(fit, patch);
  }
  PrintColumns(lines, /*ends_in_text=*/true);
  const MachineSpeed& speed = memory.speed;
  absl::PrintF(
      "note: seconds are for comparison: at %s GFLOP/s and %.0f GB/s a rank%s, "
      "without overlap\n",
      WithCommas(std::llround(1e-9 * speed.flops_per_second)),
      1e-9 * speed.bytes_per_second,
      speed.bytes_per_second == speed.node_bytes_per_second
          ? ""
          : absl::StrFormat(", %.0f GB/s within %d consecutive ranks",
                            1e-9 * speed.node_bytes_per_second,
                            speed.ranks_per_node));
  const Config& config = memory.config;
  if (config.training.eval_batches > 0 &&
      absl::c_any_of(memory.fits, [&](const auto& fit) {
        return fit.micro_batch != config.train_micro_batch_size_per_gpu;
      })) {
    absl::PrintF(
        "note: training.eval_batches counts micro-batches: with another "
        "micro-batch it is another number of validation tokens\n");
  }
  if (absl::c_any_of(memory.fits,
                     [](const auto& fit) { return fit.on_disk; }) &&
      !memory.config.zero_optimization.uses_nvme()) {
    absl::PrintF(
        "note: nothing fits without a disk; set nvme_path to a folder on a "
        "fast local disk (%.0f GB/s in these seconds)\n",
        1e-9 * speed.disk_bytes_per_second);
  }
}

Json FitsAsJson(const Memory& memory) {
  const auto as_json = [&](const FitProposal& fit) -> Json {
    return {{"peak_bytes", fit.peak_bytes},
            {"host_bytes", fit.host_bytes},
            {"disk_bytes", fit.disk_bytes},
            {"sent_bytes_per_step", fit.sent_bytes},
            {"flops_per_step", fit.flops},
            {"assumed_seconds", fit.seconds},
            {"patch", fit.Patch(memory.config)}};
  };
  Json fits = Json::array();
  for (const FitProposal& fit : memory.fits) fits.push_back(as_json(fit));
  return {{"config", memory.rows.front().run.config},
          {"as_it_is", as_json(memory.own)},
          {"fits_barely", memory.fits_barely},
          {"fits", fits}};
}

// Notes that stage 2 may take as much memory as stage 1, and why.
void AddStage2Note(Memory* memory) {
  std::vector<std::string> levels;
  for (size_t i = 1; i < memory->rows.size(); ++i) {
    const MemoryRow &row = memory->rows[i], &before = memory->rows[i - 1];
    if (row.stage != 2 || before.stage != 1) continue;
    if (row.rehearsal.plan.shard.size == 1 || row.offload != Offload::kNone) {
      continue;
    }
    if (row.config.gradient_accumulation_steps > 1) return;
    if (row.rehearsal.ledger.total_peak_bytes() <
        0.99 * before.rehearsal.ledger.total_peak_bytes()) {
      continue;
    }
    levels.push_back(RecomputeName(row.recompute));
  }
  if (levels.empty()) return;
  memory->notes.push_back(absl::StrCat(
      "stage 2 saves nothing over stage 1 with recompute ",
      absl::StrJoin(levels, ", "),
      ": with one micro-batch a step, gradients reuse the memory that "
      "activations free during backward"));
}

// Adds a note on the disk space that the rows and proposals take.
void AddDiskNote(const Rank& rank, const std::string& folder,
                 const FitLimits& limits, Memory* memory) {
  if (limits.disk == INT64_MAX) return;
  int64_t needed = 0;
  for (const MemoryRow& row : memory->rows) {
    needed = std::max(needed, row.rehearsal.disk_bytes);
  }
  for (const FitProposal& fit : memory->fits) {
    needed = std::max(needed, fit.disk_bytes);
  }
  if (needed == 0) return;
  const int ranks = HostSharersOf(rank);
  const auto of_all = [&](int64_t bytes) {
    return HumanBytes(static_cast<double>(bytes) * ranks);
  };
  memory->notes.push_back(absl::StrCat(
      "of the disk at '", folder, "' the ", Counted(ranks, "rank"),
      " of a host need up to ", of_all(needed), "; ", of_all(limits.disk),
      " are free", needed <= limits.disk ? "" : ": name a larger disk"));
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
        "zero plan shows the memory of it and its workers");
  }
  if (folder != nullptr) {
    ZERO_RETURN_IF_ERROR(folder->GiveData(config, &run));
  }
  const PlannedDevice planned(run, config);
  const Rank rank = planned.MakeRank(run, config);
  const bool on_gpu = planned.device->kind() == DeviceKind::kCuda;
  const int64_t memory = TakeableBytes(rank);
  const int64_t host_memory = TakeableHostBytes(rank);
  const std::string disk = DiskFolderOf(config);
  const FitLimits limits = {memory, host_memory, TakeableDiskBytes(rank, disk)};
  Memory result{.notes = planned.notes};
  if (run.ranks == 1) {
    result.notes.push_back(
        "one rank has nothing to shard: without offload the stages differ "
        "only with --ranks N");
  }
  // On the CPU offload saves nothing: shown on request.
  const bool offloads = flags.offload || on_gpu ||
                        config.zero_optimization.offload() != Offload::kNone;
  result.speed = planned.Speed(config, offloads);
  const ModelTools tools = MakeModelTools();
  FitSearch search(rank, config, tools, result.speed);
  ZERO_ASSIGN_OR_RETURN(result.rows,
                        PredictRows(run, config, offloads, search));
  for (MemoryRow& row : result.rows) {
    row.device = planned.device->info().name;
    row.limits = limits;
    row.room_bytes = RoomBytes(rank);
    row.offload_seconds =
        OffloadSeconds(row.rehearsal, run.ranks, result.speed);
  }
  if (offloads) {
    const MachineSpeed& speed = result.speed;
    result.notes.push_back(absl::StrFormat(
        "+s/step is what offload adds without overlap: copies of %.1f GB/s, "
        "AdamW of %.2f G elements/s, %s%s",
        1e-9 * speed.host_bytes_per_second,
        1e-9 * speed.host_updates_per_second, speed.host_origin,
        config.zero_optimization.uses_nvme()
            ? absl::StrFormat("; a disk of %.1f GB/s, %s",
                              1e-9 * speed.disk_bytes_per_second,
                              speed.disk_origin)
            : ""));
  }
  if (flags.fit) {
    result.config = config;
    FitLimits with_room = limits;
    with_room.device -= RoomBytes(rank);
    ZERO_ASSIGN_OR_RETURN(result.fits, search.Propose(with_room));
    if (result.fits.empty()) {
      ZERO_ASSIGN_OR_RETURN(result.fits, search.Propose(limits));
      result.fits_barely = !result.fits.empty();
    }
    ZERO_ASSIGN_OR_RETURN(result.own, search.Price(SettingsOf(config)));
    if (result.fits.empty()) {
      ZERO_ASSIGN_OR_RETURN(result.nothing_fits, search.NothingFits(limits));
    }
  }
  AddStage2Note(&result);
  AddDiskNote(rank, disk, limits, &result);
  if (folder != nullptr) {
    result.stopped = MeasureAll(
        *folder, TakeableBytes(*rank.device) / SharersOf(rank), &result.rows);
  }
  const DeviceShare share = DeviceShareOf(rank, limits.device);
  result.title = absl::StrFormat(
      "memory of %s%s at the peak of a step: micro-batch %d x %d "
      "tokens, on %s, where a rank may take %s%s",
      run.ranks == 1 ? "" : "each of ", Counted(run.ranks, "rank"),
      config.train_micro_batch_size_per_gpu, config.data.sequence_length,
      planned.device->info().name,
      HumanBytesDown(static_cast<double>(share.bytes)),
      share.late_bytes > 0
          ? absl::StrCat(", ",
                         HumanBytes(std::min(share.late_bytes, share.bytes)),
                         " of it kept for kernels that load later")
          : "");
  return result;
}

// The document of page.h.
Json PageOf(const std::vector<Memory>& memories, const MemoryFlags& flags) {
  Json page = {
      {"kind", "memory"},
      {"title", absl::StrCat("Memory of ", flags.run.config,
                             memories.size() > 1 ? " and others" : "")},
      {"notes", Json::array()},
      {"rows", Json::array()}};
  for (size_t i = 0; i < memories.size(); ++i) {
    for (const std::string& note : memories[i].notes) {
      if (!absl::c_linear_search(page["notes"], note)) {
        page["notes"].push_back(note);
      }
    }
    for (const MemoryRow& row : memories[i].rows) {
      Json json = AsJson(row, flags.measure);
      if (!row.measured.has_value()) json.erase("measured");
      json["config_index"] = i;
      json["timeline"] = Timeline(row);
      page["rows"].push_back(std::move(json));
    }
  }
  return page;
}

// Checks, before long work, that WriteFitConfig can write.
absl::Status CheckFitConfig(const MemoryFlags& flags) {
  if (flags.fit_config.empty()) return absl::OkStatus();
  if (!flags.more_configs.empty()) {
    return absl::InvalidArgumentError(
        "--fit-config writes one config, but several are named");
  }
  if (PathExists(flags.fit_config)) {
    return absl::AlreadyExistsError(
        absl::StrCat("--fit-config: '", flags.fit_config,
                     "' exists; choose another name, or remove it"));
  }
  return AtomicFile::Create(flags.fit_config).status();
}

// Writes the complete config of the cheapest proposal.
absl::Status WriteFitConfig(const Memory& memory, const MemoryFlags& flags) {
  if (memory.fits.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--fit-config: nothing fits, so ", flags.fit_config,
                     " is not written"));
  }
  const Config fitting = WithSettings(memory.config, memory.fits.front());
  return WriteFileAtomically(flags.fit_config, PrintResolvedJson(fitting));
}

// An error for scripts: it names the configs, and the output has the reasons.
absl::Status CheckAnythingFits(const std::vector<Memory>& memories) {
  std::vector<std::string> configs;
  for (const Memory& memory : memories) {
    if (memory.fits.empty()) {
      configs.push_back(memory.rows.front().run.config);
    }
  }
  if (configs.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "--fit: no change makes ", absl::StrJoin(configs, " or "), " fit"));
}

// "CONFIG fits as it is: 20.30 GiB of 39.88 GiB".
void PrintVerdict(const std::vector<MemoryRow>& rows) {
  const MemoryRow& own = OwnRow(rows);
  const Rehearsal& needs = own.rehearsal;
  const auto of = [](int64_t bytes, int64_t limit) {
    return absl::StrCat(HumanBytes(static_cast<double>(bytes)), " of ",
                        HumanBytes(static_cast<double>(limit)));
  };
  std::string text = of(needs.needed_bytes(), own.limits.device);
  if (!needs.one_memory && needs.host_bytes() > 0) {
    absl::StrAppend(&text, "; host ", of(needs.host_bytes(), own.limits.host));
  }
  if (needs.disk_bytes > 0 && own.limits.disk != INT64_MAX) {
    absl::StrAppend(&text, "; disk ", of(needs.disk_bytes, own.limits.disk));
  }
  if (own.fits_barely()) {
    absl::StrAppend(&text, "; this leaves less than ", kRoom,
                    ", so zero train may refuse the run");
  }
  absl::PrintF("%s %s as it is: %s\n", own.run.config,
               own.fits() ? "fits" : "does not fit", text);
}

void Print(const Memory& memory, const MemoryFlags& flags) {
  PrintVerdict(memory.rows);
  if (!flags.more_configs.empty()) {
    absl::PrintF("%s: ", memory.rows.front().run.config);
  }
  absl::PrintF("%s\n", memory.title);
  PrintTable(memory.rows);
  absl::PrintF(
      "note: * is the config's own; fixed: what the program, its libraries and "
      "a GPU's context take\n"
      "note: computed again in backward: keep_all nothing; off norms, GELU and "
      "SwiGLU; selective and full by granularity\n");
  PrintFormulaNotes(memory.rows);
  for (const std::string& note : memory.notes) {
    absl::PrintF("note: %s\n", note);
  }
  if (flags.measure) PrintMeasured(memory.rows);
  if (flags.fit) PrintFits(memory);
}

absl::Status ShowMemory(MemoryFlags flags) {
  if (!flags.html.empty()) ZERO_RETURN_IF_ERROR(CheckPage(flags.html));
  ZERO_RETURN_IF_ERROR(CheckFitConfig(flags));
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  std::unique_ptr<MeasureFolder> folder;
  if (flags.measure) {
    if (flags.run.device == "cuda" && NumCudaDevices() == 0) {
      return absl::UnavailableError(
          "--measure runs on this machine, which has no GPU; leave it out, or "
          "take --device cpu");
    }
    ZERO_ASSIGN_OR_RETURN(folder, MeasureFolder::Make());
  }
  std::vector<Memory> memories;
  std::vector<std::string> configs = {flags.run.config};
  configs.insert(configs.end(), flags.more_configs.begin(),
                 flags.more_configs.end());
  absl::Status stopped;
  for (const std::string& config : configs) {
    RunOptions run = flags.run;
    run.config = config;
    ZERO_ASSIGN_OR_RETURN(Memory memory, MemoryOf(run, flags, folder.get()));
    memories.push_back(std::move(memory));
    stopped = memories.back().stopped;
    if (!stopped.ok()) break;
  }
  if (!flags.html.empty()) {
    ZERO_RETURN_IF_ERROR(WritePage(flags.html, PageOf(memories, flags)));
  }
  if (flags.csv) PrintCsv(memories, flags.measure);
  for (const Memory& memory : memories) {
    if (flags.json) {
      for (const MemoryRow& row : memory.rows) {
        absl::PrintF("%s\n", ToLine(AsJson(row, flags.measure)));
      }
      if (flags.fit) absl::PrintF("%s\n", ToLine(FitsAsJson(memory)));
    } else if (!flags.csv) {
      Print(memory, flags);
    }
  }
  ZERO_RETURN_IF_ERROR(stopped);
  if (!flags.fit_config.empty()) return WriteFitConfig(memories.front(), flags);
  return flags.fit ? CheckAnythingFits(memories) : absl::OkStatus();
}

}  // namespace

Command AddMemory(CLI::App& app) {
  auto flags = std::make_shared<MemoryFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/true);
  app.add_option("MORE", flags->more_configs, "further config files");
  AddRanksOption(app, &flags->run);
  AddHostThreadsOption(app, &flags->run);
  AddMemoryOptions(app, &flags->run);
  app.add_flag("--offload", flags->offload,
               "also with states in the host's memory (always on a GPU, and if "
               "a config has it)");
  app.add_option("--html", flags->html, "write an HTML page")
      ->type_name("FILE");
  CLI::Option* const json =
      app.add_flag("--json", flags->json, "one JSON object per row, in bytes");
  CLI::Option* const csv =
      app.add_flag("--csv", flags->csv, "comma-separated values, in bytes")
          ->excludes(json);
  app.add_flag("--measure", flags->measure,
               "run two steps of every row that fits here, and compare; ranks "
               "are threads, so start it once, without a launcher");
  CLI::Option* const fit = app.add_flag(
      "--fit", flags->fit,
      "also list what to change so that the run fits, cheapest first");
  fit->excludes(csv);
  app.add_option("--fit-config", flags->fit_config,
                 "write the config with the cheapest change to this file")
      ->needs(fit)
      ->type_name("FILE");
  return [flags] { return ShowMemory(*flags); };
}

}  // namespace zero
