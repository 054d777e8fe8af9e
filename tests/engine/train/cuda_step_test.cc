// The same training steps on the CPU and on a GPU, real or emulated: the same
// plan, schedule and executor, other streams and kernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/optional.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

// Ranks share GPUs if there are fewer of them.
absl::StatusOr<std::unique_ptr<Device>> Gpu(int rank) {
  return MakeCudaDevice(rank % std::max(NumCudaDevices(), 1));
}

Job JobOf(ModelFamily family, DType dtype) {
  Job job;
  job.config = TinyConfig(family);
  job.options.param_dtype = dtype;
  job.batch = 4;
  job.world = 1;
  return job;
}

// fp32: only the order of sums differs, by 2^-24 each. bf16: 2^-8 in every
// activation, averaged over tokens.
double Tolerance(DType dtype) { return dtype == DType::kF32 ? 1e-5 : 5e-3; }

void ExpectTheSameSteps(const Job& job) {
  const Outcome cpu = Train(job, OneThread);
  const Outcome gpu = Train(job, Gpu);
  ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
  const double tolerance = Tolerance(job.options.param_dtype);
  for (size_t step = 0; step < cpu.losses.size(); ++step) {
    EXPECT_NEAR(gpu.losses[step], cpu.losses[step],
                tolerance * cpu.losses[step])
        << "step " << step;
    // A norm is of single gradients, not of a mean over tokens.
    EXPECT_NEAR(gpu.norms[step], cpu.norms[step],
                10 * tolerance * cpu.norms[step])
        << "step " << step;
  }
}

TEST(CudaStepTest, Fp32StepsAreThoseOfTheCpu) {
  for (const ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    SCOPED_TRACE(ModelFamilyName(family));
    ExpectTheSameSteps(JobOf(family, DType::kF32));
  }
}

TEST(CudaStepTest, Bf16StepsAreThoseOfTheCpu) {
  for (const ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    SCOPED_TRACE(ModelFamilyName(family));
    ExpectTheSameSteps(JobOf(family, DType::kBF16));
  }
}

TEST(CudaStepTest, MicroBatchesDropoutAndRecomputeAreThoseOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Job job = JobOf(ModelFamily::kGpt2, dtype);
    job.config.resid_pdrop = 0.1;
    job.options.recompute = Recompute::kFull;
    job.micro_steps = 4;  // more than are in flight to the device at once
    ExpectTheSameSteps(job);
  }
}

TEST(CudaStepTest, RecomputeChangesNoBit) {
  for (const ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    Job job = JobOf(family, DType::kBF16);
    const Outcome want = Train(job, Gpu);
    for (const Recompute recompute : kRecomputeLevels) {
      // What is kept of GELU is the product's epilogue, which rounds otherwise.
      if (recompute == Recompute::kKeepAll && family == ModelFamily::kGpt2) {
        continue;
      }
      job.options.recompute = recompute;
      EXPECT_EQ(Train(job, Gpu), want)
          << ModelFamilyName(family) << " " << RecomputeName(recompute);
    }
  }
}

TEST(CudaStepTest, EveryOptimizerTakesTheStepsOfTheCpu) {
  for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kSgd}) {
    Job job = JobOf(ModelFamily::kGpt2, DType::kF32);
    job.options.optimizer.kind = kind;
    job.options.optimizer.momentum = 0.9;
    ExpectTheSameSteps(job);
  }
}

TEST(CudaStepTest, PackedStepsAreThoseOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Job job = JobOf(ModelFamily::kGpt2, dtype);
    job.packed = true;
    ExpectTheSameSteps(job);
  }
}

// The host updates with the CPU's kernels.
TEST(CudaStepTest, OffloadTakesTheSteps) {
  const TempDir folder;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const OptimizerKind kind :
         {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
      for (const int world : {1, 2}) {
        Job job = JobOf(ModelFamily::kLlama, dtype);
        job.options.optimizer.kind = kind;
        job.world = world;
        job.micro_steps = 2;
        job.options.swap.path = folder.path();
        const Outcome want = Train(job, Gpu);
        const double tolerance = Tolerance(dtype);
        absl::optional<Outcome> first;
        for (const auto& [stage, homes] :
             {std::pair(1, StateHomes{.optimizer = Home::kHost}),
              std::pair(2, StateHomes{.optimizer = Home::kHost}),
              std::pair(3, StateHomes{.optimizer = Home::kHost}),
              std::pair(3, StateHomes{Home::kHost, Home::kHost}),
              std::pair(3, StateHomes{.optimizer = Home::kNvme}),
              std::pair(3, StateHomes{Home::kNvme, Home::kNvme})}) {
          SCOPED_TRACE(testing::Message()
                       << dtype << ", " << world << " ranks, stage " << stage);
          job.options = AtStage(job.options, stage);
          job.options.plan.homes = homes;
          const Outcome got = Train(job, Gpu);
          for (int step = 0; step < job.steps; ++step) {
            EXPECT_NEAR(got.losses[step], want.losses[step],
                        tolerance * want.losses[step]);
            EXPECT_NEAR(got.norms[step], want.norms[step],
                        10 * tolerance * want.norms[step]);
          }
          // The stages with the same order of micro-batches.
          if (stage == 2) first = got;
          if (stage == 3) {
            EXPECT_EQ(got, *first);
          }
        }
      }
    }
  }
}

// As by checkpoints and validation. What is read is of the whole last update,
// which may still be on its way; the next step is as without reads.
TEST(CudaStepTest, ReadsBetweenStepsSeeTheWholeUpdate) {
  struct Seen {
    Floats parameters;
    double loss_sum;  // of `batch`, with these
    bool operator==(const Seen&) const = default;
  };
  const struct {
    const char* name;
    StateHomes homes;
  } kCases[] = {
      {"optimizer on the host", {.optimizer = Home::kHost}},
      {"all on the host", {Home::kHost, Home::kHost}},
      {"optimizer on a disk", {.optimizer = Home::kNvme}},
      {"all on a disk", {Home::kNvme, Home::kNvme}},
  };
  const TempDir folder;
  const TokenBatch batch = GlobalBatch(2, /*step=*/9);
  for (const int world : {1, 2}) {
    Job job = JobOf(ModelFamily::kLlama, DType::kF32);
    job.world = world;
    job.options = AtStage(job.options, 3);
    job.options.swap.path = folder.path();
    job.options.plan.homes = kCases[0].homes;
    const Outcome want = Train(job, Gpu);
    std::atomic<Rig*> first_rank = nullptr;
    std::vector<Seen> seen, first;  // by rank 0
    job.prepare = [&](const Rank& rank, Rig& rig) {
      if (rank.rank() == 0) first_rank = &rig;
    };
    job.between = [&](Rig& rig) {
      Seen now;
      now.parameters = rig.ReadAll();
      now.loss_sum = rig->EvalLossSum(batch.All()).value();
      EXPECT_EQ(rig.ReadAll(), now.parameters);
      if (&rig == first_rank) seen.push_back(std::move(now));
    };
    for (const auto& [name, homes] : kCases) {
      SCOPED_TRACE(testing::Message() << world << " ranks, " << name);
      job.options.plan.homes = homes;
      seen.clear();
      EXPECT_TRUE(Train(job, Gpu) == want);
      ASSERT_EQ(seen.size(), static_cast<size_t>(job.steps));
      if (first.empty()) first = seen;
      EXPECT_TRUE(seen == first);
    }
  }
}

TEST(CudaStepTest, DelayedUpdatesAreThoseOfTheCpu) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int stage : {1, 3}) {
      SCOPED_TRACE(testing::Message() << dtype << ", stage " << stage);
      Job job = JobOf(ModelFamily::kLlama, dtype);
      job.options = AtStage(job.options, stage);
      job.options.plan.homes = {.optimizer = Home::kHost};
      job.options.delayed_updates = true;
      ExpectTheSameSteps(job);
    }
  }
}

TEST(CudaStepTest, EveryStageGivesTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int world : {1, 2, 4}) {
      Job job = JobOf(ModelFamily::kGpt2, dtype);
      job.world = world;
      // Several segments in a unit, as large models have.
      job.options.plan.segment_per_tensor = world == 4;
      const Outcome want = Train(job, Gpu);
      for (const int stage : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << dtype << ", " << world << " ranks, stage " << stage);
        job.options = AtStage(job.options, stage);
        EXPECT_EQ(Train(job, Gpu), want);
      }
    }
  }
}

// Also while the host updates, copies and files of the last one are underway.
TEST(CudaStepTest, AStepThatBeginsBeforeTheLastOneIsFinishedHasItsBits) {
  struct Way {
    int world, stage;
    StateHomes homes = {};
  };
  const TempDir folder;
  for (const auto& [world, stage, homes] :
       {Way{1, 0}, Way{2, 1}, Way{2, 3}, Way{2, 1, {.optimizer = Home::kHost}},
        Way{2, 3, {Home::kHost, Home::kHost}},
        Way{1, 3, {.optimizer = Home::kNvme}},
        Way{2, 3, {Home::kNvme, Home::kNvme}}}) {
    SCOPED_TRACE(testing::Message()
                 << world << " ranks, stage " << stage << ", parameters in "
                 << static_cast<int>(homes.parameters) << ", optimizer in "
                 << static_cast<int>(homes.optimizer));
    Job job = JobOf(ModelFamily::kGpt2, DType::kBF16);
    job.world = world;
    job.micro_steps = 2;
    job.options = AtStage(job.options, stage);
    job.options.plan.homes = homes;
    job.options.swap.path = folder.path();
    const Outcome want = Train(job, Gpu);
    job.ahead = true;
    EXPECT_EQ(Train(job, Gpu), want);
  }
}

// Many collectives in flight at once.
TEST(CudaStepTest, BucketsAndOverlapChangeNoBit) {
  Job job = JobOf(ModelFamily::kLlama, DType::kBF16);
  job.world = 2;
  const Outcome want = Train(job, Gpu);
  for (const int stage : {0, 2, 3}) {
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << ", overlap " << overlap);
      job.options = AtStage(job.options, stage);
      job.options.overlap = overlap;
      job.options.plan.reduce_bucket_elems = 1;
      job.options.plan.gather_bucket_elems = 1;
      EXPECT_EQ(Train(job, Gpu), want);
    }
  }
}

TEST(CudaStepTest, ARingAndAServerTakeTheStepsOfTheCpu) {
  for (const bool server : {false, true}) {
    Job job = JobOf(ModelFamily::kGpt2, DType::kF32);
    job.world = 4;
    if (server) {
      job.options.plan.placement = PlacementOfServer();
      job.options.plan.owners = 1;
    } else {
      job.algorithm = BulkAlgorithm::kRing;
      job.options = AtStage(job.options, 3);
    }
    SCOPED_TRACE(server ? "server" : "ring");
    ExpectTheSameSteps(job);
  }
}

}  // namespace
}  // namespace zero
