// Whole training steps on one or several ranks, through the Session and
// Executor of `zero train --ranks N`. Cases (settings of the config) alternate
// in one process, so that a slow minute slows them all; to measure memory, a
// case runs alone. Prints one JSON object per case.
//
// On a CPU the ops are timed in these steps. On a GPU timing would slow a step,
// so additional steps are profiled, by events.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/optional.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "engine/comm/shaped.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "engine/zero/schedule.h"
#include "nlohmann/json.hpp"
#include "tools/bench/products.h"
#include "tools/bench/timed_device.h"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kProfileSteps = 2;  // on a GPU

struct Options {
  RunOptions run;
  std::vector<std::string> cases;
  std::string link;
  int steps = 5, warmup = 1, rounds = 1;
  bool limit = false;
  bool cpu_time = false;

  bool on_gpu() const { return run.device == "cuda"; }
};

// One micro-batch of random tokens; the work does not depend on which.
struct RandomBatch {
  RandomBatch(const Config& config, const Rank& rank) {
    const int64_t batch = config.train_micro_batch_size_per_gpu;
    const int64_t length = config.data.sequence_length;
    std::mt19937 random(1 + rank.rank());
    for (int64_t i = 0; i < batch * length; ++i) {
      tokens.push_back(random() % config.model.vocab_size);
      positions.push_back(i % length);
    }
    for (int64_t i = 0; i < batch; ++i) {
      sample_ids.push_back(rank.rank() * batch + i);
    }
    host = {.batch = batch,
            .length = length,
            .tokens = tokens.data(),
            .targets = tokens.data(),
            .positions = positions.data(),
            .sample_ids = sample_ids.data()};
  }
  RandomBatch(const RandomBatch&) = delete;

  std::vector<int32_t> tokens, positions;
  std::vector<int64_t> sample_ids;
  HostBatch host;
};

// Measures the time of collectives on their streams, including waits for other
// ranks.
class TimedCommunicator final : public CommunicatorWrapper {
 public:
  explicit TimedCommunicator(std::unique_ptr<Communicator> inner)
      : CommunicatorWrapper(std::move(inner)) {}

  // The time of all finished collectives.
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

// The ends of one rank's channels, with the link's time. None for a single
// rank.
using Channels = std::map<std::string, TimedCommunicator*>;

// One rank's measurements of one case.
struct Seen {
  // One per measured step.
  std::vector<double> step_ms, exposed_ms, host_ms;
  std::vector<double> forward_ms, backward_ms, optimizer_ms;
  std::vector<double> limit_ms;  // of the products after it
  DType limit_dtype = DType::kF32;
  OpTimes ops;  // of the last turn; of kProfileSteps on a GPU
  CollectiveCount gather, reduce;  // of all `counted_steps`
  double comm_seconds = 0;         // likewise
  int64_t counted_steps = 0;
  double loss = 0;
  int64_t peak_rss = 0;  // of the process, without the products
  MemoryLedger ledger;
  int64_t predicted_peak = 0;
  DeviceInfo device;
  DeviceMemory memory;
};

struct Case {
  std::string settings;
  bool per_tensor = false;  // PlanOptions::segment_per_tensor
  Config config;
  std::vector<Seen> ranks;
  // The same on all ranks.
  Plan plan;
  std::vector<Action> schedule;

  // Of a step.
  int64_t RankTokens() const {
    return config.train_micro_batch_size_per_gpu *
           config.gradient_accumulation_steps * config.data.sequence_length;
  }
};

CollectiveCount operator-(CollectiveCount a, const CollectiveCount& b) {
  a += {-b.calls, -b.bytes, -b.received};
  return a;
}

// One rank's running engine of one case.
class Runner {
 public:
  Runner(const Options& options, const Rank& rank, Channels& channels,
         Case& one)
      : options_(options),
        rank_(rank),
        device_(static_cast<TimedDevice&>(*rank.device)),
        channels_(channels),
        case_(one),
        seen_(one.ranks[rank.rank()]),
        batch_(one.config, rank),
        micro_batches_(one.config.gradient_accumulation_steps, batch_.host) {}

