// Our models against transformers in float64 (tests/golden/README.md).

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "engine/checkpoint/portable.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/zero/executor.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "models/hf_config.h"
#include "models/registry.h"
#include "tests/support/max_or_nan.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

std::vector<float> ReadFloats(const SafetensorsReader& reader,
                              const std::string& name) {
  const StoredTensor* tensor = reader.Find(name);
  EXPECT_NE(tensor, nullptr) << name;
  if (tensor == nullptr) return {};
  std::vector<float> values(tensor->num_elements);
  ReadAsF32(*tensor, 0, tensor->num_elements, values.data());
  return values;
}

std::vector<int32_t> ReadInts(const SafetensorsReader& reader,
                              const std::string& name) {
  const StoredTensor* tensor = reader.Find(name);
  std::vector<int32_t> values(tensor->num_elements);
  std::memcpy(values.data(), tensor->data, tensor->num_bytes);
  return values;
}

// The part of a parameter's values that one Hugging Face tensor holds, in the
// order of the file.
std::vector<float> Cut(const PortableTensor& tensor,
                       const std::vector<float>& all) {
  const Shape& shape = tensor.parameter->shape;
  const int64_t cols = shape.num_dims() == 1 ? 1 : shape[1];
  std::vector<float> values;
  if (!tensor.transpose) {
    const auto begin = all.begin() + tensor.row_begin * cols;
    return {begin, begin + tensor.shape.num_elems()};
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < shape[0]; ++r) values.push_back(all[r * cols + c]);
  }
  return values;
}

double LargestAbs(const std::vector<float>& values) {
  double largest = 0;
  for (float v : values) largest = std::max<double>(largest, std::fabs(v));
  return largest;
}

// The largest difference, leaving out elements [skip_begin, skip_end).
double LargestDifference(const std::vector<float>& a,
                         const std::vector<float>& b, size_t skip_begin = 0,
                         size_t skip_end = 0) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (i >= skip_begin && i < skip_end) continue;
    largest = MaxOrNan(largest, std::fabs(a[i] - b[i]));
  }
  return largest;
}

constexpr int64_t kBatch = 2, kLength = 17;

struct Golden {
  std::string dir;
  std::unique_ptr<SafetensorsReader> reader;
  ModelConfig config;
  std::unique_ptr<Model> model;
  std::vector<int32_t> tokens, targets, positions;
  std::vector<int64_t> sample_ids = {0, 1};
  int64_t num_valid = 0;

  explicit Golden(const std::string& family) : dir("tests/golden/" + family) {
    auto opened = SafetensorsReader::Open(dir + "/golden.safetensors");
    EXPECT_TRUE(opened.ok()) << opened.status();
    reader = *std::move(opened);
    auto read = ReadHfConfig(dir);
    EXPECT_TRUE(read.ok()) << read.status();
    config = *read;
    model = MakeModel(config);
    tokens = ReadInts(*reader, "input_ids");
    targets = ReadInts(*reader, "targets");
    for (size_t i = 0; i < tokens.size(); ++i) {
      positions.push_back(i % kLength);
      num_valid += targets[i] >= 0;
    }
  }

  HostBatch batch() const {
    return {kBatch,         kLength,          tokens.data(),
            targets.data(), positions.data(), sample_ids.data()};
  }
};

ExecutorOptions Options(Recompute recompute) {
  return {.optimizer = {.weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.95},
          .max_grad_norm = 1.0f,
          .recompute = recompute,
          .max_positions = kLength};
}

class GoldenTest : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Executor> MakeExecutor(Golden& golden, Recompute recompute) {
    device_ = MakeCpuDevice(2);
    rank_ = MakeSoloRank(*device_);
    auto executor = Executor::Make(
        rank_, *golden.model, MakePlan(DescribeUnits(*golden.model), {}),
        Options(recompute), {int64_t{64} << 20, 0}, &ledger_, &host_ledger_);
    EXPECT_TRUE(executor.ok()) << executor.status();
    const auto read = OpenPortable(golden.dir, *golden.model);
    EXPECT_TRUE(read.ok()) << read.status();
    const absl::Status loaded = (*executor)->states().Load(*read);
    EXPECT_TRUE(loaded.ok()) << loaded;
    return *std::move(executor);
  }

  void Begin(Executor& executor, const Golden& golden, int64_t step) {
    const HostBatch batch = golden.batch();
    const absl::Status begun =
        executor.Begin({.micro_batches = {&batch, 1},
                        .num_valid_targets = golden.num_valid,
                        .lr = 1e-3f,
                        .beta1 = -1,
                        .optimizer_step = step});
    EXPECT_TRUE(begun.ok()) << begun;
  }
  StepOutput Step(Executor& executor, const Golden& golden, int64_t step) {
    Begin(executor, golden, step);
    return *executor.Finish();
  }

  std::unique_ptr<Device> device_;
  Rank rank_;
  MemoryLedger ledger_, host_ledger_;
};

