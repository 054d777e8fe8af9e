#include "engine/base/nearest.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::ElementsAre;

TEST(EditDistanceTest, CountsInsertionsDeletionsAndReplacements) {
  EXPECT_EQ(EditDistance("", ""), 0);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("sitting", "kitten"), 3);
}

TEST(NearestNamesTest, TheNearestIsFirstAndStrangersAreLeftOut) {
  EXPECT_THAT(
      NearestNames("trian.bin", {"val.bin", "train.bin", "qqqqqqqqqqqq"}, 3),
      ElementsAre("train.bin", "val.bin"));
  EXPECT_THAT(NearestNames("x", {}, 3), ElementsAre());
}

}  // namespace
}  // namespace zero
