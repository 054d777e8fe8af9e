#include "models/gpt/gpt.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "models/layers/params.h"

// Legend: B batch, T time, M = B * T tokens, C channels (n_embd), F = n_inner,
// V vocabulary, P positions.

namespace zero {
namespace {

constexpr Init kOnes{.value = 1};
constexpr Init kZeros{};

class GptEmbedding : public Unit {
 public:
  explicit GptEmbedding(const ModelConfig& config)
      : Unit("embedding"), pdrop_(config.embd_pdrop) {
    const Init init{.std = static_cast<float>(config.initializer_range)};
    wte = AddVocabulary("wte", {config.vocab_size, config.hidden_size}, init);
    wpe = AddParameter("wpe",
                       {config.max_position_embeddings, config.hidden_size},
                       init, /*decay=*/true);
  }

  Var Forward(Context& ctx, const Var&) override {
    Var x = Embedding(ctx, wte->weight, &wpe->weight);  // [M, C]
    return Dropout(ctx, x, pdrop_, /*site=*/0);
  }
  bool BackwardReadsParameters() const override { return false; }

  Parameter* wte;
  Parameter* wpe;

 private:
  double pdrop_;
};

class GptBlock : public Unit {
 public:
  GptBlock(const ModelConfig& config, int layer)
      : Unit(absl::StrCat("block.", layer)),
        layer_(layer),
        pdrop_(config.resid_pdrop),
        act_(config.activation == "gelu" ? Gelu::kErf : Gelu::kTanh) {
    const int64_t channels = config.hidden_size;
    const Init init{.std = static_cast<float>(config.initializer_range)};
    // The residual stream sums 2 * layers branches (GPT-2, section 2.3).
    const Init residual_init{
        .std = static_cast<float>(config.initializer_range /
                                  std::sqrt(2.0 * config.num_hidden_layers))};
    ln_1 = AddNormParams("ln_1", channels, config.norm_eps);
    qkv = AddLinear("attn.qkv", 3 * channels, channels, init);
    attn_out = AddLinear("attn.out", channels, channels, residual_init);
    ln_2 = AddNormParams("ln_2", channels, config.norm_eps);
    fc = AddLinear("mlp.fc", config.intermediate_size, channels, init);
    mlp_out =
        AddLinear("mlp.out", channels, config.intermediate_size, residual_init);
    attention_ = {.num_heads = config.num_attention_heads,
                  .num_kv_heads = config.num_attention_heads,
                  .head_dim = config.head_dim,
                  .layer = layer};
  }

  Var Forward(Context& ctx, const Var& in) override {
    Var normed = Norm(ctx, in, ln_1.weights());  // [M, C]
    Var attended = SelfAttention(ctx, qkv(ctx, normed), attention_);
    Var attn = Dropout(ctx, attn_out(ctx, attended), pdrop_, Site(0));
    auto [x, mlp_in] = AddNorm(ctx, attn, in, ln_2.weights());  // [M, C] each
    if (!ctx.training || pdrop_ == 0) return Mlp(ctx, mlp_in, &x);
    return Add(ctx, Dropout(ctx, Mlp(ctx, mlp_in), pdrop_, Site(1)), x);
  }

  NormParams ln_1, ln_2;
  LinearParams qkv, attn_out, fc, mlp_out;

 private:
  Var Mlp(Context& ctx, const Var& x, const Var* residual = nullptr) const {
    return GeluMlp(ctx, x, fc.weight->weight, &fc.bias->weight, act_,
                   mlp_out.weight->weight, &mlp_out.bias->weight, residual);
  }

  uint64_t Site(int place) const { return 1 + 2 * layer_ + place; }

  LinearParams AddLinear(const std::string& name, int64_t out, int64_t in,
                         Init init) {
    return {AddParameter(name + ".weight", {out, in}, init, /*decay=*/true),
            AddParameter(name + ".bias", {out}, kZeros, /*decay=*/false)};
  }

  NormParams AddNormParams(const std::string& name, int64_t width, double eps) {
    return {NormKind::kLayerNorm,
            AddParameter(name + ".weight", {width}, kOnes, /*decay=*/false),
            AddParameter(name + ".bias", {width}, kZeros, /*decay=*/false),
            static_cast<float>(eps)};
  }

