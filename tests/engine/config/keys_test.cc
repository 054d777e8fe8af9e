#include "engine/config/keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/config/print.h"
#include "tests/engine/config/config_testing.h"

namespace zero {
namespace {

// {"a": {"b": VALUE}} for the path a.b.
std::string Nest(const std::string& path, const std::string& value) {
  const std::vector<std::string> names = absl::StrSplit(path, '.');
  std::string text = value;
  for (auto it = names.rbegin(); it != names.rend(); ++it) {
    text = absl::StrCat("{\"", *it, "\": ", text, "}");
  }
  return text;
}

TEST(KeysTest, EveryPathStandsOnceBelowItsSection) {
  std::set<std::string> paths;
  for (const KeySpec& key : AllKeys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_FALSE(key.doc.empty()) << key.path;
    const size_t dot = key.path.rfind('.');
    if (dot == std::string::npos) continue;
    const KeySpec* parent = FindKey(key.path.substr(0, dot));
    ASSERT_NE(parent, nullptr) << key.path;
    EXPECT_EQ(parent->kind, KeyKind::kObject) << key.path;
  }
}

TEST(KeysTest, EveryKeyWithAWrongTypeIsAnErrorThatNamesIt) {
  for (const KeySpec& key : AllKeys()) {
    for (const char* value :
         {"17.5", "true", "\"zzzz\"", "[]", "[[1]]", "{}"}) {
      JsonNode node;
      std::vector<JsonProblem> problems;
      ASSERT_TRUE(ParseJsonText(value, 0, &node, &problems));
      const bool right_type = ReadValue(key, node).ok();
      const bool refused = key.treatment == Treatment::kRefused ||
                           key.treatment == Treatment::kNotBuilt;
      if (refused ? IsHarmless(key, node) : right_type) continue;
      const std::string error = ErrorOfText(Nest(key.path, value));
      EXPECT_TRUE(absl::StartsWith(error, "run.json:1:")) << error;
      EXPECT_TRUE(absl::StrContains(error, absl::StrCat(": ", key.path, ": ")))
          << key.path << " = " << value << ": " << error;
    }
  }
}

TEST(KeysTest, EveryLimitIsKept) {
  for (const KeySpec& key : AllKeys()) {
    if (key.set == nullptr) continue;
    const bool number =
        key.kind == KeyKind::kNumber || key.kind == KeyKind::kInteger;
    if (!number) continue;
    for (const double value : {key.min - 1, key.max + 1}) {
      if (!std::isfinite(value)) continue;
      const std::string error = ErrorOfText(Nest(key.path, JsonDouble(value)));
      EXPECT_TRUE(absl::StrContains(
          error, absl::StrCat(key.path, ": ", JsonDouble(value), " is not ")))
          << error;
    }
  }
}

TEST(KeysTest, EveryMisspelledKeyNamesTheRightOne) {
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed || key.path.size() < 5) continue;
    const size_t dot = key.path.rfind('.');
    const std::string leaf = key.path.substr(dot + 1);
    if (leaf.size() < 5) continue;
    std::string typo = key.path;
    std::swap(typo[typo.size() - 2], typo[typo.size() - 3]);
    if (typo == key.path) continue;
    const std::string error = ErrorOfText(Nest(typo, "1"));
    EXPECT_TRUE(
        absl::StrContains(error, absl::StrCat("did you mean \"", leaf, "\"?")))
        << error;
  }
}

TEST(KeysTest, EveryUsedKeyReachesAField) {
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed || !key.is_leaf()) {
      EXPECT_EQ(key.set, nullptr) << key.path;
      continue;
    }
    ASSERT_NE(key.set, nullptr) << key.path;
    Config config;
    const KeyValue before = key.get(config);
    KeyValue after = before;
    if (auto* flag = std::get_if<bool>(&after)) *flag = !*flag;
    if (auto* whole = std::get_if<int64_t>(&after)) ++*whole;
    if (auto* number = std::get_if<double>(&after)) *number += 0.25;
    if (auto* text = std::get_if<std::string>(&after)) {
      if (key.kind == KeyKind::kChoice) {
        for (const std::string& choice : key.choices) {
          if (!key.IsUnbuilt(choice) && choice != std::get<std::string>(before))
            *text = choice;
        }
        if (after == before) continue;  // a single choice
      } else {
        text->append("x");
      }
    }
    if (auto* files = std::get_if<std::vector<std::string>>(&after)) {
      files->push_back("x");
    }
    if (auto* sizes = std::get_if<std::vector<int64_t>>(&after)) {
      sizes->push_back(3);
    }
    if (auto* numbers = std::get_if<std::vector<double>>(&after)) {
      (*numbers)[1] = 0.5;
    }
    key.set(config, after);
    EXPECT_EQ(key.get(config), after) << key.path;
    EXPECT_FALSE(config == Config()) << key.path;
  }
}

