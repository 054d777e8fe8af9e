// A given key changes what a run does or prints, or its error or note says that
// it does not. One line per key; a key without a line fails the test.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "engine/config/keys.h"
#include "engine/train/trainer.h"
#include "models/catalog.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

using Overrides = std::vector<std::string>;

// `change`, an override, gives `path` another value than in `context`. DIR
// stands for the test's folder.
struct Line {
  const char* path;
  const char* change;
  Overrides context = {};
  std::vector<int> bad_steps = {};  // steps made to overflow, from 1
};

const Overrides kLlama = {
    R"(model={"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1,
       "num_attention_heads": 2, "intermediate_size": 16})"};
const Overrides kRopeScaled = {
    R"(model={"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1,
       "num_attention_heads": 2, "intermediate_size": 16,
       "rope_scaling": {"rope_type": "llama3",
                        "original_max_position_embeddings": 16}})"};
// Lines are documents.
const Overrides kTokenFile = {"data.train=DIR/tokens.bin",
                              "model.vocab_size=257", "data.eos_token_id=10"};
const Overrides kFp16 = {"fp16.enabled=true", "training.steps=5"};
const Overrides kDecayed = {"optimizer.params.weight_decay=0.5"};
const Overrides kMomentum = {"optimizer.type=SGD",
                             "optimizer.params.momentum=0.9"};
const Overrides kLamb = {"optimizer.type=Lamb"};
const Overrides kWarmup = {
    R"(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 3}})"};
const Overrides kCosine = {
    R"(scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}})"};
const Overrides kWsd = {
    R"(scheduler={"type": "WSD", "params": {"warmup_num_steps": 1,
                                            "decay_num_steps": 2}})"};
const Overrides kCycle = {
    R"(scheduler={"type": "OneCycle", "params": {
       "cycle_first_step_size": 2, "cycle_second_step_size": 2,
       "cycle_min_lr": 0.001, "decay_step_size": 1, "decay_lr_rate": 0.5}})",
    "training.steps=7"};
// Batches of 8 or 6, both for three numbers of ranks.
const Overrides kElastic = {
    "train_batch_size=auto", "train_micro_batch_size_per_gpu=auto",
    R"(elasticity={"enabled": true, "max_train_batch_size": 9,
                   "micro_batch_sizes": [2, 3]})"};
const Overrides kScaled = {"lr_scaling.base_batch_size=1"};

std::vector<Line> Lines() {
  return {
      {"model.preset", R"(model={"preset": "gpt2-tiny"})"},
      {"model.from_pretrained",
       R"(model={"from_pretrained": "DIR/first/final"})"},
      {"model.freeze", "model.freeze=embedding.*"},
      {"model.model_type", "model.model_type=qwen2", kLlama},
      {"model.vocab_size", "model.vocab_size=300"},
      {"model.tie_word_embeddings", "model.tie_word_embeddings=false"},
      {"model.initializer_range", "model.initializer_range=0.1"},
      {"model.embd_pdrop", "model.embd_pdrop=0.5"},
      {"model.resid_pdrop", "model.resid_pdrop=0.5"},
      {"model.n_embd", "model.n_embd=16"},
      {"model.n_layer", "model.n_layer=2"},
      {"model.n_head", "model.n_head=1"},
      {"model.n_inner", "model.n_inner=16"},
      {"model.n_positions", "model.n_positions=16"},
      {"model.layer_norm_epsilon", "model.layer_norm_epsilon=0.1"},
      {"model.activation_function", "model.activation_function=gelu"},
      {"model.hidden_size", "model.hidden_size=16", kLlama},
      {"model.num_hidden_layers", "model.num_hidden_layers=2", kLlama},
      {"model.num_attention_heads", "model.num_attention_heads=1", kLlama},
      {"model.num_key_value_heads", "model.num_key_value_heads=1", kLlama},
      {"model.head_dim", "model.head_dim=8", kLlama},
      {"model.intermediate_size", "model.intermediate_size=8", kLlama},
      {"model.max_position_embeddings", "model.max_position_embeddings=16",
       kLlama},
      {"model.rms_norm_eps", "model.rms_norm_eps=0.1", kLlama},
      {"model.rope_theta", "model.rope_theta=100", kLlama},
      {"model.rope_scaling.rope_type",
       R"(model.rope_scaling={"rope_type": "llama3",
                              "original_max_position_embeddings": 16})",
       kLlama},
      {"model.rope_scaling.factor", "model.rope_scaling.factor=2", kRopeScaled},
      {"model.rope_scaling.low_freq_factor",
       "model.rope_scaling.low_freq_factor=2", kRopeScaled},
      {"model.rope_scaling.high_freq_factor",
       "model.rope_scaling.high_freq_factor=8", kRopeScaled},
      {"model.rope_scaling.original_max_position_embeddings",
       "model.rope_scaling.original_max_position_embeddings=64", kRopeScaled},

      {"data.train", "data.train=DIR/other.txt"},
      {"data.validation",
       "data.validation=DIR/other.txt",
       {"data.validation_fraction=0", "training.eval_batches=0"}},
      {"data.validation_fraction", "data.validation_fraction=0.5"},
      {"data.format", "data.format=raw_uint16", {"model.vocab_size=65536"}},
      {"data.tokenizer",
       "data.tokenizer=bytes",
       {"data.train=DIR/tokens.bin", "model.vocab_size=257"}},
      {"data.sequence_length", "data.sequence_length=4"},
      {"data.reset_attention_mask", "data.reset_attention_mask=true",
       kTokenFile},
      {"data.eos_token_id",
       "data.eos_token_id=46",
       {kTokenFile[0], kTokenFile[1], kTokenFile[2],
        "data.reset_attention_mask=true"}},

      {"training.steps", "training.steps=3"},
      {"training.epochs",
       "training.epochs=0.5",
       {"training.steps=auto", "training.epochs=0.2"}},
      {"training.seed", "training.seed=7"},
      {"training.max_consecutive_skips",
       "training.max_consecutive_skips=2",
       {},
       {1, 2, 3}},
      {"training.out_dir", "training.out_dir=DIR/elsewhere"},
      {"training.eval_every", "training.eval_every=1"},
      {"training.eval_batches", "training.eval_batches=1"},
      {"training.sample_every", "training.sample_every=1"},
      {"training.sample.prompt", "training.sample.prompt=A"},
      {"training.sample.tokens", "training.sample.tokens=3"},
      {"training.sample.temperature", "training.sample.temperature=0"},
      {"training.sample.top_k", "training.sample.top_k=1"},
      {"training.sample.top_p", "training.sample.top_p=0.001"},
      {"training.sample.seed", "training.sample.seed=99"},
      {"training.save_final", "training.save_final=false"},
      {"training.max_shard_size", "training.max_shard_size=10000"},
      {"training.tensorboard", "training.tensorboard=true"},
      {"training.save_every", "training.save_every=2"},
      {"training.save_every_minutes", "training.save_every_minutes=1e-9"},
      {"training.max_minutes", "training.max_minutes=1e-9"},

      {"train_batch_size", "train_batch_size=8"},
      {"train_micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu=1"},
      {"gradient_accumulation_steps",
       "gradient_accumulation_steps=2",
       {"train_batch_size=auto"}},
      {"elasticity.enabled",
       "elasticity.enabled=true",
       {"elasticity.max_train_batch_size=9",
        "elasticity.micro_batch_sizes=[2, 3]",
        "elasticity.ignore_non_elastic_batch_info=true"}},
      {"elasticity.max_train_batch_size", "elasticity.max_train_batch_size=4",
       kElastic},
      {"elasticity.micro_batch_sizes", "elasticity.micro_batch_sizes=[1]",
       kElastic},
      {"elasticity.max_gpus", "elasticity.max_gpus=3", kElastic},
      {"elasticity.prefer_larger_batch", "elasticity.prefer_larger_batch=false",
       kElastic},
      {"gradient_clipping", "gradient_clipping=0.01"},
      {"bf16.enabled", "bf16.enabled=true"},
      {"fp16.enabled", "fp16.enabled=true"},
      {"fp16.loss_scale", "fp16.loss_scale=8", kFp16},
      {"fp16.initial_scale_power", "fp16.initial_scale_power=3", kFp16},
      {"fp16.loss_scale_window", "fp16.loss_scale_window=1", kFp16},
      {"fp16.hysteresis", "fp16.hysteresis=1", kFp16, {2}},
      {"fp16.consecutive_hysteresis",
       "fp16.consecutive_hysteresis=true",
       kFp16,
       {2, 4}},
      {"fp16.min_loss_scale", "fp16.min_loss_scale=65536", kFp16, {1, 2, 3}},

      {"data_types.grad_accum_dtype",
       "data_types.grad_accum_dtype=bf16",
       {"bf16.enabled=true"}},
      {"data_types.stochastic_rounding",
       "data_types.stochastic_rounding=true",
       {"bf16.enabled=true"}},
      {"data_types.split_master_weights",
       "data_types.split_master_weights=false",
       {"bf16.enabled=true"}},

      {"optimizer.type", "optimizer.type=SGD"},
      {"optimizer.params.lr", "optimizer.params.lr=0.02"},
      {"optimizer.params.weight_decay", "optimizer.params.weight_decay=0.5"},
      {"optimizer.params.weight_decay_on",
       "optimizer.params.weight_decay_on=all", kDecayed},
      {"optimizer.params.betas", "optimizer.params.betas=[0.5, 0.9]"},
      {"optimizer.params.eps", "optimizer.params.eps=0.1"},
      {"optimizer.params.bias_correction",
       "optimizer.params.bias_correction=false"},
      {"optimizer.params.adam_w_mode",
       "optimizer.params.adam_w_mode=false",
       {"optimizer.type=Adam", kDecayed[0]}},
      {"optimizer.params.momentum",
       "optimizer.params.momentum=0.9",
       {"optimizer.type=SGD"}},
      {"optimizer.params.dampening", "optimizer.params.dampening=0.5",
       kMomentum},
      {"optimizer.params.nesterov", "optimizer.params.nesterov=true",
       kMomentum},
      {"optimizer.params.max_coeff", "optimizer.params.max_coeff=0.02", kLamb},
      {"optimizer.params.min_coeff", "optimizer.params.min_coeff=5", kLamb},

      {"scheduler.type", "scheduler.type=WarmupLR"},
      {"scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_lr=0.005",
       kWarmup},
      {"scheduler.params.warmup_max_lr", "scheduler.params.warmup_max_lr=0.5",
       kWarmup},
      {"scheduler.params.warmup_num_steps",
       "scheduler.params.warmup_num_steps=4", kWarmup},
      {"scheduler.params.warmup_type", "scheduler.params.warmup_type=linear",
       kWarmup},
      {"scheduler.params.total_num_steps", "scheduler.params.total_num_steps=8",
       kWsd},
      {"scheduler.params.warmup_min_ratio",
       "scheduler.params.warmup_min_ratio=0.5", kCosine},
      {"scheduler.params.cos_min_ratio",
       "scheduler.params.cos_min_ratio=0.5",
       {kCosine[0], "training.steps=6"}},
      {"scheduler.params.decay_num_steps", "scheduler.params.decay_num_steps=3",
       kWsd},
      {"scheduler.params.decay_type", "scheduler.params.decay_type=linear",
       kWsd},
      {"scheduler.params.min_lr_ratio", "scheduler.params.min_lr_ratio=0.5",
       kWsd},
      {"scheduler.params.cycle_min_lr", "scheduler.params.cycle_min_lr=0.002",
       kCycle},
      {"scheduler.params.cycle_max_lr", "scheduler.params.cycle_max_lr=0.5",
       kCycle},
      {"scheduler.params.decay_lr_rate", "scheduler.params.decay_lr_rate=1",
       kCycle},
      {"scheduler.params.cycle_first_step_size",
       "scheduler.params.cycle_first_step_size=3", kCycle},
      {"scheduler.params.cycle_second_step_size",
       "scheduler.params.cycle_second_step_size=3", kCycle},
      {"scheduler.params.cycle_first_stair_count",
       "scheduler.params.cycle_first_stair_count=1", kCycle},
      {"scheduler.params.cycle_second_stair_count",
       "scheduler.params.cycle_second_stair_count=1", kCycle},
      {"scheduler.params.decay_step_size", "scheduler.params.decay_step_size=2",
       kCycle},
      {"scheduler.params.cycle_momentum",
       "scheduler.params.cycle_momentum=false", kCycle},
      {"scheduler.params.cycle_min_mom", "scheduler.params.cycle_min_mom=0.5",
       kCycle},
      {"scheduler.params.cycle_max_mom", "scheduler.params.cycle_max_mom=0.95",
       kCycle},
      {"scheduler.params.decay_mom_rate", "scheduler.params.decay_mom_rate=0.1",
       kCycle},
      {"lr_scaling.rule", "lr_scaling.rule=sqrt", kScaled},
      {"lr_scaling.base_batch_size", "lr_scaling.base_batch_size=2", kScaled},
      {"lr_scaling.warmup_steps", "lr_scaling.warmup_steps=2", kScaled},
      {"lr_scaling.warmup_epochs", "lr_scaling.warmup_epochs=0.3", kScaled},

      {"activation_checkpointing.enabled",
       "activation_checkpointing.enabled=true"},
      {"activation_checkpointing.granularity",
       "activation_checkpointing.granularity=selective",
       {"activation_checkpointing.enabled=true"}},
      {"activation_checkpointing.keep_all",
       "activation_checkpointing.keep_all=true"},
      {"steps_per_print", "steps_per_print=1"},
      {"wall_clock_breakdown", "wall_clock_breakdown=true"},
      {"memory_breakdown", "memory_breakdown=true"},
  };
}

// Only one value can be given, or the command line reads it (tests/e2e).
bool NeedsNoLine(const KeySpec& key) {
  // The CPU reads none of a GPU's (tests/engine/train/rank_notes_test).
  if (key.of_gpu) return true;
  // One rank has nothing to shard or to send (tests/engine/zero/stages_test).
  // How states are written to a disk shows in no result
  // (tests/engine/base/swap_file_test).
  if (absl::StartsWith(key.path, "zero_optimization.") ||
      absl::StartsWith(key.path, "aio.") ||
      absl::StartsWith(key.path, "communication")) {
    return true;
  }
  // Needs several ranks, or is an error without it
  // (tests/engine/config/load_test).
  if (key.path == "elasticity.min_gpus" ||
      key.path == "elasticity.ignore_non_elastic_batch_info") {
    return true;
  }
  const auto is_built = [&](const std::string& choice) {
    return std::count(key.unbuilt.begin(), key.unbuilt.end(), choice) == 0;
  };
  if (key.kind == KeyKind::kChoice) {
    return std::count_if(key.choices.begin(), key.choices.end(), is_built) == 1;
  }
  // Needs several checkpoints, two runs (tests/engine/train/resume_test), or
  // the time of a save (tests/engine/train/checkpoints_test).
  if (key.path == "training.save_interrupted" ||
      key.path == "training.async_save" ||
      absl::StartsWith(key.path, "training.keep_") ||
      absl::StartsWith(key.path, "training.resume")) {
    return true;
  }
  return key.path == "dump_state";
}

