// Training steps of GPUs that NCCL connects, against those of ranks that share
// memory: here both emulated.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "engine/base/status.h"
#include "engine/comm/nccl_ranks.h"
#include "engine/config/load.h"
#include "engine/train/session.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

absl::StatusOr<std::unique_ptr<Device>> Gpu(int rank) {
  return MakeCudaDevice(rank);
}

class NcclStepTest : public testing::Test {
 protected:
  void SetUp() override {
    emulator::SetDeviceCount(4);
    ResetFakeNccl();
  }
  void TearDown() override { EXPECT_EQ(NumFakeNcclComms(), 0); }

  void ExpectTheBitsOfLocal(const Job& job) {
    EXPECT_EQ(Train(job, Gpu, RunNcclRanks), Train(job, Gpu));
    EXPECT_EQ(NumFakeNcclAborts(), 0);
  }
};

Job JobOf(int world, DType dtype) {
  Job job;
  job.config = TinyConfig(ModelFamily::kGpt2);
  job.options.param_dtype = dtype;
  job.batch = 4;
  job.world = world;
  return job;
}

TEST_F(NcclStepTest, MemoryOfBulkCollectivesIsRegistered) {
  Job job = JobOf(2, DType::kF32);
  job.between = [](Rig&) { EXPECT_GT(NumFakeNcclRegistrations(), 0); };
  Train(job, Gpu, RunNcclRanks);
  EXPECT_EQ(NumFakeNcclRegistrations(), 0);
}

TEST_F(NcclStepTest, MemoryThatOneRankCanNotRegisterNobodyDoes) {
  Job job = JobOf(2, DType::kF32);
  job.options = AtStage(job.options, 3);
  const Outcome registered = Train(job, Gpu, RunNcclRanks);
  job.between = [](Rig&) { EXPECT_EQ(NumFakeNcclRegistrations(), 0); };
  emulator::FailCall("ncclCommRegister", 5, cudaErrorUnknown);
  EXPECT_EQ(Train(job, Gpu, RunNcclRanks), registered);
}

int64_t NumTaken() {
  return emulator::NumCalls("cudaMalloc") + emulator::NumCalls("cudaHostAlloc");
}

// It could deadlock with collectives of other ranks.
TEST_F(NcclStepTest, NoStepTakesMemory) {
  Job job = JobOf(2, DType::kBF16);
  job.options = AtStage(job.options, 3);
  job.micro_steps = 2;
  job.ahead = true;
  std::atomic<int64_t> taken = 0;
  job.prepare = [&](const Rank& rank, Rig&) {
    EXPECT_TRUE(*rank.agree("memory is taken", true));
    taken = NumTaken();
    EXPECT_TRUE(*rank.agree("memory is counted", true));
  };
  job.between = [&](Rig&) { EXPECT_EQ(NumTaken(), taken); };
  Train(job, Gpu, RunNcclRanks);
}

