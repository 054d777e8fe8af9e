// A step's driver calls, and a run's errors when a GPU fails: on the emulated
// GPU, which can be made to fail.
#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/status.h"
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
using ::testing::AnyOf;
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
  options.recompute = Recompute::kFull;
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

// Nothing runs on the emulated GPU before a thread waits for it.
TEST(CudaFaultsTest, AStepBeginsWhileTheOneBeforeItIsStillToRun) {
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  const auto train = [&](bool ahead) {
    Rig rig(**device, TinyConfig(ModelFamily::kGpt2),
            ExecutorOptions{.max_grad_norm = 1});
    std::vector<double> losses;
    const auto begin = [&](int step) {
      const TokenBatch batch(4, kLength, kVocab, step);
      const HostBatch all = batch.All();
      const int64_t waits = NumWaits(), kernels = emulator::NumKernels();
      ASSERT_TRUE(rig->Begin({.micro_batches = {&all, 1},
                              .num_valid_targets = batch.NumValid(),
                              .lr = 1e-2f,
                              .beta1 = -1,
                              .optimizer_step = step,
                              .inherits_skip = ahead && step > 1})
                      .ok());
      if (step == 1) return;  // makes room for batches
      EXPECT_EQ(NumWaits(), waits);
      EXPECT_EQ(emulator::NumKernels(), kernels);
    };
    const auto finish = [&] {
      const int64_t waits = NumWaits();
      const absl::StatusOr<StepOutput> output = rig->Finish();
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_EQ(NumWaits(), waits + 1);
      losses.push_back(output->loss);
    };
    for (int step = 1; step <= 5; ++step) {
      begin(step);
      if (!ahead || step > 1) finish();
    }
    if (ahead) finish();
    return losses;
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(CudaFaultsTest, NoGpuIsSaidWithItsReasonAndTheRemedy) {
  unsetenv("CUDA_VISIBLE_DEVICES");
  const auto why = [](cudaError_t count_error) {
    emulator::FailCall("cudaGetDeviceCount", 1, count_error);
    const absl::Status status = MakeCudaDevice(0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("device cuda:0: no GPU can be used: "),
                      HasSubstr("or use --device cpu")));
    return std::string(status.message());
  };
  EXPECT_THAT(
      why(cudaErrorInsufficientDriver),
      AllOf(HasSubstr("driver here is for CUDA 13"), HasSubstr("; update it")));
  emulator::FailCall("cudaDriverGetVersion", 1, cudaErrorInvalidValue);
  EXPECT_THAT(why(cudaErrorInsufficientDriver),
              HasSubstr("(libcuda.so.1) is not on this machine; install it"));
  EXPECT_THAT(why(cudaErrorNoDevice), HasSubstr("run nvidia-smi"));
  setenv("CUDA_VISIBLE_DEVICES", "9", 1);
  EXPECT_THAT(why(cudaErrorNoDevice),
              HasSubstr("none with CUDA_VISIBLE_DEVICES=\"9\"; change that"));
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THAT(why(cudaErrorUnknown), HasSubstr("CUDA does not start ("));
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
  for (const bool ahead : {false, true}) {
    job.ahead = ahead;
    job.steps = 2;
    ASSERT_TRUE(RunJob(job).ok());  // for one-time work
    int64_t before = NumWaits();
    ASSERT_TRUE(RunJob(job).ok());
    const int64_t two_steps = NumWaits() - before;
    job.steps = 6;
    before = NumWaits();
    ASSERT_TRUE(RunJob(job).ok());
    EXPECT_EQ(NumWaits() - before - two_steps, 4 * job.world);
  }
}

// Their numbers share memory, which the first may not have read yet.
TEST(CudaFaultsTest, AnAgreementTakesThePlaceOfOneThatWasNotFinished) {
  const Job job = TwoRanks();
  const absl::Status status =
      RunLocalRanks(job.world, RanksOf(job), Gpu, [&](const Rank& rank) {
        Rig rig(rank, job.Make(), job.options, {1 << 20, 1 << 20});
        for (double value = 1; value < 20; ++value) {
          rig->numbers().Start("first", ReduceOp::kSum, {&value, 1});
          double second = 100 * value;
          rig->numbers().Start("second", ReduceOp::kSum, {&second, 1});
          ZERO_RETURN_IF_ERROR(rig->numbers().Finish({&second, 1}));
          EXPECT_EQ(second, 200 * value);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

// However long it is.
TEST(CudaFaultsTest, APromptGoesIntoTheCacheInTwoCopiesPerLayer) {
  constexpr int64_t kLayers = 2;
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  Rig rig(**device, TinyConfig(ModelFamily::kLlama),
          ExecutorOptions{.max_positions = 9});
  const TokenBatch batch(1, kLength, kVocab, 1);
  HostBatch prompt = batch.All();
  prompt.targets = nullptr;
  std::vector<float> with(kVocab), without(kVocab);
  const int64_t first = emulator::NumCalls("cudaMemcpyAsync");
  rig.LastLogits(prompt, nullptr, without.data());
  KvCache cache = rig->MakeKvCache(kLength);
  const int64_t second = emulator::NumCalls("cudaMemcpyAsync");
  const int64_t rows = emulator::NumCalls("cudaMemcpy2DAsync");
  rig.LastLogits(prompt, &cache, with.data());
  EXPECT_EQ(emulator::NumCalls("cudaMemcpy2DAsync") - rows, 2 * kLayers);
  EXPECT_EQ(emulator::NumCalls("cudaMemcpyAsync") - second, second - first);
  EXPECT_EQ(with, without);
}

// Wherever a kernel cannot be launched, in a collective too, the run ends with
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
  const Rank rank = MakeSoloRank(**device);
  const auto model = MakeModel(TinyConfig(ModelFamily::kGpt2));
  MemoryLedger ledger, host_ledger;
  const auto executor =
      Executor::Make(rank, *model, MakePlan(DescribeUnits(*model), {}), {},
                     {int64_t{1} << 40, 1 << 20}, &ledger, &host_ledger);
  ASSERT_EQ(executor.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(executor.status().message()),
      AllOf(HasSubstr("memory for activations, workspace and buffers: cannot "
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
  Rank rank = MakeSoloRank(**device);
  const int64_t before = (*device)->memory().free_bytes;
  const auto session =
      Session::Make(rank, loaded->config, {.make = MakeModel}, {.train = true});
  ASSERT_EQ(session.status().code(), absl::StatusCode::kResourceExhausted)
      << session.status();
  EXPECT_THAT(
      std::string(session.status().message()),
      AllOf(HasSubstr("at its peak (optimizer "), HasSubstr(", fixed "),
            HasSubstr("), 128.0 MiB for kernels that load later, and may "
                      "take 8.00 GiB of the 8.00 GiB of emulated GPU"),
            // As large as the host's memory is.
            AnyOf(AllOf(HasSubstr("nothing fits, whatever the stage"),
                        HasSubstr("with offload the device has room, but"),
                        HasSubstr("or more ranks, on other hosts")),
                  HasSubstr("this fits: --set zero_optimization.stage=3 "
                            "zero_optimization.offload_optimizer"))));
  EXPECT_EQ((*device)->memory().free_bytes, before);
}

TEST(CudaFaultsTest, AModelWiderThanTheNormsTakeIsRefusedBeforeItStarts) {
  Config config;
  config.model = TinyConfig(ModelFamily::kGpt2);
  config.model.hidden_size = 16392;
  config.train_micro_batch_size_per_gpu = 1;
  config.data.sequence_length = kLength;
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  const absl::Status refused =
      Session::Make(MakeSoloRank(**device), config, {.make = MakeModel},
                    {.train = true})
          .status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("model.hidden_size 16392"), HasSubstr("--device cpu")));
}

// A run that fills the GPU to the last byte would fail in its first step, when
// the driver loads kernels.
TEST(CudaFaultsTest, RoomIsLeftForKernelsThatLoadLater) {
  constexpr int64_t kLate = int64_t{128} << 20;
  Config config;
  config.model = TinyConfig(ModelFamily::kGpt2);
  config.train_micro_batch_size_per_gpu = 2;
  config.gradient_accumulation_steps = 1;
  config.data.sequence_length = kLength;
  const auto device = Gpu(0);
  ASSERT_TRUE(device.ok()) << device.status();
  const Rank rank = MakeSoloRank(**device);
  const ModelTools tools = {.make = MakeModel};
  const auto predicted = RehearseRun(rank, config, tools, {.train = true});
  ASSERT_TRUE(predicted.ok()) << predicted.status();
  const int64_t enough = predicted->ledger.total_peak_bytes() + kLate;
  const int64_t before = (*device)->info().memory_bytes;
  emulator::SetDeviceMemory(enough);
  EXPECT_TRUE(Session::Make(rank, config, tools, {.train = true}).ok());
  emulator::SetDeviceMemory(enough - 1);
  const absl::Status refused =
      Session::Make(rank, config, tools, {.train = true}).status();
  emulator::SetDeviceMemory(before);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("), 128.0 MiB for kernels that load later, and may "
                      "take "),
            HasSubstr("at its peak (")));
}

// On one rank and, with more streams, on two.
TEST(CudaFaultsTest, MemoryIsPredictedToTheByte) {
  Config config;
  config.model = TinyConfig(ModelFamily::kGpt2);
  config.train_micro_batch_size_per_gpu = 2;
  config.gradient_accumulation_steps = 1;
  config.data.sequence_length = kLength;
  config.zero_optimization.stage = 3;
  for (const int world : {1, 2}) {
    LocalRanksOptions options = MakeRanksOptions(config, world);
    options.num_devices = NumCudaDevices();
    const absl::Status status =
        RunLocalRanks(world, options, Gpu, [&](const Rank& rank) {
          const auto session =
              Session::Make(rank, config, {.make = MakeModel}, {.train = true});
          if (!session.ok()) return session.status();
          const DeviceMemory now = rank.device->memory();
          const auto fixed_of = [](const MemoryLedger& ledger) {
            return ledger.peak_bytes(MemoryCategory::kFixed);
          };
          const int64_t fixed = fixed_of((*session)->predicted());
          EXPECT_GT(fixed, now.context_bytes);
          EXPECT_EQ(now.total_bytes - now.free_bytes,
                    fixed + (*session)->executor().reserved_bytes());
          (*session)->MeasureFixed();
          EXPECT_EQ(fixed_of((*session)->ledger()), fixed);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace zero
