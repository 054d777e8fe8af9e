#include "engine/comm/progress.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/comm/channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const CollectiveMark kFirst = {1, "gather a"};
const CollectiveMark kSecond = {2, "gather b"};
const CollectiveMark kThird = {3, "gather c"};
const CollectiveMark kOther = {2, "barrier"};

// Rank 0 waits in the second collective of "gather", with the others.
struct Found {
  std::string message;
  std::vector<int> missing;
};
using ByRank = std::map<int, std::vector<ChannelProgress>>;
RanksProgress Told(const ByRank& ranks) {
  RanksProgress told;
  for (const auto& [rank, channels] : ranks) {
    for (const ChannelProgress& one : channels) told[one.channel][rank] = one;
  }
  return told;
}
Found Waiting(const ByRank& others) {
  LateCollective late{.backend = "nccl",
                      .channel = "gather",
                      .members = {0},
                      .call = kSecond,
                      .timeout = absl::Seconds(3)};
  for (const auto& [rank, channels] : others) late.members.push_back(rank);
  const Diagnosis found = Diagnose(late, Told(others));
  EXPECT_EQ(found.status.code(),
            absl::StrContains(found.status.message(), "differs")
                ? absl::StatusCode::kFailedPrecondition
                : absl::StatusCode::kDeadlineExceeded);
  return {std::string(found.status.message()), found.missing};
}

constexpr char kRemedy[] =
    "; if a rank was only slow, raise communication.timeout_seconds";

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
  const Found found = Waiting({{1, {}},
                               {2, {{"gather", kFirst, {}, kFirst}}},
                               {3, {{"gather", kSecond, {}, kFirst}}},
                               {4, {{"gather", kSecond, kSecond, kFirst}}}});
  EXPECT_EQ(
      found.message,
      absl::StrCat("nccl: rank 1, rank 2 and rank 3 did not arrive at #2 "
                   "of channel \"gather\", gather b within 3s; rank 1 "
                   "issued nothing here; rank 2 issued #1, gather a "
                   "last; rank 3 issued it, but its stream has not reached it",
                   kRemedy));
  EXPECT_THAT(found.missing, ElementsAre(1, 2, 3));
}

// A rank that waits for a third one is late, and the third is missing.
TEST(ProgressTest, WhoWaitsElsewhereIsNotMissing) {
  const Found found = Waiting(
      {{1,
        {{"gather", kFirst, {}, kFirst}, {"scalar", kThird, kThird, kSecond}}},
       {2, {{"gather", kSecond, kFirst, {}}}},
       {3, {{"gather", kFirst, {}, kFirst}, {.channel = "scalar"}}}});
  EXPECT_THAT(
      found.message,
      HasSubstr("; rank 1 issued #1, gather a last; it is in #3 of channel "
                "\"scalar\", gather c, and waits for rank 3; rank 2 issued it, "
                "but its stream is in #1, gather a; rank 3 issued #1, gather a "
                "last;"));
  EXPECT_THAT(found.missing, ElementsAre(3));
}

// Rank 2 is on no channel with the one that waits.
TEST(ProgressTest, BehindALateRankTheOneItWaitsForIsMissing) {
  const Diagnosis found = Diagnose(
      {.channel = "across", .members = {0, 1}, .call = kFirst},
      Told({{0, {{"across", kFirst, kFirst, {}}}},
            {1, {{.channel = "across"}, {"reduce", kFirst, kFirst, {}}}},
            {2, {{.channel = "reduce"}}}}));
  EXPECT_THAT(found.missing, ElementsAre(2));
}

TEST(ProgressTest, InACircleTheLateOneIsMissing) {
  const Found found =
      Waiting({{0, {{"gather", kSecond, kSecond, kFirst}, {.channel = "sum"}}},
               {1, {{"gather", kFirst, {}, kFirst}, {"sum", kFirst, kFirst}}}});
  EXPECT_THAT(found.missing, ElementsAre(1));
}

TEST(ProgressTest, WhereAllAreInItNobodyIsNamed) {
  const Found found = Waiting({{1, {{"gather", kThird, kSecond, kFirst}}}});
  EXPECT_EQ(found.message,
            absl::StrCat("nccl: all ranks have begun, but did not finish #2 of "
                         "channel \"gather\", gather b within 3s",
                         kRemedy));
  EXPECT_THAT(found.missing, IsEmpty());
}

TEST(ProgressTest, WhoDoesNotFinishItsShareIsMissing) {
  const Found found =
      Waiting({{1, {{"gather", kThird, kSecond, kFirst, /*works=*/true}}},
               {2, {{"gather", kThird, kSecond, kFirst}}}});
  EXPECT_THAT(
      found.message,
      HasSubstr("rank 1 did not finish #2 of channel \"gather\", gather "
                "b within 3s; rank 1 is doing its share;"));
  EXPECT_THAT(found.missing, ElementsAre(1));
}

TEST(ProgressTest, WhoHasFinishedItIsNamedAndNotMissing) {
  const Found found = Waiting({{1, {{"gather", kThird, kThird, kSecond}}}});
  EXPECT_THAT(found.message,
              HasSubstr("; rank 1 has finished it and is in #3, gather c;"));
  EXPECT_THAT(found.missing, IsEmpty());
}

// However far they have issued since.
TEST(ProgressTest, RanksThatIssuedOtherCollectivesDiffer) {
  const Found found = Waiting({{1, {{"gather", kThird, kOther, kFirst}}}});
  EXPECT_EQ(found.message,
            "nccl: rank 1 differs from rank 0 at #2 of channel \"gather\": "
            "rank 1 is in barrier, rank 0 in gather b");
  EXPECT_THAT(found.missing, IsEmpty());
  // One that has moved on past its own.
  EXPECT_THAT(Waiting({{1, {{"gather", kThird, kThird, kOther}}}}).message,
              HasSubstr("rank 1 is in barrier"));
}

TEST(ProgressTest, OfThreeTheOddOneDiffers) {
  const std::vector<ChannelProgress> odd = {{"gather", kThird, kOther, kFirst}};
  EXPECT_THAT(Waiting({{1, odd}, {2, odd}}).message,
              HasSubstr("rank 0 differs from rank 1 at #2"));
  EXPECT_THAT(
      Waiting({{1, {{"gather", kThird, kSecond, kFirst}}}, {2, odd}}).message,
      HasSubstr("rank 2 differs from rank 0 at #2"));
}

TEST(ProgressTest, ManyLateRanksAreCounted) {
  ByRank others;
  for (int rank = 1; rank < 8; ++rank) others[rank] = {};
  const Found found = Waiting(others);
  EXPECT_THAT(found.message, HasSubstr("7 ranks did not arrive at #2"));
  EXPECT_THAT(found.message, HasSubstr("rank 4 issued nothing here; and 3 "
                                       "other ranks;"));
  EXPECT_EQ(found.missing.size(), 7u);
}

TEST(ProgressTest, AChannelIsNamedWithItsMembers) {
  EXPECT_EQ(ChannelText("reduce", {0, 1}, 2), "reduce");
  EXPECT_EQ(ChannelText("reduce", {2, 3}, 4), "reduce of ranks 2, 3");
  EXPECT_EQ(ChannelText("across", {1, 5, 9, 13, 17, 21, 25, 29, 33}, 36),
            "across of ranks 1, 5, ..., 33");
}

}  // namespace
}  // namespace zero
