// Other ways to communicate (communication.algorithm): each gives the same bits
// as itself, and the numbers of direct within rounding. Ranks are threads.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/base/math.h"
#include "engine/base/status.h"
#include "engine/comm/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Job RingJob(int world, int stage) {
  Job job;
  job.config = TiedLlama();
  job.world = world;
  job.algorithm = BulkAlgorithm::kRing;
  job.options = AtStage(job.options, stage);
  return job;
}

void ExpectNear(const Outcome& got, const Outcome& want) {
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-6 * want.losses[step]);
    EXPECT_NEAR(got.norms[step], want.norms[step], 1e-6 * want.norms[step]);
  }
  EXPECT_LT(RelativeDifference(got.parameters, want.parameters), 1e-6);
}

TEST(RingStagesTest, EveryStageBucketAndOverlapGivesTheSameBits) {
  for (int world : {3, 4}) {
    const Outcome want = Train(RingJob(world, 0));
    for (int stage : {0, 1, 2, 3}) {
      for (int bits = 0; bits < 8; ++bits) {
        Job job = RingJob(world, stage);
        const int64_t bucket = bits & 1 ? 1 : PlanOptions::kDefaultBucketElems;
        job.options.reduce_bucket_elems = bucket;
        job.options.gather_bucket_elems = bucket;
        job.options.overlap = bits & 2;
        job.options.recompute = bits & 4;
        EXPECT_EQ(Train(job), want)
            << world << " ranks, stage " << stage << " bits " << bits;
      }
    }
  }
}

TEST(RingStagesTest, TheNumbersAreThoseOfDirect) {
  for (int world : {2, 3, 4}) {
    for (int stage : {0, 3}) {
      SCOPED_TRACE(testing::Message() << world << " ranks, stage " << stage);
      Job job = RingJob(world, stage);
      job.micro_steps = 3;
      const Outcome ring = Train(job);
      job.algorithm = BulkAlgorithm::kDirect;
      ExpectNear(ring, Train(job));
    }
  }
}

TEST(RingStagesTest, IntegersAddUpExactly) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int stage : {0, 1, 2, 3}) {
      Job job = RingJob(4, stage);
      job.options.param_dtype = dtype;
      job.prepare = MakeGradientsIntegers;
      const Outcome ring = Train(job);
      job.algorithm = BulkAlgorithm::kDirect;
      EXPECT_EQ(ring, Train(job)) << "stage " << stage;
    }
  }
}

TEST(RingStagesTest, GroupsReduceAroundRingsToo) {
  Job job = RingJob(6, 3);
  job.micro_steps = 2;
  const Outcome full = Train(job);
  for (int shards : {2, 3}) {
    job.shards = shards;
    const Outcome want = Train(job);
    ExpectNear(want, full);
    Job other = job;
    other.options = AtStage(job.options, 2);
    other.options.reduce_bucket_elems = 1;
    EXPECT_EQ(Train(other), want);
  }
}

// Two pieces of running sums of the largest bucket, in fp32.
TEST(RingStagesTest, StagingMemoryIsInTheLedger) {
  for (int world : {2, 3, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << world << " ranks, stage " << stage);
      Job job = RingJob(world, stage);
      const MemoryLedger ring = Measure(job, stage);
      job.algorithm = BulkAlgorithm::kDirect;
      const MemoryLedger direct = Measure(job, stage);
      const auto model = MakeModel(job.config);
      const Plan plan =
          MakePlan(DescribeUnits(*model), job.options.plan_options(world, 0));
      int64_t largest = 0;
      for (const Bucket& bucket : plan.reduce_buckets) {
        largest = std::max(largest, bucket.elems);
      }
      EXPECT_EQ(
          ring.peak_bytes(MemoryCategory::kReduceBuffers) -
              direct.peak_bytes(MemoryCategory::kReduceBuffers),
          world < 3 ? 0 : RoundUp(2 * largest / world * 4, Arena::kAlignment));
    }
  }
}

TEST(RingStagesTest, TheWireIsTheFormula) {
  for (int stage : {0, 1, 2, 3}) {
    Job job = RingJob(4, stage);
    job.batch = 8;
    const absl::Status status = RunLocalRanks(
        job.world, RanksOf(job), OneThread,
        [&](const Rank& rank) -> absl::Status {
          Rig rig(rank, MakeModel(job.config), job.options,
                  Rehearse(job, rank, 2));
          rig.Step(TokenBatch(2, kLength, kVocab, 1), 1e-3f);
          const StepWire sent = {.gathered = rank.gather->Total().bytes,
                                 .reduced = rank.reduce->Total().bytes};
          EXPECT_EQ(sent, CountWire(rig->plan(), rig->schedule(), 4, 4));
          EXPECT_EQ(sent.reduced, FormulaWire(rig->plan(), 1, 4, 4).reduced);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// All ranks must end, and say who failed.
void ExpectAFailureIsNamed(const Job& job) {
  std::mutex mutex;
  std::vector<std::string> messages;
  const absl::Status status =
      RunLocalRanks(job.world, RanksOf(job), OneThread,
                    [&](const Rank& rank) -> absl::Status {
                      Rig rig(rank, MakeModel(job.config), job.options,
                              Rehearse(job, rank, 2));
                      const TokenBatch batch(2, kLength, kVocab, 2);
                      const std::vector<HostBatch> parts = batch.Split(2);
                      absl::Status status;
                      for (int step = 0; step < 2 && status.ok(); ++step) {
                        if (rank.rank() == 1 && step == 1) {
                          return absl::DataLossError("disk on fire");
                        }
                        status = rig->Step({.micro_batches = parts,
                                            .num_valid_targets = 1,
                                            .lr = 1e-3f})
                                     .status();
                      }
                      EXPECT_FALSE(status.ok());
                      std::lock_guard<std::mutex> lock(mutex);
                      messages.push_back(std::string(status.message()));
                      return status;
                    });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(messages.size(), static_cast<size_t>(job.world - 1));
  for (const std::string& message : messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 1"), HasSubstr("disk on fire")));
  }
}

TEST(RingStagesTest, ARankThatFailsIsNamedByAll) {
  for (int stage : {0, 1, 2, 3}) ExpectAFailureIsNamed(RingJob(4, stage));
}

}  // namespace
}  // namespace zero
