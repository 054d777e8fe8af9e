#include "models/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "engine/config/load.h"
#include "engine/config/print.h"
#include "models/catalog.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

ModelConfig Parse(const std::string& text) {
  auto config = ParseHfConfig(text, "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

std::string ErrorOf(const std::string& text) {
  const auto config = ParseHfConfig(text, "config.json");
  return config.ok() ? "no error" : std::string(config.status().message());
}

// A small Llama in the old spelling, with `more` keys.
std::string Llama(const std::string& more) {
  return R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 32,
"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64)" +
         (more.empty() ? "" : ",\n" + more) + "}";
}

std::string Gpt2(const std::string& more) {
  return R"({"model_type": "gpt2", "vocab_size": 100, "n_embd": 32,
"n_layer": 2, "n_head": 4, "n_positions": 64)" +
         (more.empty() ? "" : ",\n" + more) + "}";
}

// tests/golden/ holds files written by transformers 5.
TEST(HfConfigTest, ReadsTransformersOwnGpt2) {
  auto c = ReadHfConfig("tests/golden/gpt2");
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_EQ(c->family, ModelFamily::kGpt2);
  EXPECT_EQ(c->vocab_size, 97);
  EXPECT_EQ(c->hidden_size, 32);
  EXPECT_EQ(c->num_hidden_layers, 2);
  EXPECT_EQ(c->num_attention_heads, 4);
  EXPECT_EQ(c->num_key_value_heads, 4);
  EXPECT_EQ(c->head_dim, 8);
  EXPECT_EQ(c->intermediate_size, 72);
  EXPECT_EQ(c->max_position_embeddings, 32);
  EXPECT_EQ(c->norm_eps, 1e-5);
  EXPECT_EQ(c->activation, "gelu_new");
  EXPECT_TRUE(c->attention_bias);
  EXPECT_TRUE(c->tie_word_embeddings);
  EXPECT_EQ(c->from_pretrained, "tests/golden/gpt2");
}

TEST(HfConfigTest, ReadsTransformersOwnLlamaWithScaledRotary) {
  auto c = ReadHfConfig("tests/golden/llama");
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_EQ(c->family, ModelFamily::kLlama);
  EXPECT_EQ(c->num_key_value_heads, 2);
  EXPECT_EQ(c->head_dim, 10);
  EXPECT_EQ(c->rope_theta, 500);
  EXPECT_EQ(c->rope_scaling, (RopeScaling{true, 4, 1, 4, 64}));
  EXPECT_EQ(c->activation, "silu");
  EXPECT_FALSE(c->attention_bias);
  EXPECT_FALSE(c->tie_word_embeddings);
}

TEST(HfConfigTest, ReadsTransformersOwnQwens) {
  auto qwen2 = ReadHfConfig("tests/golden/qwen2");
  ASSERT_TRUE(qwen2.ok()) << qwen2.status();
  EXPECT_EQ(qwen2->family, ModelFamily::kQwen2);
  EXPECT_TRUE(qwen2->attention_bias);
  EXPECT_TRUE(qwen2->tie_word_embeddings);
  EXPECT_EQ(qwen2->head_dim, 8);
  EXPECT_EQ(qwen2->rope_theta, 1e6);
  EXPECT_EQ(qwen2->norm_eps, 1e-6);
  auto qwen3 = ReadHfConfig("tests/golden/qwen3");
  ASSERT_TRUE(qwen3.ok()) << qwen3.status();
  EXPECT_EQ(qwen3->family, ModelFamily::kQwen3);
  EXPECT_FALSE(qwen3->attention_bias);
  EXPECT_EQ(qwen3->head_dim, 16);
}

TEST(HfConfigTest, WhatIsWrittenReadsBackEqual) {
  for (const ModelPreset& preset : ModelPresets()) {
    const std::string text = WriteHfConfig(preset.config, DType::kBF16, 7, 7);
    auto again = ParseHfConfig(text, "config.json");
    ASSERT_TRUE(again.ok()) << preset.name << again.status();
    EXPECT_EQ(again->bos_token_id, "7");
    EXPECT_EQ(again->eos_token_id, "7");
    again->bos_token_id = again->eos_token_id = "";
    EXPECT_EQ(*again, preset.config) << preset.name;
  }
}

// A past bug: a run on token files overwrote the base's value with null.
TEST(HfConfigTest, TokenIdsOfTheBaseAreCarriedWhereNoTokenizerKnowsBetter) {
  const std::string given = R"("bos_token_id": 1, "eos_token_id": [2, 3])";
  const ModelConfig c = Parse(Llama(given));
  const std::string kept = WriteHfConfig(c, DType::kF32, -1, -1);
  EXPECT_THAT(kept, testing::HasSubstr("\"bos_token_id\": 1,"));
  EXPECT_THAT(kept,
              testing::HasSubstr("\"eos_token_id\": [\n    2,\n    3\n  ],"));
  EXPECT_EQ(Parse(kept), c);
  EXPECT_THAT(WriteHfConfig(c, DType::kF32, 6, 7),
              testing::AllOf(testing::HasSubstr("\"bos_token_id\": 6,"),
                             testing::HasSubstr("\"eos_token_id\": 7,")));
  EXPECT_THAT(WriteHfConfig(Parse(Llama("")), DType::kF32, -1, -1),
              testing::HasSubstr("\"eos_token_id\": null,"));
}

TEST(HfConfigTest, ARunsFolderNamesTheModelInsideIt) {
  const TempDir dir;
  dir.Write("run/config.json", "{}");
  dir.Write("run/final/config.json", Llama(""));
  EXPECT_EQ(ReadHfConfig(dir.File("run")).status().message(),
            dir.File("run") +
                ": the folder of a run holds no model itself; "
                "did you mean " +
                dir.File("run/final") + "?");
}

TEST(HfConfigTest, OldAndNewRotarySpellingsMeanTheSame) {
  const std::string scaling =
      R"("rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0, "original_max_position_embeddings": 8192)";
  const ModelConfig old_keys = Parse(
      Llama(R"("rope_theta": 500000.0, "rope_scaling": {)" + scaling + "}"));
  const ModelConfig new_keys = Parse(
      Llama(R"("rope_parameters": {"rope_theta": 500000.0, )" + scaling + "}"));
  EXPECT_EQ(old_keys, new_keys);
  EXPECT_TRUE(new_keys.rope_scaling.enabled);
  EXPECT_EQ(new_keys.rope_theta, 500000);
}

