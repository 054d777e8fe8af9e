// Ways to communicate: direct, ring, server (communication.algorithm) and
// groups of ranks. Each gives the same bits as itself, and the numbers of
// direct within rounding. Ranks are threads.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
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
// CPU's vector widths. In bf16 a difference may turn the rounding of a product
// or of a probability, which is 2^-9 of it.
void ExpectNear(const Outcome& got, const Outcome& want,
                DType dtype = DType::kF32) {
  const double error = dtype == DType::kF32 ? 1e-6 : 2e-4;
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], error * want.losses[step]);
    EXPECT_NEAR(got.norms[step], want.norms[step], error * want.norms[step]);
  }
  EXPECT_LT(RelativeDifference(got.parameters, want.parameters), 10 * error);
}

// A server is given no rows.
Job DirectJob(Job job) {
  job.rows = false;
  job.options.plan.placement = PlacementOfStage(0);
  job.options.plan.owners = 0;
  return job;
}

// ---- All ways to reduce -----------------------------------------------------

// The ranks, and those of a group; 0: one group.
struct Ranks {
  int world, shards = 0;
};

// A way to reduce gradients and to bring updated parameters to all ranks.
struct Way {
  const char* name;
  std::vector<int> stages;
  std::vector<Ranks> ranks;
  BulkAlgorithm algorithm = BulkAlgorithm::kDirect;
  bool serves = false;

  Job JobOf(const Ranks& of, int stage) const {
    Job job;
    job.config = TiedLlama();
    job.world = of.world;
    job.shards = of.shards;
    job.algorithm = algorithm;
    job.options = AtStage(job.options, stage);
    if (serves) {
      job.options.plan.placement = PlacementOfServer();
      job.options.plan.owners = 1;
    }
    return job;
  }
  // The same sums in the order of ranks.
  Job Direct(Job job) const {
    job.algorithm = BulkAlgorithm::kDirect;
    job.shards = 0;
    return serves ? DirectJob(std::move(job)) : job;
  }
};

class WaysTest : public testing::TestWithParam<Way> {
 protected:
  // fn(job) at every stage, with the last choice of ranks.
  static void ForEachStage(const std::function<void(Job)>& fn) {
    const Way& way = GetParam();
    for (const int stage : way.stages) {
      SCOPED_TRACE(testing::Message() << "stage " << stage);
      fn(way.JobOf(way.ranks.back(), stage));
    }
  }
  // fn(job, first) also with all choices of ranks; `first`: their first stage.
  static void ForEachJob(const std::function<void(Job, bool first)>& fn) {
    const Way& way = GetParam();
    for (const Ranks& ranks : way.ranks) {
      for (const int stage : way.stages) {
        SCOPED_TRACE(testing::Message() << ranks.world << " ranks in groups of "
                                        << ranks.shards << ", stage " << stage);
        fn(way.JobOf(ranks, stage), stage == way.stages.front());
      }
    }
  }
};

void SetBuckets(int64_t elems, Job* job) {
  job->options.plan.reduce_bucket_elems = elems;
  job->options.plan.gather_bucket_elems = elems;
}

// The ways that are not direct itself.
class OtherWaysTest : public WaysTest {};

TEST_P(WaysTest, StagesBucketsOverlapAndRecomputeChangeNoBit) {
  Outcome want;
  ForEachStage([&](Job job) {
    if (want.losses.empty()) want = Train(job);
    for (int bits = 0; bits < 16; ++bits) {
      SetBuckets(bits & 1 ? 1 : PlanOptions::kDefaultBucketElems, &job);
      job.options.overlap = bits & 2;
      job.options.recompute = kRecomputeLevels[bits / 4];
      EXPECT_EQ(Train(job), want) << "bits " << bits;
    }
  });
}

// Poisoned freed memory (set by RunRank) shows accesses that are too early or
// late.
TEST_P(WaysTest, DelaysChangeNoBit) {
  ForEachStage([](Job job) {
    job.batch = 24;
    job.micro_steps = 2;
    const Outcome want = Train(job);
    AddDelays(&job);
    EXPECT_EQ(Train(job), want);
  });
}

