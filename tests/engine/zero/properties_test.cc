// Ranks' promises besides equal bits (stages_test, matrix_test): correct
// numbers, at every stage and number of ranks.
#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "engine/autograd/ops.h"
#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"

namespace zero {
namespace {

constexpr int kStages[] = {0, 1, 2, 3};
constexpr int kWorlds[] = {1, 2, 3, 4};

std::string Where(int world, int stage) {
  return absl::StrCat(world, " ranks, stage ", stage);
}

// The parameters of a job without GPT-2's key biases, whose gradient is only
// rounding.
Floats WithoutKeyBias(const Job& job, const Floats& parameters) {
  Floats kept;
  auto at = parameters.begin();
  const std::unique_ptr<Model> model = job.Make();
  for (const Parameter* parameter : model->AllParameters()) {
    const int64_t n = parameter->shape.num_elems();
    const bool has_key = absl::StrContains(parameter->name, "qkv.bias");
    for (int64_t i = 0; i < n; ++i, ++at) {
      const bool is_key = has_key && i >= n / 3 && i < 2 * n / 3;
      if (!is_key) kept.push_back(*at);
    }
  }
  return kept;
}

void ExpectClose(const Job& job, const Outcome& got, const Outcome& want) {
  for (int step = 0; step < job.steps; ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-6 * want.losses[step])
        << "step " << step + 1;
    EXPECT_NEAR(got.norms[step], want.norms[step], 5e-6 * want.norms[step])
        << "step " << step + 1;
  }
  EXPECT_LT(RelativeDifference(WithoutKeyBias(job, got.parameters),
                               WithoutKeyBias(job, want.parameters)),
            2e-5);
}

// Some targets are ignored, more on some ranks than on others.
TEST(PropertiesTest, RanksAreMicroBatches) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    for (int world : {2, 3, 4}) {
      Job alone;
      alone.config = TinyConfig(family);
      alone.world = 1;
      alone.micro_steps = world;
      alone.steps = 20;
      const Outcome want = Train(alone);
      for (int stage : kStages) {
        SCOPED_TRACE(Where(world, stage));
        Job job = alone;
        job.world = world;
        job.micro_steps = 1;
        job.options = AtStage(job.options, stage);
        ExpectClose(job, Train(job), want);
      }
    }
  }
}

// G micro-batches of b are one of G * b, also on several ranks.
TEST(PropertiesTest, MicroBatchesAreOneBatch) {
  for (int world : {1, 2, 3}) {
    for (int stage : kStages) {
      SCOPED_TRACE(Where(world, stage));
      Job job;
      job.config = TiedLlama();
      job.world = world;
      job.batch = 24;
      job.steps = 20;
      job.options = AtStage(job.options, stage);
      const Outcome want = Train(job);
      job.micro_steps = 4;
      ExpectClose(job, Train(job), want);
    }
  }
}

// It catches a double average, which Adam hides from the loss.
TEST(PropertiesTest, TheGradientNormIsASerialOneInFloat64) {
  Job job;
  job.config = TiedLlama();
  job.steps = 1;
  job.world = 1;
  double serial = 0;
  job.between = [&](Rig& rig) {
    for (const Parameter* parameter : rig.model().AllParameters()) {
      for (float g : rig.Gradient(*parameter)) serial += double{g} * g;
    }
  };
  Train(job);
  serial = std::sqrt(serial);
  job.between = nullptr;
  for (int world : kWorlds) {
    for (int stage : kStages) {
      job.world = world;
      job.options = AtStage(job.options, stage);
      EXPECT_NEAR(Train(job).norms[0], serial, 1e-6 * serial)
          << Where(world, stage);
    }
  }
}

TEST(PropertiesTest, ClippingAtAHugeNormIsTheIdentityToTheBit) {
  for (int stage : kStages) {
    Job job;
    job.world = 3;
    job.options = AtStage(job.options, stage);
    job.options.max_grad_norm = 0;
    const Outcome want = Train(job);
    job.options.max_grad_norm = 1e30f;
    EXPECT_EQ(Train(job), want) << "stage " << stage;
  }
}

// Small integers are exact in any order of the sum.
TEST(PropertiesTest, IntegersAddUpExactly) {
  const std::unique_ptr<Model> model = Job().Make();
  for (int world : {2, 3, 4}) {
    Job job;
    job.world = world;
    job.rows = false;  // those are not integers
    job.steps = 1;
    job.options.max_grad_norm = 0;
    job.prepare = MakeGradientsIntegers;
    for (int stage : kStages) {
      job.options = AtStage(job.options, stage);
      double squares = 0;
      for (const Parameter* parameter : model->AllParameters()) {
        for (int64_t i = 0; i < parameter->shape.num_elems(); ++i) {
          double sum = 0;
          for (int rank = 0; rank < world; ++rank) {
            sum += (7 * rank + 3 * i) % 41 - 20;
          }
          squares += sum * sum;
        }
      }
      EXPECT_EQ(Train(job).norms[0], static_cast<float>(std::sqrt(squares)))
          << Where(world, stage);
    }
  }
}

TEST(PropertiesTest, InitialParametersDependOnNoRankAndNoStage) {
  Job job;
  job.steps = 0;
  job.world = 1;
  const Outcome want = Train(job);
  EXPECT_GT(want.parameters.size(), 10'000u);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    job.options.param_dtype = dtype;  // masters are fp32
    for (int world : kWorlds) {
      for (int stage : kStages) {
        job.world = world;
        job.options = AtStage(job.options, stage);
        EXPECT_EQ(Train(job), want) << Where(world, stage);
      }
    }
  }
}

// A table t of 61 numbers that is the embedding and the head; a unit without
// parameters that doubles; one that multiplies by one number w (fewer elements
// than ranks) and adds a frozen one b.
std::unique_ptr<Model> MakeToy() {
  auto model = std::make_unique<ToyModel>(kVocab);
  ToyUnit* embedding = model->Add("embedding");
  Parameter* table = embedding->AddParameter("table", {kVocab, 1}, {.std = 1},
                                             /*decay=*/true);
  embedding->forward = [table](Context& ctx, const Var&) {
    return Embedding(ctx, table->weight, nullptr);
  };
  model->Add("double")->forward = [](Context& ctx, const Var& x) {
    return Add(ctx, x, x);
  };
  ToyUnit* scale = model->Add("scale");
  Parameter* w = scale->AddParameter("w", {1, 1}, {.std = 1}, /*decay=*/true);
  Parameter* b = scale->AddParameter("b", {1}, {.std = 1}, /*decay=*/false);
  b->frozen = true;
  scale->forward = [w, b](Context& ctx, const Var& x) {
    return Linear(ctx, x, w->weight, &b->weight, nullptr);
  };
  ToyUnit* head = model->Add("head");
  head->Borrow(table);
  head->forward = [table](Context& ctx, const Var& x) {
    LinearCrossEntropy(ctx, x, table->weight, kVocab);
    return Var();
  };
  return model;
}

// One step of plain SGD on it in float64: loss, norm, parameters t, w, b.
Outcome ToyByHand(const TokenBatch& batch, double lr) {
  const std::unique_ptr<Model> model = MakeToy();
  std::vector<double> p;
  for (const Parameter* parameter : model->AllParameters()) {
    Floats values(parameter->shape.num_elems());
    InitialValues(*parameter, /*seed=*/1, 0, values.size(), values.data());
    p.insert(p.end(), values.begin(), values.end());
  }
  const double* const t = p.data();
  const double w = p[kVocab], b = p[kVocab + 1];
  std::vector<double> grad(p.size());
  double loss = 0;
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    const int target = batch.targets[i];
    if (target < 0) continue;
    const double x = 2 * t[batch.tokens[i]];
    const double y = w * x + b;
    double z = 0, dy = 0;
    for (int v = 0; v < kVocab; ++v) z += std::exp(t[v] * y);
    loss += std::log(z) - t[target] * y;
    for (int v = 0; v < kVocab; ++v) {
      const double d = std::exp(t[v] * y) / z - (v == target ? 1 : 0);
      grad[v] += d * y;
      dy += d * t[v];
    }
    grad[batch.tokens[i]] += 2 * w * dy;
    grad[kVocab] += dy * x;
  }
  const auto valid = static_cast<double>(batch.NumValid());
  Outcome outcome;
  double squares = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    grad[i] /= valid;
    squares += grad[i] * grad[i];
    outcome.parameters.push_back(static_cast<float>(p[i] - lr * grad[i]));
  }
  outcome.losses = {loss / valid};
  outcome.norms = {std::sqrt(squares)};
  return outcome;
}

TEST(PropertiesTest, AModelDoneByHandIsRightOnEveryRank) {
  Job job;
  job.make = MakeToy;
  job.steps = 1;
  job.options = ExecutorOptions{.optimizer = {.kind = OptimizerKind::kSgd}};
  const Outcome want = ToyByHand(GlobalBatch(job.batch, 0), 1e-2);
  for (int world : kWorlds) {
    for (int stage : kStages) {
      for (Recompute recompute : kRecomputeLevels) {
        SCOPED_TRACE(Where(world, stage));
        job.world = world;
        job.options = AtStage(job.options, stage);
        job.options.recompute = recompute;
        const Outcome got = Train(job);
        EXPECT_NEAR(got.losses[0], want.losses[0], 1e-6 * want.losses[0]);
        EXPECT_NEAR(got.norms[0], want.norms[0], 1e-6 * want.norms[0]);
        for (size_t i = 0; i < want.parameters.size(); ++i) {
          EXPECT_NEAR(got.parameters[i], want.parameters[i], 5e-7) << i;
        }
        EXPECT_EQ(got.parameters.back(), want.parameters.back());  // b
      }
    }
  }
}

// Runs `body` on every rank of a job with its rig.
void OnRanks(const Job& job,
             const std::function<void(const Rank&, Rig&)>& body) {
  const absl::Status status =
      RunLocalRanks(job.world, RanksOf(job), OneThread, [&](const Rank& rank) {
        const int64_t rows = job.batch / job.world;
        Rig rig(rank, job.Make(), job.options, Rehearse(job, rank, rows));
        body(rank, rig);
        return rank.status();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PropertiesTest, RotatingBuffersAreFreeAfterBackwardStepAndEvaluation) {
  for (int world : {2, 3, 4}) {
    for (int stage : kStages) {
      SCOPED_TRACE(Where(world, stage));
      Job job;
      job.config = TiedLlama();
      job.world = world;
      job.micro_steps = 3;
      job.options = AtStage(job.options, stage);
      OnRanks(job, [&](const Rank& rank, Rig& rig) {
        const int64_t at_start = rig.ledger().total_live_bytes();
        const auto expect_none = [&] {
          for (MemoryCategory category : {MemoryCategory::kGatheredParameters,
                                          MemoryCategory::kReduceBuffers}) {
            EXPECT_EQ(rig.ledger().live_bytes(category), 0)
                << MemoryCategoryName(category);
          }
        };
        rig->clock().set_hook([&](const Action& action, bool) {
          if (action.kind == ActionKind::kNorm) expect_none();  // ends backward
        });
        const int64_t rows = job.batch / job.world;
        for (int step = 0; step < 2; ++step) {
          const TokenBatch batch(rows, kLength, kVocab, step + 1);
          rig.Step(batch, 1e-3f, rows / job.micro_steps);
          expect_none();
          EXPECT_EQ(rig.ledger().total_live_bytes(), at_start);
          rig.EvalLossSum(batch.All());
          expect_none();
          EXPECT_EQ(rig.ledger().total_live_bytes(), at_start);
        }
        EXPECT_EQ(rank.world(), world);
      });
    }
  }
}

// The group itself checks that all ranks issue the same collectives. The bytes
// are in StagesTest.BytesOnTheWireAreTheFormula.
TEST(PropertiesTest, TheCollectivesAreTheSchedulesOnAllRanks) {
  for (int world : kWorlds) {
    for (int stage : kStages) {
      for (int64_t micro_steps : {1, 3}) {
        SCOPED_TRACE(Where(world, stage));
        Job job;
        job.world = world;
        job.micro_steps = micro_steps;
        job.options = AtStage(job.options, stage);
        OnRanks(job, [&](const Rank& rank, Rig& rig) {
          const int64_t rows = job.batch / job.world;
          rig.Step(TokenBatch(rows, kLength, kVocab, 1), 1e-3f,
                   rows / micro_steps);
          int64_t gathers = 0, reductions = 0;
          for (const Action& action : rig->schedule()) {
            gathers += action.kind == ActionKind::kGather ||
                       action.kind == ActionKind::kGatherUpdated;
            reductions += action.kind == ActionKind::kReduce;
          }
          EXPECT_EQ(gathers > 0, world > 1 && stage > 0);
          EXPECT_EQ(reductions > 0, world > 1);
          EXPECT_EQ(rank.gather->Total().calls, gathers);
          // Stage 0 gathers the reduced gradients: an all-reduce.
          EXPECT_EQ(rank.reduce->Total().calls,
                    reductions * (stage == 0 ? 2 : 1));
        });
      }
    }
  }
}

}  // namespace
}  // namespace zero