  absl::Status Start() {
    ZERO_ASSIGN_OR_RETURN(
        session_,
        Session::Make(rank_, case_.config, MakeModelTools(),
                      {.train = true, .segment_per_tensor = case_.per_tensor}));
    for (int i = 0; i < options_.warmup; ++i) ZERO_RETURN_IF_ERROR(Step());
    ZERO_RETURN_IF_ERROR(Drain());
    seen_.peak_rss = PeakResidentBytes();
    if (!options_.limit) return absl::OkStatus();
    std::vector<ProductShape> sequence;
    device_.set_products(&sequence);
    ZERO_RETURN_IF_ERROR(Step());
    device_.set_products(nullptr);
    seen_.limit_dtype = sequence.front().dtype;
    products_ = std::make_unique<StepProducts>(device_, std::move(sequence));
    products_->Pass();
    return absl::OkStatus();
  }

  // Runs several steps. The first is counted but not measured: it finds nothing
  // in flight, where stages 1 and 2 gather what was updated last.
  absl::Status Turn() {
    const CollectiveCount gather = rank_.gather->Total();
    const CollectiveCount reduce = Reductions();
    const double seconds = CommSeconds();
    const int64_t begun = num_begun_;
    ZERO_RETURN_IF_ERROR(Step());
    device_.times().clear();
    for (int i = 0; i < options_.steps; ++i) {
      ZERO_RETURN_IF_ERROR(MeasuredStep());
    }
    seen_.ops = device_.times();
    ZERO_RETURN_IF_ERROR(Drain());
    seen_.gather += rank_.gather->Total() - gather;
    seen_.reduce += Reductions() - reduce;
    seen_.comm_seconds += CommSeconds() - seconds;
    seen_.counted_steps += num_begun_ - begun;
    return absl::OkStatus();
  }

  absl::Status Finish() {
    if (options_.on_gpu()) ZERO_RETURN_IF_ERROR(Profile());
    if (products_ == nullptr) seen_.peak_rss = PeakResidentBytes();
    seen_.ledger = session_->ledger();
    seen_.predicted_peak = session_->predicted().total_peak_bytes();
    seen_.device = device_.info();
    seen_.memory = device_.memory();
    if (rank_.rank() != 0) return absl::OkStatus();
    case_.plan = executor().plan();
    case_.schedule = executor().schedule();
    return absl::OkStatus();
  }

 private:
  Executor& executor() { return session_->executor(); }

  // Takes a step like training: on a GPU the next one begins before the results
  // of this one are read.
  absl::Status Step() { return StepAhead(options_.on_gpu() ? 2 : 1); }

  absl::Status StepAhead(int64_t most_under_way) {
    while (num_begun_ - num_finished_ < most_under_way) {
      ZERO_RETURN_IF_ERROR(executor().Begin(
          {.micro_batches = micro_batches_,
           .num_valid_targets = rank_.world() * case_.RankTokens(),
           .lr = static_cast<float>(case_.config.optimizer.lr),
           .optimizer_step = num_begun_ + 1,
           .inherits_skip = num_begun_ > num_finished_}));
      ++num_begun_;
    }
    return FinishStep();
  }

  // Errors: those of the executor; Aborted if the step was skipped: then
  //         neither it nor later ones count.
  absl::Status FinishStep() {
    ZERO_ASSIGN_OR_RETURN(const StepOutput output, executor().Finish());
    ++num_finished_;
    seen_.loss = output.loss;
    if (!output.skipped) return absl::OkStatus();
    return absl::AbortedError(absl::StrCat(
        "step ", num_finished_, " was skipped: a gradient is not finite"));
  }

