#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/matmul.h"
#include "models/catalog.h"
#include "models/registry.h"

namespace zero {
namespace {

ModelConfig Preset(const std::string& name) {
  auto config = MakeModelCatalog()->Preset(name);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

TEST(PresetsTest, ParameterCountsAreThePublishedOnes) {
  const std::map<std::string, int64_t> published = {
      {"gpt2", 124439808},          {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},    {"gpt2-xl", 1557611200},
      {"Llama-2-7B", 6738415616},   {"Llama-3-8B", 8030261248},
      {"Llama-3.1-8B", 8030261248}, {"Llama-3.2-1B", 1235814400},
      {"Llama-3.2-3B", 3212749824}, {"Qwen2.5-0.5B", 494032768},
      {"Qwen2.5-1.5B", 1543714304}, {"Qwen2.5-3B", 3085938688},
      {"Qwen2.5-7B", 7615616512},   {"Qwen3-0.6B", 596049920},
      {"Qwen3-1.7B", 1720574976},   {"Qwen3-4B", 4022468096},
      {"Qwen3-8B", 8190735360},
  };
  for (const auto& [name, count] : published) {
    EXPECT_EQ(NumParameters(Preset(name)), count) << name;
  }
}

TEST(PresetsTest, TheClosedFormCountsWhatTheModelIsMadeOf) {
  for (const ModelPreset& preset : ModelPresets()) {
    EXPECT_EQ(NumParameters(preset.config),
              MakeModel(preset.config)->NumParameters())
        << preset.name;
  }
  ModelConfig untied = Preset("gpt2-tiny");
  untied.tie_word_embeddings = false;
  untied.intermediate_size = 100;
  EXPECT_EQ(NumParameters(untied), MakeModel(untied)->NumParameters());
}

TEST(PresetsTest, FlopsPerTokenFollowPalmsConvention) {
  // Llama-3-8B at 8192: 57.9 GFLOP per token.
  EXPECT_NEAR(FlopsPerToken(Preset("Llama-3-8B"), 8192) / 1e9, 57.9, 0.05);
  // GPT-2: 12 layers of width 768, 85,056,000 parameters in the blocks and the
  // final norm, the tied head of 50257 * 768 counted once.
  EXPECT_EQ(FlopsPerToken(Preset("gpt2"), 1024),
            6.0 * (85056000 + 50257 * 768) + 12.0 * 12 * 768 * 1024);
  EXPECT_EQ(FlopsPerToken(Preset("gpt2"), 1024, /*causal=*/true),
            6.0 * (85056000 + 50257 * 768) + 6.0 * 12 * 768 * 1024);
  // In a block of 12 * 768^2 weights, 3 + 4 are those of q, k, v and the FFN's
  // first layer; fully 1 more and a forward attention.
  const ModelConfig gpt2 = Preset("gpt2");
  EXPECT_EQ(RecomputedFlopsPerToken(gpt2, 1024, Recompute::kKeepAll), 0);
  EXPECT_EQ(RecomputedFlopsPerToken(gpt2, 1024, Recompute::kOff), 0);
  EXPECT_EQ(RecomputedFlopsPerToken(gpt2, 1024, Recompute::kSelective),
            2.0 * 12 * 7 * 768 * 768);
  EXPECT_EQ(RecomputedFlopsPerToken(gpt2, 1024, Recompute::kFull),
            2.0 * 12 * 8 * 768 * 768 + 4.0 * 12 * 768 * 1024);
  // Norms of 768 and GELU of 4 * 768, each read and written.
  EXPECT_EQ(RecomputedPassElemsPerToken(gpt2, Recompute::kKeepAll), 0);
  EXPECT_EQ(RecomputedPassElemsPerToken(gpt2, Recompute::kOff),
            12.0 * 2 * (2 * 768 + 4 * 768));
  // Qwen3's heads are wider together (16 * 128) than the model (1024).
  const ModelConfig qwen3 = Preset("Qwen3-0.6B");
  EXPECT_EQ(FlopsPerToken(qwen3, 2048) - FlopsPerToken(qwen3, 1024),
            12.0 * 28 * 2048 * 1024);
}

TEST(PresetsTest, EveryPresetIsCompleteAndNamedOnce) {
  std::set<std::string> names;
  for (const ModelPreset& preset : ModelPresets()) {
    const ModelConfig& c = preset.config;
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_GT(c.vocab_size, 0) << preset.name;
    EXPECT_GT(c.intermediate_size, 0) << preset.name;
    EXPECT_GT(c.max_position_embeddings, 0) << preset.name;
    EXPECT_EQ(c.num_attention_heads % c.num_key_value_heads, 0) << preset.name;
    EXPECT_EQ(c.head_dim % 2, 0) << preset.name;
    EXPECT_EQ(c.embd_pdrop, 0) << preset.name;
  }
  EXPECT_EQ(MakeModelCatalog()->PresetNames().size(), names.size());
}

TEST(PresetsTest, AnUnknownPresetNamesTheNearest) {
  const auto preset = MakeModelCatalog()->Preset("gpt2-medum");
  EXPECT_EQ(preset.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(preset.status().message(),
            "no preset \"gpt2-medum\"; did you mean \"gpt2-medium\"? "
            "`zero models` lists them");
}

// Rows and columns of every weight of the presets.
std::set<std::pair<int64_t, int64_t>> WeightShapes() {
  std::set<std::pair<int64_t, int64_t>> shapes;
  for (const ModelPreset& preset : ModelPresets()) {
    const ModelConfig& c = preset.config;
    const int64_t hidden = c.hidden_size, inner = c.intermediate_size;
    const int64_t queries = c.num_attention_heads * c.head_dim;
    const int64_t keys = c.num_key_value_heads * c.head_dim;
    const bool gated = c.family != ModelFamily::kGpt2;
    shapes.insert({queries + 2 * keys, hidden});
    shapes.insert({hidden, queries});
    shapes.insert({gated ? 2 * inner : inner, hidden});
    shapes.insert({hidden, inner});
    shapes.insert({c.vocab_size, hidden});
  }
  return shapes;
}

// Only sizes: nothing is read.
TEST(PresetsTest, AProductTakesAtMostFourMiBOfScratchPerThread) {
  using cpu::LowPrecision;
  constexpr int64_t kTokens = 4096;
  static char data = 0;  // only its presence counts
  const auto matrix = [&](DType dtype, int64_t rows, int64_t cols) {
    return Matrix{&data, dtype, rows, cols, cols};
  };
  for (int threads : {1, 2, 16, 64}) {
    const size_t limit = threads * cpu::MatmulCache::kThreadBytes;
    for (LowPrecision mode : {LowPrecision::kNative, LowPrecision::kConvert}) {
      cpu::MatmulCache cache(threads, mode);
      for (const auto& [n, k] : WeightShapes()) {
        SCOPED_TRACE(testing::Message()
                     << n << " x " << k << ", " << threads << " threads");
        for (DType dtype : {DType::kF32, DType::kBF16}) {
          const Matrix x = matrix(dtype, kTokens, k);
          const Matrix y = matrix(dtype, kTokens, n);
          const Matrix w = matrix(dtype, n, k);
          EXPECT_LE(cache.WorkspaceBytes({x, false, w, true, y}), limit);
          EXPECT_LE(cache.WorkspaceBytes({y, false, w, false, x}), limit);
          for (DType grad : {DType::kF32, dtype}) {
            const Matrix dw = matrix(grad, n, k);
            EXPECT_LE(cache.WorkspaceBytes({y, true, x, false, dw}), limit);
          }
        }
      }
    }
  }
}

// Heads of the presets: queries', keys', width.
std::set<std::tuple<int64_t, int64_t, int64_t>> HeadShapes() {
  std::set<std::tuple<int64_t, int64_t, int64_t>> shapes;
  for (const ModelPreset& preset : ModelPresets()) {
    const ModelConfig& c = preset.config;
    shapes.insert({c.num_attention_heads, c.num_key_value_heads, c.head_dim});
  }
  return shapes;
}

// Only sizes: nothing is read.
TEST(PresetsTest, AttentionTakesAtMostFourMiBOfScratchPerThread) {
  constexpr size_t kLimit = cpu::MatmulCache::kThreadBytes;
  int64_t longest = 0;
  for (const ModelPreset& preset : ModelPresets()) {
    longest = std::max(longest, preset.config.max_position_embeddings);
  }
  EXPECT_GE(longest, 131072);
  for (int threads : {1, 2, 16, 64}) {
    cpu::CpuDevice::Options options;
    options.num_threads = threads;
    options.low_precision = cpu::LowPrecision::kNative;
    cpu::CpuDevice device(options);
    for (const auto& [heads, kv_heads, width] : HeadShapes()) {
      for (int64_t length : {int64_t{256}, int64_t{2048}, int64_t{8192},
                             int64_t{32768}, longest}) {
        for (int64_t batch : {1, 64}) {  // few and many heads for the threads
          SCOPED_TRACE(testing::Message()
                       << heads << " and " << kv_heads << " heads of " << width
                       << ", " << batch << " x " << length << " tokens, "
                       << threads << " threads");
          AttentionShape shape{DType::kF32, batch,    length, length,
                               heads,       kv_heads, width,  1};
          for (DType dtype : {DType::kF32, DType::kBF16}) {
            shape.dtype = dtype;
            AttentionForwardArgs forward;
            forward.shape = shape;
            AttentionBackwardArgs backward;
            backward.shape = shape;
            EXPECT_LE(device.ops().AttentionForwardWorkspaceBytes(forward),
                      threads * kLimit);
            EXPECT_LE(device.ops().AttentionBackwardWorkspaceBytes(backward),
                      threads * kLimit);
          }
          // Pairs of bf16, whether or not this CPU multiplies them.
          const cpu::BackwardCut cut = cpu::CutBackward(shape, threads, true);
          EXPECT_LE(cpu::BackwardScratch(shape, cut, true) * 4, kLimit);
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero
