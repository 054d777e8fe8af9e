// DeepSpeed's and Hugging Face's published configs (published.json: keys and
// values, each with its source), with only a model, data and a length set: each
// is accepted, or refused for the keys that are named, with a remedy.
#include <gtest/gtest.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/config/print.h"
#include "kernels/check.h"
#include "tests/engine/config/config_testing.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

Json Published() {
  const auto text = ReadFile("tests/engine/config/published.json");
  ZERO_CHECK(text.ok()) << text.status();
  return Json::parse(*text);
}

absl::StatusOr<LoadedConfig> Load(const Json& published) {
  return LoadText(
      published["config"].dump(),
      {R"(model={"model_type": "gpt2", "n_embd": 64, "n_layer": 2,
                 "n_head": 4})",
       "data.train=text.txt", "data.sequence_length=32", "training.steps=20"},
      published["ranks"]);
}

bool Offloads(const Json& published) {
  return absl::StrContains(published["config"].dump(), "offload");
}

TEST(PublishedTest, EachIsAcceptedOrRefusedByTheKeysThatAreNamed) {
  int accepted = 0, refused = 0;
  for (const Json& published : Published()) {
    const std::string source = published["source"];
    const auto loaded = Load(published);
    if (!published.contains("refused")) {
      EXPECT_TRUE(loaded.ok()) << source << ":\n" << loaded.status();
      ++accepted;
      std::printf("| %s | accepted |\n", source.c_str());
      continue;
    }
    ASSERT_FALSE(loaded.ok()) << source;
    ++refused;
    const std::vector<std::string> lines =
        absl::StrSplit(loaded.status().message(), '\n');
    EXPECT_EQ(lines.size(), published["refused"].size()) << source << ":\n"
                                                         << loaded.status();
    for (const auto& [key, remedy] : published["refused"].items()) {
      bool found = false;
      for (const std::string& line : lines) {
        if (!absl::StrContains(line, absl::StrCat(": ", key, ": "))) continue;
        found = absl::StrContains(line, remedy.get<std::string>());
        const std::vector<std::string> shown =
            absl::StrSplit(line, absl::MaxSplits(": ", 1));
        std::printf("| %s | %s |\n", source.c_str(), shown[1].c_str());
      }
      EXPECT_TRUE(found) << source << ": " << key << " with \"" << remedy
                         << "\" is not in\n"
                         << loaded.status();
    }
  }
  EXPECT_GE(accepted, 40);
  EXPECT_GE(refused, 10);
}

TEST(PublishedTest, OfADozenThatOffloadTheHostGetsWhatTheyNameOrMore) {
  int num_optimizers = 0, num_parameters = 0, num_on_disk = 0;
  for (const Json& published : Published()) {
    if (published.contains("refused") || !Offloads(published)) continue;
    const auto loaded = Load(published);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const ZeroConfig& zero = loaded->config.zero_optimization;
    num_optimizers += zero.offload_optimizer != OffloadDevice::kNone;
    num_parameters += zero.offload_param != OffloadDevice::kNone;
    num_on_disk += zero.uses_nvme();
  }
  EXPECT_GE(num_optimizers, 12);
  EXPECT_GE(num_parameters, 8);
  EXPECT_GE(num_on_disk, 2);
}

TEST(PublishedTest, WhatIsPrintedOfOneReadsBackToIt) {
  for (const Json& published : Published()) {
    const auto loaded = Load(published);
    if (!loaded.ok()) continue;
    const auto again = LoadText(PrintResolved(*loaded), {}, published["ranks"]);
    ASSERT_TRUE(again.ok()) << published["source"] << again.status();
    EXPECT_TRUE(again->config == loaded->config) << published["source"];
  }
}

// DeepSpeed reads an aio section only at the top.
TEST(PublishedTest, ASectionUnderAnOldNameOrInAnotherPlaceIsRead) {
  const auto nested =
      LoadSmall({R"(zero_optimization={"stage": 1, "aio": {"queue_depth": 32},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}})",
                 R"(bfloat16={"enabled": true})"});
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->config.aio.queue_depth, 32);
  EXPECT_TRUE(nested->config.bf16);
  EXPECT_EQ(ErrorOfText(R"({
  "bfloat16": {"enabled": true},
  "bf16": {"enabled": true}
})"),
            "run.json:2:3: bfloat16: it stands for \"bf16\", but that is given "
            "as well (run.json:3); delete one");
}

}  // namespace
}  // namespace zero
