// Resume at any step equals the uninterrupted run, bitwise.

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "engine/train/trainer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

constexpr int kSteps = 12;

// All that is kept, by state and parameter, of all ranks together.
using Kept = std::map<std::string, std::string>;

void AddKept(Trainer& trainer, std::mutex& mutex, Kept* kept) {
  StateAccess& states = trainer.session().executor().states();
  states.ForEachKept([&](const StateAccess::KeptRun& run) {
    const absl::Span<const char> bytes = states.Bytes(run);
    const Parameter& parameter = *run.run.parameter;
    const size_t item = DTypeBytes(run.dtype);
    const std::lock_guard<std::mutex> lock(mutex);
    std::string& all = (*kept)[absl::StrCat(run.state, " ", parameter.name)];
    all.resize(parameter.shape.num_elems() * item);
    std::copy(bytes.begin(), bytes.end(), all.begin() + run.run.begin * item);
  });
}

// The results of a run, or of a part of one.
struct Part {
  std::vector<nlohmann::json> steps;  // lines of metrics.jsonl
  Kept kept;                          // at its end
  RunRecord record;
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
                    "params": {"warmup_num_steps": 6,
                               "total_num_steps": 12}}
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

  // Trains until `last` steps are taken, and stops: a new run, or as `resume`
  // says.
  Part Train(Job job, int last, const std::string& resume = "",
             bool remove = true) {
    Part part;
    if (resume.empty() && remove) {
      std::filesystem::remove_all(dir_.File("run"));
    }
    job.overrides.push_back("training.resume=" + resume);
    const LoadedConfig loaded = Load(job);
    std::mutex mutex;
    std::atomic<bool> stop{false};
    Console silent(nullptr, /*is_terminal=*/false);
    const absl::Status status = RunLocalRanks(
        job.world, MakeRanksOptions(loaded.config, job.world),
        [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
          return MakeCpuDevice(1);
        },
        [&](const Rank& rank) -> absl::Status {
          ZERO_ASSIGN_OR_RETURN(
              const auto trainer,
              Trainer::Make(rank, loaded, TestModelTools(), &silent, &stop));
          int64_t step = trainer->record().step;
          trainer->session().executor().clock().set_hook(
              [&, step](const Action& action, bool done) mutable {
                if (done || action.kind != ActionKind::kNorm) return;
                if (++step >= last) stop = true;
                Poison(trainer->session(), job, static_cast<int>(step));
              });
          ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
          EXPECT_EQ(summary.steps, last);
          AddKept(*trainer, mutex, &part.kept);
          if (rank.rank() == 0) {
            part.hash = summary.parameters_hash;
            part.record = trainer->record();
          }
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
    const Part whole = Train(job, kSteps);
    for (const int at : resumed_at) {
      SCOPED_TRACE(absl::StrCat("resumed after step ", at));
      Train(job, at);
      ExpectEqual(Train(job, kSteps, "latest"), whole);
    }
  }

  static void ExpectEqual(const Part& resumed, const Part& whole) {
    EXPECT_EQ(resumed.hash, whole.hash);
    EXPECT_TRUE(resumed.kept == whole.kept);
    EXPECT_EQ(resumed.record.optimizer_steps, whole.record.optimizer_steps);
    EXPECT_EQ(resumed.record.scaler.scale, whole.record.scaler.scale);
    EXPECT_EQ(resumed.record.first_loss, whole.record.first_loss);
    // Losses, norms, rates, scales, skips and evaluations, each once.
    ASSERT_EQ(resumed.steps.size(), whole.steps.size());
    for (size_t i = 0; i < whole.steps.size(); ++i) {
      for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens",
                              "loss_scale", "skipped", "validation_loss"}) {
        EXPECT_EQ(resumed.steps[i].value(key, nlohmann::json()),
                  whole.steps[i].value(key, nlohmann::json()))
            << key << " of line " << i;
      }
    }
  }

  // Why such a resumed run does not start.
  std::string ErrorOf(Job job, const std::string& resume) {
    job.overrides.push_back("training.resume=" + resume);
    const LoadedConfig loaded = Load(job);
    Console silent(nullptr, /*is_terminal=*/false);
    const auto device = MakeCpuDevice(1);
    const Rank rank = MakeSoloRank(*device);
    const auto trainer =
        Trainer::Make(rank, loaded, TestModelTools(), &silent, nullptr);
    EXPECT_FALSE(trainer.ok());
    return std::string(trainer.status().message());
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

TEST_F(ResumeTest, Fp32GoesOnToTheSameBits) {
  // The first and the last step of an epoch, and one within each.
  ExpectEveryResumeIsTheSame({}, {1, 5, 9, 11});
}

TEST_F(ResumeTest, Bf16WithRecomputeGoesOnToTheSameBits) {
  ExpectEveryResumeIsTheSame({.overrides = {"bf16.enabled=true",
                                            "activation_checkpointing.enabled="
                                            "true"}},
                             {4});
}

// The parameters' own bits are kept: rounding the masters again would give
// others.
TEST_F(ResumeTest, Bf16RoundedStochasticallyGoesOnToTheSameBits) {
  ExpectEveryResumeIsTheSame(
      {.overrides = {"bf16.enabled=true",
                     "data_types.stochastic_rounding=true"},
       .world = 2},
      {4});
}

// Right before, within and after a streak of skips that lowers the scale, and
// within the window that raises it again.
TEST_F(ResumeTest, Fp16GoesOnToTheSameBitsBesideSkippedSteps) {
  const Job job = {
      .overrides = {"fp16={\"enabled\": true, \"initial_scale_power\": 8, "
                    "\"loss_scale_window\": 3}"},
      .poisoned = {3, 4, 5}};
  const Part whole = Train(job, kSteps);
  EXPECT_EQ(whole.record.optimizer_steps, kSteps - 3);
  EXPECT_TRUE(std::any_of(
      whole.steps.begin(), whole.steps.end(),
      [](const auto& line) { return line.value("loss_scale", 0.0) == 64; }));
  ExpectEveryResumeIsTheSame(job, {2, 3, 5, 7});
}

TEST_F(ResumeTest, OtherOptimizersGoOnToTheSameBits) {
  for (const char* optimizer :
       {"{\"type\": \"SGD\", \"params\": {\"lr\": 0.1, \"momentum\": "
        "0.9}}",
        "{\"type\": \"Lamb\", \"params\": {\"lr\": 0.01}}"}) {
    ExpectEveryResumeIsTheSame(
        {.overrides = {absl::StrCat("optimizer=", optimizer)}}, {7});
  }
}

TEST_F(ResumeTest, DelayedUpdatesGoOnWithTheParametersOfTheUpdateBefore) {
  const std::string path = "zero_optimization.offload_optimizer.";
  for (const int world : {1, 2}) {
    const Job job = {
        .overrides = {"bf16.enabled=true", "zero_optimization.stage=2",
                      path + "device=cpu", path + "delayed_update.enabled=true",
                      path + "delayed_update.warmup_steps=4"},
        .world = world};
    ExpectEveryResumeIsTheSame(job, {3, 4, 5, 8});
    Job sooner = job;
    sooner.overrides.back() = path + "delayed_update.warmup_steps=2";
    if (world == 1) {
      EXPECT_THAT(
          ErrorOf(sooner, "latest"),
          testing::HasSubstr("delayed_update.warmup_steps was 4, now 2"));
    }
  }
}

TEST_F(ResumeTest, EveryRankKeepsItsPartAtEveryStage) {
  for (const std::string device : {"none", "cpu", "nvme"}) {
    for (const int stage : {0, 1, 2, 3}) {
      if (device != "none" && stage == 0) continue;
      SCOPED_TRACE(absl::StrCat(stage, " ", device));
      ExpectEveryResumeIsTheSame(
          {.overrides = {"bf16.enabled=true",
                         absl::StrCat("zero_optimization.stage=", stage),
                         absl::StrCat("zero_optimization.offload_optimizer={"
                                      "\"nvme_path\": \"",
                                      dir_.path(), "\", \"device\": \"", device,
                                      "\"}")},
           .world = 2},
          {7});
    }
  }
}

// ---- Another home of the states ---------------------------------------------

TEST_F(ResumeTest, AnotherShareOfTheHostGoesOnToTheSameBits) {
  const auto job = [&](const std::string& home) {
    return Job{.overrides = {"bf16.enabled=true", "zero_optimization.stage=2",
                             "zero_optimization.offload_optimizer=" + home},
               .world = 2};
  };
  const std::string some = R"({"device": "cpu", "ratio": 0.3})";
  const std::vector<std::string> homes = {
      some, R"({"device": "cpu"})", R"({"device": "none"})",
      absl::StrCat(R"({"device": "nvme", "ratio": 0.6, "nvme_path": ")",
                   dir_.path(), R"("})")};
  const Part whole = Train(job(some), kSteps);
  for (const std::string& home : homes) {
    SCOPED_TRACE(home);
    Train(job(some), 7);
    ExpectEqual(Train(job(home), kSteps, "latest"), whole);
  }
}