// Also right after a step, when stages 1 and 2 still gather its parameters.
TEST_P(WaysTest, EvaluationBetweenStepsChangesNoBitAndSeesTheUpdate) {
  const auto sums_of = [](Job job, Outcome* outcome) {
    std::mutex mutex;
    std::vector<double> sums;
    job.between = [&](Rig& rig) {
      const TokenBatch batch(2, kLength, kVocab, 99);
      const double sum = rig.EvalLossSum(batch.All());
      std::lock_guard<std::mutex> lock(mutex);
      sums.push_back(sum);
    };
    *outcome = Train(job);
    std::sort(sums.begin(), sums.end());
    return sums;
  };
  std::vector<double> expected;
  ForEachStage([&](Job job) {
    Outcome evaluated, ignored;
    const std::vector<double> sums = sums_of(job, &evaluated);
    EXPECT_EQ(evaluated, Train(job));
    if (expected.empty()) expected = sums;
    EXPECT_EQ(sums, expected);
    const auto direct = sums_of(GetParam().Direct(job), &ignored);
    ASSERT_EQ(sums.size(), direct.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      EXPECT_NEAR(sums[i], direct[i], 1e-6 * direct[i]);
    }
  });
}

// Parameters, master weights and moments that a rank holds.
std::vector<std::string> StatesOf(Rig& rig) {
  std::vector<std::string> states;
  rig->states().ForEachRun([&](const FlatState&, const StateRun& run) {
    states.emplace_back(static_cast<const char*>(run.values.data()),
                        run.values.bytes());
  });
  return states;
}

TEST_P(WaysTest, ANonFiniteGradientOfOneRankSkipsTheStepOnAllAndIsNamed) {
  ForEachStage([](Job job) {
    for (const int bad_step : {0, 1}) {
      const int bad_rank = 1 + bad_step;  // of another group
      job.options.param_dtype = bad_step == 0 ? DType::kF32 : DType::kBF16;
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
            int step = 0;
            rig->clock().set_hook([&](const Action& action, bool done) {
              const bool here = action.kind == ActionKind::kBackward &&
                                action.index == 2 && done;
              if (!here || rank.rank() != bad_rank || step != bad_step) return;
              bad.weight.sink->grad.As<float>()[5] =
                  bad_step == 0 ? std::numeric_limits<float>::quiet_NaN()
                                : std::numeric_limits<float>::infinity();
            });
            for (; step < 3; ++step) {
              const std::vector<std::string> before = StatesOf(rig);
              const StepOutput output =
                  rig.Step(TokenBatch(2, kLength, kVocab, step + 7), 1e-2f);
              EXPECT_EQ(output.skipped, step == bad_step);
              EXPECT_EQ(StatesOf(rig) == before, step == bad_step);
              if (step != bad_step) continue;
              std::lock_guard<std::mutex> lock(mutex);
              names.push_back(output.non_finite);
            }
            return absl::OkStatus();
          });
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(names, std::vector<std::string>(job.world, bad_name));
    }
  });
}

TEST_P(WaysTest, ARankThatLeavesIsNamedByAll) {
  ForEachStage([](const Job& job) {
    for (const int leaver : {1, job.world - 1}) {
      ExpectALeaverIsNamedByAll(job, leaver);
    }
  });
}

