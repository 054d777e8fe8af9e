#include "engine/config/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/config/keys.h"
#include "tests/engine/config/config_testing.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

// ---- Ten wrong configs: the errors that you would like to get -------------

TEST(TenWrongConfigsTest, AMisspelledKeyNamesTheRightOne) {
  EXPECT_EQ(ErrorOfText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20},
  "train_batchsize": 8
})"),
            "run.json:4:3: train_batchsize: unknown key; did you mean "
            "\"train_batch_size\"?");
}

TEST(TenWrongConfigsTest, AStringForANumberIsRefused) {
  EXPECT_EQ(ErrorOfText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": "20"},
  "train_batch_size": 8
})"),
            "run.json:3:25: training.steps: \"20\" is a string, want a whole "
            "number in [1, 1000000000000]");
}

TEST(TenWrongConfigsTest, BatchSizesMustMultiply) {
  EXPECT_EQ(ErrorOfText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20},
  "train_batch_size": 32,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 4
})"),
            "run.json:4:23: train_batch_size: 32 is not "
            "train_micro_batch_size_per_gpu (line 5) 4 * "
            "gradient_accumulation_steps (line 6) 4 * 1 rank = 16; write 16, "
            "or delete one of the three");
}

TEST(TenWrongConfigsTest, AnUnknownModelIsRefused) {
  EXPECT_EQ(ErrorOfText(R"({
  "model": {"model_type": "gtp2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20},
  "train_batch_size": 8
})"),
            "run.json:2:27: model.model_type: \"gtp2\" is not one of gpt2, "
            "llama, qwen2, qwen3; did you mean \"gpt2\"?");
}

TEST(TenWrongConfigsTest, ABooleanLeadsToOnOrOff) {
  LoadOptions options;
  const auto error = [&](const std::string& value) {
    options.overrides = {"zero_optimization.vocabulary_parts=" + value};
    const auto loaded = ParseConfig(kSmallConfig, "run.json", options);
    return std::string(loaded.status().message());
  };
  using testing::EndsWith;
  EXPECT_THAT(error("true"), EndsWith("; did you mean \"on\"?"));
  EXPECT_THAT(error("false"), EndsWith("; did you mean \"off\"?"));
  EXPECT_THAT(error("\"true\""), EndsWith("; did you mean \"on\"?"));
  options.overrides = {"communication.algorithm=true"};
  EXPECT_THAT(
      std::string(
          ParseConfig(kSmallConfig, "run.json", options).status().message()),
      testing::Not(testing::HasSubstr("did you mean")));
}

TEST(TenWrongConfigsTest, AMissingFileIsNamed) {
  LoadOptions options;
  EXPECT_EQ(LoadConfig("configs/quickstrat.json", options).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(
      ParseConfig(kSmallConfig, "configs/run.json", options).status().message(),
      "configs/run.json:3:21: data.train: \"text.txt\" does not exist, "
      "neither from the current folder nor from configs/; correct the name, "
      "or start zero in the folder that it is relative to");
}

TEST(TenWrongConfigsTest, AKeyStandsOnce) {
  EXPECT_EQ(ErrorOfText(R"({
  "optimizer": {"params": {"lr": 1e-3}},
  "training": {"steps": 20},
  "optimizer": {"params": {"lr": 2e-3}}
})"),
            "run.json:4:3: optimizer: given twice, first in line 2; delete "
            "one");
}

TEST(TenWrongConfigsTest, StageSevenIsRefused) {
  EXPECT_EQ(ErrorOfText(R"({
  "zero_optimization": {"stage": 7}
})"),
            "run.json:2:34: zero_optimization.stage: 7 is not in [0, 3]");
}

TEST(TenWrongConfigsTest, ANegativeLearningRateIsRefused) {
  EXPECT_EQ(ErrorOfText(R"({
  "optimizer": {"type": "AdamW", "params": {"lr": -0.001}}
})"),
            "run.json:2:51: optimizer.params.lr: -0.001 is not > 0");
}

TEST(TenWrongConfigsTest, ADeepSpeedKeyThatDoesNotApplyIsRefused) {
  EXPECT_EQ(ErrorOfText(R"({
  "amp": {"enabled": true, "opt_level": "O2"}
})"),
            "run.json:2:3: amp: does not apply here: zero does not use Apex; "
            "write bf16 or fp16; enabled: false is accepted");
}

TEST(TenWrongConfigsTest, TruncatedJsonNamesItsEnd) {
  EXPECT_EQ(ErrorOfText(R"({
  "training": {"steps": 20)"),
            "run.json:2:27: training: the text ends inside the object that "
            "was opened at 2:15; want a closing }");
}

// ---- What a good config becomes -------------------------------------------

TEST(LoadTest, TheSmallConfigResolvesCompletely) {
  const auto loaded = LoadSmall({});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Config& c = loaded->config;
  EXPECT_EQ(c.model.vocab_size, 257);
  EXPECT_EQ(c.model.head_dim, 16);
  EXPECT_EQ(c.model.num_key_value_heads, 4);
  EXPECT_EQ(c.model.intermediate_size, 256);
  EXPECT_EQ(c.model.max_position_embeddings, 32);
  EXPECT_TRUE(c.model.tie_word_embeddings);
  EXPECT_TRUE(c.model.attention_bias);
  EXPECT_EQ(c.train_micro_batch_size_per_gpu, 8);
  EXPECT_EQ(c.gradient_accumulation_steps, 1);
  EXPECT_EQ(c.data.tokenizer, "bytes");
  EXPECT_EQ(c.training.out_dir, "out/run");
  EXPECT_EQ(c.param_dtype(), DType::kF32);
  EXPECT_TRUE(loaded->notes.empty());
}

TEST(LoadTest, OriginsNameTheFileTheOverrideTheFormulaOrTheDefault) {
  const auto loaded = LoadSmall({"training.steps=7"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  auto origins = loaded->origins;
  EXPECT_EQ(origins["model.n_embd"], "run.json:2");
  EXPECT_EQ(origins["training.steps"], "--set");
  EXPECT_EQ(origins["model.n_inner"], "derived: 4 * n_embd");
  EXPECT_EQ(origins["steps_per_print"], "default");
  EXPECT_EQ(origins.count("model.hidden_size"), 0u);
}

TEST(LoadTest, GradientsAreSentAsTheyAreAccumulatedUnlessAsked) {
  const std::string accumulate = "data_types.grad_accum_dtype=";
  const std::string send = "communication_data_type=";
  const auto check = [](std::vector<std::string> overrides, DType accumulated,
                        DType sent) {
    const auto loaded = LoadSmall(std::move(overrides));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.grad_accum_dtype, accumulated);
    EXPECT_EQ(loaded->config.communication_data_type, sent);
  };
  check({"bf16.enabled=true"}, DType::kF32, DType::kF32);
  check({send + "bf16"}, DType::kF32, DType::kBF16);
  check({"fp16.enabled=true", send + "fp16"}, DType::kF32, DType::kF16);
  check({"bf16.enabled=true", accumulate + "bf16"}, DType::kBF16, DType::kBF16);
  check({"bf16.enabled=true", accumulate + "bf16", send + "fp32"}, DType::kBF16,
        DType::kF32);
  EXPECT_EQ(ErrorOfSmall({accumulate + "bf16"}),
            "--set data_types.grad_accum_dtype: \"bf16\", but parameters are "
            "fp32; want \"fp32\" or their dtype");
  EXPECT_EQ(ErrorOfSmall({accumulate + "bf16", "fp16.enabled=true"}),
            "--set data_types.grad_accum_dtype: \"bf16\", but parameters are "
            "fp16; want \"fp32\" or their dtype");
}

TEST(LoadTest, StochasticRoundingWantsSixteenBitParameters) {
  const std::string rounding = "data_types.stochastic_rounding=true";
  for (const char* precision : {"bf16.enabled=true", "fp16.enabled=true"}) {
    const auto loaded = LoadSmall({rounding, precision});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->config.stochastic_rounding);
  }
  EXPECT_FALSE(LoadSmall({})->config.stochastic_rounding);
  EXPECT_EQ(ErrorOfSmall({rounding}),
            "--set data_types.stochastic_rounding: true, but parameters are "
            "fp32 and nothing is rounded; want false, or bf16.enabled or "
            "fp16.enabled");
}

TEST(LoadTest, AnyOneOfTheBatchSizesIsDerived) {
  const auto check = [](std::vector<std::string> overrides, int world,
                        int64_t batch, int64_t micro, int64_t steps) {
    const auto loaded = LoadSmall(overrides, world);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.train_batch_size, batch);
    EXPECT_EQ(loaded->config.train_micro_batch_size_per_gpu, micro);
    EXPECT_EQ(loaded->config.gradient_accumulation_steps, steps);
  };
  check({}, 4, 8, 2, 1);
  check({"gradient_accumulation_steps=2"}, 2, 8, 2, 2);
  check({"train_micro_batch_size_per_gpu=2"}, 2, 8, 2, 2);
  check({"train_batch_size=auto", "train_micro_batch_size_per_gpu=3"}, 2, 6, 3,
        1);
  check({"train_batch_size=auto", "train_micro_batch_size_per_gpu=3",
         "gradient_accumulation_steps=5"},
        2, 30, 3, 5);
}