// ---- Another number of ranks ------------------------------------------------

// The same states for any saver and any loader.
TEST_F(ResumeTest, AnyNumberOfRanksAndAnyStageGoesOn) {
  const auto job = [](int world, const std::string& stage) {
    return Job{.overrides = {"bf16.enabled=true", "train_batch_size=12",
                             "gradient_accumulation_steps=1",
                             "zero_optimization=" + stage},
               .world = world};
  };
  const std::string disk = absl::StrCat(R"({"device": "nvme", "nvme_path": ")",
                                        dir_.path(), R"("})");
  const std::vector<std::string> kStages = {
      R"({"stage": 0})",
      absl::StrCat(R"({"stage": 3, "offload_optimizer": )", disk,
                   R"(, "offload_param": )", disk, "}"),
      R"({"stage": 2, "offload_optimizer": {"device": "cpu"}})",
      R"({"stage": 3, "offload_optimizer": {"device": "cpu"},
          "offload_param": {"device": "cpu"}})"};
  for (const int from : {1, 2, 3, 4}) {
    const Part first = Train(job(from, kStages[from - 1]), 3);
    for (const int to : {1, 2, 3, 4}) {
      SCOPED_TRACE(absl::StrCat(from, " to ", to));
      const std::string path = dir_.File("run/checkpoints/step-00000003");
      Job other = job(to, kStages[(from + to) % 4]);
      other.overrides.push_back("training.out_dir=" + dir_.File("other"));
      other.overrides.push_back("training.save_interrupted=false");
      other.overrides.push_back("training.steps=3");
      EXPECT_TRUE(Train(other, 3, path).kept == first.kept);
    }
  }
}