TEST_F(NcclStepTest, ASessionBeginsWhenAllRanksHaveTheirMemory) {
  const auto catalog = MakeModelCatalog();
  LoadOptions load;
  load.catalog = catalog.get();
  load.world = 3;
  load.missing_files = MissingFiles::kIgnored;
  const auto loaded = ParseConfig(R"({
      "model": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
                "vocab_size": 257},
      "train_batch_size": 6, "zero_optimization": {"stage": 3},
      "data": {"train": "none.txt", "sequence_length": 16},
      "training": {"steps": 1}})",
                                  "run.json", load);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const absl::Status status = RunNcclRanks(
      3, MakeRanksOptions(loaded->config, 3), Gpu,
      [&](const Rank& rank) -> absl::Status {
        absl::SleepFor(absl::Milliseconds(50 * rank.rank()));
        ZERO_ASSIGN_OR_RETURN(
            const auto session,
            Session::Make(rank, loaded->config, {.make = MakeModel},
                          {.train = true, .evaluate = true}));
        const int64_t taken = NumTaken();
        ZERO_RETURN_IF_ERROR(session->executor().states().Read(nullptr));
        const std::vector<int32_t> tokens(2 * 16);
        ZERO_RETURN_IF_ERROR(session->executor()
                                 .EvalLossSum({.batch = 2,
                                               .length = 16,
                                               .tokens = tokens.data(),
                                               .targets = tokens.data(),
                                               .positions = tokens.data()})
                                 .status());
        EXPECT_EQ(NumTaken(), taken);
        return rank.agree("all have looked", true).status();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// Aborted work may leave anything.
TEST_F(NcclStepTest, AnErrorInTheMiddleOfAStepIsNoResult) {
  Job job = JobOf(2, DType::kF32);
  std::atomic<int> num_errors = 0;
  const absl::Status status = RunNcclRanks(
      job.world, RanksOf(job), Gpu, [&](const Rank& rank) -> absl::Status {
        Rig rig(rank, job.Make(), job.options, Rehearse(job, rank, 2));
        const TokenBatch batch = GlobalBatch(4, 0);
        const HostBatch part = batch.Rows(2 * rank.rank(), 2);
        ZERO_RETURN_IF_ERROR(rig->Begin({.micro_batches = {&part, 1},
                                         .num_valid_targets = batch.NumValid(),
                                         .lr = 1e-2f,
                                         .beta1 = -1}));
        ZERO_RETURN_IF_ERROR(rank.agree("begun", true).status());
        if (rank.rank() == 1) SetFakeNcclAsyncError(1, ncclRemoteError);
        while (rank.status().ok()) absl::SleepFor(absl::Milliseconds(2));
        for (const absl::Status& end :
             {rig->Finish().status(), rig->EvalLossSum(part).status()}) {
          EXPECT_EQ(end, rank.status());
          ++num_errors;
        }
        return rank.status();
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "nccl: rank 1 failed in"))
      << status;
  EXPECT_EQ(num_errors, 4);
}

// A sum of two is the same in either order.
TEST_F(NcclStepTest, TwoRanksHaveTheBitsOfLocalAtEveryStage) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    Job job = JobOf(2, DType::kBF16);
    job.options = AtStage(job.options, stage);
    job.micro_steps = 2;
    const Outcome want = Train(job, Gpu);
    EXPECT_EQ(Train(job, Gpu, RunNcclRanks), want);
    job.ahead = true;
    EXPECT_EQ(Train(job, Gpu, RunNcclRanks), want);
    EXPECT_EQ(NumFakeNcclAborts(), 0);
  }
}

// The sum that brings rows has one addend that counts.
TEST_F(NcclStepTest, RowsThatAreLookedUpHaveTheBitsOfLocal) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Job job = JobOf(2, dtype);
    job.config = TiedLlama();
    job.config.tie_word_embeddings = false;
    job.micro_steps = 2;
    job.options = AtStage(job.options, 3);
    const Plan plan = PlanOf(job);
    EXPECT_TRUE(plan.LooksUpRows(plan.num_computing));
    ExpectTheBitsOfLocal(job);
  }
}

// 16-bit data is summed in rank order.
TEST_F(NcclStepTest, FourRanksThatSend16BitsHaveTheBitsOfLocal) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    Job job = JobOf(4, DType::kBF16);
    job.options.plan.gradients.dtype = DType::kBF16;
    job.options = AtStage(job.options, stage);
    ExpectTheBitsOfLocal(job);
  }
}

// fp32 sums of four are NCCL's: 2^-24 off in each.
TEST_F(NcclStepTest, FourRanksTakeTheStepsOfLocal) {
  for (const bool server : {false, true}) {
    Job job = JobOf(4, DType::kF32);
    job.options = AtStage(job.options, 2);
    if (server) {
      job.options.plan.placement = PlacementOfServer();
      job.options.plan.owners = 1;
    }
    SCOPED_TRACE(server ? "server" : "stage 2");
    const Outcome nccl = Train(job, Gpu, RunNcclRanks);
    const Outcome local = Train(job, Gpu);
    ASSERT_EQ(nccl.losses.size(), local.losses.size());
    for (size_t step = 0; step < local.losses.size(); ++step) {
      EXPECT_NEAR(nccl.losses[step], local.losses[step],
                  1e-6 * local.losses[step]);
    }
  }
}

}  // namespace
}  // namespace zero
