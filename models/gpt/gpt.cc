#include "models/gpt/gpt.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "models/layers/decoder.h"

// Legend: B batch, T time, M = B * T tokens, C channels (n_embd), F = n_inner,
// V vocabulary, P positions.

namespace zero {
namespace {

class GptBlock : public DecoderUnit {
 public:
  GptBlock(const ModelConfig& config, int layer)
      : DecoderUnit(absl::StrCat("block.", layer), config),
        layer_(layer),
        pdrop_(config.resid_pdrop),
        act_(config.activation == "gelu" ? Gelu::kErf : Gelu::kTanh) {
    const int64_t channels = config.hidden_size;
    // The residual stream sums 2 * layers branches (GPT-2, section 2.3).
    const Init residual_init{
        .std = static_cast<float>(config.initializer_range /
                                  std::sqrt(2.0 * config.num_hidden_layers))};
    ln_1 = AddNormParams("ln_1", channels);
    qkv = AddLinear("attn.qkv", 3 * channels, channels, normal_, true);
    attn_out = AddLinear("attn.out", channels, channels, residual_init, true);
    ln_2 = AddNormParams("ln_2", channels);
    BeginPhase();
    fc = AddLinear("mlp.fc", config.intermediate_size, channels, normal_, true);
    BeginPhase();
    mlp_out = AddLinear("mlp.out", channels, config.intermediate_size,
                        residual_init, true);
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

  int layer_;
  double pdrop_;
  Gelu act_;
  AttentionOptions attention_;
};

class GptModel : public Decoder<GptBlock> {
 public:
  explicit GptModel(const ModelConfig& config)
      : Decoder(config, "wte", "wpe", "ln_f") {}

  std::vector<PortableTensor> PortableTensors() const override;
};

std::vector<PortableTensor> GptModel::PortableTensors() const {
  std::vector<PortableTensor> tensors;
  auto add = [&](const std::string& name, Parameter* parameter) {
    tensors.push_back({name, parameter, 0, parameter->shape, false});
  };
  // Conv1D stores [in, out], our weights are [out, in].
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
  add("transformer.wte.weight", embedding_->words);
  add("transformer.wpe.weight", embedding_->positions);
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
  add_norm("transformer.ln_f", head_->norm);
  if (!config_.tie_word_embeddings) add("lm_head.weight", head_->words);
  return tensors;
}

}  // namespace

std::unique_ptr<Model> MakeGpt(const ModelConfig& config) {
  return std::make_unique<GptModel>(config);
}

}  // namespace zero