TEST(LoadTest, BatchErrorsNameTheNumbersAndWhatFits) {
  EXPECT_EQ(
      ErrorOfSmall({"train_batch_size=10", "train_micro_batch_size_per_gpu=4"}),
      "--set train_batch_size: 10 is not a multiple of "
      "train_micro_batch_size_per_gpu (--set train_micro_batch_size_per_gpu) 4 "
      "* 1 rank; write 8 or 12");
  EXPECT_EQ(ErrorOfSmall({}, 3),
            "run.json:5:23: train_batch_size: 8 is not a multiple of 3 ranks; "
            "write 6 or 9");
  EXPECT_EQ(ErrorOfSmall({"train_batch_size=2"}, 4),
            "--set train_batch_size: 2 is not a multiple of 4 ranks; write 4");
  const std::string want =
      "; want train_batch_size (sequences per step) or "
      "train_micro_batch_size_per_gpu (sequences of a rank in one pass), to "
      "which gradient_accumulation_steps may be added; the others follow";
  const std::string given =
      R"({"model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2,
"n_head": 4}, "training": {"steps": 20}})";
  EXPECT_EQ(ErrorOfText(given),
            "run.json:1:1: train_batch_size: missing" + want);
}

TEST(LoadTest, AutoWithNothingToFollowFromIsTheTrainersMicroBatch) {
  for (const char* accumulation : {"auto", "4"}) {
    const auto loaded = LoadSmall(
        {"train_batch_size=auto", "train_micro_batch_size_per_gpu=auto",
         absl::StrCat("gradient_accumulation_steps=", accumulation)},
        2);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const Config& c = loaded->config;
    EXPECT_EQ(c.train_micro_batch_size_per_gpu, 8);
    EXPECT_EQ(c.train_batch_size, 8 * 2 * c.gradient_accumulation_steps);
    EXPECT_EQ(loaded->notes,
              std::vector<std::string>{
                  "--set: train_micro_batch_size_per_gpu \"auto\" is 8, as in "
                  "Hugging Face's Trainer, unless it or train_batch_size is "
                  "given"});
  }
}

const char kElastic[] = R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "data": {"train": "text.txt", "sequence_length": 32},
  "training": {"steps": 20},
  "elasticity": {"enabled": true, "max_train_batch_size": 25,
                 "micro_batch_sizes": [1, 2, 4], "min_time": 20,
                 "version": 0.1}
})";

TEST(LoadTest, AnElasticBatchIsTheSameAtEveryNumberOfRanks) {
  const auto check = [](int world, int64_t micro, int64_t steps) {
    const auto loaded = LoadText(kElastic, {}, world);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const Config& config = loaded->config;
    EXPECT_EQ(config.train_batch_size, 24);
    EXPECT_EQ(config.train_micro_batch_size_per_gpu, micro);
    EXPECT_EQ(config.gradient_accumulation_steps, steps);
    EXPECT_EQ(loaded->origins.at("train_batch_size"), "derived: elasticity");
    ASSERT_EQ(loaded->notes.size(), 1);
    EXPECT_EQ(loaded->notes[0],
              "run.json:6: elasticity.min_time is accepted and ignored: a "
              "job script restarts a run when a host is lost, never to grow "
              "it");
  };
  check(1, 4, 6);
  check(3, 4, 2);
  check(4, 2, 3);
  check(24, 1, 1);
}

TEST(LoadTest, ElasticErrorsNameTheRanksThatFit) {
  EXPECT_EQ(ErrorOfText(kElastic, {}, 5),
            "run.json:5:29: elasticity.enabled: 5 ranks are none of the "
            "numbers that can share 24 sequences in micro-batches of 1, 2, 4 "
            "(min_gpus 1, max_gpus 10000); start 4 or 6");
  EXPECT_EQ(ErrorOfText(kElastic, {"elasticity.max_gpus=3"}, 4),
            "run.json:5:29: elasticity.enabled: 4 ranks are none of the "
            "numbers that can share 24 sequences in micro-batches of 1, 2, 4 "
            "(min_gpus 1, max_gpus 3); start 3");
  EXPECT_EQ(ErrorOfText(kElastic, {"elasticity.min_gpus=30"}, 30),
            "run.json:6:39: elasticity.micro_batch_sizes: of 1, 2, 4 no batch "
            "of at most elasticity.max_train_batch_size (line 5) 25 is for 30 "
            "to 10000 ranks; want smaller ones, or a larger batch");
  EXPECT_EQ(
      ErrorOfText(kElastic, {"elasticity.min_gpus=3", "elasticity.max_gpus=2"}),
      "--set elasticity.min_gpus: 3 is more than elasticity.max_gpus (--set "
      "elasticity.max_gpus) 2");
  EXPECT_EQ(ErrorOfSmall({"elasticity.enabled=true", "train_batch_size=auto"}),
            "--set elasticity.max_train_batch_size: "
            "missing; want the most sequences of a step\n"
            "--set elasticity.micro_batch_sizes: missing; "
            "want a list of what a rank may take in one pass, for example [1, "
            "2, 4]");
  EXPECT_EQ(ErrorOfText(kElastic, {"elasticity.micro_batch_sizes=[]"}),
            "--set elasticity.micro_batch_sizes: an empty list, want a list of "
            "whole numbers in [1, 1073741824]");
  EXPECT_EQ(ErrorOfText(kElastic, {"elasticity.micro_batch_sizes=[2, 0.5]"}),
            "--set elasticity.micro_batch_sizes: 0.5 is not a whole number, "
            "want a list of whole numbers in [1, 1073741824]");
  EXPECT_EQ(
      ErrorOfText(kElastic, {"elasticity.version=0.2"}),
      "--set elasticity.version: does not apply here: 0.2 changes the global "
      "batch with the number of nodes; 0.1 keeps it; delete it, or write 0.1");
}

TEST(LoadTest, AnElasticBatchTakesNoOtherUnlessToldToIgnoreIt) {
  EXPECT_EQ(ErrorOfText(kElastic, {"train_batch_size=7"}),
            "--set train_batch_size: 7, but elasticity.enabled (line 5) makes "
            "it 24; delete one, or set "
            "elasticity.ignore_non_elastic_batch_info");
  const auto loaded = LoadText(
      kElastic,
      {"train_batch_size=7", "elasticity.ignore_non_elastic_batch_info=true"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.train_batch_size, 24);
  EXPECT_EQ(loaded->notes.back(),
            "--set: train_batch_size is accepted and ignored: "
            "elasticity.ignore_non_elastic_batch_info is true");
}

TEST(LoadTest, WhereAutoIsNotTheTrainersANoteSaysSo) {
  const auto loaded =
      LoadSmall({"optimizer.params.lr=auto", "gradient_clipping=auto",
                 "bf16.enabled=auto", "fp16.enabled=auto"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(
      loaded->notes,
      std::vector<std::string>{
          "\"auto\" is zero's default, not that of Hugging Face's Trainer: "
          "optimizer.params.lr 0.001 (there 5e-05), gradient_clipping off "
          "(there 1.0), bf16.enabled false (there --bf16)"});
  EXPECT_TRUE(
      LoadSmall({"bf16.enabled=true", "fp16.enabled=auto"})->notes.empty());
  EXPECT_THAT(LoadSmall({"scheduler.type=WarmupLR",
                         "scheduler.params.warmup_num_steps=auto"})
                  ->notes,
              testing::Contains(testing::HasSubstr(
                  "scheduler.params.warmup_num_steps 1000 (there 0)")));
}

TEST(LoadTest, SizesThatNoMachineCountsAreErrorsAndNotOverflows) {
  const std::string huge = ErrorOfText(R"({
    "model": {"model_type": "llama", "hidden_size": 1048576,
              "num_hidden_layers": 1, "num_attention_heads": 65536,
              "head_dim": 65536, "intermediate_size": 4194304},
    "data": {"train": "text.txt", "sequence_length": 32},
    "training": {"steps": 20}, "train_batch_size": 8
  })");
  EXPECT_THAT(huge,
              testing::HasSubstr(
                  "model: 1.8e+16 parameters; this program counts up to"));
  EXPECT_THAT(ErrorOfSmall({"train_batch_size=auto",
                            "train_micro_batch_size_per_gpu=1073741824",
                            "gradient_accumulation_steps=1073741824"},
                           1024),
              testing::HasSubstr("is more than 2^30 sequences per step"));
  EXPECT_THAT(ErrorOfSmall({"model.n_layer=4096", "train_batch_size=1e9"}),
              testing::HasSubstr("tokens in one pass through 4096 layers"));
  for (const char* path :
       {"training.eval_batches", "scheduler.params.cycle_first_step_size",
        "scheduler.params.total_num_steps"}) {
    EXPECT_THAT(ErrorOfSmall({absl::StrCat(path, "=9e18")}),
                testing::HasSubstr(": 9e18 is not in ["));
  }
}

TEST(LoadTest, AutoAndExponentsAndCommentsAreUnderstood) {
  const auto loaded = LoadText(R"({
  // a comment
  "model": {"model_type": "llama", "hidden_size": 64, /* another */
            "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 1e2, "rope_scaling": null},
  "training": {"steps": 2e1},
  "train_batch_size": 8,
  "train_micro_batch_size_per_gpu": "auto",
  "optimizer": {"params": {"lr": "auto"}}
})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.training.steps, 20);
  EXPECT_EQ(loaded->config.model.intermediate_size, 100);
  EXPECT_EQ(loaded->config.optimizer.lr, 1e-3);
  EXPECT_EQ(loaded->config.data.sequence_length, 1024);
  EXPECT_EQ(loaded->config.model.max_position_embeddings, 2048);
}

TEST(LoadTest, HarmlessDeepSpeedKeysLeaveANote) {
  const auto loaded = LoadText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20},
  "train_batch_size": 8,
  "zero_optimization": {"stage": 0, "contiguous_gradients": true,
                        "overlap_comm": "auto", "mics_shard_size": -1},
  "amp": {"enabled": false},
  "prescale_gradients": false
})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_EQ(loaded->notes.size(), 1u);
  EXPECT_EQ(loaded->notes[0],
            "run.json:5: zero_optimization.contiguous_gradients is accepted "
            "and ignored: gradients are always written into one flat buffer");
}

