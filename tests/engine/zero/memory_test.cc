// Predicted memory is measured memory: the same calls on the meta device and
// on the real one.

#include <string>
#include <vector>

#include "engine/zero/executor.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "models/registry.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

constexpr int64_t kUnlimited = int64_t{1} << 46;
constexpr int64_t kBatch = 4, kLength = 13, kVocab = 61;

ExecutorOptions Options(DType dtype, Recompute recompute,
                        OptimizerKind kind = OptimizerKind::kAdamW) {
  return {.param_dtype = dtype,
          .optimizer = {.kind = kind},
          .recompute = recompute,
          .max_positions = 27};
}

struct Calls {
  bool train = true;
  int64_t micro_size = kBatch;
  bool evaluate = false;
  bool generate = false;
};

void Perform(Rig& rig, const Calls& calls) {
  const TokenBatch batch(kBatch, kLength, kVocab, 1);
  // The second step and evaluation meet an arena that has been used.
  for (int round = 0; round < 2; ++round) {
    if (calls.train) rig.Step(batch, 1e-3f, calls.micro_size);
    if (calls.evaluate) rig.EvalLossSum(batch.All());
    if (!calls.generate) continue;
    std::vector<float> logits(kVocab);
    KvCache cache = rig->MakeKvCache(kLength + 2);
    HostBatch text = batch.Rows(0, 1);
    text.targets = nullptr;
    rig.LastLogits(text, &cache, logits.data());
    text.length = 1;
    rig.LastLogits(text, &cache, logits.data());
  }
}

void ExpectSameLedgers(const MemoryLedger& predicted,
                       const MemoryLedger& measured) {
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    EXPECT_EQ(predicted.peak_bytes(category), measured.peak_bytes(category))
        << MemoryCategoryName(category);
  }
  EXPECT_EQ(predicted.total_peak_bytes(), measured.total_peak_bytes());
  EXPECT_EQ(predicted.at_peak(), measured.at_peak());
}

class MemoryTest : public testing::Test {
 protected:
  MemoryTest() : cpu_(MakeCpuDevice(1)), meta_(MakeMetaDevice(*cpu_)) {}

  // Peak activations of one training step, from the meta device.
  int64_t PeakActivations(const ModelConfig& config, DType dtype,
                          Recompute recompute, int64_t batch, int64_t length) {
    Rig rig(*meta_, config, Options(dtype, recompute), kUnlimited);
    rig.Step(TokenBatch(batch, length, config.vocab_size, 1), 1e-3f);
    return rig.ledger().peak_bytes(MemoryCategory::kActivations);
  }

  std::unique_ptr<Device> cpu_, meta_;
};

TEST_F(MemoryTest, TheMetaDevicePredictsEveryCategoryExactly) {
  for (ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (Recompute recompute : kRecomputeLevels) {
        for (int bits = 0; bits < 8; ++bits) {
          const Calls calls{.micro_size = bits & 1 ? kBatch / 2 : kBatch,
                            .evaluate = (bits & 2) != 0,
                            .generate = (bits & 4) != 0};
          SCOPED_TRACE(testing::Message()
                       << ModelFamilyName(family) << " " << dtype
                       << " recompute " << RecomputeName(recompute) << " calls "
                       << bits);
          ModelConfig config = TinyConfig(family);
          config.resid_pdrop = bits & 1 ? 0.1 : 0;
          const ExecutorOptions options = Options(dtype, recompute);
          Rig predicted(*meta_, config, options, kUnlimited);
          Perform(predicted, calls);
          // The real run gets exactly the predicted memory.
          const int64_t reserved = predicted->high_water().device;
          Rig measured(*cpu_, config, options, reserved);
          Perform(measured, calls);
          EXPECT_EQ(measured->high_water().device, reserved);
          ExpectSameLedgers(predicted.ledger(), measured.ledger());
        }
      }
    }
  }
}

