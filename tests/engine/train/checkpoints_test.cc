// Checkpoints that are written during training.
#include "engine/train/checkpoints.h"

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/comm/launch.h"
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

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

struct Job {
  std::vector<std::string> overrides;
  int world = 2;
  std::string out = "run";
  // On a rank's thread, before its gradients of step `step` (from 1) are used.
  std::function<void(Trainer&, int rank, int step)> in_step = nullptr;
  // On a writing thread, before a piece of the save of step `step`.
  std::function<absl::Status(int rank, int step)> in_write = nullptr;
};

struct Outcome {
  absl::Status status;
  std::string printed, hash, checkpoint;
};

class CheckpointsTest : public testing::Test {
 protected:
  CheckpointsTest() {
    std::string text;
    for (int i = 0; i < 200; ++i) {
      absl::StrAppend(&text, "The number after ", i, " is ", i + 1, ".\n");
    }
    dir_.Write("text.txt", text);
  }

  LoadedConfig Load(const Job& job) {
    nlohmann::json config = {
        {"model",
         {{"model_type", "gpt2"},
          {"n_embd", 32},
          {"n_layer", 2},
          {"n_head", 4}}},
        {"data", {{"train", dir_.File("text.txt")}, {"sequence_length", 32}}},
        {"training",
         {{"steps", 8},
          {"save_every", 2},
          {"save_final", false},
          {"keep_last", 0},
          {"out_dir", dir_.File(job.out)},
          {"sample", {{"tokens", 0}}}}},
        {"train_batch_size", 12},
        {"bf16", {{"enabled", true}}},
        {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.003}}}}}};
    LoadOptions options;
    options.overrides = job.overrides;
    options.world = job.world;
    const auto catalog = MakeModelCatalog();
    options.catalog = catalog.get();
    auto loaded = ParseConfig(config.dump(), "run.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }

  Outcome Train(const Job& job) {
    const LoadedConfig loaded = Load(job);
    const std::string log = dir_.File("log");
    std::FILE* const out = std::fopen(log.c_str(), "w");
    Console console(out, /*is_terminal=*/false), silent(nullptr, false);
    Outcome outcome;
    outcome.status = RunLocalRanks(
        job.world, MakeRanksOptions(loaded.config, job.world),
        [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
          return MakeCpuDevice(1);
        },
        [&](const Rank& rank) -> absl::Status {
          const int me = rank.rank();
          ZERO_ASSIGN_OR_RETURN(
              const auto trainer,
              Trainer::Make(rank, loaded, TestModelTools(),
                            me == 0 ? &console : &silent, &stop_));
          int step = static_cast<int>(trainer->record().step);
          trainer->session().executor().clock().set_hook(
              [&, step](const Action& action, bool done) mutable {
                if (done || action.kind != ActionKind::kNorm) return;
                ++step;
                if (job.in_step) job.in_step(*trainer, me, step);
                if (me == 0) step_ = step;
              });
          trainer->checkpoints().set_write_hook([&, me]() -> absl::Status {
            if (!job.in_write) return absl::OkStatus();
            return job.in_write(
                me, static_cast<int>(trainer->checkpoints().step()));
          });
          ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
          if (me == 0) {
            outcome.hash = summary.parameters_hash;
            outcome.checkpoint = summary.checkpoint;
          }
          return absl::OkStatus();
        });
    std::fclose(out);
    outcome.printed = dir_.Read("log");
    stop_ = false;
    step_ = 0;
    return outcome;
  }

  // Waits until rank 0 is in that step.
  void AwaitStep(int step) const {
    while (step_ < step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // The contents of a checkpoint, by state and parameter.
  std::map<std::string, std::string> Contents(const std::string& name) {
    const auto reader = CheckpointReader::Open(dir_.File(name));
    EXPECT_TRUE(reader.ok()) << reader.status();
    std::map<std::string, std::string> contents;
    for (const std::string& state : (*reader)->states()) {
      for (const auto& [parameter, shape] : (*reader)->manifest().parameters) {
        const auto dtype = (*reader)->dtype(state, parameter);
        if (!dtype) continue;
        int64_t elems = 1;
        for (const int64_t dim : shape) elems *= dim;
        std::string& bytes = contents[state + " " + parameter];
        bytes.resize(elems * DTypeBytes(*dtype));
        EXPECT_TRUE(
            (*reader)->Read(state, parameter, 0, elems, bytes.data()).ok());
      }
    }
    return contents;
  }

  std::vector<std::string> Checkpoints(const std::string& out = "run") {
    return *ListFolder(dir_.File(out + "/checkpoints"));
  }

  std::vector<double> Losses(const std::string& out) {
    std::vector<double> losses;
    std::istringstream lines(dir_.Read(out + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      losses.push_back(nlohmann::json::parse(line)["loss"]);
    }
    return losses;
  }

  TempDir dir_;
  std::atomic<int> step_ = 0;  // that rank 0 is in
  std::atomic<bool> stop_ = false;
};

// Written when training is two steps further: it has the states of its own
// step, and the steps are those of a run that waits for its saves.
TEST_F(CheckpointsTest, IsThatOfARunThatWaitsForIt) {
  for (const std::vector<std::string>& overrides :
       std::vector<std::vector<std::string>>{
           {"zero_optimization.stage=0"},
           {"zero_optimization.stage=1", "bf16.enabled=false"},
           {"zero_optimization.stage=2", "data_types.stochastic_rounding=true"},
           {"zero_optimization.stage=3", "bf16.enabled=false",
            "fp16.enabled=true", "fp16.initial_scale_power=16",
            "train_micro_batch_size_per_gpu=2", "model.resid_pdrop=0.1"},
           {"zero_optimization={\"stage\": 2, \"offload_optimizer\": "
            "{\"device\": \"cpu\", \"delayed_update\": {\"enabled\": true, "
            "\"warmup_steps\": 2}}}"},
           {"zero_optimization={\"stage\": 3, \"offload_optimizer\": "
            "{\"device\": \"cpu\"}, \"offload_param\": {\"device\": "
            "\"cpu\"}}"}}) {
    for (const int world : {1, 3}) {
      SCOPED_TRACE(absl::StrCat(overrides[0], " on ", world));
      Job job = {.overrides = overrides, .world = world, .out = "beside"};
      job.overrides.push_back("training.save_every=4");
      job.in_write = [this](int, int step) {
        if (step == 4) AwaitStep(6);
        return absl::OkStatus();
      };
      const Outcome beside = Train(job);
      ASSERT_TRUE(beside.status.ok()) << beside.status;
      EXPECT_EQ(beside.checkpoint, "checkpoints/step-00000008");
      job.out = "waits";
      job.overrides.push_back("training.async_save=false");
      job.in_write = nullptr;
      const Outcome waits = Train(job);
      ASSERT_TRUE(waits.status.ok()) << waits.status;
      EXPECT_EQ(beside.hash, waits.hash);
      EXPECT_EQ(Losses("beside"), Losses("waits"));
      EXPECT_EQ(Checkpoints("beside"), Checkpoints("waits"));
      for (const char* name :
           {"/checkpoints/step-00000004", "/checkpoints/step-00000008"}) {
        EXPECT_TRUE(Contents(absl::StrCat("beside", name)) ==
                    Contents(absl::StrCat("waits", name)));
      }
      std::filesystem::remove_all(dir_.File("beside"));
      std::filesystem::remove_all(dir_.File("waits"));
    }
  }
}

TEST_F(CheckpointsTest, TheNextOneWaitsForTheOneBefore) {
  const Outcome outcome = Train({.in_write = [this](int, int step) {
    // Training is at the next save, or soon.
    if (step < 8) AwaitStep(step + 2);
    // A shorter wait is not worth a note.
    if (step == 2) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return absl::OkStatus();
  }});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_THAT(Checkpoints(),
              ElementsAre("latest", "step-00000002", "step-00000004",
                          "step-00000006", "step-00000008"));
  EXPECT_THAT(outcome.printed, HasSubstr("note: at step 4 training waited "));
  // Once is enough.
  EXPECT_THAT(outcome.printed, Not(HasSubstr("note: at step 6 ")));
}

// Rank 0's clock decides, and all ranks learn of it before the same step.
TEST(CheckpointsAtOnceTest, AreThoseOfKeepLastAndTheOneBeingWritten) {
  TrainingConfig training;
  training.steps = 100;
  EXPECT_EQ(CheckpointsAtOnce(training), 0);
  training.save_every = 10;
  EXPECT_EQ(CheckpointsAtOnce(training), 3);
  training.save_every = 60;  // and one at the end
  EXPECT_EQ(CheckpointsAtOnce(training), 2);
  training.save_every = 100;
  EXPECT_EQ(CheckpointsAtOnce(training), 1);
  training.save_every_minutes = 5;
  EXPECT_EQ(CheckpointsAtOnce(training), 3);
  // A run that keeps all of them may be stopped at any step.
  training.keep_last = 0;
  EXPECT_EQ(CheckpointsAtOnce(training), 1);
}

TEST_F(CheckpointsTest, MinutesThatHavePassedAreACheckpointOnAllRanks) {
  const Outcome outcome =
      Train({.overrides = {"training.save_every=0",
                           "training.save_every_minutes=1e-9",
                           "training.async_save=false", "training.steps=3"},
             .world = 3});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_THAT(Checkpoints(), ElementsAre("latest", "step-00000001",
                                         "step-00000002", "step-00000003"));
}

// Of three ranks, the third neither fails nor leads: it waits for rank 0.
TEST_F(CheckpointsTest, OneRanksFullDiskEndsTheRunAndTheLastOneStands) {
  struct Case {
    int world, full;
  };
  for (const char* beside : {"true", "false"}) {
    for (const Case of : {Case{2, 0}, Case{2, 1}, Case{3, 1}}) {
      SCOPED_TRACE(absl::StrCat(beside, ", rank ", of.full, " of ", of.world));
      std::filesystem::remove_all(dir_.File("run"));
      const Outcome outcome =
          Train({.overrides = {absl::StrCat("training.async_save=", beside)},
                 .world = of.world,
                 .in_write = [full = of.full](int rank, int step) {
                   if (rank != full || step != 4) return absl::OkStatus();
                   return absl::ResourceExhaustedError("no space left");
                 }});
      EXPECT_THAT(
          std::string(outcome.status.message()),
          HasSubstr(absl::StrCat(
              "no checkpoint at step 4: ",
              of.full == 0 ? "no space left"
                           : "rank 1 on " + HostName() + " cannot write")));
      EXPECT_THAT(Checkpoints(), ElementsAre("latest", "step-00000002"));
      // Neither silently nor much later.
      EXPECT_LE(Losses("run").size(), 6);
      const Outcome resumed =
          Train({.overrides = {"training.resume=auto"}, .world = of.world});
      ASSERT_TRUE(resumed.status.ok()) << resumed.status;
      EXPECT_THAT(resumed.printed, HasSubstr("step-00000002: step 2, "));
      EXPECT_THAT(Checkpoints(),
                  ElementsAre("latest", "step-00000002", "step-00000004",
                              "step-00000006", "step-00000008"));
    }
  }
}

// A copy of the folder during a save stands for a kill.
TEST_F(CheckpointsTest, AKillWithinASaveLeavesTheOneBefore) {
  std::atomic<int> pieces = 0;
  Job job;
  job.in_write = [&](int rank, int step) {
    if (step != 4) return absl::OkStatus();
    if (rank == 0 && ++pieces == 10) {
      std::filesystem::copy(dir_.File("run"), dir_.File("killed"),
                            std::filesystem::copy_options::recursive);
      ++pieces;
    }
    // The other writes nothing meanwhile.
    while (rank == 1 && pieces <= 10) std::this_thread::yield();
    return absl::OkStatus();
  };
  const Outcome whole = Train(job);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  EXPECT_THAT(Checkpoints("killed"),
              ElementsAre("latest", "step-00000002", "step-00000004.partial"));
  const Outcome resumed =
      Train({.overrides = {"training.resume=auto"}, .out = "killed"});
  EXPECT_THAT(resumed.printed, HasSubstr("step-00000002: step 2, "));
  EXPECT_EQ(resumed.hash, whole.hash);
  EXPECT_EQ(Losses("killed"), Losses("run"));
  EXPECT_EQ(Checkpoints("killed"), Checkpoints("run"));
}

TEST_F(CheckpointsTest, AStopFinishesTheOneUnderWayAndWritesTheLast) {
  const Outcome outcome = Train({.in_step =
                                     [this](Trainer&, int, int step) {
                                       if (step == 5) stop_ = true;
                                     },
                                 .in_write =
                                     [this](int, int step) {
                                       if (step == 4) AwaitStep(5);
                                       return absl::OkStatus();
                                     }});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.checkpoint, "checkpoints/step-00000005");
  EXPECT_THAT(Checkpoints(), ElementsAre("latest", "step-00000002",
                                         "step-00000004", "step-00000005"));
}

TEST_F(CheckpointsTest, ARunThatDivergesFinishesTheOneUnderWay) {
  const Outcome outcome =
      Train({.overrides = {"training.max_consecutive_skips=1"},
             .in_step =
                 [](Trainer& trainer, int, int step) {
                   if (step != 5) return;
                   const Parameter* first =
                       trainer.session().model().AllParameters()[0];
                   first->weight.sink->grad.As<float>()[0] =
                       std::numeric_limits<float>::infinity();
                 },
             .in_write =
                 [this](int, int step) {
                   if (step == 4) AwaitStep(5);
                   return absl::OkStatus();
                 }});
  EXPECT_TRUE(absl::IsAborted(outcome.status)) << outcome.status;
  EXPECT_THAT(std::string(outcome.status.message()),
              HasSubstr("step 5: skipped: the gradient of "));
  EXPECT_THAT(Checkpoints(),
              ElementsAre("latest", "step-00000002", "step-00000004"));
}

TEST_F(CheckpointsTest, ALostRankGivesUpTheOneUnderWay) {
  const Outcome outcome = Train({.in_step =
                                     [this](Trainer&, int rank, int step) {
                                       if (rank == 1 && step == 5) {
                                         AwaitStep(5);  // as the write does
                                         throw std::runtime_error("lost");
                                       }
                                     },
                                 .in_write =
                                     [this](int, int step) {
                                       if (step == 4) AwaitStep(5);
                                       return absl::OkStatus();
                                     }});
  EXPECT_THAT(std::string(outcome.status.message()), HasSubstr("lost"));
  EXPECT_FALSE(PathExists(dir_.File("run/checkpoints/step-00000004")));
  const Outcome resumed = Train({.overrides = {"training.resume=auto"}});
  ASSERT_TRUE(resumed.status.ok()) << resumed.status;
  EXPECT_THAT(resumed.printed, HasSubstr("step-00000002: step 2, "));
  EXPECT_EQ(resumed.checkpoint, "checkpoints/step-00000008");
}

TEST_F(CheckpointsTest, TheCopyIsPredictedAndOnlyThereWhereItIsUsed) {
  const auto copy = [this](const std::string& set) {
    int64_t bytes = -1;
    const Outcome outcome =
        Train({.overrides = {set, "zero_optimization.stage=2"},
               .in_step = [&](Trainer& trainer, int rank, int step) {
                 if (rank > 0 || step > 1) return;
                 const Session& session = trainer.session();
                 EXPECT_EQ(session.ledger().total_peak_bytes(),
                           session.predicted().total_peak_bytes());
                 bytes = session.ledger().live_bytes(MemoryCategory::kSnapshot);
               }});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    std::filesystem::remove_all(dir_.File("run"));
    return bytes;
  };
  // Masters and two moments of half the elements, and the padding of so small a
  // model.
  const auto model = TestModelTools().make(Load({}).config.model);
  const double elems = model->NumParameters() / 2;
  EXPECT_NEAR(copy("training.keep_last=0"), 12 * elems, 12 * elems / 5);
  EXPECT_EQ(copy("training.async_save=false"), 0);
  EXPECT_EQ(copy("training.save_every=0"), 0);
}

TEST_F(CheckpointsTest, TheWindowsOfWrittenFilesArePredicted) {
  const auto fixed = [this](std::vector<std::string> sets) {
    int64_t bytes = -1;
    sets.push_back("zero_optimization.stage=2");
    const Outcome outcome = Train(
        {.overrides = sets, .in_step = [&](Trainer& trainer, int rank, int) {
           if (rank > 0) return;
           bytes =
               trainer.session().predicted().peak_bytes(MemoryCategory::kFixed);
         }});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    std::filesystem::remove_all(dir_.File("run"));
    return bytes;
  };
  const auto model = TestModelTools().make(Load({}).config.model);
  const double elems = model->NumParameters() / 2;
  const int64_t none = fixed({"training.save_every=0"});
  // One of two ranks writes the bf16 weights, each half of masters and moments.
  EXPECT_NEAR(
      fixed({"training.save_every=0", "training.save_final=true"}) - none,
      2 * elems, 1);
  EXPECT_NEAR(fixed({}) - none, 12 * elems, 12 * elems / 5);
}

}  // namespace
}  // namespace zero