TEST(LoadTest, TheVocabularyIsThatOfTheTokenizer) {
  TempDir dir;
  dir.Write("sp.model", "");
  LoadOptions options;
  options.missing_files = MissingFiles::kIgnored;
  options.overrides = {"data.tokenizer=" + dir.File("sp.model")};
  options.tokenizer_ids = [](const std::string&) { return int64_t{300}; };
  const auto loaded = ParseConfig(kSmallConfig, "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.model.vocab_size, 300);
  EXPECT_EQ(loaded->origins.at("model.vocab_size"),
            "derived: the ids of data.tokenizer");
  options.tokenizer_ids = [](const std::string&) {
    return absl::InvalidArgumentError("no SentencePiece model");
  };
  EXPECT_THAT(ParseConfig(kSmallConfig, "run.json", options).status().message(),
              testing::HasSubstr("data.tokenizer: no SentencePiece model"));
}

TEST(LoadTest, DeepSpeedValuesThatAskForNothingAreAccepted) {
  const std::string offload = "zero_optimization.offload_";
  for (const std::string& override : std::vector<std::string>{
           offload + R"(optimizer={"device": "none", "pin_memory": true})",
           offload + R"(param={"device": "none"})", offload + "param={}",
           offload + "param=null", "zero_optimization.cpu_offload=false",
           "scheduler.params.last_batch_iteration=-1"}) {
    EXPECT_EQ(ErrorOfSmall({override}), "no error");
  }
  EXPECT_THAT(ErrorOfSmall({"scheduler.params.last_batch_iteration=5"}),
              testing::HasSubstr("does not apply here"));
  for (const char* name : {"adamw", "AdamW", "ADAMW"}) {
    const auto loaded = LoadSmall({absl::StrCat("optimizer.type=", name)});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.optimizer.spec.kind, OptimizerKind::kAdamW);
  }
  EXPECT_THAT(ErrorOfSmall({"optimizer.type=onebitadam"}),
              testing::HasSubstr("not built yet"));
}

TEST(LoadTest, OffloadWantsAStageThatShards) {
  const std::string zero = "zero_optimization.";
  const std::string optimizer = zero + R"(offload_optimizer={"device": "cpu"})";
  const std::string param = zero + R"(offload_param={"device": "cpu"})";
  EXPECT_THAT(ErrorOfSmall({optimizer, zero + "stage=0"}),
              testing::HasSubstr("needs zero_optimization.stage 1, 2 or 3"));
  EXPECT_EQ(ErrorOfSmall({param, zero + "stage=0"}),
            "--set zero_optimization.offload_param.device: \"cpu\" needs "
            "zero_optimization.stage 3, but zero_optimization.stage (--set "
            "zero_optimization.stage) is 0, which offloads nothing; raise it, "
            "or set the device to none");
  EXPECT_THAT(
      ErrorOfSmall(
          {param, zero + "stage=3", zero + "offload_optimizer.device=none"}),
      testing::HasSubstr("also needs zero_optimization.offload_optimizer"));
  // DeepSpeed's offload_param is also for stage 3.
  const auto param_at_2 = LoadSmall({param, optimizer, zero + "stage=2"});
  ASSERT_TRUE(param_at_2.ok()) << param_at_2.status();
  EXPECT_EQ(param_at_2->config.zero_optimization.offload(),
            Offload::kOptimizer);
  EXPECT_THAT(param_at_2->notes,
              testing::Contains(testing::HasSubstr(
                  "offload_param.device is accepted and ignored: only "
                  "zero_optimization.stage 3")));
  // As in DeepSpeed's documentation, and in the old spelling.
  const auto today = LoadSmall(
      {zero + R"(offload_optimizer={"device": "cpu", "pin_memory": true,
                                    "buffer_count": 4, "fast_init": false,
                                    "ratio": 1.0, "pipeline_read": true})",
       zero + R"(offload_param={"device": "cpu", "buffer_size": 1e8,
                                "max_in_cpu": 1e9, "nvme_path": "/nvme"})",
       zero + "stage=3"});
  ASSERT_TRUE(today.ok()) << today.status();
  const auto old =
      LoadSmall({zero + "cpu_offload=true", zero + "cpu_offload_params=true",
                 zero + "stage=3"});
  ASSERT_TRUE(old.ok()) << old.status();
  for (const auto& loaded : {today, old}) {
    const ZeroConfig& config = loaded->config.zero_optimization;
    EXPECT_EQ(config.offload_optimizer, OffloadDevice::kCpu);
    EXPECT_EQ(config.offload_param, OffloadDevice::kCpu);
  }
}

TEST(LoadTest, TheOptimizerGoesWhereParametersGo) {
  const std::string zero = "zero_optimization.";
  const std::string why = ": the host updates the parameters that it keeps";
  const auto cpu =
      LoadSmall({zero + "offload_param.device=cpu", zero + "stage=3"});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  EXPECT_EQ(cpu->config.zero_optimization.offload_optimizer,
            OffloadDevice::kCpu);
  EXPECT_THAT(cpu->notes,
              testing::ElementsAre(
                  "--set: zero_optimization.offload_optimizer.device is "
                  "\"cpu\", too" +
                  why));
  const auto nvme = LoadSmall(
      {zero + R"(offload_param={"device": "nvme", "nvme_path": "/disk"})",
       zero + "stage=3"});
  ASSERT_TRUE(nvme.ok()) << nvme.status();
  const ZeroConfig& config = nvme->config.zero_optimization;
  EXPECT_EQ(config.offload_optimizer, OffloadDevice::kNvme);
  EXPECT_EQ(config.optimizer_nvme_path, "/disk");
}

TEST(LoadTest, ARatioIsAShareOfWhatTheDeviceCouldUpdateToo) {
  const std::string zero = "zero_optimization.";
  const std::string optimizer =
      zero + R"(offload_optimizer={"device": "cpu", "ratio": 0.3})";
  const auto loaded = LoadSmall({optimizer, zero + "stage=3"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.zero_optimization.offload_optimizer_ratio, 0.3);
  EXPECT_TRUE(LoadSmall({zero + R"(offload_optimizer={"device": "nvme",
                                   "nvme_path": "/nvme", "ratio": 0.3})",
                         zero + "stage=1"})
                  .ok());
  EXPECT_THAT(
      ErrorOfSmall(
          {optimizer, zero + "offload_param.device=cpu", zero + "stage=3"}),
      testing::HasSubstr("the host updates all the parameters that it keeps"));
  EXPECT_THAT(
      ErrorOfSmall({optimizer, zero + "stage=2",
                    zero + "offload_optimizer.delayed_update.enabled=true"}),
      testing::HasSubstr("results would depend on the ratio"));
  for (const char* ratio : {"0", "1.5"}) {
    EXPECT_THAT(
        ErrorOfSmall({absl::StrCat(zero, "offload_optimizer.ratio=", ratio)}),
        testing::HasSubstr("is not in (0, 1]"));
  }
}

TEST(LoadTest, ADelayedUpdateIsOneOfTheHost) {
  const std::string zero = "zero_optimization.";
  const std::string enabled =
      zero + "offload_optimizer.delayed_update.enabled=true";
  EXPECT_THAT(ErrorOfSmall({enabled, zero + "stage=2"}),
              testing::HasSubstr("set it to cpu, or delete this key"));
  const std::string device = zero + "offload_optimizer.device=cpu";
  EXPECT_THAT(ErrorOfSmall({enabled, device, zero + "stage=0"}),
              testing::HasSubstr("needs zero_optimization.stage 1, 2 or 3"));
  EXPECT_THAT(
      ErrorOfSmall({zero + "offload_optimizer.delayed_update.warmup_steps=-1"}),
      testing::HasSubstr("-1 is not in [0, "));
  const auto loaded = LoadSmall({zero + R"(offload_optimizer={"device": "cpu",
                                    "delayed_update": {"enabled": true}})",
                                 zero + "stage=2"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const ZeroConfig& config = loaded->config.zero_optimization;
  EXPECT_FALSE(config.DelaysUpdateOf(39));
  EXPECT_TRUE(config.DelaysUpdateOf(40));
}

TEST(LoadTest, AnUpdateBeforeTheNormNeedsNoNorm) {
  const std::string zero = "zero_optimization.";
  const std::vector<std::string> sets = {
      zero + R"(offload_optimizer={"device": "cpu",
                                   "update_before_norm": true})",
      zero + "stage=3", "gradient_clipping=0"};
  const auto loaded = LoadSmall(sets);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->config.zero_optimization.update_before_norm);
  const std::pair<std::string, std::string> kCases[] = {
      {"gradient_clipping=0.5", "is 0.5: clipping needs the norm of all"},
      {"fp16.enabled=true", "a step that overflows has to be skipped"},
      {"optimizer.type=Lamb", "it needs norms of whole parameters first"},
      {zero + "offload_optimizer.delayed_update.enabled=true",
       "its update runs during the next step"},
      {zero + R"(offload_optimizer={"device": "nvme", "nvme_path": "/disk",
                                    "update_before_norm": true})",
       "states on a disk are read in the order of the next forward"},
      {zero + R"(offload_param={"device": "nvme", "nvme_path": "/disk"})",
       "offload_param) is \"nvme\": states on a disk"}};
  for (const auto& [set, reason] : kCases) {
    std::vector<std::string> all = sets;
    all.push_back(set);
    EXPECT_THAT(ErrorOfSmall(all), testing::HasSubstr(reason));
  }
}

TEST(LoadTest, StatesOnADiskWantAFolder) {
  const std::string zero = "zero_optimization.";
  const std::string optimizer =
      zero + R"(offload_optimizer={"device": "nvme", "nvme_path": "/nvme",
                                   "buffer_count": 4, "pipeline_read": true})";
  const auto loaded = LoadSmall(
      {optimizer, zero + "stage=3",
       zero + R"(offload_param={"device": "nvme", "nvme_path": "/nvme",
                                "buffer_size": 1e8, "max_in_cpu": 1e9})",
       R"(aio={"block_size": 262144, "queue_depth": 32, "thread_count": 2,
               "single_submit": true, "overlap_events": false,
               "use_gds": false})"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Config& config = loaded->config;
  EXPECT_EQ(config.zero_optimization.offload(), Offload::kAll);
  EXPECT_TRUE(config.zero_optimization.uses_nvme());
  EXPECT_EQ(config.zero_optimization.nvme_path(), "/nvme");
  EXPECT_EQ(config.aio,
            (AioConfig{262144, 32, 2, true, false, /*checksums=*/true}));
  EXPECT_THAT(ErrorOfSmall({zero + R"(offload_optimizer={"device": "nvme"})",
                            zero + "stage=1"}),
              testing::StartsWith("--set zero_optimization.offload_optimizer."
                                  "nvme_path: device \"nvme\" needs a folder"));
  EXPECT_THAT(ErrorOfSmall({optimizer, zero + "stage=3",
                            zero + R"(offload_param={"device": "nvme",
                                             "nvme_path": "/other"})"}),
              testing::HasSubstr("is \"/nvme\"; a rank has one file"));
  EXPECT_THAT(ErrorOfSmall({optimizer, zero + "stage=0"}),
              testing::HasSubstr("\"nvme\" needs zero_optimization.stage 1"));
  EXPECT_THAT(
      ErrorOfSmall({optimizer, zero + "stage=1", "aio.block_size=5000"}),
      testing::HasSubstr("5000 is not a multiple of 4096"));
  EXPECT_THAT(ErrorOfSmall({optimizer, zero + "stage=1", "aio.use_gds=true"}),
              testing::HasSubstr("states on a disk pass through the host"));
  EXPECT_THAT(
      ErrorOfSmall({optimizer, zero + "stage=1",
                    zero + "offload_optimizer.delayed_update.enabled=true"}),
      testing::HasSubstr("does not go with device \"nvme\": the host would "
                         "have to keep new parameters"));
  // Without such a device nothing reads them.
  const auto none = LoadSmall({"aio.block_size=auto", "aio.queue_depth=4"});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->config.aio, AioConfig());
}

// A past bug: in range as doubles, they later became 1, 0 or infinity.
TEST(LoadTest, NumbersThatLeaveTheirRangeInFp32AreErrors) {
  EXPECT_EQ(
      ErrorOfSmall({"optimizer.params.betas=[0.99999999999, 0.9]"}),
      "--set optimizer.params.betas: 0.99999999999 is 1.0 in fp32, want a "
      "list of two numbers in [0, 1)");
  for (const char* override :
       {"optimizer.params.eps=1e-300", "model.initializer_range=1e300",
        "fp16.loss_scale=1e300", "gradient_clipping=1e-320",
        "optimizer.params.lr=1e-60"}) {
    EXPECT_THAT(ErrorOfSmall({override}), testing::HasSubstr(" in fp32, want"))
        << override;
  }
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.eps=1e-20", "gradient_clipping=0"}),
            "no error");
}

TEST(LoadTest, WhatALaterVersionBuildsIsUnimplemented) {
  const auto zenflow = LoadText(R"({
  "zero_optimization": {"zenflow": {}}
})");
  EXPECT_EQ(zenflow.status().code(), absl::StatusCode::kUnimplemented);
  // Parameters of an unbuilt type are not a second error.
  EXPECT_EQ(ErrorOfSmall({R"(optimizer={"type": "OneBitAdam",
                       "params": {"freeze_step": 9, "cuda_aware": false}})"}),
            "--set optimizer.type: \"OneBitAdam\" is not built yet: write "
            "AdamW, Adam, SGD or Lamb");
}

TEST(LoadTest, ParametersOfAnUnknownTypeAreNotASecondError) {
  EXPECT_EQ(ErrorOfSmall({R"(optimizer={"type": "Adafactor",
                             "params": {"clip_threshold": 1}})"}),
            "--set optimizer.type: \"Adafactor\" is not one of "
            "AdamW, Adam, SGD, Lamb");
  EXPECT_EQ(ErrorOfSmall({R"(optimizer={"type": "auto",
                             "params": {"momemtum": 1}})"}),
            "--set optimizer.params.momemtum: unknown key; did you "
            "mean \"momentum\"?");
}

TEST(LoadTest, ARefusedKeyBringsItsRemedy) {
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kRefused &&
        key.treatment != Treatment::kNotBuilt) {
      continue;
    }
    EXPECT_TRUE(absl::StrContains(key.doc, "write ") ||
                absl::StrContains(key.doc, "; delete it") ||
                absl::StrContains(key.doc, " is accepted"))
        << key.path << ": " << key.doc;
  }
  EXPECT_EQ(
      ErrorOfText(R"({"zero_optimization": {"zenflow": {}},
  "curriculum_learning": {"enabled": true}})"),
      "run.json:1:24: zero_optimization.zenflow: not built yet: the "
      "host would update most parameters with gradients that are several "
      "steps old; delete it\n"
      "run.json:2:3: curriculum_learning: does not apply here: all sequences "
      "have the same length; delete it, or write enabled: false");
}

TEST(LoadTest, WhatChangesNoResultIsNotedUnlessItAsksForNothing) {
  const auto loaded = LoadText(R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "training": {"steps": 20}, "train_batch_size": 8,
  "prescale_gradients": false, "gradient_predivide_factor": 1.0,
  "flops_profiler": {"enabled": false}, "comms_logger": {"enabled": "auto"},
  "activation_checkpointing": {"partition_activations": true},
  "tensorboard": {"enabled": true}, "communication_data_type": "bfp16",
  "zero_optimization": {"stage": 3, "reduce_bucket_size": 0,
                        "stage3_prefetch_bucket_size": 3686.4}
})");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->notes,
            std::vector<std::string>{
                "run.json:6: activation_checkpointing.partition_activations is "
                "accepted and ignored: it divides activations over "
                "tensor-parallel ranks, which do not exist here"});
  EXPECT_TRUE(loaded->config.training.tensorboard);
  EXPECT_EQ(loaded->config.communication_data_type, DType::kBF16);
  EXPECT_EQ(loaded->config.zero_optimization.stage3_prefetch_bucket_size, 3686);
}

TEST(LoadTest, IndependentErrorsAreReportedTogetherInOrder) {
  const std::string errors = ErrorOfText(R"({
  "modle": {},
  "training": {"stpes": 20, "seed": -1},
  "bf16": {"enabled": 1}
})");
  EXPECT_EQ(errors,
            "run.json:2:3: modle: unknown key; did you mean \"model\"?\n"
            "run.json:3:16: training.stpes: unknown key; did you mean "
            "\"steps\"?\n"
            "run.json:3:37: training.seed: -1 is not >= 0\n"
            "run.json:4:23: bf16.enabled: 1 is a number, want true or false");
}

TEST(LoadTest, AFileOfDataIsAnsweredWithThePlaceForIt) {
  const std::string lines = "{\"text\": \"a\"}\n{\"text\": \"b\"}\n";
  for (const std::string& text : {lines, std::string(1 << 20, ' ') + lines}) {
    EXPECT_THAT(
        std::string(ParseConfig(text, "x.jsonl", {}).status().message()),
        testing::EndsWith("; if this is data, name it as data.train in a JSON "
                          "config, such as configs/gpt2_tiny.json"));
  }
  // A config with a mistake is not mistaken for data.
  EXPECT_EQ(ErrorOfText("{\"model\": 1 2}"),
            "run.json:1:13: found '2' after a value, want , or }");
}

TEST(LoadTest, UnknownKeysNameTheNearestWhereverItIs) {
  EXPECT_EQ(ErrorOfSmall({"lr=1"}),
            "--set lr: unknown key; did you mean \"optimizer.params.lr\"?");
  EXPECT_EQ(ErrorOfSmall({"max_steps=1"}),
            "--set max_steps: unknown key; did you mean \"training.steps\"?");
  EXPECT_EQ(ErrorOfSmall({"find_unused_parameters=true"}),
            "--set find_unused_parameters: unknown key; did you mean "
            "\"zero_optimization.ignore_unused_parameters\"?");
  EXPECT_EQ(ErrorOfSmall({"batch_size=1"}),
            "--set batch_size: unknown key; did you mean "
            "\"train_batch_size\"?");
  EXPECT_EQ(ErrorOfSmall({"data.xyzzyxyzzy=1"}),
            "--set data.xyzzyxyzzy: unknown key; known here:\n"
            "    train, validation, validation_fraction, format, tokenizer, "
            "sequence_length,\n"
            "    reset_attention_mask, eos_token_id");
  // The list is long: once for each object.
  EXPECT_THAT(ErrorOfSmall({"data.xyzzyxyzzy=1", "data.plughplugh=1"}),
              testing::EndsWith("\n--set data.plughplugh: unknown key"));
  // Other programs' names for the same.
  for (const char* name :
       {"reset_position_ids", "reset-attention-mask", "eod_mask_loss",
        "packing", "packed", "attn_mask_type",
        "block_cross_document_attention"}) {
    EXPECT_THAT(ErrorOfSmall({absl::StrCat("data.", name, "=true")}),
                testing::HasSubstr("reset_attention_mask\"?"));
  }
  EXPECT_THAT(ErrorOfSmall({"data.eod_token_id=1"}),
              testing::HasSubstr("eos_token_id\"?"));
  EXPECT_EQ(ErrorOfText(R"({"training.steps": 3})"),
            "run.json:1:2: training.steps: unknown key; in a file, write one "
            "object per dot");
}

TEST(LoadTest, NamesOfTrainingArgumentsLeadToTheKeyThatDoesTheSame) {
  const std::pair<const char*, const char*> kKeys[] = {
      {"logging_steps", "steps_per_print"},
      {"optimizer.params.warmup_ratio", "scheduler.params.warmup_num_steps"},
      {"lr_scheduler_type", "scheduler.type"},
      {"lr_scheduler_kwargs", "scheduler.params"},
      {"optim", "optimizer.type"},
      {"adam_beta2", "optimizer.params.betas"},
      {"adam_epsilon", "optimizer.params.eps"},
      {"warmup_ratio", "scheduler.params.warmup_num_steps"},
      {"save_strategy", "training.save_every"},
      {"eval_strategy", "training.eval_every"},
      {"report_to", "training.tensorboard"},
      {"deepspeed", "at the top of this config"},
      {"fsdp", "zero_optimization.stage"},
  };
  for (const auto& [theirs, ours] : kKeys) {
    const std::string error = ErrorOfSmall({absl::StrCat(theirs, "=0.5")});
    EXPECT_THAT(error, testing::HasSubstr(ours));
    EXPECT_THAT(error, testing::Not(testing::HasSubstr("known here")));
  }
  const auto loaded =
      LoadSmall({"torch_compile=true", "dataloader_num_workers=4"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->notes.size(), 2u);
}

TEST(LoadTest, OtherProgramsNamesOfHyperparametersGetThoseOfEachFamily) {
  for (const char* name : {"num_layers", "n_layers", "depth"}) {
    EXPECT_EQ(ErrorOfSmall({absl::StrCat("model.", name, "=2")}),
              absl::StrCat("--set model.", name,
                           ": unknown key; did you mean \"model.n_layer\" "
                           "(model_type gpt2) or \"model.num_hidden_layers\" "
                           "(other families)?"));
  }
  const auto error = [](const std::string& name) {
    return ErrorOfSmall({absl::StrCat("model.", name, "=2")});
  };
  for (const char* name : {"hidden_dim", "n_embed", "d_model"}) {
    EXPECT_THAT(error(name), testing::HasSubstr("\"model.n_embd\"")) << name;
    EXPECT_THAT(error(name), testing::HasSubstr("\"model.hidden_size\""));
  }
  EXPECT_THAT(error("num_heads"), testing::HasSubstr("\"model.n_head\""));
  EXPECT_THAT(error("ffn_dim"),
              testing::HasSubstr("\"model.intermediate_size\""));
  EXPECT_THAT(error("num_kv_heads"),
              testing::HasSubstr("mean \"model.num_key_value_heads\"?"));
}

TEST(LoadTest, EveryNameThatAnUnknownKeyIsToldIsAKey) {
  for (const char* name :
       {"num_layers", "d_model", "num_heads", "ffn_dim", "max_seq_len",
        "norm_eps", "activation", "n_vocab", "num_kv_heads", "tie_weights"}) {
    const std::vector<std::string> parts =
        absl::StrSplit(NearestKey("model", name), '"');
    ASSERT_GE(parts.size(), 3u) << name;
    for (size_t i = 1; i < parts.size(); i += 2) {
      EXPECT_NE(FindKey(parts[i]), nullptr) << name << ": " << parts[i];
    }
  }
}

TEST(LoadTest, AValueInPlaceOfAnObjectGetsTheObjectThatHoldsIt) {
  const auto error = [](const std::string& text) {
    return ErrorOfSmall({text});
  };
  EXPECT_EQ(
      error("optimizer=adamw"),
      "--set optimizer: \"adamw\" is a string, want an object: {\"type\": "
      "\"AdamW\"}. The update rule; moments and master weights are fp32.");
  EXPECT_THAT(error("model=gpt2"),
              testing::HasSubstr("want an object: {\"preset\": \"gpt2\"}."));
  EXPECT_THAT(error("data=my.txt"),
              testing::HasSubstr("want an object: {\"train\": [\"my.txt\"]}."));
  EXPECT_THAT(error("bf16=true"),
              testing::HasSubstr("want an object: {\"enabled\": true}."));
  EXPECT_THAT(error("zero_optimization=3"),
              testing::HasSubstr("want an object: {\"stage\": 3}."));
  // A value that the first key does not take.
  EXPECT_THAT(error("scheduler=7"),
              testing::HasSubstr("want an object: {\"type\": \"Constant\"}."));
  EXPECT_THAT(error("model=7"), testing::HasSubstr("want an object: { ... }."));
}

// A config that DeepSpeed reads has no model, data and length.
TEST(LoadTest, RequiredKeysThatAreMissingAreReportedAtOnceWithAnExample) {
  const std::string deepspeed = R"({
  "zero_optimization": {"stage": 2},
  "train_batch_size": 8
})";
  LoadOptions options;
  const auto loaded = ParseConfig(deepspeed, "ds.json", options);
  ASSERT_FALSE(loaded.ok());
  const std::string error(loaded.status().message());
  EXPECT_EQ(error,
            "ds.json:1:1: missing: model.preset (or model.from_pretrained, or "
            "model.model_type), data.train, training.steps (or "
            "training.epochs); add them, for example after the first {:\n"
            "  \"model\": {\"preset\": \"gpt2\"},\n"
            "  \"data\": {\"train\": \"my_text.txt\"},\n"
            "  \"training\": {\"steps\": 1000},");
  // Pasted, only what this test lacks is wrong: models, and the file.
  const std::string example = error.substr(error.find(":\n") + 1);
  EXPECT_EQ(ErrorOfText("{" + example + deepspeed.substr(1)),
            "run.json:2:23: model.preset: no models are known to this program");
  EXPECT_EQ(ErrorOfText(
                "{" + example + deepspeed.substr(1),
                {"model.preset=null", "model.model_type=llama",
                 "model.hidden_size=64", "model.num_hidden_layers=2",
                 "model.num_attention_heads=2", "model.intermediate_size=64"}),
            "no error");
  EXPECT_EQ(ErrorOfText("{}"),
            "run.json:1:1: missing: model.preset (or model.from_pretrained, or "
            "model.model_type), training.steps (or training.epochs), "
            "train_batch_size (or train_micro_batch_size_per_gpu); add them, "
            "for example after the first {:\n"
            "  \"model\": {\"preset\": \"gpt2\"},\n"
            "  \"training\": {\"steps\": 1000},\n"
            "  \"train_batch_size\": 8");
}

// ---- Overrides ------------------------------------------------------------

TEST(SetTest, ValuesAreJsonOrBareStrings) {
  const auto loaded = LoadSmall(
      {"optimizer.params.betas=[0.8, 0.9]", "bf16.enabled=true",
       "data.train=other.txt", "training.sample.prompt=12",
       "training.sample.temperature=0", "optimizer={\"params\":{\"lr\":0.5}}",
       "training.steps=3", "training.steps=4"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Config& c = loaded->config;
  EXPECT_EQ(c.optimizer.spec.beta1, 0.9)
      << "a later object replaces an earlier";
  EXPECT_EQ(c.optimizer.lr, 0.5);
  EXPECT_TRUE(c.bf16);
  EXPECT_EQ(c.param_dtype(), DType::kBF16);
  EXPECT_EQ(c.data.train, std::vector<std::string>{"other.txt"});
  EXPECT_EQ(c.training.sample.prompt, "12");
  EXPECT_EQ(c.training.steps, 4);
}

TEST(SetTest, AListOfNumbersNeedsNoBrackets) {
  const auto loaded = LoadSmall(
      {"optimizer.params.betas=0.8,0.9", "elasticity.micro_batch_sizes=2, 4",
       "elasticity.max_train_batch_size=8", "elasticity.enabled=true",
       "train_batch_size=auto"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.optimizer.spec.beta1, 0.8);
  EXPECT_EQ(loaded->config.optimizer.spec.beta2, 0.9);
  EXPECT_EQ(loaded->config.elasticity.micro_batch_sizes,
            (std::vector<int64_t>{2, 4}));
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.betas=0.8,0.9,1"}),
            "--set optimizer.params.betas: a list of 3, want a list of two "
            "numbers in [0, 1)");
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.betas=0.8,x"}),
            "--set optimizer.params.betas: found 'x', want a value");
}

TEST(SetTest, AutoTakesAKeyBack) {
  const auto loaded = LoadSmall({"training.steps=auto", "training.epochs=1.5"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.training.steps, 0);
  EXPECT_EQ(loaded->config.training.epochs, 1.5);
}

TEST(SetTest, EmptyThingsAreNamed) {
  EXPECT_EQ(ErrorOfSmall({"=5"}),
            "--set =5: want KEY=VALUE, for example training.steps=100");
  EXPECT_EQ(ErrorOfSmall({"data.train=[]"}),
            "--set data.train: an empty list, want a path, a glob or a list "
            "of them");
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.betas=[0.9]"}),
            "--set optimizer.params.betas: a list of 1, want a list of two "
            "numbers in [0, 1)");
}

TEST(SetTest, ErrorsNameTheOverride) {
  EXPECT_EQ(ErrorOfSmall({"training.steps"}),
            "--set training.steps: want KEY=VALUE, for example "
            "training.steps=100");
  EXPECT_EQ(ErrorOfSmall({"training..steps=3"}),
            "--set training..steps: want KEY=VALUE, for example "
            "training.steps=100");
  EXPECT_EQ(ErrorOfSmall({"train_batch_size.x=3"}),
            "--set train_batch_size.x: \"train_batch_size\" is a number, not "
            "an object with keys");
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.betas=[0.8,"}),
            "--set optimizer.params.betas: the text ends inside the array "
            "that was opened at 1:1; want a closing ]");
  EXPECT_EQ(ErrorOfSmall({"optimizer={\"params\": {\"lr\": 0}}"}),
            "--set optimizer.params.lr: 0 is not > 0");
  EXPECT_EQ(ErrorOfSmall({"training.steps=ten"}),
            "--set training.steps: \"ten\" is a string, want a whole number "
            "in [1, 1000000000000]");
  // A past bug: "" and "1e999" were taken for strings.
  EXPECT_EQ(ErrorOfSmall({"data.train="}),
            "--set data.train: nothing follows the =, want a path, a glob or a "
            "list of them");
  EXPECT_EQ(
      ErrorOfSmall({"optimizer.params.lr="}),
      "--set optimizer.params.lr: nothing follows the =, want a number > 0");
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.lr=1e999"}),
            "--set optimizer.params.lr: 1e999 does not fit in a 64-bit float");
  EXPECT_EQ(ErrorOfSmall({"training.steps=10k"}),
            "--set training.steps: '10k' is not a JSON number");
  EXPECT_EQ(ErrorOfSmall({"data.train=\"\""}),
            "--set data.train: empty, want a path, a glob or a list of them");
  EXPECT_EQ(ErrorOfSmall({"data.tokenizer=", "model.vocab_size=300"}),
            "--set data.tokenizer: empty; want \"bytes\", \"none\" or the path "
            "of a tokenizer.json, of a SentencePiece model or of a folder with "
            "one");
}

