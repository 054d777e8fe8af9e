#include "models/llama/llama.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/sizes.h"
#include "models/layers/decoder.h"
#include "models/layers/rotary_tables.h"

// Legend: B batch, T time, M = B * T tokens, C channels (hidden_size), H query
// heads, K key/value heads, D head width, F = intermediate_size, V vocabulary.

namespace zero {
namespace {

class LlamaBlock : public DecoderUnit {
 public:
  LlamaBlock(const ModelConfig& config, int layer, const RotaryTables* rotary)
      : DecoderUnit(absl::StrCat("block.", layer), config),
        layer_(layer),
        pdrop_(config.resid_pdrop) {
    const int64_t channels = config.hidden_size;
    const int64_t q_width = config.num_attention_heads * config.head_dim;
    const int64_t kv_width = config.num_key_value_heads * config.head_dim;
    input_norm = AddNormParams("input_norm", channels);
    qkv = AddLinear("attn.qkv", q_width + 2 * kv_width, channels, normal_,
                    config.attention_bias);
    attention_ = {.num_heads = config.num_attention_heads,
                  .num_kv_heads = config.num_key_value_heads,
                  .head_dim = config.head_dim,
                  .rotary = rotary,
                  .layer = layer};
    if (config.family == ModelFamily::kQwen3) {
      q_norm = AddNormParams("attn.q_norm", config.head_dim);
      k_norm = AddNormParams("attn.k_norm", config.head_dim);
    }
    attn_out = AddLinear("attn.out", channels, q_width, normal_, false);
    post_norm = AddNormParams("post_norm", channels);
    BeginPhase();
    gate_up = AddLinear("mlp.gate_up", 2 * config.intermediate_size, channels,
                        normal_, false);
    BeginPhase();
    down = AddLinear("mlp.down", channels, config.intermediate_size, normal_,
                     false);
  }

  Var Forward(Context& ctx, const Var& in) override {
    Var attn = Attention(ctx, Norm(ctx, in, input_norm.weights()));
    attn = Dropout(ctx, attn, pdrop_, Site(0));
    auto [x, mlp_in] = AddNorm(ctx, attn, in, post_norm.weights());
    Var hidden = Swiglu(ctx, gate_up(ctx, mlp_in));  // [M, F]
    if (!ctx.training || pdrop_ == 0) return down(ctx, hidden, &x);
    return Add(ctx, Dropout(ctx, down(ctx, hidden), pdrop_, Site(1)), x);
  }

  NormParams input_norm, q_norm, k_norm, post_norm;
  LinearParams qkv, attn_out, gate_up, down;

 private:
  Var Attention(Context& ctx, const Var& x) const {
    AttentionOptions options = attention_;
    NormWeights q_weights, k_weights;
    if (q_norm.weight != nullptr) {
      q_weights = q_norm.weights();
      k_weights = k_norm.weights();
      options.q_norm = &q_weights;
      options.k_norm = &k_weights;
    }
    // [M, (H + 2K) D] -> [M, H D] -> [M, C]
    return attn_out(ctx, SelfAttention(ctx, qkv(ctx, x), options));
  }

  uint64_t Site(int place) const { return 1 + 2 * layer_ + place; }

  int layer_;
  double pdrop_;
  AttentionOptions attention_;
};

class LlamaModel : public Decoder<LlamaBlock> {
 public:
  explicit LlamaModel(const ModelConfig& config)
      : Decoder(config, "table", "", "norm", &rotary_) {}

  void Prepare(Arena& arena, Stream& stream, int64_t num_positions) override;
  void DropTables() override { rotary_ = {}; }
  int64_t TableBytes(int64_t num_positions) const override {
    return 2 * RoundUp(num_positions * config_.head_dim / 2 * sizeof(float),
                       Arena::kAlignment);
  }

  std::vector<PortableTensor> PortableTensors() const override;

 private:
  RotaryTables rotary_;
};

void LlamaModel::Prepare(Arena& arena, Stream& stream, int64_t num_positions) {
  const int64_t half = config_.head_dim / 2;
  const Shape shape{num_positions, half};
  Device& device = arena.device();
  rotary_.cos =
      Tensor::Empty(arena, shape, DType::kF32, MemoryCategory::kInputs);
  rotary_.sin =
      Tensor::Empty(arena, shape, DType::kF32, MemoryCategory::kInputs);
  if (device.kind() == DeviceKind::kMeta) return;
  std::vector<float> cos(shape.num_elems()), sin(shape.num_elems());
  FillRotaryTables(RotaryFrequencies(config_.head_dim, config_.rope_theta,
                                     config_.rope_scaling),
                   num_positions, cos.data(), sin.data());
  device.Copy(stream, rotary_.cos.data(), cos.data(), rotary_.cos.bytes());
  device.Copy(stream, rotary_.sin.data(), sin.data(), rotary_.sin.bytes());
  stream.Synchronize();
}

std::vector<PortableTensor> LlamaModel::PortableTensors() const {
  std::vector<PortableTensor> tensors;
  auto add = [&](const std::string& name, Parameter* parameter) {
    tensors.push_back({name, parameter, 0, parameter->shape, false});
  };
  // Rows [begin, begin + rows) of a packed weight, and of its bias if any.
  auto add_rows = [&](const std::string& name, const LinearParams& linear,
                      int64_t begin, int64_t rows) {
    tensors.push_back({name + ".weight", linear.weight, begin,
                       Shape({rows, linear.weight->shape[1]}), false});
    if (linear.bias == nullptr) return;
    tensors.push_back({name + ".bias", linear.bias, begin, {rows}, false});
  };
  const int64_t q_rows = config_.num_attention_heads * config_.head_dim;
  const int64_t kv_rows = config_.num_key_value_heads * config_.head_dim;
  const int64_t ffn = config_.intermediate_size;
  add("model.embed_tokens.weight", embedding_->words);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    const LlamaBlock& block = *blocks_[i];
    add(prefix + "input_layernorm.weight", block.input_norm.weight);
    add_rows(prefix + "self_attn.q_proj", block.qkv, 0, q_rows);
    add_rows(prefix + "self_attn.k_proj", block.qkv, q_rows, kv_rows);
    add_rows(prefix + "self_attn.v_proj", block.qkv, q_rows + kv_rows, kv_rows);
    if (block.q_norm.weight != nullptr) {
      add(prefix + "self_attn.q_norm.weight", block.q_norm.weight);
      add(prefix + "self_attn.k_norm.weight", block.k_norm.weight);
    }
    add(prefix + "self_attn.o_proj.weight", block.attn_out.weight);
    add(prefix + "post_attention_layernorm.weight", block.post_norm.weight);
    add_rows(prefix + "mlp.gate_proj", block.gate_up, 0, ffn);
    add_rows(prefix + "mlp.up_proj", block.gate_up, ffn, ffn);
    add(prefix + "mlp.down_proj.weight", block.down.weight);
  }
  add("model.norm.weight", head_->norm.weight);
  if (!config_.tie_word_embeddings) add("lm_head.weight", head_->words);
  return tensors;
}

}  // namespace

std::unique_ptr<Model> MakeLlama(const ModelConfig& config) {
  return std::make_unique<LlamaModel>(config);
}

}  // namespace zero
