// `zero plan`: who owns what, the memory of a step, and the step as a list of
// actions. Nothing is allocated and no data is read.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/base/status.h"
#include "engine/nn/freeze.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/rank_notes.h"
#include "engine/train/session.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/plan_hosts.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

struct PlanFlags {
  RunOptions run;
  bool no_step = false, json = false;
  int hosts = 0;  // 0: not requested
};

void PrintStates(const Plan& plan, const Model& model,
                 const ExecutorOptions& options, Console* console) {
  const bool has_master = options.param_dtype != DType::kF32;
  std::vector<std::pair<std::string, std::string>> rows;
  const auto add = [&](const char* name, Placement placement, int64_t of,
                       int64_t bytes, Home home) {
    const int64_t elems = plan.StateElems(of, placement);
    const bool sharded = placement == Placement::kSharded && plan.world > 1;
    rows.emplace_back(
        name,
        absl::StrFormat("%s elements x %d bytes = %s %s%s", WithCommas(elems),
                        bytes, HumanBytes(static_cast<double>(elems * bytes)),
                        !sharded             ? "per rank, replicated"
                        : plan.owners.even() ? "per rank, sharded"
                                             : "on rank 0, nothing on the "
                                               "others",
                        home == Home::kHost   ? ", in the host's memory"
                        : home == Home::kNvme ? ", on a disk"
                                              : ""));
  };
  const int64_t num_frozen = NumFrozen(model);
  const std::string frozen =
      num_frozen == 0
          ? ""
          : absl::StrCat(", ", WithCommas(num_frozen), " of them frozen");
  StateHomes homes;  // of states off the device
  const int64_t on_host = plan.HostUpdatedElems();
  const int64_t on_device = plan.trained_elems - on_host;
  for (const PlannedUnit& unit : plan.units) {
    if (unit.homes.optimizer != Home::kDevice) homes = unit.homes;
  }
  add("parameters", plan.placement.parameters, plan.padded_elems,
      DTypeBytes(options.param_dtype), homes.parameters);
  // The host's updates, separate from the device's.
  const auto add_divided = [&](const char* name, Placement placement,
                               int64_t bytes, Home home) {
    if (home == Home::kDevice || on_host == 0) {
      return add(name, placement, plan.trained_elems, bytes, Home::kDevice);
    }
    if (on_device > 0) add(name, placement, on_device, bytes, Home::kDevice);
    add(name, placement, on_host, bytes, home);
  };
  add_divided("gradients", plan.placement.gradients,
              DTypeBytes(options.grad_dtype),
              plan.AddsOnHost() ? Home::kHost : Home::kDevice);
  add_divided(has_master ? "optimizer, master" : "optimizer",
              plan.placement.optimizer, options.optimizer_bytes(),
              homes.optimizer);
  console->Table(
      absl::StrFormat("model states: %s parameters%s, %s elements with padding",
                      WithCommas(model.NumParameters()), frozen,
                      WithCommas(plan.padded_elems)),
      rows);
}

// Calls print(first, last) for all of [0, size): once for three or more
// neighbours joined by `alike(i)` to their predecessors; two read better one by
// one.
void ForEachRun(size_t size, const std::function<bool(size_t)>& alike,
                const std::function<void(size_t, size_t)>& print) {
  constexpr size_t kFew = 2;
  for (size_t first = 0; first < size;) {
    size_t end = first + 1;
    while (end < size && alike(end)) ++end;
    if (end - first > kFew) {
      print(first, end - 1);
      first = end;
    } else {
      for (; first < end; ++first) print(first, first);
    }
  }
}

std::string FromTo(const std::string& first, const std::string& last) {
  return first == last ? first : absl::StrCat(first, " to ", last);
}

