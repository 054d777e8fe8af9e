// Shared by the decoders: adding layers to a unit, the units at both ends, and
// the model around them.
// Legend: M = B * T tokens, C channels, V vocabulary, P positions.
#ifndef ZERO_MODELS_LAYERS_DECODER_H_
#define ZERO_MODELS_LAYERS_DECODER_H_

#include <string>
#include <vector>

#include "engine/config/model_config.h"
#include "models/layers/params.h"

namespace zero {

// gpt2 has LayerNorms, the others RMSNorms.
class DecoderUnit : public Unit {
 protected:
  DecoderUnit(const std::string& name, const ModelConfig& config)
      : Unit(name),
        normal_{.std = static_cast<float>(config.initializer_range)},
        layer_norms_(config.family == ModelFamily::kGpt2),
        norm_eps_(static_cast<float>(config.norm_eps)) {}

  // weight [out, in], bias [out].
  LinearParams AddLinear(const std::string& name, int64_t out, int64_t in,
                         Init init, bool bias) {
    LinearParams linear = {
        AddParameter(name + ".weight", {out, in}, init, /*decay=*/true)};
    if (bias) linear.bias = AddParameter(name + ".bias", {out}, {}, false);
    return linear;
  }

  NormParams AddNormParams(const std::string& name, int64_t width) {
    NormParams norm = {
        NormKind::kRmsNorm,
        AddParameter(name + ".weight", {width}, {.value = 1}, /*decay=*/false),
        nullptr, norm_eps_};
    if (layer_norms_) {
      norm.kind = NormKind::kLayerNorm;
      norm.bias = AddParameter(name + ".bias", {width}, {}, /*decay=*/false);
    }
    return norm;
  }

  const Init normal_;

 private:
  bool layer_norms_;
  float norm_eps_;
};

class EmbeddingUnit : public DecoderUnit {
 public:
  // Parameters: `words` [V, C]; and, unless its name is empty, `positions`
  // [P, C].
  EmbeddingUnit(const ModelConfig& config, const std::string& words_name,
                const std::string& positions_name)
      : DecoderUnit("embedding", config), pdrop_(config.embd_pdrop) {
    const int64_t channels = config.hidden_size;
    words = AddVocabulary(words_name, {config.vocab_size, channels}, normal_);
    words->looked_up = true;
    if (positions_name.empty()) return;
    positions =
        AddParameter(positions_name, {config.max_position_embeddings, channels},
                     normal_, /*decay=*/true);
  }

  Var Forward(Context& ctx, const Var& in) override {
    const Weight* const added = WeightOf(positions);
    Var x = words->parts.empty()
                ? Embedding(ctx, words->weight, added)  // [M, C]
                : EmbeddingPart(ctx, in, PartOf(ctx, *words),
                                SliceOf(ctx, *words), added);
    if (HasMoreParts(ctx, *words)) return x;
    return Dropout(ctx, x, pdrop_, /*site=*/0);
  }
  bool BackwardReadsParameters() const override { return false; }

  Parameter* words = nullptr;
  Parameter* positions = nullptr;

 private:
  double pdrop_;
};

class HeadUnit : public DecoderUnit {
 public:
  // `tied`: the embedding's table; null for a separate head.
  HeadUnit(const ModelConfig& config, const std::string& norm_name,
           Parameter* tied)
      : DecoderUnit("head", config),
        norm(AddNormParams(norm_name, config.hidden_size)),
        words(tied) {
    if (tied != nullptr) {
      Borrow(tied);
    } else {
      words = AddVocabulary("lm_head", {config.vocab_size, config.hidden_size},
                            normal_);
    }
  }

  Var Forward(Context& ctx, const Var& in) override {
    const Var x = Normed(ctx, in);
    if (!words->parts.empty()) {
      return LinearCrossEntropyPart(ctx, x, PartOf(ctx, *words),
                                    SliceOf(ctx, *words), words->shape[0]);
    }
    LinearCrossEntropy(ctx, x, words->weight, words->shape[0],
                       words->part_rows);
    return Var();
  }

  Var Logits(Context& ctx, const Var& in) override {
    const Var x = Normed(ctx, in);
    if (words->parts.empty()) return Linear(ctx, x, WordsOf(*words));
    const TableSlice slice = SliceOf(ctx, *words);
    const Tensor part = Linear(ctx, x, PartOf(ctx, *words)).value;
    if (ctx.part == 0) ctx.logits = ctx.Empty({1, slice.rows}, part.dtype());
    ctx.ops().Cast(
        ctx.stream(),
        {part.vector(), ctx.logits.Slice(slice.first, part.shape()).vector()});
    if (HasMoreParts(ctx, *words)) return x;
    return Var(
        std::exchange(ctx.logits, Tensor()).Slice(0, {1, words->shape[0]}));
  }

  NormParams norm;
  Parameter* words;

 private:
  // The first part normalizes for all parts.
  Var Normed(Context& ctx, const Var& in) const {
    return ctx.part == 0 ? Norm(ctx, in, norm.weights()) : in;
  }
};

// A model of an embedding, blocks and a head.
template <typename Block>
class Decoder : public Model {
 public:
  void Prepare(Arena&, Stream&, int64_t) override {}
  void DropTables() override {}
  int64_t TableBytes(int64_t) const override { return 0; }

  int64_t vocab_size() const override { return config_.vocab_size; }

  KvCache MakeKvCache(Context& ctx, int64_t batch, int64_t capacity,
                      DType dtype) const override {
    KvCache cache{.capacity = capacity};
    const Shape shape{batch, capacity,
                      config_.num_key_value_heads * config_.head_dim};
    for (size_t i = 0; i < blocks_.size(); ++i) {
      cache.layers.push_back(
          {ctx.Empty(shape, dtype), ctx.Empty(shape, dtype)});
    }
    return cache;
  }

 protected:
  // `block`: a Block's constructor arguments after the config and its number.
  // The names are those of EmbeddingUnit's and HeadUnit's parameters.
  template <typename... Args>
  Decoder(const ModelConfig& config, const char* words, const char* positions,
          const char* norm, const Args&... block)
      : config_(config) {
    embedding_ = AddUnit<EmbeddingUnit>(config, words, positions);
    for (int i = 0; i < config.num_hidden_layers; ++i) {
      blocks_.push_back(AddUnit<Block>(config, i, block...));
    }
    head_ = AddUnit<HeadUnit>(
        config, norm, config.tie_word_embeddings ? embedding_->words : nullptr);
  }

  const ModelConfig config_;
  EmbeddingUnit* embedding_;
  std::vector<Block*> blocks_;
  HeadUnit* head_;
};

}  // namespace zero

#endif  // ZERO_MODELS_LAYERS_DECODER_H_