// ---- Keys that a run does not read ----------------------------------------

// Overrides of the small config, the last with an unread key, and the reason.
struct UnreadCase {
  const char* path;
  std::vector<std::string> overrides;
  const char* reason;
};

std::vector<UnreadCase> UnreadCases() {
  const char* const kReplicated =
      "only zero_optimization.stage 3 gathers parameters for use";
  const char* const kNotElastic = "elasticity.enabled is false";
  const char* const kNoDisk = "no device is \"nvme\"";
  const std::string no_text = "data.tokenizer=none";
  const std::string vocab = "model.vocab_size=300";
  const std::string no_tokens = "training.sample.tokens=0";
  const std::string greedy = "training.sample.temperature=0";
  const std::string fp16 = "fp16.enabled=true";
  const std::string fixed = "fp16.loss_scale=128";
  const std::string warm = "scheduler.type=WarmupLR";
  const std::string no_warm = "scheduler.params.warmup_num_steps=0";
  const std::string cosine = "scheduler.type=WarmupCosineLR";
  const std::string cycle = "scheduler.type=OneCycle";
  const std::string bottom = "scheduler.params.cycle_min_lr=1e-4";
  const std::string no_momentum = "scheduler.params.cycle_momentum=false";
  const char* const kNoText = "data.tokenizer is \"none\" and writes no text";
  const char* const kNoTokens = "training.sample.tokens is 0";
  const char* const kGreedy =
      "training.sample.temperature is 0, always the likeliest token";
  const char* const kFp32 = "fp16.enabled is false";
  const char* const kFixed = "fp16.loss_scale is above 0 and never changes";
  const char* const kNoDecay =
      "optimizer.params.weight_decay is 0: there is no decay";
  const char* const kNoWarmup =
      "scheduler.params.warmup_num_steps leaves no warm-up";
  const char* const kNoSteps =
      "scheduler.params.decay_step_size is 0: there is no decay";
  const char* const kNoCycle = "scheduler.params.cycle_momentum is false";
  return {
      {"data.eos_token_id",
       {"data.eos_token_id=7"},
       "data.reset_attention_mask is false"},
      {"data.eos_token_id",
       {"data.reset_attention_mask=true", "data.eos_token_id=7"},
       "data.tokenizer has an end-of-text token"},
      {"training.sample.tokens",
       {no_text, vocab, "training.sample.tokens=9"},
       kNoText},
      {"training.sample.prompt",
       {no_text, vocab, "training.sample.prompt=A"},
       kNoText},
      {"training.sample.prompt",
       {no_tokens, "training.sample.prompt=A"},
       kNoTokens},
      {"training.sample.temperature",
       {no_tokens, "training.sample.temperature=0"},
       kNoTokens},
      {"training.sample.top_k", {greedy, "training.sample.top_k=3"}, kGreedy},
      {"training.sample.top_p",
       {no_tokens, "training.sample.top_p=0.5"},
       kNoTokens},
      {"training.sample.seed", {greedy, "training.sample.seed=3"}, kGreedy},
      {"training.max_shard_size",
       {"training.save_final=false", "training.max_shard_size=9"},
       "training.save_final is false"},
      {"fp16.loss_scale", {fixed}, kFp32},
      {"fp16.initial_scale_power", {"fp16.initial_scale_power=8"}, kFp32},
      {"fp16.initial_scale_power",
       {fp16, fixed, "fp16.initial_scale_power=8"},
       kFixed},
      {"fp16.loss_scale_window", {"fp16.loss_scale_window=8"}, kFp32},
      {"fp16.loss_scale_window",
       {fp16, fixed, "fp16.loss_scale_window=8"},
       kFixed},
      {"fp16.hysteresis", {"fp16.hysteresis=8"}, kFp32},
      {"fp16.hysteresis", {fp16, fixed, "fp16.hysteresis=8"}, kFixed},
      {"fp16.consecutive_hysteresis",
       {fp16, "fp16.hysteresis=1", "fp16.consecutive_hysteresis=true"},
       "fp16.hysteresis is 1"},
      {"fp16.min_loss_scale", {"fp16.min_loss_scale=1e9"}, kFp32},
      {"fp16.min_loss_scale", {fp16, fixed, "fp16.min_loss_scale=1e9"}, kFixed},
      {"data_types.split_master_weights",
       {"data_types.split_master_weights=false"},
       "only bf16 parameters rounded to nearest are part of their masters"},
      {"optimizer.params.weight_decay_on",
       {"optimizer.params.weight_decay_on=all"},
       kNoDecay},
      {"optimizer.params.adam_w_mode",
       {"optimizer.type=Adam", "optimizer.params.adam_w_mode=false"},
       kNoDecay},
      {"optimizer.params.adam_w_mode",
       {"optimizer.params.adam_w_mode=true"},
       "optimizer.type AdamW never adds the decay to the gradient"},
      {"optimizer.params.dampening",
       {"optimizer.type=SGD", "optimizer.params.dampening=0.5"},
       "optimizer.params.momentum is 0"},
      {"scheduler.params.warmup_min_lr",
       {warm, no_warm, "scheduler.params.warmup_min_lr=1e-5"},
       kNoWarmup},
      {"scheduler.params.warmup_type",
       {warm, no_warm, "scheduler.params.warmup_type=linear"},
       kNoWarmup},
      {"scheduler.params.warmup_min_ratio",
       {cosine, no_warm, "scheduler.params.warmup_min_ratio=0.5"},
       kNoWarmup},
      {"scheduler.params.decay_lr_rate",
       {cycle, bottom, "scheduler.params.decay_lr_rate=1"},
       kNoSteps},
      {"scheduler.params.decay_lr_rate",
       {cycle, "scheduler.params.decay_step_size=2",
        "scheduler.params.decay_mom_rate=1",
        "scheduler.params.decay_lr_rate=1"},
       "scheduler.params.cycle_min_lr is 0 and cannot decay"},
      {"scheduler.params.decay_step_size",
       {cycle, "scheduler.params.decay_step_size=2"},
       "neither learning rate nor momentum decays after the cycle"},
      {"scheduler.params.cycle_min_mom",
       {cycle, no_momentum, "scheduler.params.cycle_min_mom=0.5"},
       kNoCycle},
      {"scheduler.params.cycle_max_mom",
       {cycle, no_momentum, "scheduler.params.cycle_max_mom=0.95"},
       kNoCycle},
      {"scheduler.params.decay_mom_rate",
       {cycle, "scheduler.params.decay_mom_rate=1"},
       kNoSteps},
      {"training.async_save",
       {"training.async_save=false"},
       "training.save_every and save_every_minutes are 0"},
      {"lr_scaling.warmup_steps",
       {"lr_scaling.warmup_steps=0"},
       "lr_scaling.rule is \"none\""},
      {"lr_scaling.warmup_epochs",
       {"lr_scaling.warmup_epochs=0"},
       "lr_scaling.rule is \"none\""},
      {"device.fp32_logits",
       {"device.fp32_logits=true"},
       "the model is fp32, and so are its logits"},
      {"zero_optimization.stage3_prefetch_bucket_size",
       {"zero_optimization.stage3_prefetch_bucket_size=100"},
       kReplicated},
      {"zero_optimization.stage3_max_live_parameters",
       {"zero_optimization.stage3_max_live_parameters=100"},
       kReplicated},
      {"zero_optimization.stage3_max_reuse_distance",
       {"zero_optimization.stage3_max_reuse_distance=100"},
       kReplicated},
      {"zero_optimization.stage3_param_persistence_threshold",
       {"zero_optimization.stage3_param_persistence_threshold=100"},
       kReplicated},
      {"zero_optimization.allgather_bucket_size",
       {"zero_optimization.stage=3",
        "zero_optimization.allgather_bucket_size=100"},
       "only zero_optimization.stage 1 and 2 gather updated parameters"},
      {"zero_optimization.stage3_model_persistence_threshold",
       {"zero_optimization.stage=3",
        "zero_optimization.stage3_model_persistence_threshold=100"},
       "no unit stays in place"},
      {"activation_checkpointing.granularity",
       {"activation_checkpointing.granularity=selective"},
       "activation_checkpointing.enabled is false"},
      {"activation_checkpointing.keep_all",
       {"activation_checkpointing.keep_all=true",
        "activation_checkpointing.enabled=true"},
       "activation_checkpointing.enabled is true"},
      {"zero_optimization.offload_param.device",
       {"zero_optimization.offload_param.device=cpu",
        "zero_optimization.stage=2"},
       kReplicated},
      {"zero_optimization.offload_optimizer.nvme_path",
       {"zero_optimization.offload_optimizer.nvme_path=/disk"},
       "zero_optimization.offload_optimizer.device is not \"nvme\""},
      {"zero_optimization.offload_param.nvme_path",
       {"zero_optimization.offload_param.nvme_path=/disk"},
       "zero_optimization.offload_param.device is not \"nvme\""},
      {"zero_optimization.offload_optimizer.ratio",
       {"zero_optimization.offload_optimizer.ratio=0.5"},
       "zero_optimization.offload_optimizer.device is none"},
      {"zero_optimization.offload_optimizer.update_before_norm",
       {"zero_optimization.offload_optimizer.update_before_norm=true"},
       "zero_optimization.offload_optimizer.device is none"},
      {"zero_optimization.offload_optimizer.delayed_update.warmup_steps",
       {"zero_optimization.offload_optimizer.delayed_update.warmup_steps=7"},
       "zero_optimization.offload_optimizer.delayed_update.enabled is false"},
      {"elasticity.max_train_batch_size",
       {"elasticity.max_train_batch_size=8"},
       kNotElastic},
      {"elasticity.micro_batch_sizes",
       {"elasticity.micro_batch_sizes=[2]"},
       kNotElastic},
      {"elasticity.min_gpus", {"elasticity.min_gpus=2"}, kNotElastic},
      {"elasticity.max_gpus", {"elasticity.max_gpus=2"}, kNotElastic},
      {"elasticity.prefer_larger_batch",
       {"elasticity.prefer_larger_batch=false"},
       kNotElastic},
      {"elasticity.ignore_non_elastic_batch_info",
       {"elasticity.ignore_non_elastic_batch_info=true"},
       kNotElastic},
      {"aio.block_size", {"aio.block_size=4096"}, kNoDisk},
      {"aio.queue_depth", {"aio.queue_depth=3"}, kNoDisk},
      {"aio.thread_count", {"aio.thread_count=3"}, kNoDisk},
      {"aio.single_submit", {"aio.single_submit=true"}, kNoDisk},
      {"aio.overlap_events", {"aio.overlap_events=false"}, kNoDisk},
      {"aio.checksums", {"aio.checksums=false"}, kNoDisk},
      {"communication.ranks_per_host",
       {"communication.ranks_per_host=1"},
       "communication.algorithm is not hierarchical, and "
       "zero_optimization.mics_shard_size is not \"auto\""},
  };
}

