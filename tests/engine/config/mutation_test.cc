// Any mutated config gives an error or a config, never a crash.
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/config/keys.h"
#include "engine/config/print.h"
#include "tests/engine/config/config_testing.h"

namespace zero {
namespace {

const char* const kSeeds[] = {kSmallConfig, R"({
  // everything at once
  "model": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 96, "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
  "data": {"train": ["a.txt", "b*.txt"], "validation": "c.txt",
           "sequence_length": 128, "tokenizer": "bytes"},
  "training": {"epochs": 1.5, "seed": 7, "eval_every": 5,
               "sample": {"prompt": "\u00e9\n", "top_p": 0.9}},
  "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8, "gradient_clipping": 1.0,
  "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95],
                "adam_w_mode": false, "weight_decay": 0.1}},
  "scheduler": {"type": "WSD", "params": {"total_num_steps": 100,
                "warmup_num_steps": 10, "decay_num_steps": 20}},
  "fp16": {"enabled": true, "initial_scale_power": 12, "hysteresis": 2},
  "zero_optimization": {"stage": 0, "contiguous_gradients": true},
  "activation_checkpointing": {"enabled": true, "number_checkpoints": 4},
  "tensorboard": {"enabled": false}, "steps_per_print": 1
})"};

const char* const kTokens[] = {"{",
                               "}",
                               "[",
                               "]",
                               ",",
                               ":",
                               "\"",
                               "//",
                               "/*",
                               "*/",
                               "null",
                               "true",
                               "-1",
                               "0",
                               "1e308",
                               "1e999",
                               "NaN",
                               "9223372036854775808",
                               "1.5",
                               "\\",
                               "\\u",
                               "\\ud800",
                               "\"auto\"",
                               "\xC3",
                               "\xF0\x9F",
                               "\n",
                               "{}",
                               "[]",
                               "\"zero_optimization\"",
                               "\"model\"",
                               "\"a.b\"",
                               "\x00"};

using Rng = std::mt19937;

size_t Below(Rng& rng, size_t n) { return n == 0 ? 0 : rng() % n; }

std::string Mutate(Rng& rng, std::string text) {
  const int edits = 1 + static_cast<int>(Below(rng, 3));
  for (int i = 0; i < edits; ++i) {
    const size_t at = Below(rng, text.size());
    const std::string token =
        kTokens[Below(rng, sizeof(kTokens) / sizeof(kTokens[0]))];
    switch (Below(rng, 6)) {
      case 0:
        text.insert(at, token);
        break;
      case 1:
        text.erase(at, 1 + Below(rng, 12));
        break;
      case 2:
        if (!text.empty()) text[at] = static_cast<char>(rng());
        break;
      case 3:  // a piece twice: duplicate keys, repeated brackets
        text.insert(at, text.substr(Below(rng, text.size()), Below(rng, 60)));
        break;
      case 4:  // truncated
        text.resize(at);
        break;
      default:  // one value or key replaced
        const size_t colon = text.find(':', at);
        if (colon != std::string::npos) {
          text.replace(colon + 1, 1 + Below(rng, 6), token);
        }
    }
  }
  return text;
}

TEST(MutationTest, TenThousandMutatedConfigsGiveAnErrorOrAConfig) {
  Rng rng(20240520);
  int loaded_count = 0;
  for (int i = 0; i < 10000; ++i) {
    const std::string text =
        Mutate(rng, kSeeds[Below(rng, sizeof(kSeeds) / sizeof(kSeeds[0]))]);
    const auto loaded = LoadText(text);
    if (!loaded.ok()) {
      EXPECT_TRUE(absl::StartsWith(loaded.status().message(), "run.json:"))
          << loaded.status();
      continue;
    }
    ++loaded_count;
    const auto again = LoadText(PrintResolved(*loaded));
    ASSERT_TRUE(again.ok()) << again.status() << text;
    EXPECT_TRUE(again->config == loaded->config) << text;
  }
  // Neither all nor none: the mutations do reach past the syntax.
  EXPECT_GT(loaded_count, 100);
  EXPECT_LT(loaded_count, 9000);
}

TEST(MutationTest, EveryKeyWithEveryOddValueGivesAnErrorOrAConfig) {
  int64_t errors = 0;
  for (const KeySpec& key : AllKeys()) {
    for (const char* value :
         {"0",     "1",      "2",         "-1",         "3",
          "1e9",   "1e-300", "9e18",      "1073741824", "true",
          "false", "null",   "auto",      "\"\"",       "[]",
          "{}",    "x",      "[0.5,0.5]", "[\"a\"]",    "*",
          "gpt2",  "qwen3",  "WSD",       "OneCycle",   "SGD"}) {
      for (const char* seed : kSeeds) {
        const auto loaded =
            LoadText(seed, {absl::StrCat(key.path, "=", value)});
        errors += !loaded.ok();
        if (!loaded.ok()) continue;
        const auto again = LoadText(PrintResolvedJson(loaded->config));
        ASSERT_TRUE(again.ok())
            << key.path << "=" << value << ": " << again.status();
        EXPECT_TRUE(again->config == loaded->config)
            << key.path << "=" << value;
      }
    }
  }
  EXPECT_GT(errors, 1000);
}

}  // namespace
}  // namespace zero
