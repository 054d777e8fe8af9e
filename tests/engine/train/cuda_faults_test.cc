// What a step asks of the driver, and what a run says when a GPU fails: on the
// emulated GPU, which can be told to.
#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/comm/local_ranks.h"
#include "engine/config/load.h"
#include "engine/train/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<Device>> Gpu(int rank) {
  return MakeCudaDevice(rank % NumCudaDevices());
}

// Calls with which a host waits for a device, or the device for a host.
int64_t NumWaits() {
  int64_t count = 0;
  for (const char* const name :
       {"cudaDeviceSynchronize", "cudaStreamSynchronize",
        "cudaEventSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc",
        "cudaFreeHost"}) {
    count += emulator::NumCalls(name);
  }
  return count;
}

TEST(CudaFaultsTest, AStepWaitsForItsDeviceOnce) {
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  ExecutorOptions options;
  options.recompute = true;
  options.max_grad_norm = 1;
  Rig rig(**device, TinyConfig(ModelFamily::kGpt2), options);
  const TokenBatch batch(4, kLength, kVocab, 1);
  rig.Step(batch, 1e-3f, 2);
  for (int step = 0; step < 3; ++step) {
    const int64_t before = NumWaits();
    rig.Step(batch, 1e-3f, 2);
    EXPECT_EQ(NumWaits() - before, 1);
  }
}

// Two ranks on a GPU each, everything sharded.
Job TwoRanks() {
  Job job;
  job.batch = 4;
  job.steps = 2;
  job.options = AtStage(job.options, 3);
  return job;
}

absl::Status RunJob(const Job& job) {
  return RunLocalRanks(job.world, RanksOf(job), Gpu, [&](const Rank& rank) {
    return RunRank(job, rank).status();
  });
}

TEST(CudaFaultsTest, OnSeveralRanksTooAStepWaitsOnce) {
  Job job = TwoRanks();
  job.steps = 1;
  ASSERT_TRUE(RunJob(job).ok());  // what is made once
  int64_t before = NumWaits();
  ASSERT_TRUE(RunJob(job).ok());
  const int64_t one_step = NumWaits() - before;
  job.steps = 5;
  before = NumWaits();
  ASSERT_TRUE(RunJob(job).ok());
  EXPECT_EQ(NumWaits() - before - one_step, 4 * job.world);
}

// Wherever a kernel can not be launched, in a collective too, the run ends with
// its rank and the call.
TEST(CudaFaultsTest, AFailedLaunchEndsTheRunAndIsNamed) {
  const Job job = TwoRanks();
  ASSERT_TRUE(RunJob(job).ok());
  for (const int nth : {1, 10, 40, 100, 133, 150, 177, 200, 240}) {
    SCOPED_TRACE(nth);
    const auto start = std::chrono::steady_clock::now();
    emulator::FailCall("launch", nth, cudaErrorLaunchFailure);
    const absl::Status status = RunJob(job);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank "), HasSubstr("cuda:"),
                      HasSubstr("unspecified launch failure")));
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(20));
  }
  EXPECT_TRUE(RunJob(job).ok()) << "nothing of it is left";
}

TEST(CudaFaultsTest, AFailedCopyOfACollectiveIsNamedWithIt) {
  const Job job = TwoRanks();
  std::vector<std::string> messages;
  for (const int nth : {60, 70, 80, 90, 100}) {
    emulator::FailCall("cudaMemcpyAsync", nth, cudaErrorIllegalAddress);
    const absl::Status status = RunJob(job);
    ASSERT_FALSE(status.ok()) << nth;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank "), HasSubstr("illegal memory access")));
    messages.push_back(std::string(status.message()));
  }
  EXPECT_THAT(messages, testing::Contains(AllOf(HasSubstr("all_gather"),
                                                HasSubstr("channel"))));
}

// In the middle of a ring the others wait for the rank that failed.
TEST(CudaFaultsTest, AFailureInTheMiddleOfARingLetsTheOthersGo) {
  Job job = TwoRanks();
  job.world = 3;
  job.batch = 6;
  job.algorithm = BulkAlgorithm::kRing;
  job.steps = 4;
  for (int nth = 200; nth < 300; nth += 7) {
    const auto start = std::chrono::steady_clock::now();
    emulator::FailCall("cudaMemcpyAsync", nth, cudaErrorIllegalAddress);
    const absl::Status status = RunJob(job);
    ASSERT_FALSE(status.ok()) << nth;
    EXPECT_THAT(std::string(status.message()), HasSubstr("illegal memory"));
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(20));
  }
}

TEST(CudaFaultsTest, MemoryThatIsRefusedIsSaidWithItsNameAndSize) {
  const auto device = Gpu(1);
  ASSERT_TRUE(device.ok()) << device.status();
  const Rank rank = MakeLoneRank(**device);
  const auto model = MakeModel(TinyConfig(ModelFamily::kGpt2));
  MemoryLedger ledger;
  const auto executor =
      Executor::Make(rank, *model, {}, {int64_t{1} << 40, 1 << 20}, &ledger);
  ASSERT_EQ(executor.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(executor.status().message()),
              AllOf(HasSubstr("memory for activations and workspace: cannot "
                              "reserve 1048576.0 MiB (cuda:1: "),
                    HasSubstr("are free"),
                    HasSubstr("train_micro_batch_size_per_gpu")));
}

// GPT-2 1558M on a GPU of 8 GiB.
TEST(CudaFaultsTest, ARunThatDoesNotFitIsRefusedBeforeAnythingIsTaken) {
  const auto catalog = MakeModelCatalog();
  LoadOptions load;
  load.catalog = catalog.get();
  load.missing_files = MissingFiles::kIgnored;
  const auto loaded = ParseConfig(R"({
      "model": {"preset": "gpt2-xl"}, "train_batch_size": 1,
      "data": {"train": "none.txt", "sequence_length": 64},
      "training": {"steps": 1}})",
                                  "run.json", load);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  Rank rank = MakeLoneRank(**device);
  const int64_t before = (*device)->memory().free_bytes;
  const auto session =
      Session::Make(rank, loaded->config, {.make = MakeModel}, {.train = true});
  ASSERT_EQ(session.status().code(), absl::StatusCode::kResourceExhausted)
      << session.status();
  EXPECT_THAT(std::string(session.status().message()),
              AllOf(HasSubstr("at its peak (optimizer "), HasSubstr("fixed 0."),
                    HasSubstr("emulated GPU has 8.00 GiB"),
                    HasSubstr("choose a smaller model.preset")));
  EXPECT_EQ((*device)->memory().free_bytes, before);
}

}  // namespace
}  // namespace zero