// ---- Contradictions -------------------------------------------------------

TEST(ContradictionTest, TwoPrecisionsAreRefused) {
  EXPECT_EQ(ErrorOfSmall({"bf16.enabled=true", "fp16.enabled=true"}),
            "--set fp16.enabled: true, and so is bf16.enabled (--set "
            "bf16.enabled); choose one");
}

TEST(ContradictionTest, GroupsMustFitTheRanks) {
  const std::string size = "zero_optimization.mics_shard_size";
  const std::string stage_2 = "zero_optimization.stage=2";
  EXPECT_EQ(ErrorOfSmall({size + "=2"}, 4),
            "--set zero_optimization.mics_shard_size: 2, but "
            "zero_optimization.stage is 0 and shards nothing; delete it, or "
            "raise the stage");
  EXPECT_EQ(ErrorOfSmall({size + "=3", stage_2}, 4),
            "--set zero_optimization.mics_shard_size: 3 does not divide the 4 "
            "ranks; want one of 1, 2, 4");
  EXPECT_EQ(ErrorOfSmall({size + "=8", stage_2}, 4),
            "--set zero_optimization.mics_shard_size: 8 does not divide the 4 "
            "ranks; want one of 1, 2, 4");
  EXPECT_EQ(ErrorOfSmall({size + "=0", stage_2}, 4),
            "--set zero_optimization.mics_shard_size: 0 ranks cannot share "
            "anything; want -1 (off) or a divisor of the number of ranks");
  EXPECT_EQ(ErrorOfSmall({size + "=-2", stage_2}, 4),
            "--set zero_optimization.mics_shard_size: -2 is not in [-1, 1024]");
  for (int shards : {-1, 1, 2, 4}) {
    const auto loaded =
        LoadSmall({absl::StrCat(size, "=", shards), stage_2}, 4);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.zero_optimization.shards(4),
              shards == -1 ? 4 : shards);
  }
  // One rank reads the config of a run on several: zero eval.
  const auto alone = LoadSmall({size + "=2", stage_2}, 1);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->config.zero_optimization.shards(1), 1);
}

TEST(LoadTest, GroupsThatAreHosts) {
  const std::string size = "zero_optimization.mics_shard_size";
  const std::string key = size + "=auto", stage = "zero_optimization.stage=2";
  const struct {
    std::vector<std::string> overrides;
    int of_launcher;
    int64_t want;
    std::string note;
  } kCases[] = {
      {{key, stage},
       2,
       2,
       "2 groups of the 2 ranks that the launcher started on this host"},
      {{key, stage, "communication.ranks_per_host=2"},
       0,
       2,
       "2 groups of the 2 ranks of communication.ranks_per_host"},
      {{key, stage, "communication.ranks_per_host=2"},
       4,
       2,
       "2 groups of the 2 ranks of communication.ranks_per_host"},
      {{key, stage},
       0,
       -1,
       "one group of all 4 ranks, as all ranks are on one host"},
      {{key, stage},
       4,
       -1,
       "one group of all 4 ranks, as all ranks are on one host"},
      {{key, stage},
       1,
       -1,
       "one group of all 4 ranks, as each host has one rank, which has no "
       "other to share with"},
      {{key},
       2,
       -1,
       "one group of all 4 ranks, as zero_optimization.stage 0 shards nothing"},
  };
  for (const auto& one : kCases) {
    const auto loaded = LoadSmall(one.overrides, 4, one.of_launcher);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.zero_optimization.mics_shard_size, one.want);
    EXPECT_THAT(loaded->notes, testing::Contains(size + " auto: " + one.note));
  }
  EXPECT_EQ(
      LoadSmall({key, stage, "train_batch_size=6"}, 6, 4).status().message(),
      "--set zero_optimization.mics_shard_size: auto: the 4 ranks that the "
      "launcher started on this host do not divide the 6; want the same number "
      "on each host, or name a number");
  // One rank has no groups, and null asks for none.
  EXPECT_TRUE(LoadSmall({key, stage}, 1)->notes.empty());
  EXPECT_TRUE(LoadSmall({size + "=null", stage}, 4, 2)->notes.empty());
}

TEST(ContradictionTest, AServerMustNotShard) {
  const std::string server = "communication.algorithm=parameter_server";
  for (int stage : {1, 2, 3}) {
    EXPECT_EQ(
        ErrorOfSmall({server, absl::StrCat("zero_optimization.stage=", stage)},
                     4),
        absl::StrCat("--set communication.algorithm: \"parameter_server\" "
                     "keeps the whole optimizer on rank 0, but "
                     "zero_optimization.stage (--set zero_optimization.stage) "
                     "is ",
                     stage, " and shards it; want stage 0, or direct or ring"));
  }
  EXPECT_THAT(ErrorOfSmall({server, "zero_optimization.mics_shard_size=2"}, 4),
              testing::HasSubstr("mics_shard_size: 2, but "
                                 "zero_optimization.stage is 0 and shards "
                                 "nothing"));
  EXPECT_EQ(ErrorOfSmall({"communication.algorithm=tree"}),
            "--set communication.algorithm: \"tree\" is not one of direct, "
            "ring, parameter_server, hierarchical");
  for (const char* algorithm :
       {"direct", "ring", "parameter_server", "hierarchical"}) {
    EXPECT_TRUE(
        LoadSmall({absl::StrCat("communication.algorithm=", algorithm)}, 4)
            .ok());
  }
}

TEST(ContradictionTest, AFactorMustNotNameRanksThatAreNotSlow) {
  for (const char* factor : {"0.5", "1.0"}) {
    EXPECT_EQ(
        ErrorOfSmall({absl::StrCat("communication.straggler_factor=", factor)}),
        absl::StrCat("--set communication.straggler_factor: ", factor,
                     " would name ranks that are no slower than the others; "
                     "want more than 1, or 0 for none"));
  }
  EXPECT_TRUE(LoadSmall({"communication.straggler_factor=0"}).ok());
  EXPECT_TRUE(LoadSmall({"communication.straggler_factor=1.1"}).ok());
}

TEST(ContradictionTest, HostsMustBeAlike) {
  const std::string hosts = "communication.algorithm=hierarchical";
  EXPECT_EQ(ErrorOfSmall({hosts, "communication.ranks_per_host=3"}, 4),
            "--set communication.ranks_per_host: 3 does not divide the 4 "
            "ranks; want the same number on each host");
  EXPECT_TRUE(LoadSmall({hosts, "communication.ranks_per_host=2"}, 4).ok());
}

TEST(ContradictionTest, WhatABackendDecidesItselfIsRefused) {
  const std::string nccl = "communication.backend=nccl";
  EXPECT_EQ(ErrorOfSmall({nccl, "communication.algorithm=hierarchical"}, 4),
            "--set communication.backend: \"nccl\" knows the hosts itself, but "
            "communication.algorithm (--set communication.algorithm) is "
            "\"hierarchical\"; want direct");
  EXPECT_EQ(ErrorOfSmall({nccl, "communication.algorithm=ring"}, 4),
            "--set communication.backend: \"nccl\" chooses its rings and trees "
            "itself, but communication.algorithm (--set "
            "communication.algorithm) is \"ring\"; want direct, or backend "
            "local");
  EXPECT_EQ(ErrorOfSmall({nccl, "communication.algorithm=parameter_server",
                          "communication_data_type=bf16"},
                         4),
            "--set communication.backend: \"nccl\" would round the sums of a "
            "parameter server at every hop, for communication_data_type (--set "
            "communication_data_type) is bf16; want fp32, or backend local");
  EXPECT_EQ(
      ErrorOfSmall(
          {"communication.backend=mpi", "communication.algorithm=ring"}, 4),
      "--set communication.backend: \"mpi\" sums in rank order, but "
      "communication.algorithm (--set communication.algorithm) is "
      "\"ring\"; want direct, or backend local");
  EXPECT_THAT(
      ErrorOfSmall({"communication.backend=gloo"}),
      testing::HasSubstr("--set communication.backend: \"gloo\" is not one of "
                         "auto, local, "));
  for (const char* backend : {"auto", "local", "mpi", "nccl"}) {
    EXPECT_TRUE(
        LoadSmall({absl::StrCat("communication.backend=", backend)}, 4).ok());
  }
}

TEST(ContradictionTest, StepsExcludeEpochs) {
  EXPECT_EQ(ErrorOfSmall({"training.epochs=2"}),
            "--set training.epochs: training.steps (line 4) also says how "
            "long; delete one, or set it to \"auto\"");
  EXPECT_EQ(ErrorOfSmall({"training.steps=auto"}),
            "--set training.steps: missing; want training.steps or "
            "training.epochs");
}

