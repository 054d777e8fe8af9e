// What a step computes: gradients of whole models, skipping, clipping,
// accumulation, precision. tests/models/golden_test.cc compares the same with
// transformers.

#include "engine/zero/executor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "engine/autograd/ops.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/rounding.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using Floats = std::vector<float>;

constexpr ModelFamily kFamilies[] = {ModelFamily::kGpt2, ModelFamily::kLlama,
                                     ModelFamily::kQwen2, ModelFamily::kQwen3};
constexpr int64_t kBatch = 4, kLength = 13, kVocab = 61;

class ExecutorTest : public testing::Test {
 protected:
  // The number of threads is part of the numerics; one is enough if the promise
  // is not about threads, and saves thousands of barriers.
  ExecutorTest() : device_(MakeCpuDevice(1)) {}

  // Freed activations turn into NaNs, so that reading one shows.
  std::unique_ptr<Rig> MakeRig(const ModelConfig& config,
                               const ExecutorOptions& options) {
    auto rig = std::make_unique<Rig>(*device_, config, options);
    (*rig)->transient().set_poison_freed(true);
    return rig;
  }

  std::unique_ptr<Device> device_;
};

ExecutorOptions Options(OptimizerKind kind = OptimizerKind::kAdamW) {
  return {.optimizer = {.kind = kind, .weight_decay = 0.1, .beta2 = 0.95},
          .max_positions = 27};
}
ExecutorOptions Sgd() { return {.optimizer = {.kind = OptimizerKind::kSgd}}; }

// A few targets of every batch do not count.
TokenBatch MakeBatch(uint64_t seed, bool ignore_some = true) {
  TokenBatch batch(kBatch, kLength, kVocab, seed);
  if (ignore_some) {
    for (size_t i = 0; i < batch.targets.size(); i += 5) batch.targets[i] = -1;
  }
  return batch;
}

double SerialNorm(Rig& rig) {
  double sum = 0;
  for (const Parameter* parameter : rig.model().AllParameters()) {
    if (parameter->frozen) continue;
    for (float g : rig.Gradient(*parameter)) sum += double{g} * g;
  }
  return std::sqrt(sum);
}

// ---- By hand --------------------------------------------------------------

// Tokens a, b embed to numbers; a unit without parameters doubles them; the
// head multiplies by two more numbers. Sixteen bytes of parameters.
std::unique_ptr<ToyModel> MakeDoublingModel() {
  auto model = std::make_unique<ToyModel>(2);
  ToyUnit* embedding = model->Add("embedding");
  Parameter* table =
      embedding->AddParameter("table", {2, 1}, {.std = 1}, /*decay=*/true);
  embedding->forward = [table](Context& ctx, const Var&) {
    return Embedding(ctx, table->weight, nullptr);
  };
  ToyUnit* twice = model->Add("double");
  twice->forward = [](Context& ctx, const Var& x) { return Add(ctx, x, x); };
  // Passes its input on without any op at all.
  ToyUnit* identity = model->Add("identity");
  identity->forward = [](Context&, const Var& x) { return x; };
  ToyUnit* head = model->Add("head");
  Parameter* w = head->AddParameter("w", {2, 1}, {.std = 1}, /*decay=*/true);
  head->forward = [w](Context& ctx, const Var& x) {
    LinearCrossEntropy(ctx, x, w->weight, w->shape[0]);
    return Var();
  };
  return model;
}

TEST_F(ExecutorTest, AModelOfFourNumbersIsTheOneDoneByHand) {
  for (Recompute recompute : kRecomputeLevels) {
    ExecutorOptions options = Sgd();
    options.recompute = recompute;
    Rig rig(*device_, MakeDoublingModel(), options, 1 << 20);
    const std::map<std::string, Floats> start = {
        {"embedding.table", {0.5f, -0.25f}}, {"head.w", {0.75f, -1.5f}}};
    rig.Load(
        [&](const Parameter& parameter) { return start.at(parameter.name); });
    TokenBatch batch(1, 3, 2, 1);
    batch.tokens = {0, 1, 0};
    batch.targets = {1, 0, -1};
    const StepOutput output = rig.Step(batch, /*lr=*/0.5f);

    const double e[2] = {0.5, -0.25}, w[2] = {0.75, -1.5};
    double loss = 0, de[2] = {}, dw[2] = {};
    for (int i = 0; i < 2; ++i) {  // the third target is ignored
      const double x = 2 * e[i];
      const int target = 1 - i;
      const double z = std::exp(x * w[0]) + std::exp(x * w[1]);
      loss += (std::log(z) - x * w[target]) / 2;
      for (int j = 0; j < 2; ++j) {
        const double d = (std::exp(x * w[j]) / z - (j == target)) / 2;
        dw[j] += d * x;
        de[i] += d * w[j] * 2;
      }
    }
    EXPECT_NEAR(output.loss, loss, 1e-6);
    EXPECT_NEAR(output.grad_norm,
                std::sqrt(de[0] * de[0] + de[1] * de[1] + dw[0] * dw[0] +
                          dw[1] * dw[1]),
                1e-6);
    const Floats table = rig.Read(rig.parameter("embedding.table"));
    const Floats head = rig.Read(rig.parameter("head.w"));
    for (int j = 0; j < 2; ++j) {
      EXPECT_NEAR(table[j], e[j] - 0.5 * de[j], 1e-6);
      EXPECT_NEAR(head[j], w[j] - 0.5 * dw[j], 1e-6);
    }
    EXPECT_FALSE(output.skipped);
  }
}

