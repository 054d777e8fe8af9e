#include "engine/train/sampling.h"

#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace zero {
namespace {

constexpr int kDraws = 20000;

std::map<int32_t, int> Draw(const std::vector<float>& logits,
                            const SamplingOptions& options,
                            int64_t vocab_limit = 1000) {
  std::map<int32_t, int> counts;
  for (int i = 0; i < kDraws; ++i) {
    ++counts[SampleToken(logits, vocab_limit, options, i)];
  }
  return counts;
}

// The counts against `probability`, within five deviations of a binomial.
void ExpectFrequencies(const std::map<int32_t, int>& counts,
                       const std::vector<double>& probability) {
  for (size_t i = 0; i < probability.size(); ++i) {
    const double p = probability[i];
    const auto found = counts.find(i);
    const double got = found == counts.end() ? 0 : found->second;
    EXPECT_NEAR(got / kDraws, p, 5 * std::sqrt(p * (1 - p) / kDraws)) << i;
  }
}

std::vector<double> Softmax(const std::vector<float>& logits, double t) {
  std::vector<double> p;
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit / t);
  for (float logit : logits) p.push_back(std::exp(logit / t) / sum);
  return p;
}

const std::vector<float> kLogits = {0.5f, 2.0f, -1.0f, 1.5f, 0.0f};

TEST(SamplingTest, FrequenciesAreTheSoftmaxAtTheTemperature) {
  for (double temperature : {0.5, 1.0, 3.0}) {
    ExpectFrequencies(Draw(kLogits, {.temperature = temperature}),
                      Softmax(kLogits, temperature));
  }
}

TEST(SamplingTest, ZeroTemperatureTakesTheMostLikely) {
  const auto counts = Draw(kLogits, {.temperature = 0});
  EXPECT_EQ(counts, (std::map<int32_t, int>{{1, kDraws}}));
  // Of equals, the first.
  EXPECT_EQ(SampleToken(std::vector<float>{1, 3, 3}, 3, {.temperature = 0}, 0),
            1);
}

TEST(SamplingTest, TopKKeepsTheKMostLikely) {
  const auto counts = Draw(kLogits, {.temperature = 1, .top_k = 2});
  const double z = std::exp(2.0) + std::exp(1.5);
  ExpectFrequencies(counts, {0, std::exp(2.0) / z, 0, std::exp(1.5) / z, 0});
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_EQ(Draw(kLogits, {.temperature = 5, .top_k = 1}).size(), 1u);
  // More than there are means all.
  EXPECT_EQ(Draw(kLogits, {.temperature = 5, .top_k = 99}).size(), 5u);
}

TEST(SamplingTest, TopPKeepsTheSmallestSetThatHoldsTheMass) {
  // 0.5, 0.3, 0.15, 0.05 in another order.
  const std::vector<float> logits = {std::log(0.15f), std::log(0.5f),
                                     std::log(0.05f), std::log(0.3f)};
  auto kept = [&](double top_p) {
    std::set<int32_t> ids;
    for (const auto& [id, count] :
         Draw(logits, {.temperature = 1, .top_p = top_p})) {
      ids.insert(id);
    }
    return ids;
  };
  EXPECT_EQ(kept(0.4), (std::set<int32_t>{1}));
  EXPECT_EQ(kept(0.6), (std::set<int32_t>{1, 3}));
  EXPECT_EQ(kept(0.9), (std::set<int32_t>{0, 1, 3}));
  EXPECT_EQ(kept(1.0), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept(0.0), (std::set<int32_t>{1}));
  ExpectFrequencies(Draw(logits, {.temperature = 1, .top_p = 0.6}),
                    {0, 0.5 / 0.8, 0, 0.3 / 0.8});
}

TEST(SamplingTest, TopPActsOnWhatTopKLeaves) {
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f),
                                     std::log(0.3f)};
  // Of {0.4, 0.3} renormalized, 0.57 is enough for 0.55.
  const auto counts =
      Draw(logits, {.temperature = 1, .top_k = 2, .top_p = 0.55});
  EXPECT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts.begin()->first, 0);
}

TEST(SamplingTest, TheTokenIsAFunctionOfSeedAndIndex) {
  const SamplingOptions options{.temperature = 1, .seed = 5};
  SamplingOptions other = options;
  other.seed = 6;
  int same_index = 0, same_seed = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const int32_t token = SampleToken(kLogits, 5, options, i);
    EXPECT_EQ(SampleToken(kLogits, 5, options, i), token);
    same_index += SampleToken(kLogits, 5, other, i) == token;
    same_seed += SampleToken(kLogits, 5, options, i + 1) == token;
  }
  // Independent draws agree with probability sum p^2 = 0.36.
  EXPECT_LT(same_index, 500);
  EXPECT_LT(same_seed, 500);
}

TEST(SamplingTest, PaddedVocabularyIsNeverChosen) {
  const std::vector<float> logits = {0, 1, 50, 60};
  for (double temperature : {0.0, 1.0, 100.0}) {
    for (const auto& [id, count] :
         Draw(logits, {.temperature = temperature}, /*vocab_limit=*/2)) {
      EXPECT_LT(id, 2);
    }
  }
}

TEST(SamplingTest, LargeLogitsDoNotOverflow) {
  const std::vector<float> logits = {3e38f, 3e38f, -3e38f};
  const auto counts = Draw(logits, {.temperature = 0.1});
  ExpectFrequencies(counts, {0.5, 0.5, 0});
}

}  // namespace
}  // namespace zero
