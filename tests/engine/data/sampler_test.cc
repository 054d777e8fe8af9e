#include "engine/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace zero {
namespace {

std::vector<int64_t> Order(int64_t n, uint64_t seed, int64_t epoch) {
  const Permutation permutation(n, seed, epoch);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < n; ++i) order.push_back(permutation(i));
  return order;
}

// The windows of one step, in the order (micro-step, rank, row).
std::vector<int64_t> StepWindows(const Sampler& sampler, int64_t step) {
  const BatchShape& shape = sampler.shape();
  std::vector<int64_t> windows;
  for (int64_t m = 0; m < shape.micro_steps; ++m) {
    for (int64_t rank = 0; rank < shape.world; ++rank) {
      for (int64_t row = 0; row < shape.micro_batch_size; ++row) {
        windows.push_back(sampler.Window(sampler.SampleId(step, m, rank, row)));
      }
    }
  }
  return windows;
}

TEST(PermutationTest, IsAPermutationOfEverySizeInEveryEpoch) {
  for (const int64_t n :
       {1, 2, 3, 4, 5, 16, 17, 31, 33, 1000, 1023, 1024, 1025, 65537}) {
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      const std::vector<int64_t> order = Order(n, 42, epoch);
      const std::set<int64_t> seen(order.begin(), order.end());
      ASSERT_EQ(static_cast<int64_t>(seen.size()), n);
      ASSERT_EQ(*seen.begin(), 0);
      ASSERT_EQ(*seen.rbegin(), n - 1);
    }
  }
}

TEST(PermutationTest, ReachesFarIndicesOfHugeSetsDirectly) {
  const int64_t n = int64_t{1} << 61;
  const Permutation permutation(n - 3, 1, 5);
  for (const int64_t i : {int64_t{0}, n / 2, n - 4}) {
    EXPECT_GE(permutation(i), 0);
    EXPECT_LT(permutation(i), n - 3);
  }
}

TEST(PermutationTest, DiffersBetweenEpochsAndSeeds) {
  EXPECT_EQ(Order(1000, 42, 0), Order(1000, 42, 0));
  EXPECT_NE(Order(1000, 42, 0), Order(1000, 42, 1));
  EXPECT_NE(Order(1000, 42, 0), Order(1000, 43, 0));
}

// A uniform permutation has 1 fixed point on average with variance 1, and
// neighbours stay neighbours about 2 times in n. Over 200 epochs the mean
// number of fixed points is within 5 standard errors of 1.
TEST(PermutationTest, LooksUniform) {
  const int64_t n = 997;
  const int num_epochs = 200;
  double fixed = 0, neighbours = 0, first = 0;
  for (int epoch = 0; epoch < num_epochs; ++epoch) {
    const std::vector<int64_t> order = Order(n, 7, epoch);
    first += static_cast<double>(order[0]);
    for (int64_t i = 0; i < n; ++i) {
      fixed += order[static_cast<size_t>(i)] == i;
      if (i > 0) {
        neighbours += std::abs(order[static_cast<size_t>(i)] -
                               order[static_cast<size_t>(i - 1)]) == 1;
      }
    }
  }
  EXPECT_NEAR(fixed / num_epochs, 1.0, 5.0 / std::sqrt(num_epochs));
  EXPECT_NEAR(neighbours / num_epochs, 2.0, 5.0 * std::sqrt(2.0 / num_epochs));
  EXPECT_NEAR(first / num_epochs, (n - 1) / 2.0,
              5.0 * static_cast<double>(n) / std::sqrt(12.0 * num_epochs));
}

TEST(SamplerTest, AllSmallPermutationsAppear) {
  std::set<std::vector<int64_t>> seen;
  for (int64_t epoch = 0; epoch < 500; ++epoch) seen.insert(Order(4, 3, epoch));
  EXPECT_EQ(seen.size(), 24u);
}

