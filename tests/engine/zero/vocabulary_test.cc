// Vocabulary tables in parts: the same bits as a whole table, at every stage,
// and only the memory of parts.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

// A table of several blocks.
constexpr int64_t kWords = 700;

ModelConfig ManyWords(ModelFamily family, bool tied) {
  ModelConfig config = TinyConfig(family);
  config.vocab_size = kWords;
  config.tie_word_embeddings = tied;
  config.resid_pdrop = 0.1;
  return config;
}

// Parts of the size of a tiny block, one at a time or all of them.
Job InParts(Job job, bool in_parts) {
  job.options.plan.vocabulary_parts = in_parts;
  job.options.plan.min_part_elems = 1;
  return job;
}

TEST(VocabularyTest, PartsChangeNoBitAtAnyStage) {
  for (const auto& [family, tied] : {std::pair(ModelFamily::kGpt2, true),
                                     std::pair(ModelFamily::kLlama, false),
                                     std::pair(ModelFamily::kLlama, true)}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int world : {2, 3}) {
        for (const bool rows : {false, true}) {
          Job job{.config = ManyWords(family, tied), .world = world};
          job.rows = rows;
          job.options.param_dtype = dtype;
          SCOPED_TRACE(testing::Message()
                       << ModelFamilyName(family) << (tied ? " tied " : " ")
                       << dtype << " world " << world << " rows " << rows);
          const Outcome want = Train(InParts(job, false));
          for (const int stage : {0, 1, 2, 3}) {
            job.options = AtStage(job.options, stage);
            const Job parts = InParts(job, true);
            EXPECT_TRUE(PlanOf(parts).in_parts());
            EXPECT_EQ(Train(parts), want) << "in parts, stage " << stage;
          }
        }
      }
    }
  }
}

// At stage 3 a lookup may get rows instead of the table: of a batch in several
// turns, with any sums, for any gradient of the table, or none.
TEST(VocabularyTest, LookupsByRowsChangeNoBit) {
  for (int bits = 0; bits < 32; ++bits) {
    const bool tied = bits & 1, bf16 = tied != static_cast<bool>(bits & 16);
    Job job{.config = ManyWords(
                bits & 2 ? ModelFamily::kGpt2 : ModelFamily::kLlama, tied),
            .world = 4,
            .shards = bits & 4 ? 2 : 0,
            .algorithm = bits & 8    ? BulkAlgorithm::kRing
                         : bits & 16 ? BulkAlgorithm::kHierarchical
                                     : BulkAlgorithm::kDirect,
            .micro_steps = bits & 8 ? 1 : 3};
    job.rows = bits & 16;
    job.packed = bits & 2;
    if (bf16) job.options.param_dtype = DType::kBF16;
    if (!tied && bits & 4) {
      job.make = [config = job.config] { return MakePartlyFrozen(config); };
    }
    job = InParts(job, tied || bits & 16);
    job.options = AtStage(job.options, 3);
    if (bf16) job.options.gather.prefetch_elems = 1'000'000'000;
    SCOPED_TRACE(testing::Message() << "bits " << bits);
    Job tables = job;
    tables.lookups = false;
    const auto looks_up = [](const Job& job) {
      const Plan plan = PlanOf(job);
      return plan.LooksUpRows(plan.num_computing);
    };
    EXPECT_FALSE(looks_up(tables));
    EXPECT_TRUE(looks_up(job));
    if (bits % 3 == 0) AddDelays(&job);
    EXPECT_EQ(Train(job), Train(tables));
  }
}