TEST(UnreadTest, EveryKeyThatMayBeUnreadHasACase) {
  std::set<std::string> paths;
  for (const UnreadCase& one : UnreadCases()) paths.insert(one.path);
  for (const KeySpec& key : AllKeys()) {
    EXPECT_EQ(paths.count(key.path), key.unread.empty() ? 0u : 1u) << key.path;
  }
}

TEST(UnreadTest, AnUnreadKeyLeavesANoteAndIsBackAtItsDefault) {
  for (const UnreadCase& one : UnreadCases()) {
    const auto loaded = LoadSmall(one.overrides);
    ASSERT_TRUE(loaded.ok()) << one.path << ": " << loaded.status();
    int notes = 0;
    for (const std::string& note : loaded->notes) {
      notes += absl::StrContains(note, one.path) &&
               absl::EndsWith(note, absl::StrCat(": ", one.reason));
    }
    EXPECT_EQ(notes, 1) << one.path << ": "
                        << absl::StrJoin(loaded->notes, "\n");
    const KeySpec& key = *FindKey(one.path);
    EXPECT_EQ(key.get(loaded->config), key.get(Config())) << one.path;
    EXPECT_EQ(loaded->origins.count(one.path), 0u) << one.path;
    // What is printed gives the same config, without the note.
    const auto again = LoadText(PrintResolvedJson(loaded->config));
    ASSERT_TRUE(again.ok()) << one.path << ": " << again.status();
    EXPECT_TRUE(again->config == loaded->config) << one.path;
    for (const std::string& note : again->notes) {
      EXPECT_FALSE(absl::StrContains(note, "ignored")) << note;
    }
  }
}

