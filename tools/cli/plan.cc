// `zero plan`: who owns what, what a step takes, and the step as a list of
// actions. Nothing is allocated and no data is read.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/train/console.h"
#include "engine/train/rank_notes.h"
#include "engine/train/session.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/ranks.h"

namespace zero {
namespace {

struct PlanFlags {
  RunOptions run;
  bool no_step = false;
};

void PrintStates(const Plan& plan, const ExecutorOptions& options,
                 Console* console) {
  const bool has_master = options.param_dtype != DType::kF32;
  const int64_t floats =
      options.optimizer.StateFloatsPerElement() + (has_master ? 1 : 0);
  const auto row = [&](const char* name, Placement placement, int64_t bytes) {
    const int64_t elems = plan.StateElems(placement);
    const bool sharded = placement == Placement::kSharded;
    return std::pair<std::string, std::string>(
        name,
        absl::StrFormat("%s elements x %d bytes = %s %s", WithCommas(elems),
                        bytes, HumanBytes(static_cast<double>(elems * bytes)),
                        !sharded      ? "per rank, replicated"
                        : plan.server ? "on rank 0, nothing on the others"
                                      : "per rank, sharded"));
  };
  console->Table(
      absl::StrFormat("model states: %s parameters, %s elements with padding",
                      WithCommas(plan.num_parameters),
                      WithCommas(plan.padded_elems)),
      {row("parameters", plan.placement.parameters,
           DTypeBytes(options.param_dtype)),
       row("gradients", plan.placement.gradients,
           DTypeBytes(options.grad_dtype)),
       row(has_master ? "optimizer, master" : "optimizer",
           plan.placement.optimizer, 4 * floats)});
}

void PrintUnits(const Plan& plan, Console* console) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const PlannedUnit& unit : plan.units) {
    std::string text =
        absl::StrFormat("%s elements in %d segment(s)",
                        WithCommas(unit.padded_elems), unit.segments.size());
    if (plan.server && !unit.segments.empty()) {
      absl::StrAppend(&text, ", rank 0 owns all");
    } else if (!unit.segments.empty() && plan.world > 1) {
      const Segment& first = unit.segments.front();
      const std::string piece = WithCommas(first.elems / plan.shards);
      absl::StrAppendFormat(
          &text, ", of each rank r owns [%s %s, +%s)", piece,
          plan.groups() == 1 ? "r" : absl::StrFormat("(r %% %d)", plan.shards),
          piece);
    }
    if (!unit.borrowed.empty()) {
      absl::StrAppend(&text, ", borrows ", absl::StrJoin(unit.borrowed, ", "));
    }
    rows.push_back({unit.name, text});
  }
  console->Table("units", rows);
}

void PrintBuckets(const char* title, const Plan& plan,
                  const std::vector<Bucket>& buckets, int64_t elem_bytes,
                  Console* console) {
  if (buckets.empty()) return;
  std::vector<std::pair<std::string, std::string>> rows;
  for (size_t b = 0; b < buckets.size(); ++b) {
    std::vector<std::string> segments;
    for (const SegmentRef& ref : buckets[b].segments) {
      segments.push_back(
          absl::StrCat(plan.units[ref.unit].name, "#", ref.segment));
    }
    rows.push_back(
        {absl::StrCat(b),
         absl::StrFormat(
             "%s elements, %s: %s", WithCommas(buckets[b].elems),
             HumanBytes(static_cast<double>(buckets[b].elems * elem_bytes)),
             absl::StrJoin(segments, " "))});
  }
  console->Table(title, rows);
}

// One column per stream; an action starts when those above it in its column
// are done and what it needs is there.
void PrintStep(const Plan& plan, const std::vector<Action>& actions,
               Console* console) {
  constexpr int kWidth = 30;
  console->Line(absl::StrFormat("%-*s%-*s%s", kWidth, "compute", kWidth,
                                "gather parameters", "reduce gradients"));
  for (const Action& action : actions) {
    int column = 0;
    if (action.kind == ActionKind::kGather ||
        action.kind == ActionKind::kGatherUpdated) {
      column = 1;
    } else if (action.kind == ActionKind::kReduce ||
               action.kind == ActionKind::kReduceAcross) {
      column = 2;
    }
    console->Line(absl::StrCat(std::string(column * kWidth, ' '),
                               ActionName(action, plan)));
  }
}