// Delayed updates, too: the host has the optimizer.
TEST(VocabularyTest, LookupsByRowsWaitForUploadedParameters) {
  for (const bool tied : {false, true}) {
    for (const absl::string_view update :
         {"plain", "delayed", "before norm", "half"}) {
      Job job{.config = ManyWords(ModelFamily::kLlama, tied),
              .world = 2,
              .micro_steps = 2};
      job.options = AtStage(job.options, 3);
      job.options.plan.homes.optimizer = Home::kHost;
      job.options.plan.host_share = update == "half" ? 0.5 : 1;
      job.options.delayed_updates = update == "delayed";
      job.options.update_before_norm = update == "before norm";
      if (job.options.update_before_norm) job.options.max_grad_norm = 0;
      job.steps = 5;
      job = InParts(job, tied);
      Job tables = job;
      tables.lookups = false;
      AddDelays(&job);
      EXPECT_EQ(Train(job), Train(tables)) << "tied " << tied << ", " << update;
    }
  }
}

// The others look rows up when it is gone.
TEST(VocabularyTest, ALookupEndsIfARankLeaves) {
  Job job{.config = ManyWords(ModelFamily::kLlama, false), .world = 3};
  job.options = AtStage(job.options, 3);
  job.options.plan.micro_tokens = 2 * kLength;
  const Plan plan =
      MakePlan(DescribeUnits(*job.Make()),
               job.options.plan_options(job.world, job.shards, job.algorithm));
  EXPECT_TRUE(plan.LooksUpRows(plan.num_computing));
  ExpectALeaverIsNamedByAll(job, 2);
}

TEST(VocabularyTest, PartsChangeNoBitOfOtherChoices) {
  for (const bool tied : {false, true}) {
    for (int bits = 0; bits < 16; bits += kSettingsStep) {
      Job job{.config = ManyWords(ModelFamily::kLlama, tied),
              .world = 4,
              .shards = bits & 1 ? 2 : 0,
              .micro_steps = bits & 2 ? 3 : 1};
      job.rows = bits & 4;
      job.options.recompute = bits & 8   ? Recompute::kFull
                              : bits & 1 ? Recompute::kSelective
                                         : Recompute::kOff;
      job.options.stochastic_rounding = bits & 8;
      if (bits & 8) job.options.param_dtype = DType::kBF16;
      if (bits & 4) job.options.optimizer.kind = OptimizerKind::kLamb;
      SCOPED_TRACE(testing::Message() << "tied " << tied << " bits " << bits);
      // Micro-batches are added up alike at stages 0 and 1, and at 2 and 3.
      // There are no groups at 0.
      for (const std::vector<int>& stages : {std::vector{bits & 1}, {2, 3}}) {
        job.options = AtStage(job.options, stages[0]);
        const Outcome want = Train(InParts(job, false));
        for (const int stage : stages) {
          for (const bool overlap : {false, true}) {
            if (!overlap && stage < 2) continue;
            Job parts = InParts(job, true);
            parts.options = AtStage(parts.options, stage);
            parts.options.overlap = overlap;
            parts.options.max_kept_logits_bytes = overlap ? kUnlimited : 0;
            EXPECT_EQ(Train(parts), want) << "stage " << stage;
          }
        }
      }
    }
  }
}