// An embedding, a linear layer used twice, one never used, and a head.
struct SharingModel {
  std::unique_ptr<ToyModel> model = std::make_unique<ToyModel>(kVocab);
  Parameter *table, *used_twice, *unused, *bias, *head;

  SharingModel() {
    const Init init{.std = 0.3f};
    ToyUnit* embedding = model->Add("embedding");
    table = embedding->AddParameter("table", {kVocab, 9}, init, true);
    embedding->forward = [this](Context& ctx, const Var&) {
      return Embedding(ctx, table->weight, nullptr);
    };
    ToyUnit* block = model->Add("block");
    used_twice = block->AddParameter("twice", {9, 9}, init, true);
    unused = block->AddParameter("unused", {5, 7}, init, true);
    bias = block->AddParameter("bias", {9}, init, false);
    block->forward = [this](Context& ctx, const Var& in) {
      const Var x = Linear(ctx, in, used_twice->weight, &bias->weight, nullptr);
      return Linear(ctx, x, used_twice->weight, nullptr, &in);
    };
    ToyUnit* last = model->Add("head");
    head = last->AddParameter("w", {kVocab, 9}, init, true);
    last->forward = [this](Context& ctx, const Var& x) {
      LinearCrossEntropy(ctx, x, head->weight, kVocab);
      return Var();
    };
  }
};

TEST_F(ExecutorTest, AnUnusedParameterIsZeroedAndReportedByName) {
  SharingModel toy;
  const Parameter& unused = *toy.unused;
  ExecutorOptions options = Sgd();
  options.optimizer.momentum = 0.9;
  Rig rig(*device_, std::move(toy.model), options);
  const Floats before = rig.Read(unused);
  // Old content of the gradient's memory is not a gradient.
  std::memset(rig->transient().data(), 0xff, rig->transient().capacity_bytes());
  rig->transient().set_poison_freed(true);
  for (int step = 0; step < 3; ++step) {
    EXPECT_FALSE(rig.Step(MakeBatch(step), 0.1f, 2).skipped);
    EXPECT_EQ(rig->unused_parameters(),
              std::vector<std::string>{"block.unused"});
    EXPECT_EQ(rig.Gradient(unused), Floats(35, 0.0f));
  }
  EXPECT_EQ(rig.Read(unused), before);
}

TEST_F(ExecutorTest, AParameterUsedTwiceHasTheSumOfItsGradients) {
  // Against central differences of the whole model in the loss.
  SharingModel toy;
  Parameter& w = *toy.used_twice;
  Rig rig(*device_, std::move(toy.model), Sgd());
  const TokenBatch batch = MakeBatch(3);
  rig.Step(batch, 0.0f);
  const Floats grad = rig.Gradient(w);
  float* const values = w.weight.value.As<float>();
  const float h = 1.0f / 32;
  for (int i : {0, 13, 40, 80}) {
    const float saved = values[i];
    auto loss = [&](float at) {
      values[i] = saved + at;
      return rig.EvalLossSum(batch.All()) / batch.NumValid();
    };
    const double numeric =
        (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h);
    values[i] = saved;
    // The mean loss (about 4) is rounded to 2^-24 of its rows' values, over h.
    EXPECT_NEAR(grad[i], numeric, 3e-5) << i;
  }
}

TEST_F(ExecutorTest, AFrozenParameterHasNoGradientAndKeepsItsBits) {
  for (Recompute recompute : kRecomputeLevels) {
    SharingModel toy;
    for (Parameter* frozen : {toy.table, toy.bias, toy.head}) {
      frozen->frozen = true;
    }
    const std::vector<const Parameter*> frozen = {toy.table, toy.bias,
                                                  toy.head};
    const Parameter* trained = toy.used_twice;
    ExecutorOptions options = Options();
    options.decay_all = true;
    options.recompute = recompute;
    Rig rig(*device_, std::move(toy.model), options);

    SharingModel free;
    const Parameter* free_trained = free.used_twice;
    Rig free_rig(*device_, std::move(free.model), options);

    std::vector<Floats> before;
    for (const Parameter* p : frozen) before.push_back(rig.Read(*p));
    const Floats trained_before = rig.Read(*trained);
    const StepOutput output = rig.Step(MakeBatch(1), 0.1f, 2);
    const StepOutput free_output = free_rig.Step(MakeBatch(1), 0.1f, 2);
    for (size_t i = 0; i < frozen.size(); ++i) {
      EXPECT_EQ(frozen[i]->weight.sink, nullptr);
      EXPECT_EQ(rig.Read(*frozen[i]), before[i]) << frozen[i]->name;
    }
    // Trained tensors get the same gradient as if all trained; the norm is over
    // trained ones only.
    EXPECT_EQ(rig.Gradient(*trained), free_rig.Gradient(*free_trained));
    EXPECT_NE(rig.Read(*trained), trained_before);
    EXPECT_EQ(output.loss, free_output.loss);
    EXPECT_LT(output.grad_norm, free_output.grad_norm);
    EXPECT_NEAR(output.grad_norm, SerialNorm(rig), 1e-6 * output.grad_norm);
    EXPECT_EQ(rig->unused_parameters(),
              std::vector<std::string>{"block.unused"});
  }
}