  // Waits for what is in flight: cases share the channels.
  absl::Status Drain() {
    while (num_finished_ < num_begun_) ZERO_RETURN_IF_ERROR(FinishStep());
    executor().states();
    return absl::OkStatus();
  }

  // Counts the reductions within the group and across the groups.
  CollectiveCount Reductions() {
    CollectiveCount count = rank_.reduce->Total();
    count += rank_.across->Total();
    return count;
  }

  double CommSeconds() {
    double seconds = 0;
    for (const auto& [name, end] : channels_) {
      if (name != ChannelName(Channel::kScalar)) seconds += end->Seconds();
    }
    return seconds;
  }

  // CPU time of this thread outside kernels; waiting takes none.
  double HostSeconds() {
    return Now(CLOCK_THREAD_CPUTIME_ID) - device_.cpu_seconds();
  }

  absl::Status MeasuredStep() {
    const WaitTimes waited = executor().clock().waited();
    const double host = HostSeconds();
    absl::Status taken;
    const double seconds = SecondsOf([&] { taken = Step(); });
    ZERO_RETURN_IF_ERROR(taken);
    seen_.step_ms.push_back(seconds * 1e3);
    seen_.host_ms.push_back((HostSeconds() - host) * 1e3);
    seen_.exposed_ms.push_back((executor().clock().waited() - waited).total());
    const StepTimes& phases = executor().times();
    seen_.forward_ms.push_back(phases.forward_ms);
    seen_.backward_ms.push_back(phases.backward_ms);
    seen_.optimizer_ms.push_back(phases.optimizer_ms);
    if (products_) seen_.limit_ms.push_back(products_->Pass() * 1e3);
    return absl::OkStatus();
  }

  absl::Status Profile() {
    device_.set_timing(Timing::kEvents);
    device_.times().clear();
    for (int i = 0; i < kProfileSteps; ++i) {
      ZERO_RETURN_IF_ERROR(StepAhead(1));
    }
    seen_.ops = device_.times();
    device_.set_timing(Timing::kOff);
    return absl::OkStatus();
  }

