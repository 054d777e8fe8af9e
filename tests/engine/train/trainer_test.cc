// Whole runs on a small text, like `zero train`'s.

#include "engine/train/trainer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/autograd/ops.h"
#include "engine/base/status.h"
#include "engine/checkpoint/portable.h"
#include "engine/comm/fault.h"
#include "engine/comm/local_ranks.h"
#include "engine/data/sentencepiece_tokenizer.h"
#include "engine/train/evaluate.h"
#include "engine/train/generator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "models/registry.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Sentences that differ in their numbers: about 12,000 bytes to learn from.
std::string SmallText() {
  std::string text;
  for (int i = 0; i < 200; ++i) {
    absl::StrAppend(&text, "The number after ", i, " is ", i + 1,
                    ", and twice that is ", 2 * i + 2, ".\n");
  }
  return text;
}

struct Outcome {
  absl::StatusOr<RunSummary> summary = absl::UnknownError("not run");
  std::string printed;
};

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() : device_(MakeCpuDevice(1)) {
    dir_.Write("text.txt", SmallText());
  }

  // A two-layer model; `overrides` as for `--set`.
  LoadedConfig Load(const std::vector<std::string>& overrides,
                    const std::string& out = "run", int world = 1) {
    const std::string text = R"({
      "model": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
      "data": {"train": ")" + dir_.File("text.txt") +
                             R"(", "validation_fraction": 0.1,
               "sequence_length": 32},
      "training": {"steps": 12, "out_dir": ")" +
                             dir_.File(out) +
                             R"(", "sample": {"prompt": "The ", "tokens": 8}},
      "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
      "gradient_clipping": 1.0, "steps_per_print": 4,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}
    })";
    LoadOptions options;
    options.overrides = overrides;
    const auto catalog = MakeModelCatalog();
    options.catalog = catalog.get();
    options.world = world;
    auto loaded = ParseConfig(text, "run.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }

  // Runs to the end; `prepare` sees the trainer before its first step.
  Outcome Run(const LoadedConfig& loaded,
              const std::function<void(Trainer&)>& prepare = {},
              const std::atomic<bool>* stop = nullptr,
              const decltype(ModelTools::make)& make = MakeModel) {
    ModelTools tools = TestModelTools();
    tools.make = make;
    Outcome outcome;
    char* text = nullptr;
    size_t size = 0;
    std::FILE* file = open_memstream(&text, &size);
    {
      Console console(file, /*is_terminal=*/false);
      auto trainer = Trainer::Make(rank(), loaded, tools, &console, stop);
      EXPECT_TRUE(trainer.ok()) << trainer.status();
      if (trainer.ok()) {
        if (prepare) prepare(**trainer);
        outcome.summary = (*trainer)->Run();
      }
    }
    std::fclose(file);
    outcome.printed.assign(text, size);
    std::free(text);
    return outcome;
  }

  // Runs as threads; the config's batch holds for `world` ranks. `prepare`
  // sees every rank's trainer before its first step.
  absl::Status RunRanks(
      int world, std::vector<std::string> overrides, const std::string& out,
      const std::function<void(const Rank&, Trainer&)>& prepare = {},
      const LocalRanksOptions& options = {
          .local = {.timeout = absl::Seconds(60)}}) {
    overrides.push_back("train_micro_batch_size_per_gpu=auto");
    const LoadedConfig loaded = Load(overrides, out, world);
    Console silent(nullptr, /*is_terminal=*/false);
    RunStart start;
    return RunLocalRanks(
        world, options,
        [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
          return MakeCpuDevice(1);
        },
        [&](const Rank& rank) -> absl::Status {
          ZERO_ASSIGN_OR_RETURN(const auto trainer,
                                Trainer::Make(rank, loaded, TestModelTools(),
                                              &silent, nullptr, &start));
          if (prepare) prepare(rank, *trainer);
          return trainer->Run().status();
        });
  }

  std::string Hash(const std::vector<std::string>& overrides,
                   const std::string& out = "run") {
    const Outcome outcome = Run(Load(overrides, out));
    EXPECT_TRUE(outcome.summary.ok()) << outcome.summary.status();
    return outcome.summary.ok() ? outcome.summary->parameters_hash : "";
  }

  // Lines of metrics.jsonl that are steps.
  std::vector<nlohmann::json> Steps(const std::string& out = "run") {
    std::vector<nlohmann::json> steps;
    for (absl::string_view line :
         absl::StrSplit(dir_.Read(out + "/metrics.jsonl"), '\n')) {
      if (line.empty()) continue;
      const auto json = nlohmann::json::parse(line);
      if (json.contains("loss")) steps.push_back(json);
    }
    return steps;
  }

  std::vector<double> Rates(const std::vector<std::string>& overrides) {
    EXPECT_NE(Hash(overrides), "");
    std::vector<double> rates;
    for (const auto& step : Steps()) rates.push_back(step["lr"]);
    return rates;
  }

  TempDir dir_;
  // For the current device; trainers and sessions keep its address.
  const Rank& rank() {
    rank_ = MakeSoloRank(*device_);
    return rank_;
  }

  std::unique_ptr<Device> device_;
  Rank rank_;
};

// The CPU, with notes.
class TalkingDevice final : public Device {
 public:
  explicit TalkingDevice(std::unique_ptr<Device> inner)
      : inner_(std::move(inner)) {}

  void Say(const std::string& note) { notes_.push_back(note); }

  DeviceKind kind() const override { return inner_->kind(); }
  DeviceInfo info() const override { return inner_->info(); }
  std::vector<std::string> notes() const override { return notes_; }
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return inner_->Allocate(bytes, kind);
  }
  std::unique_ptr<Stream> MakeStream(StreamRole role) override {
    return inner_->MakeStream(role);
  }
  std::unique_ptr<Event> MakeEvent() override { return inner_->MakeEvent(); }
  Ops& ops() override { return inner_->ops(); }
  Device& host() override { return inner_->host(); }
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override {
    inner_->Copy(stream, dst, src, bytes);
  }

 private:
  void Free(void*, size_t, MemoryKind) override {}  // buffers are inner_'s

  std::unique_ptr<Device> inner_;
  std::vector<std::string> notes_;
};

// A batch may need kernels that earlier ones did not.
TEST_F(TrainerTest, WhatADeviceAddsToItsNotesIsPrintedOnce) {
  auto owned = std::make_unique<TalkingDevice>(std::move(device_));
  TalkingDevice& device = *owned;
  device_ = std::move(owned);
  device.Say("a first");
  const Outcome outcome = Run(
      Load({"training.steps=5", "steps_per_print=1"}), [&](Trainer& trainer) {
        trainer.session().executor().clock().set_hook(
            [&device, step = 0](const Action& action, bool done) mutable {
              if (done || action.kind != ActionKind::kNorm) return;
              if (++step == 3) device.Say("a second");
            });
      });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_THAT(outcome.printed, HasSubstr("\nnote: a first\nstep 1/5"));
  EXPECT_THAT(outcome.printed, HasSubstr("\nnote: a second\nstep 4/5"));
  for (const char* const note : {"a first", "a second"}) {
    EXPECT_EQ(outcome.printed.find(note), outcome.printed.rfind(note));
  }
}

// The means of the losses of every 50 steps of 500, most of them delayed. With
// momentum 0.9 a delay of one step divides the largest stable learning rate by
// 38 (the roots of z^2 - 1.9 z + 0.9 + k leave the unit circle at k = 0.1, not
// those of z^2 - (1.9 - k) z + 0.9 until k = 3.8): measured here are 0.06 % at
// most at 3e-5, 2.3 % at 1e-4, 8 % at 3e-4.
TEST_F(TrainerTest, ADelayedUpdateLearnsAsWellAtASmallLearningRate) {
  const auto curve = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides = {
        "training.steps=500", "training.save_final=false",
        "training.sample.tokens=0", "optimizer.params.lr=3e-5"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    const Outcome outcome = Run(Load(overrides));
    EXPECT_TRUE(outcome.summary.ok()) << outcome.summary.status();
    std::vector<double> means(10);
    const auto steps = Steps();
    EXPECT_EQ(steps.size(), 500u);
    for (size_t i = 0; i < steps.size() && i < 500; ++i) {
      means[i / 50] += steps[i]["loss"].get<double>() / 50;
    }
    return means;
  };
  const std::string section = "zero_optimization.offload_optimizer.";
  const std::vector<double> plain = curve({});
  const std::vector<double> delayed =
      curve({"zero_optimization.stage=2", section + "device=cpu",
             section + "delayed_update.enabled=true"});
  EXPECT_NE(delayed, plain);
  EXPECT_LT(plain.back(), 0.9 * plain.front());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(delayed[i], plain[i], 0.01 * plain[i])
        << "from step " << 50 * i;
  }
}

TEST_F(TrainerTest, TheStartSaysWhenTheHostUpdates) {
  const std::string offload = "zero_optimization.offload_optimizer.";
  const std::pair<std::string, std::string> kCases[] = {
      {"ratio=1", ""},
      {"update_before_norm=true", " during backward"},
      {"delayed_update.enabled=true", ", after step 40 during the next step"}};
  for (const auto& [set, when] : kCases) {
    const Outcome outcome = Run(
        Load({"training.steps=1", "zero_optimization.stage=2",
              "gradient_clipping=0", offload + "device=cpu", offload + set}));
    ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
    EXPECT_THAT(outcome.printed,
                HasSubstr("updated there by 1 thread" + when + "\n"));
  }
}

TEST_F(TrainerTest, ARunWritesEverythingThatItPromises) {
  const LoadedConfig loaded = Load({"training.eval_every=5"});
  const Outcome outcome = Run(loaded);
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  const RunSummary& summary = *outcome.summary;
  EXPECT_EQ(summary.steps, 12);
  EXPECT_EQ(summary.tokens, 12 * 8 * 32);
  EXPECT_FALSE(summary.interrupted);
  EXPECT_NEAR(summary.first_loss, std::log(257.0), 0.3);
  EXPECT_LT(summary.final_loss, summary.first_loss - 1);
  EXPECT_EQ(summary.parameters_hash.size(), 32u);

  // metrics.jsonl: one object per step, and one per evaluation.
  const auto steps = Steps();
  ASSERT_EQ(steps.size(), 12u);
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(steps[i]["step"], i + 1);
    EXPECT_EQ(steps[i]["tokens"], (i + 1) * 8 * 32);
    EXPECT_GT(steps[i]["grad_norm"], 0);
    EXPECT_GT(steps[i]["tokens_per_second"], 0);
    EXPECT_GT(steps[i]["peak_bytes"]["activations"], 0);
    EXPECT_GT(steps[i]["mfu"], steps[i]["mfu_causal"]);
    EXPECT_GT(steps[i]["mfu_causal"], 0);
    EXPECT_FALSE(steps[i].contains("hfu"));
  }
  EXPECT_EQ(steps[0]["loss"].get<double>(), summary.first_loss);
  EXPECT_EQ(steps[11]["loss"].get<double>(), summary.final_loss);
  int evaluations = 0;
  for (absl::string_view line :
       absl::StrSplit(dir_.Read("run/metrics.jsonl"), '\n')) {
    evaluations += line.find("validation_loss") != absl::string_view::npos;
  }
  EXPECT_EQ(evaluations, 3);  // steps 5, 10 and the end

  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_EQ(json["steps"], 12);
  EXPECT_EQ(json["interrupted"], false);
  EXPECT_EQ(json["parameters_hash"], summary.parameters_hash);
  EXPECT_EQ(json["final_loss"].get<double>(), summary.final_loss);
  EXPECT_EQ(json["validation_loss"].get<double>(), summary.validation_loss);
  EXPECT_EQ(json["validation_step"], 12);
  EXPECT_FALSE(json.contains("error"));
  EXPECT_NEAR(json["mfu"].get<double>(),
              json["tokens_per_second"].get<double>() *
                  FlopsPerToken(loaded.config.model, 32) /
                  json["peak_flops_per_second"].get<double>(),
              1e-12);
  for (const auto& [category, bytes] : json["peak_bytes"].items()) {
    // Samples may use less than the longest planned.
    EXPECT_LE(bytes, json["predicted_peak_bytes"][category]) << category;
  }
  for (const char* category : {"parameters", "gradients", "optimizer",
                               "activations", "workspace", "total"}) {
    EXPECT_EQ(json["peak_bytes"][category],
              json["predicted_peak_bytes"][category])
        << category;
  }

  // The resolved config loads to the same Config.
  LoadOptions options;
  const auto again = LoadConfig(dir_.File("run/config.json"), options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config, loaded.config);

  EXPECT_NE(outcome.printed.find("--- sample after step 12 ---\nThe "),
            std::string::npos)
      << outcome.printed;
  EXPECT_NE(outcome.printed.find("step 12/12"), std::string::npos);
  EXPECT_NE(outcome.printed.find("measured just now with 1 thread"),
            std::string::npos);
}

// The printed line of `step`.
std::string LineOf(const std::string& printed, int64_t step) {
  const size_t at = printed.find(absl::StrCat("step ", step, "/"));
  return at == std::string::npos
             ? ""
             : printed.substr(at, printed.find('\n', at) - at);
}

TEST_F(TrainerTest, ALineHasTheMeanSpeedSinceTheLineBefore) {
  const Outcome outcome =
      Run(Load({"training.steps=12", "steps_per_print=10"}));
  const auto steps = Steps();
  ASSERT_EQ(steps.size(), 12u);
  for (const auto& [first, last] : {std::pair(1, 1), {2, 10}, {11, 12}}) {
    double ms = 0;
    for (int i = first; i <= last; ++i) {
      ms += steps[i - 1]["step_ms"].get<double>();
    }
    const double tokens =
        steps[last - 1]["tokens"].get<double>() / last * (last - first + 1);
    const int64_t speed = std::llround(tokens / (1e-3 * ms));
    const std::string line = LineOf(outcome.printed, last);
    const size_t end = line.find(" tok/s");
    ASSERT_NE(end, std::string::npos) << outcome.printed;
    const size_t begin = line.rfind(' ', end - 1) + 1;
    std::string shown = line.substr(begin, end - begin);
    shown.erase(std::remove(shown.begin(), shown.end(), ','), shown.end());
    EXPECT_NEAR(std::stoll(shown), speed, 1 + 1e-6 * speed) << line;
  }
}

TEST_F(TrainerTest, TheStartSaysHowTheLearningRateGoes) {
  const auto rate = [&](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), "training.steps=5");
    const std::string printed = Run(Load(overrides)).printed;
    const size_t at = printed.find("learning rate ");
    const std::string line = printed.substr(at, printed.find('\n', at) - at);
    return line.substr(line.find_first_not_of(' ', 13));
  };
  const std::string lr = "optimizer.params.lr=0.01";
  EXPECT_EQ(rate({lr}), "0.01, Constant");
  EXPECT_EQ(rate({lr, "scheduler.type=WarmupCosineLR",
                  "scheduler.params.warmup_num_steps=4",
                  "scheduler.params.total_num_steps=100"}),
            "0.01, WarmupCosineLR: log warm-up from 0 over 4 steps, then "
            "cosine to 1e-06 at step 100");
  // A warm-up that the run does not finish is followed by nothing.
  EXPECT_EQ(rate({lr, "scheduler.type=WarmupDecayLR",
                  "scheduler.params.warmup_num_steps=1000"}),
            "0.01, WarmupDecayLR: log warm-up from 0 over 1000 steps, of which "
            "this run has 5");
  EXPECT_EQ(rate({lr, "scheduler.type=WarmupDecayLR",
                  "scheduler.params.warmup_num_steps=0",
                  "scheduler.params.total_num_steps=100"}),
            "0.01, WarmupDecayLR: linear to 0 at step 100");
  EXPECT_EQ(
      rate({lr, "scheduler.type=WSD", "scheduler.params.warmup_num_steps=5",
            "scheduler.params.warmup_type=linear",
            "scheduler.params.total_num_steps=100"}),
      "0.01, WSD: linear warm-up from 0 over 5 steps, then constant, "
      "1-sqrt to 0 in the last 10 of 100 steps");
  EXPECT_EQ(rate({lr, "scheduler.type=OneCycle",
                  "scheduler.params.cycle_first_step_size=7"}),
            "0.01, OneCycle: from 0 to 0.01 in 7 steps, back in 7");
}

TEST_F(TrainerTest, TwoRunsDoNotWriteToOneFolderAtOnce) {
  const LoadedConfig loaded = Load({"training.steps=2"});
  Console silent(nullptr, /*is_terminal=*/false);
  auto first =
      Trainer::Make(rank(), loaded, TestModelTools(), &silent, nullptr);
  ASSERT_TRUE(first.ok()) << first.status();
  const Rank other = MakeSoloRank(*device_);
  auto second =
      Trainer::Make(other, loaded, TestModelTools(), &silent, nullptr);
  EXPECT_EQ(second.status().message(),
            "training.out_dir: another run is writing to '" + dir_.File("run") +
                "'; wait until it ends, or choose another folder");
  EXPECT_TRUE((*first)->Run().ok());
  first->reset();
  EXPECT_TRUE(
      Trainer::Make(other, loaded, TestModelTools(), &silent, nullptr).ok());
}

TEST_F(TrainerTest, OneRankSaysWhichKeysItDoesNotRead) {
  const std::string words = "changes nothing on one rank";
  const Outcome sharded =
      Run(Load({"zero_optimization.stage=1", "training.steps=1"}));
  EXPECT_THAT(sharded.printed, HasSubstr("note: zero_optimization.stage " +
                                         words + ", which has no other"));
  EXPECT_THAT(Run(Load({"training.steps=1"})).printed, Not(HasSubstr(words)));
}

TEST_F(TrainerTest, TheMemoryBreakdownShowsPeaks) {
  const Outcome outcome =
      Run(Load({"memory_breakdown=true", "training.steps=1"}));
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_NE(outcome.printed.find("  peak: parameters"), std::string::npos);
  EXPECT_EQ(outcome.printed.find("activations 0.0"), std::string::npos)
      << outcome.printed;
}

TEST_F(TrainerTest, ARehearsalShowsTheMemoryOfEveryAction) {
  const auto rehearsal =
      RehearseRun(rank(), Load({}).config, TestModelTools(), {.train = true});
  ASSERT_TRUE(rehearsal.ok()) << rehearsal.status();
  MemoryLedger::ByCategory highest = {};
  int64_t peak = 0;
  std::string peak_action;
  std::vector<std::string> actions;
  for (const Rehearsal::Moment& moment : rehearsal->timeline) {
    actions.push_back(moment.action);
    const int64_t total = absl::c_accumulate(moment.bytes, int64_t{0});
    if (total <= peak) continue;
    peak = total;
    peak_action = moment.action;
    highest = moment.bytes;
  }
  EXPECT_EQ(peak, rehearsal->ledger.total_peak_bytes());
  EXPECT_EQ(highest, rehearsal->ledger.at_peak());
  EXPECT_EQ(peak_action, rehearsal->peak_action);
  EXPECT_EQ(absl::c_count(actions, "Forward(block.0)"), 2);  // micro-batches
  EXPECT_EQ(actions.back(), "Update(head)");
}

TEST_F(TrainerTest, RecomputeIsCountedInHfuOnly) {
  ASSERT_NE(Hash({"activation_checkpointing.enabled=true", "training.steps=2"}),
            "");
  const LoadedConfig loaded = Load({});
  const double more =
      RecomputedFlopsPerToken(loaded.config.model, 32, Recompute::kFull) /
      FlopsPerToken(loaded.config.model, 32);
  auto lines = Steps();
  lines.push_back(nlohmann::json::parse(dir_.Read("run/summary.json")));
  ASSERT_EQ(lines.size(), 3u);
  for (const auto& line : lines) {
    EXPECT_NEAR(line["hfu"], line["mfu"].get<double>() * (1 + more), 1e-12);
  }
}

TEST_F(TrainerTest, ANewRunTidiesUpAfterOneThatWasKilled) {
  ASSERT_NE(Hash({"training.steps=2"}), "");
  const std::string before = dir_.Read("run/final/model.safetensors");
  // As a kill leaves them: half a summary, half a folder, and an earlier
  // folder that was moved away. No process has this id.
  dir_.Write("run/summary.json.zero-tmp.2147483647.0", "{");
  dir_.Write(
      "run/final.zero-tmp.2147483647.1/model.safetensors.zero-tmp.2147483647.2",
      "half");
  dir_.Write("run/final/tokenizer.json", "a user's");
  dir_.Write("run/report.tmp.2024.11/table.txt", "a user's");
  std::filesystem::rename(dir_.File("run/final"),
                          dir_.File("run/final.zero-old.2147483647.3"));
  const Outcome outcome = Run(Load({"training.steps=3"}), [&](Trainer&) {
    EXPECT_EQ(dir_.Read("run/final/model.safetensors"), before);
  });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_NE(dir_.Read("run/final/model.safetensors"), before);
  EXPECT_EQ(dir_.Read("run/final/tokenizer.json"), "a user's");
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(dir_.File("run"))) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names,
            (std::vector<std::string>{"config.json", "final", "metrics.jsonl",
                                      "report.tmp.2024.11", "summary.json"}));
}

TEST_F(TrainerTest, FinalStartsARunWithTheSameParameters) {
  const struct {
    const char* precision;
    const char* rounding;
    bool hash_is_of_final;
  } cases[] = {
      {"bf16.enabled=false", "data_types.stochastic_rounding=false", true},
      // A session that does not train has no master weights: in bf16 its hash
      // is that of the rounded values.
      {"bf16.enabled=true", "data_types.stochastic_rounding=false", false},
      // The parameters that were trained and evaluated, not masters.
      {"bf16.enabled=true", "data_types.stochastic_rounding=true", true}};
  for (const auto& [precision, rounding, hash_is_of_final] : cases) {
    SCOPED_TRACE(absl::StrCat(precision, " ", rounding));
    const std::string hash = Hash({precision, rounding, "training.steps=3"});
    const LoadedConfig again =
        Load({absl::StrCat("model={\"from_pretrained\": \"",
                           dir_.File("run/final"), "\"}"),
              precision},
             "again");
    auto session = Session::Make(rank(), again.config, TestModelTools(),
                                 {.evaluate = true});
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_EQ(*(*session)->executor().states().Hash() == hash,
              hash_is_of_final);
    const auto data = OpenRunData(again.config, false, 1);
    ASSERT_TRUE(data.ok()) << data.status();
    const auto loader = MakeEvalLoader(again.config, /*world=*/1, *data);
    ASSERT_TRUE(loader.ok());
    const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
    EXPECT_EQ(**MeanLoss((*session)->executor(), rank_, *loader,
                         []() -> absl::StatusOr<bool> { return false; }),
              json["validation_loss"].get<double>());
  }
}

TEST_F(TrainerTest, TheSameConfigGivesTheSameHash) {
  device_ = MakeCpuDevice(2);
  const std::string base = Hash({});
  EXPECT_EQ(Hash({}), base);
  EXPECT_EQ(Hash({"activation_checkpointing.enabled=true"}), base);
  EXPECT_NE(Hash({"training.seed=99"}), base);
  EXPECT_NE(Hash({"optimizer.params.lr=0.011"}), base);
}

TEST_F(TrainerTest, EvaluationSamplesAndPrintingChangeNoBit) {
  const std::string base = Hash(
      {"data.validation_fraction=0.1", "training.sample.tokens=0"}, "base");
  EXPECT_EQ(Hash({"training.eval_every=1", "training.sample_every=2",
                  "training.sample.temperature=1.3", "steps_per_print=1",
                  "wall_clock_breakdown=true", "memory_breakdown=true",
                  "training.save_final=false"},
                 "noisy"),
            base);
  const auto quiet = Steps("base"), noisy = Steps("noisy");
  ASSERT_EQ(quiet.size(), noisy.size());
  for (size_t i = 0; i < quiet.size(); ++i) {
    EXPECT_EQ(quiet[i]["loss"], noisy[i]["loss"]);
    EXPECT_EQ(quiet[i]["grad_norm"], noisy[i]["grad_norm"]);
  }
}

TEST_F(TrainerTest, EveryPrecisionLearnsAndRepeats) {
  for (const char* precision :
       {"bf16.enabled=true", "fp16={\"enabled\": true}"}) {
    // At the rate of the other tests this model's loss has spikes.
    const std::string rate = "optimizer.params.lr=0.003";
    const std::string hash = Hash({precision, rate}, "half");
    EXPECT_EQ(Hash({precision, rate, "activation_checkpointing.enabled=true"}),
              hash)
        << precision;
    const auto steps = Steps("half");
    EXPECT_LT(steps.back()["loss"].get<double>(),
              steps.front()["loss"].get<double>() - 0.5)
        << precision;
  }
}

TEST_F(TrainerTest, AStopEndsAtAStepBoundaryWithEverythingWritten) {
  std::atomic<bool> stop{false};
  int64_t updates = 0;
  const Outcome outcome = Run(
      Load({"training.steps=100000", "training.eval_every=3"}),
      [&](Trainer& trainer) {
        trainer.session().executor().clock().set_hook(
            [&](const Action& action, bool done) {
              // Asked in the middle of the fifth step.
              if (done || action.kind != ActionKind::kNorm) return;
              if (++updates == 5) stop = true;
            });
      },
      &stop);
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_TRUE(outcome.summary->interrupted);
  EXPECT_EQ(outcome.summary->steps, 5);
  EXPECT_EQ(Steps().size(), 5u);
  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_EQ(json["interrupted"], true);
  EXPECT_EQ(json["steps"], 5);
  EXPECT_EQ(json["total_steps"], 100000);
  EXPECT_EQ(json["validation_step"], 3);  // not of the last step
  EXPECT_NE(dir_.Read("run/final/model.safetensors"), "");
  // The five steps were those of any other run.
  EXPECT_EQ(json["parameters_hash"], Hash({"training.steps=5"}, "five"));
}

// A mistaken rerun that is interrupted costs nothing.
TEST_F(TrainerTest, AnInterruptedRunKeepsTheWeightsOfTheRunBeforeIt) {
  ASSERT_TRUE(Run(Load({"training.steps=3"})).summary.ok());
  const std::string weights = dir_.Read("run/final/model.safetensors");
  std::atomic<bool> stop{false};
  const auto stop_early = [&](Trainer& trainer) {
    trainer.session().executor().clock().set_hook(
        [&](const Action& action, bool done) {
          stop = stop || (!done && action.kind == ActionKind::kNorm);
        });
  };
  for (int i = 0; i < 2; ++i) {
    stop = false;
    const Outcome again =
        Run(Load({"training.steps=100000"}), stop_early, &stop);
    ASSERT_TRUE(again.summary.ok()) << again.summary.status();
    EXPECT_TRUE(again.summary->interrupted);
    EXPECT_EQ(dir_.Read("run/final/model.safetensors"), weights);
    EXPECT_THAT(again.printed, HasSubstr("run/final still holds the weights of "
                                         "an earlier run"));
  }
  // One without a checkpoint has no other place for what it learned.
  stop = false;
  ASSERT_TRUE(
      Run(Load({"training.steps=100000", "training.save_interrupted=false"}),
          stop_early, &stop)
          .summary.ok());
  EXPECT_NE(dir_.Read("run/final/model.safetensors"), weights);
}

TEST_F(TrainerTest, AStopBeforeTheFirstStepStillWritesASummary) {
  const std::atomic<bool> stop{true};
  const Outcome outcome = Run(Load({}), {}, &stop);
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_EQ(outcome.summary->steps, 0);
  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_TRUE(json["first_loss"].is_null());
  EXPECT_TRUE(json["final_loss"].is_null());
  EXPECT_EQ(json["steps"], 0);
}

// Sets the first two elements of the gradient of `name` to `value` in every
// step from `from` to `to` (counted from 1), before its norm is taken.
void Poison(Trainer& trainer, const std::string& name, int from, int to,
            float value = std::numeric_limits<float>::infinity()) {
  for (const Parameter* parameter : trainer.session().model().AllParameters()) {
    if (parameter->name != name) continue;
    trainer.session().executor().clock().set_hook(
        [=, step = 0](const Action& action, bool done) mutable {
          if (done || action.kind != ActionKind::kNorm) return;
          ++step;
          if (step < from || step > to) return;
          const Tensor& grad = parameter->weight.sink->grad;
          grad.As<float>()[0] = grad.As<float>()[1] = value;
        });
  }
}

// The same on one of several ranks: in the first parameter of a unit, right
// after its backward pass and before its reduction.
void OverflowInBackward(Trainer& trainer, int unit, int from, int to) {
  const Parameter* parameter =
      trainer.session().model().units()[unit]->parameters()[0].get();
  trainer.session().executor().clock().set_hook(
      [=, step = 1](const Action& action, bool done) mutable {
        if (!done) return;
        if (action.kind == ActionKind::kNorm) ++step;
        if (action.kind != ActionKind::kBackward || action.index != unit ||
            step < from || step > to) {
          return;
        }
        parameter->weight.sink->grad.As<float>()[0] =
            std::numeric_limits<float>::infinity();
      });
}

TEST_F(TrainerTest, TooManySkipsInARowEndTheRunWithTheTensorsName) {
  const Outcome outcome =
      Run(Load({"training.max_consecutive_skips=3"}), [](Trainer& trainer) {
        Poison(trainer, "block.1.mlp.fc.weight", 4, 1000);
      });
  ASSERT_FALSE(outcome.summary.ok());
  EXPECT_EQ(outcome.summary.status().code(), absl::StatusCode::kAborted);
  const std::string message(outcome.summary.status().message());
  EXPECT_NE(message.find("step 6: 3 steps in a row"), std::string::npos)
      << message;
  EXPECT_NE(message.find("block.1.mlp.fc.weight is not finite"),
            std::string::npos);
  EXPECT_EQ(Steps().size(), 6u);
  EXPECT_EQ(Steps()[3]["skipped"], true);
  EXPECT_TRUE(Steps()[3]["grad_norm"].is_null());
  // The summary has its progress and why it ended.
  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_EQ(json["error"], message);
  EXPECT_EQ(json["interrupted"], false);
  EXPECT_EQ(json["steps"], 6);
  EXPECT_EQ(json["total_steps"], 12);
  EXPECT_FALSE(std::filesystem::exists(dir_.File("run/final")));
}

TEST_F(TrainerTest, AnUpdateBeforeTheNormOfABadGradientEndsTheRun) {
  const std::string offload = "zero_optimization.offload_optimizer";
  // With a share of the host, what the device updates is still that of the step
  // before, and finite: a mixture, which is not saved.
  for (const char* ratio : {"1", "0.4"}) {
    const Outcome outcome =
        Run(Load({"zero_optimization.stage=2", "gradient_clipping=0",
                  offload + R"(={"device": "cpu", "update_before_norm": true})",
                  absl::StrCat(offload, ".ratio=", ratio)}),
            [](Trainer& trainer) { OverflowInBackward(trainer, 1, 4, 4); });
    ASSERT_FALSE(outcome.summary.ok());
    EXPECT_EQ(outcome.summary.status().code(), absl::StatusCode::kDataLoss);
    const std::string message(outcome.summary.status().message());
    EXPECT_NE(message.find("step 4: a gradient of block.0."), std::string::npos)
        << message;
    EXPECT_NE(message.find("Resume from the last checkpoint"),
              std::string::npos);
    EXPECT_EQ(message.find("final.failed"), std::string::npos) << message;
    EXPECT_EQ(Steps().size(), 3u);
    EXPECT_FALSE(std::filesystem::exists(dir_.File("run/final")));
    EXPECT_FALSE(std::filesystem::exists(dir_.File("run/final.failed")));
  }
}

TEST_F(TrainerTest, ANormThatOverflowsHasNoTensorToBlame) {
  // Each element is finite; the norm, 3.4e38 * sqrt(2), is not.
  const Outcome outcome =
      Run(Load({"training.max_consecutive_skips=2"}), [](Trainer& trainer) {
        Poison(trainer, "block.1.mlp.fc.weight", 3, 1000,
               std::numeric_limits<float>::max());
      });
  const std::string reason =
      "all gradients are finite, but their norm is beyond fp32";
  EXPECT_NE(outcome.printed.find("step 3 skipped: " + reason),
            std::string::npos)
      << outcome.printed;
  ASSERT_EQ(outcome.summary.status().code(), absl::StatusCode::kAborted);
  const std::string message(outcome.summary.status().message());
  EXPECT_NE(message.find("step 4: 2 steps in a row"), std::string::npos);
  EXPECT_NE(message.find(reason), std::string::npos) << message;
  EXPECT_NE(message.find("Lower optimizer.params.lr"), std::string::npos);
}

TEST_F(TrainerTest, AnErrorWhileSavingIsInTheSummaryToo) {
  const Outcome outcome = Run(Load({"training.steps=2"}), [&](Trainer&) {
    dir_.Write("run/final", "a file in the way");
  });
  ASSERT_EQ(outcome.summary.status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_EQ(json["error"], std::string(outcome.summary.status().message()));
  EXPECT_EQ(json["steps"], 2);
  EXPECT_EQ(json["interrupted"], false);
}

TEST_F(TrainerTest, ADivergedRunFailsAndReplacesNoGoodWeights) {
  ASSERT_NE(Hash({"training.steps=2"}), "");
  const std::string good = dir_.Read("run/final/model.safetensors");
  const char* const diverging[][2] = {
      // The loss of the only step is fine, the resulting weights are not.
      {"training.steps=1", "optimizer.params.lr=1e30"},
      {"training.steps=4", "optimizer.params.lr=1e30"},
      {"training.steps=4",
       "optimizer={\"type\": \"SGD\", \"params\": "
       "{\"lr\": 1e30}}"}};
  for (const auto& [steps, rate] : diverging) {
    SCOPED_TRACE(std::string(steps) + " " + rate);
    const Outcome outcome = Run(
        Load({steps, rate, "steps_per_print=1", "training.sample.tokens=0"}));
    EXPECT_EQ(outcome.summary.status().code(), absl::StatusCode::kAborted);
    const std::string message(outcome.summary.status().message());
    EXPECT_NE(message.find("the run diverged"), std::string::npos) << message;
    EXPECT_NE(message.find("Lower optimizer.params.lr"), std::string::npos);
    EXPECT_EQ(outcome.printed.find("-nan"), std::string::npos)
        << outcome.printed;
    EXPECT_EQ(dir_.Read("run/final/model.safetensors"), good);
    const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
    EXPECT_EQ(json["error"], message);
  }
}

TEST_F(TrainerTest, AStreakOfSkipsIsToldInFewLines) {
  const Outcome outcome = Run(Load({}), [](Trainer& trainer) {
    Poison(trainer, "embedding.wpe", 2, 10);
  });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  int lines = 0;
  for (absl::string_view line : absl::StrSplit(outcome.printed, '\n')) {
    lines += line.find("skipped") != absl::string_view::npos;
  }
  EXPECT_EQ(lines, 4) << outcome.printed;
  EXPECT_NE(outcome.printed.find("step 9 skipped, the last 8 in a row: "),
            std::string::npos);
}

TEST_F(TrainerTest, OneSkippedStepAtTheEndFailsNoRun) {
  const Outcome outcome = Run(Load({}), [](Trainer& trainer) {
    Poison(trainer, "embedding.wpe", 12, 12);
  });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_EQ(outcome.summary->weights, "final");
}

TEST_F(TrainerTest, ALossThatIsNotFiniteInTheLastStepAloneFailsNoRun) {
  const Outcome outcome = Run(Load({}), [](Trainer& trainer) {
    float* const value =
        trainer.session().model().AllParameters()[0]->weight.value.As<float>();
    trainer.session().executor().clock().set_hook(
        [value, good = *value, taken = 0](const Action& action,
                                          bool done) mutable {
          const bool last = taken == 11;
          if (last && !done && action.kind == ActionKind::kForward) {
            if (!std::isnan(*value)) good = *value;
            *value = std::numeric_limits<float>::quiet_NaN();
          }
          if (!done || action.kind != ActionKind::kNorm) return;
          if (last) *value = good;
          ++taken;
        });
  });
  EXPECT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  EXPECT_TRUE(Steps()[11]["loss"].is_null());
  EXPECT_EQ(Steps()[11]["skipped"], true);
}

TEST_F(TrainerTest, TwoSkippedStepsAtTheEndAreADivergence) {
  const Outcome outcome = Run(Load({}), [](Trainer& trainer) {
    Poison(trainer, "embedding.wpe", 11, 12);
  });
  EXPECT_THAT(std::string(outcome.summary.status().message()),
              HasSubstr("the run diverged: 2 steps in a row were skipped, "
                        "counted at its last step, 12"));
}

TEST_F(TrainerTest, ASkipThatLowersTheFp16ScaleIsNoDivergence) {
  const Outcome outcome =
      Run(Load({"fp16={\"enabled\": true, \"initial_scale_power\": 8}"}),
          [](Trainer& trainer) { Poison(trainer, "embedding.wpe", 12, 12); });
  EXPECT_TRUE(outcome.summary.ok()) << outcome.summary.status();
}

TEST_F(TrainerTest, AFullDiskForMetricsDoesNotCostTheWeights) {
  ASSERT_NE(Hash({"training.steps=2"}), "");
  const std::string good = dir_.Read("run/final/model.safetensors");
  std::filesystem::remove(dir_.File("run/metrics.jsonl"));
  std::filesystem::create_symlink("/dev/full", dir_.File("run/metrics.jsonl"));
  for (const char* steps : {"training.steps=1", "training.steps=12"}) {
    const Outcome outcome = Run(Load({steps}));
    EXPECT_EQ(outcome.summary.status().code(),
              absl::StatusCode::kResourceExhausted);
    const std::string message(outcome.summary.status().message());
    EXPECT_NE(message.find("metrics.jsonl"), std::string::npos) << message;
    EXPECT_NE(message.find("the weights after step 1 are in "),
              std::string::npos);
    EXPECT_EQ(dir_.Read("run/final/model.safetensors"), good);
    const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
    EXPECT_EQ(json["weights"], "final.failed");
    EXPECT_EQ(json["error"], message);
    const LoadedConfig saved =
        Load({absl::StrCat("model={\"from_pretrained\": \"",
                           dir_.File("run/final.failed"), "\"}")});
    auto session = Session::Make(rank(), saved.config, TestModelTools(),
                                 {.evaluate = true});
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_EQ(*(*session)->executor().states().Hash(), json["parameters_hash"]);
  }
}

// Only rank 0 sees its files; all ranks then save, and all report its error.
TEST_F(TrainerTest, AnErrorOfRankZerosFilesIsTheErrorOfAllRanks) {
  for (const char* stage : {"0", "3"}) {
    for (const char* in_the_way : {"metrics.jsonl", "final"}) {
      SCOPED_TRACE(absl::StrCat("stage ", stage, " ", in_the_way));
      const std::string out = absl::StrCat("stage", stage, in_the_way);
      if (in_the_way[0] == 'm') {
        std::filesystem::create_directory(dir_.File(out));
        std::filesystem::create_symlink("/dev/full",
                                        dir_.File(out + "/metrics.jsonl"));
      } else {
        dir_.Write(out + "/final", "a file");
      }
      const absl::Status status =
          RunRanks(2, {absl::StrCat("zero_optimization.stage=", stage)}, out);
      EXPECT_EQ(status.message().substr(0, 8), "rank 0: ") << status;
      EXPECT_NE(status.message().find(in_the_way), std::string::npos) << status;
      EXPECT_NE(status.message().find("final.failed"), std::string::npos);
      const auto json = nlohmann::json::parse(dir_.Read(out + "/summary.json"));
      EXPECT_EQ(json["weights"], "final.failed");
      EXPECT_NE(json["parameters_hash"], "");
    }
  }
}

// For any failing rank and fault: earlier steps are in the metrics, the summary
// has the error, and there are no weights, since no rank has all of them.
TEST_F(TrainerTest, ALostRankIsInTheSummaryWithStepAndCollective) {
  struct Case {
    Fault fault;
    int stage;
  };
  for (const Case& c :
       {Case{{0, 5, FaultKind::kThrow}, 0}, Case{{1, 5, FaultKind::kThrow}, 3},
        Case{{1, 5, FaultKind::kMismatch}, 1},
        Case{{0, 5, FaultKind::kMismatch}, 2},
        Case{{1, 5, FaultKind::kStop}, 3}, Case{{0, 5, FaultKind::kStop}, 2}}) {
    const std::string out =
        absl::StrCat("stage", c.stage, "rank", c.fault.rank, "kind",
                     static_cast<int>(c.fault.kind));
    SCOPED_TRACE(out);
    FaultInjector injector(c.fault, kStepCollective);
    LocalRanksOptions options;
    if (c.fault.kind == FaultKind::kStop) {
      options.local.timeout = absl::Seconds(3);
    }
    options.wrap = [&](int rank, const std::string& channel, auto end) {
      return injector.Wrap(rank, channel, std::move(end));
    };
    options.on_hang = [&](const absl::Status&) { injector.Release(); };
    const absl::Status status =
        RunRanks(2, {absl::StrCat("zero_optimization.stage=", c.stage)}, out,
                 {}, options);
    const auto summary =
        nlohmann::json::parse(dir_.Read(out + "/summary.json"));
    for (const std::string& message :
         {std::string(status.message()), std::string(summary["error"])}) {
      EXPECT_THAT(message, HasSubstr("step 5"));
      EXPECT_THAT(message, HasSubstr(absl::StrCat("rank ", c.fault.rank)));
      // Any collective of a hanging rank may be missed first.
      EXPECT_THAT(message, HasSubstr(c.fault.kind == FaultKind::kStop
                                         ? "did not arrive at #"
                                         : "reduce_scatter \"head\""));
    }
    EXPECT_EQ(summary["steps"], 4);
    EXPECT_EQ(summary["weights"], "");
    EXPECT_EQ(Steps(out).size(), 4u);
    EXPECT_FALSE(std::filesystem::exists(dir_.File(out + "/final")));
    EXPECT_FALSE(std::filesystem::exists(dir_.File(out + "/final.failed")));
  }
}

// Records the names of the collectives at one rank's end of a channel.
class Recording final : public CommunicatorWrapper {
 public:
  Recording(std::unique_ptr<Communicator> inner,
            std::vector<std::string>* names)
      : CommunicatorWrapper(std::move(inner)), names_(names) {}
  void Run(Stream& stream, Collective collective) override {
    names_->push_back(collective.name);
    inner_->Run(stream, std::move(collective));
  }

 private:
  std::vector<std::string>* const names_;
};

TEST_F(TrainerTest, AStepAgreesOnceBeforeItAndOnceBehindItsReductions) {
  std::vector<std::string> names;
  LocalRanksOptions options;
  options.wrap = [&](int rank, const std::string& channel,
                     auto end) -> std::unique_ptr<Communicator> {
    if (rank != 0 || channel != "scalar") return end;
    return std::make_unique<Recording>(std::move(end), &names);
  };
  // Without the ranks' check of a checkpoint's folder.
  ASSERT_TRUE(
      RunRanks(2,
               {"training.steps=3", "data.validation_fraction=0",
                "training.sample.tokens=0", "training.save_interrupted=false"},
               "run", {}, options)
          .ok());
  ASSERT_GE(names.size(), 7u);
  names.resize(7);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "stop, valid targets", "schedule", "norm and loss",
                       "stop, valid targets", "norm and loss",
                       "stop, valid targets", "norm and loss"}));

  // A step's waits are in its line, and their sum in the summary.
  const auto steps = Steps();
  ASSERT_EQ(steps.size(), 3u);
  double total = 0;
  for (const auto& step : steps) {
    const auto& waited = step["communication"]["waited_ms"];
    double sum = 0;
    for (const Channel channel : kWaits) {
      sum += waited[ChannelName(channel)].get<double>();
    }
    EXPECT_EQ(waited.size(), std::size(kWaits));
    EXPECT_GT(waited["scalar"], 0);
    EXPECT_GT(waited["reduce"], 0);
    EXPECT_EQ(waited["gather"], 0);
    EXPECT_NEAR(step["communication"]["exposed_ms"].get<double>(), sum, 1e-9);
    total += sum;
  }
  const auto summary = nlohmann::json::parse(dir_.Read("run/summary.json"));
  EXPECT_NEAR(summary["exposed_seconds"].get<double>(), 1e-3 * total, 1e-9);
}

TEST_F(TrainerTest, ARunOfSecondsMeasuresTheMachineOnce) {
  ModelTools tools = TestModelTools();
  int measured = 0;
  tools.product_rate = [&](Device&, DType, absl::Span<char>) -> ProductRate {
    ++measured;
    return {.flops = 1e13, .size = 1024};
  };
  Console silent(nullptr, /*is_terminal=*/false);
  auto trainer = Trainer::Make(rank(), Load({"training.steps=1"}), tools,
                               &silent, nullptr);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  EXPECT_TRUE((*trainer)->Run().ok());
  EXPECT_EQ(measured, 1);
}

TEST_F(TrainerTest, RanksOfAProcessCheckTheDataAndMeasureTheMachineOnce) {
  const LoadedConfig loaded = Load({});
  RunStart start;
  ModelTools tools = TestModelTools();
  std::atomic<int> measured = 0;
  tools.product_rate = [&](Device&, DType, absl::Span<char>) -> ProductRate {
    return {.flops = 1.0 * ++measured, .size = 1024};
  };
  std::vector<const RunData*> data(3);
  std::vector<double> rates(3);
  const absl::Status status = RunLocalRanks(
      3, {},
      [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
        return MakeCpuDevice(1);
      },
      [&](const Rank& rank) -> absl::Status {
        ZERO_ASSIGN_OR_RETURN(data[rank.rank()], start.Data(loaded.config, 1));
        rates[rank.rank()] =
            start.Product(tools, *rank.device, DType::kF32).flops;
        return absl::OkStatus();
      });
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_NE(data[0], nullptr);
  EXPECT_GT(data[0]->train->size(), 0);
  EXPECT_EQ(data[1], data[0]);
  EXPECT_EQ(data[2], data[0]);
  EXPECT_EQ(rates, std::vector<double>(3, 1));

  // An error on one is an error on all.
  dir_.Write("text.txt", std::string(1000, '\0'));
  RunStart broken;
  const absl::Status first = broken.Data(loaded.config, 1).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kInvalidArgument) << first;
  dir_.Write("text.txt", SmallText());
  EXPECT_EQ(broken.Data(loaded.config, 1).status(), first);
}

TEST_F(TrainerTest, ASkippedStepIsTriedAgainAtItsRateAndForgotten) {
  const std::vector<std::string> warmup = {
      "training.max_consecutive_skips=3",
      "scheduler={\"type\": \"WarmupLR\", \"params\": "
      "{\"warmup_num_steps\": 10, \"warmup_type\": \"linear\"}}"};
  const Outcome outcome = Run(Load(warmup), [](Trainer& trainer) {
    Poison(trainer, "embedding.wpe", 3, 4);
  });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  const auto steps = Steps();
  ASSERT_EQ(steps.size(), 12u);
  // Optimizer steps: 1, 2, 3 (skipped), 3 (skipped), 3, 4 ...
  const double expected[] = {1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10};
  for (int i = 0; i < 12; ++i) {
    EXPECT_NEAR(steps[i]["lr"], 0.01 * expected[i] / 10, 1e-12) << i;
    EXPECT_EQ(steps[i].contains("skipped"), i == 2 || i == 3) << i;
  }
  EXPECT_NE(
      outcome.printed.find("step 3 skipped: the gradient of embedding.wpe "
                           "is not finite"),
      std::string::npos);
}

TEST_F(TrainerTest, TheFp16ScaleFollowsItsTable) {
  const Outcome outcome = Run(
      Load({"fp16={\"enabled\": true, \"initial_scale_power\": 8, "
            "\"loss_scale_window\": 3, \"hysteresis\": 2}"}),
      [](Trainer& trainer) { Poison(trainer, "block.0.ln_1.weight", 2, 4); });
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  // The scale that each step ran with. Overflows at 2, 3 and 4: the first
  // only uses up the hysteresis. Then it doubles after three good steps.
  const double scales[] = {256, 256, 256, 128, 64,  64,
                           64,  128, 128, 128, 256, 256};
  const auto steps = Steps();
  ASSERT_EQ(steps.size(), 12u);
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(steps[i]["loss_scale"], scales[i]) << "step " << i + 1;
  }
}

// Some ranks overflow, or all: every rank skips, and the scale follows.
TEST_F(TrainerTest, AnOverflowOnOneRankScalesAllRanksDown) {
  std::set<std::string> hashes;
  for (int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    const std::string out = absl::StrCat("stage", stage);
    const absl::Status status =
        RunRanks(2,
                 {"fp16={\"enabled\": true, \"initial_scale_power\": 8, "
                  "\"loss_scale_window\": 3, \"hysteresis\": 2}",
                  absl::StrCat("zero_optimization.stage=", stage)},
                 out, [](const Rank& rank, Trainer& trainer) {
                   const int first = rank.rank() == 0 ? 4 : 2;
                   OverflowInBackward(trainer, /*unit=*/1, first, 4);
                 });
    ASSERT_TRUE(status.ok()) << status;
    const double scales[] = {256, 256, 256, 128, 64,  64,
                             64,  128, 128, 128, 256, 256};
    const auto steps = Steps(out);
    ASSERT_EQ(steps.size(), 12u);
    for (int i = 0; i < 12; ++i) {
      EXPECT_EQ(steps[i]["loss_scale"], scales[i]) << "step " << i + 1;
      EXPECT_EQ(steps[i].contains("skipped"), i >= 1 && i <= 3) << i;
    }
    hashes.insert(nlohmann::json::parse(
        dir_.Read(out + "/summary.json"))["parameters_hash"]);
  }
  EXPECT_EQ(hashes.size(), 1u);
}

// A token's gradient is of the size loss scale / tokens of the step. In fp16 it
// is flushed to zero if the step has many, unless the scale grows with them.
TEST_F(TrainerTest, ALargeGlobalBatchLosesNoFp16Gradient) {
  const auto norm = [&](int batch, const std::string& precision) {
    const absl::Status status =
        RunRanks(2,
                 {absl::StrCat("train_batch_size=", batch), "training.steps=1",
                  "training.sample.tokens=0", precision},
                 "run");
    EXPECT_TRUE(status.ok()) << status;
    return Steps()[0]["grad_norm"].get<double>();
  };
  const auto fp16 = [](double scale) {
    return absl::StrCat("fp16={\"enabled\": true, \"loss_scale\": ", scale,
                        "}");
  };
  const char* const fp32 = "fp16.enabled=false";
  constexpr double kScale = 1.0 / 256;
  for (const int batch : {4, 256}) {
    const double exact = norm(batch, fp32);
    // Measured: 0.0007 and 0.0001 of it.
    EXPECT_NEAR(norm(batch, fp16(kScale)), exact, 0.01 * exact) << batch;
    EXPECT_EQ(Steps()[0]["loss_scale"], kScale) << "the user's";
  }
  // With the scale of the mean over the batch, 0.31 of it would be left.
  EXPECT_LT(norm(256, fp16(kScale / 256)), 0.5 * norm(256, fp32));
}

// ---- Learning rate --------------------------------------------------------

TEST_F(TrainerTest, TheRateIsRightAtTheFirstStepEndOfWarmUpAndLastStep) {
  const std::vector<double> linear =
      Rates({"scheduler={\"type\": \"WarmupDecayLR\", \"params\": "
             "{\"warmup_num_steps\": 4, \"warmup_type\": \"linear\"}}"});
  ASSERT_EQ(linear.size(), 12u);
  EXPECT_NEAR(linear[0], 0.0025, 1e-15);     // step 1 moves
  EXPECT_NEAR(linear[3], 0.01, 1e-15);       // end of warm-up
  EXPECT_NEAR(linear[4], 0.01, 1e-15);       // decay starts at its top
  EXPECT_NEAR(linear[11], 0.01 / 8, 1e-15);  // and the last step still moves

  const std::vector<double> constant = Rates({});
  for (double rate : constant) EXPECT_EQ(rate, 0.01);

  // A run shorter than its warm-up.
  const std::vector<double> shorter =
      Rates({"training.steps=3",
             "scheduler={\"type\": \"WarmupLR\", \"params\": "
             "{\"warmup_num_steps\": 1000}}"});
  ASSERT_EQ(shorter.size(), 3u);
  EXPECT_GT(shorter[0], 0);
  EXPECT_GT(shorter[2], shorter[1]);
  EXPECT_LT(shorter[2], 0.01);
}

TEST_F(TrainerTest, LinearScalingWarmsUpFromTheBaseRate) {
  // Batch 8 over base 2: four times the rate, reached after 4 steps.
  const std::vector<double> rates =
      Rates({"optimizer.params.lr=0.001",
             "lr_scaling={\"rule\": \"linear\", \"base_batch_size\": 2, "
             "\"warmup_steps\": 4}"});
  const double expected[] = {0.001, 0.00175, 0.0025, 0.00325, 0.004, 0.004};
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(rates[i], expected[i], 1e-15) << i;
  EXPECT_NEAR(rates[11], 0.004, 1e-15);
}

// ---- Data -----------------------------------------------------------------

TEST_F(TrainerTest, TheValidationSplitIsDisjointAndCoversTheText) {
  const LoadedConfig loaded = Load({"data.validation_fraction=0.25"});
  const auto data = OpenRunData(loaded.config, true, 1);
  ASSERT_TRUE(data.ok()) << data.status();
  auto read = [](const TokenSource& source) {
    std::vector<int32_t> ids(source.size());
    source.Read(0, ids.size(), ids.data());
    return std::string(ids.begin(), ids.end());
  };
  const std::string train = read(*data->train);
  const std::string validation = read(*data->validation);
  EXPECT_EQ(train + validation, SmallText());
  EXPECT_NEAR(validation.size(), 0.25 * SmallText().size(), 1);
}

TEST_F(TrainerTest, EpochsBecomeSteps) {
  const Outcome outcome = Run(Load(
      {absl::StrCat("training={\"epochs\": 0.5, \"out_dir\": \"",
                    dir_.File("run"), "\", \"sample\": {\"tokens\": 0}}")}));
  ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
  const int64_t kept =
      SmallText().size() - std::llround(0.1 * SmallText().size());
  const int64_t per_epoch = (kept - 1) / 32 / 8;
  EXPECT_EQ(outcome.summary->steps, (per_epoch + 1) / 2);
}

TEST_F(TrainerTest, OneOfAThingIsNoPlural) {
  const std::string printed =
      Run(Load({"training.steps=1", "training.save_every=1",
                "train_batch_size=1", "train_micro_batch_size_per_gpu=1",
                "model.n_layer=1", "model.n_head=1"}))
          .printed;
  for (const char* text :
       {" 1 sequence = 1 micro-batch x 1 accumulation x 1 rank; ",
        " 1 layer, width ", " 1 head (1 kv), ", " every step; "}) {
    EXPECT_THAT(printed, HasSubstr(text));
  }
}

// Only the data determines training.epochs and warmup_epochs in steps.
TEST_F(TrainerTest, TheScheduleIsHeldAgainstTheLengthThatTheDataGives) {
  const int64_t kept =
      SmallText().size() - std::llround(0.1 * SmallText().size());
  const int64_t per_epoch = (kept - 1) / 32 / 8;
  const std::vector<std::string> epochs = {"training.steps=auto",
                                           "training.epochs=0.1"};
  const int64_t steps = (per_epoch + 9) / 10;
  auto with = [](std::vector<std::string> overrides, const std::string& more) {
    overrides.push_back(more);
    return overrides;
  };
  const Outcome warm = Run(Load(with(epochs, "scheduler.type=WarmupLR")));
  ASSERT_TRUE(warm.summary.ok()) << warm.summary.status();
  EXPECT_EQ(warm.summary->steps, steps);
  EXPECT_NE(warm.printed.find(absl::StrCat(
                "note: scheduler.params.warmup_num_steps 1000: the learning "
                "rate rises until the run ends, at step ",
                steps, "\n")),
            std::string::npos)
      << warm.printed;
  const Outcome scaled =
      Run(Load({"lr_scaling.base_batch_size=4", "lr_scaling.warmup_epochs=1"}));
  ASSERT_TRUE(scaled.summary.ok()) << scaled.summary.status();
  EXPECT_NE(scaled.printed.find(absl::StrCat(
                "note: lr_scaling.warmup_epochs 1.0 = ", per_epoch,
                ": the learning rate rises until the run ends, at step 12\n")),
            std::string::npos)
      << scaled.printed;

  const LoadedConfig decay =
      Load(with(with(epochs, "scheduler.type=WSD"),
                absl::StrCat("scheduler.params.decay_num_steps=", steps + 1)));
  Console console(stdout, /*is_terminal=*/false);
  const auto trainer =
      Trainer::Make(rank(), decay, TestModelTools(), &console, nullptr);
  EXPECT_EQ(trainer.status().message(),
            absl::StrCat("scheduler.params.decay_num_steps: ", steps + 1,
                         " is more than the ", steps,
                         " steps of the run; lower it, or raise "
                         "training.epochs"));
}

TEST_F(TrainerTest, AFolderThatCanNotBeMadeNamesTheKey) {
  const LoadedConfig loaded = Load({"training.out_dir=/proc/run"});
  Console console(stdout, /*is_terminal=*/false);
  const auto trainer =
      Trainer::Make(rank(), loaded, TestModelTools(), &console, nullptr);
  EXPECT_EQ(trainer.status().message(),
            "training.out_dir: cannot create the folder '/proc/run': no folder "
            "can be created in '/proc'; choose another place");
}

// ---- Generation -----------------------------------------------------------

std::vector<int32_t> GenerateAll(Executor& executor, int64_t prompt_length,
                                 int64_t context, int64_t tokens) {
  std::vector<int32_t> prompt(prompt_length);
  std::iota(prompt.begin(), prompt.end(), 40);
  std::vector<int32_t> text;
  const absl::Status done = Generate(executor, prompt,
                                     {.sampling = {.temperature = 1, .seed = 3},
                                      .max_tokens = tokens,
                                      .context_length = context,
                                      .vocab_size = 257},
                                     [&](int32_t id) {
                                       text.push_back(id);
                                       return true;
                                     });
  EXPECT_TRUE(done.ok()) << done;
  return text;
}

TEST_F(TrainerTest, EveryPromptLengthFitsIntoWhatWasReserved) {
  // A session that only generates has no larger step to hide behind.
  for (const char* family : {"gpt2-tiny", "llama-tiny", "qwen3-tiny"}) {
    constexpr int64_t kContext = 24;
    const LoadedConfig loaded =
        Load({absl::StrCat("model={\"preset\": \"", family, "\"}")});
    auto session = Session::Make(rank(), loaded.config, TestModelTools(),
                                 {.generate_tokens = kContext});
    ASSERT_TRUE(session.ok()) << session.status();
    for (int64_t length = 1; length <= kContext + 5; ++length) {
      GenerateAll((*session)->executor(), length, kContext, 3);
    }
    // A text longer than the context continues.
    EXPECT_EQ(GenerateAll((*session)->executor(), 5, kContext, 60).size(), 60u);
    EXPECT_EQ(GenerateAll((*session)->executor(), 5, 2, 9).size(), 9u);
    EXPECT_EQ(GenerateAll((*session)->executor(), 5, 1, 9).size(), 9u);
    EXPECT_EQ((*session)->executor().transient().live_bytes(), 0);
  }
}

TEST_F(TrainerTest, GenerationIsAFunctionOfItsSeedAndStopsWhenTold) {
  const LoadedConfig loaded = Load({});
  auto session = Session::Make(rank(), loaded.config, TestModelTools(),
                               {.generate_tokens = 32});
  ASSERT_TRUE(session.ok()) << session.status();
  Executor& executor = (*session)->executor();
  const std::vector<int32_t> text = GenerateAll(executor, 4, 32, 20);
  EXPECT_EQ(text.size(), 20u);
  EXPECT_EQ(GenerateAll(executor, 4, 32, 20), text);
  for (int32_t id : text) EXPECT_LT(id, 257);

  int seen = 0;
  const GenerateOptions options{.sampling = {.temperature = 1, .seed = 3},
                                .max_tokens = 20,
                                .context_length = 32,
                                .vocab_size = 257};
  EXPECT_TRUE(Generate(executor, {40, 41, 42, 43}, options, [&](int32_t id) {
                EXPECT_EQ(id, text[seen]);
                return ++seen < 7;
              }).ok());
  EXPECT_EQ(seen, 7);

  // The stop token ends the text and is not reported.
  GenerateOptions stop = options;
  stop.stop_token = text[5];
  std::vector<int32_t> until;
  EXPECT_TRUE(Generate(executor, {40, 41, 42, 43}, stop, [&](int32_t id) {
                until.push_back(id);
                return true;
              }).ok());
  const auto end = std::find(text.begin(), text.end(), text[5]);
  EXPECT_EQ(until, std::vector<int32_t>(text.begin(), end));
}

TEST_F(TrainerTest, APromptLongerThanTheContextIsCutAloud) {
  for (const int64_t length : {32, 33, 100}) {
    const Outcome outcome =
        Run(Load({"training.steps=1", "training.sample.tokens=2",
                  absl::StrCat("training.sample.prompt=\"",
                               std::string(length, 'x'), "\"")}));
    ASSERT_TRUE(outcome.summary.ok()) << outcome.summary.status();
    const std::string note = absl::StrCat(
        "note: training.sample.prompt has ", length,
        " tokens and the context 32; samples continue from its last 16\n");
    EXPECT_EQ(outcome.printed.find(note) != std::string::npos, length > 32)
        << outcome.printed;
  }
}

TEST_F(TrainerTest, VisibleTokensAreAllOrTheLastHalf) {
  EXPECT_EQ(VisibleTokens(1, 8), 1);
  EXPECT_EQ(VisibleTokens(8, 8), 8);
  EXPECT_EQ(VisibleTokens(9, 8), 4);
  EXPECT_EQ(VisibleTokens(2, 1), 1);
}

TEST_F(TrainerTest, ATokenizerWithMoreIdsThanTheModelIsRefused) {
  // The one exception: bytes for a model that has no end of text.
  EXPECT_TRUE(OpenModelTokenizer("bytes", 257).ok());
  EXPECT_TRUE(OpenModelTokenizer("bytes", 256).ok());
  EXPECT_FALSE(OpenModelTokenizer("bytes", 255).ok());
  ASSERT_TRUE(TrainSentencePiece({.inputs = {dir_.File("text.txt")},
                                  .model_prefix = dir_.File("sp"),
                                  .vocab_size = 300,
                                  .num_threads = 1})
                  .ok());
  EXPECT_TRUE(OpenModelTokenizer(dir_.File("sp.model"), 300).ok());
  // A past bug: 256 was taken for such a byte model with any tokenizer.
  for (const int64_t vocab_size : {299, 256}) {
    const auto tokenizer =
        OpenModelTokenizer(dir_.File("sp.model"), vocab_size);
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(tokenizer.status().message().find("has 300 ids"),
              absl::string_view::npos)
        << tokenizer.status();
  }
}

TEST_F(TrainerTest, TokenFilesOfAnotherTokenizerAreRefused) {
  std::string tokens;
  for (int i = 0; i < 4000; ++i) {
    tokens += {static_cast<char>(i % 300), static_cast<char>(i % 300 >> 8)};
  }
  dir_.Write("text.txt", tokens);
  const std::vector<std::string> wide = {"model.vocab_size=300",
                                         "data.format=raw_uint16"};
  const auto open = [&](const char* tokenizer) {
    auto overrides = wide;
    overrides.push_back(tokenizer);
    return OpenRunData(Load(overrides).config, /*need_train=*/true, 1).status();
  };
  EXPECT_TRUE(open("data.tokenizer=none").ok());
  EXPECT_NE(open("data.tokenizer=bytes")
                .message()
                .find("data.tokenizer: bytes has 257 ids, but the tokens of "),
            absl::string_view::npos);
}

// ---- Documents ------------------------------------------------------------

TEST_F(TrainerTest, DocumentsThatDoNotSeeEachOther) {
  // Some in one window, some over several.
  const std::string text = SmallText();
  size_t begin = 0;
  for (int i = 0; begin < text.size(); ++i) {
    const size_t bytes = i % 7 == 0 ? 150 : 5 + i % 40;
    dir_.Write(absl::StrCat("text_", 1000 + i, ".txt"),
               text.substr(begin, bytes));
    begin += bytes;
  }
  const std::vector<std::string> together = {
      "data.train=" + dir_.File("text_*.txt"), "training.steps=6",
      "training.sample.prompt=", "training.save_final=false"};
  std::vector<std::string> apart = together;
  apart.push_back("data.reset_attention_mask=true");
  const auto with = [&](const std::string& one) {
    std::vector<std::string> all = apart;
    all.push_back(one);
    return all;
  };
  const Outcome run = Run(Load(apart));
  ASSERT_TRUE(run.summary.ok()) << run.summary.status();
  EXPECT_THAT(run.printed, HasSubstr("sequences of 32, documents apart"));
  EXPECT_LT(run.summary->final_loss, run.summary->first_loss - 0.5);
  // Every target counts.
  EXPECT_EQ(run.summary->tokens, 6 * 8 * 32);
  const auto json = nlohmann::json::parse(dir_.Read("run/summary.json"));
  for (const char* category : {"activations", "workspace", "total"}) {
    EXPECT_EQ(json["peak_bytes"][category],
              json["predicted_peak_bytes"][category])
        << category;
  }
  EXPECT_EQ(Hash(with("activation_checkpointing.enabled=true")),
            run.summary->parameters_hash);
  const Outcome stream = Run(Load(together));
  ASSERT_TRUE(stream.summary.ok()) << stream.summary.status();
  EXPECT_NE(stream.summary->parameters_hash, run.summary->parameters_hash);
  EXPECT_NE(stream.summary->validation_loss, run.summary->validation_loss);

  const auto of_ranks = [&](const std::string& stage) {
    const absl::Status status =
        RunRanks(2, with("zero_optimization.stage=" + stage), "ranks");
    EXPECT_TRUE(status.ok()) << status;
    return nlohmann::json::parse(
        dir_.Read("ranks/summary.json"))["parameters_hash"];
  };
  EXPECT_EQ(of_ranks("0"), of_ranks("3"));
}

TEST_F(TrainerTest, ASingleDocumentIsRefusedWithResetAttentionMask) {
  const auto open = [&](const std::vector<std::string>& overrides) {
    return OpenRunData(Load(overrides).config, /*need_train=*/true, 1);
  };
  const std::string apart = "data.reset_attention_mask=true";
  const auto text = open({apart});
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(text.status().message()),
              HasSubstr("is the end-of-text token 256, so there is only one "
                        "document; give every document a file"));
  std::string tokens;
  for (int i = 0; i < 4000; ++i) tokens += {static_cast<char>(i % 100), '\0'};
  dir_.Write("a.bin", tokens);
  const std::string file = "data.train=" + dir_.File("a.bin");
  const std::string vocab = "model.vocab_size=257";
  EXPECT_EQ(open({file, vocab, apart, "data.eos_token_id=99"})->document_token,
            99);
  const auto wrong = open({file, vocab, apart, "data.eos_token_id=100"});
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr("name the token between documents (data.tokenizer, "
                        "data.eos_token_id)"));
  EXPECT_EQ(open({file, vocab})->document_token, kNoDocumentToken);
}

TEST_F(TrainerTest, AnEmptyPromptIsATokenThatTheModelHas) {
  const auto bytes = MakeByteTokenizer();
  EXPECT_EQ(EncodePrompt(*bytes, "", 257), std::vector<int32_t>{256});
  EXPECT_EQ(EncodePrompt(*bytes, "", 256), std::vector<int32_t>{'\n'});
  EXPECT_EQ(EncodePrompt(*bytes, "ab", 256), (std::vector<int32_t>{97, 98}));
}

TEST_F(TrainerTest, ADataFileThatIsMissingOrTooSmallIsAnErrorBeforeTheRun) {
  LoadedConfig loaded = Load({});
  dir_.Write("text.txt", "too small\n");
  char* text = nullptr;
  size_t size = 0;
  std::FILE* file = open_memstream(&text, &size);
  Console console(file, false);
  auto trainer =
      Trainer::Make(rank(), loaded, TestModelTools(), &console, nullptr);
  EXPECT_FALSE(trainer.ok());
  EXPECT_FALSE(std::filesystem::exists(dir_.File("run/metrics.jsonl")));
  std::filesystem::remove(dir_.File("text.txt"));
  trainer = Trainer::Make(rank(), loaded, TestModelTools(), &console, nullptr);
  EXPECT_EQ(trainer.status().code(), absl::StatusCode::kNotFound)
      << trainer.status();
  std::fclose(file);
  std::free(text);
}

// A past bug: eval_batches times the micro-batch overflowed.
TEST_F(TrainerTest, TheLargestCountsStillMakeATrainer) {
  for (const char* path :
       {"training.eval_batches", "training.eval_every", "training.steps",
        "training.sample_every", "training.sample.tokens",
        "training.sample.top_k", "training.max_consecutive_skips",
        "training.seed", "steps_per_print",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size"}) {
    const LoadedConfig loaded = Load({absl::StrCat(path, "=1e12")});
    Console console(nullptr, /*is_terminal=*/false);
    const auto trainer =
        Trainer::Make(rank(), loaded, TestModelTools(), &console, nullptr);
    EXPECT_TRUE(trainer.ok()) << path << ": " << trainer.status();
  }
}

// A model with a parameter that no unit uses.
std::unique_ptr<Model> ModelWithASpare(const ModelConfig& config) {
  constexpr int64_t kWidth = 8;
  auto model = std::make_unique<ToyModel>(config.vocab_size);
  ToyUnit* embedding = model->Add("embedding");
  Parameter* table = embedding->AddParameter(
      "table", {config.vocab_size, kWidth}, {.std = 0.1f}, /*decay=*/true);
  embedding->AddParameter("spare", {3}, {.std = 0.1f}, /*decay=*/false);
  embedding->forward = [table](Context& ctx, const Var&) {
    return Embedding(ctx, table->weight, nullptr);
  };
  ToyUnit* head = model->Add("head");
  head->Borrow(table);
  head->forward = [table](Context& ctx, const Var& in) {
    LinearCrossEntropy(ctx, in, table->weight, table->shape[0]);
    return Var();
  };
  return model;
}

TEST_F(TrainerTest, AnUnusedParameterIsANoteOrAnError) {
  const std::vector<std::string> overrides = {"training.save_final=false",
                                              "training.sample.tokens=0"};
  const Outcome ignored = Run(Load(overrides), {}, nullptr, ModelWithASpare);
  EXPECT_TRUE(ignored.summary.ok()) << ignored.summary.status();
  EXPECT_TRUE(absl::StrContains(ignored.printed,
                                "note: no gradient reaches embedding.spare; "))
      << ignored.printed;
  std::vector<std::string> strict = overrides;
  strict.push_back("zero_optimization.ignore_unused_parameters=false");
  const Outcome refused = Run(Load(strict), {}, nullptr, ModelWithASpare);
  EXPECT_TRUE(absl::StrContains(refused.summary.status().message(),
                                "no gradient reaches embedding.spare; freeze"))
      << refused.summary.status();
}

TEST_F(TrainerTest, SequencesOfOneTokenTrain) {
  EXPECT_NE(Hash({"data.sequence_length=1", "training.steps=2"}), "");
}

}  // namespace
}  // namespace zero