TEST_P(GoldenTest, LossAndLogitsAreThoseOfTransformers) {
  Golden golden(GetParam());
  const auto executor = MakeExecutor(golden, Recompute::kOff);
  const double loss = *executor->EvalLossSum(golden.batch()) / golden.num_valid;
  const double want = ReadFloats(*golden.reader, "loss")[0];
  EXPECT_NEAR(loss, want, 1e-6 * want);

  // The last token's logits of every prefix of the first row.
  const std::vector<float> logits = ReadFloats(*golden.reader, "logits");
  const int64_t vocab = golden.config.vocab_size;
  for (int64_t length = 1; length <= kLength; length += 4) {
    std::vector<float> last(vocab);
    HostBatch prefix = golden.batch();
    prefix.batch = 1;
    prefix.length = length;
    prefix.targets = nullptr;
    ASSERT_TRUE(executor->LastLogits(prefix, nullptr, last.data()).ok());
    const auto begin = logits.begin() + (length - 1) * vocab;
    const std::vector<float> row(begin, begin + vocab);
    EXPECT_LE(LargestDifference(last, row), 1e-5 * LargestAbs(row))
        << "prefix of " << length;
  }
}

TEST_P(GoldenTest, CachedKeysAndValuesGiveTheSameLogits) {
  Golden golden(GetParam());
  const auto executor = MakeExecutor(golden, Recompute::kOff);
  const int64_t vocab = golden.config.vocab_size;
  std::vector<float> last(vocab);
  KvCache cache = executor->MakeKvCache(kLength);
  HostBatch part = golden.batch();
  part.batch = 1;
  part.targets = nullptr;
  part.length = 5;  // a prompt, then one token at a time
  ASSERT_TRUE(executor->LastLogits(part, &cache, last.data()).ok());
  for (int64_t t = 5; t < kLength; ++t) {
    part.tokens = golden.tokens.data() + t;
    part.positions = golden.positions.data() + t;
    part.length = 1;
    ASSERT_TRUE(executor->LastLogits(part, &cache, last.data()).ok());
  }
  const std::vector<float> logits = ReadFloats(*golden.reader, "logits");
  const auto begin = logits.begin() + (kLength - 1) * vocab;
  const std::vector<float> row(begin, begin + vocab);
  EXPECT_LE(LargestDifference(last, row), 1e-5 * LargestAbs(row));
}

TEST_P(GoldenTest, EveryGradientIsThatOfTransformers) {
  Golden golden(GetParam());
  const auto executor = MakeExecutor(golden, Recompute::kOff);
  Begin(*executor, golden, 1);  // they exist until it is finished
  for (const PortableTensor& tensor : golden.model->PortableTensors()) {
    const std::vector<float> want =
        ReadFloats(*golden.reader, "grad." + tensor.name);
    const Tensor& grad = tensor.parameter->weight.sink->grad;
    const std::vector<float> all(grad.As<float>(),
                                 grad.As<float>() + grad.num_elems());
    EXPECT_LE(LargestDifference(Cut(tensor, all), want),
              1e-5 * LargestAbs(want))
        << tensor.name;
  }
}

TEST_P(GoldenTest, ThreeAdamWStepsAreThoseOfTransformers) {
  Golden golden(GetParam());
  const auto executor = MakeExecutor(golden, Recompute::kOff);
  const std::vector<float> losses = ReadFloats(*golden.reader, "step_losses");
  const std::vector<float> norms = ReadFloats(*golden.reader, "grad_norms");
  for (int step = 0; step < 3; ++step) {
    const StepOutput output = Step(*executor, golden, step + 1);
    EXPECT_NEAR(output.loss, losses[step], 1e-6 * losses[step]);
    EXPECT_NEAR(output.grad_norm, norms[step], 5e-6 * norms[step]);
  }
  const ValuesByName values = *ReadParameters(*executor);
  for (const PortableTensor& tensor : golden.model->PortableTensors()) {
    const std::vector<float>& all = values.at(tensor.parameter->name);
    const std::vector<float> want =
        ReadFloats(*golden.reader, "step3." + tensor.name);
    // GPT-2's key bias has a gradient that is zero except for rounding.
    const bool has_key_bias =
        tensor.name.find("attn.c_attn.bias") != std::string::npos;
    const size_t width = golden.config.hidden_size;
    EXPECT_LE(
        LargestDifference(Cut(tensor, all), want, has_key_bias ? width : 0,
                          has_key_bias ? 2 * width : 0),
        2e-5)
        << tensor.name;
  }
}

TEST_P(GoldenTest, RecomputeChangesNoBit) {
  std::vector<ValuesByName> results;
  std::vector<double> losses;
  for (Recompute recompute : kRecomputeLevels) {
    Golden golden(GetParam());
    ledger_ = MemoryLedger();
    const auto executor = MakeExecutor(golden, recompute);
    for (int step = 1; step <= 3; ++step) {
      losses.push_back(Step(*executor, golden, step).loss);
    }
    results.push_back(*ReadParameters(*executor));
  }
  for (int level = 1; level < 3; ++level) {
    EXPECT_EQ(results[0], results[level]);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(losses[step], losses[3 * level + step]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GoldenTest,
                         testing::Values("gpt2", "llama", "qwen2", "qwen3"));

}  // namespace
}  // namespace zero
