#include "engine/nn/freeze.h"

#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Patterns = std::vector<std::string>;

std::set<std::string> Frozen(const Model& model) {
  std::set<std::string> names;
  for (const Parameter* parameter : model.AllParameters()) {
    if (parameter->frozen) names.insert(parameter->name);
  }
  return names;
}

std::set<std::string> Frozen(ModelFamily family, const Patterns& patterns) {
  const auto model = MakeModel(TinyConfig(family));
  const absl::Status status = FreezeParameters(patterns, *model);
  EXPECT_TRUE(status.ok()) << status;
  return Frozen(*model);
}

std::string ErrorOf(ModelFamily family, const Patterns& patterns) {
  const auto model = MakeModel(TinyConfig(family));
  return std::string(FreezeParameters(patterns, *model).message());
}

TEST(FreezeTest, NamesOfCheckpointsAndOfHuggingFaceMeanTheSame) {
  EXPECT_THAT(Frozen(ModelFamily::kGpt2, {"embedding.wte"}),
              ElementsAre("embedding.wte"));
  EXPECT_THAT(Frozen(ModelFamily::kGpt2, {"transformer.wte.weight"}),
              ElementsAre("embedding.wte"));
  EXPECT_EQ(Frozen(ModelFamily::kLlama, {"block.0.*"}),
            Frozen(ModelFamily::kLlama, {"model.layers.0.*"}));
}

TEST(FreezeTest, AGlobIsHeldAgainstWholeNames) {
  EXPECT_THAT(Frozen(ModelFamily::kGpt2, {"*.attn.qkv.bias"}),
              ElementsAre("block.0.attn.qkv.bias", "block.1.attn.qkv.bias"));
  EXPECT_THAT(Frozen(ModelFamily::kGpt2, {"block.[1-9].ln_?.bias"}),
              ElementsAre("block.1.ln_1.bias", "block.1.ln_2.bias"));
  EXPECT_THAT(ErrorOf(ModelFamily::kGpt2, {"ln_1"}),
              HasSubstr("no tensor's name matches \"ln_1\""));
}

TEST(FreezeTest, TensorsThatAreTrainedAsOneFreezeTogether) {
  EXPECT_THAT(Frozen(ModelFamily::kLlama,
                     {"*.0.self_attn.q_proj.*", "*.0.self_attn.[kv]_proj.*"}),
              ElementsAre("block.0.attn.qkv.weight"));
  EXPECT_EQ(ErrorOf(ModelFamily::kLlama, {"*.0.self_attn.q_proj.weight"}),
            "model.freeze: model.layers.0.self_attn.q_proj.weight would be "
            "frozen, but not model.layers.0.self_attn.k_proj.weight, "
            "model.layers.0.self_attn.v_proj.weight, which are trained as one "
            "(block.0.attn.qkv.weight); freeze all of them or none");
}

TEST(FreezeTest, WhatMatchesNothingIsNamedWithNamesThatExist) {
  const std::string error =
      ErrorOf(ModelFamily::kGpt2, {"embedding.*", "embedding.wtf"});
  EXPECT_THAT(error, HasSubstr("model.freeze: no tensor's name matches "
                               "\"embedding.wtf\""));
  EXPECT_THAT(error, HasSubstr("such as embedding.wte, "));
}

TEST(FreezeTest, ATiedHeadIsTheEmbedding) {
  ASSERT_TRUE(TinyConfig(ModelFamily::kGpt2).tie_word_embeddings);
  EXPECT_THAT(ErrorOf(ModelFamily::kGpt2, {"lm_head.*"}),
              HasSubstr("is the head, which is tied to transformer.wte.weight "
                        "(embedding.wte, model.tie_word_embeddings)"));
  ModelConfig untied = TinyConfig(ModelFamily::kGpt2);
  untied.tie_word_embeddings = false;
  const auto model = MakeModel(untied);
  ASSERT_TRUE(FreezeParameters({"lm_head.weight"}, *model).ok());
  EXPECT_THAT(Frozen(*model), ElementsAre("head.lm_head"));
  EXPECT_EQ(NumFrozen(*model), untied.vocab_size * untied.hidden_size);
}

TEST(FreezeTest, FreezingEverythingIsAnError) {
  EXPECT_THAT(ErrorOf(ModelFamily::kLlama, {"*"}),
              HasSubstr("nothing is left to train"));
  EXPECT_THAT(Frozen(ModelFamily::kLlama, {}), ElementsAre());
}

}  // namespace
}  // namespace zero