  int layer_;
  double pdrop_;
  Gelu act_;
  AttentionOptions attention_;
};

class GptHead : public Unit {
 public:
  // `wte` is the embedding's table when tied, null for a head of its own.
  GptHead(const ModelConfig& config, Parameter* wte) : Unit("head") {
    const int64_t channels = config.hidden_size;
    ln_f = {NormKind::kLayerNorm,
            AddParameter("ln_f.weight", {channels}, kOnes, /*decay=*/false),
            AddParameter("ln_f.bias", {channels}, kZeros, /*decay=*/false),
            static_cast<float>(config.norm_eps)};
    if (wte != nullptr) {
      Borrow(wte);
      weight = wte;
    } else {
      weight =
          AddVocabulary("lm_head", {config.vocab_size, channels},
                        {.std = static_cast<float>(config.initializer_range)});
    }
  }

  Var Forward(Context& ctx, const Var& in) override {
    LinearCrossEntropy(ctx, Norm(ctx, in, ln_f.weights()), weight->weight,
                       weight->shape[0]);
    return Var();
  }

  Var Logits(Context& ctx, const Var& in) override {
    return Linear(ctx, Norm(ctx, in, ln_f.weights()), WordsOf(*weight));
  }

  NormParams ln_f;
  Parameter* weight;
};

class GptModel : public Model {
 public:
  explicit GptModel(const ModelConfig& config) : config_(config) {
    embedding_ = AddUnit<GptEmbedding>(config);
    for (int i = 0; i < config.num_hidden_layers; ++i) {
      blocks_.push_back(AddUnit<GptBlock>(config, i));
    }
    head_ = AddUnit<GptHead>(
        config, config.tie_word_embeddings ? embedding_->wte : nullptr);
  }

  void Prepare(Arena&, Stream&, int64_t) override {}
  void DropTables() override {}
  int64_t TableBytes(int64_t) const override { return 0; }

  int64_t vocab_size() const override { return config_.vocab_size; }

  KvCache MakeKvCache(Context& ctx, int64_t batch, int64_t capacity,
                      DType dtype) const override {
    return MakeCache(ctx, config_.num_hidden_layers, batch, capacity,
                     config_.hidden_size, dtype);
  }

  std::vector<PortableTensor> PortableTensors() const override;

 private:
  ModelConfig config_;
  GptEmbedding* embedding_;
  std::vector<GptBlock*> blocks_;
  GptHead* head_;
};

std::vector<PortableTensor> GptModel::PortableTensors() const {
  std::vector<PortableTensor> tensors;
  auto add = [&](const std::string& name, Parameter* parameter) {
    tensors.push_back({name, parameter, 0, parameter->shape, false});
  };
  // Conv1D keeps [in, out] where our weights are [out, in].
  auto add_linear = [&](const std::string& name, const LinearParams& linear) {
    const Shape& shape = linear.weight->shape;
    tensors.push_back({name + ".weight", linear.weight, 0,
                       Shape({shape[1], shape[0]}), true});
    add(name + ".bias", linear.bias);
  };
  auto add_norm = [&](const std::string& name, const NormParams& norm) {
    add(name + ".weight", norm.weight);
    add(name + ".bias", norm.bias);
  };
  add("transformer.wte.weight", embedding_->wte);
  add("transformer.wpe.weight", embedding_->wpe);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const std::string prefix = absl::StrCat("transformer.h.", i, ".");
    const GptBlock& block = *blocks_[i];
    add_norm(prefix + "ln_1", block.ln_1);
    add_linear(prefix + "attn.c_attn", block.qkv);
    add_linear(prefix + "attn.c_proj", block.attn_out);
    add_norm(prefix + "ln_2", block.ln_2);
    add_linear(prefix + "mlp.c_fc", block.fc);
    add_linear(prefix + "mlp.c_proj", block.mlp_out);
  }
  add_norm("transformer.ln_f", head_->ln_f);
  if (!config_.tie_word_embeddings) add("lm_head.weight", head_->weight);
  return tensors;
}

}  // namespace

std::unique_ptr<Model> MakeGpt(const ModelConfig& config) {
  return std::make_unique<GptModel>(config);
}

}  // namespace zero