// By the rehearsal that a run begins with, of a rank that has its device to
// itself.
absl::Status PrintMemory(const RunOptions& run, const Config& config,
                         const LocalRanksOptions& ranks, bool server,
                         Console* console) {
  const auto device = OpenDevice(run, /*rank=*/0, config.device.cuda);
  if (!device.ok()) {
    console->Line(absl::StrCat(
        "note: the memory of activations and workspaces, and so the peak, is "
        "left out: the GPU's own kernels say what they need, and ",
        device.status().message()));
    return absl::OkStatus();
  }
  // More ranks than this machine has GPUs are those of a larger one.
  const bool nccl = UsesNccl(run, config).value_or(true);
  std::vector<std::pair<std::string, std::string>> rows;
  for (int rank = 0; rank < (server ? 2 : 1); ++rank) {
    Rank lone =
        MakeLoneRank(**device, rank, run.ranks, ranks.shards,
                     nccl ? BulkAlgorithm::kNative : ranks.local.algorithm);
    lone.sharers = 1;
    ZERO_ASSIGN_OR_RETURN(
        const MemoryLedger ledger,
        PredictMemory(lone, config, MakeModelTools(), {.train = true}));
    rows.push_back({!server     ? "each rank"
                    : rank == 0 ? "server"
                                : "worker",
                    MemoryText(ledger)});
  }
  const DeviceInfo info = (*device)->info();
  console->Table(
      absl::StrFormat("memory of a step, on %s with %s", info.name,
                      HumanBytes(static_cast<double>(info.memory_bytes))),
      rows);
  return absl::OkStatus();
}

absl::Status ShowPlan(PlanFlags flags) {
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(flags.run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  const ModelTools tools = MakeModelTools();
  const std::unique_ptr<Model> model = tools.make(config.model);
  const ExecutorOptions options =
      MakeExecutorOptions(config, /*train=*/true, /*max_positions=*/0);
  const LocalRanksOptions ranks = MakeRanksOptions(config, flags.run.ranks);
  const Plan plan = MakePlan(DescribeUnits(*model),
                             options.plan_options(flags.run.ranks, ranks.shards,
                                                  ranks.local.algorithm));
  const int64_t micro_steps = config.gradient_accumulation_steps;
  const std::vector<Action> actions =
      MakeSchedule(plan, options.schedule_options(micro_steps));
  const int64_t p = DTypeBytes(options.param_dtype);
  const int64_t r = DTypeBytes(options.reduce_dtype);

  Console console(stdout, /*is_terminal=*/false);
  console.Line(absl::StrFormat(
      "ZeRO stage %d on %d rank(s)%s%s, %d micro-step(s)",
      config.zero_optimization.stage, flags.run.ranks,
      plan.groups() == 1
          ? ""
          : absl::StrFormat(" in %d groups of %d", plan.groups(), plan.shards),
      plan.ring     ? " by ring"
      : plan.server ? " by parameter server"
                    : "",
      micro_steps));
  PrintStates(plan, options, &console);
  ZERO_RETURN_IF_ERROR(
      PrintMemory(flags.run, config, ranks, plan.server, &console));
  PrintUnits(plan, &console);
  PrintBuckets("reduce buckets, as backward completes them", plan,
               plan.reduce_buckets, r, &console);
  PrintBuckets("gather buckets of updated parameters", plan,
               plan.gather_buckets, p, &console);
  const StepWire wire = CountWire(plan, actions, p, r);
  const StepWire formula = FormulaWire(plan, micro_steps, p, r);
  const auto against = [](int64_t bytes, int64_t formula_bytes) {
    return absl::StrCat(WithCommas(bytes), " bytes",
                        AgainstFormula(bytes, formula_bytes));
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"gathered", against(wire.gathered, formula.gathered)},
      {"reduced", against(wire.reduced, formula.reduced)}};
  if (plan.groups() > 1) {
    rows.push_back({"across groups", against(wire.across, formula.across)});
  }
  if (plan.server) {
    const StepWire worker = CountWire(plan, actions, p, r, /*rank=*/1);
    const StepWire worker_formula =
        FormulaWire(plan, micro_steps, p, r, /*rank=*/1);
    rows = {
        {"server sends", against(wire.gathered, formula.gathered)},
        {"server receives", against(wire.received, formula.received)},
        {"worker sends", against(worker.reduced, worker_formula.reduced)},
        {"worker receives", against(worker.received, worker_formula.received)}};
  }
  console.Table(plan.server ? "moved per step" : "sent per rank and step",
                rows);
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
  app.add_flag("--no-step", flags->no_step, "leave the list of actions out");
  return [flags] { return ShowPlan(*flags); };
}

}  // namespace zero
