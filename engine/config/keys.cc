#include "engine/config/keys.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/nearest.h"

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
Names NamesOf(DataFormat) { return {"auto", "text", "llmc", "raw_uint16"}; }
Names NamesOf(CommunicationAlgorithm) {
  return {"direct", "ring", "parameter_server"};
}
Names NamesOf(CommunicationBackend) { return {"auto", "local", "nccl"}; }
Names NamesOf(DType) { return {"fp32", "bf16", "fp16"}; }
Names NamesOf(ModelFamily) { return {"gpt2", "llama", "qwen2", "qwen3"}; }

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

// Counts stay so far below 2^63 that sums of them, and products with a batch
// of tokens, fit.
constexpr double kMaxCount = 1e12;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

#define FIELD(member)                                \
  [](const Config& c) { return ToValue(c.member); }, \
      [](Config& c, const KeyValue& v) { FromValue(v, c.member); }

#define IF(condition) [](const Config& c) -> bool { return condition; }

// Why a run does not read a key, or null: UNREAD(c.x == 0 ? "x is 0" : nullptr)
#define UNREAD(reason) [](const Config& c) -> const char* { return reason; }

// ---- The table's own words ------------------------------------------------

class Table {
 public:
  using Get = KeyValue (*)(const Config&);
  using Set = void (*)(Config&, const KeyValue&);

  // Fluent access to the line that was added last.
  class Line {
   public:
    explicit Line(KeySpec* key) : key_(key) {}
    Line& Range(double min, double max) {
      key_->min = min;
      key_->max = max;
      return *this;
    }
    Line& AtLeast(double min) {
      key_->min = min;
      return *this;
    }
    Line& AtMost(double max) {
      key_->max = max;
      return *this;
    }
    Line& Above(double min) {
      key_->min = min;
      key_->above_min = true;
      return *this;
    }
    Line& HalfOpen(double min, double max) {  // [min, max)
      key_->below_max = true;
      return Range(min, max);
    }
    Line& Choices(Names choices) {
      key_->choices = std::move(choices);
      return *this;
    }
    Line& AnyCase() {
      key_->any_case = true;
      return *this;
    }
    Line& Unbuilt(Names values, std::string reason) {
      for (const std::string& value : values) {
        if (key_->kind == KeyKind::kChoice &&
            std::count(key_->choices.begin(), key_->choices.end(), value) ==
                0) {
          key_->choices.push_back(value);
        }
      }
      key_->unbuilt = std::move(values);
      key_->unbuilt_reason = std::move(reason);
      return *this;
    }
    Line& Harmless(std::string value) {
      key_->harmless = std::move(value);
      return *this;
    }
    Line& Derived(std::string how) {
      key_->derived = std::move(how);
      return *this;
    }
    Line& MayBeUnset() {
      key_->may_be_unset = true;
      return *this;
    }
    Line& When(bool (*applies)(const Config&), std::string to) {
      key_->applies = applies;
      key_->applies_to = std::move(to);
      return *this;
    }
    Line& Unread(const char* (*why)(const Config&)) {
      key_->unread = why;
      return *this;
    }
    Line& BetweenRanks() {
      key_->between_ranks = true;
      return *this;
    }
    Line& OfGpu() {
      key_->of_gpu = true;
      return *this;
    }
    Line& DeepSpeed(std::string difference) {
      key_->deepspeed = std::move(difference);
      return *this;
    }

   private:
    KeySpec* key_;
  };

  Line Add(KeyKind kind, Treatment treatment, std::string path, std::string doc,
           Get get = nullptr, Set set = nullptr) {
    KeySpec& key = keys_.emplace_back();
    key.path = std::move(path);
    key.kind = kind;
    key.treatment = treatment;
    key.doc = std::move(doc);
    key.get = get;
    key.set = set;
    return Line(&key);
  }

  Line Object(std::string path, std::string doc) {
    return Add(KeyKind::kObject, Treatment::kUsed, std::move(path),
               std::move(doc));
  }
  Line Bool(std::string path, Get get, Set set, std::string doc) {
    return Used(KeyKind::kBool, path, get, set, doc);
  }
  // At most kMaxCount unless the line says otherwise.
  Line Integer(std::string path, Get get, Set set, std::string doc) {
    return Used(KeyKind::kInteger, path, get, set, doc).AtMost(kMaxCount);
  }
  Line Number(std::string path, Get get, Set set, std::string doc) {
    return Used(KeyKind::kNumber, path, get, set, doc);
  }
  Line String(std::string path, Get get, Set set, std::string doc) {
    return Used(KeyKind::kString, path, get, set, doc);
  }
  Line Files(std::string path, Get get, Set set, std::string doc) {
    return Used(KeyKind::kFiles, path, get, set, doc);
  }
  Line Choice(std::string path, Names choices, Get get, Set set,
              std::string doc) {
    return Used(KeyKind::kChoice, path, get, set, doc)
        .Choices(std::move(choices));
  }
  void Note(KeyKind kind, std::string path, std::string reason) {
    Add(kind, Treatment::kNote, std::move(path), std::move(reason));
  }
  Line Refuse(KeyKind kind, std::string path, std::string reason) {
    return Add(kind, Treatment::kRefused, std::move(path), std::move(reason));
  }
  Line NotBuilt(KeyKind kind, std::string path, std::string reason) {
    return Add(kind, Treatment::kNotBuilt, std::move(path), std::move(reason));
  }

  std::vector<KeySpec> Take() { return std::move(keys_); }

 private:
  Line Used(KeyKind kind, std::string& path, Get get, Set set,
            std::string& doc) {
    return Add(kind, Treatment::kUsed, std::move(path), std::move(doc), get,
               set);
  }

  std::vector<KeySpec> keys_;
};

constexpr KeyKind kBool = KeyKind::kBool;
constexpr KeyKind kInteger = KeyKind::kInteger;
constexpr KeyKind kNumber = KeyKind::kNumber;
constexpr KeyKind kString = KeyKind::kString;
constexpr KeyKind kOpaque = KeyKind::kOpaque;

// ---- model ----------------------------------------------------------------

#define GPT2 IF(c.model.family == ModelFamily::kGpt2), "model_type gpt2"
#define ROTARY \
  IF(c.model.family != ModelFamily::kGpt2), "model_type llama, qwen2, qwen3"

void AddModel(Table& t) {
  t.Object("model",
           "The transformer: a preset, a pretrained folder, or a family and "
           "its hyperparameters under the names of its Hugging Face "
           "config.json. Explicit keys override the preset.");
  t.String("model.preset", FIELD(model_preset),
           "A model by name; `zero models` lists them.")
      .MayBeUnset();
  t.String("model.from_pretrained", FIELD(model.from_pretrained),
           "A Hugging Face folder (config.json, model.safetensors) to start "
           "from.")
      .MayBeUnset();
  t.Choice("model.model_type", NamesOf(ModelFamily{}), FIELD(model.family),
           "The family; not needed beside preset or from_pretrained.");
  t.Integer("model.vocab_size", FIELD(model.vocab_size), "Number of token ids.")
      .Range(1, 1 << 24)
      .Derived("the ids of data.tokenizer; 257 for \"bytes\"");
  t.Bool("model.tie_word_embeddings", FIELD(model.tie_word_embeddings),
         "One matrix for the embedding and the head.")
      .Derived("true for gpt2, else false");
  t.Number("model.initializer_range", FIELD(model.initializer_range),
           "Standard deviation of the initial weights.")
      .Above(0);

  t.Number("model.embd_pdrop", FIELD(model.embd_pdrop),
           "Dropout after the embedding, while training.")
      .HalfOpen(0, 1);
  t.Number("model.resid_pdrop", FIELD(model.resid_pdrop),
           "Dropout before each residual addition, while training.")
      .HalfOpen(0, 1);

  t.Integer("model.n_embd", FIELD(model.hidden_size), "Width.")
      .Range(1, 1 << 20)
      .When(GPT2);
  t.Integer("model.n_layer", FIELD(model.num_hidden_layers),
            "Number of transformer blocks.")
      .Range(1, 4096)
      .When(GPT2);
  t.Integer("model.n_head", FIELD(model.num_attention_heads),
            "Attention heads; divides n_embd.")
      .Range(1, 1 << 16)
      .When(GPT2);
  t.Integer("model.n_inner", FIELD(model.intermediate_size),
            "Feed-forward width.")
      .Range(1, 1 << 22)
      .Derived("4 * n_embd")
      .When(GPT2);
  t.Integer("model.n_positions", FIELD(model.max_position_embeddings),
            "Rows of the learned position table.")
      .Range(1, 1 << 24)
      .Derived("data.sequence_length")
      .When(GPT2);
  t.Number("model.layer_norm_epsilon", FIELD(model.norm_eps),
           "Added to the variance in LayerNorm.")
      .Above(0)
      .When(GPT2);
  t.Choice("model.activation_function", {"gelu_new", "gelu"},
           FIELD(model.activation),
           "gelu_new is the tanh approximation, gelu the exact function.")
      .When(GPT2);
  t.Integer("model.hidden_size", FIELD(model.hidden_size), "Width.")
      .Range(1, 1 << 20)
      .When(ROTARY);
  t.Integer("model.num_hidden_layers", FIELD(model.num_hidden_layers),
            "Number of transformer blocks.")
      .Range(1, 4096)
      .When(ROTARY);
  t.Integer("model.num_attention_heads", FIELD(model.num_attention_heads),
            "Query heads.")
      .Range(1, 1 << 16)
      .When(ROTARY);
  t.Integer("model.num_key_value_heads", FIELD(model.num_key_value_heads),
            "Key and value heads; divides num_attention_heads.")
      .Range(1, 1 << 16)
      .Derived("num_attention_heads")
      .When(ROTARY);
  t.Integer("model.head_dim", FIELD(model.head_dim), "Width of one head; even.")
      .Range(2, 1 << 16)
      .Derived("hidden_size / num_attention_heads; 128 for qwen3")
      .When(ROTARY);
  t.Integer("model.intermediate_size", FIELD(model.intermediate_size),
            "Feed-forward width.")
      .Range(1, 1 << 22)
      .When(ROTARY);
  t.Integer("model.max_position_embeddings",
            FIELD(model.max_position_embeddings),
            "Longest sequence the model is made for; costs no parameters.")
      .Range(1, 1 << 24)
      .Derived("2048 for llama, else 32768; sequence_length if that is more")
      .When(ROTARY);
  t.Number("model.rms_norm_eps", FIELD(model.norm_eps),
           "Added to the mean square in RMSNorm.")
      .Above(0)
      .When(ROTARY);
  t.Choice("model.hidden_act", {"silu"}, FIELD(model.activation),
           "The gate's activation: SwiGLU.")
      .When(ROTARY);
  t.Number("model.rope_theta", FIELD(model.rope_theta),
           "Base of the rotary frequencies.")
      .Above(0)
      .When(ROTARY);
  t.Object("model.rope_scaling", "Llama 3.1's scaling of rotary frequencies.")
      .When(ROTARY);
  t.Choice(
       "model.rope_scaling.rope_type", {"default", "llama3"},
       [](const Config& c) -> KeyValue {
         return c.model.rope_scaling.enabled ? "llama3" : "default";
       },
       [](Config& c, const KeyValue& v) {
         c.model.rope_scaling.enabled = std::get<std::string>(v) == "llama3";
       },
       "default: not scaled.")
      .When(ROTARY);
#define SCALED                                                              \
  IF(c.model.family != ModelFamily::kGpt2 && c.model.rope_scaling.enabled), \
      "rope_type llama3"
  t.Number("model.rope_scaling.factor", FIELD(model.rope_scaling.factor),
           "Low frequencies are divided by it.")
      .AtLeast(1)
      .When(SCALED);
  t.Number("model.rope_scaling.low_freq_factor",
           FIELD(model.rope_scaling.low_freq_factor),
           "Wavelengths above original / this are scaled in full.")
      .Above(0)
      .When(SCALED);
  t.Number("model.rope_scaling.high_freq_factor",
           FIELD(model.rope_scaling.high_freq_factor),
           "Wavelengths below original / this are not scaled.")
      .Above(0)
      .When(SCALED);
  t.Integer("model.rope_scaling.original_max_position_embeddings",
            FIELD(model.rope_scaling.original_max_position_embeddings),
            "Sequence length of the unscaled model.")
      .AtLeast(1)
      .When(SCALED);

  // Keys of Hugging Face's files that a pasted config.json brings along.
  const std::string attention_dropout =
      "dropout of attention weights is not in these models; 0 is accepted";
  t.Refuse(kNumber, "model.attn_pdrop", attention_dropout).Harmless("0");
  t.Refuse(kNumber, "model.attention_dropout", attention_dropout).Harmless("0");
  t.Refuse(kBool, "model.attention_bias",
           "llama and qwen3 have no attention biases here, gpt2 and qwen2 "
           "always have theirs; false is accepted")
      .Harmless("false");
  t.Refuse(kBool, "model.mlp_bias",
           "feed-forward biases are not in these models; false is accepted")
      .Harmless("false");
  t.Refuse(kBool, "model.use_sliding_window",
           "attention sees the whole sequence; false is accepted")
      .Harmless("false");
  t.Refuse(kInteger, "model.sliding_window",
           "attention sees the whole sequence; null is accepted")
      .Harmless("null");
  t.Refuse(kBool, "model.scale_attn_weights",
           "attention is always scaled by 1 / sqrt(head_dim); true is accepted")
      .Harmless("true");
  t.Refuse(kBool, "model.scale_attn_by_inverse_layer_idx",
           "attention is not scaled by the layer; false is accepted")
      .Harmless("false");
  t.Refuse(kInteger, "model.n_ctx", "write n_positions");
  t.Refuse(kOpaque, "model.rope_parameters",
           "write rope_theta, and rope_scaling with the other keys");
  const std::string dtype = "write bf16.enabled or fp16.enabled";
  t.Refuse(kString, "model.torch_dtype", dtype);
  t.Refuse(kString, "model.dtype", dtype);
  t.Note(kBool, "model.reorder_and_upcast_attn",
         "softmax is always computed in fp32");
  t.Note(kBool, "model.use_cache", "training keeps no key/value cache");
  t.Note(kInteger, "model.bos_token_id", "the tokenizer decides");
  t.Note(kInteger, "model.eos_token_id", "the tokenizer decides");
  t.Note(kInteger, "model.pad_token_id", "samples are packed, not padded");
}

// ---- data, training -------------------------------------------------------

// Why nothing asks which token ends a text, or the tokenizer knows.
const char* NoEosTokenId(const Config& c) {
  if (!c.data.reset_attention_mask) {
    return "data.reset_attention_mask is false";
  }
  return c.data.tokenizer == "none" ? nullptr
                                    : "data.tokenizer has an end of text";
}

void AddData(Table& t) {
  t.Object("data", "What is trained on.");
  t.Files("data.train", FIELD(data.train),
          "A file, a glob or a list of them. Relative to the current folder, "
          "else to the config file.")
      .MayBeUnset();
  t.Files("data.validation", FIELD(data.validation),
          "Held-out data, as data.train.")
      .MayBeUnset();
  t.Number("data.validation_fraction", FIELD(data.validation_fraction),
           "Without data.validation: this last part of data.train is held "
           "out.")
      .HalfOpen(0, 1);
  t.Choice("data.format", NamesOf(DataFormat{}), FIELD(data.format),
           "text; llmc (llm.c's header, then tokens); raw_uint16 (nanoGPT's "
           "tokens alone); auto looks at the file.");
  t.String("data.tokenizer", FIELD(data.tokenizer),
           "bytes, none (token files), or the path of a SentencePiece model.")
      .Derived("none for .bin files, else bytes");
  t.Integer("data.sequence_length", FIELD(data.sequence_length),
            "Tokens per sequence, T.")
      .Range(1, 1 << 24)
      .Derived("1024, or the model's positions if they are fewer");
  t.Bool("data.reset_attention_mask", FIELD(data.reset_attention_mask),
         "Documents in one sequence: tokens see only their own, and positions "
         "count from its start. The end-of-text token starts the document "
         "behind it, so that all targets count.");
  t.Integer("data.eos_token_id", FIELD(data.eos_token_id),
            "The end-of-text token of token files without a tokenizer, for "
            "reset_attention_mask; 50256 in GPT-2's.")
      .Range(0, (1 << 24) - 1)
      .MayBeUnset()
      .Unread(NoEosTokenId);
}

// Why no sample is drawn; why nothing is drawn at random.
const char* NoSample(const Config& c) {
  if (c.data.tokenizer == "none") {
    return "data.tokenizer is \"none\" and writes no text";
  }
  return c.training.sample.tokens == 0 ? "training.sample.tokens is 0"
                                       : nullptr;
}
const char* NoDraw(const Config& c) {
  if (NoSample(c) != nullptr) return NoSample(c);
  return c.training.sample.temperature == 0
             ? "training.sample.temperature is 0, always the likeliest token"
             : nullptr;
}

void AddTraining(Table& t) {
  t.Object("training", "How long, how often looked at, and where to.");
  t.Integer("training.steps", FIELD(training.steps),
            "Optimizer steps; or give epochs.")
      .AtLeast(1)
      .MayBeUnset();
  t.Number("training.epochs", FIELD(training.epochs),
           "Passes over data.train; or give steps.")
      .Range(0, 1e6)
      .Above(0)
      .MayBeUnset();
  t.Integer("training.seed", FIELD(training.seed),
            "Of initialization, data order and dropout.")
      .Range(0, kUnlimited);
  t.Integer("training.max_consecutive_skips",
            FIELD(training.max_consecutive_skips),
            "Stop after this many steps in a row with a non-finite gradient.")
      .AtLeast(1);
  t.String("training.out_dir", FIELD(training.out_dir),
           "Gets metrics.jsonl, summary.json, config.json and final/.")
      .Derived("out/NAME of the config file");
  t.Integer("training.eval_every", FIELD(training.eval_every),
            "Steps between evaluations; 0: at the end only.")
      .AtLeast(0);
  t.Integer("training.eval_batches", FIELD(training.eval_batches),
            "Micro-batches of every rank per evaluation; 0: all of the "
            "validation data.")
      .AtLeast(0);
  t.Integer("training.sample_every", FIELD(training.sample_every),
            "Steps between text samples; 0: at the end only.")
      .AtLeast(0);
  t.Object("training.sample", "The text sample.");
  t.String("training.sample.prompt", FIELD(training.sample.prompt),
           "Text to go on from; empty: the end-of-text token.")
      .Unread(NoSample);
  t.Integer("training.sample.tokens", FIELD(training.sample.tokens),
            "Tokens to generate; 0: no samples.")
      .AtLeast(0)
      .Unread(UNREAD(c.training.sample.tokens == 0 ? nullptr : NoSample(c)));
  t.Number("training.sample.temperature", FIELD(training.sample.temperature),
           "0: always the likeliest token.")
      .AtLeast(0)
      .Unread(NoSample);
  t.Integer("training.sample.top_k", FIELD(training.sample.top_k),
            "Draw from the k likeliest; 0: off.")
      .AtLeast(0)
      .Unread(NoDraw);
  t.Number("training.sample.top_p", FIELD(training.sample.top_p),
           "Draw from the likeliest that sum up to p; 1: off.")
      .Range(0, 1)
      .Above(0)
      .Unread(NoDraw);
  t.Integer("training.sample.seed", FIELD(training.sample.seed), "Of the draw.")
      .Range(0, kUnlimited)
      .Unread(NoDraw)
      .Derived("training.seed");
  t.Bool("training.save_final", FIELD(training.save_final),
         "Write out_dir/final/ at the end.");
}

// ---- Batch, precision, optimizer, schedule --------------------------------

void AddBatch(Table& t) {
  t.Integer("train_batch_size", FIELD(train_batch_size),
            "Sequences per step = train_micro_batch_size_per_gpu * "
            "gradient_accumulation_steps * ranks. Give it or "
            "train_micro_batch_size_per_gpu; \"auto\" and missing keys follow "
            "from the product.")
      .Range(1, 1 << 30)
      .Derived("the product");
  t.Integer("train_micro_batch_size_per_gpu",
            FIELD(train_micro_batch_size_per_gpu),
            "Sequences of one rank in one pass, B.")
      .Range(1, 1 << 30)
      .Derived("train_batch_size / (gradient_accumulation_steps * ranks)");
  t.Integer("gradient_accumulation_steps", FIELD(gradient_accumulation_steps),
            "Passes per step.")
      .Range(1, 1 << 30)
      .Derived(
          "train_batch_size / (train_micro_batch_size_per_gpu * ranks), "
          "else 1");
  t.Number("gradient_clipping", FIELD(gradient_clipping),
           "Largest norm of the whole gradient; 0: no clipping.")
      .AtLeast(0);
}

const char* NoFp16(const Config& c) {
  return c.fp16.enabled ? nullptr : "fp16.enabled is false";
}
const char* NoDynamicScale(const Config& c) {
  if (!c.fp16.enabled) return NoFp16(c);
  return c.fp16.scaler.static_scale > 0
             ? "fp16.loss_scale is above 0 and never changes"
             : nullptr;
}

void AddPrecision(Table& t) {
  t.Object("bf16", "bfloat16 parameters and activations, fp32 master weights.");
  t.Bool("bf16.enabled", FIELD(bf16), "Neither bf16 nor fp16: fp32.");
  t.Note(kBool, "bf16.check_grad_overflow",
         "non-finite gradients always skip the step");
  t.Note(kBool, "bf16.immediate_grad_update",
         "gradients are always written where they are reduced");
  const std::string master =
      "master weights and moments are fp32; false is accepted";
  t.Refuse(kBool, "bf16.bf16_master_weights_and_grads", master)
      .Harmless("false");
  t.Refuse(kBool, "bf16.bf16_optimizer_states", master).Harmless("false");
  t.Refuse(kOpaque, "bfloat16", "write bf16");

  t.Object("fp16", "float16 with loss scaling, fp32 master weights.");
  t.Bool("fp16.enabled", FIELD(fp16.enabled), "Neither bf16 nor fp16: fp32.");
  t.Number("fp16.loss_scale", FIELD(fp16.scaler.static_scale),
           "A fixed loss scale; 0: dynamic.")
      .AtLeast(0)
      .Unread(NoFp16);
  t.Integer("fp16.initial_scale_power", FIELD(fp16.scaler.initial_scale_power),
            "The dynamic scale starts at 2 to this power.")
      .Range(0, 120)
      .Unread(NoDynamicScale);
  t.Integer("fp16.loss_scale_window", FIELD(fp16.scaler.loss_scale_window),
            "Steps without overflow after which the scale doubles.")
      .AtLeast(1)
      .Unread(NoDynamicScale);
  t.Integer("fp16.hysteresis", FIELD(fp16.scaler.hysteresis),
            "Overflows before the scale halves.")
      .AtLeast(1)
      .Unread(NoDynamicScale);
  t.Bool("fp16.consecutive_hysteresis",
         FIELD(fp16.scaler.consecutive_hysteresis),
         "A step without overflow refills the hysteresis.")
      .Unread(UNREAD(NoDynamicScale(c) != nullptr    ? NoDynamicScale(c)
                     : c.fp16.scaler.hysteresis == 1 ? "fp16.hysteresis is 1"
                                                     : nullptr));
  t.Number("fp16.min_loss_scale", FIELD(fp16.scaler.min_loss_scale),
           "The scale never falls below it.")
      .Above(0)
      .Unread(NoDynamicScale);
  t.Note(kBool, "fp16.auto_cast", "inputs are token ids: nothing to cast");
  t.Refuse(kBool, "fp16.fp16_master_weights_and_grads", master)
      .Harmless("false");

  t.Object("data_types", "Dtypes of intermediate results.");
  t.Choice("data_types.grad_accum_dtype", NamesOf(DType{}),
           FIELD(grad_accum_dtype),
           "Gradients are accumulated in it: fp32, or the parameters' dtype.")
      .DeepSpeed(
          "the parameters' dtype with fp16 and ZeRO 1-3; here fp32, so that "
          "micro-batches add up without loss");
  t.Bool("data_types.stochastic_rounding", FIELD(stochastic_rounding),
         "16-bit parameters are rounded from their fp32 masters up or down by "
         "chance, so that the mean is the master. Gains: steps below half a "
         "unit in the last place move the parameters that the model computes "
         "with, too. Costs: a random error of up to a whole unit, and on the "
         "CPU about twice the time of an optimizer step (measured: 13 to 20 ms "
         "for 16M parameters). The chances are a function of training.seed, "
         "step and element: runs repeat, and stages have equal bits.");
  t.Choice("communication_data_type", NamesOf(DType{}),
           FIELD(communication_data_type),
           "Gradients are sent in it; their sum over ranks is formed in fp32 "
           "and rounded to it once.")
      .BetweenRanks()
      .Derived("data_types.grad_accum_dtype")
      .DeepSpeed(
          "the parameters' dtype; here that of the accumulated gradients, "
          "fp32 unless asked, so that nothing is rounded on the way");
  t.Refuse(kOpaque, "amp", "Apex does not exist here; write bf16 or fp16")
      .Harmless("disabled");
  t.Refuse(kOpaque, "torch_autocast",
           "there is no PyTorch here; write bf16 or fp16")
      .Harmless("disabled");
}

#define ADAMS                                          \
  IF(c.optimizer.spec.kind == OptimizerKind::kAdamW || \
     c.optimizer.spec.kind == OptimizerKind::kAdam ||  \
     c.optimizer.spec.kind == OptimizerKind::kLamb),   \
      "optimizer.type AdamW, Adam, Lamb"
#define SGD \
  IF(c.optimizer.spec.kind == OptimizerKind::kSgd), "optimizer.type SGD"
#define NO_DECAY                                                       \
  UNREAD(c.optimizer.spec.weight_decay == 0                            \
             ? "optimizer.params.weight_decay is 0: there is no decay" \
             : nullptr)
#define LAMB \
  IF(c.optimizer.spec.kind == OptimizerKind::kLamb), "optimizer.type Lamb"

void AddOptimizer(Table& t) {
  t.Object("optimizer",
           "The update rule; moments and master weights are fp32.");
  t.Choice("optimizer.type", NamesOf(OptimizerKind{}),
           FIELD(optimizer.spec.kind), "The update rule.")
      .AnyCase()
      .Unbuilt({"OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Adagrad", "Lion",
                "Muon"},
               "write AdamW, Adam, SGD or Lamb");
  t.Object("optimizer.params", "Parameters of optimizer.type.");
  t.Number("optimizer.params.lr", FIELD(optimizer.lr),
           "Learning rate; lr_scaling takes it as base_lr.")
      .Above(0);
  t.Number("optimizer.params.weight_decay", FIELD(optimizer.spec.weight_decay),
           "Weight decay.")
      .AtLeast(0);
  t.Choice("optimizer.params.weight_decay_on", NamesOf(WeightDecayOn{}),
           FIELD(optimizer.weight_decay_on),
           "matrices: tensors of two or more dimensions; all: biases and norm "
           "weights too.")
      .Unread(NO_DECAY)
      .DeepSpeed(
          "all parameters, unless the caller makes groups; here "
          "matrices only, as papers do");
  t.Add(
       KeyKind::kNumbers, Treatment::kUsed, "optimizer.params.betas",
       "Decay of the two moments.",
       [](const Config& c) -> KeyValue {
         return std::vector<double>{c.optimizer.spec.beta1,
                                    c.optimizer.spec.beta2};
       },
       [](Config& c, const KeyValue& v) {
         const auto& betas = std::get<std::vector<double>>(v);
         c.optimizer.spec.beta1 = betas[0];
         c.optimizer.spec.beta2 = betas[1];
       })
      .HalfOpen(0, 1)
      .When(ADAMS);
  t.Number("optimizer.params.eps", FIELD(optimizer.spec.eps),
           "Added to the root of the second moment.")
      .Above(0)
      .When(ADAMS);
  t.Bool("optimizer.params.bias_correction",
         FIELD(optimizer.spec.bias_correction),
         "Divide the moments by 1 - beta^step.")
      .When(ADAMS);
  t.Bool("optimizer.params.adam_w_mode", FIELD(optimizer.spec.decoupled_decay),
         "true, as in DeepSpeed: Adam is AdamW; false: the decay is added to "
         "the gradient.")
      .Unread(NO_DECAY)
      .When(IF(c.optimizer.spec.kind == OptimizerKind::kAdam),
            "optimizer.type Adam");
  t.Number("optimizer.params.momentum", FIELD(optimizer.spec.momentum),
           "0: no momentum buffer.")
      .HalfOpen(0, 1)
      .When(SGD);
  t.Number("optimizer.params.dampening", FIELD(optimizer.spec.dampening),
           "The gradient enters the momentum buffer times 1 - dampening.")
      .Range(0, 1)
      .Unread(UNREAD(c.optimizer.spec.momentum == 0
                         ? "optimizer.params.momentum is 0"
                         : nullptr))
      .When(SGD);
  t.Bool("optimizer.params.nesterov", FIELD(optimizer.spec.nesterov),
         "Nesterov's momentum.")
      .When(SGD);
  t.Number("optimizer.params.max_coeff", FIELD(optimizer.spec.max_coeff),
           "Largest trust ratio.")
      .Above(0)
      .When(LAMB);
  t.Number("optimizer.params.min_coeff", FIELD(optimizer.spec.min_coeff),
           "Smallest trust ratio.")
      .AtLeast(0)
      .When(LAMB);
  t.Refuse(kBool, "optimizer.params.amsgrad",
           "AMSGrad is not here; false is accepted")
      .Harmless("false");
  t.Refuse(kBool, "optimizer.params.eps_inside_sqrt",
           "eps is added outside the root; false is accepted")
      .Harmless("false");
  t.Refuse(kNumber, "optimizer.params.max_grad_norm",
           "write gradient_clipping; 0 is accepted")
      .Harmless("0");
  t.Refuse(kBool, "optimizer.params.maximize",
           "losses are minimized; false is accepted")
      .Harmless("false");
  t.Note(kBool, "optimizer.params.torch_adam",
         "there is one Adam, in one fused pass");
  t.Note(kBool, "optimizer.params.fused",
         "every optimizer here is one fused pass");
  t.Note(kBool, "optimizer.params.foreach",
         "every optimizer here is one fused pass");
  t.Note(kBool, "optimizer.legacy_fusion",
         "every optimizer here is one fused pass");
}

#define WARMUPS                                             \
  IF((c.scheduler.kind == LrScheduleKind::kWarmupLr ||      \
      c.scheduler.kind == LrScheduleKind::kWarmupDecayLr || \
      c.scheduler.kind == LrScheduleKind::kWsd) &&          \
     !c.lr_scaling.active()),                               \
      "scheduler.type WarmupLR, WarmupDecayLR, WSD"
#define COSINE                                             \
  IF(c.scheduler.kind == LrScheduleKind::kWarmupCosineLr), \
      "scheduler.type WarmupCosineLR"
#define WSD IF(c.scheduler.kind == LrScheduleKind::kWsd), "scheduler.type WSD"
#define NO_SCALING \
  UNREAD(c.lr_scaling.active() ? nullptr : "lr_scaling.rule is \"none\"")
#define CYCLE \
  IF(c.scheduler.kind == LrScheduleKind::kOneCycle), "scheduler.type OneCycle"

#define NO_WARMUP                                                    \
  UNREAD(c.scheduler.warmup_num_steps <= 1                           \
             ? "scheduler.params.warmup_num_steps leaves no warm-up" \
             : nullptr)

const char* NoDecaySteps(const Config& c) {
  return c.scheduler.decay_step_size == 0
             ? "scheduler.params.decay_step_size is 0: there is no decay"
             : nullptr;
}
const char* NoCycledMomentum(const Config& c) {
  return c.scheduler.cycle_momentum
             ? nullptr
             : "scheduler.params.cycle_momentum is false";
}
const char* NoLrDecay(const Config& c) {
  if (NoDecaySteps(c) != nullptr) return NoDecaySteps(c);
  return c.scheduler.cycle_min_lr == 0
             ? "scheduler.params.cycle_min_lr is 0 and can not decay"
             : nullptr;
}
const char* NoMomentumDecay(const Config& c) {
  return NoDecaySteps(c) != nullptr ? NoDecaySteps(c) : NoCycledMomentum(c);
}
const char* NothingDecays(const Config& c) {
  const LrSchedule& s = c.scheduler;
  const bool lr = s.decay_lr_rate > 0 && s.cycle_min_lr > 0;
  const bool momentum = s.decay_mom_rate > 0 && s.cycle_momentum;
  return lr || momentum
             ? nullptr
             : "neither learning rate nor momentum decays after the cycle";
}

void AddOneCycle(Table& t) {
  t.Number("scheduler.params.cycle_min_lr", FIELD(scheduler.cycle_min_lr),
           "Learning rate at both ends of the cycle.")
      .AtLeast(0)
      .When(CYCLE);
  t.Number("scheduler.params.cycle_max_lr", FIELD(scheduler.cycle_max_lr),
           "Learning rate at the top of the cycle.")
      .Above(0)
      .Derived("optimizer.params.lr")
      .When(CYCLE)
      .DeepSpeed("required; here the optimizer's lr");
  t.Number("scheduler.params.decay_lr_rate", FIELD(scheduler.decay_lr_rate),
           "After the cycle: lr = cycle_min_lr / (1 + rate * intervals).")
      .AtLeast(0)
      .Unread(NoLrDecay)
      .When(CYCLE);
  t.Integer("scheduler.params.cycle_first_step_size",
            FIELD(scheduler.cycle_first_step_size), "Steps of the rise.")
      .AtLeast(1)
      .When(CYCLE);
  t.Integer("scheduler.params.cycle_second_step_size",
            FIELD(scheduler.cycle_second_step_size), "Steps of the fall.")
      .AtLeast(1)
      .Derived("cycle_first_step_size")
      .When(CYCLE);
  t.Integer("scheduler.params.cycle_first_stair_count",
            FIELD(scheduler.cycle_first_stair_count),
            "Stairs of the rise; 0: smooth.")
      .AtLeast(0)
      .When(CYCLE);
  t.Integer("scheduler.params.cycle_second_stair_count",
            FIELD(scheduler.cycle_second_stair_count),
            "Stairs of the fall; 0: smooth.")
      .AtLeast(0)
      .Derived("cycle_first_stair_count")
      .When(CYCLE);
  t.Integer("scheduler.params.decay_step_size",
            FIELD(scheduler.decay_step_size),
            "Steps of one decay interval after the cycle; 0: no decay.")
      .AtLeast(0)
      .Unread(NothingDecays)
      .When(CYCLE);
  t.Bool("scheduler.params.cycle_momentum", FIELD(scheduler.cycle_momentum),
         "beta1 runs from cycle_max_mom to cycle_min_mom and back.")
      .When(CYCLE)
      .DeepSpeed("also sets beta2 to 0.99; here beta2 stays the optimizer's");
  t.Number("scheduler.params.cycle_min_mom", FIELD(scheduler.cycle_min_mom),
           "beta1 at the top of the cycle.")
      .HalfOpen(0, 1)
      .Unread(NoCycledMomentum)
      .When(CYCLE);
  t.Number("scheduler.params.cycle_max_mom", FIELD(scheduler.cycle_max_mom),
           "beta1 at both ends of the cycle.")
      .HalfOpen(0, 1)
      .Unread(NoCycledMomentum)
      .When(CYCLE);
  t.Number("scheduler.params.decay_mom_rate", FIELD(scheduler.decay_mom_rate),
           "After the cycle: beta1 = cycle_max_mom * (1 + rate * intervals).")
      .AtLeast(0)
      .Unread(NoMomentumDecay)
      .When(CYCLE);
}

void AddSchedule(Table& t) {
  t.Object("scheduler",
           "The learning rate as a function of the step, from 0. The first "
           "step already moves.");
  t.Choice("scheduler.type", NamesOf(LrScheduleKind{}), FIELD(scheduler.kind),
           "DeepSpeed's schedules, WSD (warm-up, stable, decay) and Constant.")
      .Unbuilt({"LRRangeTest"}, "the range test is not here")
      .DeepSpeed(
          "keeps warmup_min_lr for two steps; here warm-ups are two steps "
          "ahead, so that the first step moves, and linear decays one. WSD "
          "and Constant are ours");
  t.Object("scheduler.params", "Parameters of scheduler.type.");
  t.Number("scheduler.params.warmup_min_lr", FIELD(scheduler.warmup_min_lr),
           "Learning rate before the warm-up; WarmupDecayLR also ends there.")
      .AtLeast(0)
      .Unread(UNREAD(c.scheduler.kind != LrScheduleKind::kWarmupDecayLr &&
                             c.scheduler.warmup_num_steps <= 1
                         ? "scheduler.params.warmup_num_steps leaves no warm-up"
                         : nullptr))
      .When(WARMUPS);
  t.Number("scheduler.params.warmup_max_lr", FIELD(scheduler.warmup_max_lr),
           "Learning rate after the warm-up.")
      .Above(0)
      .Derived("optimizer.params.lr")
      .When(WARMUPS)
      .DeepSpeed(
          "0.001, whatever the optimizer's lr is; here the optimizer's "
          "lr");
  t.Integer("scheduler.params.warmup_num_steps",
            FIELD(scheduler.warmup_num_steps), "Steps of the warm-up.")
      .AtLeast(0)
      .When(IF((c.scheduler.kind == LrScheduleKind::kWarmupLr ||
                c.scheduler.kind == LrScheduleKind::kWarmupDecayLr ||
                c.scheduler.kind == LrScheduleKind::kWarmupCosineLr ||
                c.scheduler.kind == LrScheduleKind::kWsd) &&
               !c.lr_scaling.active()),
            "scheduler.type WarmupLR, WarmupDecayLR, WarmupCosineLR, WSD");
  t.Choice("scheduler.params.warmup_type", NamesOf(LrWarmupType{}),
           FIELD(scheduler.warmup_type),
           "The rise: log(step) / log(warmup_num_steps), or linear.")
      .Unread(NO_WARMUP)
      .When(IF((c.scheduler.kind == LrScheduleKind::kWarmupLr ||
                c.scheduler.kind == LrScheduleKind::kWarmupDecayLr ||
                c.scheduler.kind == LrScheduleKind::kWarmupCosineLr ||
                c.scheduler.kind == LrScheduleKind::kWsd) &&
               !c.lr_scaling.active()),
            "scheduler.type WarmupLR, WarmupDecayLR, WarmupCosineLR, WSD");
  t.Integer("scheduler.params.total_num_steps",
            FIELD(scheduler.total_num_steps), "Step at which the decay ends.")
      .AtLeast(1)
      .MayBeUnset()
      .Derived("the steps of the run")
      .When(IF(c.scheduler.kind == LrScheduleKind::kWarmupDecayLr ||
               c.scheduler.kind == LrScheduleKind::kWarmupCosineLr ||
               c.scheduler.kind == LrScheduleKind::kWsd),
            "scheduler.type WarmupDecayLR, WarmupCosineLR, WSD")
      .DeepSpeed("required; here the steps of the run");
  t.Number("scheduler.params.warmup_min_ratio",
           FIELD(scheduler.warmup_min_ratio),
           "Start of the warm-up, as a ratio of the learning rate.")
      .Range(0, 1)
      .Unread(NO_WARMUP)
      .When(IF(c.scheduler.kind == LrScheduleKind::kWarmupCosineLr &&
               !c.lr_scaling.active()),
            "scheduler.type WarmupCosineLR");
  t.Number("scheduler.params.cos_min_ratio", FIELD(scheduler.cos_min_ratio),
           "End of the cosine, as a ratio of the learning rate.")
      .Range(0, 1)
      .When(COSINE);
  t.Integer("scheduler.params.decay_num_steps",
            FIELD(scheduler.decay_num_steps),
            "The last steps of total_num_steps, in which the rate falls.")
      .AtLeast(1)
      .MayBeUnset()
      .Derived("total_num_steps / 10, rounded up")
      .When(WSD);
  t.Choice("scheduler.params.decay_type", NamesOf(LrDecayType{}),
           FIELD(scheduler.decay_type), "The shape of the fall.")
      .When(WSD);
  t.Number("scheduler.params.min_lr_ratio", FIELD(scheduler.min_lr_ratio),
           "End of the fall, as a ratio of the learning rate.")
      .Range(0, 1)
      .When(WSD);
  AddOneCycle(t);
  t.Refuse(kInteger, "scheduler.params.last_batch_iteration",
           "a schedule begins at the run's first step; -1 is accepted")
      .Harmless("-1");

  t.Object("lr_scaling",
           "Goyal et al. 2017: the learning rate grows with the batch, after "
           "a linear warm-up from the base rate. The scheduler goes on from "
           "there, without a warm-up of its own.");
  t.Choice("lr_scaling.rule", NamesOf(LrScaleRule{}), FIELD(lr_scaling.rule),
           "linear: lr = base_lr * train_batch_size / base_batch_size; sqrt: "
           "by the root of that ratio.");
  t.Integer("lr_scaling.base_batch_size", FIELD(lr_scaling.base_batch_size),
            "The batch for which optimizer.params.lr was chosen.")
      .AtLeast(1)
      .MayBeUnset();
  t.Integer("lr_scaling.warmup_steps", FIELD(lr_scaling.warmup_steps),
            "Steps from base_lr to the scaled rate.")
      .AtLeast(0)
      .Unread(NO_SCALING);
  t.Number("lr_scaling.warmup_epochs", FIELD(lr_scaling.warmup_epochs),
           "Instead of warmup_steps.")
      .Range(0, 1e6)
      .Unread(NO_SCALING);
}

// ---- ZeRO, activation checkpointing ---------------------------------------

#define REPLICATED                                                          \
  UNREAD(c.zero_optimization.stage < 3 ? "zero_optimization.stage 3 alone " \
                                         "gathers parameters for use"       \
                                       : nullptr)

void AddZero(Table& t) {
  const std::string buckets =
      "500 million; smaller ones hide more and take less memory";
  const std::string offload = "it comes with offload";
  const std::string zeropp = "it comes with gradient compression";
  const auto path = [](const char* name) {
    return absl::StrCat("zero_optimization.", name);
  };
  t.Object("zero_optimization",
           "Which model states are sharded over the ranks.");
  t.Integer(path("stage"), FIELD(zero_optimization.stage),
            "0: none; 1: optimizer; 2: and gradients; 3: and parameters.")
      .BetweenRanks()
      .Range(0, 3);
  t.Integer(path("reduce_bucket_size"),
            FIELD(zero_optimization.reduce_bucket_size),
            "Gradient elements reduced at once (one segment at least).")
      .BetweenRanks()
      .AtLeast(1)
      .DeepSpeed(buckets);
  t.Integer(path("allgather_bucket_size"),
            FIELD(zero_optimization.allgather_bucket_size),
            "Updated parameters gathered at once, in elements (stages 1, 2).")
      .BetweenRanks()
      .AtLeast(1)
      .DeepSpeed(buckets)
      .Unread(UNREAD(c.zero_optimization.stage == 1 ||
                             c.zero_optimization.stage == 2
                         ? nullptr
                         : "zero_optimization.stage 1 and 2 alone gather "
                           "updated parameters"));
  t.Bool(path("overlap_comm"), FIELD(zero_optimization.overlap_comm),
         "Communicate while computing.")
      .BetweenRanks()
      .DeepSpeed("true at stage 3 only; here at all stages");
  t.Integer(path("stage3_prefetch_bucket_size"),
            FIELD(zero_optimization.stage3_prefetch_bucket_size),
            "Parameters gathered ahead, in elements; 0: none. Unset: those of "
            "the next unit.")
      .BetweenRanks()
      .AtLeast(0)
      .MayBeUnset()
      .Unread(REPLICATED)
      .DeepSpeed("50 million; here one unit (block) ahead, which hides it");
  t.Integer(path("stage3_max_live_parameters"),
            FIELD(zero_optimization.stage3_max_live_parameters),
            "Units stay in place for their next use while they hold no more "
            "elements than this. Unset: no limit where "
            "stage3_max_reuse_distance is set, else two units.")
      .BetweenRanks()
      .AtLeast(0)
      .MayBeUnset()
      .Unread(REPLICATED)
      .DeepSpeed("a billion; here two units, so that memory is saved");
  t.Integer(path("stage3_max_reuse_distance"),
            FIELD(zero_optimization.stage3_max_reuse_distance),
            "A unit stays in place if it is used again after fewer elements "
            "than this. Unset: no limit where stage3_max_live_parameters is "
            "set, else two units.")
      .BetweenRanks()
      .AtLeast(0)
      .MayBeUnset()
      .Unread(REPLICATED)
      .DeepSpeed("a billion; here two units, so that memory is saved");
  t.Integer(path("stage3_param_persistence_threshold"),
            FIELD(zero_optimization.stage3_param_persistence_threshold),
            "Units whose parameters are all smaller than this are gathered "
            "once per step and stay in place, in elements.")
      .BetweenRanks()
      .AtLeast(0)
      .Unread(REPLICATED)
      .DeepSpeed(
          "100000, for every parameter by itself; here 0, and whole units: "
          "small parameters travel with the large ones of their unit");
  t.Integer(path("stage3_model_persistence_threshold"),
            FIELD(zero_optimization.stage3_model_persistence_threshold),
            "Elements of all units that stay in place, at most.")
      .BetweenRanks()
      .AtLeast(0)
      .Unread(UNREAD(
          c.zero_optimization.stage < 3 ||
                  c.zero_optimization.stage3_param_persistence_threshold == 0
              ? "no unit stays in place"
              : nullptr));
  t.Note(kInteger, path("sub_group_size"),
         "a rank updates its whole shard in one pass without copies");
  t.Bool(path("ignore_unused_parameters"),
         FIELD(zero_optimization.ignore_unused_parameters),
         "Go on when no gradient reaches a parameter; false: an error.");
  t.Integer(path("mics_shard_size"), FIELD(zero_optimization.mics_shard_size),
            "Shard within groups of so many consecutive ranks and replicate "
            "over the groups (MiCS, FSDP's hybrid sharding); divides the "
            "ranks. -1: one group.")
      .BetweenRanks()
      .Range(-1, 1024)
      .DeepSpeed("stage 3 only, by its own Init; here stages 1 to 3");
  t.NotBuilt(kBool, path("mics_hierarchical_params_gather"),
             "it gathers within a node and then between nodes, and comes with "
             "clusters; the ranks of one machine are all equally near")
      .Harmless("false");
  for (const char* name : {"offload_optimizer", "offload_param"}) {
    t.NotBuilt(kOpaque, path(name), offload).Harmless("none");
  }
  t.NotBuilt(kOpaque, path("zenflow"), offload);
  t.NotBuilt(kInteger, path("zero_hpz_partition_size"), zeropp).Harmless("1");
  t.NotBuilt(kBool, path("zero_quantized_weights"), zeropp).Harmless("false");
  t.NotBuilt(kBool, path("zero_quantized_nontrainable_weights"), zeropp)
      .Harmless("false");
  t.NotBuilt(kBool, path("zero_quantized_gradients"), zeropp).Harmless("false");
  t.NotBuilt(kOpaque, path("zeropp_loco_param"), zeropp);
  t.NotBuilt(kBool, path("cpu_offload"), offload).Harmless("false");
  t.NotBuilt(kBool, path("cpu_offload_param"), offload).Harmless("false");
  t.Refuse(kBool, path("elastic_checkpoint"),
           "every checkpoint fits any number of ranks; false is accepted")
      .Harmless("false");
  t.Note(kBool, path("cpu_offload_use_pin_memory"),
         "host memory is pinned wherever the device can use that");
  t.Note(kBool, path("contiguous_gradients"),
         "gradients are always written into one flat buffer");
  t.Note(kBool, path("allgather_partitions"), "always an all-gather");
  t.Note(kBool, path("reduce_scatter"), "always a reduce-scatter");
  t.Note(kBool, path("round_robin_gradients"),
         "every rank owns an equal piece of every segment");
  t.Note(kBool, path("use_multi_rank_bucket_allreduce"),
         "buckets are always reduced for all ranks at once");
  t.Note(kBool, path("load_from_fp32_weights"),
         "fp32 master weights are always loaded where they exist");
  t.Note(kBool, path("legacy_stage1"), "there is one stage 1");
  t.Note(kInteger, path("stage3_module_granularity_threshold"),
         "a unit (block, embedding, head) is always gathered as a whole");
  t.Note(kBool, path("stage3_use_all_reduce_for_fetch_params"),
         "always an all-gather");
  t.Note(kBool, path("stage3_gather_16bit_weights_on_model_save"),
         "final/ always holds the whole model");
  t.Note(kBool, path("stage3_gather_fp16_weights_on_model_save"),
         "final/ always holds the whole model");
  t.Note(kBool, path("memory_efficient_linear"),
         "linear layers keep nothing but their input");
  t.Note(kBool, path("override_module_apply"),
         "there are no PyTorch modules here");
  t.Note(kBool, path("pipeline_loading_checkpoint"),
         "checkpoints are mapped, not loaded rank by rank");
}

void AddActivationCheckpointing(Table& t) {
  const auto path = [](const char* name) {
    return absl::StrCat("activation_checkpointing.", name);
  };
  t.Object("activation_checkpointing",
           "Keep a unit's input only and compute the rest again in backward.");
  t.Bool(path("enabled"), FIELD(activation_checkpointing),
         "Recompute every unit in backward. Changes no bit of the result.")
      .DeepSpeed(
          "has no such key: the model's code decides; here one key "
          "turns it on");
  t.NotBuilt(kBool, path("partition_activations"),
             "it comes with tensor parallelism")
      .Harmless("false");
  t.NotBuilt(kBool, path("cpu_checkpointing"), "it comes with offload")
      .Harmless("false");
  t.Note(kBool, path("contiguous_memory_optimization"),
         "activations always live in one arena");
  t.Note(kInteger, path("number_checkpoints"),
         "every transformer block is one checkpoint");
  t.Note(kBool, path("synchronize_checkpoint_boundary"),
         "nothing is synchronized inside a step");
  t.Note(kBool, path("profile"), "wall_clock_breakdown shows the times");
}

void AddCommunication(Table& t) {
  t.Object("communication", "How ranks talk to each other.");
  t.Choice("communication.algorithm", NamesOf(CommunicationAlgorithm{}),
           FIELD(communication.algorithm),
           "direct: a rank reads all the others at once; ring: its neighbour, "
           "step by step; parameter_server: rank 0 sums all gradients, updates "
           "and broadcasts (stage 0). Equal bits within each, not between "
           "them.")
      .BetweenRanks();
  t.Choice("communication.backend", NamesOf(CommunicationBackend{}),
           FIELD(communication.backend),
           "local: ranks are threads of one process and read each other's "
           "memory; nccl: a GPU for each rank, in threads or in processes of "
           "torchrun or srun; auto: nccl for several GPUs or processes, else "
           "local. fp32 sums are in rank order with local, in NCCL's with "
           "nccl.")
      .BetweenRanks();
  t.Number("communication.timeout_seconds",
           FIELD(communication.timeout_seconds),
           "How long a rank waits for another one before the run fails.")
      .BetweenRanks()
      .Range(0.001, 1e6);
}

void AddDevice(Table& t) {
  t.Object("device", "How a GPU computes; --device cuda takes one.");
  for (const char* name : {"device.type", "device.name", "training.device"}) {
    t.Refuse(kString, name,
             "which device it is does not belong to the config: write --device "
             "cpu or --device cuda");
  }
  t.Bool("device.allow_tf32", FIELD(device.cuda.allow_tf32),
         "fp32 products on tensor cores, with 10 bits of mantissa.")
      .OfGpu();
  t.Bool("device.deterministic_attention",
         FIELD(device.cuda.deterministic_attention),
         "16-bit attention's gradients in a fixed order of sums; needs more "
         "memory, slower. All else is in a fixed order anyway.")
      .OfGpu();
  t.Bool("device.time_algorithms", FIELD(device.cuda.time_algorithms),
         "Time the candidates for every shape of product once and take the "
         "fastest, not the library's first. Takes memory in the middle of the "
         "first step: not for ranks that nccl connects as threads.")
      .OfGpu();
  t.Bool("device.fp32_logits", FIELD(device.cuda.fp32_logits),
         "Logits of 16-bit models in fp32, with twice the bytes. Else in the "
         "model's dtype: softmax and loss are computed from them in fp32. In "
         "fp16 a logit beyond 65504 is then infinite; where the loss is not "
         "finite for it, the step is skipped.")
      .OfGpu()
      .Unread(UNREAD(c.param_dtype() == DType::kF32
                         ? "the model is fp32, and so are its logits"
                         : nullptr));
  t.Integer("device.loss_chunk_rows", FIELD(device.cuda.loss_chunk_rows),
            "Rows of logits that exist at a time: fewer take less memory, more "
            "are faster.")
      .OfGpu()
      .AtLeast(1);
}

// ---- Output, and the rest of DeepSpeed ------------------------------------

void AddOutput(Table& t) {
  t.Integer("steps_per_print", FIELD(steps_per_print),
            "Steps between lines of output.")
      .AtLeast(1);
  t.Bool("wall_clock_breakdown", FIELD(wall_clock_breakdown),
         "Print the time of each phase of a step.");
  t.Bool("memory_breakdown", FIELD(memory_breakdown),
         "Print the bytes of each memory category.");
  t.Bool("dump_state", FIELD(dump_state),
         "Print the resolved config at the start.");
  t.Note(kString, "$schema", "for editors");

  const std::string metrics =
      "out_dir/metrics.jsonl has every value of every step; enabled: false "
      "is accepted";
  for (const char* name : {"tensorboard", "wandb", "comet", "csv_monitor"}) {
    t.Refuse(kOpaque, name, metrics).Harmless("disabled");
  }
  t.Refuse(kOpaque, "flops_profiler",
           "every line of output has the FLOP/s and MFU; enabled: false is "
           "accepted")
      .Harmless("disabled");
  t.Refuse(kOpaque, "comms_logger",
           "out_dir/metrics.jsonl has the bytes, calls and waits of every step "
           "of several ranks, zero train --trace FILE every collective; "
           "enabled: false is accepted")
      .Harmless("disabled");
}