TEST(SamplerTest, CountsWindowsStepsAndWhatIsDropped) {
  // 101 tokens: ten windows of 10 targets; batches of 4.
  const Sampler sampler(101, {.sequence_length = 10, .micro_batch_size = 4}, 1);
  EXPECT_EQ(sampler.num_samples(), 10);
  EXPECT_EQ(sampler.steps_per_epoch(), 2);
  EXPECT_EQ(sampler.dropped_per_epoch(), 2);
  // One token fewer leaves the last window without its last target.
  EXPECT_EQ(Sampler(100, sampler.shape(), 1).num_samples(), 9);
  EXPECT_EQ(Sampler(0, sampler.shape(), 1).num_samples(), 0);
}

TEST(SamplerTest, AnEpochReadsNoWindowTwice) {
  const Sampler sampler(
      1001, {.sequence_length = 10, .micro_batch_size = 3, .world = 4}, 9);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> seen;
    for (int64_t s = 0; s < sampler.steps_per_epoch(); ++s) {
      for (const int64_t window :
           StepWindows(sampler, epoch * sampler.steps_per_epoch() + s)) {
        EXPECT_TRUE(seen.insert(window).second);
        EXPECT_LT(window, sampler.num_samples());
      }
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()) + sampler.dropped_per_epoch(),
              sampler.num_samples());
  }
}

TEST(SamplerTest, RanksAreDisjoint) {
  const Sampler sampler(10001,
                        {.sequence_length = 10,
                         .micro_batch_size = 5,
                         .micro_steps = 3,
                         .world = 4},
                        9);
  for (int64_t step = 0; step < 20; ++step) {
    const std::vector<int64_t> windows = StepWindows(sampler, step);
    EXPECT_EQ(std::set<int64_t>(windows.begin(), windows.end()).size(),
              windows.size());
  }
}

// Ranks and micro-batches are interchangeable: 12 rows per step, cut in every
// way.
TEST(SamplerTest, TheGlobalBatchIsTheSameForEveryWorldSize) {
  const Sampler one(5001, {.sequence_length = 10, .micro_batch_size = 12}, 3);
  for (const int64_t world : {1, 2, 3, 4}) {
    for (const int64_t micro_steps : {1, 3}) {
      if (12 % (world * micro_steps) != 0) continue;
      const Sampler sampler(5001,
                            {.sequence_length = 10,
                             .micro_batch_size = 12 / (world * micro_steps),
                             .micro_steps = micro_steps,
                             .world = world},
                            3);
      for (int64_t step = 0; step < 2 * one.steps_per_epoch(); ++step) {
        ASSERT_EQ(StepWindows(sampler, step), StepWindows(one, step));
      }
    }
  }
}

// So that N ranks x 1 micro-batch can equal 1 rank x N micro-batches.
TEST(SamplerTest, RankAndMicroStepAreInterchangeable) {
  const Sampler ranks(
      5001, {.sequence_length = 10, .micro_batch_size = 2, .world = 4}, 3);
  const Sampler micro(
      5001, {.sequence_length = 10, .micro_batch_size = 2, .micro_steps = 4},
      3);
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t row = 0; row < 2; ++row) {
      EXPECT_EQ(ranks.SampleId(5, 0, i, row), micro.SampleId(5, i, 0, row));
    }
  }
}

// The state of the data order is the step number and nothing else.
TEST(SamplerTest, AnyStepOfAnyEpochIsReachedDirectly) {
  const BatchShape shape = {.sequence_length = 10, .micro_batch_size = 7};
  const Sampler walked(5001, shape, 3);
  std::vector<int64_t> last;
  const int64_t step = 2 * walked.steps_per_epoch() + 5;
  for (int64_t s = 0; s <= step; ++s) last = StepWindows(walked, s);
  EXPECT_EQ(StepWindows(Sampler(5001, shape, 3), step), last);
}

TEST(SamplerTest, SampleIdsAreUniqueOverTheRun) {
  const Sampler sampler(501,
                        {.sequence_length = 10,
                         .micro_batch_size = 2,
                         .micro_steps = 2,
                         .world = 3},
                        3);
  int64_t expected = 0;
  for (int64_t step = 0; step < 3 * sampler.steps_per_epoch(); ++step) {
    for (int64_t m = 0; m < 2; ++m) {
      for (int64_t rank = 0; rank < 3; ++rank) {
        for (int64_t row = 0; row < 2; ++row) {
          EXPECT_EQ(sampler.SampleId(step, m, rank, row), expected++);
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero
