// Runs on a device that runs the next step while the host reads the previous
// results, compared with runs that finish every step first: here on the
// emulated GPU.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/autograd/ops.h"
#include "engine/base/status.h"
#include "engine/comm/fault.h"
#include "engine/comm/local_ranks.h"
#include "engine/train/trainer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/philox.h"
#include "models/catalog.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<Device>> Gpu(int rank) {
  return MakeCudaDevice(rank % NumCudaDevices());
}
absl::StatusOr<std::unique_ptr<Device>> Cpu(int) { return MakeCpuDevice(1); }

// Finishes every step before the next: something is due between them.
constexpr char kOneByOne[] = "training.eval_every=1";

constexpr uint64_t kSeed = 5;

// An embedding and a head. The embedding's output is infinite in `bad` steps
// (from 1), however often they are taken.
std::unique_ptr<Model> MakeBrittle(const ModelConfig& config,
                                   const std::vector<int>& bad) {
  constexpr int64_t kWidth = 16;
  auto model = std::make_unique<ToyModel>(config.vocab_size);
  ToyUnit* embedding = model->Add("embedding");
  Parameter* table = embedding->AddParameter(
      "table", {config.vocab_size, kWidth}, {.std = 0.1f}, /*decay=*/true);
  embedding->forward = [table, bad](Context& ctx, const Var&) {
    Var out = Embedding(ctx, table->weight, nullptr);
    const bool breaks = std::any_of(bad.begin(), bad.end(), [&](int step) {
      return ctx.training && ctx.dropout_key == MixKey(kSeed, step - 1);
    });
    if (breaks) {
      ctx.ops().Fill(ctx.stream(), {out.value.vector(),
                                    std::numeric_limits<float>::infinity()});
    }
    return out;
  };
  ToyUnit* head = model->Add("head");
  Parameter* w = head->AddParameter("w", {config.vocab_size, kWidth},
                                    {.std = 0.1f}, /*decay=*/true);
  head->forward = [w](Context& ctx, const Var& in) {
    LinearCrossEntropy(ctx, in, w->weight, w->shape[0]);
    return Var();
  };
  return model;
}

struct Outcome {
  absl::Status status;
  std::string error;   // in rank 0's summary.json
  RunSummary summary;  // rank 0's
  std::string skips;   // its lines on that
  // At every launch of a step, the number of steps with written results.
  std::vector<int64_t> known;
  std::vector<nlohmann::json> lines, steps;  // of metrics.jsonl; of steps
};

struct Case {
  std::vector<std::string> overrides;
  std::vector<int> bad;
  int world = 1;
  int stop_in = 0;  // the step in whose launch rank 0 is asked to stop; 0: none
  bool full_disk = false;  // for metrics.jsonl, which is then not read
  MakeDeviceFn device = Gpu;
  decltype(LocalRanksOptions::wrap) wrap;
};

class StepsAheadTest : public testing::Test {
 protected:
  StepsAheadTest() {
    std::string text;
    for (int i = 0; i < 120; ++i) absl::StrAppend(&text, "The ", i, " is.\n");
    dir_.Write("text.txt", text);
  }

