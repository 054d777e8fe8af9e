// Runs that start from weights: frozen tensors stay, counted targets count.

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/status.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/comm/local_ranks.h"
#include "engine/nn/freeze.h"
#include "engine/train/trainer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/catalog.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using testing::HasSubstr;

struct Outcome {
  absl::Status status;
  std::string printed;
  std::string hash;
  nlohmann::json summary;
  std::vector<nlohmann::json> steps;
  std::string error() const { return std::string(status.message()); }
};

class FinetuneTest : public testing::Test {
 protected:
  FinetuneTest() {
    std::string text;
    for (int i = 0; i < 300; ++i) absl::StrAppend(&text, i, " and ", i + 1);
    dir_.Write("text.txt", text);
  }

  LoadedConfig Load(const std::vector<std::string>& overrides, int world = 1) {
    const std::string text = R"({
      "model": {"model_type": "llama", "hidden_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 4,
                "intermediate_size": 48},
      "data": {"train": ")" + dir_.File("text.txt") +
                             R"(", "sequence_length": 32},
      "training": {"steps": 6, "out_dir": ")" +
                             dir_.File("run") +
                             R"(", "sample": {"tokens": 0}},
      "train_batch_size": 12,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}
    })";
    LoadOptions options;
    options.overrides = overrides;
    const auto catalog = MakeModelCatalog();
    options.catalog = catalog.get();
    options.world = world;
    auto loaded = ParseConfig(text, "run.json", options);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return *std::move(loaded);
  }

  Outcome Run(const std::vector<std::string>& overrides, int world = 1) {
    std::filesystem::remove_all(dir_.File("run"));
    return GoOn(overrides, world);
  }

  Outcome GoOn(const std::vector<std::string>& overrides, int world = 1) {
    const LoadedConfig loaded = Load(overrides, world);
    Outcome outcome;
    char* text = nullptr;
    size_t size = 0;
    std::FILE* file = open_memstream(&text, &size);
    {
      Console console(file, /*is_terminal=*/false);
      Console silent(nullptr, /*is_terminal=*/false);
      RunStart start;
      outcome.status = RunLocalRanks(
          world, MakeRanksOptions(loaded.config, world),
          [](int) -> absl::StatusOr<std::unique_ptr<Device>> {
            return MakeCpuDevice(1);
          },
          [&](const Rank& rank) -> absl::Status {
            ZERO_ASSIGN_OR_RETURN(
                const auto trainer,
                Trainer::Make(rank, loaded, TestModelTools(),
                              rank.rank() == 0 ? &console : &silent, nullptr,
                              &start));
            ZERO_ASSIGN_OR_RETURN(const RunSummary summary, trainer->Run());
            if (rank.rank() == 0) outcome.hash = summary.parameters_hash;
            return absl::OkStatus();
          });
    }
    std::fclose(file);
    outcome.printed.assign(text, size);
    std::free(text);
    if (!outcome.status.ok()) return outcome;
    outcome.summary = nlohmann::json::parse(dir_.Read("run/summary.json"));
    for (absl::string_view line :
         absl::StrSplit(dir_.Read("run/metrics.jsonl"), '\n')) {
      if (!line.empty()) outcome.steps.push_back(nlohmann::json::parse(line));
    }
    return outcome;
  }

  // The bytes of a tensor of run/final.
  std::string Final(const std::string& name) {
    const auto reader = SafetensorsReader::Open(dir_.File("run/final"));
    EXPECT_TRUE(reader.ok()) << reader.status();
    const StoredTensor* const tensor = (*reader)->Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    return {reinterpret_cast<const char*>(tensor->data),
            static_cast<size_t>(tensor->num_bytes)};
  }

  TempDir dir_;
};

// ---- Frozen parameters ------------------------------------------------------