TEST_F(ResumeTest, GroupsAndWholeMastersGoOn) {
  const std::string disk = absl::StrCat(R"({"device": "nvme", "nvme_path": ")",
                                        dir_.path(), R"("})");
  const std::string groups = R"({"stage": 3, "mics_shard_size": 2)";
  const auto job = [](const std::string& zero, bool split) {
    return Job{
        .overrides = {"bf16.enabled=true", "gradient_accumulation_steps=1",
                      "zero_optimization=" + zero,
                      absl::StrCat("data_types.split_master_weights=",
                                   split ? "true" : "false")},
        .world = 4};
  };
  const std::vector<Job> jobs = {
      job(R"({"stage": 1})", false), job(groups + "}", true),
      job(absl::StrCat(groups, R"(, "offload_optimizer": )", disk,
                       R"(, "offload_param": )", disk, "}"),
          true)};
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(i);
    const Part first = Train(jobs[i], 5);
    Job other = jobs[(i + 1) % jobs.size()];
    other.overrides.push_back("training.steps=5");
    EXPECT_TRUE(Train(other, 5, "auto").kept == first.kept);
    // And the run itself goes on to the bits of one that was not stopped.
    const Part resumed = Train(jobs[i], kSteps, "auto");
    ExpectEqual(resumed, Train(jobs[i], kSteps));
  }
}