TEST(ContradictionTest, TwoWarmUpsAreRefused) {
  EXPECT_EQ(
      ErrorOfSmall({"lr_scaling.base_batch_size=4", "scheduler.type=WarmupLR",
                    "scheduler.params.warmup_num_steps=10"}),
      "--set scheduler.params.warmup_num_steps: a second warm-up: lr_scaling "
      "warms up to the scaled rate and the scheduler continues from there; "
      "delete this key or lr_scaling");
  EXPECT_EQ(
      ErrorOfSmall({"lr_scaling.base_batch_size=4", "scheduler.type=OneCycle"}),
      "--set scheduler.type: \"OneCycle\" has a warm-up of its own and "
      "sets its own rates; delete it or lr_scaling");
}

TEST(ContradictionTest, LrScalingMustNotContradictItself) {
  EXPECT_EQ(ErrorOfSmall({"lr_scaling.rule=linear"}),
            "--set lr_scaling.base_batch_size: missing; "
            "want the batch size for which optimizer.params.lr was chosen");
  EXPECT_EQ(
      ErrorOfSmall({"lr_scaling.rule=none", "lr_scaling.base_batch_size=4"}),
      "--set lr_scaling.base_batch_size: lr_scaling.rule (--set "
      "lr_scaling.rule) is \"none\" and does not use it; delete one");
  EXPECT_EQ(ErrorOfSmall({"lr_scaling.warmup_steps=4"}),
            "--set lr_scaling.warmup_steps: lr_scaling.rule is \"none\", so "
            "there is no scaled rate to warm up to; give "
            "lr_scaling.base_batch_size, or a scheduler that warms up");
  EXPECT_EQ(
      ErrorOfSmall({"lr_scaling.base_batch_size=4", "lr_scaling.warmup_steps=4",
                    "lr_scaling.warmup_epochs=1"}),
      "--set lr_scaling.warmup_epochs: lr_scaling.warmup_steps (--set "
      "lr_scaling.warmup_steps) says it too; delete one");
}

TEST(ContradictionTest, HeadsMustDivide) {
  EXPECT_EQ(ErrorOfSmall({"model.n_head=5"}),
            "--set model.n_head: 5 does not divide model.n_embd (line 2) = "
            "64");
  const std::string llama =
      R"({"model": {"model_type": "llama", "hidden_size": 48,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 3,
  "intermediate_size": 64}, "training": {"steps": 1}, "train_batch_size": 1})";
  EXPECT_EQ(ErrorOfText(llama),
            "run.json:2:76: model.num_key_value_heads: 3 does not divide "
            "model.num_attention_heads (line 2) = 4");
  EXPECT_EQ(
      ErrorOfText(llama, {"model.num_key_value_heads=2", "model.head_dim=7"}),
      "--set model.head_dim: 7 is odd; rotary embeddings rotate pairs");
}

TEST(ContradictionTest, KeysOfAnotherFamilyOptimizerOrSchedulerAreRefused) {
  EXPECT_EQ(ErrorOfSmall({"model.hidden_size=64"}),
            "--set model.hidden_size: a gpt2 model calls this \"n_embd\"");
  EXPECT_EQ(ErrorOfSmall({"model.rope_theta=1e4"}),
            "--set model.rope_theta: belongs to model_type llama, qwen2, "
            "qwen3; this is a gpt2 model");
  EXPECT_EQ(ErrorOfSmall({"optimizer.params.momentum=0.9"}),
            "--set optimizer.params.momentum: belongs to optimizer.type SGD; "
            "optimizer.type is \"AdamW\"");
  EXPECT_EQ(ErrorOfSmall({"scheduler.type=WarmupLR",
                          "scheduler.params.cos_min_ratio=0.1"}),
            "--set scheduler.params.cos_min_ratio: belongs to scheduler.type "
            "WarmupCosineLR; scheduler.type is \"WarmupLR\"");
  EXPECT_EQ(ErrorOfText(R"({"model": {"model_type": "llama", "n_embd": 8},
                            "training": {"steps": 1}})"),
            "run.json:1:45: model.n_embd: a llama model calls this "
            "\"hidden_size\"");
}

TEST(ContradictionTest, MoreTokensThanPositionsAreRefused) {
  EXPECT_EQ(ErrorOfSmall({"model.n_positions=16"}),
            "run.json:3:52: data.sequence_length: 32 is more than "
            "model.n_positions (--set model.n_positions) = 16; the model has "
            "no more positions");
}

TEST(ContradictionTest, ValidationThatIsNotThereIsRefused) {
  EXPECT_EQ(ErrorOfSmall({"training.eval_every=5"}),
            "--set training.eval_every: there is no validation data; want "
            "data.validation or data.validation_fraction");
  EXPECT_EQ(
      ErrorOfSmall({"data.validation=v.txt", "data.validation_fraction=0.1"}),
      "--set data.validation_fraction: data.validation (--set "
      "data.validation) already gives the validation data; delete one");
  EXPECT_EQ(ErrorOfSmall({"training.eval_batches=5"}),
            "--set training.eval_batches: there is no validation data; want "
            "data.validation or data.validation_fraction");
  // One key turns it off.
  const auto off =
      LoadSmall({"training.eval_every=5", "training.eval_batches=5",
                 "data.validation_fraction=0"});
  ASSERT_TRUE(off.ok()) << off.status();
  EXPECT_EQ(off->config.training.eval_every, 0);
}

TEST(LoadTest, NullIsTheDefault) {
  const auto plain = LoadSmall({});
  const auto nulls = LoadSmall(
      {"gradient_clipping=null", "communication_data_type=null",
       "training.eval_every=null", "zero_optimization.offload_param=null",
       "zero_optimization.sub_group_size=null", "sparse_attention=null"});
  ASSERT_TRUE(nulls.ok()) << nulls.status();
  EXPECT_TRUE(nulls->config == plain->config);
}

TEST(LoadTest, OthersNamesOfAValueGetOurs) {
  for (const auto& [value, ours] :
       {std::pair("optimizer.type=FusedAdam", "AdamW"),
        std::pair("optimizer.type=DeepSpeedCPUAdam", "AdamW"),
        std::pair("scheduler.type=cosine", "WarmupCosineLR"),
        std::pair("scheduler.type=linear", "WarmupDecayLR"),
        // Exact names come before similar ones.
        std::pair("ranks=4", "--ranks"),
        std::pair("per_device_train_batch_size=4",
                  "train_micro_batch_size_per_gpu")}) {
    EXPECT_THAT(ErrorOfSmall({value}), testing::HasSubstr(absl::StrCat(
                                           "did you mean \"", ours, "\"?")));
  }
}

TEST(ContradictionTest, AVocabularyTooSmallForBytesIsRefused) {
  EXPECT_EQ(ErrorOfSmall({"model.vocab_size=256"}),
            "--set model.vocab_size: 256 is too few for data.tokenizer "
            "\"bytes\", want >= 257");
  EXPECT_EQ(ErrorOfSmall({"data.tokenizer=none"}),
            "run.json:2:3: model.vocab_size: missing; want the number of "
            "ids of the tokenizer that made the token files");
}

TEST(ContradictionTest, DocumentsWantATokenBetweenThem) {
  const std::vector<std::string> tokens = {"data.train=a.bin",
                                           "model.vocab_size=300",
                                           "data.reset_attention_mask=true"};
  EXPECT_EQ(
      ErrorOfSmall(tokens),
      "--set data.reset_attention_mask: true, but data.tokenizer is \"none\" "
      "and cannot tell which token separates documents; want data.eos_token_id "
      "(50256 in GPT-2's token files), or the tokenizer");
  const auto with_id = [&](const char* id) {
    std::vector<std::string> all = tokens;
    all.push_back(id);
    return all;
  };
  EXPECT_EQ(ErrorOfSmall(with_id("data.eos_token_id=300")),
            "--set data.eos_token_id: 300 is not a token of model.vocab_size "
            "(--set model.vocab_size) = 300");
  const auto loaded = LoadSmall(with_id("data.eos_token_id=299"));
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->config.data.reset_attention_mask);
  EXPECT_EQ(loaded->config.data.eos_token_id, 299);
  EXPECT_TRUE(LoadSmall({"data.reset_attention_mask=true"}).ok());
}

