#include "engine/comm/progress.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Others = std::map<int, std::vector<ChannelProgress>>;

const CollectiveMark kFirst = {1, "gather a"};
const CollectiveMark kSecond = {2, "gather b"};
const CollectiveMark kThird = {3, "gather c"};
const CollectiveMark kOther = {2, "barrier"};

// Rank 0 waits in the second collective of "gather".
Diagnosis Waiting(const Others& others) {
  return Diagnose(0, "gather", kSecond, others);
}

TEST(ProgressTest, ATextIsReadBack) {
  const std::string text = ProgressText(
      {{"gather", kThird, kSecond, kFirst}, {.channel = "scalar"}});
  const std::vector<ChannelProgress> read = ParseProgress(text + "no such\n");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].channel, "gather");
  EXPECT_EQ(read[0].issued.Text(), "#3, gather c");
  EXPECT_EQ(read[0].inside.Text(), "#2, gather b");
  EXPECT_EQ(read[0].finished.Text(), "#1, gather a");
  EXPECT_EQ(read[1].issued.number, 0);
  EXPECT_THAT(ParseProgress(""), IsEmpty());
}

TEST(ProgressTest, WhoIsBehindIsLateAndMissing) {
  const Diagnosis found =
      Waiting({{1, {}},
               {2, {{"gather", kFirst, {}, kFirst}}},
               {3, {{"gather", kSecond, {}, kFirst}}},
               {4, {{"gather", kSecond, kSecond, kFirst}}}});
  EXPECT_EQ(found.mismatch, "");
  EXPECT_EQ(found.late,
            "rank 1 issued nothing here; rank 2 issued #1, gather a last; "
            "rank 3 issued it, but its stream has not come to it");
  EXPECT_THAT(found.missing, ElementsAre(1, 2, 3));
}

// Who waits for a third one is late, and that one is missing.
TEST(ProgressTest, WhoWaitsElsewhereIsNotMissing) {
  const Diagnosis found = Waiting(
      {{1,
        {{"gather", kFirst, {}, kFirst}, {"scalar", kThird, kThird, kSecond}}},
       {2, {{"gather", kSecond, kFirst, {}}}},
       {3, {{"gather", kFirst, {}, kFirst}}}});
  EXPECT_EQ(found.late,
            "rank 1 issued #1, gather a last; it is in #3 of channel "
            "\"scalar\", gather c; rank 2 issued it, but its stream is in #1, "
            "gather a; rank 3 issued #1, gather a last");
  EXPECT_THAT(found.missing, ElementsAre(3));
}

TEST(ProgressTest, WhereAllAreInItNobodyIsNamed) {
  const Diagnosis found = Waiting({{1, {{"gather", kThird, kSecond, kFirst}}}});
  EXPECT_EQ(found.late, "all ranks have begun it, and it does not end");
  EXPECT_THAT(found.missing, IsEmpty());
}

TEST(ProgressTest, WhoHasFinishedItIsNamedAndNotMissing) {
  const Diagnosis found = Waiting({{1, {{"gather", kThird, kThird, kSecond}}}});
  EXPECT_EQ(found.late, "rank 1 has finished it and is in #3, gather c");
  EXPECT_THAT(found.missing, IsEmpty());
}

// However far they have issued since.
TEST(ProgressTest, RanksThatIssuedOtherCollectivesDiffer) {
  const Diagnosis found = Waiting({{1, {{"gather", kThird, kOther, kFirst}}}});
  EXPECT_EQ(found.mismatch,
            "rank 1 differs from rank 0 at #2 of channel \"gather\": rank 1 is "
            "in barrier, rank 0 in gather b");
  EXPECT_THAT(found.missing, IsEmpty());
  // One that has gone on past its own.
  EXPECT_THAT(Waiting({{1, {{"gather", kThird, kThird, kOther}}}}).mismatch,
              HasSubstr("rank 1 is in barrier"));
}

TEST(ProgressTest, OfThreeTheOddOneDiffers) {
  const std::vector<ChannelProgress> odd = {{"gather", kThird, kOther, kFirst}};
  EXPECT_THAT(Waiting({{1, odd}, {2, odd}}).mismatch,
              HasSubstr("rank 0 differs from rank 1 at #2"));
  EXPECT_THAT(
      Waiting({{1, {{"gather", kThird, kSecond, kFirst}}}, {2, odd}}).mismatch,
      HasSubstr("rank 2 differs from rank 0 at #2"));
}

TEST(ProgressTest, ManyLateRanksAreCounted) {
  Others others;
  for (int rank = 1; rank < 8; ++rank) others[rank] = {};
  const Diagnosis found = Waiting(others);
  EXPECT_THAT(found.late, HasSubstr("rank 4 issued nothing here; and 3 other "
                                    "ranks"));
  EXPECT_EQ(found.missing.size(), 7u);
}

}  // namespace
}  // namespace zero