TEST_P(OtherWaysTest, TheNumbersAreThoseOfDirect) {
  struct Case {
    OptimizerKind optimizer;
    int micro_steps;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case of :
         {Case{OptimizerKind::kAdamW, 1}, Case{OptimizerKind::kAdamW, 3},
          Case{OptimizerKind::kLamb, 1}}) {
      SCOPED_TRACE(testing::Message()
                   << dtype << ", optimizer " << static_cast<int>(of.optimizer)
                   << ", micro-steps " << of.micro_steps);
      Outcome first;
      ForEachJob([&](Job job, bool is_first) {
        job.options.param_dtype = dtype;
        job.options.optimizer.kind = of.optimizer;
        job.micro_steps = of.micro_steps;
        job.batch = 36;
        const Outcome got = Train(job);
        ExpectNear(got, Train(GetParam().Direct(job)), dtype);
        // Several micro-steps add up in one of two orders, by the stage.
        if (job.micro_steps > 1) return;
        if (is_first) first = got;
        EXPECT_EQ(got, first);
        SetBuckets(1, &job);
        job.options.overlap = !job.options.overlap;
        EXPECT_EQ(Train(job), first);
      });
    }
  }
}

TEST_P(OtherWaysTest, IntegersAddUpExactly) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    ForEachJob([&](Job job, bool) {
      job.options.param_dtype = dtype;
      job.prepare = MakeGradientsIntegers;
      EXPECT_EQ(Train(job), Train(GetParam().Direct(job)));
    });
  }
}

// Gradients are rounded to bf16 once, in groups once per axis; direct rounds
// once. The norms differ by less than one rounding.
TEST_P(OtherWaysTest, GradientsMayBeSentAsBf16) {
  Outcome first;
  ForEachJob([&](Job job, bool is_first) {
    job.steps = 1;
    const Outcome exact = Train(job);
    job.options.plan.gradients.dtype = DType::kBF16;
    const Outcome rounded = Train(job);
    EXPECT_NE(rounded.norms[0], exact.norms[0]);
    if (is_first) first = rounded;
    EXPECT_EQ(rounded, first);
    const double direct = Train(GetParam().Direct(job)).norms[0];
    EXPECT_NEAR(rounded.norms[0], direct, direct / 1024);
  });
}

const std::vector<Way> kWays = {
    {.name = "Direct", .stages = {0, 1, 2, 3}, .ranks = {{3}}},
    {.name = "Ring",
     .stages = {0, 1, 2, 3},
     .ranks = {{2}, {3}, {4}},
     .algorithm = BulkAlgorithm::kRing},
    {.name = "Server", .stages = {0}, .ranks = {{2}, {3}, {4}}, .serves = true},
    // The ranks 1 and 2 are of two groups.
    {.name = "Groups", .stages = {1, 2, 3}, .ranks = {{6, 1}, {6, 3}, {6, 2}}}};

std::string WayName(const testing::TestParamInfo<Way>& way) {
  return way.param.name;
}
INSTANTIATE_TEST_SUITE_P(Ways, WaysTest, testing::ValuesIn(kWays), WayName);
INSTANTIATE_TEST_SUITE_P(Ways, OtherWaysTest,
                         testing::ValuesIn(kWays.begin() + 1, kWays.end()),
                         WayName);

// ---- Rings ------------------------------------------------------------------

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

// ---- Parameter server -------------------------------------------------------

Job ServerJob(int world) {
  Job job;
  job.config = TiedLlama();
  job.world = world;
  job.options.plan.placement = PlacementOfServer();
  job.options.plan.owners = 1;
  return job;
}

// Sums run in the order of direct; only the norm is added up in another one.
TEST(ServerTest, WithoutClippingTheParametersAreThoseOfDirectToTheBit) {
  Job job = ServerJob(3);
  job.options.max_grad_norm = 0;
  EXPECT_EQ(Train(job).parameters, Train(DirectJob(job)).parameters);
}

TEST(ServerTest, ATableInPartsIsServedWithTheBitsOfTheWhole) {
  for (const bool tied : {false, true}) {
    Job job = ServerJob(3);
    job.config.vocab_size = 3001;
    job.config.tie_word_embeddings = tied;
    job.options.plan.min_part_elems = 1;
    const Outcome whole = Train(job);
    job.options.plan.vocabulary_parts = true;
    EXPECT_TRUE(PlanOf(job).in_parts());
    EXPECT_EQ(Train(job), whole);
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
