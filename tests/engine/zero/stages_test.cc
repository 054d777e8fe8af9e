// The promises of the ZeRO stages: the same bits, less memory, the bytes of
// the formula, and no rank left waiting. Ranks are threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/status.h"
#include "engine/comm/fault.h"
#include "engine/comm/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/sizes.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- The same bits --------------------------------------------------------

TEST(StagesTest, EveryStageGivesTheSameBits) {
  ModelConfig untied_rows = TinyConfig(ModelFamily::kLlama);
  untied_rows.vocab_size = kManyWords;
  for (const ModelConfig& config :
       {TinyConfig(ModelFamily::kGpt2), TiedLlama(), untied_rows,
        TinyConfig(ModelFamily::kQwen3)}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int world : {2, 3, 4}) {
        Job job;
        job.config = config;
        job.config.resid_pdrop = 0.1;
        job.world = world;
        job.options.param_dtype = dtype;
        const Outcome want = Train(job);
        for (int stage : {1, 2, 3}) {
          SCOPED_TRACE(testing::Message()
                       << ModelFamilyName(config.family) << " " << dtype
                       << " world " << world << " stage " << stage);
          job.options = AtStage(job.options, stage);
          EXPECT_EQ(Train(job), want);
        }
      }
    }
  }
}

// Phases move owners, and so the norm is summed in another order.
TEST(StagesTest, PhasesOfBackwardChangeNoBit) {
  for (ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (int bits = 0; bits < 16; bits += kSettingsStep) {
      Job job{.config = TinyConfig(family),
              .world = bits & 1 ? 3 : 2,
              .micro_steps = bits & 2 ? 2 : 1};
      job.config.num_hidden_layers = bits & 4 ? 3 : 2;
      job.options.max_grad_norm = 0;
      if (bits & 1) job.options.param_dtype = DType::kBF16;
      if (bits & 8) {
        job.make = [config = job.config] { return MakePartlyFrozen(config); };
      }
      SCOPED_TRACE(testing::Message()
                   << ModelFamilyName(family) << " bits " << bits);
      job.options = AtStage(job.options, 2);
      const Outcome want = Train(job);
      const auto expect_same_bits = [&] {
        const Outcome outcome = Train(job);
        EXPECT_EQ(outcome.losses, want.losses);
        EXPECT_EQ(outcome.parameters, want.parameters);
      };
      job.options.plan.max_one_phase_elems = 0;
      EXPECT_GT(PlanOf(job).units[2].phases.size(), 1u);
      for (int stage : {2, 3}) {
        for (Recompute recompute : kRecomputeLevels) {
          SCOPED_TRACE(testing::Message() << "stage " << stage << ", recompute "
                                          << RecomputeName(recompute));
          job.options = AtStage(job.options, stage);
          job.options.recompute = recompute;
          expect_same_bits();
          job.options.overlap = !job.options.overlap;
        }
      }
      AddDelays(&job);
      expect_same_bits();
    }
  }
}

// On 8 ranks all sums together are smaller than a quarter of the table: stage 3
// takes them before the step.
TEST(StagesTest, SmallSumsOfGradientsTakenAtTheStartChangeNoBit) {
  for (const bool frozen : {false, true}) {
    for (const bool rows : {false, true}) {
      Job job{.world = 8, .batch = 8};
      job.config.vocab_size = 4000;
      job.rows = rows;
      if (frozen) {
        job.make = [&] {
          auto model = MakeModel(job.config);
          for (const auto& parameter : model->units()[1]->parameters()) {
            parameter->frozen = true;
          }
          return model;
        };
      }
      SCOPED_TRACE(testing::Message()
                   << "frozen " << frozen << " rows " << rows);
      job.options = AtStage(job.options, 0);
      const Outcome want = Train(job);
      job.options = AtStage(job.options, 3);
      EXPECT_EQ(Train(job), want);
    }
  }
}

