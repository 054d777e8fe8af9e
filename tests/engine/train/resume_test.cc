// Resume at any step equals the uninterrupted run, bitwise.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "engine/train/trainer.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

constexpr int kSteps = 12;

// What a rank keeps: where it is, and its part of the model states.
struct TrainingState {
  RunRecord record;
  std::vector<std::string> runs;  // bytes of StateAccess::ForEachRun
};

TrainingState Export(Trainer& trainer) {
  Executor& executor = trainer.session().executor();
  TrainingState state{.record = trainer.record()};
  executor.states().ForEachRun([&](const FlatState&, const StateRun& run) {
    state.runs.emplace_back(static_cast<const char*>(run.values.data()),
                            run.values.bytes());
  });
  return state;
}

void Restore(const TrainingState& state, Trainer& trainer) {
  Executor& executor = trainer.session().executor();
  size_t i = 0;
  executor.states().ForEachRun([&](const FlatState&, const StateRun& run) {
    const std::string& bytes = state.runs.at(i++);
    ASSERT_EQ(run.values.bytes(), bytes.size());
    std::memcpy(run.values.data(), bytes.data(), bytes.size());
  });
  ASSERT_EQ(i, state.runs.size());
  trainer.Restore(state.record);
}

// What a run, or a part of one, did and left.
struct Part {
  std::vector<nlohmann::json> steps;  // lines of metrics.jsonl
  std::vector<TrainingState> states;  // per rank, at its end
  std::string hash;
};

struct Job {
  std::vector<std::string> overrides;
  int world = 1;
  std::vector<int> poisoned;  // steps whose gradients are made infinite
};

class ResumeTest : public testing::Test {
 protected:
  ResumeTest() {
    // Nine steps are an epoch.
    std::string text;
    for (int i = 0; i < 200; ++i) {
      absl::StrAppend(&text, "The number after ", i, " is ", i + 1,
                      ", and twice that is ", 2 * i + 2, ".\n");
    }
    dir_.Write("text.txt", text);
  }

  LoadedConfig Load(const Job& job) {
    const std::string text = R"({
      "model": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
                "embd_pdrop": 0.1, "resid_pdrop": 0.2},
      "data": {"train": ")" + dir_.File("text.txt") +
                             R"(", "validation_fraction": 0.1,
               "sequence_length": 128},
      "training": {"steps": 12, "eval_every": 5, "save_final": false,
                   "out_dir": ")" +
                             dir_.File("run") +
                             R"(", "sample": {"tokens": 0}},
      "train_batch_size": 8, "gradient_accumulation_steps": 2,
      "gradient_clipping": 1.0,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
      "scheduler": {"type": "WarmupDecayLR",
                    "params": {"warmup_num_steps": 6}}
    })";
    LoadOptions options;
    options.overrides = job.overrides;
    options.world = job.world;
    const auto catalog = MakeModelCatalog();
    options.catalog = catalog.get();
    auto loaded = ParseConfig(text, "run.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }

  // Trains from `from` (null: the start) until `last` steps are taken.
  Part Train(const Job& job, const Part* from, int last) {
    Part part;
    part.states.resize(job.world);
    const LoadedConfig loaded = Load(job);
    std::atomic<bool> stop{false};
    Console silent(nullptr, /*is_terminal=*/false);
    const absl::Status status = RunLocalRanks(
        job.world, {.local = {.timeout = absl::Seconds(60)}},
        [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
          return MakeCpuDevice(1);
        },
        [&](const Rank& rank) -> absl::Status {
          ZERO_ASSIGN_OR_RETURN(
              const auto trainer,
              Trainer::Make(rank, loaded, TestModelTools(), &silent, &stop));
          int step = 0;
          if (from != nullptr) {
            const TrainingState& state = from->states[rank.rank()];
            Restore(state, *trainer);
            step = static_cast<int>(state.record.step);
          }
          trainer->session().executor().clock().set_hook(
              [&, step](const Action& action, bool done) mutable {
                if (done || action.kind != ActionKind::kNorm) return;
                if (++step == last) stop = true;
                Poison(trainer->session(), job, step);
              });
          ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
          EXPECT_EQ(summary.steps, last);
          part.states[rank.rank()] = Export(*trainer);
          if (rank.rank() == 0) part.hash = summary.parameters_hash;
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    for (absl::string_view line :
         absl::StrSplit(dir_.Read("run/metrics.jsonl"), '\n')) {
      if (!line.empty()) part.steps.push_back(nlohmann::json::parse(line));
    }
    return part;
  }

  void ExpectEveryResumeIsTheSame(const Job& job,
                                  const std::vector<int>& resumed_at) {
    const Part whole = Train(job, nullptr, kSteps);
    for (const int at : resumed_at) {
      SCOPED_TRACE(absl::StrCat("resumed after step ", at));
      const Part first = Train(job, nullptr, at);
      const Part rest = Train(job, &first, kSteps);
      EXPECT_EQ(rest.hash, whole.hash);
      for (int rank = 0; rank < job.world; ++rank) {
        const TrainingState &a = rest.states[rank], &b = whole.states[rank];
        EXPECT_TRUE(a.runs == b.runs) << "rank " << rank;
        EXPECT_EQ(a.record.optimizer_steps, b.record.optimizer_steps);
        EXPECT_EQ(a.record.scaler.scale, b.record.scaler.scale);
      }
      // Losses, norms, rates, scales, skips and evaluations.
      std::vector<nlohmann::json> lines = first.steps;
      lines.insert(lines.end(), rest.steps.begin(), rest.steps.end());
      ASSERT_EQ(lines.size(), whole.steps.size());
      for (size_t i = 0; i < lines.size(); ++i) {
        for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens",
                                "loss_scale", "skipped", "validation_loss"}) {
          EXPECT_EQ(lines[i].value(key, nlohmann::json()),
                    whole.steps[i].value(key, nlohmann::json()))
              << key << " of line " << i;
        }
      }
    }
  }

  static void Poison(Session& session, const Job& job, int step) {
    if (std::find(job.poisoned.begin(), job.poisoned.end(), step) ==
        job.poisoned.end()) {
      return;
    }
    const Parameter* first = session.model().AllParameters()[0];
    first->weight.sink->grad.As<float>()[0] =
        std::numeric_limits<float>::infinity();
  }

  TempDir dir_;
};

TEST_F(ResumeTest, Fp32) {
  // The first and the last step of an epoch, and one within each.
  ExpectEveryResumeIsTheSame({}, {1, 5, 9, 11});
}

TEST_F(ResumeTest, Bf16WithRecompute) {
  ExpectEveryResumeIsTheSame({.overrides = {"bf16.enabled=true",
                                            "activation_checkpointing.enabled="
                                            "true"}},
                             {4});
}

// The parameters' own bits are kept: rounding the masters again would give
// others.
TEST_F(ResumeTest, Bf16RoundedStochastically) {
  ExpectEveryResumeIsTheSame(
      {.overrides = {"bf16.enabled=true",
                     "data_types.stochastic_rounding=true"},
       .world = 2},
      {4});
}

// Right before, within and after a streak of skips that lowers the scale, and
// within the window that raises it again.
TEST_F(ResumeTest, Fp16BesideSkippedSteps) {
  const Job job = {
      .overrides = {"fp16={\"enabled\": true, \"initial_scale_power\": 8, "
                    "\"loss_scale_window\": 3}"},
      .poisoned = {3, 4, 5}};
  const Part whole = Train(job, nullptr, kSteps);
  EXPECT_EQ(whole.states[0].record.optimizer_steps, kSteps - 3);
  EXPECT_TRUE(std::any_of(
      whole.steps.begin(), whole.steps.end(),
      [](const auto& line) { return line.value("loss_scale", 0.0) == 64; }));
  ExpectEveryResumeIsTheSame(job, {2, 3, 5, 7});
}

TEST_F(ResumeTest, OtherOptimizers) {
  for (const char* optimizer :
       {"{\"type\": \"SGD\", \"params\": {\"lr\": 0.1, \"momentum\": "
        "0.9}}",
        "{\"type\": \"Lamb\", \"params\": {\"lr\": 0.01}}"}) {
    ExpectEveryResumeIsTheSame(
        {.overrides = {absl::StrCat("optimizer=", optimizer)}}, {7});
  }
}

TEST_F(ResumeTest, EveryRankKeepsItsPartAtEveryStage) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    ExpectEveryResumeIsTheSame(
        {.overrides = {"bf16.enabled=true",
                       absl::StrCat("zero_optimization.stage=", stage)},
         .world = 2},
        {7});
  }
}

}  // namespace
}  // namespace zero
