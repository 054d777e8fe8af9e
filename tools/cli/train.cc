#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/comm/fault.h"
#include "engine/comm/local_ranks.h"
#include "engine/comm/shaped.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/overlap_advice.h"
#include "engine/train/trace.h"
#include "engine/train/trainer.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"
#include "tools/cli/ranks.h"
#include "tools/cli/signals.h"
#include "tools/cli/trace_files.h"

namespace zero {
namespace {

std::string PeakText(const RunSummary& summary, const RunOptions& run) {
  const bool several = run.ranks_here < run.ranks;
  const std::string process = absl::StrCat(
      several ? "the first process " : "the process ",
      HumanBytes(static_cast<double>(PeakResidentBytes())), " at its peak");
  // On the CPU a process holds the memory of its ranks.
  std::string text =
      run.device == "cpu"
          ? absl::StrCat(process, "; predicted ",
                         HumanBytes(summary.process_peak_bytes), " of ",
                         several ? "its " : "", Counted(run.ranks_here, "rank"))
          : absl::StrCat(HumanBytes(summary.peak_bytes), " of ",
                         Counted(run.ranks, "rank"), " on the device; ",
                         process);
  if (summary.host_bytes > 0) {
    absl::StrAppend(&text, "; ", HumanBytes(summary.host_bytes), " of ",
                    several ? absl::StrCat("all ", run.ranks, " ranks'")
                    : run.ranks == 1 ? "the rank's"
                                     : "the ranks'",
                    " memory is on the host");
  }
  return text;
}

void PrintSummary(const RunSummary& summary, const Config& config,
                  const RunOptions& run, const std::string& link,
                  Console* console) {
  const int ranks = run.ranks;
  const std::string since =
      summary.resumed_at.empty()
          ? ""
          : absl::StrCat(" since step ", summary.resumed_at.back());
  // Without steps there is no speed, and the memory would be that of loading.
  const bool took_steps = summary.took_steps();
  std::vector<std::pair<std::string, std::string>> rows;
  rows.push_back({"steps", absl::StrFormat("%d, %s tokens in %s", summary.steps,
                                           WithCommas(summary.tokens),
                                           HumanSeconds(summary.seconds))});
  if (took_steps) {
    rows.push_back(
        {"speed",
         absl::StrCat(WithCommas(std::llround(summary.tokens_per_second)),
                      " tok/s", since, ", ", summary.utilization.ToString(),
                      summary.utilization.known()
                          ? absl::StrFormat(" of %s GFLOP/s",
                                            WithCommas(std::llround(
                                                1e-9 * summary.peak_flops)))
                          : "")});
  }
  if (summary.steps > 0) {
    rows.push_back({"loss", absl::StrFormat("%.4f -> %.4f", summary.first_loss,
                                            summary.final_loss)});
  }
  if (summary.skipped > 0) {
    rows.push_back(
        {"skipped",
         absl::StrFormat("%d of %s, without an update", summary.skipped,
                         Counted(summary.steps, "step"))});
  }
  if (!std::isnan(summary.validation_loss)) {
    rows.push_back(
        {"validation loss",
         absl::StrFormat("%.4f, perplexity %.2f", summary.validation_loss,
                         std::exp(summary.validation_loss))});
  }
  if (took_steps) rows.push_back({"memory", PeakText(summary, run)});
  if (!summary.wire.empty()) {
    rows.push_back({"wire per step and rank", summary.wire});
  }
  if (summary.waited.total() > 0) {
    const double seconds = 1e-3 * summary.waited.total();
    const double exposed = seconds / summary.part_seconds;
    std::string text = absl::StrFormat("%.2f s, %.1f %% of the training time%s",
                                       seconds, 100 * exposed, since);
    for (const Channel channel : kWaits) {
      if (summary.waited[channel] == 0) continue;
      absl::StrAppendFormat(&text, "; %s %.2f s", ChannelName(channel),
                            1e-3 * summary.waited[channel]);
    }
    rows.push_back({"exposed communication", text});
    if (exposed > kExposedShareWorthAWord) {
      const int cores = run.device == "cpu" ? AllowedCores() : ranks;
      rows.push_back({"to hide more of it",
                      OverlapAdvice(config, {.waited = summary.waited,
                                             .ranks = ranks,
                                             .cores = cores,
                                             .link = link,
                                             .gathers = summary.gathers})});
    }
  }
  for (const Straggler& one : summary.stragglers) {
    rows.push_back({"straggler", StragglerText(one)});
  }
  rows.push_back({"parameters_hash", summary.parameters_hash});
  const std::string& out_dir = config.training.out_dir;
  rows.push_back(
      {"written",
       absl::StrCat(out_dir,
                    "/{config.json, "
                    "metrics.jsonl, summary.json",
                    summary.weights.empty()
                        ? ""
                        : absl::StrCat(", ", summary.weights, "/"),
                    summary.checkpoint.empty()
                        ? "}"
                        : absl::StrCat(", ", summary.checkpoint, "/}"))});
  if (summary.interrupted && !summary.checkpoint.empty()) {
    rows.push_back({"to resume", "the same command with --resume auto"});
  }
  console->Table(summary.interrupted ? "stopped"
                 : took_steps        ? "done"
                                     : "already done",
                 rows);
}

struct TrainFlags {
  RunOptions run;
  std::string trace;  // file; empty: none
  // Speeds in ParseLink's syntax; empty: as fast as memory.
  std::string link, host_link;
  std::string fault;        // ParseFault; empty: none
  std::string resume;       // training.resume; empty: the config's
  double max_minutes = -1;  // training.max_minutes; < 0: the config's
};

Trace::Row RowOf(const std::string& channel) {
  if (channel == "gather") return Trace::Row::kGather;
  return channel == "scalar" ? Trace::Row::kScalar : Trace::Row::kReduce;
}

// Only one of several processes prints.
bool IsRankZero(const RunOptions& run) { return run.first_rank() == 0; }

// The link requested by an option. `idle` says why it would change nothing;
// empty if it would change something.
absl::StatusOr<absl::optional<Link>> ReadLink(const char* option,
                                              const std::string& text,
                                              const RunOptions& run,
                                              absl::string_view idle,
                                              Console* console) {
  if (text.empty()) return absl::nullopt;
  const absl::StatusOr<Link> link = ParseLink(text);
  ZERO_RETURN_IF_ERROR(WithContext(option, link.status()));
  if (run.device != "cpu") {
    return absl::InvalidArgumentError(
        absl::StrCat(option,
                     ": makes threads sleep, and a GPU's stream has none; use "
                     "--device cpu"));
  }
  if (!idle.empty()) {
    console->Line(absl::StrCat("note: ", option, " changes nothing ", idle));
  }
  return *link;
}

// Threads without a core of their own wait for each other in every kernel.
void NoteBusyCores(const RunOptions& run, LoadedConfig* loaded) {
  const int threads = run.threads * run.ranks_here, cores = AllowedCores();
  if (run.threads <= 1 || threads <= cores) return;
  loaded->notes.push_back(absl::StrCat(
      "--threads ", run.threads, " on ", Counted(run.ranks_here, "rank"),
      " is more than the ", Counted(cores, "core"),
      ", and slow: leave it out to divide the cores over the ranks"));
}

// What a run waits for after a signal.
std::string StoppingText(const RunOptions& run, const Config& config) {
  const std::string step = "stopping after the current step";
  if (run.ranks == 1) return step;
  return absl::StrCat(step, "; a rank that hangs in it is given up after ",
                      config.communication.timeout_seconds,
                      " s (communication.timeout_seconds)");
}

absl::Status Train(TrainFlags flags) {
  const std::atomic<bool>* stop = InstallStopSignals(
      "; training.out_dir has what this run had completed: metrics.jsonl up to "
      "the last reported step, summary.json and weights if written");
  ZERO_RETURN_IF_ERROR(ReadRanks(&flags.run));
  if (!IsRankZero(flags.run)) SayWhenStopping("");
  const TraceFiles trace_files(flags.run, flags.trace);
  if (!flags.resume.empty()) {
    flags.run.sets.push_back(
        absl::StrCat("training.resume=", nlohmann::json(flags.resume).dump()));
  }
  if (flags.max_minutes >= 0) {
    flags.run.sets.push_back(
        absl::StrCat("training.max_minutes=", flags.max_minutes));
  }
  ZERO_ASSIGN_OR_RETURN(LoadedConfig loaded,
                        LoadRunConfig(flags.run, MissingFiles::kError));
  const bool prints = IsRankZero(flags.run);
  if (prints) SayWhenStopping(StoppingText(flags.run, loaded.config));
  NoteBusyCores(flags.run, &loaded);
  ZERO_RETURN_IF_ERROR(ChooseBackend(flags.run, loaded.config).status());
  // Under mpirun stdout is a pseudo-terminal even if its output goes to a file.
  const bool is_terminal = !flags.run.launch && isatty(STDOUT_FILENO);
  Console console(prints ? stdout : nullptr, is_terminal);
  Console silent(nullptr, /*is_terminal=*/false);
  if (loaded.config.dump_state) console.Line(PrintResolved(loaded));
  ZERO_ASSIGN_OR_RETURN(
      const absl::optional<Link> link,
      ReadLink("--shape-link", flags.link, flags.run,
               flags.run.ranks > 1 ? ""
                                   : "on one rank, which has no other to talk "
                                     "to; start several with --ranks N",
               &console));
  ZERO_ASSIGN_OR_RETURN(
      const absl::optional<Link> host_link,
      ReadLink("--shape-host-link", flags.host_link, flags.run,
               loaded.config.zero_optimization.offload() != Offload::kNone
                   ? ""
                   : "without offload; see zero_optimization.offload_optimizer",
               &console));
  // Now, not after the run.
  ZERO_RETURN_IF_ERROR(trace_files.Check());
  std::unique_ptr<FaultInjector> injector;
  if (!flags.fault.empty()) {
    const absl::StatusOr<Fault> fault =
        ParseFault(flags.fault, flags.run.ranks, loaded.config.training.steps);
    ZERO_RETURN_IF_ERROR(WithContext("--inject-fault", fault.status()));
    // Another process may be the one that fails.
    if (flags.run.IsHere(fault->rank)) {
      injector = std::make_unique<FaultInjector>(*fault, kStepCollective);
    }
  }
  Trace trace;
  RunStart start(flags.link);
  LocalRanksOptions ranks = MakeRanksOptions(loaded.config, flags.run.ranks);
  ranks.patience = {.stop = stop, .tell = [](const std::string& line) {
                      absl::FPrintF(stderr, "zero: %s\n", line);
                    }};
  // A thread of this process hangs: waiting or cleaning up is impossible.
  ranks.on_hang = [&](const absl::Status& error) {
    const absl::Status written =
        trace_files.Write(trace, /*awaits=*/false, &console);
    std::fflush(stdout);
    absl::FPrintF(stderr, "zero: %s\n", error.message());
    if (!written.ok()) {
      absl::FPrintF(stderr, "zero: %s\n", written.message());
    }
    std::_Exit(1);
  };
  ranks.host_link = host_link;
  ranks.wrap = [&](int rank, const std::string& channel,
                   std::unique_ptr<Communicator> end) {
    if (injector != nullptr) {
      end = injector->Wrap(rank, channel, std::move(end));
    }
    if (link.has_value()) {
      end = std::make_unique<ShapedCommunicator>(std::move(end), *link);
    }
    return trace_files.wanted()
               ? trace.Wrap(rank, RowOf(channel), std::move(end))
               : std::move(end);
  };
  std::atomic<bool> interrupted = false, saved = false;
  absl::Status status = RunRanks(
      flags.run, loaded.config, ranks, [&](const Rank& rank) -> absl::Status {
        const bool leads = rank.rank() == 0;
        ZERO_ASSIGN_OR_RETURN(
            const auto trainer,
            Trainer::Make(rank, loaded, MakeModelTools(),
                          leads ? &console : &silent, stop, &start));
        const auto& tokenizer = trainer->data().tokenizer;
        if (leads && tokenizer != nullptr &&
            !loaded.config.model.from_pretrained.empty()) {
          NoteStrangeTokenizer(*tokenizer, loaded.config.model);
        }
        if (trace_files.wanted()) {
          trace.Follow(rank.rank(), trainer->session().executor());
        }
        ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
        if (leads) {
          PrintSummary(summary, loaded.config, flags.run, flags.link, &console);
        }
        if (summary.interrupted) interrupted = true;
        if (!summary.checkpoint.empty()) saved = true;
        // Not an error, which would end the other ranks' last collectives.
        return absl::OkStatus();
      });
  if (status.ok() && interrupted) {
    status = absl::CancelledError("stopped by a signal");
    if (!stop->load()) {
      status = absl::CancelledError("stopped by training.max_minutes");
      if (saved) status = WithExitCode(status, kWantsToGoOn);
    }
  }
  if (injector != nullptr && status.ok() && !injector->happened()) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "--inject-fault ", flags.fault, ": the run ended before that step"));
  }
  status.Update(trace_files.Write(
      trace, /*awaits=*/status.ok() || absl::IsCancelled(status), &console));
  return status;
}

}  // namespace

