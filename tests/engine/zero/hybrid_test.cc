// Groups of ranks: states are sharded within a group and replicated over the
// groups (mics_shard_size). The same numbers as one group except for the order
// of sums, memory by the group, both axes on the wire. Ranks are threads.
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sizes.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Job HybridJob(int world, int shards, int stage) {
  Job job;
  job.config = TiedLlama();
  job.world = world;
  job.shards = shards;
  job.options = AtStage(job.options, stage);
  return job;
}

TEST(HybridTest, OneGroupOfAllIsFullShardingToTheBit) {
  for (int stage : {1, 2, 3}) {
    Job job = HybridJob(4, 0, stage);
    job.micro_steps = 3;
    const Outcome want = Train(job);
    job.shards = 4;
    EXPECT_EQ(Train(job), want) << "stage " << stage;
  }
}

TEST(HybridTest, TwoGroupsOfTwoComputeWhatOneGroupOfFourDoes) {
  for (int64_t micro_steps : {1, 3}) {
    for (int stage : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << ", micro-steps " << micro_steps);
      Job job = HybridJob(4, 4, stage);
      job.micro_steps = micro_steps;
      const Outcome want = Train(job);
      job.shards = 2;
      const Outcome got = Train(job);
      for (int step = 0; step < job.steps; ++step) {
        EXPECT_NEAR(got.losses[step], want.losses[step],
                    1e-6 * want.losses[step]);
        EXPECT_NEAR(got.norms[step], want.norms[step], 1e-6 * want.norms[step]);
      }
      EXPECT_LT(RelativeDifference(got.parameters, want.parameters), 1e-6);
    }
  }
}

// Rounded to bf16 within the group and once more across: 2^-8 each.
TEST(HybridTest, GradientsMayBeSentAsBf16OnBothAxes) {
  for (int stage : {1, 2, 3}) {
    Job job = HybridJob(4, 2, stage);
    job.micro_steps = 2;
    job.batch = 16;
    const Outcome exact = Train(job);
    job.options.plan.gradients.dtype = DType::kBF16;
    const Outcome rounded = Train(job);
    EXPECT_NE(rounded.norms[0], exact.norms[0]) << "stage " << stage;
    EXPECT_NEAR(rounded.norms[0], exact.norms[0], exact.norms[0] / 128);
    EXPECT_NEAR(rounded.losses[1], exact.losses[1], exact.losses[1] / 128);
  }
}

TEST(HybridTest, IntegersAddUpExactlyInAnyGroups) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int stage : {1, 2, 3}) {
      Job job = HybridJob(6, 6, stage);
      job.options.param_dtype = dtype;
      job.prepare = MakeGradientsIntegers;
      const Outcome want = Train(job);
      for (int shards : {1, 2, 3}) {
        job.shards = shards;
        const Outcome got = Train(job);
        EXPECT_EQ(got.parameters, want.parameters) << stage << " " << shards;
        EXPECT_EQ(got.norms, want.norms) << stage << " " << shards;
      }
    }
  }
}

TEST(HybridTest, StagesBucketsOverlapAndRecomputeChangeNoBit) {
  const Outcome want = Train(HybridJob(4, 2, 1));
  for (int stage : {1, 2, 3}) {
    for (int bits = 0; bits < 8; ++bits) {
      Job job = HybridJob(4, 2, stage);
      const int64_t bucket = bits & 1 ? 1 : PlanOptions::kDefaultBucketElems;
      job.options.plan.reduce_bucket_elems = bucket;
      job.options.plan.gather_bucket_elems = bucket;
      job.options.overlap = bits & 2;
      job.options.recompute = bits & 4 ? Recompute::kFull : Recompute::kOff;
      EXPECT_EQ(Train(job), want) << "stage " << stage << " bits " << bits;
    }
  }
}

// LAMB's norms of whole parameters: every group has all pieces, one counts.
TEST(HybridTest, LambsRatiosAreThoseOfOneGroup) {
  Job job = HybridJob(4, 4, 1);
  job.options.optimizer.kind = OptimizerKind::kLamb;
  const Outcome full = Train(job);
  for (int shards : {1, 2}) {
    job.shards = shards;
    job.options = AtStage(job.options, 1);
    const Outcome want = Train(job);
    EXPECT_LT(RelativeDifference(want.parameters, full.parameters), 1e-6);
    for (int stage : {2, 3}) {
      job.options = AtStage(job.options, stage);
      EXPECT_EQ(Train(job), want) << stage << " " << shards;
    }
  }
}

// Nothing is sharded, and everything is reduced across: the sums of stage 0.
TEST(HybridTest, GroupsOfOneAreReplicas) {
  Job job = HybridJob(4, 0, 0);
  job.options.max_grad_norm = 0;
  const Outcome want = Train(job);
  for (int stage : {1, 3}) {
    job.options = AtStage(job.options, stage);
    job.shards = 1;
    EXPECT_EQ(Train(job).parameters, want.parameters);
  }
}

TEST(HybridTest, DelaysChangeNoBit) {
  for (int stage : {1, 2, 3}) {
    Job job = HybridJob(4, 2, stage);
    job.micro_steps = 3;
    const Outcome want = Train(job);
    AddDelays(&job);
    EXPECT_EQ(Train(job), want) << "stage " << stage;
  }
}