  Outcome Run(const Case& c) {
    const std::string out = absl::StrCat("run", ++num_runs_);
    const std::string config = absl::StrCat(
        R"({"model": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1,
                      "n_head": 2},
            "data": {"train": ")",
        dir_.File("text.txt"), R"(", "validation_fraction": 0.1,
                     "sequence_length": 8},
            "training": {"steps": 9, "seed": )",
        kSeed, R"(, "save_final": false, "sample": {"tokens": 0},
                         "eval_batches": 1, "out_dir": ")",
        dir_.File(out), R"("},
            "train_batch_size": 4, "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupLR", "params": {
                "warmup_num_steps": 9, "warmup_type": "linear"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})");
    LoadOptions load;
    load.overrides = c.overrides;
    load.world = c.world;
    const auto catalog = MakeModelCatalog();
    load.catalog = catalog.get();
    const auto loaded = ParseConfig(config, "run.json", load);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    ModelTools tools;
    tools.make = [&](const ModelConfig& model) {
      return MakeBrittle(model, c.bad);
    };
    tools.flops_per_token = [](const ModelConfig&, int64_t, Recompute) {
      return TokenFlops{.model = 1, .causal = 1};
    };
    LocalRanksOptions options = MakeRanksOptions(loaded->config, c.world);
    options.local.timeout = absl::Seconds(60);
    options.wrap = c.wrap;

    if (c.full_disk) {
      std::filesystem::create_directory(dir_.File(out));
      std::filesystem::create_symlink("/dev/full",
                                      dir_.File(out + "/metrics.jsonl"));
    }
    const auto lines = [&] {
      return c.full_disk ? std::vector<nlohmann::json>() : Lines(out);
    };
    Outcome outcome;
    char* printed = nullptr;
    size_t size = 0;
    std::FILE* file = open_memstream(&printed, &size);
    std::atomic<bool> stop{false};
    outcome.status = RunLocalRanks(
        c.world, options, c.device, [&](const Rank& rank) -> absl::Status {
          const bool leads = rank.rank() == 0;
          Console console(leads ? file : nullptr, /*is_terminal=*/false);
          ZERO_ASSIGN_OR_RETURN(
              const auto trainer,
              Trainer::Make(rank, *loaded, tools, &console,
                            leads ? &stop : nullptr, &start_));
          if (leads) {
            trainer->session().executor().clock().set_hook(
                [&](const Action& action, bool done) {
                  if (done || action.kind != ActionKind::kNorm) return;
                  outcome.known.push_back(Steps(lines()).size());
                  if (outcome.known.size() == size_t(c.stop_in)) stop = true;
                });
          }
          const auto summary = trainer->Run();
          if (leads && summary.ok()) outcome.summary = *summary;
          return summary.status();
        });
    std::fclose(file);
    for (absl::string_view line :
         absl::StrSplit(absl::string_view(printed, size), '\n')) {
      if (absl::StrContains(line, "skipped")) {
        absl::StrAppend(&outcome.skips, line, "\n");
      }
    }
    std::free(printed);
    const auto written =
        nlohmann::json::parse(dir_.Read(out + "/summary.json"));
    outcome.error = written.value("error", "");
    outcome.lines = lines();
    outcome.steps = Steps(outcome.lines);
    return outcome;
  }

  std::vector<nlohmann::json> Lines(const std::string& out) {
    std::vector<nlohmann::json> lines;
    const std::string text = dir_.Read(out + "/metrics.jsonl");
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      if (!line.empty()) lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }
  static std::vector<nlohmann::json> Steps(
      const std::vector<nlohmann::json>& lines) {
    std::vector<nlohmann::json> steps;
    std::copy_if(lines.begin(), lines.end(), std::back_inserter(steps),
                 [](const auto& line) { return line.contains("loss"); });
    return steps;
  }

  TempDir dir_;
  RunStart start_;  // all runs have the same data
  int num_runs_ = 0;
};

// All of it except time and memory.
void ExpectTheSameSteps(const Outcome& a, const Outcome& b) {
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens",
                            "skipped", "loss_scale"}) {
      EXPECT_EQ(a.steps[i].value(key, nlohmann::json()),
                b.steps[i].value(key, nlohmann::json()))
          << key << " of step " << i + 1;
    }
    const auto sent = [](const nlohmann::json& step) {
      nlohmann::json sent = step.value("communication", nlohmann::json());
      if (!sent.is_null()) {
        sent.erase("exposed_ms");
        sent.erase("waited_ms");
      }
      return sent;
    };
    EXPECT_EQ(sent(a.steps[i]), sent(b.steps[i])) << "step " << i + 1;
  }
  EXPECT_EQ(a.skips, b.skips);
  EXPECT_EQ(a.summary.parameters_hash, b.summary.parameters_hash);
  EXPECT_NE(a.summary.parameters_hash, "");
}

TEST_F(StepsAheadTest, AStepIsLaunchedBeforeTheLastOneIsKnown) {
  // Steps whose results are written when step 1, 2, ... is launched. The first
  // is checked before the second; an evaluation needs its step finished.
  const Outcome ahead = Run({});
  EXPECT_THAT(ahead.known, ElementsAre(0, 1, 1, 2, 3, 4, 5, 6, 7));
  const Outcome evaluated = Run({.overrides = {"training.eval_every=4"}});
  EXPECT_THAT(evaluated.known, ElementsAre(0, 1, 1, 2, 4, 4, 5, 6, 8));
  const Outcome one_by_one = Run({.overrides = {kOneByOne}});
  EXPECT_THAT(one_by_one.known, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
  ExpectTheSameSteps(ahead, one_by_one);
  ExpectTheSameSteps(evaluated, one_by_one);
  EXPECT_EQ(ahead.skips, "");

  // An evaluation follows its step, with the right results.
  std::vector<int> order;
  for (const nlohmann::json& line : evaluated.lines) {
    const int step = line["step"];
    order.push_back(line.contains("loss") ? step : -step);
    if (line.contains("loss")) continue;
    const auto same = [&](const nlohmann::json& other) {
      return other.contains("validation_loss") && other["step"] == step &&
             other["validation_loss"] == line["validation_loss"];
    };
    EXPECT_TRUE(
        std::any_of(one_by_one.lines.begin(), one_by_one.lines.end(), same))
        << line;
  }
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4, -4, 5, 6, 7, 8, -8, 9, -9));
}

