#include "models/catalog.h"

namespace zero {
namespace {

ModelConfig Gpt2(int64_t n_embd, int64_t n_layer, int64_t n_head,
                 int64_t vocab_size = 50257, int64_t n_positions = 1024) {
  ModelConfig c = FamilyDefaults(ModelFamily::kGpt2);
  c.vocab_size = vocab_size;
  c.hidden_size = n_embd;
  c.num_hidden_layers = n_layer;
  c.num_attention_heads = n_head;
  c.max_position_embeddings = n_positions;
  CompleteModelConfig(&c);
  return c;
}

// The shape that Llama and Qwen share.
struct Shape {
  int64_t vocab, hidden, layers, heads, kv_heads, head_dim, inner;
};

ModelConfig Rotary(ModelFamily family, const Shape& shape, int64_t positions,
                   double theta, double eps, bool tied) {
  ModelConfig c = FamilyDefaults(family);
  c.vocab_size = shape.vocab;
  c.hidden_size = shape.hidden;
  c.num_hidden_layers = shape.layers;
  c.num_attention_heads = shape.heads;
  c.num_key_value_heads = shape.kv_heads;
  c.head_dim = shape.head_dim;
  c.intermediate_size = shape.inner;
  c.max_position_embeddings = positions;
  c.norm_eps = eps;
  c.rope_theta = theta;
  c.tie_word_embeddings = tied;
  return c;
}

ModelConfig Llama2(const Shape& shape) {
  return Rotary(ModelFamily::kLlama, shape, 4096, 10000, 1e-5, false);
}

ModelConfig Llama3(const Shape& shape) {
  return Rotary(ModelFamily::kLlama, shape, 8192, 500000, 1e-5, false);
}

// Llama 3.1 and 3.2: 128k positions by scaling the rotary frequencies.
ModelConfig Llama31(const Shape& shape, double factor, bool tied) {
  ModelConfig c =
      Rotary(ModelFamily::kLlama, shape, 131072, 500000, 1e-5, tied);
  c.rope_scaling = {true, factor, 1.0, 4.0, 8192};
  return c;
}

ModelConfig Qwen2(const Shape& shape, int64_t positions, bool tied) {
  return Rotary(ModelFamily::kQwen2, shape, positions, 1e6, 1e-6, tied);
}

ModelConfig Qwen3(const Shape& shape, bool tied) {
  return Rotary(ModelFamily::kQwen3, shape, 40960, 1e6, 1e-6, tied);
}

// A byte-level model that trains in seconds on a CPU.
ModelConfig Tiny(ModelFamily family) {
  const Shape shape{257, 128, 4, 4, 2, 32, 384};
  return Rotary(family, shape, 512, 10000, 1e-6, true);
}

}  // namespace

const std::vector<ModelPreset>& ModelPresets() {
  // vocab, hidden, layers, heads, kv heads, head width, feed-forward width
  static const auto* const kPresets = new std::vector<ModelPreset>{
      {"gpt2-tiny", Gpt2(128, 4, 4, 257, 512)},
      {"gpt2", Gpt2(768, 12, 12)},
      {"gpt2-medium", Gpt2(1024, 24, 16)},
      {"gpt2-large", Gpt2(1280, 36, 20)},
      {"gpt2-xl", Gpt2(1600, 48, 25)},
      {"llama-tiny", Tiny(ModelFamily::kLlama)},
      {"Llama-2-7B", Llama2({32000, 4096, 32, 32, 32, 128, 11008})},
      {"Llama-3-8B", Llama3({128256, 4096, 32, 32, 8, 128, 14336})},
      {"Llama-3.1-8B",
       Llama31({128256, 4096, 32, 32, 8, 128, 14336}, 8, false)},
      {"Llama-3.2-1B", Llama31({128256, 2048, 16, 32, 8, 64, 8192}, 32, true)},
      {"Llama-3.2-3B", Llama31({128256, 3072, 28, 24, 8, 128, 8192}, 32, true)},
      {"qwen2-tiny", Tiny(ModelFamily::kQwen2)},
      {"Qwen2.5-0.5B", Qwen2({151936, 896, 24, 14, 2, 64, 4864}, 32768, true)},
      {"Qwen2.5-1.5B",
       Qwen2({151936, 1536, 28, 12, 2, 128, 8960}, 131072, true)},
      {"Qwen2.5-3B", Qwen2({151936, 2048, 36, 16, 2, 128, 11008}, 32768, true)},
      {"Qwen2.5-7B",
       Qwen2({152064, 3584, 28, 28, 4, 128, 18944}, 131072, false)},
      {"qwen3-tiny", Tiny(ModelFamily::kQwen3)},
      {"Qwen3-0.6B", Qwen3({151936, 1024, 28, 16, 8, 128, 3072}, true)},
      {"Qwen3-1.7B", Qwen3({151936, 2048, 28, 16, 8, 128, 6144}, true)},
      {"Qwen3-4B", Qwen3({151936, 2560, 36, 32, 8, 128, 9728}, true)},
      {"Qwen3-8B", Qwen3({151936, 4096, 36, 32, 8, 128, 12288}, false)},
  };
  return *kPresets;
}

}  // namespace zero