void PrintUnits(const Plan& plan, Console* console) {
  std::vector<std::string> texts;
  for (const PlannedUnit& unit : plan.units) {
    std::string text = absl::StrCat(
        WithCommas(unit.padded_elems), " elements in ",
        Counted(static_cast<int64_t>(unit.segments.size()), "segment"));
    if (!plan.owners.even() && !unit.segments.empty()) {
      absl::StrAppend(&text, ", rank 0 owns all");
    } else if (!unit.segments.empty() && plan.world > 1) {
      const std::string shard =
          WithCommas(plan.Shard(unit.segments.front(), 0).elems);
      absl::StrAppendFormat(&text, ", of each rank r owns [%s %s, +%s)", shard,
                            plan.replicate.size == 1
                                ? "r"
                                : absl::StrFormat("(r %% %d)", plan.shard.size),
                            shard);
    }
    if (!unit.borrowed.empty()) {
      absl::StrAppend(&text, ", borrows ", absl::StrJoin(unit.borrowed, ", "));
    }
    texts.push_back(text);
  }
  std::vector<std::pair<std::string, std::string>> rows;
  ForEachRun(
      texts.size(), [&](size_t u) { return texts[u] == texts[u - 1]; },
      [&](size_t first, size_t last) {
        rows.push_back({FromTo(plan.units[first].name, plan.units[last].name),
                        texts[first] + (first == last ? "" : ", each")});
      });
  console->Table("units", rows);
}

void PrintBuckets(const char* title, const Plan& plan,
                  const std::vector<Bucket>& buckets, int64_t elem_bytes,
                  Console* console) {
  if (buckets.empty()) return;
  const auto name = [&](const SegmentRef& ref) {
    return absl::StrCat(plan.units[ref.unit].name, "#", ref.segment);
  };
  std::vector<std::pair<std::string, std::string>> rows;
  ForEachRun(
      buckets.size(),
      [&](size_t b) {
        return buckets[b].elems == buckets[b - 1].elems &&
               !buckets[b].is_rows();
      },
      [&](size_t first, size_t last) {
        const Bucket& bucket = buckets[first];
        if (bucket.is_rows()) {
          rows.push_back(
              {absl::StrCat(first),
               absl::StrFormat("%s elements, %s: rows of %s",
                               WithCommas(bucket.elems),
                               HumanBytes(static_cast<double>(
                                   bucket.elems * DTypeBytes(plan.rows.dtype))),
                               plan.units[bucket.unit].name)});
          return;
        }
        std::vector<std::string> segments;
        for (const SegmentRef& ref : bucket.segments) {
          segments.push_back(name(ref));
        }
        const bool one = first == last;
        rows.push_back(
            {FromTo(absl::StrCat(first), absl::StrCat(last)),
             absl::StrFormat(
                 "%s elements, %s%s: %s", WithCommas(bucket.elems),
                 HumanBytes(static_cast<double>(bucket.elems * elem_bytes)),
                 one ? "" : " each",
                 one ? absl::StrJoin(segments, " ")
                     : FromTo(segments.front(),
                              name(buckets[last].segments.back())))});
      });
  console->Table(title, rows);
}

constexpr int kColumn = 30;

// The streams with actions. Without offload the host's streams have none.
std::vector<std::pair<const char*, std::vector<StreamRole>>> Columns(
    const Plan& plan) {
  std::vector<std::pair<const char*, std::vector<StreamRole>>> columns = {
      {"compute", {StreamRole::kCompute}},
      {"gather parameters", {StreamRole::kGather}},
      {"reduce gradients", {StreamRole::kReduce}}};
  if (plan.FetchesParameters() || plan.UpdatesOnHost()) {
    columns.push_back(
        {"from and to the host", {StreamRole::kUp, StreamRole::kDown}});
  }
  if (plan.UpdatesOnHost()) columns.push_back({"host", {StreamRole::kHost}});
  if (plan.UsesDisk()) {
    columns.push_back(
        {"from and to the disk", {StreamRole::kRead, StreamRole::kWrite}});
  }
  return columns;
}