  const Options& options_;
  const Rank& rank_;
  TimedDevice& device_;
  Channels& channels_;
  Case& case_;
  Seen& seen_;
  RandomBatch batch_;
  std::vector<HostBatch> micro_batches_;  // of a step, all the same
  std::unique_ptr<Session> session_;
  std::unique_ptr<StepProducts> products_;
  int64_t num_begun_ = 0, num_finished_ = 0;
};

// The collectives' bytes over the busiest rank's link.
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

// What overlap cannot hide: the gathers for the step's first computation (of
// updated parameters: from the previous step), and the reductions that its last
// one completes.
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

// Rank 0's bytes in the bulk collectives of one step.
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

Json OpsJson(const OpTimes& times, int steps) {
  Json ops = Json::array();
  for (const auto& [name, time] : times) {
    Json op = {{"op", name},
               {"calls", time.calls / steps},
               {"ms", time.seconds * 1e3 / steps}};
    if (time.flops > 0) op["gflops"] = time.flops / time.seconds * 1e-9;
    ops.push_back(op);
  }
  return ops;
}

// Memory in bytes: the rank with the most by its own count, then the counts of
// the device and of the process.
Json MemoryJson(const Case& one) {
  const auto most =
      absl::c_max_element(one.ranks, [](const Seen& a, const Seen& b) {
        return a.ledger.total_peak_bytes() < b.ledger.total_peak_bytes();
      });
  const DeviceMemory& now = most->memory;
  return {{"peak_bytes", PeakBytes(most->ledger)},
          {"memory",
           {{"used", now.total_bytes - now.free_bytes},
            {"ledger_peak", most->ledger.total_peak_bytes()},
            {"predicted_peak", most->predicted_peak}}}};
}

// The ranks' traffic, and the part that nothing can hide.
Json CommunicationJson(const Options& options, const absl::optional<Link>& link,
                       const Case& one) {
  const int world = options.run.ranks;
  const Seen& seen = one.ranks[0];
  const Json wire = WireJson(one);
  const int64_t sent =
      wire["gathered"].get<int64_t>() + wire["reduced"].get<int64_t>();
  const double seconds = seen.comm_seconds / seen.counted_steps;
  const Traffic all = TrafficOf(one, one.schedule);
  const Traffic first = TrafficOf(one, FirstGathers(one));
  const Traffic last = TrafficOf(one, LastReductions(one));
  Json json = {{"wire", wire},
               {"bus_gb_per_s", seconds > 0 ? 1e-9 * sent / seconds : 0},
               {"link_bytes", all.bytes},
               {"last_reduction_bytes", last.bytes}};
  if (link.has_value()) {
    json["link"] = {{"rate", options.link},
                    {"all_ms", all.Millis(*link, world)},
                    {"first_gather_ms", first.Millis(*link, world)},
                    {"last_reduction_ms", last.Millis(*link, world)}};
  }
  return json;
}

Json ToJson(const Options& options, const absl::optional<Link>& link,
            const Case& one) {
  const Config& config = one.config;
  const int world = options.run.ranks;
  const Seen& seen = one.ranks[0];
  Json json = {
      {"case", one.settings},
      {"stage", config.zero_optimization.stage},
      {"dtype", DTypeName(config.param_dtype())},
      {"device", seen.device.name},
      {"isa", seen.device.isa},
      {"peak_flops_bf16", seen.device.peak_flops_bf16},  // 0: not in the table
      {"ranks", world},
      {"threads", seen.device.num_threads},
      {"clock", options.cpu_time ? "cpu" : "wall"},
      {"micro_batch", config.train_micro_batch_size_per_gpu},
      {"accumulation_steps", config.gradient_accumulation_steps},
      {"sequence_length", config.data.sequence_length},
      {"tokens_per_second",
       1e3 * world * one.RankTokens() / Median(seen.step_ms)},
      {"step_ms", seen.step_ms},
      {"exposed_ms", MeanOverRanks(one, &Seen::exposed_ms)},
      {"host_ms", MeanOverRanks(one, &Seen::host_ms)},
      {"loss", seen.loss},
      {"flops_per_token",
       MakeModelTools()
           .flops_per_token(config.model, config.data.sequence_length,
                            config.recompute())
           .model},
      {"ops",
       OpsJson(seen.ops, options.on_gpu() ? kProfileSteps : options.steps)},
  };
  if (!options.cpu_time) {  // the executor's are of the wall clock
    json["phases_ms"] = {{"forward", Median(seen.forward_ms)},
                         {"backward", Median(seen.backward_ms)},
                         {"optimizer", Median(seen.optimizer_ms)}};
  }
  json.update(MemoryJson(one));
  json.update(CommunicationJson(options, link, one));
  if (options.cases.size() == 1) json["peak_rss_bytes"] = seen.peak_rss / world;
  if (options.limit) {
    json["limit"] = {{"dtype", DTypeName(seen.limit_dtype)},
                     {"pass_ms", seen.limit_ms}};
  }
  return json;
}

absl::StatusOr<Case> LoadCase(const Options& options,
                              const std::string& settings) {
  RunOptions run = options.run;
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

// Errors: InvalidArgument if cases connect the ranks differently.
absl::StatusOr<std::vector<Case>> LoadCases(const Options& options) {
  std::vector<Case> cases;
  for (const std::string& settings : options.cases) {
    ZERO_ASSIGN_OR_RETURN(Case one, LoadCase(options, settings));
    cases.push_back(std::move(one));
    const int world = options.run.ranks;
    const LocalRanksOptions first = MakeRanksOptions(cases[0].config, world);
    const LocalRanksOptions own = MakeRanksOptions(cases.back().config, world);
    if (own.shards == first.shards &&
        own.local.algorithm == first.local.algorithm) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "--case \"", settings, "\" connects the ranks differently from \"",
        cases[0].settings, "\": measure them in two runs"));
  }
  return cases;
}