TEST(StagesTest, WhenParametersAreGatheredChangesNoBit) {
  Job job{.config = TiedLlama(), .world = 3, .micro_steps = 2};
  job.options = AtStage(job.options, 3);
  const Outcome want = Train(job);
  const GatherPolicy policies[] = {
      {.prefetch_elems = 0},
      {.prefetch_elems = 20'000},
      {.max_live_elems = 0},
      {.max_live_elems = 20'000},
      {.max_live_elems = 1'000'000'000},
      {.prefetch_elems = 40'000, .max_live_elems = 30'000},
      {.max_reuse_distance = 0},
      {.max_reuse_distance = 1'000'000'000},
      {.persistence_threshold = 100'000},
      {.persistence_threshold = 100'000, .max_persistent_elems = 20'000},
  };
  for (const GatherPolicy& policy : policies) {
    for (Recompute recompute : kRecomputeLevels) {
      job.options.gather = policy;
      job.options.recompute = recompute;
      EXPECT_EQ(Train(job), want);
    }
  }
}

TEST(StagesTest, OneRankIsTheSameAtEveryStage) {
  Job job;
  job.world = 1;
  const Outcome want = Train(job);
  for (int stage : {1, 2, 3}) {
    job.options = AtStage(job.options, stage);
    EXPECT_EQ(Train(job), want);
  }
}

TEST(StagesTest, PackedRowsGiveTheSameBitsAtEveryStage) {
  Job job;
  job.config = TinyConfig(ModelFamily::kGpt2);
  job.config.resid_pdrop = 0.1;
  const Outcome apart = Train(job);
  job.packed = true;
  const Outcome want = Train(job);
  EXPECT_NE(want.losses, apart.losses);
  for (int stage : {1, 2, 3}) {
    job.options = AtStage(job.options, stage);
    EXPECT_EQ(Train(job), want) << "stage " << stage;
  }
}

// An element's random number does not depend on who rounds it.
TEST(StagesTest, StochasticRoundingGivesTheSameBitsAtEveryStage) {
  for (OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kLamb, OptimizerKind::kSgd}) {
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      Job job;
      job.world = 3;
      job.options.param_dtype = dtype;
      job.options.optimizer.kind = kind;
      const Outcome nearest = Train(job);
      job.options.stochastic_rounding = true;
      const Outcome want = Train(job);
      EXPECT_NE(want.losses, nearest.losses);
      for (int stage : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << "optimizer " << static_cast<int>(kind) << " " << dtype
                     << " stage " << stage);
        job.options = AtStage(job.options, stage);
        EXPECT_EQ(Train(job), want);
      }
    }
  }
}

// One step is skipped, and gradients are clipped.
TEST(StagesTest, SplitMastersGiveTheBitsOfWholeOnes) {
  for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kAdam,
                             OptimizerKind::kLamb, OptimizerKind::kSgd}) {
    for (DType grad_dtype : {DType::kF32, DType::kBF16}) {
      Job job;
      job.steps = 6;
      job.options.param_dtype = DType::kBF16;
      job.options.grad_dtype = grad_dtype;
      job.options.plan.gradients = {grad_dtype};
      job.options.optimizer.kind = kind;
      job.options.optimizer.momentum = 0.9;
      std::atomic<int> num_skipped = 0;
      job.prepare = [&](const Rank& rank, Rig& rig) {
        if (rank.rank() != 1) return;
        rig->clock().set_hook(
            [&, step = 0](const Action& action, bool done) mutable {
              if (action.kind != ActionKind::kBackward || action.index != 2 ||
                  !done || step++ != 2) {
                return;
              }
              const Tensor& grad =
                  rig.model().units()[2]->parameters()[0]->weight.sink->grad;
              // Infinity, in the upper half of a float or as the second bf16.
              static_cast<uint16_t*>(grad.data())[0] = 0;
              static_cast<uint16_t*>(grad.data())[1] = 0x7f80;
              ++num_skipped;
            });
      };
      job.options.split_master = false;
      const Outcome want = Train(job);
      job.options.split_master = true;
      for (int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << "optimizer " << static_cast<int>(kind) << " "
                     << grad_dtype << " stage " << stage);
        job.options = AtStage(job.options, stage);
        EXPECT_EQ(Train(job), want);
      }
      EXPECT_EQ(num_skipped, 5);
    }
  }
}

