// Whole training steps on several ranks, through the Session and Executor of
// `zero train --ranks N`. Cases (settings of the config) take turns in one
// process, so that a slow minute slows them all; where memory is to be
// measured, a case is alone. Prints one JSON object per case.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "engine/comm/shaped.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "engine/zero/schedule.h"
#include "nlohmann/json.hpp"
#include "tools/bench/random_batch.h"
#include "tools/bench/timed_device.h"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;
using WallClock = std::chrono::steady_clock;

struct Options {
  RunOptions run;
  std::string dtype = "fp32";
  std::vector<std::string> cases;
  std::string link;
  int steps = 3, rounds = 1;
};

// Measures the time of collectives on their streams, waiting for other ranks
// included.
class TimedCommunicator final : public CommunicatorWrapper {
 public:
  explicit TimedCommunicator(std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)) {}

  // Of all collectives that are done.
  double Seconds() {
    for (; !running_.empty() && running_.front().end->IsDone();
         running_.pop_front()) {
      const Timed& timed = running_.front();
      seconds_ += timed.end->MillisSince(*timed.begin) * 1e-3;
    }
    return seconds_;
  }

  void Run(Stream& stream, Collective collective) override {
    Timed timed{stream.device().MakeEvent(), stream.device().MakeEvent()};
    stream.Record(*timed.begin);
    inner_->Run(stream, std::move(collective));
    stream.Record(*timed.end);
    running_.push_back(std::move(timed));
  }

 private:
  struct Timed {
    std::unique_ptr<Event> begin, end;
  };

  std::deque<Timed> running_;
  double seconds_ = 0;
};

// The ends of one rank's channels, with the link's time in it.
using Channels = std::map<std::string, TimedCommunicator*>;

// What one rank saw of one case.
struct Seen {
  std::vector<double> step_ms, exposed_ms, host_ms;
  CollectiveCount gather, reduce;  // of all `counted_steps`
  double comm_seconds = 0;         // likewise
  int64_t counted_steps = 0;
  double loss = 0;
  MemoryLedger ledger;
  TransientBytes transient;
};

struct Case {
  std::string settings;
  bool per_tensor = false;  // PlanOptions::segment_per_tensor
  Config config;
  std::vector<Seen> ranks;
  // The same on all ranks.
  Plan plan;
  std::vector<Action> schedule;
};

double MillisSince(WallClock::time_point start) {
  return std::chrono::duration<double, std::milli>(WallClock::now() - start)
      .count();
}

CollectiveCount operator-(CollectiveCount a, const CollectiveCount& b) {
  a += {-b.calls, -b.bytes, -b.received};
  return a;
}

// One rank's running engine of one case.
class Runner {
 public:
  Runner(const Rank& rank, TimedDevice& device, Channels& channels, Case& one)
      : rank_(rank),
        device_(device),
        channels_(channels),
        case_(one),
        seen_(one.ranks[rank.rank()]),
        batch_(one.config, rank.rank()) {}

  absl::Status Start() {
    ZERO_ASSIGN_OR_RETURN(
        session_,
        Session::Make(rank_, case_.config, MakeModelTools(),
                      {.train = true, .segment_per_tensor = case_.per_tensor}));
    ZERO_RETURN_IF_ERROR(Step());
    Drain();
    return absl::OkStatus();
  }

  // Some steps in a row. The first is counted but not measured: it finds
  // nothing in flight, where stages 1 and 2 gather what was updated last.
  absl::Status Turn(int steps) {
    const CollectiveCount gather = rank_.gather->Total();
    const CollectiveCount reduce = Reductions();
    const double seconds = CommSeconds();
    ZERO_RETURN_IF_ERROR(Step());
    for (int i = 0; i < steps; ++i) ZERO_RETURN_IF_ERROR(MeasuredStep());
    Drain();
    seen_.gather += rank_.gather->Total() - gather;
    seen_.reduce += Reductions() - reduce;
    seen_.comm_seconds += CommSeconds() - seconds;
    seen_.counted_steps += steps + 1;
    return absl::OkStatus();
  }

