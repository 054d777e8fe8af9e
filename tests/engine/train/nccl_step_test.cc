// Training steps of GPUs that NCCL connects, against those of ranks that share
// memory: here both emulated.
#include <algorithm>
#include <memory>
#include <mutex>

#include "engine/base/status.h"
#include "engine/comm/nccl_ranks.h"
#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

absl::StatusOr<std::unique_ptr<Device>> Gpu(int rank) {
  return MakeCudaDevice(rank);
}

using RunFn = absl::Status (*)(int, const LocalRanksOptions&,
                               const MakeDeviceFn&,
                               const std::function<absl::Status(const Rank&)>&);

Outcome TrainBy(RunFn run, const Job& job) {
  std::mutex mutex;
  std::vector<Outcome> outcomes;
  LocalRanksOptions options = RanksOf(job);
  options.num_devices = job.world;
  const absl::Status status =
      run(job.world, options, Gpu, [&](const Rank& rank) -> absl::Status {
        ZERO_ASSIGN_OR_RETURN(Outcome outcome, RunRank(job, rank));
        std::lock_guard<std::mutex> lock(mutex);
        outcomes.push_back(std::move(outcome));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(outcomes.size(), static_cast<size_t>(job.world));
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  return outcomes.empty() ? Outcome() : outcomes[0];
}

class NcclStepTest : public testing::Test {
 protected:
  void SetUp() override {
    emulator::SetDeviceCount(4);
    ResetFakeNccl();
  }
  void TearDown() override { EXPECT_EQ(NumFakeNcclComms(), 0); }

  void ExpectTheBitsOfLocal(const Job& job) {
    EXPECT_EQ(TrainBy(RunNcclRanks, job), TrainBy(RunLocalRanks, job));
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
  TrainBy(RunNcclRanks, job);
  EXPECT_EQ(NumFakeNcclRegistrations(), 0);
}

// A sum of two is the same in either order.
TEST_F(NcclStepTest, TwoRanksHaveTheBitsOfLocalAtEveryStage) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(stage);
    Job job = JobOf(2, DType::kBF16);
    job.options = AtStage(job.options, stage);
    job.micro_steps = 2;
    ExpectTheBitsOfLocal(job);
  }
}

// What travels in 16 bits is added up in rank order.
TEST_F(NcclStepTest, FourRanksThatSend16BitsHaveTheBitsOfLocal) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    Job job = JobOf(4, DType::kBF16);
    job.options.reduce_dtype = DType::kBF16;
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
      job.options.placement = PlacementOfServer();
      job.options.server = true;
    }
    SCOPED_TRACE(server ? "server" : "stage 2");
    const Outcome nccl = TrainBy(RunNcclRanks, job);
    const Outcome local = TrainBy(RunLocalRanks, job);
    ASSERT_EQ(nccl.losses.size(), local.losses.size());
    for (size_t step = 0; step < local.losses.size(); ++step) {
      EXPECT_NEAR(nccl.losses[step], local.losses[step],
                  1e-6 * local.losses[step]);
    }
  }
}

}  // namespace
}  // namespace zero