// LAMB's ratios are of whole parameters, wherever their shards are.
TEST(StagesTest, EveryOptimizerGivesTheSameBitsAtEveryStage) {
  for (OptimizerKind kind :
       {OptimizerKind::kLamb, OptimizerKind::kSgd, OptimizerKind::kAdam}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int world : {2, 3, 4}) {
        Job job;
        if (world != 3) job.config = TiedLlama();
        job.world = world;
        job.options.param_dtype = dtype;
        job.options.optimizer.kind = kind;
        job.options.optimizer.momentum = 0.9;
        const Outcome want = Train(job);
        for (int stage : {1, 2, 3}) {
          for (bool overlap : {false, true}) {
            SCOPED_TRACE(testing::Message()
                         << "optimizer " << static_cast<int>(kind) << " "
                         << dtype << " world " << world << " stage " << stage
                         << " overlap " << overlap);
            job.options = AtStage(job.options, stage);
            job.options.overlap = overlap;
            job.options.plan.reduce_bucket_elems = overlap ? 1 : 1 << 20;
            EXPECT_EQ(Train(job), want);
          }
        }
      }
    }
  }
}

TEST(StagesTest, UnitsOfSeveralSegmentsGiveTheSameBits) {
  Job job;
  job.config.vocab_size = 140'001;
  job.world = 3;
  job.batch = 3;
  job.steps = 2;
  job.options.optimizer.kind = OptimizerKind::kLamb;
  const auto model = MakeModel(job.config);
  const Plan plan = MakePlan(DescribeUnits(*model), {.world = 3});
  ASSERT_EQ(plan.units.back().segments.size(), 18u);
  const Outcome want = Train(job);
  for (int stage : {2, 3}) {
    job.options = AtStage(job.options, stage);
    job.options.plan.reduce_bucket_elems = stage == 2 ? 1 : 1 << 24;
    EXPECT_EQ(Train(job), want) << "stage " << stage;
  }
}

// A rank's shards of a unit are then not contiguous in the unit, and are still
// updated.
TEST(StagesTest, ASegmentPerTensorGivesTheSameBitsAtEveryStage) {
  for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      Job job;
      job.config = TiedLlama();
      job.world = 3;
      job.options.param_dtype = dtype;
      job.options.stochastic_rounding = dtype == DType::kBF16;
      job.options.optimizer.kind = kind;
      job.options.plan.segment_per_tensor = true;
      job.options.plan.reduce_bucket_elems = 1;
      job.options.plan.gather_bucket_elems = 1;
      const Outcome want = Train(job);
      for (int stage : {1, 2, 3}) {
        job.options = AtStage(job.options, stage);
        EXPECT_EQ(Train(job), want) << "optimizer " << static_cast<int>(kind)
                                    << " " << dtype << " stage " << stage;
      }
    }
  }
}

// A ratio of shards instead of parameters would be far off.
TEST(StagesTest, LambOfRanksIsThatOfOneRank) {
  Job alone;
  alone.config = TiedLlama();
  alone.world = 1;
  alone.options.optimizer.kind = OptimizerKind::kLamb;
  const Outcome want = Train(alone);
  for (int stage : {0, 3}) {
    Job job = alone;
    job.world = 4;
    job.options = AtStage(job.options, stage);
    EXPECT_LT(RelativeDifference(Train(job).parameters, want.parameters), 2e-5);
  }
}

// The dtypes of accumulated and of sent gradients.
struct GradientDtypes {
  DType params, accumulated, sent;
};

TEST(StagesTest, HalfPrecisionGradientsGiveTheSameBitsAtEveryStage) {
  constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16, kF16 = DType::kF16;
  for (const GradientDtypes& dtypes : {GradientDtypes{kF32, kF32, kBF16},
                                       {kBF16, kF32, kBF16},
                                       {kF16, kF32, kF16},
                                       {kBF16, kF32, kF16},
                                       {kBF16, kBF16, kBF16},
                                       {kF16, kF16, kF16},
                                       {kBF16, kBF16, kF32}}) {
    for (int world : {2, 3, 4}) {
      Job job;
      job.config = TiedLlama();
      job.world = world;
      job.loss_scale = dtypes.params == kF16 ? 64 : 1;
      job.options.param_dtype = dtypes.params;
      const Outcome fp32 = Train(job);
      job.options.grad_dtype = dtypes.accumulated;
      job.options.plan.gradients.dtype = dtypes.sent;
      const Outcome want = Train(job);
      // Rounding is visible, and small: 2^-9 relative in bf16, once in the
      // first norm, and then also through the parameters.
      EXPECT_NE(want.parameters, fp32.parameters);
      for (int step = 0; step < job.steps; ++step) {
        EXPECT_NEAR(want.norms[step], fp32.norms[step],
                    fp32.norms[step] * 3 / 512);
      }
      for (int stage : {0, 1, 2, 3}) {
        for (bool small : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << dtypes.params << " accumulated in "
                       << dtypes.accumulated << " sent in " << dtypes.sent
                       << " world " << world << " stage " << stage);
          job.options = AtStage(job.options, stage);
          job.options.plan.reduce_bucket_elems = small ? 1 : 1 << 20;
          job.options.overlap = !small;
          EXPECT_EQ(Train(job), want);
        }
      }
    }
  }
}

TEST(StagesTest, AReducedGradientIsRoundedOnceToWhatIsSent) {
  constexpr int kWorld = 3;
  Job job;
  job.world = kWorld;
  job.options.plan.gradients.dtype = DType::kBF16;
  std::mutex mutex;
  // By rank, before the reduction.
  std::map<std::string, std::array<Floats, kWorld>> local;
  std::map<std::string, Floats> reduced;
  const absl::Status status = RunLocalRanks(
      kWorld, {.local = {.timeout = absl::Seconds(60)}}, OneThread,
      [&](const Rank& rank) -> absl::Status {
        Rig rig(rank, MakeModel(job.config), job.options,
                Rehearse(job, rank, 2));
        // Stage 0 has all gradients, a bucket has whole units here.
        rig->clock().set_hook([&](const Action& action, bool done) {
          if (action.kind != ActionKind::kReduce || done) return;
          std::lock_guard<std::mutex> lock(mutex);
          for (const SegmentRef& ref :
               rig->plan().reduce_buckets[action.index].segments) {
            for (const auto& p : rig->plan().units[ref.unit].parameters) {
              local[p.spec.name][rank.rank()] =
                  rig.Gradient(rig.parameter(p.spec.name));
            }
          }
        });
        rig.Step(TokenBatch(2, kLength, kVocab, rank.rank() + 1), 1e-3f);
        std::lock_guard<std::mutex> lock(mutex);
        for (const Parameter* p : rig.model().AllParameters()) {
          reduced[p->name] = rig.Gradient(*p);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  for (const auto& [name, got] : reduced) {
    for (size_t i = 0; i < got.size(); ++i) {
      float sum = 0;
      for (const Floats& one : local[name]) {
        sum += BF16ToF32(F32ToBF16(one[i]));
      }
      ASSERT_EQ(got[i], BF16ToF32(F32ToBF16(sum))) << name;
    }
  }
}

// Stages 0 and 1 add micro-batches up before ranks, 2 and 3 after.
TEST(StagesTest, MicroBatchesAddUpInTwoOrders) {
  Job job;
  job.config = TiedLlama();
  job.world = 2;
  job.micro_steps = 3;
  std::vector<Outcome> outcomes;
  for (int stage : {0, 1, 2, 3}) {
    job.options = AtStage(job.options, stage);
    outcomes.push_back(Train(job));
  }
  EXPECT_EQ(outcomes[0], outcomes[1]);
  EXPECT_EQ(outcomes[2], outcomes[3]);
  for (size_t i = 0; i < outcomes[0].losses.size(); ++i) {
    EXPECT_NEAR(outcomes[0].losses[i], outcomes[2].losses[i],
                1e-6 * outcomes[0].losses[i]);
    EXPECT_NEAR(outcomes[0].norms[i], outcomes[2].norms[i],
                5e-6 * outcomes[0].norms[i]);
  }
}

// ---- Memory ---------------------------------------------------------------

TEST(StagesTest, StatesTakeWhatTheFormulaSays) {
  for (int world : {2, 3, 4}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      Job job;
      job.world = world;
      job.options.param_dtype = dtype;
      const auto model = MakeModel(job.config);
      const int64_t psi =
          MakePlan(DescribeUnits(*model), {.world = world}).padded_elems;
      const int64_t p = DTypeBytes(dtype), a = 4, o = 8;
      const int64_t m = 4 - (dtype == DType::kF16 ? 0 : p);
      for (int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << "world " << world << " stage "
                                        << stage << " " << dtype);
        const MemoryLedger ledger = Measure(job, stage);
        // A multiple of the arena's alignment, each array.
        const auto array = [&](int64_t bytes, int64_t ranks) {
          return RoundUp(bytes * psi / ranks, Arena::kAlignment);
        };
        EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kParameters),
                  array(p, stage >= 3 ? world : 1));
        EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kGradients),
                  array(a, stage >= 2 ? world : 1));
        const int64_t shards = stage >= 1 ? world : 1;
        EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kOptimizer),
                  array(m, shards) + 2 * array(o / 2, shards));
        EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kGatheredParameters) > 0,
                  stage == 3);
        EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kReduceBuffers) > 0,
                  stage >= 2);
      }
    }
  }
}