// The body of one rank: all cases in turns, as on every other rank.
absl::Status RunRank(const Options& options, const Rank& rank,
                     Channels& channels, std::vector<Case>& cases) {
  std::vector<std::unique_ptr<Runner>> runners;
  for (Case& one : cases) {
    runners.push_back(std::make_unique<Runner>(options, rank, channels, one));
    ZERO_RETURN_IF_ERROR(runners.back()->Start());
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (const auto& runner : runners) ZERO_RETURN_IF_ERROR(runner->Turn());
  }
  for (const auto& runner : runners) ZERO_RETURN_IF_ERROR(runner->Finish());
  return absl::OkStatus();
}

absl::Status RunBenchmark(const Options& options) {
  const int world = options.run.ranks;
  if (options.limit && (world > 1 || options.on_gpu())) {
    return absl::InvalidArgumentError("--limit needs one rank on a CPU");
  }
  ZERO_ASSIGN_OR_RETURN(std::vector<Case> cases, LoadCases(options));
  absl::optional<Link> link;
  if (!options.link.empty()) {
    ZERO_ASSIGN_OR_RETURN(link, ParseLink(options.link));
  }
  std::vector<std::unique_ptr<Device>> devices(world);
  std::vector<Channels> channels(world);
  const Config& first = cases[0].config;
  LocalRanksOptions ranks = MakeRanksOptions(first, world);
  ranks.wrap =
      [&](int rank, const std::string& channel,
          std::unique_ptr<Communicator> end) -> std::unique_ptr<Communicator> {
    if (world == 1) return end;
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
        ZERO_ASSIGN_OR_RETURN(devices[rank],
                              OpenDevice(options.run, rank, first.device.cuda));
        return std::make_unique<TimedDevice>(
            *devices[rank], options.on_gpu() ? Timing::kOff : Timing::kClock);
      },
      [&](const Rank& rank) {
        return RunRank(options, rank, channels[rank.rank()], cases);
      }));
  for (const Case& one : cases) {
    std::cout << ToJson(options, link, one).dump() << std::endl;
  }
  return absl::OkStatus();
}

void AddOptions(CLI::App& app, Options* options) {
  AddRunOptions(app, &options->run, /*config_required=*/true);
  AddRanksOption(app, &options->run);
  app.add_option("--case", options->cases,
                 "settings of one case: \"zero_optimization.stage=3 ...\", and "
                 "\"per_tensor\" for a segment per tensor (repeatable; "
                 "default: the config itself)")
      ->allow_extra_args(false);
  const auto count = [&](const char* name, int* value, const char* help) {
    app.add_option(name, *value, help)
        ->capture_default_str()
        ->check(CLI::Range(1, 1000));
  };
  count("--steps", &options->steps, "steps measured in each turn");
  count("--warmup", &options->warmup, "steps before the first turn");
  count("--rounds", &options->rounds, "turns of each case");
  app.add_option("--shape-link", options->link, "as of zero train");
  app.add_flag("--limit", options->limit,
               "also time only the model's matrix products, through plain "
               "oneDNN, after every step");
  app.add_flag("--cpu-time", options->cpu_time,
               "time by the thread's CPU clock; needs --threads 1");
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times whole training steps");
  AddOptions(app, &options);
  CLI11_PARSE(app, argc, argv);
  if (options.cpu_time) Clock() = CLOCK_THREAD_CPUTIME_ID;
  if (options.cases.empty()) options.cases = {""};
  // Exceptions: faults of the device.
  const absl::Status status =
      CatchExceptions([&] { return RunBenchmark(options); });
  if (status.ok()) return 0;
  // tools/bench/gpu.py recognizes a GPU that is too small by the end of this
  // text.
  std::cerr << "step_bench: " << status.message()
            << (absl::IsResourceExhausted(status) ? "; out of memory" : "")
            << "\n";
  return 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