  void Finish() {
    seen_.ledger = session_->ledger();
    seen_.transient = session_->executor().high_water();
    if (rank_.rank() != 0) return;
    case_.plan = session_->executor().plan();
    case_.schedule = session_->executor().schedule();
  }

 private:
  absl::Status Step() {
    ZERO_ASSIGN_OR_RETURN(const StepOutput output,
                          session_->executor().Step(batch_.Input(
                              case_.config, ++step_, rank_.world())));
    seen_.loss = output.loss;
    return absl::OkStatus();
  }

  // Within the group and across the groups.
  CollectiveCount Reductions() {
    CollectiveCount count = rank_.reduce->Total();
    count += rank_.across->Total();
    return count;
  }

  double CommSeconds() {
    return channels_["gather"]->Seconds() + channels_["reduce"]->Seconds() +
           channels_["across"]->Seconds();
  }

  // The host's own time is the CPU time of the rank's thread outside kernels;
  // waiting takes none.
  absl::Status MeasuredStep() {
    device_.times().clear();
    const WaitTimes waited = session_->executor().clock().waited();
    const auto start = WallClock::now();
    const double cpu = Now();
    ZERO_RETURN_IF_ERROR(Step());
    double host = Now() - cpu;
    seen_.step_ms.push_back(MillisSince(start));
    for (const auto& [name, op] : device_.times()) host -= op.seconds;
    seen_.host_ms.push_back(host * 1e3);
    seen_.exposed_ms.push_back(
        (session_->executor().clock().waited() - waited).total());
    return absl::OkStatus();
  }

  // Waits for what is in flight: cases share the channels.
  void Drain() { session_->executor().states(); }

  const Rank& rank_;
  TimedDevice& device_;
  Channels& channels_;
  Case& case_;
  Seen& seen_;
  RandomBatch batch_;
  std::unique_ptr<Session> session_;
  int64_t step_ = 0;
};

// What collectives bring over the link of the rank that has most of it.
struct Traffic {
  int64_t bytes = 0, calls = 0;

  double Millis(const Link& link, int world) const {
    return 1e3 * (absl::ToDoubleSeconds(link.latency) * calls * (world - 1) +
                  static_cast<double>(bytes) / link.bytes_per_second);
  }
};

Traffic TrafficOf(const Case& one, const std::vector<Action>& actions) {
  Traffic traffic;
  for (const Action& action : actions) {
    for (const Transfer& transfer : TransfersOf(action, one.plan)) {
      const Transfer::Bytes bytes = transfer.BytesOf(/*rank=*/0);
      if (bytes.sent + bytes.received == 0) continue;
      traffic.bytes += std::max(bytes.sent, bytes.received);
      ++traffic.calls;
    }
  }
  return traffic;
}

// What overlap can not hide: the gathers that the step's first computation
// needs (of updated parameters: from the step before), and the reductions that
// its last one completes.
std::vector<Action> FirstGathers(const Case& one) {
  std::vector<Action> first;
  for (const Action& action : one.schedule) {
    if (action.kind != ActionKind::kForward) continue;
    for (int i : action.waits) {
      const int size = static_cast<int>(one.schedule.size());
      first.push_back(one.schedule[i < 0 ? i + size : i]);
    }
    break;
  }
  return first;
}

std::vector<Action> LastReductions(const Case& one) {
  std::vector<Action> last;
  for (const Action& action : one.schedule) {
    if (action.kind == ActionKind::kBackward) last.clear();
    if (action.kind == ActionKind::kReduce ||
        action.kind == ActionKind::kReduceAcross) {
      last.push_back(action);
    }
  }
  return last;
}