int ColumnOf(StreamRole stream, const Plan& plan) {
  const auto columns = Columns(plan);
  for (size_t i = 0; i < columns.size(); ++i) {
    const std::vector<StreamRole>& roles = columns[i].second;
    if (std::count(roles.begin(), roles.end(), stream) > 0) {
      return static_cast<int>(i);
    }
  }
  return 0;
}

// "; after Gather(block.1), Reduce(bucket 0: head) to Reduce(bucket 3: ...)";
// actions of the previous step are marked.
std::string AfterText(const Action& action, const std::vector<Action>& actions,
                      const Plan& plan) {
  const auto awaited = [&](size_t w) -> const Action& {
    const int i = action.waits[w];
    return actions[i < 0 ? i + static_cast<int>(actions.size()) : i];
  };
  std::vector<std::string> names;
  ForEachRun(
      action.waits.size(),
      [&](size_t w) { return awaited(w).kind == awaited(w - 1).kind; },
      [&](size_t first, size_t last) {
        names.push_back(
            absl::StrCat(FromTo(ActionName(awaited(first), plan),
                                ActionName(awaited(last), plan)),
                         action.waits[first] < 0 ? " of the step before" : ""));
      });
  return names.empty() ? "" : "; after " + absl::StrJoin(names, ", ");
}

// "Reduce(bucket 1: block.3) to Reduce(bucket 9: block.1)" under its stream,
// and the first one's waits.
std::string ActionLine(const Action& first, const Action& last,
                       const std::vector<Action>& actions, const Plan& plan) {
  return absl::StrCat(std::string(ColumnOf(first.stream, plan) * kColumn, ' '),
                      FromTo(ActionName(first, plan), ActionName(last, plan)),
                      AfterText(first, actions, plan));
}

// One column per stream; an action starts when those above it in its column and
// those listed as its waits are done. Equal micro-steps are printed once, and
// so are consecutive actions without other waits.
void PrintStep(const Plan& plan, const std::vector<Action>& actions,
               Console* console) {
  std::string titles;
  for (const auto& [title, roles] : Columns(plan)) {
    absl::StrAppend(&titles, absl::StrFormat("%-*s", kColumn, title));
  }
  console->Line(std::string(absl::StripTrailingAsciiWhitespace(titles)));
  // The lines of each micro-step, the last with the end of the step. Waits may
  // be on earlier ones.
  std::vector<size_t> starts = {0};
  for (size_t a = 0; a < actions.size(); ++a) {
    const auto begun = static_cast<int64_t>(starts.size()) - 1;
    if (actions[a].micro_step > begun) starts.push_back(a);
  }
  starts.push_back(actions.size());
  std::vector<std::vector<std::string>> lines(starts.size() - 1);
  for (size_t m = 0; m < lines.size(); ++m) {
    const Action* const part = &actions[starts[m]];
    // 1 or -1 if an action continues with the next unit or bucket, else 0.
    const auto step = [&](size_t a) {
      const int64_t by = part[a].index - part[a - 1].index;
      return part[a].kind == part[a - 1].kind && part[a].waits.empty() &&
                     std::abs(by) == 1
                 ? by
                 : 0;
    };
    ForEachRun(
        starts[m + 1] - starts[m],
        [&](size_t a) {
          return step(a) != 0 &&
                 (a == 1 || step(a - 1) == 0 || step(a) == step(a - 1));
        },
        [&](size_t first, size_t last) {
          lines[m].push_back(
              ActionLine(part[first], part[last], actions, plan));
        });
  }
  // The end of the step, if its last micro-step begins like the earlier ones.
  std::vector<std::string> last;
  if (lines.size() > 1) {
    const size_t common = lines[lines.size() - 2].size();
    if (lines.back().size() > common &&
        std::equal(lines.back().begin(), lines.back().begin() + common,
                   lines[lines.size() - 2].begin())) {
      last.assign(lines.back().begin() + common, lines.back().end());
      lines.back().resize(common);
    }
  }
  for (size_t first = 0; first < lines.size();) {
    size_t end = first + 1;
    while (end < lines.size() && lines[end] == lines[first]) ++end;
    if (lines.size() > 1) {
      console->Line(end == first + 1 ? absl::StrCat("micro-step ", first)
                                     : absl::StrCat("micro-steps ", first,
                                                    " to ", end - 1, ", each"));
    }
    for (const std::string& line : lines[first]) console->Line(line);
    first = end;
  }
  if (!last.empty()) console->Line("and then");
  for (const std::string& line : last) console->Line(line);
}

// Prints the memory of a run's first rehearsal, for a rank with its own device.
absl::Status PrintMemory(const RunOptions& run, const Config& config,
                         const PlannedDevice& planned, bool alike,
                         Console* console) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (int rank = 0; rank < (alike ? 1 : 2); ++rank) {
    ZERO_ASSIGN_OR_RETURN(
        const Rehearsal rehearsal,
        RehearseRun(planned.MakeRank(run, config, rank), config,
                    MakeModelTools(), {.train = true}));
    rows.push_back({alike       ? "each rank"
                    : rank == 0 ? "server"
                                : "worker",
                    MemoryText(rehearsal.ledger)});
  }
  const DeviceInfo info = planned.device->info();
  console->Table(
      absl::StrFormat("memory of a step, on %s with %s", info.name,
                      HumanBytes(static_cast<double>(info.memory_bytes))),
      rows);
  for (const std::string& note : planned.notes) {
    console->Line("note: " + note);
  }
  return absl::OkStatus();
}

Json ToJson(const StepWire& wire) {
  return {{"gathered", wire.gathered},
          {"reduced", wire.reduced},
          {"across", wire.across},
          {"received", wire.received}};
}

absl::Status PrepareHosts(PlanFlags* flags) {
  if (flags->hosts == 0) return absl::OkStatus();
  if (flags->run.ranks % flags->hosts != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--hosts ", flags->hosts, " does not divide --ranks ", flags->run.ranks,
        "; give --ranks for all of them, the same number for each host"));
  }
  flags->run.ranks_per_host = flags->run.ranks / flags->hosts;
  return absl::OkStatus();
}

