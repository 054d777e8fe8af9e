// Bytes between ranks, three times: counted where they are copied or summed,
// computed from the sizes that the executor asks for, and by the plan's
// formulas. The three are independent.
#include <atomic>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "engine/comm/local_ranks.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

constexpr int kWorld = 4;
constexpr int kMicroSteps = 2;

// Two steps of `job` on every rank.
void ExpectCountedIsFormula(Job job) {
  job.world = kWorld;
  job.micro_steps = kMicroSteps;
  job.options.plan.tokens = kMicroSteps * kLength;
  job.options.plan.micro_tokens = kLength;
  std::atomic<int64_t> all_sent{0}, all_received{0};
  const absl::Status status = RunLocalRanks(
      job.world, RanksOf(job), OneThread,
      [&](const Rank& rank) -> absl::Status {
        Rig rig(rank, job.Make(), job.options,
                Rehearse(job, rank, kMicroSteps));
        for (int64_t step = 1; step <= 2; ++step) {
          rig.Step(TokenBatch(kMicroSteps, kLength, kVocab, 1), 1e-3f, 1);
          rig->states();  // waits for gathers in flight
          ExpectBytesAsAsked(rank);
          const Plan& plan = rig->plan();
          const int64_t counted = rank.gather->received_bytes() +
                                  rank.reduce->received_bytes() +
                                  rank.across->received_bytes();
          EXPECT_GT(counted, 0);
          if (step == 1) {
            EXPECT_EQ(WireOf(rank),
                      CountWire(plan, rig->schedule(), rank.rank()));
            EXPECT_EQ(WireOf(rank).reduced,
                      FormulaWire(plan, kMicroSteps, rank.rank()).reduced);
          }
          EXPECT_EQ(
              counted,
              step * CountWire(plan, rig->schedule(), rank.rank()).received);
          // Sharded parameters that stay in place are gathered once less.
          if (job.options.plan.placement.parameters == Placement::kReplicated) {
            EXPECT_EQ(
                counted,
                step * FormulaWire(plan, kMicroSteps, rank.rank()).received);
          }
        }
        // The schedule's hash once, the norm and the loss in every step; the
        // agreement before a step is the trainer's.
        const int64_t hash =
            (kWorld - 1) * ScheduleHash(rig->plan(), rig->schedule()).size();
        const int64_t agreed = (kWorld - 1) * kNumAgreed * sizeof(double);
        EXPECT_EQ(rank.scalar->received_bytes(),
                  hash + 2 * (NumbersWire(rig->plan(), false) - agreed));
        const StepWire asked = WireOf(rank);
        all_sent += asked.gathered + asked.reduced + asked.across;
        all_received += rank.gather->received_bytes() +
                        rank.reduce->received_bytes() +
                        rank.across->received_bytes();
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(all_received, all_sent);
}

class WireTest : public testing::TestWithParam<DType> {
 protected:
  Job MakeJob() const {
    Job job;
    job.config = TiedLlama();
    job.options.param_dtype = job.options.plan.gradients.dtype = GetParam();
    return job;
  }
};

TEST_P(WireTest, StagesCopyWhatTheFormulaSays) {
  for (const BulkAlgorithm algorithm :
       {BulkAlgorithm::kDirect, BulkAlgorithm::kRing}) {
    for (const int shards : {4, 2}) {
      for (const int stage : {0, 1, 2, 3}) {
        if (stage == 0 && shards == 2) continue;  // nothing is sharded
        // At stage 3 a table that no head shares is looked up by rows.
        for (const bool tied : {true, false}) {
          SCOPED_TRACE(absl::StrCat(
              algorithm == BulkAlgorithm::kRing ? "ring" : "direct", ", stage ",
              stage, " in groups of ", shards, ", tied ", tied));
          Job job = MakeJob();
          job.config.tie_word_embeddings = tied;
          job.algorithm = algorithm;
          job.shards = shards;
          job.options = AtStage(job.options, stage);
          ExpectCountedIsFormula(job);
        }
      }
    }
  }
}

TEST_P(WireTest, FrozenParametersAreGatheredWhereShardedAndNotReduced) {
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat("stage ", stage));
    Job job = MakeJob();
    job.make = [config = job.config] { return MakePartlyFrozen(config); };
    job.options = AtStage(job.options, stage);
    ExpectCountedIsFormula(job);
  }
}

TEST_P(WireTest, AServerCopiesWhatTheFormulaSays) {
  Job job = MakeJob();
  job.options.plan.placement = PlacementOfServer();
  job.options.plan.owners = 1;
  ExpectCountedIsFormula(job);
}

INSTANTIATE_TEST_SUITE_P(DTypes, WireTest,
                         testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) {
                           return DTypeName(info.param);
                         });

}  // namespace
}  // namespace zero