std::vector<double> MeanOverRanks(const Case& one,
                                  std::vector<double> Seen::*of) {
  const size_t world = one.ranks.size();
  std::vector<double> mean((one.ranks[0].*of).size());
  for (const Seen& seen : one.ranks) {
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += (seen.*of)[i] / world;
  }
  return mean;
}

// What rank 0 sends in the bulk collectives of one step.
Json WireJson(const Case& one) {
  const Seen& seen = one.ranks[0];
  const StepWire formula = FormulaWire(one.plan, /*micro_steps=*/1);
  return {{"gathered", seen.gather.bytes / seen.counted_steps},
          {"reduced", seen.reduce.bytes / seen.counted_steps},
          {"formula_gathered", formula.gathered},
          {"formula_reduced", formula.reduced + formula.across},
          {"collectives",
           (seen.gather.calls + seen.reduce.calls) / seen.counted_steps}};
}

Json ToJson(const Options& options, const absl::optional<Link>& link,
            const Case& one, int64_t peak_rss) {
  const Config& config = one.config;
  const int world = options.run.ranks;
  const Seen& seen = one.ranks[0];
  const int64_t tokens = world * config.train_micro_batch_size_per_gpu *
                         config.data.sequence_length;
  const Json wire = WireJson(one);
  const int64_t sent =
      wire["gathered"].get<int64_t>() + wire["reduced"].get<int64_t>();
  const double comm_seconds = seen.comm_seconds / seen.counted_steps;
  const Traffic all = TrafficOf(one, one.schedule);
  const Traffic first = TrafficOf(one, FirstGathers(one));
  const Traffic last = TrafficOf(one, LastReductions(one));
  // The rank that holds most.
  const auto most =
      absl::c_max_element(one.ranks, [](const Seen& a, const Seen& b) {
        return a.ledger.total_peak_bytes() < b.ledger.total_peak_bytes();
      });
  Json json = {
      {"case", one.settings},
      {"stage", config.zero_optimization.stage},
      {"dtype", options.dtype},
      {"ranks", world},
      {"threads", options.run.threads},
      {"micro_batch", config.train_micro_batch_size_per_gpu},
      {"sequence_length", config.data.sequence_length},
      {"tokens_per_second", 1e3 * tokens / Median(seen.step_ms)},
      {"step_ms", seen.step_ms},
      {"exposed_ms", MeanOverRanks(one, &Seen::exposed_ms)},
      {"host_ms", MeanOverRanks(one, &Seen::host_ms)},
      {"wire", wire},
      {"communication_ms", comm_seconds * 1e3},
      {"bus_gb_per_s", comm_seconds > 0 ? 1e-9 * sent / comm_seconds : 0},
      {"link_bytes", all.bytes},
      {"first_gather_bytes", first.bytes},
      {"last_reduction_bytes", last.bytes},
      {"loss", seen.loss},
      {"peak_bytes", Json::parse(PeakBytes(most->ledger).ToString())},
      {"reserved_bytes",
       {{"activations", seen.transient.activations},
        {"rotating", seen.transient.rotating}}}};
  if (options.cases.size() == 1) json["peak_rss_bytes"] = peak_rss / world;
  if (link.has_value()) {
    json["link"] = {{"rate", options.link},
                    {"all_ms", all.Millis(*link, world)},
                    {"first_gather_ms", first.Millis(*link, world)},
                    {"last_reduction_ms", last.Millis(*link, world)}};
  }
  return json;
}

absl::StatusOr<Case> LoadCase(const Options& options,
                              const std::string& settings) {
  RunOptions run = options.run;
  run.sets.push_back(absl::StrCat("bf16.enabled=",
                                  options.dtype == "bf16" ? "true" : "false"));
  bool per_tensor = false;
  for (const auto& set : absl::StrSplit(settings, ' ', absl::SkipEmpty())) {
    if (set == "per_tensor") {
      per_tensor = true;
    } else {
      run.sets.push_back(std::string(set));
    }
  }
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  return Case{.settings = settings,
              .per_tensor = per_tensor,
              .config = loaded.config,
              .ranks = std::vector<Seen>(run.ranks)};
}