TEST(UnreadTest, ABlockThatIsSwitchedOffIsOneNote) {
  const auto loaded = LoadText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20},
  "train_batch_size": 8,
  "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16,
           "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->notes,
            std::vector<std::string>{
                "run.json:5: fp16.loss_scale, fp16.initial_scale_power, "
                "fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale "
                "are accepted and ignored: fp16.enabled is false"});
}

TEST(UnreadTest, TheNoteOfACycledMomentumKeepsBeta2) {
  const auto loaded =
      LoadSmall({"scheduler.type=OneCycle", "optimizer.params.betas=[0.8,0.9]",
                 "scheduler.params.cycle_first_step_size=5"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->notes,
            std::vector<std::string>{
                "--set: optimizer.params.betas: only beta2 is used, since "
                "scheduler.params.cycle_momentum sets beta1"});
}

// ---- Schema and reference -------------------------------------------------

TEST(SchemaTest, IsValidJsonAndHasEveryKeyWithItsDescription) {
  const nlohmann::json schema = nlohmann::json::parse(PrintSchema());
  EXPECT_EQ(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
  for (const KeySpec& key : AllKeys()) {
    const nlohmann::json* node = &schema;
    const std::vector<std::string> names = absl::StrSplit(key.path, '.');
    for (const std::string& name : names) {
      ASSERT_TRUE(node->contains("properties")) << key.path;
      ASSERT_TRUE((*node)["properties"].contains(name)) << key.path;
      EXPECT_EQ((*node)["additionalProperties"], false) << key.path;
      node = &(*node)["properties"][name];
    }
    EXPECT_TRUE(node->contains("description")) << key.path;
  }
}

// A past bug: sizes had the default 0, and llama's norm GPT-2's.
TEST(SchemaTest, ADefaultIsThatOfAFamilyThatHasTheKey) {
  const nlohmann::json schema = nlohmann::json::parse(PrintSchema());
  const nlohmann::json& model = schema["properties"]["model"]["properties"];
  EXPECT_EQ(model["rms_norm_eps"]["default"], 1e-6);
  EXPECT_EQ(model["layer_norm_epsilon"]["default"], 1e-5);
  EXPECT_EQ(model["hidden_act"]["default"], "silu");
  for (const char* size :
       {"n_layer", "n_embd", "n_head", "hidden_size", "num_hidden_layers",
        "num_attention_heads", "intermediate_size", "model_type"}) {
    EXPECT_FALSE(model[size].contains("default")) << size;
    EXPECT_TRUE(absl::StrContains(*PrintKeyReference(),
                                  absl::StrCat("model.", size, "\n    ")));
  }
}

TEST(SchemaTest, EveryDefaultIsAValueThatItsKeyTakes) {
  const nlohmann::json schema = nlohmann::json::parse(PrintSchema());
  for (const KeySpec& key : AllKeys()) {
    const nlohmann::json* node = &schema;
    const std::vector<std::string> names = absl::StrSplit(key.path, '.');
    for (const std::string& name : names) node = &(*node)["properties"][name];
    if (!node->contains("default")) continue;
    JsonNode value;
    std::vector<JsonProblem> problems;
    ASSERT_TRUE(ParseJsonText((*node)["default"].dump(), 0, &value, &problems));
    // A string may be empty in Config if it is unset.
    EXPECT_TRUE(ReadValue(key, value).ok()) << key.path;
  }
}

TEST(SchemaTest, HasNoKeyThatTheTableLacks) {
  std::vector<std::string> unknown;
  const std::function<void(const nlohmann::json&, const std::string&)> visit =
      [&](const nlohmann::json& node, const std::string& path) {
        if (!node.contains("additionalProperties")) return;
        for (const auto& [name, child] : node["properties"].items()) {
          const std::string inner =
              absl::StrCat(path, path.empty() ? "" : ".", name);
          if (FindKey(inner) == nullptr) unknown.push_back(inner);
          visit(child, inner);
        }
      };
  visit(nlohmann::json::parse(PrintSchema()), "");
  EXPECT_EQ(unknown, std::vector<std::string>());
}

TEST(ReferenceTest, EveryKeyHasALineInTheReference) {
  const std::string reference = absl::StrCat("\n", *PrintKeyReference());
  for (const KeySpec& key : AllKeys()) {
    EXPECT_TRUE(
        absl::StrContains(reference, absl::StrCat("\n", key.path, "\n    ")));
  }
  for (const absl::string_view line : absl::StrSplit(reference, '\n')) {
    const bool is_one_word =
        !absl::StrContains(absl::StripLeadingAsciiWhitespace(line), ' ');
    EXPECT_TRUE(line.size() <= 80 || is_one_word) << line;
  }
  EXPECT_TRUE(absl::StrContains(PrintDifferences(),
                                "| `scheduler.params.warmup_max_lr` | "
                                "optimizer.params.lr | 0.001, whatever"));
}

TEST(ReferenceTest, EveryWordOfAPatternIsInAKeysPathOrMeaning) {
  const auto keys = [](const std::string& pattern) {
    std::vector<std::string> names;
    for (const absl::string_view line :
         absl::StrSplit(*PrintKeyReference(pattern), '\n', absl::SkipEmpty())) {
      if (line[0] != ' ') names.emplace_back(line);
    }
    return names;
  };
  // Those whose paths have all words come first.
  EXPECT_EQ(keys("Keep_"), (std::vector<std::string>{
                               "training.keep_last", "training.keep_every",
                               "activation_checkpointing.keep_all",
                               "activation_checkpointing"}));
  EXPECT_EQ(
      keys("offload*.device"),
      (std::vector<std::string>{"zero_optimization.offload_optimizer.device",
                                "zero_optimization.offload_param.device",
                                "zero_optimization.cpu_offload",
                                "zero_optimization.cpu_offload_param",
                                "zero_optimization.cpu_offload_params"}));
  EXPECT_EQ(keys("Gradient clipping"),
            (std::vector<std::string>{
                "gradient_clipping",
                "zero_optimization.offload_optimizer.update_before_norm",
                "optimizer.params.max_grad_norm"}));
  EXPECT_EQ(keys(" clipping  gradient "), keys("gradient clipping"));
  // One word is in the path, the other in the meaning.
  EXPECT_EQ(keys("keep_last newest"),
            std::vector<std::string>{"training.keep_last"});
  EXPECT_EQ(keys("Steps in a ROW"),
            std::vector<std::string>{"training.max_consecutive_skips"});
  const auto error = [](const std::string& pattern) {
    return std::string(PrintKeyReference(pattern).status().message());
  };
  EXPECT_EQ(
      error("sequense_length"),
      "no key's name or meaning contains \"sequense_length\"; did you mean "
      "\"data.sequence_length\"?");
  EXPECT_TRUE(absl::StartsWith(
      error("gradient nowhere"),
      "no key's name or meaning contains \"gradient\" and \"nowhere\""));
  EXPECT_EQ(error("optimizer.learning_rate"),
            "no key's name or meaning contains \"optimizer.learning_rate\"; "
            "did you mean "
            "\"optimizer.params.lr\"?");
}

// ---- Printing -------------------------------------------------------------

// Configs that together show every key.
std::vector<std::string> Variants() {
  std::vector<std::string> texts;
  const auto with = [&](const std::string& more) {
    texts.push_back(absl::StrCat(
        R"({"model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2,
"n_head": 4}, "training": {"steps": 20, "save_every": 5, "sample": {"prompt":
"a\tb"}},
"train_batch_size": 8, )",
        more, "}"));
  };
  with(R"("optimizer": {"type": "Adam", "params": {"adam_w_mode": false,
          "weight_decay": 0.1}})");
  with(R"("optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
          "scheduler": {"type": "OneCycle"})");
  with(R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4,
          "decay_step_size": 9, "decay_lr_rate": 0.5}})");
  with(R"("optimizer": {"type": "Lamb"}, "scheduler": {"type": "WSD"})");
  with(R"("scheduler": {"type": "WarmupCosineLR"}, "fp16": {"enabled": true})");
  with(R"("scheduler": {"type": "WarmupDecayLR"},
          "lr_scaling": {"base_batch_size": 4, "warmup_steps": 5})");
  with(R"("scheduler": {"type": "WarmupLR"}, "bf16": {"enabled": true},
          "data": {"train": ["a b.txt", "x\"\\y\n.txt"],
                   "validation": "v.txt"})");
  with(R"("zero_optimization": {"stage": 1, "allgather_bucket_size": 9})");
  with(R"("elasticity": {"enabled": true, "max_train_batch_size": 9,
          "micro_batch_sizes": [2, 4]})");
  with(R"("zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0,
          "stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 10,
          "stage3_param_persistence_threshold": 100,
          "vocabulary_parts": "off",
          "ignore_unused_parameters": false})");
  with(R"("zero_optimization": {"stage": 3,
          "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
          "offload_param": {"device": "nvme", "nvme_path": "/disk"}},
          "communication": {"algorithm": "hierarchical"})");
  with(R"("zero_optimization": {"stage": 1, "offload_optimizer": {
          "device": "cpu", "delayed_update": {"enabled": true}}})");
  with(R"("zero_optimization": {"stage": 2, "mics_shard_size": 1,
          "offload_optimizer": {"device": "cpu", "ratio": 0.25}})");
  texts.push_back(R"({
  "model": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 96,
            "rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
  "train_batch_size": 8, "training": {"epochs": 2.5}})");
  texts.push_back(R"({
  "model": {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 96,
            "vocab_size": 300},
  "data": {"train": "a.bin", "reset_attention_mask": true, "eos_token_id": 7},
  "train_batch_size": 8, "training": {"steps": 3},
  "activation_checkpointing": {"enabled": true, "granularity": "selective"}})");
  with(R"("activation_checkpointing": {"keep_all": true})");
  return texts;
}