class KeysEffectTest : public testing::Test {
 protected:
  KeysEffectTest()
      : device_(MakeCpuDevice(1)),
        rank_(MakeSoloRank(*device_)),
        catalog_(MakeModelCatalog()) {
    std::string text, other, tokens;
    for (int i = 0; i < 12; ++i) {
      absl::StrAppend(&text, "The number after ", i, " is ", i + 1, ".\n");
      absl::StrAppend(&other, "Twice ", i, " makes ", 2 * i, ".\n");
    }
    for (const char c : text) tokens += {c, '\0'};
    dir_.Write("text.txt", text);
    dir_.Write("other.txt", other);
    dir_.Write("tokens.bin", tokens);
  }

  absl::StatusOr<LoadedConfig> Load(const Overrides& overrides) const {
    LoadOptions options;
    options.catalog = catalog_.get();
    for (const std::string& one : overrides) {
      options.overrides.push_back(
          absl::StrReplaceAll(one, {{"DIR", dir_.path()}}));
    }
    return ParseConfig(absl::StrReplaceAll(R"({
      "model": {"model_type": "gpt2", "n_embd": 8, "n_layer": 3, "n_head": 2},
      "data": {"train": "DIR/text.txt", "validation_fraction": 0.25,
               "sequence_length": 8},
      "training": {"steps": 4, "out_dir": "DIR/run", "eval_batches": 2,
                   "sample": {"prompt": "The ", "tokens": 8}},
      "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
      "steps_per_print": 4, "optimizer": {"params": {"lr": 0.01}}
    })",
                                           {{"DIR", dir_.path()}}),
                       "run.json", options);
  }

  // Everything that a run with `loaded` leaves and prints, except times and
  // rates.
  std::string Observe(const LoadedConfig& loaded,
                      const std::vector<int>& bad_steps) {
    for (const char* out : {"run", "elsewhere"}) {
      std::filesystem::remove_all(dir_.File(out));
    }
    char* text = nullptr;
    size_t size = 0;
    std::FILE* file = open_memstream(&text, &size);
    std::string seen;
    {
      Console console(file, /*is_terminal=*/false);
      ModelTools tools = TestModelTools();
      tools.flops_per_token = [](const ModelConfig&, int64_t, Recompute) {
        return TokenFlops();
      };
      const auto trainer =
          Trainer::Make(rank_, loaded, tools, &console, nullptr);
      if (trainer.ok()) {
        Poison(**trainer, bad_steps);
        const auto summary = (*trainer)->Run();
        seen = summary.ok() ? summary->parameters_hash
                            : std::string(summary.status().message());
      } else {
        seen = std::string(trainer.status().message());
      }
    }
    std::fclose(file);
    absl::StrAppend(&seen, "\n", Printed(std::string(text, size)), Files());
    std::free(text);
    return seen;
  }

  void Poison(Trainer& trainer, const std::vector<int>& bad_steps) {
    if (bad_steps.empty()) return;
    const Parameter* const first = trainer.session().model().AllParameters()[0];
    trainer.session().executor().clock().set_hook(
        [first, bad_steps, step = 0](const Action& action, bool done) mutable {
          if (done || action.kind != ActionKind::kNorm) return;
          ++step;
          if (std::count(bad_steps.begin(), bad_steps.end(), step) == 0) return;
          first->weight.sink->grad.As<float>()[0] =
              std::numeric_limits<float>::infinity();
        });
  }

  // The lines after the start table; of those with times only their kind.
  static std::string Printed(const std::string& text) {
    std::string seen;
    bool started = false;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      const bool is_step = absl::StartsWith(line, "step ");
      started |= is_step;
      if (!started) continue;
      if (is_step) {
        seen +=
            absl::StrContains(line, "validation") ? "validation\n" : "step\n";
        continue;
      }
      const bool is_times = absl::StartsWith(line, "  ");
      for (const char c : line) {
        if (!is_times || std::isalpha(static_cast<unsigned char>(c))) seen += c;
      }
      seen += '\n';
    }
    return seen;
  }

  // Names of all files, and the contents of the run's.
  std::string Files() const {
    std::vector<std::string> names;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(dir_.path())) {
      names.push_back(entry.path().string().substr(dir_.path().size() + 1));
    }
    std::sort(names.begin(), names.end());
    std::string seen;
    for (const std::string& name : names) {
      absl::StrAppend(&seen, name, "\n");
      if (absl::EndsWith(name, "metrics.jsonl"))
        seen += Metrics(dir_.Read(name));
      if (absl::EndsWith(name, "final/config.json")) seen += dir_.Read(name);
    }
    return seen;
  }

  static std::string Metrics(const std::string& text) {
    std::string seen;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      if (line.empty()) continue;
      const auto json = nlohmann::json::parse(line);
      for (const char* key :
           {"step", "loss", "grad_norm", "lr", "tokens", "peak_bytes",
            "loss_scale", "skipped", "validation_loss", "validation_tokens"}) {
        if (json.contains(key)) {
          absl::StrAppend(&seen, " ", key, " ", json[key].dump());
        }
      }
      seen += '\n';
    }
    return seen;
  }

  // Runs with the same overrides run once and are looked up later.
  const std::string& ObserveContext(const Line& line) {
    std::string name;
    for (const std::string& one : line.context)
      absl::StrAppend(&name, one, ";");
    for (const int step : line.bad_steps) absl::StrAppend(&name, step, ";");
    std::string& seen = contexts_[name];
    if (seen.empty()) {
      const auto loaded = Load(line.context);
      EXPECT_TRUE(loaded.ok()) << name << loaded.status();
      if (loaded.ok()) seen = Observe(*loaded, line.bad_steps);
    }
    return seen;
  }

  TempDir dir_;
  std::unique_ptr<Device> device_;
  Rank rank_;
  std::unique_ptr<ModelCatalog> catalog_;
  std::map<std::string, std::string> contexts_;
};

