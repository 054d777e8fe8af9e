// Every file of configs/ is a run that can start.
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/config/load.h"
#include "engine/config/print.h"
#include "models/catalog.h"

namespace zero {
namespace {

TEST(ConfigsTest, EveryFileLoadsWithoutANoteAndReadsBackEqual) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  options.missing_files = MissingFiles::kIgnored;
  const auto names = ListFolder("configs");
  ASSERT_TRUE(names.ok()) << names.status();
  int num_configs = 0;
  for (const std::string& name : *names) {
    if (!absl::EndsWith(name, ".json")) continue;
    ++num_configs;
    const auto loaded = LoadConfig("configs/" + name, options);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->notes.empty()) << name << ": " << loaded->notes[0];
    const auto again = ParseConfig(PrintResolved(*loaded), name, options);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->config == loaded->config) << name;
  }
  EXPECT_GE(num_configs, 9);
}

TEST(ConfigsTest, TheTinyOnesFindTheirTextInTheRepository) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  for (const char* family : {"gpt2", "llama", "qwen2", "qwen3"}) {
    const auto loaded =
        LoadConfig(std::string("configs/") + family + "_tiny.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
  }
}

TEST(ConfigsTest, AFolderThatIsAnotherModelIsNamed) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  options.missing_files = MissingFiles::kIgnored;
  options.model_dir = "tests/golden/llama";
  const auto notes = [&](const std::string& model) {
    const auto loaded = ParseConfig(
        absl::StrCat("{\"model\": ", model,
                     ", \"data\": {\"tokenizer\": \"none\", "
                     "\"sequence_length\": 8}, "
                     "\"training\": {\"steps\": 1}, \"train_batch_size\": 1}"),
        "run.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? loaded->notes : std::vector<std::string>();
  };
  EXPECT_EQ(notes(R"({"preset": "gpt2-tiny"})"),
            std::vector<std::string>{
                "--model tests/golden/llama replaces another model in "
                "run.json: model_type \"llama\", not \"gpt2\""});
  EXPECT_EQ(
      notes(R"({"from_pretrained": "tests/golden/llama", "freeze": "a*"})"),
      std::vector<std::string>());
  EXPECT_EQ(notes("{}"), std::vector<std::string>());
  EXPECT_EQ(notes(R"({"preset": "llama-tiny"})"),
            std::vector<std::string>{
                "--model tests/golden/llama replaces another model in "
                "run.json: vocab_size 101, not 257; tie_word_embeddings false, "
                "not true; hidden_size 40, not 128; 6 more"});
}

TEST(ConfigsTest, HeadsOfAPresetFollowItsWidthButNotQwen3s) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  const auto head_dim = [&](const std::string& family, const char* width) {
    options.overrides = {"model.preset=" + family + "-tiny",
                         std::string("model.hidden_size=") + width};
    const auto loaded = LoadConfig("configs/llama_tiny.json", options);
    return loaded.ok() ? loaded->config.model.head_dim : -1;
  };
  EXPECT_EQ(head_dim("llama", "256"), 64);
  EXPECT_EQ(head_dim("llama", "130"), -1);
  EXPECT_EQ(head_dim("qwen3", "256"), 32);
  EXPECT_EQ(head_dim("qwen3", "130"), 32);
}

TEST(ConfigsTest, TheBenchmarkIsThePeersModelAndBatch) {
  const auto catalog = MakeModelCatalog();
  LoadOptions options;
  options.catalog = catalog.get();
  options.missing_files = MissingFiles::kIgnored;
  const auto loaded = LoadConfig("configs/gpt2_124m.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(NumParameters(loaded->config.model), 124439808);
  EXPECT_EQ(loaded->config.train_batch_size, 4);
  EXPECT_EQ(loaded->config.data.sequence_length, 256);
  EXPECT_EQ(loaded->config.optimizer.spec.kind, OptimizerKind::kAdamW);
  EXPECT_EQ(loaded->config.gradient_clipping, 1.0);
}

}  // namespace
}  // namespace zero