TEST_F(MemoryTest, EveryOptimizerAndAnEvaluationAreAlsoPredicted) {
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kLamb}) {
    const ExecutorOptions options =
        Options(DType::kBF16, Recompute::kOff, kind);
    const ModelConfig config = TinyConfig(ModelFamily::kGpt2);
    Rig predicted(*meta_, config, options, kUnlimited);
    Perform(predicted, {});
    Rig measured(*cpu_, config, options, predicted->high_water().device);
    Perform(measured, {});
    ExpectSameLedgers(predicted.ledger(), measured.ledger());
  }
  ExecutorOptions options = Options(DType::kF32, Recompute::kOff);
  options.train = false;
  const Calls calls{.train = false, .evaluate = true, .generate = true};
  Rig predicted(*meta_, TinyConfig(ModelFamily::kQwen2), options, kUnlimited);
  Perform(predicted, calls);
  Rig measured(*cpu_, TinyConfig(ModelFamily::kQwen2), options,
               predicted->high_water().device);
  Perform(measured, calls);
  ExpectSameLedgers(predicted.ledger(), measured.ledger());
  EXPECT_EQ(measured.ledger().peak_bytes(MemoryCategory::kGradients), 0);
  EXPECT_EQ(measured.ledger().peak_bytes(MemoryCategory::kOptimizer), 0);
}

TEST_F(MemoryTest, ModelStatesAreTheFormulaOnThePaddedElements) {
  struct Case {
    DType dtype;
    OptimizerKind kind;
    double momentum;
    int64_t parameter, optimizer;  // bytes per element
  };
  for (const Case& c : {Case{DType::kF32, OptimizerKind::kAdamW, 0, 4, 8},
                        {DType::kBF16, OptimizerKind::kAdamW, 0, 2, 10},
                        {DType::kF16, OptimizerKind::kLamb, 0, 2, 12},
                        {DType::kF32, OptimizerKind::kSgd, 0, 4, 0},
                        {DType::kBF16, OptimizerKind::kSgd, 0.9, 2, 6}}) {
    ExecutorOptions options = Options(c.dtype, Recompute::kOff, c.kind);
    options.optimizer.momentum = c.momentum;
    Rig rig(*meta_, TinyConfig(ModelFamily::kLlama), options, kUnlimited);
    const int64_t n = rig->plan().padded_elems;
    // Each of up to three arrays is padded to 256 bytes.
    auto live = [&](MemoryCategory category) {
      return rig.ledger().live_bytes(category);
    };
    EXPECT_NEAR(live(MemoryCategory::kParameters), n * c.parameter, 255);
    EXPECT_NEAR(live(MemoryCategory::kOptimizer), n * c.optimizer, 3 * 255);
    EXPECT_EQ(live(MemoryCategory::kGradients), 0);
    rig.Step(TokenBatch(kBatch, kLength, kVocab, 1), 1e-3f);
    EXPECT_EQ(live(MemoryCategory::kGradients), 0);
    // A unit's are a whole number of 256 bytes.
    EXPECT_EQ(rig.ledger().peak_bytes(MemoryCategory::kGradients), n * 4);
  }
}

TEST_F(MemoryTest, NothingRestsBetweenSteps) {
  for (Recompute recompute : kRecomputeLevels) {
    Rig rig(*cpu_, TinyConfig(ModelFamily::kQwen3),
            Options(DType::kBF16, recompute));
    const int64_t at_start = rig.ledger().total_live_bytes();
    for (int micro_size : {4, 2, 1}) {
      Perform(rig,
              {.micro_size = micro_size, .evaluate = true, .generate = true});
      EXPECT_EQ(rig->transient().live_bytes(), 0);
      EXPECT_EQ(rig.ledger().total_live_bytes(), at_start);
    }
  }
}

// Widths at which no allocation is padded, so that formulas hold to the byte.
ModelConfig RoundConfig(ModelFamily family, int64_t layers) {
  ModelConfig config = TinyConfig(family);
  config.vocab_size = 256;
  config.hidden_size = 64;
  config.num_hidden_layers = layers;
  config.num_attention_heads = 4;
  config.num_key_value_heads = family == ModelFamily::kGpt2 ? 4 : 2;
  config.head_dim = 16;
  config.intermediate_size = 256;
  config.max_position_embeddings = 64;
  return config;
}