TEST_F(KeysEffectTest, EveryUsedKeyHasALine) {
  std::map<std::string, int> lines;
  for (const Line& line : Lines()) ++lines[line.path];
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed || !key.is_leaf()) continue;
    EXPECT_EQ(lines[key.path], NeedsNoLine(key) ? 0 : 1) << key.path;
  }
}

TEST_F(KeysEffectTest, TheSameRunLooksTheSameTwice) {
  const auto loaded = Load({"wall_clock_breakdown=true"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(Observe(*loaded, {}), Observe(*loaded, {}));
}

TEST_F(KeysEffectTest, EveryKeyChangesTheRunOrSaysThatItDoesNot) {
  const auto first = Load({"training.out_dir=DIR/first"});
  ASSERT_TRUE(first.ok()) << first.status();
  Observe(*first, {});  // for from_pretrained
  const auto base = Load({});
  ASSERT_TRUE(base.ok()) << base.status();
  for (const Line& line : Lines()) {
    SCOPED_TRACE(line.path);
    Overrides changed = line.context;
    changed.push_back(line.change);
    const auto loaded = Load(changed);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) continue;
    EXPECT_TRUE(Observe(*loaded, line.bad_steps) != ObserveContext(line));

    // Without its context it may be refused, be noted, or be the default.
    if (line.context.empty()) continue;
    const auto alone = Load({line.change});
    if (!alone.ok() || alone->config == base->config) continue;
    const bool noted = std::any_of(alone->notes.begin(), alone->notes.end(),
                                   [&](const std::string& note) {
                                     return absl::StrContains(note, line.path);
                                   });
    if (!noted) {
      EXPECT_TRUE(Observe(*alone, {}) !=
                  ObserveContext({line.path, line.change}))
          << "without its context";
    }
  }
}

}  // namespace
}  // namespace zero