void AddRefused(Table& t) {
  t.Refuse(kBool, "prescale_gradients",
           "the loss is divided by the step's tokens before backward; false "
           "is accepted")
      .Harmless("false");
  t.Refuse(kNumber, "gradient_predivide_factor",
           "gradients are summed in fp32 and need no predivision; 1 is "
           "accepted")
      .Harmless("1");
  t.Refuse(kBool, "sparse_gradients", "gradients are dense; false is accepted")
      .Harmless("false");
  t.Refuse(kBool, "fp32_allreduce",
           "write communication_data_type; it is fp32 unless asked, and true "
           "is accepted")
      .Harmless("true");
  t.Refuse(kBool, "dataloader_drop_last",
           "the last partial batch of an epoch is always dropped; true is "
           "accepted")
      .Harmless("true");
  t.Note(kBool, "disable_allgather", "DeepSpeed ignores it too");
  t.Note(kBool, "zero_allow_untested_optimizer",
         "every optimizer here is ours and tested");
  t.Note(kBool, "zero_force_ds_cpu_optimizer",
         "there is one implementation of each optimizer");
  t.Note(kBool, "graph_harvesting", "it records CUDA graphs in PyTorch");
  t.Note(kOpaque, "timers", "wall_clock_breakdown shows the times");
  t.Refuse(kInteger, "vocabulary_size", "write model.vocab_size");

  const std::string off = "; enabled: false is accepted";
  const auto refuse = [&](const char* name, const char* reason) {
    t.Refuse(kOpaque, name, absl::StrCat(reason, off)).Harmless("disabled");
  };
  refuse("autotuning", "the planner and --set do this");
  refuse("curriculum_learning", "every sequence has one length");
  refuse("data_efficiency", "every sequence has one length");
  refuse("progressive_layer_drop", "every layer is always trained");
  refuse("eigenvalue", "it serves quantization, which is not here");
  refuse("quantize_training", "training runs in fp32, bf16 or fp16");
  refuse("hybrid_engine", "it serves RLHF, which is not here");
  refuse("nebula", "it is an Azure service");
  refuse("compile", "there is no PyTorch to compile");
  t.Refuse(kOpaque, "compression_training",
           "pruning and quantization of weights are not here");
  t.Refuse(kOpaque, "weight_quantization", "it serves inference");
  t.Refuse(kOpaque, "sparse_attention", "attention sees the whole sequence");

  t.NotBuilt(kOpaque, "elasticity", "it comes with clusters")
      .Harmless("disabled");
  t.NotBuilt(kOpaque, "aio", "it comes with NVMe offload");
  t.NotBuilt(kOpaque, "checkpoint", "it comes with sharded checkpoints");
  t.NotBuilt(kBool, "load_universal_checkpoint",
             "it comes with sharded checkpoints")
      .Harmless("false");
  t.NotBuilt(kOpaque, "pipeline", "it comes with pipeline parallelism");
  t.NotBuilt(kOpaque, "tensor_parallel", "it comes with tensor parallelism");
  t.NotBuilt(kInteger, "sequence_parallel_size",
             "it comes with further parallel axes")
      .Harmless("1");
  t.NotBuilt(kString, "seq_parallel_communication_data_type",
             "it comes with further parallel axes");
}

std::vector<KeySpec> MakeTable() {
  Table t;
  AddModel(t);
  AddData(t);
  AddTraining(t);
  AddBatch(t);
  AddPrecision(t);
  AddOptimizer(t);
  AddSchedule(t);
  AddZero(t);
  AddActivationCheckpointing(t);
  AddCommunication(t);
  AddDevice(t);
  AddOutput(t);
  AddRefused(t);
  return t.Take();
}

// ---- Reading values -------------------------------------------------------

std::string Shown(double bound) {
  return bound == std::floor(bound) && std::fabs(bound) < 1e15
             ? absl::StrCat(static_cast<int64_t>(bound))
             : JsonDouble(bound);
}

bool HasMin(const KeySpec& key) { return std::isfinite(key.min); }
bool HasMax(const KeySpec& key) { return std::isfinite(key.max); }

// "in [0, 3]", ">= 1", "> 0"; empty without limits.
std::string RangeText(const KeySpec& key) {
  if (HasMin(key) && HasMax(key)) {
    return absl::StrCat("in ", key.above_min ? "(" : "[", Shown(key.min), ", ",
                        Shown(key.max), key.below_max ? ")" : "]");
  }
  if (HasMin(key)) {
    return absl::StrCat(key.above_min ? "> " : ">= ", Shown(key.min));
  }
  return "";
}

bool InRange(const KeySpec& key, double value) {
  if (key.above_min ? value <= key.min : value < key.min) return false;
  return key.below_max ? value < key.max : value <= key.max;
}

bool WrongType(const KeySpec& key, const JsonNode& node, std::string* error) {
  const bool named = node.kind == JsonKind::kString ||
                     node.kind == JsonKind::kNumber ||
                     node.kind == JsonKind::kBool;
  *error = absl::StrCat(named ? absl::StrCat(JsonBrief(node), " is ") : "",
                        JsonKindName(node.kind), ", want ", Wanted(key));
  return false;
}

bool ReadNumber(const KeySpec& key, const JsonNode& node, double* value,
                std::string* error) {
  if (node.kind != JsonKind::kNumber) return WrongType(key, node, error);
  *value = node.number;
  if (!InRange(key, *value)) {
    *error = absl::StrCat(JsonBrief(node), " is not ", RangeText(key));
    return false;
  }
  // Kernels compute with it in fp32.
  const auto rounded = static_cast<double>(static_cast<float>(*value));
  const bool fits = std::isfinite(rounded) && (rounded != 0 || *value == 0) &&
                    InRange(key, rounded);
  if (key.kind == KeyKind::kInteger || fits) return true;
  *error = absl::StrCat(JsonBrief(node), " is ", JsonDouble(rounded),
                        " in fp32, want ", Wanted(key));
  return false;
}

bool ReadInteger(const KeySpec& key, const JsonNode& node, int64_t* value,
                 std::string* error) {
  double number = 0;
  if (node.kind != JsonKind::kNumber) return WrongType(key, node, error);
  if (!node.is_integer && node.number != std::floor(node.number)) {
    *error =
        absl::StrCat(node.text, " is not a whole number, want ", Wanted(key));
    return false;
  }
  if (!ReadNumber(key, node, &number, error)) return false;
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (!node.is_integer && std::fabs(number) > kExact) {
    *error = absl::StrCat(node.text.substr(0, 40),
                          " does not fit in a 64-bit integer");
    return false;
  }
  *value = node.is_integer ? node.integer : static_cast<int64_t>(number);
  return true;
}

bool ReadChoice(const KeySpec& key, const JsonNode& node, std::string* value,
                std::string* error) {
  if (node.kind != JsonKind::kString) return WrongType(key, node, error);
  const auto& all = key.choices;
  for (const std::string& choice : all) {
    if (choice == node.text ||
        (key.any_case && absl::EqualsIgnoreCase(choice, node.text))) {
      *value = choice;
      return true;
    }
  }
  *value = node.text;
  const std::string near = Nearest(*value, all);
  Names built;
  for (const std::string& choice : all) {
    if (std::count(key.unbuilt.begin(), key.unbuilt.end(), choice) == 0) {
      built.push_back(choice);
    }
  }
  *error = absl::StrCat(JsonBrief(node), " is not one of ",
                        absl::StrJoin(built, ", "));
  if (!near.empty()) {
    absl::StrAppend(error, "; did you mean ", JsonQuote(near), "?");
  }
  return false;
}

bool ReadFiles(const KeySpec& key, const JsonNode& node, Names* value,
               std::string* error) {
  if (node.kind == JsonKind::kString && !node.text.empty()) {
    value->push_back(node.text);
    return true;
  }
  if (node.kind == JsonKind::kString) {
    *error = absl::StrCat("empty, want ", Wanted(key));
    return false;
  }
  if (node.kind != JsonKind::kArray) return WrongType(key, node, error);
  if (node.children.empty()) {
    *error = absl::StrCat("an empty list, want ", Wanted(key));
    return false;
  }
  for (const JsonNode& child : node.children) {
    if (child.kind != JsonKind::kString || child.text.empty()) {
      *error = absl::StrCat(JsonBrief(child), " in the list is not a path");
      return false;
    }
    value->push_back(child.text);
  }
  return true;
}

bool ReadNumbers(const KeySpec& key, const JsonNode& node,
                 std::vector<double>* value, std::string* error) {
  if (node.kind != JsonKind::kArray) return WrongType(key, node, error);
  if (node.children.size() != 2) {
    *error = absl::StrCat("a list of ", node.children.size(), ", want ",
                          Wanted(key));
    return false;
  }
  for (const JsonNode& child : node.children) {
    double number = 0;
    if (!ReadNumber(key, child, &number, error)) return false;
    value->push_back(number);
  }
  return true;
}

