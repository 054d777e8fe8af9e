#include "engine/comm/links.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fake_network.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr absl::Duration kTimeout = absl::Minutes(2);

TEST(LinksTest, EveryProcessHearsAllTexts) {
  const auto wire = std::make_shared<FakeWire>();
  const absl::Status status = RunRanks(3, [&](int process) {
    FakeNetwork network(wire, process, 3);
    const auto texts =
        ExchangeTexts(network, absl::StrCat("process ", process), kTimeout);
    EXPECT_TRUE(texts.ok()) << texts.status();
    if (texts.ok()) {
      EXPECT_THAT(*texts, ElementsAre("process 0", "process 1", "process 2"));
    }
    return texts.status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LinksTest, OnePairWithinEachHostAndOneOfEachTwoHosts) {
  EXPECT_THAT(LinksToMeasure({"a"}), IsEmpty());
  EXPECT_THAT(LinksToMeasure({"a", "a", "a"}), ElementsAre(Pair(0, 1)));
  EXPECT_THAT(
      LinksToMeasure({"a", "a", "b", "b", "c"}),
      ElementsAre(Pair(0, 1), Pair(2, 3), Pair(0, 2), Pair(0, 4), Pair(2, 4)));
  // A launcher may assign processes round-robin.
  EXPECT_THAT(LinksToMeasure({"a", "b", "a", "b"}),
              ElementsAre(Pair(0, 2), Pair(1, 3), Pair(0, 1)));
  std::vector<std::string> many;
  for (int host = 0; host < 40; ++host) many.push_back(absl::StrCat(host));
  EXPECT_THAT(LinksToMeasure(many), SizeIs(40));
}

TEST(LinksTest, ProcessZeroHearsOfEveryPair) {
  const std::vector<std::string> hosts = {"a", "a", "b"};
  const auto pairs = LinksToMeasure(hosts);
  const auto wire = std::make_shared<FakeWire>();
  const absl::Status status = RunRanks(3, [&](int process) {
    FakeNetwork network(wire, process, 3);
    const auto links = MeasureLinks(network, pairs, kTimeout);
    EXPECT_TRUE(links.ok()) << links.status();
    if (!links.ok()) return links.status();
    EXPECT_THAT(*links, SizeIs(process == 0 ? pairs.size() : 0));
    for (size_t i = 0; i < links->size(); ++i) {
      EXPECT_EQ((*links)[i].from, pairs[i].first);
      EXPECT_EQ((*links)[i].to, pairs[i].second);
      EXPECT_GT((*links)[i].latency, absl::ZeroDuration());
      EXPECT_GT((*links)[i].bytes_per_second, 0);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LinksTest, ALostProcessIsAnError) {
  const auto wire = std::make_shared<FakeWire>();
  wire->failure = "a peer is gone";
  FakeNetwork network(wire, 0, 2);
  EXPECT_EQ(ExchangeTexts(network, "here", kTimeout).status().message(),
            "a peer is gone");
}

}  // namespace
}  // namespace zero