// The body of one rank: all cases in turns, as on every other rank.
absl::Status RunRank(const Options& options, const Rank& rank,
                     Channels& channels, std::vector<Case>& cases) {
  auto& device = static_cast<TimedDevice&>(*rank.device);
  std::vector<std::unique_ptr<Runner>> runners;
  for (Case& one : cases) {
    runners.push_back(std::make_unique<Runner>(rank, device, channels, one));
    ZERO_RETURN_IF_ERROR(runners.back()->Start());
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (const auto& runner : runners) {
      ZERO_RETURN_IF_ERROR(runner->Turn(options.steps));
    }
  }
  for (const auto& runner : runners) runner->Finish();
  return absl::OkStatus();
}

absl::Status RunBenchmark(const Options& options) {
  const int world = options.run.ranks;
  std::vector<Case> cases;
  for (const std::string& settings : options.cases) {
    ZERO_ASSIGN_OR_RETURN(Case one, LoadCase(options, settings));
    cases.push_back(std::move(one));
  }
  absl::optional<Link> link;
  if (!options.link.empty()) {
    ZERO_ASSIGN_OR_RETURN(link, ParseLink(options.link));
  }
  std::vector<std::unique_ptr<Device>> devices(world);
  std::vector<Channels> channels(world);
  LocalRanksOptions ranks = MakeRanksOptions(cases[0].config, world);
  for (const Case& one : cases) {
    const LocalRanksOptions other = MakeRanksOptions(one.config, world);
    if (other.shards != ranks.shards ||
        other.local.algorithm != ranks.local.algorithm) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--case \"", one.settings, "\" connects the ranks otherwise than \"",
          cases[0].settings, "\": measure them in two runs"));
    }
  }
  ranks.wrap = [&](int rank, const std::string& channel,
                   std::unique_ptr<Communicator> end) {
    if (link.has_value()) {
      end = std::make_unique<ShapedCommunicator>(std::move(end), *link);
    }
    auto timed = std::make_unique<TimedCommunicator>(std::move(end));
    channels[rank][channel] = timed.get();
    return timed;
  };
  ZERO_RETURN_IF_ERROR(RunLocalRanks(
      world, ranks,
      [&](int rank) -> absl::StatusOr<std::unique_ptr<Device>> {
        ZERO_ASSIGN_OR_RETURN(devices[rank], OpenDevice(options.run, rank));
        return std::make_unique<TimedDevice>(*devices[rank]);
      },
      [&](const Rank& rank) {
        return RunRank(options, rank, channels[rank.rank()], cases);
      }));
  const int64_t peak_rss = PeakResidentBytes();
  for (const Case& one : cases) {
    std::cout << ToJson(options, link, one, peak_rss).dump() << std::endl;
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  options.run.threads = 1;
  CLI::App app("Times whole training steps on several ranks");
  AddRunOptions(app, &options.run, /*config_required=*/true);
  AddRanksOption(app, &options.run);
  app.add_option("--dtype", options.dtype, "fp32 or bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--case", options.cases,
                 "settings of one case: \"zero_optimization.stage=3 ...\", "
                 "and \"per_tensor\" for a segment per tensor (repeatable; "
                 "default: the config as it is)")
      ->allow_extra_args(false);
  app.add_option("--steps", options.steps, "steps measured in each turn")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--rounds", options.rounds, "turns of each case")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--shape-link", options.link, "as of zero train");
  CLI11_PARSE(app, argc, argv);
  // Of the calling thread: what the host and its kernels take of a core.
  Clock() = CLOCK_THREAD_CPUTIME_ID;
  if (options.cases.empty()) options.cases = {""};
  const absl::Status status = RunBenchmark(options);
  if (!status.ok()) std::cerr << "ranks_bench: " << status.message() << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