TEST_F(ExecutorTest, ATiedTableHasOneSinkWithBothGradients) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kQwen3}) {
    ModelConfig config = TinyConfig(family);
    config.tie_word_embeddings = true;
    const auto tied = MakeRig(config, Options());
    config.tie_word_embeddings = false;
    const auto untied = MakeRig(config, Options());
    const std::string name =
        family == ModelFamily::kGpt2 ? "embedding.wte" : "embedding.table";
    const Floats table = tied->Read(tied->parameter(name));
    untied->Load([&](const Parameter& parameter) {
      return parameter.name == "head.lm_head"
                 ? table
                 : tied->Read(tied->parameter(parameter.name));
    });
    const TokenBatch batch = MakeBatch(4);
    EXPECT_EQ(tied->Step(batch, 0, 2).loss, untied->Step(batch, 0, 2).loss);
    const Floats both = tied->Gradient(tied->parameter(name));
    const Floats embedding = untied->Gradient(untied->parameter(name));
    const Floats head = untied->Gradient(untied->parameter("head.lm_head"));
    Floats sum(both.size());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = embedding[i] + head[i];
    // Four sums (two uses, two micro-batches) in another order.
    EXPECT_LE(RelativeDifference(both, sum), 1e-6);
    EXPECT_GT(RelativeDifference(both, head), 1e-2);
    EXPECT_GT(RelativeDifference(both, embedding), 1e-2);
    EXPECT_EQ(tied->model().NumParameters() + kVocab * config.hidden_size,
              untied->model().NumParameters());
  }
}

// Tables are stored in whole tiles of rows: 128 for 61 words.
TEST_F(ExecutorTest, RowsBehindTheWordsAreZeroAndStayZero) {
  for (const ModelFamily family : kFamilies) {
    for (const bool loaded : {false, true}) {
      const ModelConfig config = TinyConfig(family);
      ExecutorOptions options = Options();
      options.param_dtype = loaded ? DType::kBF16 : DType::kF32;
      options.stochastic_rounding = loaded;
      const auto rig = MakeRig(config, options);
      if (loaded) {
        rig->Load([](const Parameter& parameter) {
          return Floats(parameter.shape.num_elems(), 0.01f);
        });
      }
      int64_t num_others = 0;
      for (int step = 0; step < 3; ++step) {
        rig->Step(MakeBatch(step), 1e-2f);
        for (const Parameter* parameter : rig->model().AllParameters()) {
          const int64_t words = parameter->shape.num_elems();
          const int64_t others = parameter->stored_shape.num_elems() - words;
          num_others += others;
          const Tensor behind = parameter->weight.value.Slice(words, {others});
          const char* bytes = static_cast<const char*>(behind.data());
          EXPECT_EQ(std::count(bytes, bytes + behind.bytes(), 0),
                    behind.bytes())
              << parameter->name;
          const Floats gradient = rig->Gradient(*parameter);
          EXPECT_EQ(std::count(gradient.begin() + words, gradient.end(), 0.0f),
                    others)
              << parameter->name;
        }
      }
      const int num_tables = config.tie_word_embeddings ? 1 : 2;
      EXPECT_EQ(num_others, 3 * num_tables * 67 * config.hidden_size);
    }
  }
}

// ---- Gradient norm and clipping -------------------------------------------

TEST_F(ExecutorTest, TheGradientNormIsASerialOneInFloat64) {
  for (ModelFamily family : kFamilies) {
    const auto rig = MakeRig(TinyConfig(family), Options());
    for (int step = 0; step < 3; ++step) {
      const StepOutput output = rig->Step(MakeBatch(step), 1e-3f, 2);
      EXPECT_NEAR(output.grad_norm, SerialNorm(*rig), 1e-6 * output.grad_norm);
    }
  }
}

TEST_F(ExecutorTest, ClippingAtAHugeNormIsTheIdentityToTheBit) {
  std::vector<Floats> results;
  for (float max_norm : {0.0f, 1e30f}) {
    ExecutorOptions options = Options();
    options.max_grad_norm = max_norm;
    const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), options);
    for (int step = 0; step < 5; ++step) rig->Step(MakeBatch(step), 1e-2f);
    results.push_back(rig->ReadAll());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(ExecutorTest, ClippingScalesTheStepToTheNorm) {
  ExecutorOptions options = Sgd();
  options.max_positions = 27;
  options.max_grad_norm = 0.125f;
  const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), options);
  const Floats before = rig->ReadAll();
  const StepOutput output = rig->Step(MakeBatch(1), /*lr=*/1.0f);
  ASSERT_GT(output.grad_norm, 0.5);
  const Floats after = rig->ReadAll();
  double moved = 0;
  for (size_t i = 0; i < after.size(); ++i) {
    moved += std::pow(double{after[i]} - before[i], 2);
  }
  // Parameters of about 0.1 to 1 are rounded to 6e-8; about 20,000 of them.
  EXPECT_NEAR(std::sqrt(moved), 0.125, 1e-5);
}

// ---- Accumulation ---------------------------------------------------------

// GPT-2's key bias has a gradient that is zero except for rounding, which Adam
// turns into full steps.
Floats WithoutKeyBias(Rig& rig, int64_t hidden) {
  Floats all;
  for (const Parameter* parameter : rig.model().AllParameters()) {
    Floats values = rig.Read(*parameter);
    if (parameter->name.find("attn.qkv.bias") != std::string::npos) {
      std::fill_n(values.begin() + hidden, hidden, 0.0f);
    }
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

TEST_F(ExecutorTest, MicroBatchesEqualOneBatch) {
  for (ModelFamily family : kFamilies) {
    for (bool unequal : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << ModelFamilyName(family) << " unequal " << unequal);
      const ModelConfig config = TinyConfig(family);
      ExecutorOptions options = Options();
      options.max_grad_norm = 1;
      const auto whole = MakeRig(config, options);
      const auto parts = MakeRig(config, options);
      const auto thirds = MakeRig(config, options);
      for (int step = 0; step < 20; ++step) {
        TokenBatch batch = MakeBatch(step, false);
        if (unequal) {  // 2, 13, 0 and 7 valid targets per row
          const int64_t valid[kBatch] = {2, 13, 0, 7};
          for (int64_t i = 0; i < kBatch * kLength; ++i) {
            if (i % kLength >= valid[i / kLength]) batch.targets[i] = -1;
          }
        }
        const StepOutput a = whole->Step(batch, 1e-3f);
        const StepOutput b = parts->Step(batch, 1e-3f, 1);
        thirds->Step(batch, 1e-3f, 3);  // 3 rows, then 1
        ASSERT_NEAR(a.loss, b.loss, 1e-6 * a.loss) << step;
        ASSERT_NEAR(a.grad_norm, b.grad_norm, 5e-6 * a.grad_norm) << step;
      }
      const bool is_gpt2 = family == ModelFamily::kGpt2;
      auto read = [&](Rig& rig) {
        return is_gpt2 ? WithoutKeyBias(rig, config.hidden_size)
                       : rig.ReadAll();
      };
      EXPECT_LE(RelativeDifference(read(*parts), read(*whole)), 2e-5);
      EXPECT_LE(RelativeDifference(read(*thirds), read(*whole)), 2e-5);
    }
  }
}

TEST_F(ExecutorTest, DropoutDoesNotDependOnTheSplitIntoMicroBatches) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kQwen2}) {
    ModelConfig config = TinyConfig(family);
    config.embd_pdrop = config.resid_pdrop = 0.2;
    const auto whole = MakeRig(config, Options());
    const auto parts = MakeRig(config, Options());
    config.embd_pdrop = config.resid_pdrop = 0;
    const auto without = MakeRig(config, Options());
    for (int step = 0; step < 3; ++step) {
      const TokenBatch batch = MakeBatch(step);
      const double loss = whole->Step(batch, 1e-3f).loss;
      EXPECT_NEAR(loss, parts->Step(batch, 1e-3f, 1).loss, 1e-6 * loss);
      EXPECT_GT(std::fabs(loss - without->Step(batch, 1e-3f).loss), 1e-3);
    }
  }
}

TEST_F(ExecutorTest, RecomputeWithDropoutChangesNoBit) {
  device_ = MakeCpuDevice(2);
  for (ModelFamily family : kFamilies) {
    ModelConfig config = TinyConfig(family);
    config.embd_pdrop = config.resid_pdrop = 0.2;
    std::vector<Floats> results;
    std::vector<double> losses;
    for (Recompute recompute : kRecomputeLevels) {
      ExecutorOptions options = Options();
      options.recompute = recompute;
      const auto rig = MakeRig(config, options);
      for (int step = 0; step < 4; ++step) {
        losses.push_back(rig->Step(MakeBatch(step), 1e-2f, 2).loss);
      }
      results.push_back(rig->ReadAll());
    }
    EXPECT_EQ(results[0], results[1]) << ModelFamilyName(family);
    EXPECT_EQ(results[0], results[2]) << ModelFamilyName(family);
    EXPECT_EQ(losses[3], losses[7]);
    EXPECT_EQ(losses[3], losses[11]);
  }
}

// ---- Packed rows ----------------------------------------------------------

// Every sequence of `packed` as its own row, padded with tokens after it whose
// targets do not count.
TokenBatch EachInARow(const TokenBatch& packed) {
  const std::vector<int32_t>& positions = packed.positions;
  TokenBatch rows(std::count(positions.begin(), positions.end(), 0),
                  packed.length, kVocab, /*seed=*/7);
  std::fill(rows.targets.begin(), rows.targets.end(), -1);
  int64_t row = -1;
  for (size_t i = 0; i < positions.size(); ++i) {
    row += positions[i] == 0;
    const int64_t at = row * packed.length + positions[i];
    rows.tokens[at] = packed.tokens[i];
    rows.targets[at] = packed.targets[i];
  }
  return rows;
}

TEST_F(ExecutorTest, PackedSequencesAreThoseThatHaveARowEach) {
  for (ModelFamily family : kFamilies) {
    for (const Recompute recompute : kRecomputeLevels) {
      SCOPED_TRACE(testing::Message()
                   << ModelFamilyName(family) << " recompute "
                   << RecomputeName(recompute));
      ExecutorOptions options = Options();
      options.recompute = recompute;
      const auto packed = MakeRig(TinyConfig(family), options);
      const auto alone = MakeRig(TinyConfig(family), options);
      TokenBatch batch = MakeBatch(3);
      const double uncut = packed->EvalLossSum(batch.All());
      batch.CutAtTokensBelow(kVocab / 5);
      const TokenBatch rows = EachInARow(batch);
      ASSERT_GT(rows.batch, 2 * kBatch);
      ASSERT_EQ(rows.NumValid(), batch.NumValid());

      const double sum = packed->EvalLossSum(batch.All());
      EXPECT_NEAR(alone->EvalLossSum(rows.All()), sum, 1e-6 * sum);
      EXPECT_GT(std::fabs(uncut - sum), 1e-4 * sum);
      // In separate micro-batches.
      const StepOutput a = packed->Step(batch, 1e-3f, 2);
      const StepOutput b = alone->Step(rows, 1e-3f);
      EXPECT_NEAR(a.loss, b.loss, 1e-6 * b.loss);
      EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-5 * b.grad_norm);
      for (const Parameter* p : packed->model().AllParameters()) {
        // The order of sums differs.
        EXPECT_LE(
            RelativeDifference(packed->Gradient(*p),
                               alone->Gradient(alone->parameter(p->name))),
            1e-5)
            << p->name;
      }
    }
  }
}

// ---- Steps that are skipped -----------------------------------------------

// Writes `value` into one gradient element before the norm of the next step.
void InjectOnce(Rig& rig, const std::string& name, float value) {
  const Parameter& parameter = rig.parameter(name);
  rig->clock().set_hook([&parameter, value, done = false](const Action& action,
                                                          bool after) mutable {
    if (action.kind != ActionKind::kNorm || after || done) return;
    const Tensor& grad = parameter.weight.sink->grad;
    grad.As<float>()[grad.num_elems() - 1] = value;
    done = true;
  });
}

class SkippedStepTest : public ExecutorTest {
 protected:
  std::unique_ptr<Rig> MakeAfterOneStep(OptimizerKind kind) {
    ExecutorOptions options = Options(kind);
    options.optimizer.momentum = 0.9;
    options.max_grad_norm = 1;
    auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), options);
    rig->Step(MakeBatch(1), 1e-2f);
    return rig;
  }

  // The moments have no trace of the skipped step either: from step `first` on
  // the steps are those of a run without it.
  static void ExpectTheSameSteps(Rig& good, Rig& hit, int first) {
    for (int step = first; step < first + 3; ++step) {
      const StepOutput a = good.Step(MakeBatch(step), 1e-2f);
      const StepOutput b = hit.Step(MakeBatch(step), 1e-2f);
      EXPECT_FALSE(b.skipped);
      EXPECT_EQ(b.non_finite, "");
      EXPECT_EQ(a.loss, b.loss);
      EXPECT_EQ(a.grad_norm, b.grad_norm);
    }
    EXPECT_EQ(good.ReadAll(), hit.ReadAll());
  }
};

TEST_F(SkippedStepTest, ANonFiniteGradientSkipsTheStepAndLeavesNoTrace) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kAdam,
                             OptimizerKind::kSgd, OptimizerKind::kLamb}) {
    for (float value : bad) {
      const auto good = MakeAfterOneStep(kind);
      const auto hit = MakeAfterOneStep(kind);
      const Floats before = hit->ReadAll();
      InjectOnce(*hit, "block.1.mlp.down.weight", value);
      const StepOutput skipped = hit->Step(MakeBatch(2), 1e-2f);
      EXPECT_TRUE(skipped.skipped);
      EXPECT_FALSE(std::isfinite(skipped.grad_norm));
      EXPECT_TRUE(std::isfinite(skipped.loss));
      EXPECT_EQ(skipped.non_finite, "block.1.mlp.down.weight");
      EXPECT_EQ(hit->ReadAll(), before);

      ExpectTheSameSteps(*good, *hit, 3);
    }
  }
}

// It was begun before the skip was known.
TEST_F(SkippedStepTest, AStepBehindASkippedOneIsSkippedWithIt) {
  for (OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kAdam,
                             OptimizerKind::kSgd, OptimizerKind::kLamb}) {
    const auto good = MakeAfterOneStep(kind);
    const auto hit = MakeAfterOneStep(kind);
    const Floats before = hit->ReadAll();
    InjectOnce(*hit, "block.1.mlp.down.weight",
               std::numeric_limits<float>::quiet_NaN());
    for (const int64_t step : {2, 3}) {
      const TokenBatch batch = MakeBatch(step);
      const HostBatch all = batch.All();
      ASSERT_TRUE((*hit)
                      ->Begin({.micro_batches = {&all, 1},
                               .num_valid_targets = batch.NumValid(),
                               .lr = 1e-2f,
                               .optimizer_step = step,
                               .inherits_skip = step == 3})
                      .ok());
    }
    for (const bool has_norm : {false, true}) {
      const absl::StatusOr<StepOutput> output = (*hit)->Finish();
      ASSERT_TRUE(output.ok()) << output.status();
      EXPECT_TRUE(output->skipped);
      EXPECT_EQ(std::isfinite(output->grad_norm), has_norm);
    }
    EXPECT_EQ(hit->ReadAll(), before);
    ExpectTheSameSteps(*good, *hit, 4);
  }
}

TEST_F(ExecutorTest, ANanParameterSkipsEveryStep) {
  const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), Options());
  Parameter& parameter = rig->parameter("block.1.mlp.out.bias");
  EXPECT_EQ(*(*rig)->states().FirstNonFiniteParameter(), "");
  parameter.weight.value.As<float>()[3] =
      std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(*(*rig)->states().FirstNonFiniteParameter(),
            "block.1.mlp.out.bias");
  const Floats embedding = rig->Read(rig->parameter("embedding.wte"));
  for (int step = 0; step < 3; ++step) {
    const StepOutput output = rig->Step(MakeBatch(step), 1e-2f, 2);
    EXPECT_TRUE(output.skipped);
    EXPECT_TRUE(std::isnan(output.loss));
    EXPECT_NE(output.non_finite, "");
  }
  EXPECT_EQ(rig->Read(rig->parameter("embedding.wte")), embedding);
}

TEST_F(ExecutorTest, ALossScaleThatIsAPowerOfTwoChangesNoBit) {
  std::vector<Floats> results;
  std::vector<double> norms;
  for (float scale : {1.0f, 1024.0f}) {
    ExecutorOptions options = Options();
    options.max_grad_norm = 1;
    const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), options);
    for (int step = 0; step < 5; ++step) {
      norms.push_back(rig->Step(MakeBatch(step), 1e-2f, 2, scale).grad_norm);
    }
    results.push_back(rig->ReadAll());
  }
  EXPECT_EQ(results[0], results[1]);
  for (int step = 0; step < 5; ++step) EXPECT_EQ(norms[step], norms[5 + step]);
}

// ---- Optimizers, precision ------------------------------------------------

TEST_F(ExecutorTest, WeightDecayActsOnMatricesOrOnAll) {
  for (bool all : {false, true}) {
    ExecutorOptions options = Sgd();
    options.max_positions = 27;
    options.optimizer.weight_decay = 0.5;
    options.decay_all = all;
    const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), options);
    std::map<std::string, Floats> before;
    for (const Parameter* p : rig->model().AllParameters()) {
      before[p->name] = rig->Read(*p);
    }
    rig->Step(MakeBatch(1), 0.25f);
    for (const Parameter* p : rig->model().AllParameters()) {
      const Floats grad = rig->Gradient(*p), after = rig->Read(*p);
      const bool decays = all || p->shape.num_dims() == 2;
      EXPECT_EQ(p->decay, p->shape.num_dims() == 2) << p->name;
      for (size_t i = 0; i < after.size(); ++i) {
        const double was = before[p->name][i];
        const double want = was - 0.25 * (grad[i] + (decays ? 0.5 * was : 0));
        ASSERT_NEAR(after[i], want, 2e-7 * std::max(1.0, std::fabs(was)))
            << p->name;
      }
    }
  }
}

TEST_F(ExecutorTest, LambsRatioIsThatOfEachTensor) {
  ExecutorOptions options = Options(OptimizerKind::kLamb);
  options.optimizer.weight_decay = 0;
  options.optimizer.min_coeff = 1e-6;
  const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), options);
  std::map<std::string, Floats> before;
  for (const Parameter* p : rig->model().AllParameters()) {
    before[p->name] = rig->Read(*p);
  }
  constexpr float kLr = 1.0f / 64;
  rig->Step(MakeBatch(1), kLr);
  for (const Parameter* p : rig->model().AllParameters()) {
    const Floats after = rig->Read(*p);
    double size = 0, moved = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      size += std::pow(before[p->name][i], 2);
      moved += std::pow(double{after[i]} - before[p->name][i], 2);
    }
    // |update| = ratio |u| lr = |p| lr. A tensor that starts as zeros has
    // ratio 1 and, in Adam's first step, an update of about +-1 everywhere.
    if (size > 0) {
      EXPECT_NEAR(std::sqrt(moved / size), kLr, 1e-4 * kLr) << p->name;
    } else if (p->name.find("qkv.bias") == std::string::npos) {
      EXPECT_NEAR(std::sqrt(moved / after.size()), kLr, 1e-2 * kLr) << p->name;
    }
  }
}

TEST_F(ExecutorTest, EveryOptimizerLearnsInEveryPrecision) {
  struct Case {
    OptimizerKind kind;
    float lr;
  };
  for (const Case& c : {Case{OptimizerKind::kAdamW, 1e-2f},
                        {OptimizerKind::kAdam, 1e-2f},
                        {OptimizerKind::kSgd, 0.3f},
                        {OptimizerKind::kLamb, 2e-2f}}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      ExecutorOptions options = Options(c.kind);
      options.optimizer.momentum = 0.9;
      options.optimizer.weight_decay = 0;
      options.param_dtype = dtype;
      options.max_grad_norm = 1;
      const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), options);
      const TokenBatch batch = MakeBatch(1);
      const float scale = dtype == DType::kF16 ? 128.0f : 1.0f;
      double first = 0, last = 0;
      for (int step = 0; step < 30; ++step) {
        const StepOutput output = rig->Step(batch, c.lr, 2, scale);
        ASSERT_FALSE(output.skipped);
        if (step == 0) first = output.loss;
        last = output.loss;
      }
      // 41 random targets by heart.
      EXPECT_NEAR(first, std::log(61.0), 0.5);
      EXPECT_LT(last, 0.6 * first)
          << "optimizer " << static_cast<int>(c.kind) << ", " << dtype;
    }
  }
}

TEST_F(ExecutorTest, HalfPrecisionFollowsFp32) {
  for (ModelFamily family : kFamilies) {
    const ModelConfig config = TinyConfig(family);
    std::map<DType, std::vector<StepOutput>> runs;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      ExecutorOptions options = Options();
      options.param_dtype = dtype;
      const auto rig = MakeRig(config, options);
      for (int step = 0; step < 10; ++step) {
        runs[dtype].push_back(rig->Step(MakeBatch(1), 2e-3f, 2, 64.0f));
      }
    }
    // bf16 rounds to 2^-9, fp16 to 2^-12, relative; each logit is a sum of
    // about 30 rounded terms after about 20 rounded layers, and the loss
    // averages 41 of them with independent signs: a few roundings in all. Each
    // step starts from parameters that the steps before it rounded already.
    for (int step = 0; step < 10; ++step) {
      const StepOutput& want = runs[DType::kF32][step];
      SCOPED_TRACE(testing::Message() << ModelFamilyName(family) << step);
      EXPECT_NEAR(runs[DType::kBF16][step].loss, want.loss,
                  4 * want.loss / 512);
      EXPECT_NEAR(runs[DType::kF16][step].loss, want.loss,
                  4 * want.loss / 4096);
      EXPECT_NEAR(runs[DType::kBF16][step].grad_norm, want.grad_norm,
                  (16 + 2 * step) * want.grad_norm / 512);
      EXPECT_NEAR(runs[DType::kF16][step].grad_norm, want.grad_norm,
                  (16 + 2 * step) * want.grad_norm / 4096);
    }
  }
}

TEST_F(ExecutorTest, TheSameRunGivesTheSameBitsInEveryPrecision) {
  device_ = MakeCpuDevice(2);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType grad_dtype : {DType::kF32, DType::kBF16}) {
      if (dtype == DType::kF16 && grad_dtype == DType::kBF16) continue;
      if (dtype == DType::kF32 && grad_dtype == DType::kBF16) continue;
      for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kQwen3}) {
        std::vector<Floats> results;
        for (Recompute recompute :
             {Recompute::kOff, Recompute::kOff, Recompute::kKeepAll,
              Recompute::kSelective, Recompute::kFull}) {
          ExecutorOptions options = Options();
          options.param_dtype = dtype;
          options.grad_dtype = grad_dtype;
          options.recompute = recompute;
          const auto rig = MakeRig(TinyConfig(family), options);
          for (int step = 0; step < 4; ++step) {
            rig->Step(MakeBatch(step), 1e-2f, 2, 16.0f);
          }
          results.push_back(rig->ReadAll());
        }
        EXPECT_EQ(results[0], results[1]) << dtype;
        EXPECT_EQ(results[0], results[2]) << dtype << " with all kept";
        EXPECT_EQ(results[0], results[3]) << dtype << " with recompute";
        EXPECT_EQ(results[0], results[4]) << dtype << " with full recompute";
      }
    }
  }
}

TEST_F(ExecutorTest, MasterWeightsKeepWhatHalfPrecisionLoses) {
  // Steps of 1e-5 on weights of 1 vanish in bf16 (2^-8 apart), not in the
  // master copy.
  ExecutorOptions options = Options();
  options.optimizer.weight_decay = 0;
  options.param_dtype = DType::kBF16;
  const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), options);
  const Parameter& norm = rig->parameter("head.norm.weight");
  for (int step = 0; step < 10; ++step) rig->Step(MakeBatch(1), 1e-5f);
  const uint16_t* const rounded = norm.weight.value.As<uint16_t>();
  const Floats master = rig->Read(norm);
  for (size_t i = 0; i < master.size(); ++i) {
    EXPECT_EQ(BF16ToF32(rounded[i]), 1.0f);
    EXPECT_NE(master[i], 1.0f);
    EXPECT_NEAR(master[i], 1.0f, 1.1e-4f);
  }
}

TEST_F(ExecutorTest, ParametersAreTheMasterRounded) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    ExecutorOptions options = Options();
    options.param_dtype = dtype;
    const auto rig = MakeRig(TinyConfig(ModelFamily::kQwen2), options);
    for (int step = 0; step < 3; ++step) {
      for (const Parameter* p : rig->model().AllParameters()) {
        const Floats master = rig->Read(*p);
        const uint16_t* const half = p->weight.value.As<uint16_t>();
        for (size_t i = 0; i < master.size(); ++i) {
          ASSERT_EQ(half[i], dtype == DType::kBF16
                                 ? SplitMaster(master[i]).param
                                 : F32ToF16(master[i]))
              << p->name;
        }
      }
      rig->Step(MakeBatch(step), 1e-2f);
    }
  }
}

// ---- Between steps --------------------------------------------------------