TEST(VocabularyTest, DelaysAndGatherPoliciesChangeNoBit) {
  for (const bool rows : {false, true}) {
    Job job{.config = ManyWords(ModelFamily::kGpt2, true), .world = 3};
    job.rows = rows;
    job.micro_steps = rows ? 1 : 2;
    job.options = AtStage(job.options, 3);
    const Outcome want = Train(InParts(job, false));
    job = InParts(job, true);
    for (const GatherPolicy& policy :
         {GatherPolicy{.prefetch_elems = 0},
          GatherPolicy{.prefetch_elems = 20'000},
          GatherPolicy{.max_live_elems = 0},
          GatherPolicy{.max_live_elems = 1'000'000'000},
          GatherPolicy{.persistence_threshold = 100'000}}) {
      job.options.gather = policy;
      EXPECT_EQ(Train(job), want);
    }
    job.options.gather = {};
    AddDelays(&job);
    EXPECT_EQ(Train(job), want);
  }
}

TEST(VocabularyTest, DelaysOfReplicatedGradientsChangeNoBit) {
  for (const bool rows : {false, true}) {
    Job job{.config = ManyWords(ModelFamily::kGpt2, true),
            .world = 3,
            .micro_steps = 2};
    job.rows = rows;
    job.options = AtStage(job.options, 0);
    const Outcome want = Train(InParts(job, false));
    for (const int stage : {0, 1}) {
      Job parts = InParts(job, true);
      parts.options = AtStage(parts.options, stage);
      AddDelays(&parts);
      EXPECT_EQ(Train(parts), want) << "stage " << stage << " rows " << rows;
    }
  }
}

// Groups of one rank have full states: their gradients are added up across.
TEST(VocabularyTest, PartsInGroupsOfOneChangeNoBit) {
  for (const bool tied : {false, true}) {
    for (const int stage : {1, 2, 3}) {
      Job job{.config = ManyWords(ModelFamily::kLlama, tied),
              .world = 2,
              .shards = 1};
      job.options = AtStage(job.options, stage);
      const Job parts = InParts(job, true);
      EXPECT_TRUE(PlanOf(parts).in_parts());
      EXPECT_EQ(Train(parts), Train(InParts(job, false))) << "stage " << stage;
    }
  }
}

TEST(VocabularyTest, APartIsReducedWhileTheNextIsComputed) {
  for (const int stage : {0, 1, 2, 3}) {
    Job job = InParts(
        {.config = ManyWords(ModelFamily::kGpt2, true), .world = 2}, true);
    job.rows = true;
    job.options = AtStage(job.options, stage);
    job.options.plan.reduce_bucket_elems = 1;
    const Plan plan = PlanOf(job);
    const std::vector<Action> actions = MakeSchedule(plan, {});
    int num_parts = 0, computing = -1;
    std::vector<int> reduced;  // tables' parts, before the head's part 0
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kForwardBackward ||
          action.kind == ActionKind::kBackward) {
        const PlannedUnit& unit = plan.units[action.index];
        computing = unit.name.starts_with("head") ? unit.part.number : -1;
        num_parts = std::max(num_parts, unit.part.count);
      }
      if (action.kind != ActionKind::kReduce || computing < 0) continue;
      const Bucket& bucket = plan.reduce_buckets[action.index];
      const PlannedUnit& unit = plan.units[bucket.unit];
      if (unit.part.count > 1 && !bucket.is_rows() &&
          (reduced.empty() || reduced.back() != unit.part.number)) {
        reduced.push_back(unit.part.number);
        EXPECT_EQ(unit.part.number, computing);
      }
    }
    EXPECT_GT(num_parts, 2);
    EXPECT_EQ(static_cast<int>(reduced.size()), num_parts) << "stage " << stage;
  }
}

// 16-bit traffic and states, sums around a ring, and tables without gradients.
TEST(VocabularyTest, PartsOfA16BitGradientChangeNoBit) {
  for (const bool rows : {false, true}) {
    for (const BulkAlgorithm algorithm :
         {BulkAlgorithm::kDirect, BulkAlgorithm::kRing}) {
      for (const DType sent : {DType::kBF16, DType::kF32}) {
        Job job{.config = ManyWords(ModelFamily::kGpt2, true),
                .world = 3,
                .algorithm = algorithm,
                .micro_steps = 2};
        job.rows = rows;
        job.options.param_dtype = DType::kBF16;
        job.options.grad_dtype = DType::kBF16;
        job.options.plan.gradients.dtype = sent;
        if (sent == DType::kF32)
          job.make = [config = job.config] { return MakePartlyFrozen(config); };
        for (const int first : {0, 2}) {
          job.options = AtStage(job.options, first);
          const Outcome want = Train(InParts(job, false));
          for (const int stage : {first, first + 1}) {
            job.options = AtStage(job.options, stage);
            EXPECT_EQ(Train(InParts(job, true)), want)
                << "stage " << stage << " rows " << rows;
          }
        }
      }
    }
  }
}

// Loss, logits and files do not show whether the table is in parts.
TEST(VocabularyTest, EvaluationTextAndFilesAreThoseOfTheWholeTable) {
  struct Seen {
    double loss;
    std::vector<float> losses, logits, again;
    std::string hash;
    ValuesByName values;
  };
  const auto look = [](bool in_parts, int stage) {
    Job job =
        InParts({.config = ManyWords(ModelFamily::kGpt2, true)}, in_parts);
    job.options = AtStage(job.options, stage);
    // Rows are looked up, of more or fewer tokens than in training.
    job.options.plan.micro_tokens = 2 * kLength;
    Seen seen;
    const absl::Status status = RunLocalRanks(
        job.world, RanksOf(job), OneThread,
        [&](const Rank& rank) -> absl::Status {
          Rig rig(rank, job.Make(), job.options, {64 << 20});
          rig.Load([](const Parameter& parameter) {
            std::vector<float> values(parameter.shape.num_elems());
            InitialValues(parameter, 7, 0, values.size(), values.data());
            return values;
          });
          const TokenBatch batch(3, kLength, kWords, 5);
          Seen own;
          own.losses.resize(batch.tokens.size());
          own.loss = rig.EvalLossSum(batch.All(), own.losses.data());
          HostBatch text = batch.Rows(0, 1);
          own.logits.resize(kWords);
          own.again.resize(kWords);
          KvCache cache = rig->MakeKvCache(kLength);
          rig.LastLogits(text, nullptr, own.logits.data());
          rig.LastLogits(text, &cache, own.again.data());
          ZERO_ASSIGN_OR_RETURN(own.hash, rig->states().Hash());
          ZERO_ASSIGN_OR_RETURN(own.values, ReadParameters(*rig));
          if (rank.rank() == 0) seen = own;
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    return seen;
  };
  const Seen want = look(false, 0);
  for (const int stage : {0, 1, 2, 3}) {
    const Seen seen = look(true, stage);
    EXPECT_EQ(seen.loss, want.loss);
    EXPECT_EQ(seen.losses, want.losses);
    EXPECT_EQ(seen.hash, want.hash);
    EXPECT_EQ(seen.values, want.values);
    EXPECT_EQ(seen.logits, seen.again);
    for (int64_t i = 0; i < kWords; ++i) {
      EXPECT_NEAR(seen.logits[i], want.logits[i], 1e-5) << i;
    }
  }
}

TEST(VocabularyTest, TheWireIsTheFormulaButForWhatStaysInPlace) {
  for (int bits = 0; bits < 8; ++bits) {
    const bool tied = bits & 1, rows = bits & 2 || !tied, lookups = bits & 4;
    for (const int stage : {0, 1, 2, 3}) {
      Job job = InParts({.config = ManyWords(ModelFamily::kLlama, tied),
                         .world = 3,
                         .micro_steps = 2,
                         .rows = rows,
                         .lookups = lookups},
                        true);
      job.options = AtStage(job.options, stage);
      const Plan plan = PlanOf(job);
      const StepWire wire =
          CountWire(plan, MakeSchedule(plan, {.micro_steps = 2}));
      const StepWire formula = FormulaWire(plan, 2);
      EXPECT_EQ(wire.reduced, formula.reduced);
      if (stage <= 2) {
        EXPECT_EQ(wire.gathered, formula.gathered);
        continue;
      }
      // The last two parts turn from forward to backward in place; a lookup's
      // backward reads nothing, unless the head waits for it: then the first
      // stays for the next micro-step's lookup. By rows it needs no part.
      const int last = plan.units[plan.num_computing - 1].required_units.back();
      ASSERT_GT(plan.units[last].part.count, 2);
      int64_t elems =
          plan.units[last].padded_elems + plan.units[last - 1].padded_elems;
      for (const PlannedUnit& unit : plan.units) {
        const bool looked_up =
            !unit.parameters.empty() && unit.parameters[0].spec.looked_up;
        if (looked_up && !tied && !lookups) elems += unit.padded_elems;
      }
      elems *= 2;  // micro-steps
      for (const PlannedUnit& unit : plan.units) {
        if (unit.head_waits && unit.part.number == 0 && !lookups)
          elems += unit.padded_elems;
      }
      EXPECT_EQ(plan.units.back().head_waits, !rows);
      EXPECT_EQ(formula.gathered - wire.gathered,
                elems / 3 * 2 * DTypeBytes(DType::kF32));
    }
  }
}

// By a rehearsal: of a model that is mostly its vocabulary.
TEST(VocabularyTest, PeakFallsWithTheStage) {
  Job job;
  job.config = ManyWords(ModelFamily::kGpt2, true);
  job.config.vocab_size = 50'257;
  job.config.hidden_size = 256;
  job.config.head_dim = 64;
  job.config.intermediate_size = 1024;
  job.config.max_position_embeddings = 256;
  job.options.max_positions = 256;
  job.batch = 2;
  job.length = 256;
  int64_t above = std::numeric_limits<int64_t>::max();
  for (const int stage : {0, 1, 2, 3}) {
    Job at = InParts(job, true);
    at.options = AtStage(at.options, stage);
    at = Planned(at);
    const absl::Status status = RunLocalRanks(
        2, RanksOf(at), OneThread, [&](const Rank& rank) -> absl::Status {
          if (rank.rank() > 0) return absl::OkStatus();
          const std::unique_ptr<Device> meta = MakeMetaDevice(*rank.device);
          const Rank imagined = MakeRehearsalRank(*meta, rank);
          Rig rig(imagined, at.Make(), at.options, {kUnlimited});
          rig.Step(GlobalBatch(1, 0, false, 256), 0, 1);
          const int64_t peak = rig.ledger().total_peak_bytes();
          EXPECT_LT(peak, above) << "stage " << stage;
          above = peak;
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(VocabularyTest, SegmentsAreTheSameWhetherTheTableIsInPartsOrNot) {
  for (const int64_t world : {1, 2, 3, 5, 8, 48, 1000, 1024}) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{50'304, 768},
                                      {128'256, 2048},
                                      {896, 33}}) {
      UnitSpec embedding{.name = "embedding"}, block{.name = "block"};
      UnitSpec head{.name = "head", .borrowed = {"words"}};
      embedding.parameters = {{.name = "words",
                               .shape = {rows, width},
                               .vocabulary = true,
                               .looked_up = true}};
      block.parameters = {{.name = "w", .shape = {9 * width, width}}};
      head.parameters = {{.name = "norm", .shape = {width}}};
      PlanOptions options{.world = world,
                          .placement = PlacementOfStage(3),
                          .min_part_elems = 1};
      const Plan whole = MakePlan({embedding, block, head}, options);
      options.vocabulary_parts = true;
      const Plan parts = MakePlan({embedding, block, head}, options);
      EXPECT_EQ(parts.padded_elems, whole.padded_elems);
      const auto segments = [](const Plan& plan) {
        std::vector<std::pair<int64_t, int64_t>> all;
        for (const PlannedUnit& unit : plan.units) {
          for (const Segment& segment : unit.segments) {
            all.emplace_back(unit.offset + segment.begin, segment.elems);
            EXPECT_LE(segment.elems,
                      Plan::kMaxSegmentElems + Plan::kAlignElems * plan.world);
            EXPECT_EQ(segment.elems % (64 * plan.world), 0);
          }
        }
        return all;
      };
      EXPECT_EQ(segments(parts), segments(whole));
      const TablePart part = whole.units.back().part;
      if (part.rows == 0) {
        EXPECT_EQ(parts.units.size(), whole.units.size());
        continue;
      }
      EXPECT_EQ(part.rows % 64, 0);
      EXPECT_LE(part.rows * width, whole.units[1].padded_elems);
      EXPECT_EQ(parts.in_parts(), world > 1);
      int64_t next = 0;
      for (const PlannedUnit& unit : parts.units) {
        if (unit.owner == unit.part.number && unit.part.rows > 0 &&
            !unit.parameters.empty()) {
          EXPECT_EQ(unit.parameters[0].first, next);
          next += unit.parameters[0].elems;
        }
      }
      EXPECT_EQ(next, rows * width);
    }
  }
}

}  // namespace
}  // namespace zero