// ---- What is on disk --------------------------------------------------------

// Once the whole run's tokens were divided by the peak of the last ranks alone.
TEST_F(ResumeTest, SpeedAndWaitsAreOfTheLastPartAndTotalsOfAll) {
  constexpr int kBegun = 5, kTokens = 8 * 128;
  for (const auto& [before, after] : {std::pair(2, 1), std::pair(1, 2)}) {
    SCOPED_TRACE(absl::StrCat(before, " ranks, then ", after));
    Train({.world = before}, kBegun);
    const Part part = Train({.world = after}, kSteps, "latest");
    double all_ms = 0, part_ms = 0, waited_ms = 0;
    for (const nlohmann::json& line : part.steps) {
      if (!line.contains("step_ms")) continue;  // an evaluation's
      all_ms += line["step_ms"].get<double>();
      if (line["step"] <= kBegun) continue;
      part_ms += line["step_ms"].get<double>();
      if (after > 1) {
        waited_ms += line["communication"]["exposed_ms"].get<double>();
      }
    }
    const auto summary = nlohmann::json::parse(dir_.Read("run/summary.json"));
    const auto number = [&](const char* name) {
      return summary.value(name, 0.0);  // one rank waits for nobody
    };
    EXPECT_EQ(summary["tokens"], kSteps * kTokens);
    EXPECT_NEAR(number("train_seconds"), 1e-3 * all_ms, 1e-9);
    EXPECT_NEAR(number("train_seconds_since_resume"), 1e-3 * part_ms, 1e-9);
    EXPECT_NEAR(number("tokens_per_second") * 1e-3 * part_ms,
                (kSteps - kBegun) * kTokens, 1e-6);
    EXPECT_NEAR(number("exposed_seconds"), 1e-3 * waited_ms, 1e-9);
  }
}

TEST_F(ResumeTest, CheckpointsAreKeptAsAsked) {
  Train({.overrides = {"training.save_every=2", "training.keep_last=2",
                       "training.keep_every=6"}},
        11);
  EXPECT_THAT(*ListFolder(dir_.File("run/checkpoints")),
              testing::ElementsAre("latest", "step-00000006", "step-00000010",
                                   "step-00000011"));
}

// A kill between checkpoints: reported steps are repeated.
TEST_F(ResumeTest, MetricsHaveEachStepOnceAfterAKill) {
  const Job job = {.overrides = {"training.save_every=4",
                                 "training.save_interrupted=false"}};
  const Part whole = Train(job, kSteps);
  Train(job, 7);
  const std::string metrics = dir_.Read("run/metrics.jsonl");
  dir_.Write("run/metrics.jsonl", metrics + "{\"step\": 8, \"lo");
  dir_.Write("run/checkpoints/step-00000008.partial/states-00000.safetensors",
             "cut off");
  const Part resumed = Train(job, kSteps, "auto");
  ExpectEqual(resumed, whole);
  EXPECT_EQ(resumed.record.resumed_at, std::vector<int64_t>{4});
  EXPECT_FALSE(PathExists(dir_.File("run/checkpoints/step-00000008.partial")));
}

TEST_F(ResumeTest, ADamagedCheckpointGivesWayToTheOneBefore) {
  const Job job = {.overrides = {"training.save_every=4",
                                 "training.save_interrupted=false"}};
  const Part whole = Train(job, kSteps);
  Train(job, 9);
  const std::string path = "run/checkpoints/step-00000008/checkpoint.json";
  dir_.Write(path, dir_.Read(path).substr(0, 100));
  ExpectEqual(Train(job, kSteps, "latest"), whole);
  EXPECT_TRUE(PathExists(dir_.File("run/checkpoints/step-00000008.damaged")));
}

