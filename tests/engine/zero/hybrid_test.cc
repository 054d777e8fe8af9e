// Groups of ranks: states are sharded within a group and replicated over the
// groups (mics_shard_size): memory by the group, both axes on the wire. Their
// numbers are in algorithms_test. Ranks are threads.
#include <string>
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
            // Twice (R - 1) / R of a shard, and once in both micro-steps.
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