// Not even during reductions, and with fragmentation: arenas' reservations fall
// from stage to stage, with few activations and with many.
TEST(StagesTest, ShardedGradientsTakeNoMoreMemoryThanWholeOnes) {
  for (int world : {2, 4}) {
    for (int64_t rows : {1, 16}) {
      for (int layers : {2, 8}) {
        Job job;
        job.world = world;
        job.batch = rows * world;
        job.config.num_hidden_layers = layers;
        int64_t above = std::numeric_limits<int64_t>::max();
        for (int stage : {0, 1, 2}) {
          SCOPED_TRACE(testing::Message()
                       << world << " ranks of " << rows << " rows, " << layers
                       << " layers, stage " << stage);
          Job at = Planned(job);
          at.options = AtStage(at.options, stage);
          const absl::Status status = RunLocalRanks(
              world, RanksOf(at), OneThread,
              [&](const Rank& rank) -> absl::Status {
                if (rank.rank() > 0) return absl::OkStatus();
                const std::unique_ptr<Device> meta =
                    MakeMetaDevice(*rank.device);
                const Rank imagined = MakeRehearsalRank(*meta, rank);
                Rig rig(imagined, at.Make(), at.options, {kUnlimited});
                rig.Step(GlobalBatch(rows, 0), 0);
                EXPECT_LE(rig->used_bytes(), above);
                above = rig->used_bytes();
                return absl::OkStatus();
              });
          EXPECT_TRUE(status.ok()) << status;
        }
      }
    }
  }
}

TEST(StagesTest, GradientsThatAreSentInAnotherDtypeTakeOneBucket) {
  Job job;
  job.world = 3;
  job.options.plan.gradients.dtype = DType::kBF16;
  job.options.plan.reduce_bucket_elems = 20'000;
  for (int stage : {0, 1, 2, 3}) {
    Job plain = job;
    plain.options.plan.gradients.dtype = DType::kF32;
    const auto model = MakeModel(job.config);
    const Plan plan =
        MakePlan(DescribeUnits(*model),
                 AtStage(job.options, stage)
                     .plan_options(job.world, job.world, job.algorithm));
    int64_t largest = 0;
    for (const Bucket& bucket : plan.reduce_buckets) {
      largest = std::max(largest, bucket.elems);
    }
    const auto bytes = [&](const Job& one) {
      return Measure(one, stage).peak_bytes(MemoryCategory::kReduceBuffers);
    };
    const int64_t more = bytes(job) - bytes(plain);
    EXPECT_LE(more, RoundUp(2 * largest, Arena::kAlignment));
    // With replicated gradients there is nothing else in the category.
    if (stage < 2) {
      EXPECT_EQ(more, RoundUp(2 * largest, Arena::kAlignment));
    } else {
      EXPECT_GT(more, 0);
    }
  }
}

