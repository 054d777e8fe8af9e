#include "engine/config/elastic_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace zero {
namespace {

ElasticityConfig Config(int64_t max, std::vector<int64_t> sizes,
                        int64_t min_gpus = 1, int64_t max_gpus = 10'000) {
  ElasticityConfig config;
  config.enabled = true;
  config.max_train_batch_size = max;
  config.micro_batch_sizes = std::move(sizes);
  config.min_gpus = min_gpus;
  config.max_gpus = max_gpus;
  return config;
}

// The first is the example of DeepSpeed's own tests.
TEST(ElasticBatchTest, BatchesAreDeepSpeeds) {
  EXPECT_EQ(ChooseElasticBatch(Config(10'000, {8, 12, 16, 17}, 32, 1500))
                .train_batch_size,
            9792);
  EXPECT_EQ(ChooseElasticBatch(Config(2000, {2, 4, 6})).train_batch_size, 1680);
}

TEST(ElasticBatchTest, EveryWorldSharesTheBatchAndNoOtherDoes) {
  const ElasticityConfig config = Config(100, {3, 4}, 2, 20);
  const ElasticBatch batch = ChooseElasticBatch(config);
  ASSERT_GT(batch.train_batch_size, 0);
  for (int64_t world = 1; world <= 40; ++world) {
    const int64_t share = batch.train_batch_size / world;
    const bool shares = batch.train_batch_size % world == 0 && world >= 2 &&
                        world <= 20 &&
                        ElasticMicroBatch(config.micro_batch_sizes, share) > 0;
    EXPECT_EQ(std::count(batch.worlds.begin(), batch.worlds.end(), world),
              shares)
        << world;
  }
}

// Their least common multiple is 42, and no batch.
TEST(ElasticBatchTest, NoBatchIsAboveTheLargest) {
  EXPECT_EQ(ChooseElasticBatch(Config(32, {1, 2, 3, 7})).train_batch_size, 24);
}

TEST(ElasticBatchTest, OfEqualBatchesTheLargerOrTheSmallerIsTaken) {
  ElasticityConfig config = Config(9, {2, 3});
  EXPECT_EQ(ChooseElasticBatch(config).train_batch_size, 8);
  config.prefer_larger_batch = false;
  EXPECT_EQ(ChooseElasticBatch(config).train_batch_size, 6);
}

TEST(ElasticBatchTest, TheLargestMicroBatchThatDividesTheShareIsTaken) {
  EXPECT_EQ(ElasticMicroBatch({1, 2, 3, 7}, 6), 3);
  EXPECT_EQ(ElasticMicroBatch({4, 6}, 9), 0);
}

TEST(ElasticBatchTest, WhereNothingFitsThereIsNoBatch) {
  const ElasticBatch batch = ChooseElasticBatch(Config(4, {8, 16}));
  EXPECT_EQ(batch.train_batch_size, 0);
  EXPECT_TRUE(batch.worlds.empty());
}

// Their least common multiple has more than 64 bits.
TEST(ElasticBatchTest, ManySizesDoNotOverflow) {
  std::vector<int64_t> sizes(100);
  std::iota(sizes.begin(), sizes.end(), (int64_t{1} << 30) - 100);
  EXPECT_EQ(
      ChooseElasticBatch(Config(int64_t{1} << 30, sizes)).train_batch_size,
      (int64_t{1} << 30) - 1);
}

}  // namespace
}  // namespace zero