TEST_F(FinetuneTest, FrozenTensorsKeepTheirBitsAndTheOthersLearn) {
  const std::string frozen = "model.freeze=[\"*embed_tokens*\", \"block.0.*\"]";
  ASSERT_TRUE(Run({frozen, "optimizer.params.lr=1e-30"}).status.ok());
  std::map<std::string, std::string> before;
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.1.self_attn.v_proj.weight", "lm_head.weight"}) {
    before[name] = Final(name);
  }
  const Outcome outcome = Run({frozen});
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  for (const auto& [name, bytes] : before) {
    const bool stays = name.find("embed") != std::string::npos ||
                       name.find("layers.0") != std::string::npos;
    EXPECT_EQ(Final(name) == bytes, stays) << name;
  }
  EXPECT_LT(outcome.steps.back()["loss"], outcome.steps.front()["loss"]);
  EXPECT_THAT(outcome.printed, HasSubstr("in 7 tensors"));
  EXPECT_EQ(outcome.summary["frozen_parameters"],
            257 * 32 + 32 * 96 + 32 * 32 + 3 * 32 * 48 + 2 * 32);
}

TEST_F(FinetuneTest, FrozenTensorsCostNoStateNoWireAndFewerOperations) {
  const Outcome all = Run({}, 2);
  const Outcome some = Run({"model.freeze=*embed_tokens*"}, 2);
  ASSERT_TRUE(all.status.ok() && some.status.ok()) << some.status;
  const auto peak = [](const Outcome& outcome, const char* part) {
    return outcome.summary["peak_bytes"].value(part, int64_t{0});
  };
  const int64_t elems = 257 * 32;
  // Gradients and two moments in fp32, padded rows at most more.
  EXPECT_GE(peak(all, "optimizer") - peak(some, "optimizer"), elems * 8);
  const auto of_step = [](const Outcome& outcome, const char* key) {
    return outcome.steps[0]["communication"][key].get<int64_t>();
  };
  EXPECT_GE(of_step(all, "reduced_bytes") - of_step(some, "reduced_bytes"),
            elems * 4 / 2);
  const auto flops = [](const Outcome& outcome) {
    return outcome.steps[0]["flops_per_second"].get<double>() /
           outcome.steps[0]["tokens_per_second"].get<double>();
  };
  EXPECT_NEAR(flops(all), flops(some), 1e-6 * flops(all));  // only looked up
  const Outcome head = Run({"model.freeze=lm_head.weight"});
  EXPECT_NEAR(flops(all) - flops(head), 2.0 * elems, 1e-6 * flops(all));
}

// Units before the first trained one have no backward.
TEST_F(FinetuneTest, LeadingFrozenBlocksKeepNothingAndChangeNoOtherGradient) {
  const std::vector<std::string> once = {"training.steps=1",
                                         "gradient_clipping=0"};
  const Outcome all = Run(once);
  ASSERT_TRUE(all.status.ok()) << all.status;
  const std::string weight = "model.layers.1.self_attn.v_proj.weight";
  const std::string trained = Final(weight);
  std::vector<std::string> frozen = once;
  frozen.push_back("model.freeze=[\"*embed_tokens*\", \"block.0.*\"]");
  const Outcome some = Run(frozen);
  ASSERT_TRUE(some.status.ok()) << some.status;
  EXPECT_EQ(Final(weight), trained);
  const auto of_step = [](const Outcome& outcome, const char* key) {
    return outcome.steps[0][key].get<double>();
  };
  const auto activations = [](const Outcome& outcome) {
    return outcome.summary["peak_bytes"]["activations"].get<int64_t>();
  };
  // One of two blocks is left.
  EXPECT_LT(activations(some), activations(all) * 2 / 3);
  const auto flops = [&](const Outcome& outcome) {
    return of_step(outcome, "flops_per_second") /
           of_step(outcome, "tokens_per_second");
  };
  const double block = 32 * 96 + 32 * 32 + 3 * 32 * 48 + 2 * 32;
  const double attention = 8.0 * 32 * 32;
  EXPECT_NEAR(flops(all) - flops(some), 4 * block + attention,
              1e-6 * flops(all));
}

TEST_F(FinetuneTest, StagesHaveEqualBitsWithFrozenTensors) {
  const std::vector<std::string> frozen = {
      "model.freeze=[\"*embed_tokens*\", \"*mlp.down_proj*\"]",
      "model.freeze=[\"*embed_tokens*\", \"block.0.*\"]"};
  for (const std::string& some : frozen) {
    const std::string bf16 = "bf16.enabled=true";
    const Outcome first = Run({some, bf16}, 2);
    ASSERT_TRUE(first.status.ok()) << first.status;
    for (int stage = 1; stage <= 3; ++stage) {
      const std::string at = absl::StrCat("zero_optimization.stage=", stage);
      EXPECT_EQ(Run({some, bf16, at}, 2).hash, first.hash) << stage;
    }
  }
}

