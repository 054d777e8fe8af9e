#include "engine/config/keys.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace zero {
namespace {

// ---- Fields as values -----------------------------------------------------

using Names = std::vector<std::string>;

Names NamesOf(OptimizerKind) { return {"AdamW", "Adam", "SGD", "Lamb"}; }
Names NamesOf(WeightDecayOn) { return {"matrices", "all"}; }
Names NamesOf(LrScheduleKind) {
  return {"Constant",       "WarmupLR", "WarmupDecayLR",
          "WarmupCosineLR", "OneCycle", "WSD"};
}
Names NamesOf(LrWarmupType) { return {"log", "linear"}; }
Names NamesOf(LrDecayType) { return {"linear", "cosine", "1-sqrt"}; }
Names NamesOf(LrScaleRule) { return {"none", "linear", "sqrt"}; }
Names NamesOf(TokenFormat) {
  return {std::begin(kTokenFormatNames), std::end(kTokenFormatNames)};
}
Names NamesOf(CommunicationAlgorithm) {
  return {"direct", "ring", "parameter_server", "hierarchical"};
}
Names NamesOf(OffloadDevice) { return {"none", "cpu", "nvme"}; }
Names NamesOf(VocabularyParts) { return {"auto", "on", "off"}; }
Names NamesOf(CommunicationBackend) { return {"auto", "local", "mpi", "nccl"}; }
Names NamesOf(Recompute) {
  return {std::begin(kRecomputeNames), std::end(kRecomputeNames)};
}
Names NamesOf(DType) { return {"fp32", "bf16", "fp16"}; }
Names NamesOf(ModelFamily) {
  return {std::begin(kModelFamilyNames), std::end(kModelFamilyNames)};
}

template <typename T>
KeyValue ToValue(const T& field) {
  if constexpr (std::is_enum_v<T>) {
    return NamesOf(field)[static_cast<size_t>(field)];
  } else {
    return field;
  }
}

template <typename T>
void FromValue(const KeyValue& value, T& field) {
  if constexpr (std::is_enum_v<T>) {
    const Names names = NamesOf(field);
    const auto it =
        std::find(names.begin(), names.end(), std::get<std::string>(value));
    field = static_cast<T>(it - names.begin());
  } else {
    field = std::get<T>(value);
  }
}

template <typename T>
constexpr KeyKind KindOf() {
  if (std::is_enum_v<T>) return KeyKind::kChoice;
  if (std::is_same_v<T, bool>) return KeyKind::kBool;
  if (std::is_same_v<T, int64_t>) return KeyKind::kInteger;
  if (std::is_same_v<T, double>) return KeyKind::kNumber;
  if (std::is_same_v<T, std::vector<int64_t>>) return KeyKind::kIntegers;
  return std::is_same_v<T, std::string> ? KeyKind::kString : KeyKind::kFiles;
}

// How a key reaches its member of Config.
struct Field {
  KeyKind kind;
  KeyValue (*get)(const Config&);
  void (*set)(Config&, const KeyValue&);
  Names choices = {};
};

template <typename T>
Field FieldOf(KeyValue (*get)(const Config&),
              void (*set)(Config&, const KeyValue&)) {
  Field field = {KindOf<T>(), get, set};
  if constexpr (std::is_enum_v<T>) field.choices = NamesOf(T{});
  return field;
}

#define FIELD(member)                                    \
  FieldOf<decltype(std::declval<Config>().member)>(      \
      [](const Config& c) { return ToValue(c.member); }, \
      [](Config& c, const KeyValue& v) { FromValue(v, c.member); })

// A key that has its field's name.
#define KEY(member) #member, FIELD(member)

// ---- What a row may add ---------------------------------------------------

// Counts are far enough below 2^63 for their sums, and products with a batch of
// tokens, to fit.
constexpr double kMaxCount = 1e12;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

constexpr auto Range(double min, double max) {
  return [=](KeySpec& key) {
    key.min = min;
    key.max = max;
  };
}
constexpr auto AtLeast(double min) {
  return [=](KeySpec& key) { key.min = min; };
}
constexpr auto Above(double min) {
  return [=](KeySpec& key) {
    key.min = min;
    key.above_min = true;
  };
}
constexpr auto HalfOpen(double min, double max) {  // [min, max)
  return [=](KeySpec& key) {
    key.min = min;
    key.max = max;
    key.below_max = true;
  };
}
auto Choices(Names choices) {
  return [=](KeySpec& key) {
    key.kind = KeyKind::kChoice;
    key.choices = choices;
  };
}
void Strings(KeySpec& key) { key.kind = KeyKind::kStrings; }
void AnyCase(KeySpec& key) { key.any_case = true; }
void RoundsDown(KeySpec& key) { key.rounds_down = true; }
auto Unbuilt(Names values, const char* reason) {
  return [=](KeySpec& key) {
    key.choices.insert(key.choices.end(), values.begin(), values.end());
    key.unbuilt = values;
    key.unbuilt_reason = reason;
  };
}
constexpr auto Derived(const char* how) {
  return [=](KeySpec& key) { key.derived = how; };
}
void MayBeUnset(KeySpec& key) { key.may_be_unset = true; }
void BetweenRanks(KeySpec& key) { key.between_ranks = true; }
void SaysAuto(KeySpec& key) { key.says_auto = true; }
void OfGpu(KeySpec& key) { key.of_gpu = true; }
constexpr auto DeepSpeed(const char* difference) {
  return [=](KeySpec& key) { key.deepspeed = difference; };
}
constexpr auto When(bool (*applies)(const Config&), const char* to) {
  return [=](KeySpec& key) {
    key.applies = applies;
    key.applies_to = to;
  };
}
constexpr auto Unread(bool (*holds)(const Config&), const char* reason) {
  return [=](KeySpec& key) { key.unread.push_back({holds, reason}); };
}

template <typename... Options>
KeySpec Section(const char* path, const char* doc, const Options&... options) {
  KeySpec key;
  key.path = path;
  key.kind = KeyKind::kObject;
  key.doc = doc;
  (options(key), ...);
  return key;
}

template <typename... Options>
KeySpec Key(const char* path, const Field& field, const char* doc,
            const Options&... options) {
  KeySpec key = Section(path, doc);
  key.kind = field.kind;
  key.get = field.get;
  key.set = field.set;
  key.choices = field.choices;
  if (key.kind == KeyKind::kInteger) key.max = kMaxCount;
  (options(key), ...);
  return key;
}

// ---- Which config has which key, and reads it -----------------------------

#define IF(condition) [](const Config& c) -> bool { return condition; }

constexpr auto kGpt2 =
    When(IF(c.model.family == ModelFamily::kGpt2), "model_type gpt2");
constexpr auto kRotary = When(IF(c.model.family != ModelFamily::kGpt2),
                              "model_type llama, qwen2, qwen3");
constexpr auto kScaled = When(
    IF(c.model.family != ModelFamily::kGpt2 && c.model.rope_scaling.enabled),
    "rope_type llama3");
constexpr auto kAdams = When(IF(c.optimizer.spec.kind != OptimizerKind::kSgd),
                             "optimizer.type AdamW, Adam, Lamb");
constexpr auto kSgd = When(IF(c.optimizer.spec.kind == OptimizerKind::kSgd),
                           "optimizer.type SGD");
constexpr auto kLamb = When(IF(c.optimizer.spec.kind == OptimizerKind::kLamb),
                            "optimizer.type Lamb");

bool Warms(const Config& c) {
  return !c.lr_scaling.active() &&
         (c.scheduler.kind == LrScheduleKind::kWarmupLr ||
          c.scheduler.kind == LrScheduleKind::kWarmupDecayLr ||
          c.scheduler.kind == LrScheduleKind::kWarmupCosineLr ||
          c.scheduler.kind == LrScheduleKind::kWsd);
}
constexpr auto kAllWarmups =
    When(Warms, "scheduler.type WarmupLR, WarmupDecayLR, WarmupCosineLR, WSD");
constexpr auto kWarmups =
    When(IF(Warms(c) && c.scheduler.kind != LrScheduleKind::kWarmupCosineLr),
         "scheduler.type WarmupLR, WarmupDecayLR, WSD");
constexpr auto kCosineWarmup =
    When(IF(Warms(c) && c.scheduler.kind == LrScheduleKind::kWarmupCosineLr),
         "scheduler.type WarmupCosineLR");
constexpr auto kCosine =
    When(IF(c.scheduler.kind == LrScheduleKind::kWarmupCosineLr),
         "scheduler.type WarmupCosineLR");
constexpr auto kDecays =
    When(IF(c.scheduler.kind == LrScheduleKind::kWarmupDecayLr ||
            c.scheduler.kind == LrScheduleKind::kWarmupCosineLr ||
            c.scheduler.kind == LrScheduleKind::kWsd),
         "scheduler.type WarmupDecayLR, WarmupCosineLR, WSD");
constexpr auto kWsd =
    When(IF(c.scheduler.kind == LrScheduleKind::kWsd), "scheduler.type WSD");
constexpr auto kCycle = When(IF(c.scheduler.kind == LrScheduleKind::kOneCycle),
                             "scheduler.type OneCycle");

constexpr char kWritesNoText[] =
    "data.tokenizer is \"none\" and writes no text";
constexpr char kLeavesNoWarmup[] =
    "scheduler.params.warmup_num_steps leaves no warm-up";
constexpr auto kOneDocument = Unread(IF(!c.data.reset_attention_mask),
                                     "data.reset_attention_mask is false");
constexpr auto kNoText = Unread(IF(c.data.tokenizer == "none"), kWritesNoText);
constexpr auto kNoTokens =
    Unread(IF(c.training.sample.tokens == 0), "training.sample.tokens is 0");
constexpr auto kGreedy =
    Unread(IF(c.training.sample.temperature == 0),
           "training.sample.temperature is 0, always the likeliest token");
constexpr auto kNotElastic =
    Unread(IF(!c.elasticity.enabled), "elasticity.enabled is false");
constexpr auto kNoFp16 = Unread(IF(!c.fp16.enabled), "fp16.enabled is false");
constexpr auto kStaticScale =
    Unread(IF(c.fp16.scaler.static_scale > 0),
           "fp16.loss_scale is above 0 and never changes");
constexpr auto kNoDecay =
    Unread(IF(c.optimizer.spec.weight_decay == 0),
           "optimizer.params.weight_decay is 0: there is no decay");
constexpr auto kNoWarmup =
    Unread(IF(c.scheduler.warmup_num_steps <= 1), kLeavesNoWarmup);
constexpr auto kNoScaling =
    Unread(IF(!c.lr_scaling.active()), "lr_scaling.rule is \"none\"");
constexpr auto kNoDecaySteps =
    Unread(IF(c.scheduler.decay_step_size == 0),
           "scheduler.params.decay_step_size is 0: there is no decay");
constexpr auto kSteadyMomentum =
    Unread(IF(!c.scheduler.cycle_momentum),
           "scheduler.params.cycle_momentum is false");
constexpr auto kNothingDecays = Unread(
    [](const Config& c) {
      const LrSchedule& s = c.scheduler;
      const bool lr = s.decay_lr_rate > 0 && s.cycle_min_lr > 0;
      return !lr && !(s.decay_mom_rate > 0 && s.cycle_momentum);
    },
    "neither learning rate nor momentum decays after the cycle");
constexpr auto kNoDisk =
    Unread(IF(!c.zero_optimization.uses_nvme()), "no device is \"nvme\"");
constexpr auto kReplicated =
    Unread(IF(c.zero_optimization.stage < 3),
           "only zero_optimization.stage 3 gathers parameters for use");

// ---- The table ------------------------------------------------------------

std::vector<KeySpec> UsedKeys() {
  return {
      Section("model",
              "The transformer: a preset, a pretrained folder, or a family and "
              "its hyperparameters under the names of its Hugging Face "
              "config.json. Explicit keys override the preset."),
      Key("model.preset", FIELD(model_preset),
          "A model by name; `zero models` lists them.", MayBeUnset),
      Key(KEY(model.from_pretrained),
          "A Hugging Face folder (config.json, model.safetensors) to start "
          "from.",
          MayBeUnset),
      Key(KEY(model.freeze),
          "Tensors that keep their values and cost no gradient, optimizer "
          "state or traffic: shell globs (*, ?, [abc]) over whole names, from "
          "`zero checkpoint show` or Hugging Face's files, such as "
          "\"*embed_tokens*\" or \"block.0.*\". A tied head is frozen with the "
          "embedding.",
          Strings, MayBeUnset),
      Key("model.model_type", FIELD(model.family),
          "The family; not needed with preset or from_pretrained."),
      Key(KEY(model.vocab_size), "Number of token ids.", Range(1, 1 << 24),
          Derived("the ids of data.tokenizer; 257 for \"bytes\"")),
      Key(KEY(model.tie_word_embeddings),
          "One matrix for the embedding and the head.",
          Derived("true for gpt2, else false")),
      Key(KEY(model.initializer_range),
          "Standard deviation of the initial weights.", Above(0)),
      Key(KEY(model.embd_pdrop), "Dropout after the embedding, while training.",
          HalfOpen(0, 1)),
      Key(KEY(model.resid_pdrop),
          "Dropout before each residual addition, while training.",
          HalfOpen(0, 1)),
      Key("model.n_embd", FIELD(model.hidden_size), "Width.", Range(1, 1 << 20),
          kGpt2),
      Key("model.n_layer", FIELD(model.num_hidden_layers),
          "Number of transformer blocks.", Range(1, 4096), kGpt2),
      Key("model.n_head", FIELD(model.num_attention_heads),
          "Attention heads; divides n_embd.", Range(1, 1 << 16), kGpt2),
      Key("model.n_inner", FIELD(model.intermediate_size),
          "Feed-forward width.", Range(1, 1 << 22), Derived("4 * n_embd"),
          kGpt2),
      Key("model.n_positions", FIELD(model.max_position_embeddings),
          "Rows of the learned position table.", Range(1, 1 << 24),
          Derived("data.sequence_length"), kGpt2),
      Key("model.layer_norm_epsilon", FIELD(model.norm_eps),
          "Added to the variance in LayerNorm.", Above(0), kGpt2),
      Key("model.activation_function", FIELD(model.activation),
          "gelu_new is the tanh approximation, gelu the exact function.",
          Choices({"gelu_new", "gelu"}), kGpt2),
      Key(KEY(model.hidden_size), "Width.", Range(1, 1 << 20), kRotary),
      Key(KEY(model.num_hidden_layers), "Number of transformer blocks.",
          Range(1, 4096), kRotary),
      Key(KEY(model.num_attention_heads), "Query heads.", Range(1, 1 << 16),
          kRotary),
      Key(KEY(model.num_key_value_heads),
          "Key and value heads; divides num_attention_heads.",
          Range(1, 1 << 16), Derived("num_attention_heads"), kRotary),
      Key(KEY(model.head_dim), "Width of one head; even.", Range(2, 1 << 16),
          Derived("hidden_size / num_attention_heads; 128 for qwen3"), kRotary),
      Key(KEY(model.intermediate_size), "Feed-forward width.",
          Range(1, 1 << 22), kRotary),
      Key(KEY(model.max_position_embeddings),
          "Longest sequence the model supports; costs no parameters.",
          Range(1, 1 << 24),
          Derived(
              "2048 for llama, else 32768; sequence_length if that is more"),
          kRotary),
      Key("model.rms_norm_eps", FIELD(model.norm_eps),
          "Added to the mean square in RMSNorm.", Above(0), kRotary),
      Key("model.hidden_act", FIELD(model.activation),
          "The gate's activation: SwiGLU.", Choices({"silu"}), kRotary),
      Key(KEY(model.rope_theta), "Base of the rotary frequencies.", Above(0),
          kRotary),
      Section("model.rope_scaling",
              "Llama 3.1's scaling of rotary frequencies.", kRotary),
      Key("model.rope_scaling.rope_type",
          Field{KeyKind::kString,
                [](const Config& c) -> KeyValue {
                  return c.model.rope_scaling.enabled ? "llama3" : "default";
                },
                [](Config& c, const KeyValue& v) {
                  c.model.rope_scaling.enabled =
                      std::get<std::string>(v) == "llama3";
                }},
          "default: not scaled.", Choices({"default", "llama3"}), kRotary),
      Key(KEY(model.rope_scaling.factor), "Low frequencies are divided by it.",
          AtLeast(1), kScaled),
      Key(KEY(model.rope_scaling.low_freq_factor),
          "Wavelengths above original / this are scaled in full.", Above(0),
          kScaled),
      Key(KEY(model.rope_scaling.high_freq_factor),
          "Wavelengths below original / this are not scaled.", Above(0),
          kScaled),
      Key(KEY(model.rope_scaling.original_max_position_embeddings),
          "Sequence length of the unscaled model.", AtLeast(1), kScaled),
      Section("data", "Training and validation data."),
      Key(KEY(data.train),
          "A file, a glob or a list of them. Relative to the current folder, "
          "or else to the config file.",
          MayBeUnset),
      Key(KEY(data.validation), "Held-out data, as data.train.", MayBeUnset),
      Key(KEY(data.validation_fraction),
          "Without data.validation: the last part of data.train to hold out.",
          HalfOpen(0, 1)),
      Key(KEY(data.format),
          "text; llmc (llm.c's header, then tokens); raw_uint16 (nanoGPT's "
          "bare tokens); jsonl (a sample on each line: {\"prompt\", "
          "\"completion\"}, of which only the completion is learned, or "
          "{\"text\"}); auto detects it from the file."),
      Key(KEY(data.tokenizer),
          "bytes, none (token files), or the path of a tokenizer.json, of a "
          "SentencePiece model or of a folder with one.",
          Derived("that of model.from_pretrained, if it has one; none for "
                  ".bin files, else bytes")),
      Key(KEY(data.sequence_length), "Tokens per sequence, T.",
          Range(1, 1 << 24),
          Derived("1024, or the model's positions if they are fewer")),
      Key(KEY(data.reset_attention_mask),
          "Documents in one sequence: tokens see only their own, and positions "
          "count from its start. The end-of-text token starts the next "
          "document, so all targets count. Samples of JSON lines are always "
          "kept apart.",
          Derived("true for JSON lines, else false")),
      Key(KEY(data.eos_token_id),
          "The end-of-text token of token files without a tokenizer, for "
          "reset_attention_mask; 50256 in GPT-2's.",
          Range(0, (1 << 24) - 1), MayBeUnset, kOneDocument,
          Unread(IF(c.data.tokenizer != "none"),
                 "data.tokenizer has an end-of-text token")),
      Section("training", "Length of the run, evaluation, samples and output."),
      Key(KEY(training.steps), "Optimizer steps; or give epochs.", AtLeast(1),
          MayBeUnset),
      Key(KEY(training.epochs), "Passes over data.train; or give steps.",
          Range(0, 1e6), Above(0), MayBeUnset),
      Key(KEY(training.seed), "Seed of initialization, data order and dropout.",
          Range(0, kUnlimited)),
      Key(KEY(training.max_consecutive_skips),
          "Stop after this many steps in a row with a non-finite gradient.",
          AtLeast(1)),
      Key(KEY(training.out_dir),
          "Folder for metrics.jsonl, summary.json, config.json and final/.",
          Derived("out/NAME of the config file")),
      Key(KEY(training.eval_every),
          "Steps between evaluations; 0: at the end only.", AtLeast(0)),
      Key(KEY(training.eval_batches),
          "Micro-batches per rank and evaluation; 0: all validation data.",
          AtLeast(0)),
      Key(KEY(training.sample_every),
          "Steps between text samples; 0: at the end only.", AtLeast(0)),
      Section("training.sample", "The text sample."),
      Key(KEY(training.sample.prompt),
          "Text to continue; empty: the end-of-text token.", kNoText,
          kNoTokens),
      Key(KEY(training.sample.tokens), "Tokens to generate; 0: no samples.",
          AtLeast(0),
          Unread(
              IF(c.data.tokenizer == "none" && c.training.sample.tokens != 0),
              kWritesNoText)),
      Key(KEY(training.sample.temperature), "0: always the likeliest token.",
          AtLeast(0), kNoText, kNoTokens),
      Key(KEY(training.sample.top_k), "Draw from the k likeliest; 0: off.",
          AtLeast(0), kNoText, kNoTokens, kGreedy),
      Key(KEY(training.sample.top_p),
          "Draw from the likeliest that sum up to p; 1: off.", Range(0, 1),
          Above(0), kNoText, kNoTokens, kGreedy),
      Key(KEY(training.sample.seed), "Seed of the draws.", Range(0, kUnlimited),
          kNoText, kNoTokens, kGreedy, Derived("training.seed")),
      Key(KEY(training.save_final), "Write out_dir/final/ at the end."),
      Key(KEY(training.max_shard_size),
          "Largest size in bytes of a weights file in final/, like "
          "transformers' max_shard_size: a larger model is written as shards "
          "with model.safetensors.index.json.",
          AtLeast(1),
          Unread(IF(!c.training.save_final), "training.save_final is false")),
      Key(KEY(training.tensorboard),
          "Write event files for TensorBoard to out_dir/tensorboard/.",
          DeepSpeed("\"tensorboard\": {\"enabled\", \"output_path\", "
                    "\"job_name\"}")),
      Key(KEY(training.save_every),
          "Steps between checkpoints in out_dir/checkpoints/, with one at the "
          "end; 0: not by steps.",
          AtLeast(0)),
      Key(KEY(training.save_every_minutes),
          "Minutes between checkpoints; 0: not by time.", AtLeast(0)),
      Key(KEY(training.async_save),
          "Training waits for a copy of the states in the host's memory (12 "
          "bytes per parameter with Adam, divided over the ranks) and "
          "continues while the copy is written; false: it waits for the disk "
          "and makes no copy.",
          Unread(IF(!c.training.saves()),
                 "training.save_every and save_every_minutes are 0"),
          Unread(IF(c.zero_optimization.uses_nvme()),
                 "the copy would take as much of the host's memory as the "
                 "states on a disk (device nvme)")),
      Key(KEY(training.save_interrupted),
          "Write a checkpoint when a signal or max_minutes ends the run."),
      Key(KEY(training.keep_last),
          "Number of newest checkpoints to keep; 0: all.", AtLeast(0)),
      Key(KEY(training.keep_every),
          "Also keep the checkpoints at multiples of this many steps; 0: none.",
          AtLeast(0)),
      Key(KEY(training.max_minutes),
          "End the run after this many minutes, as a signal does, but with "
          "exit status 85 if --resume auto can continue it; 0: never.",
          AtLeast(0)),
      Key(KEY(training.resume),
          "Resume from a checkpoint: \"latest\" of out_dir, \"auto\" (the "
          "latest, or from scratch if there is none), or its folder.",
          SaysAuto),
      Key(KEY(training.resume_changed),
          "Resume although the config or the data differs from the run's."),
      Key(KEY(train_batch_size),
          "Sequences per step = train_micro_batch_size_per_gpu * "
          "gradient_accumulation_steps * ranks. Give it or "
          "train_micro_batch_size_per_gpu; \"auto\" and missing keys follow "
          "from the product.",
          Range(1, 1 << 30), Derived("the product")),
      Key(KEY(train_micro_batch_size_per_gpu),
          "Sequences per rank and pass, B.", Range(1, 1 << 30),
          Derived("train_batch_size / (gradient_accumulation_steps * ranks); 8 "
                  "if nothing determines \"auto\"")),
      Key(KEY(gradient_accumulation_steps), "Passes per step.",
          Range(1, 1 << 30),
          Derived("train_batch_size / (train_micro_batch_size_per_gpu * "
                  "ranks), else 1")),
      Section("elasticity",
              "A global batch that many numbers of ranks can share: "
              "DeepSpeed's version 0.1."),
      Key(KEY(elasticity.enabled),
          "train_batch_size follows from these keys; "
          "train_micro_batch_size_per_gpu and gradient_accumulation_steps "
          "follow from these keys and the ranks."),
      Key(KEY(elasticity.max_train_batch_size),
          "train_batch_size is at most this.", Range(1, 1 << 30), MayBeUnset,
          kNotElastic,
          DeepSpeed("the least common multiple of micro_batch_sizes is tried "
                    "even if it is larger; here never")),
      Key(KEY(elasticity.micro_batch_sizes),
          "train_micro_batch_size_per_gpu is the largest of these that divides "
          "a rank's share.",
          Range(1, 1 << 30), MayBeUnset, kNotElastic),
      Key(KEY(elasticity.min_gpus),
          "The batch is chosen for at least this many ranks; fewer may not "
          "train.",
          AtLeast(1), kNotElastic),
      Key(KEY(elasticity.max_gpus),
          "The batch is chosen for at most this many ranks; more may not "
          "train.",
          AtLeast(1), kNotElastic),
      Key(KEY(elasticity.prefer_larger_batch),
          "Among batches that equally many numbers of ranks can share, take "
          "the largest; false: the smallest.",
          kNotElastic),
      Key(KEY(elasticity.ignore_non_elastic_batch_info),
          "Ignore the three batch keys if they differ; false: that is an "
          "error.",
          kNotElastic),
      Key(KEY(gradient_clipping),
          "Largest norm of the whole gradient; 0: no clipping.", AtLeast(0),
          DeepSpeed("\"auto\" is Hugging Face's Trainer's 1.0; here 0")),
      Section("bf16",
              "bfloat16 parameters and activations, fp32 master weights."),
      Key("bf16.enabled", FIELD(bf16),
          "If neither bf16 nor fp16 is enabled: fp32.",
          DeepSpeed("\"auto\" is the --bf16 of Hugging Face's Trainer; here "
                    "false")),
      Section("fp16", "float16 with loss scaling, fp32 master weights."),
      Key(KEY(fp16.enabled), "If neither bf16 nor fp16 is enabled: fp32.",
          DeepSpeed("\"auto\" is the --fp16 of Hugging Face's Trainer; here "
                    "false")),
      Key("fp16.loss_scale", FIELD(fp16.scaler.static_scale),
          "A fixed loss scale; 0: dynamic.", AtLeast(0), kNoFp16,
          DeepSpeed("multiplies the mean loss of a rank's batch; here, also "
                    "with initial_scale_power, each sequence's loss is scaled "
                    "as if it were alone")),
      Key("fp16.initial_scale_power", FIELD(fp16.scaler.initial_scale_power),
          "The dynamic scale starts at 2 to this power.", Range(0, 120),
          kNoFp16, kStaticScale),
      Key("fp16.loss_scale_window", FIELD(fp16.scaler.loss_scale_window),
          "Steps without overflow after which the scale doubles.", AtLeast(1),
          kNoFp16, kStaticScale),
      Key("fp16.hysteresis", FIELD(fp16.scaler.hysteresis),
          "Overflows before the scale halves.", AtLeast(1), kNoFp16,
          kStaticScale),
      Key("fp16.consecutive_hysteresis",
          FIELD(fp16.scaler.consecutive_hysteresis),
          "A step without overflow refills the hysteresis.", kNoFp16,
          kStaticScale,
          Unread(IF(c.fp16.scaler.hysteresis == 1), "fp16.hysteresis is 1")),
      Key("fp16.min_loss_scale", FIELD(fp16.scaler.min_loss_scale),
          "The scale never falls below it.", Above(0), kNoFp16, kStaticScale),
      Section("data_types", "Dtypes of intermediate results."),
      Key("data_types.grad_accum_dtype", FIELD(grad_accum_dtype),
          "Dtype in which gradients are accumulated: fp32, or the parameters' "
          "dtype.",
          DeepSpeed("the parameters' dtype with fp16 and ZeRO 1-3; here fp32, "
                    "so that micro-batches add up without loss")),
      Key("data_types.stochastic_rounding", FIELD(stochastic_rounding),
          "16-bit parameters are rounded up or down from their fp32 masters at "
          "random, so that the mean is the master. Gains: steps below half a "
          "unit in the last place also move the parameters that the model "
          "computes with. Costs: a random error of up to one unit, and on the "
          "CPU about twice the time of an optimizer step (measured: 13 to 20 "
          "ms for 16M parameters). The random numbers are a function of "
          "training.seed, step and element: runs repeat, and stages have equal "
          "bits."),
      Key("data_types.split_master_weights", FIELD(split_master_weights),
          "Store only the 16 bits of an fp32 master weight that its bf16 "
          "parameter lacks: training with Adam takes 16 bytes per parameter "
          "instead of 18, with the same bits in every result. For comparison "
          "only.",
          Unread(IF(!c.bf16 || c.stochastic_rounding),
                 "only bf16 parameters rounded to nearest are part of their "
                 "masters")),
      Key(KEY(communication_data_type),
          "Dtype in which gradients are sent; their sum over ranks is formed "
          "in fp32 and rounded once.",
          BetweenRanks, Derived("data_types.grad_accum_dtype"),
          DeepSpeed(
              "the parameters' dtype; here that of the accumulated gradients, "
              "fp32 by default, so that nothing is rounded on the way")),
      Section("optimizer",
              "The update rule; moments and master weights are fp32."),
      Key("optimizer.type", FIELD(optimizer.spec.kind), "The update rule.",
          AnyCase,
          Unbuilt({"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Adagrad", "Lion",
                   "Muon"},
                  "write AdamW, Adam, SGD or Lamb")),
      Section("optimizer.params", "Parameters of optimizer.type."),
      Key("optimizer.params.lr", FIELD(optimizer.lr),
          "Learning rate; the base_lr of lr_scaling.", Above(0),
          DeepSpeed("\"auto\" is Hugging Face's Trainer's 5e-05, for "
                    "fine-tuning; here the default")),
      Key("optimizer.params.weight_decay", FIELD(optimizer.spec.weight_decay),
          "Weight decay.", AtLeast(0)),
      Key("optimizer.params.weight_decay_on", FIELD(optimizer.weight_decay_on),
          "matrices: tensors of two or more dimensions; all: biases and norm "
          "weights too.",
          kNoDecay,
          DeepSpeed("all parameters, unless the caller makes groups; here "
                    "matrices only, as in papers")),
      Key("optimizer.params.betas",
          Field{KeyKind::kNumbers,
                [](const Config& c) -> KeyValue {
                  return std::vector<double>{c.optimizer.spec.beta1,
                                             c.optimizer.spec.beta2};
                },
                [](Config& c, const KeyValue& v) {
                  const auto& betas = std::get<std::vector<double>>(v);
                  c.optimizer.spec.beta1 = betas[0];
                  c.optimizer.spec.beta2 = betas[1];
                }},
          "Decay of the two moments.", HalfOpen(0, 1), kAdams),
      Key("optimizer.params.eps", FIELD(optimizer.spec.eps),
          "Added to the root of the second moment.", Above(0), kAdams),
      Key("optimizer.params.bias_correction",
          FIELD(optimizer.spec.bias_correction),
          "Divide the moments by 1 - beta^step.", kAdams,
          DeepSpeed("corrects Lamb's step, not the moments in its trust ratio: "
                    "its steps are sqrt(1 - beta2^t) / (1 - beta1^t) times "
                    "ours, 0.32 at t = 1, 0.15 at 10, 0.31 at 100, 0.80 at "
                    "1000; here Lamb is the paper's")),
      Key("optimizer.params.adam_w_mode", FIELD(optimizer.spec.decoupled_decay),
          "true, as in DeepSpeed: Adam is AdamW; false: the decay is added to "
          "the gradient.",
          Unread(IF(c.optimizer.spec.kind == OptimizerKind::kAdamW),
                 "optimizer.type AdamW never adds the decay to the gradient"),
          kNoDecay,
          When(IF(c.optimizer.spec.kind == OptimizerKind::kAdam ||
                  c.optimizer.spec.kind == OptimizerKind::kAdamW),
               "optimizer.type Adam, AdamW")),
      Key("optimizer.params.momentum", FIELD(optimizer.spec.momentum),
          "0: no momentum buffer.", HalfOpen(0, 1), kSgd),
      Key("optimizer.params.dampening", FIELD(optimizer.spec.dampening),
          "The gradient enters the momentum buffer times 1 - dampening.",
          Range(0, 1),
          Unread(IF(c.optimizer.spec.momentum == 0),
                 "optimizer.params.momentum is 0"),
          kSgd),
      Key("optimizer.params.nesterov", FIELD(optimizer.spec.nesterov),
          "Nesterov's momentum.", kSgd),
      Key("optimizer.params.max_coeff", FIELD(optimizer.spec.max_coeff),
          "Largest trust ratio.", Above(0), kLamb),
      Key("optimizer.params.min_coeff", FIELD(optimizer.spec.min_coeff),
          "Smallest trust ratio.", AtLeast(0), kLamb),
      Section("scheduler",
              "The learning rate as a function of the step, counted from 0. "
              "The first step already moves the parameters."),
      Key("scheduler.type", FIELD(scheduler.kind),
          "DeepSpeed's schedules, WSD (warm-up, stable, decay) and Constant.",
          Unbuilt({"LRRangeTest"}, "there is no range test"),
          DeepSpeed("keeps warmup_min_lr for two steps; here warm-ups run two "
                    "steps ahead, so that the first step moves, and linear "
                    "decays one step ahead. WSD and Constant are ours")),
      Section("scheduler.params", "Parameters of scheduler.type."),
      Key("scheduler.params.warmup_min_lr", FIELD(scheduler.warmup_min_lr),
          "Learning rate before the warm-up; WarmupDecayLR also ends there.",
          AtLeast(0),
          Unread(IF(c.scheduler.kind != LrScheduleKind::kWarmupDecayLr &&
                    c.scheduler.warmup_num_steps <= 1),
                 kLeavesNoWarmup),
          kWarmups),
      Key("scheduler.params.warmup_max_lr", FIELD(scheduler.warmup_max_lr),
          "Learning rate after the warm-up.", Above(0),
          Derived("optimizer.params.lr"), kWarmups,
          DeepSpeed("0.001, whatever the optimizer's lr is; here the "
                    "optimizer's lr")),
      Key("scheduler.params.warmup_num_steps",
          FIELD(scheduler.warmup_num_steps), "Steps of the warm-up.",
          AtLeast(0), kAllWarmups,
          DeepSpeed("\"auto\" is Hugging Face's Trainer's 0; here the "
                    "default")),
      Key("scheduler.params.warmup_type", FIELD(scheduler.warmup_type),
          "The rise: log(step) / log(warmup_num_steps), or linear.", kNoWarmup,
          kAllWarmups),
      Key("scheduler.params.total_num_steps", FIELD(scheduler.total_num_steps),
          "Step at which the decay ends.", AtLeast(1), MayBeUnset,
          Derived("the steps of the run"), kDecays,
          DeepSpeed("required; here the steps of the run")),
      Key("scheduler.params.warmup_min_ratio",
          FIELD(scheduler.warmup_min_ratio),
          "Start of the warm-up, as a ratio of the learning rate.", Range(0, 1),
          kNoWarmup, kCosineWarmup),
      Key("scheduler.params.cos_min_ratio", FIELD(scheduler.cos_min_ratio),
          "End of the cosine, as a ratio of the learning rate.", Range(0, 1),
          kCosine),
      Key("scheduler.params.decay_num_steps", FIELD(scheduler.decay_num_steps),
          "The last steps of total_num_steps, during which the rate falls.",
          AtLeast(1), MayBeUnset, Derived("total_num_steps / 10, rounded up"),
          kWsd),
      Key("scheduler.params.decay_type", FIELD(scheduler.decay_type),
          "The shape of the fall.", kWsd),
      Key("scheduler.params.min_lr_ratio", FIELD(scheduler.min_lr_ratio),
          "End of the fall, as a ratio of the learning rate.", Range(0, 1),
          kWsd),
      Key("scheduler.params.cycle_min_lr", FIELD(scheduler.cycle_min_lr),
          "Learning rate at both ends of the cycle.", AtLeast(0), kCycle),
      Key("scheduler.params.cycle_max_lr", FIELD(scheduler.cycle_max_lr),
          "Learning rate at the top of the cycle.", Above(0),
          Derived("optimizer.params.lr"), kCycle,
          DeepSpeed("required; here the optimizer's lr")),
      Key("scheduler.params.decay_lr_rate", FIELD(scheduler.decay_lr_rate),
          "After the cycle: lr = cycle_min_lr / (1 + rate * intervals).",
          AtLeast(0), kNoDecaySteps,
          Unread(IF(c.scheduler.cycle_min_lr == 0),
                 "scheduler.params.cycle_min_lr is 0 and cannot decay"),
          kCycle),
      Key("scheduler.params.cycle_first_step_size",
          FIELD(scheduler.cycle_first_step_size), "Steps of the rise.",
          AtLeast(1), kCycle),
      Key("scheduler.params.cycle_second_step_size",
          FIELD(scheduler.cycle_second_step_size), "Steps of the fall.",
          AtLeast(1), Derived("cycle_first_step_size"), kCycle),
      Key("scheduler.params.cycle_first_stair_count",
          FIELD(scheduler.cycle_first_stair_count),
          "Stairs of the rise; 0: smooth.", AtLeast(0), kCycle),
      Key("scheduler.params.cycle_second_stair_count",
          FIELD(scheduler.cycle_second_stair_count),
          "Stairs of the fall; 0: smooth.", AtLeast(0),
          Derived("cycle_first_stair_count"), kCycle),
      Key("scheduler.params.decay_step_size", FIELD(scheduler.decay_step_size),
          "Steps of one decay interval after the cycle; 0: no decay.",
          AtLeast(0), kNothingDecays, kCycle),
      Key("scheduler.params.cycle_momentum", FIELD(scheduler.cycle_momentum),
          "beta1 runs from cycle_max_mom to cycle_min_mom and back.", kCycle,
          DeepSpeed(
              "also sets beta2 to 0.99; here beta2 stays the optimizer's")),
      Key("scheduler.params.cycle_min_mom", FIELD(scheduler.cycle_min_mom),
          "beta1 at the top of the cycle.", HalfOpen(0, 1), kSteadyMomentum,
          kCycle),
      Key("scheduler.params.cycle_max_mom", FIELD(scheduler.cycle_max_mom),
          "beta1 at both ends of the cycle.", HalfOpen(0, 1), kSteadyMomentum,
          kCycle),
      Key("scheduler.params.decay_mom_rate", FIELD(scheduler.decay_mom_rate),
          "After the cycle: beta1 = cycle_max_mom * (1 + rate * intervals).",
          AtLeast(0), kNoDecaySteps, kSteadyMomentum, kCycle),
      Section("lr_scaling",
              "Goyal et al. 2017: the learning rate grows with the batch, "
              "after a linear warm-up from the base rate. The scheduler "
              "continues from there, without its own warm-up."),
      Key(KEY(lr_scaling.rule),
          "linear: lr = base_lr * train_batch_size / base_batch_size; sqrt: by "
          "the square root of that ratio."),
      Key(KEY(lr_scaling.base_batch_size),
          "The batch for which optimizer.params.lr was chosen.", AtLeast(1),
          MayBeUnset),
      Key(KEY(lr_scaling.warmup_steps),
          "Steps from base_lr to the scaled rate.", AtLeast(0), kNoScaling),
      Key(KEY(lr_scaling.warmup_epochs), "Instead of warmup_steps.",
          Range(0, 1e6), kNoScaling),
      Section("zero_optimization",
              "Which model states are sharded over the ranks."),
      Key(KEY(zero_optimization.stage),
          "0: none; 1: optimizer; 2: and gradients; 3: and parameters.",
          BetweenRanks, Range(0, 3)),
      Key(KEY(zero_optimization.reduce_bucket_size),
          "Gradient elements reduced at once (at least one segment).",
          BetweenRanks, AtLeast(0),
          DeepSpeed(
              "500 million; smaller ones hide more and take less memory")),
      Key(KEY(zero_optimization.allgather_bucket_size),
          "Updated parameters gathered at once, in elements (stages 1, 2; at "
          "least one segment).",
          BetweenRanks, AtLeast(0),
          DeepSpeed("500 million; smaller ones hide more and take less memory"),
          Unread(IF(!(c.zero_optimization.stage == 1 ||
                      c.zero_optimization.stage == 2)),
                 "only zero_optimization.stage 1 and 2 gather updated "
                 "parameters")),
      Key(KEY(zero_optimization.overlap_comm), "Communicate while computing.",
          BetweenRanks, DeepSpeed("true at stage 3 only; here at all stages")),
      Key(KEY(zero_optimization.stage3_prefetch_bucket_size),
          "Parameters gathered ahead, in elements; 0: none. Unset: those of "
          "the next unit.",
          BetweenRanks, AtLeast(0), RoundsDown, MayBeUnset, kReplicated,
          DeepSpeed("50 million; here one unit (block) ahead, which hides it")),
      Key(KEY(zero_optimization.stage3_max_live_parameters),
          "Units stay in place for their next use while they hold at most this "
          "many elements. Unset: no limit if stage3_max_reuse_distance is set, "
          "else two units.",
          BetweenRanks, AtLeast(0), MayBeUnset, kReplicated,
          DeepSpeed("a billion; here two units, to save memory")),
      Key(KEY(zero_optimization.stage3_max_reuse_distance),
          "A unit stays in place if it is used again after fewer elements than "
          "this. Unset: no limit if stage3_max_live_parameters is set, else "
          "two units.",
          BetweenRanks, AtLeast(0), MayBeUnset, kReplicated,
          DeepSpeed("a billion; here two units, to save memory")),
      Key(KEY(zero_optimization.stage3_param_persistence_threshold),
          "Units whose parameters are all smaller than this are gathered once "
          "per step and stay in place, in elements.",
          BetweenRanks, AtLeast(0), kReplicated,
          DeepSpeed(
              "100000, for each parameter separately; here 0, and whole units: "
              "small parameters travel with the large ones of their unit")),
      Key(KEY(zero_optimization.stage3_model_persistence_threshold),
          "Most elements that the units staying in place may hold together.",
          BetweenRanks, AtLeast(0),
          Unread(
              IF(c.zero_optimization.stage < 3 ||
                 c.zero_optimization.stage3_param_persistence_threshold == 0),
              "no unit stays in place")),
      Key(KEY(zero_optimization.vocabulary_parts),
          "Gather and reduce the vocabulary's table in parts, none larger than "
          "a block, and recompute a micro-batch's logits in backward, unless "
          "they are few. auto: at stages 2 and 3 if the memory saved is worth "
          "the time; at 0 to 2, to hide more communication, if no logits are "
          "recomputed and they take at most a 16th of the model states. "
          "Changes no bit of the result.",
          BetweenRanks),
      Key(KEY(zero_optimization.ignore_unused_parameters),
          "Continue when no gradient reaches a parameter; false: an error."),
      Key(KEY(zero_optimization.mics_shard_size),
          "Shard within groups of this many consecutive ranks and replicate "
          "over the groups (MiCS, FSDP's hybrid sharding); divides the ranks. "
          "-1: one group; \"auto\": one group per host, by "
          "communication.ranks_per_host or the launcher.",
          BetweenRanks, Range(-1, 1024),
          DeepSpeed("stage 3 only, by its own Init; here stages 1 to 3")),
      Section("zero_optimization.offload_optimizer",
              "The optimizer's arrays, master weights and gradients in the "
              "host's memory, updated there (ZeRO-Offload).",
              MayBeUnset),
      Key("zero_optimization.offload_optimizer.device",
          FIELD(zero_optimization.offload_optimizer),
          "cpu: in the host's memory. Stages 1 to 3. Changes no bit of the "
          "result, except on one rank at stages 2 and 3 with several "
          "micro-batches, which are then added in another order. nvme: "
          "gradients in the host's memory, all else on a disk, updated in the "
          "host's memory as it passes through (ZeRO-Infinity)."),
      Key("zero_optimization.offload_optimizer.nvme_path",
          FIELD(zero_optimization.optimizer_nvme_path),
          "Folder for device nvme, on a fast local disk: a file for each rank, "
          "removed when the run ends. It is made if only the last folder of "
          "the path is missing.",
          MayBeUnset,
          Unread(
              IF(c.zero_optimization.offload_optimizer != OffloadDevice::kNvme),
              "zero_optimization.offload_optimizer.device is not \"nvme\"")),
      Key(
          "zero_optimization.offload_optimizer.ratio",
          FIELD(zero_optimization.offload_optimizer_ratio),
          "The host keeps and updates at most this share of the optimizer, in "
          "whole units, largest first and at least one; the device keeps and "
          "updates the rest. Changes bits only where device does.",
          Above(0), [](KeySpec& key) { key.max = 1; },
          Unread(
              IF(c.zero_optimization.offload_optimizer == OffloadDevice::kNone),
              "zero_optimization.offload_optimizer.device is none")),
      Key("zero_optimization.offload_optimizer.update_before_norm",
          FIELD(zero_optimization.update_before_norm),
          "Update a unit as soon as its gradients are on the host, during the "
          "rest of backward, not after the norm of all gradients. Same bits; "
          "but a gradient that is not finite then ends the run, where the step "
          "would have been skipped. Not with clipping, fp16, LAMB or nvme.",
          Unread(
              IF(c.zero_optimization.offload_optimizer == OffloadDevice::kNone),
              "zero_optimization.offload_optimizer.device is none"),
          DeepSpeed("has super_offload, which updates early too and rolls "
                    "back if a gradient was not finite")),
      Section("zero_optimization.offload_optimizer.delayed_update",
              "Run the host's update during the next step, whose gradients are "
              "therefore those of parameters one update behind (ZeRO-Offload's "
              "delayed parameter update). Changes results, the more the higher "
              "the learning rate: compare with a run without it."),
      Key("zero_optimization.offload_optimizer.delayed_update.enabled",
          FIELD(zero_optimization.delayed_update),
          "Update during the next step. Evaluation, checkpoints and final/ "
          "have the newest parameters. The host keeps two copies of its "
          "gradients, and of any parameters that live there.",
          DeepSpeed("has no such key: its runtime lacks the delayed update of "
                    "the ZeRO-Offload paper")),
      Key("zero_optimization.offload_optimizer.delayed_update.warmup_steps",
          FIELD(zero_optimization.delayed_update_warmup_steps),
          "Steps before the first delayed one: early in training an update "
          "changes the gradients most.",
          AtLeast(0),
          Unread(
              IF(!c.zero_optimization.delayed_update),
              "zero_optimization.offload_optimizer.delayed_update.enabled is "
              "false"),
          DeepSpeed("has no such key; the paper waits 40 steps")),
      Section("zero_optimization.offload_param",
              "Parameters in the host's memory, on the device while a unit "
              "uses them.",
              MayBeUnset),
      Key("zero_optimization.offload_param.device",
          FIELD(zero_optimization.offload_param),
          "cpu: in the host's memory; nvme: on a disk. Stage 3; the optimizer "
          "goes there as well, unless offload_optimizer.device is given.",
          kReplicated),
      Key("zero_optimization.offload_param.nvme_path",
          FIELD(zero_optimization.param_nvme_path),
          "Like offload_optimizer.nvme_path; the same if both are nvme.",
          MayBeUnset,
          Unread(IF(c.zero_optimization.offload_param != OffloadDevice::kNvme),
                 "zero_optimization.offload_param.device is not \"nvme\"")),
      Section("tensorboard", "DeepSpeed's section. Here: training.tensorboard.",
              MayBeUnset),
      Section("checkpoint",
              "DeepSpeed's section. Here: training.save_every and the keys "
              "after it.",
              MayBeUnset),
      Section("aio", "How states on a disk (device nvme) are read and written.",
              MayBeUnset),
      Key(KEY(aio.block_size), "Bytes of a request; a multiple of 4096.",
          Range(4096, 1 << 30), kNoDisk),
      Key(KEY(aio.queue_depth),
          "Requests in flight at once, for each of thread_count: this many "
          "reads and as many writes.",
          Range(1, 1024), kNoDisk),
      Key(KEY(aio.thread_count),
          "Without io_uring, threads that read and as many that write; else it "
          "multiplies queue_depth.",
          Range(1, 64), kNoDisk,
          DeepSpeed("threads; here one thread keeps all requests in flight")),
      Key(KEY(aio.single_submit),
          "Submit each request separately, not all that are ready.", kNoDisk),
      Key(KEY(aio.overlap_events),
          "Submit new requests as soon as one completes; false: when all in "
          "flight have.",
          kNoDisk),
      Key(KEY(aio.checksums),
          "Verify every read by a checksum (XXH3) of the written data.",
          kNoDisk, DeepSpeed("has no such key: it does not verify reads")),
      Section("activation_checkpointing",
              "Keep less for backward, which computes the rest again. What one "
              "pass over memory gives (norms, GELU, SwiGLU) is computed again "
              "anyway, unless keep_all is true."),
      Key("activation_checkpointing.enabled", FIELD(activation_checkpointing),
          "Recompute in backward. Changes no bit of the result.",
          DeepSpeed("has no such key: the model's code decides; here one key "
                    "turns it on")),
      Key("activation_checkpointing.granularity", FIELD(recompute_granularity),
          "full: keep only a unit's input; selective: also its residual sum "
          "and attention's output, and recompute only q, k, v and the first "
          "layer of the FFN.",
          Choices({"selective", "full"}),
          Unread(IF(!c.activation_checkpointing),
                 "activation_checkpointing.enabled is false"),
          DeepSpeed("has no such key; Megatron-LM's is "
                    "--recompute-granularity")),
      Key("activation_checkpointing.keep_all", FIELD(keep_all_activations),
          "Keep the outputs of norms, GELU and SwiGLU as well, so that "
          "backward computes nothing again: for speed where memory is ample. "
          "Changes no bit of the result on the CPU; on a GPU it keeps GELU as "
          "fused into its product, which rounds differently from GELU alone.",
          Unread(IF(c.activation_checkpointing),
                 "activation_checkpointing.enabled is true"),
          DeepSpeed("has no such key: it keeps what the model's code keeps")),
      Section("communication", "How ranks talk to each other."),
      Key(KEY(communication.algorithm),
          "direct: a rank reads all the others at once; ring: its neighbour, "
          "step by step; parameter_server: rank 0 sums all gradients, updates "
          "and broadcasts (stage 0); hierarchical: gradients are summed within "
          "each host, and a host sends its sum once, for fewer bytes between "
          "hosts. Bits are equal within each, not between them.",
          BetweenRanks),
      Key(KEY(communication.ranks_per_host),
          "How many consecutive ranks are summed as one host's; 0: those that "
          "the launcher started on each host, or all without a launcher. The "
          "bits depend on it, and on nothing else about the placement of "
          "ranks.",
          BetweenRanks, Range(0, 1 << 20),
          Unread(IF(c.communication.algorithm !=
                        CommunicationAlgorithm::kHierarchical &&
                    c.zero_optimization.mics_shard_size !=
                        c.communication.ranks_per_host),
                 "communication.algorithm is not hierarchical, and "
                 "zero_optimization.mics_shard_size is not \"auto\"")),
      Key(KEY(communication.backend),
          "local: ranks are threads of one process and read each other's "
          "memory; mpi: also ranks in other processes, started by mpirun or "
          "srun, on the CPU, with the bits of local; nccl: a GPU for each "
          "rank, in threads or in processes of torchrun or srun; auto: nccl "
          "for several GPUs, mpi for processes on the CPU, else local. fp32 "
          "sums are in rank order, with nccl in NCCL's.",
          BetweenRanks),
      Key(KEY(communication.timeout_seconds),
          "How long a rank waits for another before the run fails.",
          BetweenRanks, Range(0.001, 1e6)),
      Key(KEY(communication.straggler_factor),
          "Name a rank whose own work takes more than this many times the "
          "other ranks' median in most of 20 steps; 0: none.",
          BetweenRanks, Range(0, 1000)),
      Section("device", "How a GPU computes; --device cuda uses one."),
      Key("device.allow_tf32", FIELD(device.cuda.allow_tf32),
          "fp32 products on tensor cores, with 10 bits of mantissa.", OfGpu),
      Key("device.deterministic_attention",
          FIELD(device.cuda.deterministic_attention),
          "Sum 16-bit attention's gradients in a fixed order; slower, with "
          "more memory. All other sums are in a fixed order anyway.",
          OfGpu),
      Key("device.time_algorithms", FIELD(device.cuda.time_algorithms),
          "Time the candidates for every shape of product once and take the "
          "fastest, not the library's first choice. Takes memory during the "
          "first step: not for ranks that nccl connects as threads.",
          OfGpu),
      Key("device.fp32_logits", FIELD(device.cuda.fp32_logits),
          "Keep the logits of 16-bit models in fp32, with twice the bytes. "
          "Else they are in the model's dtype, and softmax and loss are "
          "computed from them in fp32. In "
          "fp16 a logit beyond 65504 is then infinite; if that makes the loss "
          "non-finite, the step is skipped.",
          OfGpu,
          Unread(IF(c.param_dtype() == DType::kF32),
                 "the model is fp32, and so are its logits")),
      Key("device.loss_chunk_rows", FIELD(device.cuda.loss_chunk_rows),
          "Rows of logits held at a time: fewer take less memory, more are "
          "faster.",
          OfGpu, AtLeast(1)),
      Key(KEY(steps_per_print), "Steps between lines of output.", AtLeast(1)),
      Key(KEY(wall_clock_breakdown), "Print the time of each phase of a step."),
      Key(KEY(memory_breakdown), "Print the bytes of each memory category."),
      Key(KEY(dump_state), "Print the resolved config at the start."),
  };
}

// The remedy for a key that is refused for the reason in its doc.
std::string Remedy(const KeySpec& key) {
  const std::string harmless =
      key.harmless == "disabled" ? "enabled: false" : key.harmless;
  if (absl::StrContains(key.doc, "write ")) {
    return harmless.empty() ? "" : absl::StrCat("; ", harmless, " is accepted");
  }
  return absl::StrCat("; delete it",
                      harmless.empty() ? "" : ", or write " + harmless);
}

}  // namespace

const char* KeySpec::WhyUnread(const Config& config) const {
  for (const Unread& one : unread) {
    if (one.holds(config)) return one.reason;
  }
  return nullptr;
}

const std::vector<KeySpec>& AllKeys() {
  static const std::vector<KeySpec>* const kTable = [] {
    auto* table = new std::vector<KeySpec>(UsedKeys());
    for (const ForeignKey& foreign : ForeignKeys()) {
      for (const auto path : absl::StrSplit(foreign.paths, ' ')) {
        KeySpec& key = table->emplace_back();
        key.path = std::string(path);
        key.kind = foreign.kind;
        key.treatment = foreign.treatment;
        key.doc = foreign.reason;
        key.harmless = foreign.harmless;
        if (key.treatment == Treatment::kRefused ||
            key.treatment == Treatment::kNotBuilt) {
          absl::StrAppend(&key.doc, Remedy(key));
        }
      }
    }
    return table;
  }();
  return *kTable;
}

const KeySpec* FindKey(absl::string_view path) {
  for (const KeySpec& key : AllKeys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

}  // namespace zero