TEST(StagesTest, PeakFallsWithTheStageAndTransientsDoNotGrowWithLayers) {
  Job job;
  job.world = 2;
  job.batch = 2;
  std::vector<int64_t> gathered, reduced;
  for (int64_t layers : {4, 8, 16}) {
    job.config = TiedLlama();
    job.config.num_hidden_layers = layers;
    int64_t above = std::numeric_limits<int64_t>::max();
    for (int stage : {0, 1, 2, 3}) {
      const MemoryLedger ledger = Measure(job, stage);
      if (layers >= 8) {
        EXPECT_LE(ledger.total_peak_bytes(), above)
            << "stage " << stage << ", " << layers << " layers";
      }
      above = ledger.total_peak_bytes();
      if (stage < 3) continue;
      gathered.push_back(
          ledger.peak_bytes(MemoryCategory::kGatheredParameters));
      reduced.push_back(ledger.peak_bytes(MemoryCategory::kReduceBuffers));
    }
  }
  EXPECT_EQ(gathered, std::vector<int64_t>(3, gathered[0]));
  EXPECT_EQ(reduced, std::vector<int64_t>(3, reduced[0]));
}

// Memory of the process, as counted by the operating system. 0 under a
// sanitizer, whose own memory grows.
int64_t Resident() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return 0;
#else
  return cpu::ReadHostMemory().resident;
#endif
}