// ---- Nearest names --------------------------------------------------------

std::string Lower(absl::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return out;
}

absl::string_view LeafName(absl::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == absl::string_view::npos ? path : path.substr(dot + 1);
}

absl::string_view ParentPath(absl::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == absl::string_view::npos ? "" : path.substr(0, dot);
}

// What other programs call our keys.
struct Synonym {
  const char* theirs;
  const char* ours;
};
constexpr Synonym kSynonyms[] = {
    {"batch_size", "train_batch_size"},
    {"global_batch_size", "train_batch_size"},
    {"micro_batch_size", "train_micro_batch_size_per_gpu"},
    {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
    {"accumulation_steps", "gradient_accumulation_steps"},
    {"learning_rate", "optimizer.params.lr"},
    {"beta1", "optimizer.params.betas"},
    {"beta2", "optimizer.params.betas"},
    {"grad_clip", "gradient_clipping"},
    {"max_grad_norm", "gradient_clipping"},
    {"clip_grad", "gradient_clipping"},
    {"warmup_steps", "scheduler.params.warmup_num_steps"},
    {"warmup_iters", "scheduler.params.warmup_num_steps"},
    {"max_steps", "training.steps"},
    {"max_iters", "training.steps"},
    {"train_steps", "training.steps"},
    {"num_train_epochs", "training.epochs"},
    {"num_epochs", "training.epochs"},
    {"eval_interval", "training.eval_every"},
    {"eval_steps", "training.eval_every"},
    {"output_dir", "training.out_dir"},
    {"seq_len", "data.sequence_length"},
    {"seq_length", "data.sequence_length"},
    {"block_size", "data.sequence_length"},
    {"max_length", "data.sequence_length"},
    {"reset_position_ids", "data.reset_attention_mask"},
    {"eod_mask_loss", "data.reset_attention_mask"},
    {"packing", "data.reset_attention_mask"},
    {"packed", "data.reset_attention_mask"},
    {"attn_mask_type", "data.reset_attention_mask"},
    {"block_cross_document_attention", "data.reset_attention_mask"},
    {"eot_token_id", "data.eos_token_id"},
    {"eod_token_id", "data.eos_token_id"},
    {"dataset", "data.train"},
    {"train_files", "data.train"},
    {"val", "data.validation"},
    {"family", "model.model_type"},
    {"name", "model.preset"},
    {"gradient_checkpointing", "activation_checkpointing.enabled"},
    {"zero_stage", "zero_optimization.stage"},
    {"precision", "bf16.enabled"},
    {"dtype", "bf16.enabled"},
};

}  // namespace

const std::vector<KeySpec>& AllKeys() {
  static const std::vector<KeySpec>* const kTable =
      new std::vector<KeySpec>(MakeTable());
  return *kTable;
}

const KeySpec* FindKey(absl::string_view path) {
  for (const KeySpec& key : AllKeys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

bool ReadValue(const KeySpec& key, const JsonNode& node, KeyValue* value,
               std::string* error) {
  switch (key.kind) {
    case KeyKind::kBool:
      if (node.kind != JsonKind::kBool) return WrongType(key, node, error);
      *value = node.boolean;
      return true;
    case KeyKind::kInteger: {
      int64_t integer = 0;
      if (!ReadInteger(key, node, &integer, error)) return false;
      *value = integer;
      return true;
    }
    case KeyKind::kNumber: {
      double number = 0;
      if (!ReadNumber(key, node, &number, error)) return false;
      *value = number;
      return true;
    }
    case KeyKind::kString:
      if (node.kind != JsonKind::kString) return WrongType(key, node, error);
      *value = node.text;
      return true;
    case KeyKind::kChoice: {
      std::string text;
      if (!ReadChoice(key, node, &text, error)) return false;
      *value = text;
      return true;
    }
    case KeyKind::kFiles: {
      Names files;
      if (!ReadFiles(key, node, &files, error)) return false;
      *value = files;
      return true;
    }
    case KeyKind::kNumbers: {
      std::vector<double> numbers;
      if (!ReadNumbers(key, node, &numbers, error)) return false;
      *value = numbers;
      return true;
    }
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      if (node.kind == JsonKind::kObject) return true;
      WrongType(key, node, error);
      absl::StrAppend(error, ". ", key.doc);
      return false;
  }
  return false;
}

bool IsHarmless(const KeySpec& key, const JsonNode& node) {
  if (key.harmless.empty()) return false;
  double number = 0;
  switch (node.kind) {
    case JsonKind::kBool:
      return key.harmless == (node.boolean ? "true" : "false");
    case JsonKind::kNumber:
      return absl::SimpleAtod(key.harmless, &number) && node.number == number;
    case JsonKind::kObject: {
      const JsonNode* device = node.Find("device");
      if (key.harmless == "none") {
        return device == nullptr || device->text == "none";
      }
      const JsonNode* enabled = node.Find("enabled");
      return key.harmless == "disabled" &&
             (enabled == nullptr ||
              (enabled->kind == JsonKind::kBool && !enabled->boolean));
    }
    default:
      return false;
  }
}

std::string ValueText(const KeyValue& value) {
  struct Visitor {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(int64_t v) const { return absl::StrCat(v); }
    std::string operator()(double v) const { return JsonDouble(v); }
    std::string operator()(const std::string& v) const { return JsonQuote(v); }
    std::string operator()(const Names& v) const {
      const auto quote = [](std::string* out, const std::string& item) {
        out->append(JsonQuote(item));
      };
      return absl::StrCat("[", absl::StrJoin(v, ", ", quote), "]");
    }
    std::string operator()(const std::vector<double>& v) const {
      const auto write = [](std::string* out, double item) {
        out->append(JsonDouble(item));
      };
      return absl::StrCat("[", absl::StrJoin(v, ", ", write), "]");
    }
  };
  return std::visit(Visitor(), value);
}

std::string Wanted(const KeySpec& key) {
  const std::string range = RangeText(key);
  const std::string limits = range.empty() ? "" : absl::StrCat(" ", range);
  switch (key.kind) {
    case KeyKind::kBool:
      return "true or false";
    case KeyKind::kInteger:
      return absl::StrCat("a whole number", limits);
    case KeyKind::kNumber:
      return absl::StrCat("a number", limits);
    case KeyKind::kString:
      return "a string";
    case KeyKind::kChoice:
      return absl::StrCat("one of \"", absl::StrJoin(key.choices, "\", \""),
                          "\"");
    case KeyKind::kFiles:
      return "a path, a glob or a list of them";
    case KeyKind::kNumbers:
      return absl::StrCat("a list of two numbers", limits);
    case KeyKind::kObject:
    case KeyKind::kOpaque:
      return "an object: { ... }";
  }
  return "?";
}

std::string Nearest(absl::string_view name,
                    absl::Span<const std::string> names) {
  const std::string lower = Lower(name);
  // Somebody may have stopped early, which leaves out many letters.
  Names longer;
  for (const std::string& candidate : names) {
    if (lower.size() >= 4 && absl::StartsWith(Lower(candidate), lower)) {
      longer.push_back(candidate);
    }
  }
  if (longer.size() == 1) return longer[0];
  std::string best;
  // A third of the letters may be wrong, and two of a short name.
  int best_distance =
      std::max<int>(2,
                    static_cast<int>(std::min<size_t>(name.size(), 60)) / 3) +
      1;
  for (const std::string& candidate : names) {
    // Longer names differ by at least the difference in length.
    const int gap =
        static_cast<int>(candidate.size()) - static_cast<int>(lower.size());
    if (std::abs(gap) >= best_distance) continue;
    const int distance = EditDistance(lower, Lower(candidate));
    if (distance < best_distance &&
        distance < static_cast<int>(candidate.size())) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string NearestKey(absl::string_view parent, absl::string_view name) {
  Names siblings, elsewhere;
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment != Treatment::kUsed) continue;
    const std::string leaf(LeafName(key.path));
    if (ParentPath(key.path) == parent) siblings.push_back(leaf);
    if (leaf == name) elsewhere.push_back(key.path);
  }
  const auto ask = [](absl::string_view what) {
    return absl::StrCat("; did you mean \"", what, "\"?");
  };
  if (elsewhere.size() == 1) return ask(elsewhere[0]);
  if (const std::string near = Nearest(name, siblings); !near.empty()) {
    return ask(near);
  }
  for (const Synonym& synonym : kSynonyms) {
    if (name == synonym.theirs) return ask(synonym.ours);
  }
  Names leaves;
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment == Treatment::kUsed && key.is_leaf()) {
      leaves.emplace_back(LeafName(key.path));
    }
  }
  const std::string near = Nearest(name, leaves);
  if (near.empty()) return "";
  for (const KeySpec& key : AllKeys()) {
    if (key.treatment == Treatment::kUsed && LeafName(key.path) == near) {
      return ask(key.path);
    }
  }
  return "";
}

}  // namespace zero