TEST_F(MemoryTest, ABlocksActivationsAreTheClosedFormula) {
  constexpr int64_t b = 2, s = 64, h = 64, n = 4, f = 256;
  auto per_layer = [&](ModelFamily family, Recompute recompute) {
    int64_t peaks[3];
    for (int i = 0; i < 3; ++i) {
      peaks[i] = PeakActivations(RoundConfig(family, 4 + 4 * i), DType::kBF16,
                                 recompute, b, s);
    }
    EXPECT_EQ(peaks[2] - peaks[1], peaks[1] - peaks[0]);
    EXPECT_EQ((peaks[1] - peaks[0]) % 4, 0);
    return (peaks[1] - peaks[0]) / 4;
  };
  // 16-bit activations, with c = kv heads / heads and SwiGLU fused; Qwen3 keeps
  // q and k, whose heads it normalizes, twice.
  const int64_t lse = 4 * n * s * b;
  EXPECT_EQ(per_layer(ModelFamily::kGpt2, Recompute::kKeepAll),
            32 * s * b * h + lse + 16 * s * b);
  EXPECT_EQ(per_layer(ModelFamily::kLlama, Recompute::kKeepAll),
            s * b * (12 * h + 4 * h / 2 + 6 * f) + lse + 8 * s * b);
  EXPECT_EQ(per_layer(ModelFamily::kQwen3, Recompute::kKeepAll),
            s * b * (14 * h + 6 * h / 2 + 6 * f) + lse + 8 * s * b +
                4 * (n + n / 2) * s * b);
  // Less what backward computes again in one pass over memory: two norms'
  // outputs and statistics (4 sbh + 16 sb, or 8 sb) and the activation's
  // (8 sbh, 2 sbf).
  EXPECT_EQ(per_layer(ModelFamily::kGpt2, Recompute::kOff),
            20 * s * b * h + lse);
  EXPECT_EQ(per_layer(ModelFamily::kLlama, Recompute::kOff),
            s * b * (8 * h + 4 * h / 2 + 4 * f) + lse);
  // Qwen3's normalized q and k (2 h + 2 c h) are not kept either.
  EXPECT_EQ(per_layer(ModelFamily::kQwen3, Recompute::kOff),
            s * b * (8 * h + 4 * h / 2 + 4 * f) + lse);
  for (ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    // The input, the residual sum and attention's output; or the input.
    EXPECT_EQ(per_layer(family, Recompute::kSelective), 6 * s * b * h + lse);
    EXPECT_EQ(per_layer(family, Recompute::kFull), 2 * s * b * h);
  }
}

TEST_F(MemoryTest, RecomputeLowersThePeak) {
  for (ModelFamily family : {ModelFamily::kGpt2, ModelFamily::kLlama}) {
    const ModelConfig config = RoundConfig(family, 8);
    const auto peak = [&](Recompute recompute) {
      return PeakActivations(config, DType::kF32, recompute, 2, 64);
    };
    EXPECT_LT(peak(Recompute::kOff), 0.75 * peak(Recompute::kKeepAll));
    EXPECT_LT(peak(Recompute::kSelective), peak(Recompute::kOff) / 2);
    EXPECT_LT(peak(Recompute::kFull), peak(Recompute::kOff) / 3);
    EXPECT_LT(peak(Recompute::kFull), peak(Recompute::kSelective));
  }
}

TEST_F(MemoryTest, TransientMemoryDoesNotGrowWithTheLayers) {
  // Workspace, inputs and everything but activations and states.
  std::vector<int64_t> workspace;
  for (int64_t layers : {4, 8, 16}) {
    Rig rig(*meta_, RoundConfig(ModelFamily::kLlama, layers),
            Options(DType::kF32, Recompute::kOff), kUnlimited);
    rig.Step(TokenBatch(2, 64, 256, 1), 1e-3f);
    workspace.push_back(rig.ledger().peak_bytes(MemoryCategory::kWorkspace) +
                        rig.ledger().peak_bytes(MemoryCategory::kInputs));
  }
  EXPECT_EQ(workspace[0], workspace[1]);
  EXPECT_EQ(workspace[0], workspace[2]);
}

// Without other micro-batches gradients replace activations: a step needs the
// memory of both only if it accumulates.
TEST_F(MemoryTest, GradientsTakeTheMemoryThatActivationsGiveBack) {
  for (ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (Recompute recompute : {Recompute::kKeepAll, Recompute::kOff}) {
      SCOPED_TRACE(testing::Message()
                   << ModelFamilyName(family) << " recompute "
                   << RecomputeName(recompute));
      const auto high_water = [&](int64_t layers, int64_t micro_steps) {
        Rig rig(*meta_, RoundConfig(family, layers),
                Options(DType::kF32, recompute), kUnlimited);
        rig.Step(TokenBatch(8 * micro_steps, 64, 256, 1), 1e-3f,
                 /*micro_size=*/8);
        return rig->high_water().device;
      };
      const auto kept = [&](int64_t layers) {
        return PeakActivations(RoundConfig(family, layers), DType::kF32,
                               recompute, 8, 64);
      };
      const Plan plan =
          MakePlan(DescribeUnits(*MakeModel(RoundConfig(family, 4))), {});
      const int64_t gradients = 4 * 4 * plan.units[1].trained_elems;
      // Four blocks of eight rows keep more activations than gradients.
      const int64_t activations = kept(8) - kept(4);
      EXPECT_GT(activations, gradients);
      const int64_t grown = high_water(8, 1) - high_water(4, 1);
      EXPECT_LE(grown, activations);
      EXPECT_EQ(high_water(8, 2) - high_water(4, 2), grown + gradients);
    }
  }
}

TEST_F(MemoryTest, MoreMicroBatchesNeedNoMoreMemory) {
  const ModelConfig config = RoundConfig(ModelFamily::kGpt2, 4);
  std::vector<int64_t> high_water;
  for (int64_t batch : {2, 4, 16}) {
    Rig rig(*meta_, config, Options(DType::kF32, Recompute::kOff), kUnlimited);
    rig.Step(TokenBatch(batch, 64, 256, 1), 1e-3f, /*micro_size=*/2);
    high_water.push_back(rig->high_water().device);
  }
  EXPECT_EQ(high_water[1], high_water[2]);
}

using MemoryDeathTest = MemoryTest;

TEST_F(MemoryDeathTest, AByteLessThanPredictedIsNotEnough) {
  // The prediction is tight, not a bound.
  const ModelConfig config = TinyConfig(ModelFamily::kGpt2);
  const ExecutorOptions options = Options(DType::kF32, Recompute::kOff);
  Rig predicted(*meta_, config, options, kUnlimited);
  Perform(predicted, {});
  Rig smaller(*meta_, config, options,
              predicted->high_water().device - Arena::kAlignment);
  EXPECT_DEATH(Perform(smaller, {}), "has no room for");
}

TEST_F(MemoryTest, MemoryThatThereIsNotIsAnErrorWithARemedy) {
  ToyModel model(2);
  for (const char* name : {"a", "b"}) {
    model.Add(name)->AddParameter("w", {3, 3}, {}, true);
  }
  MemoryLedger ledger, host_ledger;
  const Rank rank = MakeSoloRank(*meta_);
  const auto executor =
      Executor::Make(rank, model, MakePlan(DescribeUnits(model), {}),
                     Options(DType::kF32, Recompute::kOff),
                     {int64_t{1} << 53, 0}, &ledger, &host_ledger);
  ASSERT_FALSE(executor.ok());
  EXPECT_EQ(executor.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(executor.status().message());
  EXPECT_NE(message.find("activations, workspace and buffers"),
            std::string::npos);
  EXPECT_NE(message.find("activation_checkpointing.enabled"),
            std::string::npos);
  EXPECT_EQ(ledger.total_live_bytes(),
            ledger.live_bytes(MemoryCategory::kFixed));  // of its streams
}

}  // namespace
}  // namespace zero