TEST_F(StepsAheadTest, SkippedStepsAreThoseOfARunThatWaits) {
  // The first step, one alone, two in a row, the last but one.
  const std::vector<int> bad = {1, 3, 5, 6, 8};
  struct Way {
    int world;
    std::vector<std::string> overrides;
  };
  const Way ways[] = {
      {1, {R"(fp16={"enabled": true, "loss_scale": 64})"}},
      {2, {"bf16.enabled=true", "zero_optimization.stage=3"}},
      {1,
       {R"(optimizer={"type": "Lamb", "params": {"lr": 0.01}})",
        "bf16.enabled=true", "data_types.stochastic_rounding=true"}},
      {2,
       {R"(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})",
        "gradient_accumulation_steps=2"}}};
  for (const Way& way : ways) {
    SCOPED_TRACE(way.overrides[0]);
    Case c{.overrides = way.overrides, .bad = bad, .world = way.world};
    const Outcome ahead = Run(c);
    ASSERT_TRUE(ahead.status.ok()) << ahead.status;
    // Steps 3, 5, 6 and 8 are relaunched, and those after them.
    EXPECT_EQ(ahead.known.size(), 9u + 2 * 4);
    c.overrides.push_back(kOneByOne);
    const Outcome one_by_one = Run(c);
    EXPECT_EQ(one_by_one.known.size(), 9u);
    ExpectTheSameSteps(ahead, one_by_one);
    for (size_t i = 0; i < ahead.steps.size(); ++i) {
      EXPECT_EQ(ahead.steps[i].contains("skipped"),
                std::count(bad.begin(), bad.end(), i + 1) > 0)
          << "step " << i + 1;
    }
    // On the CPU the last bits of losses differ, and nothing else.
    c.device = Cpu;
    const Outcome cpu = Run(c);
    EXPECT_EQ(ahead.skips, cpu.skips);
    EXPECT_THAT(ahead.skips,
                HasSubstr("step 6 skipped, the last 2 in a row: the gradient "
                          "of embedding.table is not finite"));
    ASSERT_EQ(cpu.steps.size(), ahead.steps.size());
    for (size_t i = 0; i < cpu.steps.size(); ++i) {
      EXPECT_EQ(cpu.steps[i]["lr"], ahead.steps[i]["lr"]);
    }
  }
}

TEST_F(StepsAheadTest, AScaleThatMayChangeWaitsForEveryStep) {
  const Outcome outcome = Run(
      {.overrides = {R"(fp16={"enabled": true, "initial_scale_power": 6})"}});
  EXPECT_THAT(outcome.known, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
}

TEST_F(StepsAheadTest, TooManySkipsInARowEndTheRunWithNothingUnderWay) {
  const Outcome outcome =
      Run({.overrides = {"training.max_consecutive_skips=3"},
           .bad = {4, 5, 6, 7, 8, 9}});
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(outcome.status.message()),
              HasSubstr("step 6: 3 steps in a row were skipped; in the last "
                        "one the gradient of embedding.table"));
  EXPECT_EQ(outcome.steps.size(), 6u);
}

TEST_F(StepsAheadTest, AStopEndsBehindTheStepsThatWereAgreedOn) {
  // Asked while step 4 is launched: a single rank has agreed on nothing more;
  // several have agreed on the next step.
  for (const int world : {1, 2}) {
    SCOPED_TRACE(world);
    const Outcome stopped = Run({.world = world, .stop_in = 4});
    ASSERT_TRUE(stopped.status.ok()) << stopped.status;
    EXPECT_TRUE(stopped.summary.interrupted);
    EXPECT_EQ(stopped.summary.steps, world == 1 ? 4 : 5);
    EXPECT_EQ(stopped.steps.size(), stopped.summary.steps);
    if (world == 1) continue;
    ExpectTheSameSteps(
        stopped, Run({.overrides = {"training.steps=5"}, .world = world}));
  }
}

// Only rank 0 knows, with a step in flight: all leave after that one.
TEST_F(StepsAheadTest, MetricsThatCanNotBeWrittenEndTheRunOnAllRanks) {
  for (const int world : {1, 2}) {
    SCOPED_TRACE(world);
    const Outcome outcome = Run({.world = world, .full_disk = true});
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kResourceExhausted)
        << outcome.status;
    EXPECT_THAT(outcome.error, HasSubstr("metrics.jsonl"));
    EXPECT_LE(outcome.known.size(), 4u);
  }
}

TEST_F(StepsAheadTest, AnErrorNamesTheStepsThatAreUnderWay) {
  FaultInjector injector({1, 5, FaultKind::kThrow}, kStepCollective);
  Case c{.world = 2};
  c.wrap = [&](int rank, const std::string& channel, auto end) {
    return injector.Wrap(rank, channel, std::move(end));
  };
  const Outcome outcome = Run(c);
  // The result of step 4 is lost.
  EXPECT_THAT(outcome.error, HasSubstr("step 4 or 5: "));
  EXPECT_THAT(outcome.error, HasSubstr("injected fault in step 5"));
  EXPECT_EQ(outcome.steps.size(), 3u);
}

}  // namespace
}  // namespace zero