TEST_F(ResumeTest, ADamagedValueGivesWayToTheOneBefore) {
  for (const int world : {1, 2}) {
    const Job job = {.overrides = {"training.save_every=4",
                                   "training.save_interrupted=false"},
                     .world = world};
    const Part whole = Train(job, kSteps);
    Train(job, 9);
    const std::string path =
        "run/checkpoints/step-00000008/states-00000.safetensors";
    std::string bytes = dir_.Read(path);
    bytes[bytes.size() - 100] ^= 1;
    dir_.Write(path, bytes);
    ExpectEqual(Train(job, kSteps, "latest"), whole);
    EXPECT_TRUE(PathExists(dir_.File("run/checkpoints/step-00000008.damaged")));
  }
}

// As SwappedStates does where the disk of nvme_path loses what it was given.
TEST_F(ResumeTest, DataThatAreLostElsewhereAreNoDamageOfTheCheckpoint) {
  class Failing final : public CommunicatorWrapper {
   public:
    using CommunicatorWrapper::CommunicatorWrapper;
    void Run(Stream& stream, Collective collective) override {
      if (collective.name == "states are read") {
        Abort(absl::DataLossError("the scratch disk"));
      }
      inner_->Run(stream, std::move(collective));
    }
  };
  Job job = {.overrides = {"training.save_every=4"}, .world = 2};
  Train(job, 9);
  const std::vector<std::string> present =
      *ListFolder(dir_.File("run/checkpoints"));
  job.overrides.push_back("training.resume=latest");
  const LoadedConfig loaded = Load(job);
  LocalRanksOptions options = MakeRanksOptions(loaded.config, job.world);
  options.wrap = [](int, const std::string&, auto end) {
    return std::make_unique<Failing>(std::move(end));
  };
  Console silent(nullptr, /*is_terminal=*/false);
  const absl::Status status = RunLocalRanks(
      job.world, options,
      [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
        return MakeCpuDevice(1);
      },
      [&](const Rank& rank) {
        return Trainer::Make(rank, loaded, TestModelTools(), &silent, nullptr)
            .status();
      });
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("the scratch disk"));
  EXPECT_EQ(*ListFolder(dir_.File("run/checkpoints")), present);
}

TEST_F(ResumeTest, ARunWhoseOnlyCheckpointIsDamagedDoesNotBeginAnew) {
  Train({}, 3);
  const std::string path =
      "run/checkpoints/step-00000003/states-00000.safetensors";
  std::string bytes = dir_.Read(path);
  bytes[bytes.size() - 100] ^= 1;
  dir_.Write(path, bytes);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(ErrorOf({}, "auto"), testing::HasSubstr("states-00000"));
  }
}

TEST_F(ResumeTest, LaterCheckpointsAreSetAsideWhereAnEarlierOneGoesOn) {
  const Job job = {.overrides = {"training.save_every=3"}};
  const Part whole = Train(job, kSteps);
  // A mistake costs no checkpoint.
  const std::vector<std::string> present =
      *ListFolder(dir_.File("run/checkpoints"));
  EXPECT_THAT(
      ErrorOf({.overrides = {"training.save_every=3", "training.steps=8"}},
              dir_.File("run/checkpoints/step-00000009")),
      testing::HasSubstr("of step 9, the run is of 8 steps; raise"));
  EXPECT_EQ(*ListFolder(dir_.File("run/checkpoints")), present);
  ExpectEqual(Train(job, kSteps, dir_.File("run/checkpoints/step-00000009")),
              whole);
  EXPECT_THAT(*ListFolder(dir_.File("run/checkpoints")),
              testing::ElementsAre("latest", "step-00000009", "step-00000012",
                                   "step-00000012.abandoned"));
  EXPECT_THAT(
      ErrorOf(job, dir_.File("run/checkpoints/step-00000012.abandoned")),
      testing::HasSubstr("was set aside; resume from it in another"));
  // A damaged one has another name, and the reason is said.
  dir_.Write("run/checkpoints/step-00000012/checkpoint.json", "{");
  ExpectEqual(Train(job, kSteps, dir_.File("run/checkpoints/step-00000009")),
              whole);
  EXPECT_TRUE(PathExists(dir_.File("run/checkpoints/step-00000012.damaged")));
}