TEST(StagesTest, RestingMemoryReturnsToItsStartOverAThousandSteps) {
  Job job;
  job.config = TiedLlama();
  job.world = 2;
  job.batch = 2;
  for (int stage : {0, 3}) {
    SCOPED_TRACE(testing::Message() << "stage " << stage);
    job.options = AtStage(job.options, stage);
    const absl::Status status = RunLocalRanks(
        job.world, RanksOf(job), OneThread,
        [&](const Rank& rank) -> absl::Status {
          Rig rig(rank, MakeModel(job.config), job.options,
                  Rehearse(job, rank, 1));
          const int64_t at_start = rig.ledger().total_live_bytes();
          int64_t resident = 0;
          for (int step = 1; step <= 1000; ++step) {
            rig.Step(TokenBatch(1, kLength, kVocab, step), 1e-3f);
            EXPECT_EQ(rig->transient().live_bytes(), 0);
            EXPECT_EQ(rig.ledger().total_live_bytes(), at_start);
            if (step == 100) resident = Resident();
          }
          // Not a byte for every step.
          EXPECT_LT(Resident(), resident + (1 << 20));
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// ---- The wire -------------------------------------------------------------

struct Wire {
  CollectiveCount gathers, reductions;
};

// One step, of every rank.
Wire CountOneStep(Job job, int stage) {
  job.options = AtStage(job.options, stage);
  std::mutex mutex;
  std::vector<Wire> wires;
  const absl::Status status = RunLocalRanks(
      job.world, {.local = {.timeout = absl::Seconds(60)}}, OneThread,
      [&](const Rank& rank) -> absl::Status {
        const int64_t rows = job.batch / job.world;
        Rig rig(rank, MakeModel(job.config), job.options,
                Rehearse(job, rank, rows));
        rig.Step(TokenBatch(rows, kLength, kVocab, 1), 1e-3f,
                 rows / job.micro_steps);
        const Wire wire{rank.gather->Total(), rank.reduce->Total()};
        const StepWire planned = CountWire(rig->plan(), rig->schedule());
        EXPECT_EQ(planned.gathered, wire.gathers.bytes);
        EXPECT_EQ(planned.reduced, wire.reductions.bytes);
        std::lock_guard<std::mutex> lock(mutex);
        wires.push_back(wire);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  for (const Wire& wire : wires) {
    EXPECT_EQ(wire.gathers.bytes, wires[0].gathers.bytes);
    EXPECT_EQ(wire.reductions.bytes, wires[0].reductions.bytes);
  }
  return wires[0];
}

TEST(StagesTest, BytesOnTheWireAreTheFormula) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t micro_steps : {1, 3}) {
      Job job;
      job.config = TinyConfig(ModelFamily::kLlama);
      job.world = 3;
      job.batch = 18;
      job.micro_steps = micro_steps;
      job.options.param_dtype = job.options.plan.gradients.dtype = dtype;
      const auto model = MakeModel(job.config);
      const Plan plan = MakePlan(DescribeUnits(*model), {.world = 3});
      // The head is followed by its own table, then by that of the embedding,
      // which has nothing else.
      const int64_t head = plan.num_computing - 1;
      const int64_t units = plan.num_computing + 1;
      const int64_t sent = plan.padded_elems / 3 * 2;  // k Psi
      const int64_t p = DTypeBytes(dtype), r = p, G = micro_steps;
      for (int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << " " << dtype
                                        << " micro-steps " << G);
        const Wire wire = CountOneStep(job, stage);
        // Stage 0 gathers the sums as well.
        EXPECT_EQ(wire.reductions.bytes, (stage >= 2   ? G
                                          : stage == 0 ? 2
                                                       : 1) *
                                             r * sent);
        if (stage == 0) {
          EXPECT_EQ(wire.gathers.bytes, 0);
        }
        if (stage == 1 || stage == 2) {
          EXPECT_EQ(wire.gathers.bytes, p * sent);
        }
        if (stage < 3) continue;
        // Twice every unit, but the head and the last block are still in place
        // when they are needed again, and the embedding's backward reads none.
        EXPECT_EQ(wire.gathers.calls, G * (2 * units - 4));
        const auto elems = [&](int64_t u) {
          return plan.units[u].padded_elems / 3 * 2;
        };
        EXPECT_EQ(wire.gathers.bytes,
                  p * G *
                      (2 * sent - elems(head) - elems(head - 1) -
                       elems(head + 1) - elems(head + 2)));
        EXPECT_EQ(wire.reductions.calls, G * units);
      }
    }
  }
}

// ---- Faults ---------------------------------------------------------------

// A rank that throws, hangs or issues another collective, in the middle of
// the second step: every rank ends, with the rank and the collective. (The
// step is the trainer's: tests/engine/train/trainer_test.)
TEST(StagesTest, AFaultInMidStepIsNamedByAllRanks) {
  const struct {
    FaultKind kind;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {FaultKind::kThrow, absl::StatusCode::kInternal,
       "rank 1 aborted the run: injected fault in step 2 at reduce_scatter "
       "\"head\""},
      {FaultKind::kStop, absl::StatusCode::kDeadlineExceeded,
       "rank 1 did not arrive at"},
      {FaultKind::kMismatch, absl::StatusCode::kFailedPrecondition,
       "rank 1 is in barrier \"injected fault\", rank 0 in reduce_scatter "
       "\"head\""},
  };
  for (const auto& c : kCases) {
    for (int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << c.words << ", stage " << stage);
      Job job;
      job.world = 3;
      job.options = AtStage(job.options, stage);
      FaultInjector injector({.rank = 1, .step = 2, .kind = c.kind},
                             kStepCollective);
      LocalRanksOptions ranks;
      // The default is minutes: only a hanging rank is waited for.
      if (c.kind == FaultKind::kStop) ranks.local.timeout = absl::Seconds(2);
      ranks.wrap = [&](int rank, const std::string& channel, auto end) {
        return injector.Wrap(rank, channel, std::move(end));
      };
      std::atomic<int> num_hangs{0};
      ranks.on_hang = [&](const absl::Status& error) {
        ++num_hangs;
        EXPECT_THAT(std::string(error.message()),
                    HasSubstr("; rank 1 hangs and is abandoned"));
        injector.Release();  // a program would end here
      };
      const auto [status, messages] =
          RunToFailure(job, ranks, [](const Rank&, Rig& rig) {
            absl::Status status;
            int steps = 0;
            for (; steps < 5 && status.ok(); ++steps) status = SmallStep(rig);
            // Others may learn of it at the end of the first step already.
            EXPECT_THAT(steps, AnyOf(1, 2));
            return status;
          });
      EXPECT_TRUE(injector.happened());
      EXPECT_EQ(status.code(), c.code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.words));
      EXPECT_EQ(num_hangs, c.kind == FaultKind::kStop ? 1 : 0);
      // A rank that throws reports by throwing.
      EXPECT_EQ(messages.size(), c.kind == FaultKind::kThrow ? 2u : 3u);
      for (const std::string& message : messages) {
        EXPECT_THAT(message, HasSubstr("rank 1"));
        EXPECT_THAT(message, ContainsRegex("reduce_scatter|all_gather"));
      }
    }
  }
}