TEST(PrintTest, TheResolvedConfigReadsBackToTheSameConfig) {
  for (const std::string& text : Variants()) {
    const auto loaded = LoadText(text);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const std::string shown = PrintResolved(*loaded);
    for (const std::string& again :
         {shown, PrintResolvedJson(loaded->config)}) {
      const auto twice = LoadText(again);
      ASSERT_TRUE(twice.ok()) << twice.status() << again;
      EXPECT_TRUE(twice->config == loaded->config) << again;
    }
    EXPECT_TRUE(
        nlohmann::json::parse(PrintResolvedJson(loaded->config)).is_object());
    EXPECT_TRUE(nlohmann::json::parse(shown, nullptr, true,
                                      /*ignore_comments=*/true)
                    .is_object());
  }
}

TEST(PrintTest, AnOutDirThatFollowsFromTheFileDoesNotFollowItsText) {
  const auto loaded = LoadSmall({});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::string shown = PrintResolved(*loaded);
  EXPECT_TRUE(absl::StrContains(shown, "    // \"out_dir\": \"out/run\","));
  LoadOptions options;
  options.missing_files = MissingFiles::kIgnored;
  const auto copy = ParseConfig(shown, "copy.json", options);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->config.training.out_dir, "out/copy");
  const auto given = LoadSmall({"training.out_dir=there"});
  EXPECT_TRUE(
      absl::StrContains(PrintResolved(*given), "    \"out_dir\": \"there\","));
}

TEST(PrintTest, EveryKeyThatAppliesIsShownWithItsOrigin) {
  std::set<std::string> shown;
  for (const std::string& text : Variants()) {
    const auto loaded = LoadText(text);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const std::vector<std::string> lines =
        absl::StrSplit(PrintResolved(*loaded), '\n');
    for (const std::string& line : lines) {
      const bool leaf = !line.empty() && absl::StrContains(line, "\": ") &&
                        line.back() != '{';
      EXPECT_EQ(leaf, absl::StrContains(line, "  // ")) << line;
    }
    for (const auto& [path, origin] : loaded->origins) {
      EXPECT_FALSE(origin.empty()) << path;
      shown.insert(path);
    }
  }
  for (const KeySpec& key : AllKeys()) {
    if (key.get == nullptr) continue;
    EXPECT_EQ(shown.count(key.path), 1u) << key.path;
  }
}

}  // namespace
}  // namespace zero