TEST(HfConfigTest, MissingAndNullKeysTakeTheFamilysDefault) {
  const ModelConfig gpt2 =
      Parse(Gpt2(R"("n_inner": null, "attn_pdrop": 0.1, "embd_pdrop": 0.1)"));
  EXPECT_EQ(gpt2.intermediate_size, 128);
  EXPECT_EQ(gpt2.embd_pdrop, 0) << "dropout is a training setting";
  const ModelConfig llama = Parse(Llama(R"("rope_scaling": null)"));
  EXPECT_EQ(llama.num_key_value_heads, 4);
  EXPECT_EQ(llama.head_dim, 8);
  EXPECT_EQ(llama.rope_theta, 10000);
  EXPECT_FALSE(llama.rope_scaling.enabled);
}

TEST(HfConfigTest, WhatTheseModelsCannotDoIsRefused) {
  EXPECT_EQ(
      ErrorOf(Llama(R"("hidden_act": "gelu")")),
      "config.json:3:15: hidden_act: \"gelu\" is not supported; want silu");
  EXPECT_EQ(ErrorOf(Gpt2(R"("activation_function": "relu")")),
            "config.json:3:24: activation_function: \"relu\" is not supported; "
            "want gelu_new or gelu");
  EXPECT_EQ(ErrorOf(Llama(R"("rope_scaling": {"type": "yarn"})")),
            "config.json:3:26: type: \"yarn\" is not supported; want default "
            "or llama3");
  EXPECT_EQ(ErrorOf(Llama(R"("mlp_bias": true)")),
            "config.json:3:13: mlp_bias: true: these models have no "
            "feed-forward biases; delete it, or write false");
  EXPECT_EQ(ErrorOf(Llama(R"("use_sliding_window": true)")),
            "config.json:3:23: use_sliding_window: true: attention sees the "
            "whole sequence; delete it, or write false");
  EXPECT_EQ(
      ErrorOf(Llama(R"("layer_types": ["sliding_attention"])")),
      "config.json:3:17: layer_types: \"sliding_attention\"; every layer's "
      "attention sees the whole sequence here (full_attention)");
  EXPECT_NE(ErrorOf(Llama(R"("attention_bias": true)")), "no error");
  EXPECT_NE(ErrorOf(Gpt2(R"("scale_attn_weights": false)")), "no error");
  EXPECT_NE(ErrorOf(Gpt2(R"("add_cross_attention": true)")), "no error");
  EXPECT_NE(ErrorOf(Llama(R"("quantization_config": {})")), "no error");
  EXPECT_NE(ErrorOf(Llama(R"("partial_rotary_factor": 0.5)")), "no error");
}