// ---- What does not go on ----------------------------------------------------

TEST_F(ResumeTest, AnotherRunIsNamedByItsFirstDifference) {
  using testing::HasSubstr;
  Train({}, 3);
  EXPECT_THAT(ErrorOf({.overrides = {"training.save_every=5"}}, ""),
              HasSubstr("checkpoints of an earlier run; resume from them with "
                        "--resume auto"));
  EXPECT_THAT(ErrorOf({.overrides = {"optimizer.params.lr=0.5"}}, "auto"),
              HasSubstr("optimizer.params.lr was 0.003, now 0.5"));
  EXPECT_THAT(ErrorOf({.overrides = {"model.n_embd=64"}}, "auto"),
              HasSubstr("of another model: model.n_embd was 32, now 64"));
  EXPECT_THAT(ErrorOf({.overrides = {"data.validation_fraction=0.4"}}, "auto"),
              HasSubstr("data.validation_fraction was "));
  EXPECT_THAT(ErrorOf({.overrides = {"bf16.enabled=true"}}, "auto"),
              HasSubstr("bf16.enabled was"));
  EXPECT_THAT(ErrorOf({.overrides = {"optimizer.type=SGD",
                                     "training.resume_changed=true"}},
                      "auto"),
              HasSubstr("start a new run from the weights only"));
  EXPECT_THAT(ErrorOf({}, dir_.File("nothing")),
              HasSubstr("nothing' does not exist; want auto, latest or a"));
  dir_.Write("text.txt", dir_.Read("text.txt") + "more");
  EXPECT_THAT(ErrorOf({}, "auto"), HasSubstr("data.train had other tokens"));
  const Part changed = Train({.overrides = {"optimizer.params.lr=0.5",
                                            "training.resume_changed=true"}},
                             5, "auto");
  EXPECT_EQ(changed.steps.size(), 5u);
}

TEST_F(ResumeTest, ALongerRunWhoseLearningRateEndsElsewhereIsAnother) {
  using testing::HasSubstr;
  for (const char* length : {"training.steps", "training.epochs"}) {
    const auto lasts = [&](int n) {
      return Job{.overrides = {"training.steps=auto",
                               absl::StrCat(length, "=", n),
                               R"(scheduler={"type": "WarmupDecayLR"})"}};
    };
    Train(lasts(4), 3);
    EXPECT_THAT(ErrorOf(lasts(5), "auto"),
                AllOf(HasSubstr(absl::StrCat(length, " was 4")),
                      HasSubstr(", and with it the learning rates: "
                                "scheduler.params.total_num_steps was ")));
  }
}

TEST_F(ResumeTest, ARunThatWritesNoneBeginsAnewAndKeepsTheOneOfASignal) {
  Train({}, 3);
  const std::string was = dir_.Read("run/checkpoints/latest");
  Job job;
  job.overrides = {"training.save_interrupted=false"};
  const Part anew = Train(job, 5, /*resume=*/"", /*remove=*/false);
  EXPECT_EQ(anew.record.step, 5);
  EXPECT_FALSE(PathExists(dir_.File("run/checkpoints")));
  EXPECT_EQ(dir_.Read("run/checkpoints.previous/latest"), was);
}

TEST_F(ResumeTest, LatestWantsOneAndAutoDoesNot) {
  EXPECT_THAT(ErrorOf({}, "latest"), testing::HasSubstr("checkpoints"));
  EXPECT_EQ(Train({}, 2, "auto").record.step, 2);
}

}  // namespace
}  // namespace zero
