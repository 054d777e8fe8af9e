#include "engine/train/stragglers.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// Of compute alone, by rank, in 0.1 s.
std::vector<OwnTimes> Computing(const std::vector<double>& tenths) {
  std::vector<OwnTimes> times(tenths.size());
  for (size_t rank = 0; rank < tenths.size(); ++rank) {
    times[rank][StepPart::kCompute] = 100 * tenths[rank];
  }
  return times;
}

constexpr int kSlowSteps = StragglerDetector::kSlowSteps;

// The steps at which a rank is named, out of `steps` ones.
std::vector<Straggler> Found(StragglerDetector& detector, int steps,
                             const std::vector<OwnTimes>& of_ranks) {
  std::vector<Straggler> found;
  for (int step = 1; step <= steps; ++step) {
    for (const Straggler& one : detector.Add(step, of_ranks)) {
      found.push_back(one);
    }
  }
  return found;
}

TEST(StragglersTest, ASlowRankIsNamedOnceWithItsFactor) {
  StragglerDetector detector(1.5);
  const auto found = Found(detector, 500, Computing({10, 11, 25, 10}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rank, 2);
  EXPECT_EQ(found[0].step, kSlowSteps);
  EXPECT_EQ(found[0].factor, 2.5);
  EXPECT_EQ(found[0].part, StepPart::kCompute);
}

TEST(StragglersTest, RanksThatAreAlikeOrALittleSlowerAreNot) {
  StragglerDetector detector(1.5);
  EXPECT_THAT(Found(detector, 200, Computing({10, 14, 10, 15})), IsEmpty());
  StragglerDetector strict(1.3);
  EXPECT_THAT(Found(strict, 200, Computing({10, 14, 10, 15})), SizeIs(2));
}

TEST(StragglersTest, OfTwoRanksEachIsHeldAgainstTheOther) {
  StragglerDetector detector(1.5);
  const auto found = Found(detector, 100, Computing({10, 30}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rank, 1);
  EXPECT_EQ(found[0].factor, 3);
}

TEST(StragglersTest, OneRankAloneAndAFactorOfZeroNameNobody) {
  StragglerDetector alone(1.5);
  EXPECT_THAT(Found(alone, 100, Computing({10})), IsEmpty());
  StragglerDetector off(0);
  EXPECT_THAT(Found(off, 100, Computing({10, 1000})), IsEmpty());
}

TEST(StragglersTest, NobodyIsNamedWhereOthersDidNothing) {
  StragglerDetector detector(1.5);
  EXPECT_THAT(Found(detector, 100, Computing({10, 0, 0, 0})), IsEmpty());
}

TEST(StragglersTest, TheFirstStepsAloneNameNobody) {
  StragglerDetector detector(1.5);
  EXPECT_THAT(Found(detector, kSlowSteps - 1, Computing({10, 10, 100, 10})),
              IsEmpty());
  EXPECT_THAT(Found(detector, 100, Computing({10, 10, 10, 10})), IsEmpty());
}

// As with shared cores: each step delays some rank, far beyond the factor, and
// each rank in a third of all steps.
TEST(StragglersTest, RanksThatAreSlowByTurnsAreNot) {
  StragglerDetector detector(1.5);
  uint64_t state = 1;
  for (int step = 1; step <= 20000; ++step) {
    std::vector<double> ms;
    for (int rank = 0; rank < 4; ++rank) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      ms.push_back((state >> 33) % 3 == 0 ? 80 : 10);
    }
    EXPECT_THAT(detector.Add(step, Computing(ms)), IsEmpty()) << step;
  }
}

// 7 ms each: as many as make 250 ms of the slowest are one.
TEST(StragglersTest, ShortStepsAreTakenTogether) {
  StragglerDetector detector(1.5);
  const auto found = Found(detector, 2000, Computing({.035, .035, .07, .035}));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rank, 2);
  EXPECT_EQ(found[0].step, kSlowSteps * 36);
}

TEST(StragglersTest, OneStepOfAnyLengthNamesNobody) {
  StragglerDetector detector(1.5);
  Found(detector, 50, Computing({10, 10, 10, 10}));
  EXPECT_THAT(detector.Add(51, Computing({10, 1e9, 10, 10})), IsEmpty());
  EXPECT_THAT(Found(detector, 50, Computing({10, 10, 10, 10})), IsEmpty());
}

TEST(StragglersTest, ARankThatBecomesSlowIsNamedWhenMostStepsWereSlow) {
  StragglerDetector detector(1.5);
  Found(detector, 100, Computing({10, 10, 10, 10}));
  int64_t named_after = 0;
  for (int step = 1; step <= 100 && named_after == 0; ++step) {
    if (!detector.Add(step, Computing({10, 10, 10, 40})).empty()) {
      named_after = step;
    }
  }
  EXPECT_EQ(named_after, kSlowSteps);
}

TEST(StragglersTest, ThePartIsTheOneThatDiffersMost) {
  for (const StepPart part : kStepParts) {
    std::vector<OwnTimes> times = Computing({100, 100, 100});
    for (OwnTimes& one : times) one[StepPart::kData] = 500;
    times[1][part] += 9000;
    StragglerDetector detector(1.5);
    const auto found = Found(detector, 100, times);
    ASSERT_THAT(found, SizeIs(1)) << StepPartName(part);
    EXPECT_EQ(found[0].rank, 1);
    EXPECT_EQ(found[0].part, part);
    EXPECT_EQ(StepPartOf(StepPartName(part)), part);
  }
}

TEST(StragglersTest, ItIsSaidInOneLine) {
  EXPECT_EQ(StragglerText({.rank = 3,
                           .step = 40,
                           .factor = 2.06,
                           .part = StepPart::kData,
                           .host = "node2"}),
            "rank 3 on node2 takes 2.1 times as long as the other ranks for "
            "its own work; the largest difference is in data");
}

TEST(StragglersTest, TheMedianIsTheMiddle) {
  EXPECT_EQ(Median({}), 0);
  EXPECT_EQ(Median({3}), 3);
  EXPECT_EQ(Median({9, 1, 4}), 4);
  EXPECT_EQ(Median({9, 1, 4, 2}), 3);
}

}  // namespace
}  // namespace zero