TEST(HfConfigTest, BrokenFilesAreNamedErrors) {
  EXPECT_EQ(ErrorOf("{}"),
            "config.json:1:1: model_type: missing; want gpt2, llama, qwen2 or "
            "qwen3");
  EXPECT_EQ(ErrorOf(R"({"model_type": "mistral"})"),
            "config.json:1:16: model_type: \"mistral\" is not one of gpt2, "
            "llama, qwen2, qwen3");
  EXPECT_EQ(ErrorOf(R"({"model_type": "gpt2"})"),
            "config.json:1:1: vocab_size: missing");
  EXPECT_EQ(ErrorOf(Llama(R"("num_key_value_heads": 3)")),
            "config.json:1:1: num_key_value_heads: 3 does not divide "
            "num_attention_heads = 4");
  EXPECT_EQ(ErrorOf(Llama(R"("rms_norm_eps": "small")")),
            "config.json:3:17: rms_norm_eps: \"small\" is a string, want a "
            "number > 0");
  EXPECT_EQ(ErrorOf(Llama(R"("rope_scaling": {"rope_type": "llama3"})")),
            "config.json:3:17: rope_scaling.factor: missing; llama3 scaling "
            "needs it");
  EXPECT_EQ(ReadHfConfig("tests/golden/none").status().message(),
            "tests/golden/none/config.json: does not exist; want a folder "
            "with config.json and model.safetensors, as save_pretrained() "
            "writes it");
  TempDir run;
  run.Write("step/checkpoint.json", "{}");
  const std::string step = run.File("step");
  EXPECT_EQ(ReadHfConfig(step).status().message(),
            step + " is a checkpoint of a run; `zero checkpoint export " +
                step +
                " DIR` writes its weights to a folder that can be "
                "named here");
}

// The config room and the catalog together.
class ConfigWithModelTest : public testing::Test {
 protected:
  absl::StatusOr<LoadedConfig> Load(const std::string& model,
                                    std::vector<std::string> overrides = {}) {
    LoadOptions options;
    options.catalog = catalog_.get();
    options.missing_files = MissingFiles::kIgnored;
    options.overrides = std::move(overrides);
    return ParseConfig("{\"model\": " + model +
                           ", \"training\": {\"steps\": 1}, "
                           "\"train_batch_size\": 1, "
                           "\"data\": {\"sequence_length\": 16, "
                           "\"tokenizer\": \"none\"}}",
                       "run.json", options);
  }

  std::unique_ptr<ModelCatalog> catalog_ = MakeModelCatalog();
};

TEST_F(ConfigWithModelTest, EveryPresetResolvesAndReadsBackEqual) {
  for (const ModelPreset& preset : ModelPresets()) {
    auto loaded = Load(std::string("{\"preset\": \"") + preset.name + "\"}");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.model, preset.config) << preset.name;
    LoadOptions options;
    options.catalog = catalog_.get();
    options.missing_files = MissingFiles::kIgnored;
    auto again = ParseConfig(PrintResolved(*loaded), "run.json", options);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->config == loaded->config) << preset.name;
  }
}

TEST_F(ConfigWithModelTest, ExplicitKeysOverrideThePresetAndSaySo) {
  auto loaded = Load(R"({"preset": "gpt2", "n_layer": 2, "n_embd": 192})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.model.num_hidden_layers, 2);
  EXPECT_EQ(loaded->origins["model.n_layer"], "run.json:1 (preset gpt2: 12)");
  EXPECT_EQ(loaded->origins["model.n_head"], "preset gpt2");
  // Values that the preset derives from the width follow the width.
  EXPECT_EQ(loaded->config.model.intermediate_size, 768);
  EXPECT_EQ(loaded->origins["model.n_inner"], "derived: 4 * n_embd");
  EXPECT_EQ(loaded->config.model.head_dim, 16);
}

TEST_F(ConfigWithModelTest, APresetOfAnotherFamilyIsAContradiction) {
  EXPECT_EQ(
      Load(R"({"preset": "gpt2", "model_type": "llama"})").status().message(),
      "run.json:1:44: model.model_type: \"llama\", but model.preset (line 1) "
      "is a gpt2 model; delete one");
  EXPECT_EQ(
      Load(R"({"preset": "gpt2", "hidden_size": 8})").status().message(),
      "run.json:1:45: model.hidden_size: a gpt2 model calls this \"n_embd\"");
  EXPECT_EQ(Load(R"({"preset": "gpt2-x"})").status().message(),
            "run.json:1:22: model.preset: no preset \"gpt2-x\"; did you mean "
            "\"gpt2-xl\"? `zero models` lists them");
}

TEST_F(ConfigWithModelTest, AnUnknownModelIsReportedTogetherWithWrongKeys) {
  EXPECT_EQ(
      Load(R"({"preset": "gpt2-x"})", {"training.stpes=1"}).status().message(),
      "run.json:1:22: model.preset: no preset \"gpt2-x\"; did you mean "
      "\"gpt2-xl\"? `zero models` lists them\n"
      "--set training.stpes: unknown key; did you mean \"steps\"?");
  // The misspelt key is the missing one.
  EXPECT_EQ(Load(R"({"prset": "gpt2"})").status().message(),
            "run.json:1:12: model.prset: unknown key; did you mean "
            "\"preset\"?");
}

TEST_F(ConfigWithModelTest, ShapesOfLoadedWeightsCanNotBeChanged) {
  auto loaded =
      Load(R"({"from_pretrained": "tests/golden/llama", "resid_pdrop": 0.1})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.model.resid_pdrop, 0.1);
  EXPECT_EQ(loaded->config.model.from_pretrained, "tests/golden/llama");
  EXPECT_EQ(loaded->origins["model.hidden_size"],
            "tests/golden/llama/config.json");
  EXPECT_EQ(Load(R"({"from_pretrained": "tests/golden/llama",
 "hidden_size": 64})")
                .status()
                .message(),
            "run.json:2:17: model.hidden_size: 64, but "
            "tests/golden/llama/config.json says 40; delete the key");
}

TEST_F(ConfigWithModelTest, AModelFolderReplacesTheWholeSection) {
  LoadOptions options;
  options.catalog = catalog_.get();
  options.missing_files = MissingFiles::kIgnored;
  options.model_dir = "tests/golden/qwen3";
  auto loaded = ParseConfig(
      R"({"model": {"preset": "gpt2", "n_layer": 3, "embd_pdrop": 0.5},
          "data": {"tokenizer": "none", "sequence_length": 32},
          "training": {"steps": 1}, "train_batch_size": 1})",
      "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.model.family, ModelFamily::kQwen3);
  EXPECT_EQ(loaded->config.model.embd_pdrop, 0.5);
  EXPECT_EQ(loaded->origins["model.from_pretrained"], "--model");
}

}  // namespace
}  // namespace zero