Command AddTrain(CLI::App& app) {
  auto flags = std::make_shared<TrainFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/true);
  AddRanksOption(app, &flags->run);
  AddHostThreadsOption(app, &flags->run);
  AddMemoryOptions(app, &flags->run);
  app.add_option("--max-minutes", flags->max_minutes,
                 "save and stop after this time, with exit status 85 "
                 "(training.max_minutes)")
      ->check(CLI::Validator(
          [](std::string& value) {
            double minutes = 0;
            return absl::SimpleAtod(value, &minutes) && minutes >= 0
                       ? ""
                       : "want a number of minutes, or 0 for no limit";
          },
          ""));
  app.add_option("--resume", flags->resume,
                 "resume from a checkpoint: auto (the latest of "
                 "training.out_dir, or from scratch), latest, or its folder")
      ->check(CLI::Validator(
          [](std::string& value) {
            return value.empty() ? "it is empty; want auto, latest or a folder"
                                 : "";
          },
          ""));
  app.add_option("--trace", flags->trace,
                 "write a timeline for Perfetto or chrome://tracing");
  app.add_option("--shape-link", flags->link,
                 "slow messages between ranks to a network's speed: "
                 "RATE,LATENCY such as 1GB/s,50us");
  app.add_option("--shape-host-link", flags->host_link,
                 "slow offload copies between the device and its host to a "
                 "bus's speed: RATE,LATENCY such as 25GB/s,10us");
  app.add_option("--inject-fault", flags->fault,
                 "make a rank fail on purpose: RANK:STEP:KIND such as "
                 "1:3:stop, KIND one of throw, stop, mismatch, or from then on "
                 "slow: 1:3:slow=2");
  return [flags] { return Train(*flags); };
}

}  // namespace zero