TEST_F(ExecutorTest, EvaluationAndSamplingBetweenStepsChangeNoBit) {
  for (ModelFamily family : kFamilies) {
    std::vector<Floats> results;
    std::vector<StepOutput> outputs;
    for (bool disturbed : {false, true}) {
      ModelConfig config = TinyConfig(family);
      config.embd_pdrop = 0.1;
      const auto rig = MakeRig(config, Options());
      std::vector<float> logits(kVocab), losses(kBatch * kLength);
      for (int step = 0; step < 5; ++step) {
        if (disturbed) {
          const TokenBatch other = MakeBatch(100 + step);
          const double sum = rig->EvalLossSum(other.All(), losses.data());
          EXPECT_EQ(rig->EvalLossSum(other.All()), sum);
          KvCache cache = (*rig)->MakeKvCache(kLength + 3);
          HostBatch prompt = other.Rows(1, 1);
          prompt.targets = nullptr;
          rig->LastLogits(prompt, &cache, logits.data());
        }
        outputs.push_back(rig->Step(MakeBatch(step), 1e-2f, 2));
      }
      results.push_back(rig->ReadAll());
    }
    EXPECT_EQ(results[0], results[1]) << ModelFamilyName(family);
    for (int step = 0; step < 5; ++step) {
      EXPECT_EQ(outputs[step].loss, outputs[5 + step].loss);
      EXPECT_EQ(outputs[step].grad_norm, outputs[5 + step].grad_norm);
    }
  }
}

TEST_F(ExecutorTest, EvaluationAndSamplingDropNothing) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    ModelConfig config = TinyConfig(family);
    const auto without = MakeRig(config, Options());
    config.embd_pdrop = config.resid_pdrop = 0.5;
    const auto with = MakeRig(config, Options());
    const TokenBatch batch = MakeBatch(1);
    EXPECT_EQ(with->EvalLossSum(batch.All()),
              without->EvalLossSum(batch.All()));
    HostBatch prompt = batch.Rows(0, 1);
    prompt.targets = nullptr;
    Floats a(kVocab), b(kVocab);
    with->LastLogits(prompt, nullptr, a.data());
    without->LastLogits(prompt, nullptr, b.data());
    EXPECT_EQ(a, b);
  }
}

TEST_F(ExecutorTest, EvaluationIsTheLossOfTheNextStep) {
  // It sees the parameters that the last step wrote.
  const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), Options());
  for (int step = 0; step < 4; ++step) {
    const TokenBatch batch = MakeBatch(step);
    std::vector<float> losses(kBatch * kLength);
    const double sum = rig->EvalLossSum(batch.All(), losses.data());
    double serial = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
      if (batch.targets[i] < 0) {
        EXPECT_EQ(losses[i], 0);
      }
      serial += losses[i];
    }
    // Each row's loss is rounded to fp32; the sum is of unrounded ones.
    EXPECT_NEAR(sum, serial, 1e-7 * sum);
    EXPECT_DOUBLE_EQ(rig->Step(batch, 1e-2f).loss, sum / batch.NumValid());
  }
}

TEST_F(ExecutorTest, InitialParametersDependOnSeedAndNameAlone) {
  ModelConfig config = TinyConfig(ModelFamily::kGpt2);
  const auto a = MakeRig(config, Options());
  // Another depth, precision, optimizer and memory: common parameters are
  // equal.
  config.num_hidden_layers = 1;
  config.initializer_range = 0.1;
  ExecutorOptions options = Options(OptimizerKind::kLamb);
  options.recompute = Recompute::kFull;
  const auto b = MakeRig(config, options);
  options.param_dtype = DType::kBF16;
  const auto c = MakeRig(config, options);
  for (const Parameter* p : b->model().AllParameters()) {
    // GPT-2 scales these by the depth.
    if (p->name.find("out.weight") != std::string::npos) continue;
    EXPECT_EQ(b->Read(*p), a->Read(a->parameter(p->name))) << p->name;
    EXPECT_EQ(b->Read(*p), c->Read(c->parameter(p->name))) << p->name;
  }
  Rig other(*device_, TinyConfig(ModelFamily::kGpt2), Options(), 8 << 20,
            /*seed=*/2);
  EXPECT_NE(other.ReadAll(), a->ReadAll());
}

TEST_F(ExecutorTest, LoadClearsTheOptimizer) {
  const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), Options());
  std::vector<Floats> results;
  for (int run = 0; run < 2; ++run) {
    (*rig)->states().Initialize(3);
    const TokenBatch batch = MakeBatch(1);
    const HostBatch all = batch.All();
    for (int step = 1; step <= 3; ++step) {
      const auto output = (*rig)->Step({.micro_batches = {&all, 1},
                                        .num_valid_targets = batch.NumValid(),
                                        .lr = 1e-2f,
                                        .optimizer_step = step});
      EXPECT_TRUE(output.ok()) << output.status();
    }
    results.push_back(rig->ReadAll());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(ExecutorTest, HooksSeeTheScheduleInOrder) {
  const auto rig = MakeRig(TinyConfig(ModelFamily::kGpt2), Options());
  std::vector<Action> begun, done;
  (*rig)->clock().set_hook([&](const Action& action, bool after) {
    (after ? done : begun).push_back(action);
  });
  rig->Step(MakeBatch(1), 1e-3f, 2);
  EXPECT_EQ(begun, MakeSchedule((*rig)->plan(), {.micro_steps = 2}));
  EXPECT_EQ(done, begun);
}

TEST_F(ExecutorTest, AStepWithoutAnyValidTargetIsHarmless) {
  const auto rig = MakeRig(TinyConfig(ModelFamily::kLlama), Options());
  TokenBatch batch = MakeBatch(1);
  std::fill(batch.targets.begin(), batch.targets.end(), -1);
  const StepOutput output = rig->Step(batch, 1e-2f, 2);
  EXPECT_EQ(output.loss, 0);
  EXPECT_EQ(output.grad_norm, 0);
  EXPECT_FALSE(output.skipped);
}

}  // namespace
}  // namespace zero