TEST(ContradictionTest, SamplesOfJsonLinesAreKeptApart) {
  const auto loaded = LoadSmall({"data.train=a.jsonl"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->config.data.reset_attention_mask);
  EXPECT_EQ(loaded->origins.at("data.reset_attention_mask"),
            "derived: samples of JSON lines are kept apart");
  EXPECT_TRUE(LoadSmall({"data.train=b", "data.format=jsonl"})
                  ->config.data.reset_attention_mask);
  EXPECT_TRUE(LoadSmall({"data.validation=dir/*.jsonl"})
                  ->config.data.reset_attention_mask);
  EXPECT_FALSE(LoadSmall({"data.train=a.jsonl", "data.format=text"})
                   ->config.data.reset_attention_mask);
  EXPECT_EQ(
      ErrorOfSmall({"data.train=a.jsonl", "data.reset_attention_mask=false"}),
      "--set data.reset_attention_mask: false, but samples of JSON lines never "
      "see each other; delete it");
  EXPECT_EQ(ErrorOfSmall({"data.train=a.jsonl", "data.tokenizer=none",
                          "model.vocab_size=300", "data.eos_token_id=0"}),
            "--set data.tokenizer: \"none\", but JSON lines are text; want "
            "\"bytes\" or the path of a tokenizer");
}

TEST(ValueTest, PatternsAreAStringOrAListOfThem) {
  const auto freeze = [](const std::string& value) {
    return LoadSmall({"model.freeze=" + value})->config.model.freeze;
  };
  EXPECT_THAT(freeze("block.[01].*"), testing::ElementsAre("block.[01].*"));
  EXPECT_THAT(freeze(R"(["a*", "b"])"), testing::ElementsAre("a*", "b"));
  EXPECT_EQ(ErrorOfSmall({"model.freeze=[]"}),
            "--set model.freeze: an empty list, want a string or a list of "
            "them");
  EXPECT_EQ(ErrorOfSmall({"model.freeze=[7]"}),
            "--set model.freeze: 7 in the list is not a string");
}

// ---- Schedules ------------------------------------------------------------

TEST(ScheduleTest, ThePeakIsTheOptimizersRateUnlessGiven) {
  auto loaded =
      LoadSmall({"scheduler.type=WarmupDecayLR", "optimizer.params.lr=0.5"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.scheduler.warmup_max_lr, 0.5);
  EXPECT_EQ(loaded->config.scheduler.total_num_steps, 20);
  EXPECT_EQ(loaded->origins["scheduler.params.total_num_steps"],
            "derived: training.steps");
  ASSERT_EQ(loaded->notes.size(), 1u);
  EXPECT_EQ(loaded->notes[0],
            "scheduler.params.warmup_num_steps 1000: the learning rate rises "
            "until the run ends, at step 20");
  loaded = LoadSmall({"scheduler.type=WSD", "training.steps=200",
                      "scheduler.params.warmup_num_steps=2"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.scheduler.decay_num_steps, 20);
}

TEST(ScheduleTest, LrScalingTakesTheWarmUpOver) {
  auto loaded =
      LoadSmall({"lr_scaling.base_batch_size=4", "lr_scaling.warmup_epochs=0.5",
                 "scheduler.type=WarmupCosineLR"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.lr_scaling.rule, LrScaleRule::kLinear);
  EXPECT_EQ(loaded->origins["lr_scaling.rule"],
            "derived: base_batch_size is given");
  EXPECT_EQ(loaded->config.scheduler.warmup_num_steps, 0);
  EXPECT_TRUE(loaded->notes.empty());
}

TEST(ScheduleTest, ARiseAsLongAsTheRunLeavesANote) {
  const auto note = [](std::vector<std::string> overrides) {
    const auto loaded = LoadSmall(std::move(overrides));
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok() || loaded->notes.size() != 1) return std::string("?");
    return loaded->notes[0];
  };
  const std::string all_steps =
      " 20: the learning rate rises until the run ends, at step 20";
  EXPECT_EQ(
      note({"lr_scaling.base_batch_size=4", "lr_scaling.warmup_steps=20"}),
      "lr_scaling.warmup_steps" + all_steps);
  EXPECT_EQ(
      note({"scheduler.type=WarmupLR", "scheduler.params.warmup_num_steps=20"}),
      "scheduler.params.warmup_num_steps" + all_steps);
  EXPECT_EQ(note({"scheduler.type=OneCycle",
                  "scheduler.params.cycle_first_step_size=20"}),
            "scheduler.params.cycle_first_step_size" + all_steps);
  EXPECT_EQ(note({"scheduler.type=WSD", "scheduler.params.warmup_num_steps=15",
                  "scheduler.params.decay_num_steps=6"}),
            "scheduler.params.decay_num_steps 6: the decay starts before the "
            "warm-up of 15 steps ends; both fit into 20 steps only if one is "
            "shorter");
  for (const char* fits : {"scheduler.params.warmup_num_steps=14",
                           "scheduler.params.warmup_num_steps=1"}) {
    const auto loaded = LoadSmall(
        {"scheduler.type=WSD", fits, "scheduler.params.decay_num_steps=6"});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->notes.empty()) << loaded->notes[0];
  }
}

TEST(ScheduleTest, ADecayLongerThanTheScheduleIsAnError) {
  EXPECT_EQ(ErrorOfSmall(
                {"scheduler.type=WSD", "scheduler.params.decay_num_steps=21"}),
            "--set scheduler.params.decay_num_steps: 21 is more than "
            "scheduler.params.total_num_steps = 20");
  EXPECT_EQ(
      ErrorOfSmall({"training.steps=auto", "training.epochs=1",
                    "scheduler.type=WSD", "scheduler.params.total_num_steps=5",
                    "scheduler.params.decay_num_steps=6"}),
      "--set scheduler.params.decay_num_steps: 6 is more than "
      "scheduler.params.total_num_steps (--set "
      "scheduler.params.total_num_steps) = 5");
}

TEST(ScheduleTest, OneCycleFillsItsSecondHalf) {
  auto loaded = LoadSmall({"scheduler.type=OneCycle",
                           "scheduler.params.cycle_first_step_size=5",
                           "optimizer.type=SGD"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.scheduler.cycle_second_step_size, 5);
  EXPECT_EQ(loaded->config.scheduler.cycle_max_lr, 1e-3);
  EXPECT_FALSE(loaded->config.scheduler.cycle_momentum);
}

// ---- Files ----------------------------------------------------------------

TEST(FilesTest, PathsAreFoundFromHereOrBesideTheConfig) {
  const std::string folder = testing::TempDir() + "/zero_config_test";
  ASSERT_TRUE(MakeFolders(folder + "/sub").ok());
  std::ofstream(folder + "/a.txt") << "text";
  std::ofstream(folder + "/run.json") << R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "data": {"train": ["a.txt", "*.txt"], "sequence_length": 32},
  "training": {"steps": 20},
  "train_batch_size": 8
})";
  LoadOptions options;
  auto loaded = LoadConfig(folder + "/run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.data.train,
            (std::vector<std::string>{folder + "/a.txt", folder + "/*.txt"}));
  // As accepted by `zero tokenize`.
  for (const char* name : {"/{a,none}.txt", "/[ab].txt", "/?.txt"}) {
    options.overrides = {"data.train=" + folder + name};
    loaded = LoadConfig(folder + "/run.json", options);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.data.train,
              std::vector<std::string>{folder + name});
    EXPECT_TRUE(ExpandPaths(loaded->config.data.train).ok());
  }
  // No JSON, though it begins as an object does.
  options.overrides = {"data.train={a,none}.txt"};
  loaded = LoadConfig(folder + "/run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.data.train,
            std::vector<std::string>{folder + "/{a,none}.txt"});
  options.overrides = {"data.train=" + folder + "/sub"};
  EXPECT_EQ(LoadConfig(folder + "/run.json", options).status().message(),
            "--set data.train: \"" + folder +
                "/sub\" is a folder, want files: \"" + folder + "/sub/*\"");
  options.overrides = {"data.train=" + folder + "/b*.txt"};
  EXPECT_EQ(LoadConfig(folder + "/run.json", options).status().message(),
            "--set data.train: \"" + folder +
                "/b*.txt\" matches no file; correct the name");
  options.overrides = {"data.train=" + folder + "/{b,c}.txt"};
  EXPECT_EQ(LoadConfig(folder + "/run.json", options).status().message(),
            "--set data.train: \"" + folder +
                "/{b,c}.txt\" matches no file; correct the name");
  options.overrides = {"data.train=auto"};
  EXPECT_EQ(LoadConfig(folder + "/run.json", options).status().message(),
            "--set data.train: missing; want a file, a glob or a list of them, "
            "for example --set data.train=my_text.txt");
}

TEST(FilesTest, WhatARunWouldLackIsCollectedWhereNoRunIsMeant) {
  LoadOptions options;
  options.missing_files = MissingFiles::kCollect;
  options.overrides = {"data.validation=v*.none", "data.tokenizer=t.model",
                       "model.vocab_size=300"};
  auto loaded = ParseConfig(kSmallConfig, "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->lacking,
            (std::vector<std::string>{
                "run.json:3: data.train: \"text.txt\" does not exist; correct "
                "the name",
                "--set: data.validation: \"v*.none\" matches no file; correct "
                "the name",
                "--set: data.tokenizer: want \"bytes\", \"none\" or the path "
                "of a tokenizer.json, of a SentencePiece model or of a folder "
                "with one; \"t.model\" does not exist; correct the name"}));
  options.overrides = {"data.train=auto"};
  loaded = ParseConfig(kSmallConfig, "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  ASSERT_EQ(loaded->lacking.size(), 1u);
  EXPECT_EQ(loaded->lacking[0],
            "--set: data.train: missing; want a file, a glob or a list of "
            "them, for example --set data.train=my_text.txt");
  options.missing_files = MissingFiles::kIgnored;
  loaded = ParseConfig(kSmallConfig, "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->lacking.empty());
}

TEST(FilesTest, MissingFilesOfAKeyAreOneError) {
  LoadOptions options;
  options.overrides = {R"(data.train=["a/*.none", "b/*.none"])"};
  EXPECT_EQ(
      ParseConfig(kSmallConfig, "configs/run.json", options).status().message(),
      "--set data.train: \"a/*.none\", \"b/*.none\" match no file, "
      "neither from the current folder nor from configs/; correct the "
      "name, or start zero in the folder that it is relative to");
}

TEST(FilesTest, TheTokenizerFollowsTheFiles) {
  auto loaded = LoadSmall({"data.train=a.bin", "model.vocab_size=50257"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.data.tokenizer, "none");
}

TEST(FilesTest, AFolderIsTheTokenizerInIt) {
  TempDir dir;
  LoadOptions options;
  options.overrides = {"data.tokenizer=" + dir.File(""),
                       "model.vocab_size=300"};
  dir.Write("text.txt", "text");
  options.overrides.push_back("data.train=" + dir.File("text.txt"));
  options.model_tokenizer = [](const std::string& folder) {
    return PathExists(folder + "/tokenizer.json") ? folder + "/tokenizer.json"
                                                  : "";
  };
  EXPECT_THAT(
      std::string(
          ParseConfig(kSmallConfig, "run.json", options).status().message()),
      testing::HasSubstr("is a folder without a tokenizer.json"));
  dir.Write("tokenizer.json", "");
  const auto loaded = ParseConfig(kSmallConfig, "run.json", options);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.data.tokenizer, dir.File("") + "/tokenizer.json");
}

}  // namespace
}  // namespace zero