TEST(StagesTest, FrozenParametersHaveNoGradientMasterOrMoments) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<Outcome> outcomes;
      std::set<std::string> hashes;
      for (int stage : {0, 1, 2, 3}) {
        Job job;
        if (kind == OptimizerKind::kLamb) job.config = TiedLlama();
        job.make = [config = job.config] { return MakePartlyFrozen(config); };
        job.options = AtStage(job.options, stage);
        job.options.param_dtype = dtype;
        job.options.optimizer.kind = kind;
        std::mutex mutex;
        job.between = [&](Rig& rig) {
          const Plan& plan = rig->plan();
          EXPECT_LT(plan.trained_elems, plan.padded_elems);
          const auto bytes = [&](Placement placement, int64_t item) {
            return RoundUp(
                item * plan.StateElems(plan.trained_elems, placement),
                Arena::kAlignment);
          };
          const MemoryLedger& ledger = rig.ledger();
          EXPECT_EQ(ledger.live_bytes(MemoryCategory::kGradients), 0);
          EXPECT_EQ(ledger.peak_bytes(MemoryCategory::kGradients),
                    bytes(plan.placement.gradients, 4));
          EXPECT_EQ(ledger.live_bytes(MemoryCategory::kOptimizer),
                    2 * bytes(plan.placement.optimizer, 4) +
                        bytes(plan.placement.optimizer,
                              dtype == DType::kF32 ? 0 : 2));
          const auto hash = rig->states().Hash();
          std::lock_guard<std::mutex> lock(mutex);
          EXPECT_TRUE(hash.ok()) << hash.status();
          hashes.insert(hash.value_or(""));
        };
        outcomes.push_back(Train(job));
        EXPECT_EQ(outcomes.back(), outcomes.front()) << "stage " << stage;
        EXPECT_EQ(hashes.size(), static_cast<size_t>(job.steps));
      }
    }
  }
}

// Nothing is reduced or updated; the loss is unchanged.
TEST(StagesTest, AllParametersMayBeFrozen) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
    for (int stage : {0, 1, 2, 3}) {
      Job job;
      job.options = AtStage(job.options, stage);
      job.options.optimizer.kind = kind;
      const std::vector<double> losses = Train(job).losses;
      job.make = [config = job.config] {
        std::unique_ptr<Model> model = MakeModel(config);
        for (Parameter* parameter : model->AllParameters()) {
          parameter->frozen = true;
        }
        return model;
      };
      const Outcome frozen = Train(job);
      EXPECT_EQ(frozen.losses[0], losses[0]);
      EXPECT_EQ(frozen.norms, std::vector<double>(job.steps, 0));
    }
  }
}

TEST(StagesTest, RanksWithDifferentSchedulesAllSaySoBeforeAnythingMoves) {
  for (int stage : {0, 1, 2, 3}) {
    Job job;
    job.world = 3;
    job.options = AtStage(job.options, stage);
    std::mutex mutex;
    std::vector<std::string> messages;
    const absl::Status status = RunLocalRanks(
        job.world, {.local = {.timeout = absl::Seconds(20)}}, OneThread,
        [&](const Rank& rank) -> absl::Status {
          RigOptions options = job.options;
          if (rank.rank() == 2) {
            options.plan.reduce_bucket_elems = 1;
            // A tiny unit is one bucket anyway if buckets are within units.
            options.overlap = stage < 2;
          }
          Job own = job;
          own.options = options;
          Rig rig(rank, MakeModel(job.config), options, Rehearse(own, rank, 2));
          const TokenBatch batch(2, kLength, kVocab, 2);
          const HostBatch all = batch.All();
          const absl::Status status = rig->Step({.micro_batches = {&all, 1},
                                                 .num_valid_targets = 1,
                                                 .lr = 1e-3f})
                                          .status();
          EXPECT_EQ(rank.gather->Total().calls, 0);
          EXPECT_EQ(rank.reduce->Total().calls, 0);
          std::lock_guard<std::mutex> lock(mutex);
          messages.push_back(std::string(status.message()));
          return status;
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    ASSERT_EQ(messages.size(), 3u);
    for (const std::string& message : messages) {
      EXPECT_THAT(
          message,
          ContainsRegex("rank 2 \\(schedule [0-9a-f]+\\) planned another "
                        "step than rank 0 \\(schedule [0-9a-f]+\\)"));
      EXPECT_THAT(message, Not(HasSubstr("rank 1 (schedule")));
    }
  }
}

}  // namespace
}  // namespace zero