TEST(HybridTest, ANaNInOneGroupSkipsTheStepOnAllAndIsNamed) {
  for (int stage : {1, 2, 3}) {
    for (int bad_rank : {1, 2}) {
      const Job job = HybridJob(4, 2, stage);
      const std::string bad_name =
          MakeModel(job.config)->units()[2]->parameters()[1]->name;
      std::mutex mutex;
      std::vector<std::string> names;
      const absl::Status status = RunLocalRanks(
          job.world, RanksOf(job), OneThread,
          [&](const Rank& rank) -> absl::Status {
            Rig rig(rank, MakeModel(job.config), job.options,
                    Rehearse(job, rank, 2));
            Parameter& bad = *rig.model().units()[2]->parameters()[1];
            rig->clock().set_hook([&](const Action& action, bool done) {
              const bool here = action.kind == ActionKind::kBackward &&
                                action.index == 2 && done;
              if (!here || rank.rank() != bad_rank) return;
              bad.weight.sink->grad.As<float>()[5] =
                  std::numeric_limits<float>::quiet_NaN();
            });
            const Floats before = rig.ReadAll();
            const StepOutput output =
                rig.Step(TokenBatch(2, kLength, kVocab, 7), 1e-2f);
            EXPECT_TRUE(output.skipped);
            EXPECT_EQ(rig.ReadAll(), before);
            std::lock_guard<std::mutex> lock(mutex);
            names.push_back(output.non_finite);
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(names, std::vector<std::string>(4, bad_name))
          << "stage " << stage;
    }
  }
}

// ---- Memory and the wire --------------------------------------------------

TEST(HybridTest, StatesTakeWhatTheGroupsSizeSays) {
  Job job = HybridJob(4, 0, 0);
  const auto model = MakeModel(job.config);
  const int64_t psi =
      MakePlan(DescribeUnits(*model), {.world = 4}).padded_elems;
  for (int shards : {1, 2, 4}) {
    for (int stage : {1, 2, 3}) {
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << " in groups of " << shards);
      job.shards = shards;
      const MemoryLedger ledger = Measure(job, stage);
      const auto array = [&](int64_t ranks) {
        return RoundUp(4 * psi / ranks, Arena::kAlignment);
      };
      EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kParameters),
                array(stage >= 3 ? shards : 1));
      EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kGradients),
                array(stage >= 2 ? shards : 1));
      EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kOptimizer),
                2 * array(shards));
    }
  }
}

TEST(HybridTest, BytesOfBothAxesAreTheFormula) {
  for (int shards : {1, 2, 3, 6}) {
    for (int stage : {1, 2, 3}) {
      Job job = HybridJob(6, shards, stage);
      job.micro_steps = 2;
      SCOPED_TRACE(testing::Message()
                   << "stage " << stage << " in groups of " << shards);
      const absl::Status status = RunLocalRanks(
          job.world, RanksOf(job), OneThread,
          [&](const Rank& rank) -> absl::Status {
            Rig rig(rank, MakeModel(job.config), job.options,
                    Rehearse(job, rank, 2));
            rig.Step(TokenBatch(2, kLength, kVocab, 1), 1e-3f, 1);
            const StepWire sent = WireOf(rank);
            const Plan& plan = rig->plan();
            EXPECT_EQ(sent, CountWire(plan, rig->schedule()));
            const StepWire formula = FormulaWire(plan, 2);
            EXPECT_EQ(sent.reduced, formula.reduced);
            EXPECT_EQ(sent.across, formula.across);
            if (stage < 3) {
              EXPECT_EQ(sent.gathered, formula.gathered);
            }
            // Twice (R - 1) / R of a piece, and once in both micro-steps.
            const int64_t groups = 6 / shards;
            EXPECT_EQ(sent.across, 2 * 4 * plan.padded_elems / shards / groups *
                                       (groups - 1));
            EXPECT_EQ(rank.across->Total().calls,
                      groups == 1 ? 0 : 2 * plan.reduce_buckets.size());
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// ---- Faults ---------------------------------------------------------------

TEST(HybridTest, ARankThatLeavesIsNamedInTheOtherGroup) {
  for (int stage : {1, 2, 3}) {
    ExpectALeaverIsNamedByAll(HybridJob(4, 2, stage), 3);
  }
}

// The ranks of its group wait for it within the group, the others for the sums
// of that group.
TEST(HybridTest, ARankThatHangsIsNamedWithinTheTimeout) {
  const Failure failure =
      WithAHangingRank(HybridJob(4, 2, 3), /*hanging=*/3, /*bucket=*/1);
  EXPECT_EQ(failure.status.code(), absl::StatusCode::kDeadlineExceeded)
      << failure.status;
  EXPECT_EQ(failure.messages.size(), 4u);
  for (const std::string& message : failure.messages) {
    EXPECT_EQ(message, failure.messages[0]);
    EXPECT_THAT(message, AllOf(HasSubstr("rank 3"), HasSubstr(" of ranks ")));
  }
}

}  // namespace
}  // namespace zero