absl::Status ShowPlan(PlanFlags flags) {
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  ZERO_RETURN_IF_ERROR(PrepareHosts(&flags));
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(flags.run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  const ModelTools tools = MakeModelTools();
  ZERO_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model,
                        MakeRunModel(config, tools, /*train=*/true));
  const ExecutorOptions options =
      MakeExecutorOptions(config, /*train=*/true, /*max_positions=*/0);
  const LocalRanksOptions ranks = MakeRanksOptions(config, flags.run.ranks);
  const PlannedDevice device(flags.run, config);
  const Plan plan = MakeRunPlan(config, *model, flags.run.ranks,
                                ranks.local.algorithm, device.device->ops());
  const int64_t micro_steps = config.gradient_accumulation_steps;
  const std::vector<Action> actions = MakeSchedule(
      plan, options.schedule_options(micro_steps, options.delayed_updates));
  const bool alike = plan.owners.even();
  const StepWire wire = CountWire(plan, actions);
  const StepWire formula = FormulaWire(plan, micro_steps);
  const bool tensor_norms = options.optimizer.needs_tensor_norms();
  const int64_t numbers = NumbersWire(plan, tensor_norms);
  HostWires hosts;
  if (flags.hosts > 0) {
    hosts = HostWires(plan, actions, flags.hosts, config, tensor_norms);
  }
  if (flags.json) {
    Json json = {{"stage", config.zero_optimization.stage},
                 {"ranks", plan.world},
                 {"shards", plan.shard.size},
                 {"micro_steps", micro_steps},
                 {"rank_bytes", ToJson(wire)},
                 {"formula_bytes", ToJson(formula)},
                 {"numbers_bytes", numbers}};
    if (flags.hosts > 0) {
      json["hosts"] = flags.hosts;
      json["host_bytes"] = hosts.ToJson();
    }
    json["schedule"] = ScheduleHash(plan, actions);
    absl::PrintF("%s\n", ToLine(json));
    return absl::OkStatus();
  }

  Console console(stdout, /*is_terminal=*/false);
  console.Line(absl::StrFormat(
      "ZeRO stage %d on %s%s%s, %s", config.zero_optimization.stage,
      Counted(flags.run.ranks, "rank"),
      plan.replicate.size == 1
          ? ""
          : absl::StrFormat(" in %d groups of %d", plan.replicate.size,
                            plan.shard.size),
      config.communication.algorithm == CommunicationAlgorithm::kRing
          ? " by ring"
      : config.communication.algorithm == CommunicationAlgorithm::kHierarchical
          ? " by hosts"
      : alike ? ""
              : " by parameter server",
      Counted(micro_steps, "micro-step")));
  PrintStates(plan, *model, options, &console);
  ZERO_RETURN_IF_ERROR(PrintMemory(flags.run, config, device, alike, &console));
  PrintUnits(plan, &console);
  PrintBuckets("reduce buckets, as backward completes them", plan,
               plan.reduce_buckets, DTypeBytes(plan.gradients.dtype), &console);
  PrintBuckets("gather buckets of updated parameters", plan,
               plan.gather_buckets, DTypeBytes(plan.parameters.dtype),
               &console);
  const auto against = [](int64_t bytes, int64_t formula_bytes,
                          int64_t row_bytes = 0) {
    return absl::StrCat(WithCommas(bytes), " bytes",
                        AgainstFormula(bytes, formula_bytes, row_bytes));
  };
  const StepWire in_rows = RowsWire(plan, micro_steps);
  std::vector<std::pair<std::string, std::string>> rows = {
      {"gathered", against(wire.gathered, formula.gathered, in_rows.gathered)},
      {"reduced", against(wire.reduced, formula.reduced, in_rows.reduced)}};
  if (plan.replicate.size > 1) {
    rows.push_back({"across groups",
                    against(wire.across, formula.across, in_rows.across)});
  }
  if (!alike) {
    const StepWire worker = CountWire(plan, actions, /*rank=*/1);
    const StepWire worker_formula = FormulaWire(plan, micro_steps, /*rank=*/1);
    rows = {
        {"server sends", against(wire.gathered, formula.gathered)},
        {"server receives", against(wire.received, formula.received)},
        {"worker sends", against(worker.reduced, worker_formula.reduced)},
        {"worker receives", against(worker.received, worker_formula.received)}};
  }
  rows.push_back(
      {"norm and agreements", absl::StrCat(WithCommas(numbers), " bytes")});
  console.Table(alike ? "sent per rank and step" : "moved per step", rows);
  if (flags.hosts > 0) hosts.Print(&console);
  console.Line(absl::StrCat("schedule ", ScheduleHash(plan, actions), ", ",
                            actions.size(), " actions"));
  for (const std::string& note : RankNotes(loaded, plan)) {
    console.Line("note: " + note);
  }
  if (!flags.no_step) PrintStep(plan, actions, &console);
  return absl::OkStatus();
}

}  // namespace

Command AddPlan(CLI::App& app) {
  auto flags = std::make_shared<PlanFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/true);
  AddRanksOption(app, &flags->run);
  app.add_option("--hosts", flags->hosts,
                 "also the traffic between this many hosts, each with an equal "
                 "share of the ranks")
      ->check(CLI::Range(1, 1 << 20));
  CLI::Option* const json = app.add_flag(
      "--json", flags->json, "one JSON object with the bytes of a step");
  app.add_flag("--no-step", flags->no_step, "leave the list of actions out")
      ->excludes(json);
  return [flags] { return ShowPlan(*flags); };
}

}  // namespace zero