TEST_F(FinetuneTest, AResumedRunFreezesTheSame) {
  const std::string saves = "training.save_every=3";
  const std::string frozen = "model.freeze=*embed_tokens*";
  const Outcome whole = Run({saves, frozen});
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const std::string from = absl::StrCat(
      "training.resume=", dir_.File("run/checkpoints/step-00000003"));
  EXPECT_THAT(GoOn({saves, from}).error(),
              HasSubstr("model.freeze was [\"*embed_tokens*\"], now not set"));
  EXPECT_THAT(GoOn({saves, from, "training.resume_changed=true"}).error(),
              HasSubstr("resume with the precision, the optimizer and the "
                        "model.freeze of the run"));
  EXPECT_EQ(GoOn({saves, from, frozen}).hash, whole.hash);
  // More is frozen: the newly frozen tensors have unused states.
  const Outcome more =
      GoOn({saves, from, "training.resume_changed=true",
            "model.freeze=[\"*embed_tokens*\", \"lm_head*\"]"});
  EXPECT_TRUE(more.status.ok()) << more.status;
  EXPECT_THAT(more.printed, HasSubstr("note: resumed although model.freeze"));
}

TEST_F(FinetuneTest, AWrongPatternIsAnErrorBeforeTheRun) {
  EXPECT_THAT(Run({"model.freeze=*.embed"}).error(),
              HasSubstr("model.freeze: no tensor's name matches \"*.embed\""));
}

// ---- Samples of JSON lines --------------------------------------------------

class SamplesRunTest : public FinetuneTest {
 protected:
  // Sums, some with long prompts.
  SamplesRunTest() {
    std::string lines;
    for (int i = 0; i < 60; ++i) {
      const std::string note = i % 4 == 0 ? "Please add these two: " : "";
      absl::StrAppend(&lines, R"({"prompt": ")", note, i, "+", i,
                      R"(=", "completion": ")", 2 * i, "\"}\n");
    }
    dir_.Write("sums.jsonl", lines);
  }
  std::vector<std::string> Sums(std::vector<std::string> more = {}) {
    std::vector<std::string> overrides = {
        "data.train=" + dir_.File("sums.jsonl"), "train_batch_size=4"};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return overrides;
  }
};

TEST_F(SamplesRunTest, CompletionsAreLearnedAndCounted) {
  const Outcome outcome =
      Run(Sums({"data.validation_fraction=0.2", "training.steps=30"}));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_THAT(outcome.printed, HasSubstr("48 samples of "));
  EXPECT_THAT(outcome.printed, HasSubstr("of them targets; packed, apart"));
  // 48 to 59: two or three digits and the end of text each.
  EXPECT_THAT(outcome.printed, HasSubstr("46 targets per evaluation"));
  double loss = 0;
  for (const auto& line : outcome.steps) {
    if (line.contains("loss")) {
      EXPECT_GT(line["step_targets"], 0);
      EXPECT_LT(line["step_targets"], 4 * 32);
    } else {
      loss = line["validation_loss"];
      EXPECT_NEAR(line["validation_perplexity"], std::exp(loss), 1e-9);
      EXPECT_EQ(line["validation_tokens"], 46);
    }
  }
  EXPECT_GT(loss, 0);
  EXPECT_LT(outcome.summary["final_loss"], outcome.summary["first_loss"]);
}

// The loss of a batch is the mean over its targets, however samples are packed:
// another packing gives the same loss and gradient up to rounding.
TEST_F(SamplesRunTest, SamplesInARowDoNotSeeEachOther) {
  std::string lines;
  for (int i = 0; i < 12; ++i) {
    absl::StrAppend(&lines, R"({"prompt": "How many? ", "completion": ")",
                    i + 10, "\"}\n");
  }
  dir_.Write("sums.jsonl", lines);
  // 12 tokens each: 12 rows of one, 6 of two, 4 of three; all in one step.
  double loss = 0, norm = 0;
  for (const auto& [length, rows] : {std::pair(12, 12), {24, 6}, {36, 4}}) {
    const Outcome outcome =
        Run({"data.train=" + dir_.File("sums.jsonl"),
             absl::StrCat("data.sequence_length=", length),
             absl::StrCat("train_batch_size=", rows), "training.steps=1"});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.steps[0]["step_targets"], 12 * 3);
    if (length == 12) {
      loss = outcome.steps[0]["loss"];
      norm = outcome.steps[0]["grad_norm"];
    }
    // fp32 sums of 36 losses and 144 rows of gradients in another order.
    EXPECT_NEAR(outcome.steps[0]["loss"], loss, 1e-5 * loss);
    EXPECT_NEAR(outcome.steps[0]["grad_norm"], norm, 1e-4 * norm);
  }
}

TEST_F(SamplesRunTest, StagesHaveEqualBits) {
  std::map<int, std::string> hashes;
  for (int stage = 0; stage <= 3; ++stage) {
    const Outcome outcome =
        Run(Sums({absl::StrCat("zero_optimization.stage=", stage)}), 2);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.hash, hashes.emplace(0, outcome.hash).first->second);
  }
  // Micro-batches have unequal numbers of targets; the mean is over all.
  const auto loss_of = [&](const std::vector<std::string>& more, int world) {
    const Outcome outcome = Run(Sums(more), world);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return outcome.steps[3]["loss"].get<double>();
  };
  const double loss = loss_of({}, 1);
  EXPECT_NEAR(loss_of({"gradient_accumulation_steps=4"}, 1), loss, 1e-4 * loss);
  EXPECT_NEAR(loss_of({"gradient_accumulation_steps=2"}, 2), loss, 1e-4 * loss);
}

TEST_F(SamplesRunTest, AResumedRunHasTheSameSamples) {
  const std::string saves = "training.save_every=3";
  const Outcome whole = Run(Sums({saves}));
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const std::string from = absl::StrCat(
      "training.resume=", dir_.File("run/checkpoints/step-00000003"));
  EXPECT_EQ(GoOn(Sums({saves, from})).hash, whole.hash);
  // The same tokens, but one more of them is a target.
  std::string lines = dir_.Read("sums.jsonl");
  const std::string was = R"(1+1=", "completion": "2")";
  lines.replace(lines.find(was), was.size(), R"(1+1", "completion": "=2")");
  dir_.Write("sums.jsonl", lines);
  EXPECT_THAT(GoOn(Sums({saves, from})).error(),
              HasSubstr("data.train had other tokens"));
}

TEST_F(SamplesRunTest, WhatDoesNotFitIsPrintedOrRefused) {
  const Outcome cut = Run(Sums({"data.sequence_length=7"}));
  ASSERT_TRUE(cut.status.ok()) << cut.status;
  EXPECT_THAT(cut.printed, HasSubstr("note: data.train: 15 of 60 samples are "
                                     "left out: their prompts alone fill "
                                     "data.sequence_length 7"));
  EXPECT_THAT(cut.printed, HasSubstr("samples are longer than "
                                     "data.sequence_length 7 and lose their "
                                     "last tokens, "));
  EXPECT_THAT(Run(Sums({"data.sequence_length=3"})).error(),
              HasSubstr("no prompt is shorter than "
                        "data.sequence_length 3 (60 samples); raise that"));
  EXPECT_THAT(Run(Sums({"train_batch_size=1000"})).error(),
              HasSubstr(" of data.sequence_length 32, fewer than one "
                        "global batch of 1000"));
  EXPECT_THAT(
      Run(Sums({"data.validation_fraction=0.001"})).error(),
      HasSubstr("data.validation_fraction 0.001 holds out none of 60 samples"));
  EXPECT_THAT(Run({absl::StrCat("data.train=[\"", dir_.File("sums.jsonl"),
                                "\", \"", dir_.File("text.txt"), "\"]")})
                  .error(),
              HasSubstr("text and samples cannot be mixed"));
}

}  // namespace
}  // namespace zero
