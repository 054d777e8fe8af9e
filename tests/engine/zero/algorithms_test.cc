// Other ways to communicate (communication.algorithm): each gives the same bits
// as itself, and the numbers of direct within rounding. Ranks are threads.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
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

Job RingJob(int world, int stage) {
  Job job;
  job.config = TiedLlama();
  job.world = world;
  job.algorithm = BulkAlgorithm::kRing;
  job.options = AtStage(job.options, stage);
  return job;
}

// Sums in another order. Adam divides a gradient by its own size, so the
// rounding of small gradients weighs as much as that of large ones: parameters
// may differ by more than losses and norms, by an amount that depends on the
// CPU's vector widths.
void ExpectNear(const Outcome& got, const Outcome& want) {
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-6 * want.losses[step]);
    EXPECT_NEAR(got.norms[step], want.norms[step], 1e-6 * want.norms[step]);
  }
  EXPECT_LT(RelativeDifference(got.parameters, want.parameters), 1e-5);
}

TEST(RingStagesTest, EveryStageBucketAndOverlapGivesTheSameBits) {
  for (int world : {3, 4}) {
    const Outcome want = Train(RingJob(world, 0));
    for (int stage : {0, 1, 2, 3}) {
      for (int bits = 0; bits < 8; ++bits) {
        Job job = RingJob(world, stage);
        const int64_t bucket = bits & 1 ? 1 : PlanOptions::kDefaultBucketElems;
        job.options.plan.reduce_bucket_elems = bucket;
        job.options.plan.gather_bucket_elems = bucket;
        job.options.overlap = bits & 2;
        job.options.recompute = bits & 4 ? Recompute::kFull : Recompute::kOff;
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
      job.batch = 36;
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
    other.options.plan.reduce_bucket_elems = 1;
    EXPECT_EQ(Train(other), want);
  }
}

// Rounded once to the sent dtype, like direct, which sums in another order: the
// two differ by at most one rounding.
TEST(RingStagesTest, GradientsMayBeSentAsBf16) {
  Outcome first;
  for (int stage : {0, 1, 2, 3}) {
    Job job = RingJob(4, stage);
    job.steps = 1;
    job.options.plan.gradients.dtype = DType::kBF16;
    const Outcome ring = Train(job);
    if (stage == 0) first = ring;
    EXPECT_EQ(ring, first) << "stage " << stage;
    job.algorithm = BulkAlgorithm::kDirect;
    const Outcome direct = Train(job);
    EXPECT_NEAR(ring.norms[0], direct.norms[0], direct.norms[0] / 1024);
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
          MakePlan(DescribeUnits(*model),
                   job.options.plan_options(world, 0, job.algorithm));
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
  for (int i = 0; i < 8; ++i) {
    const int stage = i / 2;
    Job job = RingJob(4, stage);
    job.batch = 8;
    job.options.plan.gradients.dtype = i % 2 == 0 ? DType::kF32 : DType::kBF16;
    const absl::Status status = RunLocalRanks(
        job.world, RanksOf(job), OneThread,
        [&](const Rank& rank) -> absl::Status {
          Rig rig(rank, MakeModel(job.config), job.options,
                  Rehearse(job, rank, 2));
          rig.Step(TokenBatch(2, kLength, kVocab, 1), 1e-3f);
          const StepWire sent = WireOf(rank);
          EXPECT_EQ(sent, CountWire(rig->plan(), rig->schedule()));
          EXPECT_EQ(sent.reduced, FormulaWire(rig->plan(), 1).reduced);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(RingStagesTest, ARankThatLeavesIsNamedByAll) {
  for (int stage : {0, 1, 2, 3}) {
    ExpectALeaverIsNamedByAll(RingJob(4, stage), 1);
  }
}

// ---- Parameter server -------------------------------------------------------

Job ServerJob(int world) {
  Job job;
  job.config = TiedLlama();
  job.world = world;
  job.options.plan.placement = PlacementOfServer();
  job.options.plan.owners = 1;
  return job;
}

// A server is given no rows.
Job DirectJob(Job job) {
  job.rows = false;
  job.options.plan.placement = PlacementOfStage(0);
  job.options.plan.owners = 0;
  return job;
}

TEST(ServerTest, BucketsOverlapAndRecomputeChangeNoBit) {
  for (int world : {2, 3, 4}) {
    const Outcome want = Train(ServerJob(world));
    for (int bits = 0; bits < 8; ++bits) {
      Job job = ServerJob(world);
      const int64_t bucket = bits & 1 ? 1 : PlanOptions::kDefaultBucketElems;
      job.options.plan.reduce_bucket_elems = bucket;
      job.options.plan.gather_bucket_elems = bucket;
      job.options.overlap = bits & 2;
      job.options.recompute = bits & 4 ? Recompute::kFull : Recompute::kOff;
      EXPECT_EQ(Train(job), want) << world << " ranks, bits " << bits;
    }
  }
}

TEST(ServerTest, TheNumbersAreThoseOfDirect) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
      for (int world : {2, 3, 4}) {
        SCOPED_TRACE(testing::Message()
                     << world << " ranks, " << dtype << ", optimizer "
                     << static_cast<int>(kind));
        Job job = ServerJob(world);
        job.options.param_dtype = dtype;
        job.options.optimizer.kind = kind;
        job.micro_steps = 3;
        job.batch = 36;
        ExpectNear(Train(job), Train(DirectJob(job)));
      }
    }
  }
}

// Sums run in the order of direct; only the norm is added up in another one.
TEST(ServerTest, WithoutClippingTheParametersAreThoseOfDirectToTheBit) {
  Job job = ServerJob(3);
  job.options.max_grad_norm = 0;
  EXPECT_EQ(Train(job).parameters, Train(DirectJob(job)).parameters);
}

TEST(ServerTest, IntegersAddUpExactly) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Job job = ServerJob(4);
    job.options.param_dtype = dtype;
    job.prepare = MakeGradientsIntegers;
    EXPECT_EQ(Train(job), Train(DirectJob(job)));
  }
}

TEST(ServerTest, UnitsOfSeveralSegmentsAreServedWhole) {
  Job job = ServerJob(3);
  job.config = TinyConfig(ModelFamily::kGpt2);
  job.config.vocab_size = 140'001;
  job.batch = 3;
  job.steps = 2;
  job.options.optimizer.kind = OptimizerKind::kLamb;
  job.options.param_dtype = DType::kBF16;
  ExpectNear(Train(job), Train(DirectJob(job)));
}

TEST(ServerTest, DelaysChangeNoBit) {
  Job job = ServerJob(3);
  job.micro_steps = 2;
  const Outcome want = Train(job);
  AddDelays(&job);
  EXPECT_EQ(Train(job), want);
}

TEST(ServerTest, EvaluationBetweenStepsSeesTheServersParameters) {
  Job job = ServerJob(3);
  const auto sums_of = [](Job job) {
    std::mutex mutex;
    std::vector<double> sums;
    job.options.max_grad_norm = 0;
    job.between = [&](Rig& rig) {
      const TokenBatch batch(2, kLength, kVocab, 99);
      const double sum = rig.EvalLossSum(batch.All());
      std::lock_guard<std::mutex> lock(mutex);
      sums.push_back(sum);
    };
    Train(job);
    std::sort(sums.begin(), sums.end());
    return sums;
  };
  EXPECT_EQ(sums_of(job), sums_of(DirectJob(job)));
}

TEST(ServerTest, ANaNOfAWorkerSkipsTheStepOnAllAndIsNamed) {
  const Job job = ServerJob(3);
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
          const bool here =
              action.kind == ActionKind::kBackward && action.index == 2 && done;
          if (!here || rank.rank() != 1) return;
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
  EXPECT_EQ(names, std::vector<std::string>(3, bad_name));
}

// The server has the whole optimizer, the workers none of it; each sends the
// formula's bytes.
TEST(ServerTest, MemoryAndTheWireAreTheServersAndTheWorkers) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    Job job = ServerJob(4);
    job.options.param_dtype = dtype;
    job.micro_steps = 2;
    job.batch = 16;
    const int64_t p = DTypeBytes(dtype), r = 4;
    const absl::Status status = RunLocalRanks(
        job.world, RanksOf(job), OneThread,
        [&](const Rank& rank) -> absl::Status {
          const TransientBytes reserved = Rehearse(job, rank, 4);
          Rig rig(rank, MakeModel(job.config), job.options, reserved);
          rig.Step(TokenBatch(4, kLength, kVocab, 1), 1e-3f, 2);
          EXPECT_EQ(rig->high_water().device, reserved.device);
          const Plan& plan = rig->plan();
          const int64_t psi = plan.padded_elems;
          const bool serves = rank.rank() == 0;
          const auto array = [&](int64_t bytes) {
            return RoundUp(bytes * psi, Arena::kAlignment);
          };
          const MemoryLedger& ledger = rig.ledger();
          EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kParameters), array(p));
          EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kGradients), array(4));
          EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kOptimizer),
                    serves ? 2 * array(4) + array(4 - p) : 0);
          EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kReduceBuffers), 0);

          const StepWire wire = WireOf(rank);
          EXPECT_EQ(wire.gathered, serves ? 3 * psi * p : 0);
          EXPECT_EQ(wire.reduced, serves ? 0 : psi * r);
          EXPECT_EQ(wire.received, serves ? 3 * psi * r : psi * p);
          EXPECT_EQ(wire, CountWire(plan, rig->schedule(), rank.rank()));
          EXPECT_EQ(wire, FormulaWire(plan, 2, rank.rank()));
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// State that outlives a step: a worker's arrays of the optimizer are empty.
TEST(ServerTest, AStateTakenUpAgainGoesOnToTheSameBits) {
  Job job = ServerJob(3);
  job.options.param_dtype = DType::kBF16;
  const Outcome want = Train(job);
  job.between = [](Rig& rig) {
    std::vector<std::string> saved;
    rig->states().ForEachRun([&](const FlatState&, const StateRun& run) {
      saved.emplace_back(static_cast<const char*>(run.values.data()),
                         run.values.bytes());
      std::memset(run.values.data(), 0x55, run.values.bytes());
    });
    size_t at = 0;
    rig->states().ForEachRun([&](const FlatState&, const StateRun& run) {
      std::memcpy(run.values.data(), saved[at++].data(), run.values.bytes());
    });
  };
  EXPECT_EQ(Train(job), want);
}

TEST(ServerTest, ARankThatLeavesIsNamedByAll) {
  ExpectALeaverIsNamedByAll(ServerJob(4), 1);
}

TEST(ServerTest, AServerThatHangsIsNamedWithinTheTimeout) {
  const Failure failure =
      WithAHangingRank(ServerJob(3), /*hanging=*/0, /*bucket=*/0);
  EXPECT_EQ(failure.status.code(), absl::StatusCode::kDeadlineExceeded)
      << failure.status;
  EXPECT_EQ(failure.messages.size(), 3u);
  for (const std::string& message : failure.messages) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 0 did not arrive at #1"),
                               HasSubstr("reduce \"")));
  }
}

}  // namespace
}  // namespace zero
