#include "engine/zero/host_wire.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "models/registry.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

struct Job {
  Plan plan;
  std::vector<Action> actions;

  std::vector<HostWire> Count(int64_t hosts,
                              BulkAlgorithm algorithm = BulkAlgorithm::kDirect,
                              int64_t ranks_per_host = 0) const {
    return CountHostWire(plan, actions,
                         {.num_hosts = hosts,
                          .algorithm = algorithm,
                          .ranks_per_host = ranks_per_host});
  }
};

// Tied tables: one of them is exchanged by rows.
ModelConfig TiedLlama() {
  ModelConfig config = TinyConfig(ModelFamily::kLlama);
  config.tie_word_embeddings = true;
  return config;
}

Job MakeJob(int64_t world, int64_t stage, int64_t shards = 0,
            int64_t owners = 0) {
  const auto model = MakeModel(TiedLlama());
  Job job;
  job.plan = MakePlan(
      DescribeUnits(*model),
      {.world = world,
       .shards = shards,
       .owners = owners,
       .placement = owners == 1 ? PlacementOfServer()
                                : PlacementOfStage(static_cast<int>(stage))});
  job.actions = MakeSchedule(job.plan, {});
  return job;
}

constexpr BulkAlgorithm kByHosts = BulkAlgorithm::kHierarchical;

TEST(HostWireTest, AHostOfOneRankSendsWhatTheRankSends) {
  for (const int64_t shards : {4, 2}) {
    for (const int64_t stage : {1, 2, 3}) {
      const Job job = MakeJob(4, stage, shards);
      const auto hosts = job.Count(4);
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(hosts[rank].summed + hosts[rank].gathered,
                  CountWire(job.plan, job.actions, rank).sent());
        EXPECT_EQ(hosts[rank].numbers, NumbersWire(job.plan, false));
      }
      EXPECT_EQ(job.Count(4, kByHosts), hosts);
    }
  }
}

TEST(HostWireTest, AServersHostSendsOnceToEachOtherHost) {
  const Job job = MakeJob(4, 0, 4, /*owners=*/1);
  const int64_t to_a_rank = CountWire(job.plan, job.actions, 0).sent() / 3;
  const int64_t from_a_rank = CountWire(job.plan, job.actions, 1).sent();
  const auto hosts = job.Count(2);
  EXPECT_EQ(hosts[0].gathered, to_a_rank);
  EXPECT_EQ(hosts[0].summed, 0);
  EXPECT_EQ(hosts[1].gathered, 0);
  EXPECT_EQ(hosts[1].summed, 2 * from_a_rank);
}

TEST(HostWireTest, OneHostSendsNothing) {
  for (const BulkAlgorithm algorithm : {BulkAlgorithm::kDirect, kByHosts}) {
    EXPECT_THAT(MakeJob(4, 3).Count(1, algorithm), ElementsAre(HostWire()));
  }
}

// Of n ranks, k on each host: k (n - k) / n of a sum, or (n - k) / n of it; k /
// n of gathered bytes, to each other host.
TEST(HostWireTest, TheBytesAreThoseOfTheFormula) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    const Job job = MakeJob(8, stage);
    const HostWire rank = job.Count(8).front();
    for (const int64_t hosts : {2, 4}) {
      SCOPED_TRACE(absl::StrCat("stage ", stage, " on ", hosts, " hosts"));
      const int64_t n = 8, k = n / hosts;
      const HostWire want = {
          .summed = rank.summed / (n - 1) * k * (n - k),
          .gathered = rank.gathered / (n - 1) * k * (hosts - 1),
          .numbers = rank.numbers / (n - 1) * k * (hosts - 1)};
      EXPECT_THAT(job.Count(hosts), Each(want));
      HostWire by_hosts = want;
      by_hosts.summed /= k;
      EXPECT_THAT(job.Count(hosts, kByHosts), Each(by_hosts));
      EXPECT_GT(want.summed, 0);
    }
  }
}

TEST(HostWireTest, HalvesOfAHostThatSumApartSendTwice) {
  const Job job = MakeJob(8, 2);
  const int64_t once = job.Count(2, kByHosts).front().summed;
  EXPECT_EQ(job.Count(2, kByHosts, 2).front().summed, 2 * once);
  EXPECT_EQ(job.Count(2, kByHosts, 1).front().summed, 4 * once);
  // Hosts of one process each cannot sum over two of them.
  EXPECT_EQ(job.Count(2, kByHosts, 8).front().summed, 4 * once);
}

TEST(HostWireTest, GroupsThatAreHostsSendTheirSumsAlone) {
  const Job groups = MakeJob(8, 3, /*shards=*/4);
  const auto hosts = groups.Count(2);
  EXPECT_THAT(hosts, Each(hosts.front()));
  // Each of four places is summed over two groups and gathered there.
  EXPECT_EQ(hosts.front().summed + hosts.front().gathered,
            4 * CountWire(groups.plan, groups.actions).across);
  EXPECT_EQ(groups.Count(2, kByHosts), hosts);
  EXPECT_LT(hosts.front().sent(), MakeJob(8, 3).Count(2).front().sent());
}

}  // namespace
}  // namespace zero
