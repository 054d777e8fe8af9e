// One configuration of the step benchmark in a process of its own, so that the
// peak memory is that configuration's: whole training steps, through the
// Session and Executor of `zero train`. Prints one JSON line.
//
// On a CPU the ops are timed in those very steps, and between them run the
// model's own matrix products alone through plain oneDNN, the limit. On a GPU
// nothing may be timed in a step that is to be fast: the profile, by events,
// is of further steps.
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/exceptions.h"
#include "engine/base/status.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "nlohmann/json.hpp"
#include "tools/bench/products.h"
#include "tools/bench/random_batch.h"
#include "tools/bench/timed_device.h"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  RunOptions run;
  std::string dtype = "fp32";
  bool recompute = false;
  bool cpu_time = false;
  int steps = 5;
  int warmup = 1;
  int profile_steps = 2;  // on a GPU

  bool on_gpu() const { return run.device == "cuda"; }
};

// Seconds that the host alone needs for a step (schedule, tape, arena, calls
// of ops): the step on the meta device.
absl::StatusOr<double> HostSeconds(Device& device, const Config& config,
                                   const RandomBatch& batch) {
  constexpr int64_t kUnlimited = int64_t{1} << 46;
  const std::unique_ptr<Device> meta = MakeMetaDevice(device);
  const Rank rank = MakeLoneRank(*meta);
  const std::unique_ptr<Model> model = MakeModelTools().make(config.model);
  MemoryLedger ledger;
  ZERO_ASSIGN_OR_RETURN(
      const auto executor,
      Executor::Make(
          rank, *model,
          MakeRunPlan(config, *model, /*world=*/1, rank.reduce->algorithm()),
          MakeExecutorOptions(config, /*train=*/true,
                              config.data.sequence_length),
          {kUnlimited, kUnlimited}, &ledger));
  std::vector<double> seconds;
  for (int step = 0; step < 12; ++step) {
    const double one = SecondsOf([&] {
      const auto output = executor->Step(batch.Input(config, step + 1));
      ZERO_CHECK(output.ok()) << output.status();
    });
    if (step >= 2) seconds.push_back(one);
  }
  return Median(seconds);
}

// Where the time of a step goes, by kind of action. The head's forward counts
// as backward, since the loss writes its gradients at once.
class Phases {
 public:
  explicit Phases(Executor& executor) {
    executor.clock().set_hook([this](const Action& action, bool done) {
      current_[action.kind] += done ? Now() : -Now();
    });
  }

  void EndStep() {
    for (const auto& [kind, seconds] : current_) {
      seconds_[NameOf(kind)].resize(num_steps_ + 1);
      seconds_[NameOf(kind)].back() += seconds;
    }
    ++num_steps_;
    current_.clear();
  }

  Json ToJson() const {
    Json json;
    for (const char* name : {"forward", "backward", "optimizer"}) {
      json[name] = Median(seconds_.at(name)) * 1e3;
    }
    return json;
  }

 private:
  static const char* NameOf(ActionKind kind) {
    switch (kind) {
      case ActionKind::kForward:
        return "forward";
      case ActionKind::kForwardBackward:
      case ActionKind::kBackward:
        return "backward";
      default:
        return "optimizer";
    }
  }

  size_t num_steps_ = 0;
  std::map<ActionKind, double> current_;
  std::map<std::string, std::vector<double>> seconds_;  // per step
};

// Takes steps as training does: with `ahead` each begins before the results of
// the one before it are read.
class Steps {
 public:
  Steps(Executor& executor, const RandomBatch& batch, const Config& config,
        bool ahead)
      : executor_(&executor),
        batch_(&batch),
        config_(&config),
        most_under_way_(ahead ? 2 : 1) {}

  // Errors: those of the executor; Aborted when the step was skipped: then it
  // was none, and neither are those behind it.
  absl::StatusOr<StepOutput> Next() {
    while (under_way_ < most_under_way_) {
      StepInput input = batch_->Input(*config_, ++num_begun_);
      input.inherits_skip = under_way_ > 0;
      ZERO_RETURN_IF_ERROR(executor_->Begin(input));
      ++under_way_;
    }
    return Finish();
  }

  // Finishes what is under way, and goes on one by one.
  absl::Status StopAhead() {
    while (under_way_ > 0) ZERO_RETURN_IF_ERROR(Finish().status());
    most_under_way_ = 1;
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<StepOutput> Finish() {
    --under_way_;
    ZERO_ASSIGN_OR_RETURN(const StepOutput output, executor_->Finish());
    if (!output.skipped) return output;
    return absl::AbortedError(
        absl::StrCat("step ", num_begun_ - under_way_,
                     " was skipped: a gradient is not finite"));
  }

  Executor* executor_;
  const RandomBatch* batch_;
  const Config* config_;
  int most_under_way_;
  int under_way_ = 0;
  int64_t num_begun_ = 0;
};

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

Json LimitJson(const StepProducts& products, const std::vector<double>& passes,
               int64_t tokens) {
  Json list = Json::array();
  for (const StepProducts::Timed& timed : products.timed()) {
    const double seconds = Median(timed.seconds);
    list.push_back({{"product", timed.name},
                    {"count", timed.count},
                    {"ms", seconds * 1e3},
                    {"gflops", timed.flops * timed.count / seconds * 1e-9}});
  }
  std::vector<double> ms;
  for (double seconds : passes) ms.push_back(seconds * 1e3);
  return {{"tokens_per_second", tokens / Median(passes)},
          {"dtype", DTypeName(products.dtype())},
          {"pass_ms", ms},
          {"products", list}};
}

// Bytes of the device: what this run took by its own count, and what the
// device says.
Json MemoryJson(const Device& device, const Session& session) {
  const DeviceMemory now = device.memory();
  return {{"total", now.total_bytes},
          {"context", now.context_bytes},
          {"used", now.total_bytes - now.free_bytes},
          {"ledger_peak", session.ledger().total_peak_bytes()},
          {"predicted_peak", session.predicted().total_peak_bytes()}};
}

Json FlopsJson(const Config& config) {
  const TokenFlops flops = MakeModelTools().flops_per_token(
      config.model, config.data.sequence_length);
  return {
      {"model", flops.model},
      {"causal", flops.causal},
      {"recomputed", config.activation_checkpointing ? flops.recomputed : 0}};
}

absl::Status RunBenchmark(const Options& options) {
  RunOptions run = options.run;
  run.sets.push_back(absl::StrCat("bf16.enabled=",
                                  options.dtype == "bf16" ? "true" : "false"));
  run.sets.push_back(absl::StrCat("activation_checkpointing.enabled=",
                                  options.recompute ? "true" : "false"));
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(run, MissingFiles::kIgnored));
  const Config& config = loaded.config;
  ZERO_ASSIGN_OR_RETURN(const auto device,
                        OpenDevice(run, 0, config.device.cuda));
  TimedDevice timed(*device, options.on_gpu() ? Timing::kOff : Timing::kWait);
  const Rank rank = MakeLoneRank(timed);
  ZERO_ASSIGN_OR_RETURN(
      const auto session,
      Session::Make(rank, config, MakeModelTools(), {.train = true}));
  Executor& executor = session->executor();
  const RandomBatch batch(config);
  const int64_t tokens = batch.host.batch * batch.host.length;

  Steps steps(executor, batch, config, /*ahead=*/options.on_gpu());
  ZERO_ASSIGN_OR_RETURN(StepOutput output, steps.Next());
  const double first_loss = output.loss;
  for (int i = 1; i < options.warmup; ++i) {
    ZERO_ASSIGN_OR_RETURN(output, steps.Next());
  }
  const int64_t peak_rss = PeakResidentBytes();
  std::unique_ptr<StepProducts> products;
  if (!options.on_gpu()) {
    const Parameter& table = *session->model().units()[0]->parameters()[0];
    products = std::make_unique<StepProducts>(*device, config.model,
                                              table.stored_shape[0], tokens,
                                              config.param_dtype());
    products->Pass();
  }
  timed.times().clear();

  std::vector<double> step_s, passes, ratios;
  Phases phases(executor);
  for (int i = 0; i < options.steps; ++i) {
    absl::StatusOr<StepOutput> taken;
    step_s.push_back(SecondsOf([&] { taken = steps.Next(); }));
    ZERO_RETURN_IF_ERROR(taken.status());
    output = *taken;
    phases.EndStep();
    if (products == nullptr) continue;
    passes.push_back(products->Pass());
    ratios.push_back(passes.back() / step_s.back());
  }

  const double last_loss = output.loss;
  if (options.on_gpu()) {
    ZERO_RETURN_IF_ERROR(steps.StopAhead());
    timed.set_timing(Timing::kEvents);
    for (int i = 0; i < options.profile_steps; ++i) {
      ZERO_RETURN_IF_ERROR(steps.Next().status());
    }
  }
  const int timed_steps =
      options.on_gpu() ? options.profile_steps : options.steps;

  std::vector<double> step_ms;
  for (double seconds : step_s) step_ms.push_back(seconds * 1e3);
  const DeviceInfo info = device->info();
  ZERO_ASSIGN_OR_RETURN(const double host, HostSeconds(*device, config, batch));
  Json result = {
      {"config", run.config},
      {"dtype", options.dtype},
      {"recompute", options.recompute},
      {"device", info.name},
      {"isa", info.isa},
      {"peak_flops_bf16", info.peak_flops_bf16},  // 0: not in the table
      {"threads", info.num_threads},
      {"clock", options.cpu_time ? "cpu" : "wall"},
      {"micro_batch", batch.host.batch},
      {"sequence_length", batch.host.length},
      {"tokens_per_second", tokens / Median(step_s)},
      {"step_ms", step_ms},
      {"host_ms", host * 1e3},
      {"loss", {first_loss, last_loss}},
      {"flops_per_token", FlopsJson(config)},
      {"peak_rss_bytes", peak_rss},
      {"peak_bytes", Json::parse(PeakBytes(session->ledger()).ToString())},
      {"memory", MemoryJson(*device, *session)},
      {"ops", OpsJson(timed.times(), timed_steps)},
  };
  // By the host's clock: of a GPU that would be the times of launches.
  if (!options.on_gpu()) result["phases_ms"] = phases.ToJson();
  if (products != nullptr) {
    result["limit"] = LimitJson(*products, passes, tokens);
    result["limit"]["ratio"] = Median(ratios);
  }
  std::cout << result.dump() << std::endl;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times whole training steps and their matrix products alone");
  AddRunOptions(app, &options.run, /*config_required=*/true);
  app.add_option("--dtype", options.dtype, "fp32 or bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--steps", options.steps, "steps measured")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--warmup", options.warmup, "steps before them")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_flag("--recompute", options.recompute, "activation checkpointing");
  app.add_flag("--cpu-time", options.cpu_time,
               "time by the thread's CPU clock; wants --threads 1");
  CLI11_PARSE(app, argc, argv);
  if (options.cpu_time) Clock() = CLOCK_THREAD_CPUTIME_ID;
  // Exceptions: faults of the device.
  const absl::Status status =
      CatchExceptions([&] { return RunBenchmark(options); });
  if (status.ok()) return 0;
  // The end is what tools/bench/gpu.py tells a GPU that is too small by.
  std::cerr << "step_bench: " << status.message()
            << (absl::IsResourceExhausted(status) ? "; out of memory" : "")
            << "\n";
  return 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
