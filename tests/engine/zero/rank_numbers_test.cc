// All ranks get the same numbers, added up in rank order.

#include "engine/zero/rank_numbers.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/local_ranks.h"
#include "gmock/gmock.h"
#include "kernels/cpu/device.h"

namespace zero {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<double>;

constexpr int64_t kReadBytes = 256;

// The numbers of one rank, with their dependencies.
struct Bench {
  MemoryLedger ledger;
  Plan plan;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<StepClock> clock;
  std::unique_ptr<RankNumbers> numbers;

  explicit Bench(const Rank& rank) {
    plan.world = rank.world();
    arena = *Arena::Make(*rank.device, MemoryKind::kDevice, 1 << 16, "numbers",
                         &ledger);
    compute = rank.device->MakeStream(StreamRole::kCompute);
    clock = std::make_unique<StepClock>(*rank.device, *compute, plan);
    numbers = std::make_unique<RankNumbers>(rank, *compute, *clock);
    numbers->Take(*arena);
    EXPECT_TRUE(numbers->Reserve(kReadBytes).ok());
  }
};

absl::Status OnRanks(int world,
                     const std::function<absl::Status(const Rank&, RankNumbers&,
                                                      Bench&)>& body) {
  return RunLocalRanks(
      world, {}, [](int) { return MakeCpuDevice(1); },
      [&](const Rank& rank) {
        Bench bench(rank);
        return body(rank, *bench.numbers, bench);
      });
}

TEST(RankNumbersTest, SumsAreAddedInRankOrder) {
  // In another order the large ones would not cancel before 1 is added.
  const Values own = {1e17, -1e17, 1};
  ASSERT_TRUE(OnRanks(3, [&](const Rank& rank, RankNumbers& numbers, Bench&) {
                Values values = {own[rank.rank()], 1.0 * rank.rank()};
                const absl::Status status = numbers.AllReduce(
                    "sum", ReduceOp::kSum, absl::MakeSpan(values));
                EXPECT_EQ(values, (Values{1, 3}));
                return status;
              }).ok());
}

TEST(RankNumbersTest, TheLargestCountsWhereverItIs) {
  ASSERT_TRUE(OnRanks(3, [](const Rank& rank, RankNumbers& numbers, Bench&) {
                const double place = rank.rank();
                Values values = {-place, place, rank.rank() == 1 ? 7.0 : -7.0};
                const absl::Status status = numbers.AllReduce(
                    "max", ReduceOp::kMax, absl::MakeSpan(values));
                EXPECT_EQ(values, (Values{0, 2, 7}));
                return status;
              }).ok());
}

TEST(RankNumbersTest, AStartThatIsNotFinishedIsReplaced) {
  ASSERT_TRUE(OnRanks(2, [](const Rank& rank, RankNumbers& numbers, Bench&) {
                const Values dropped = {100, 100}, own = {rank.rank() + 1.0};
                numbers.Start("dropped", ReduceOp::kSum, dropped);
                numbers.Start("kept", ReduceOp::kSum, own);
                Values values = {0};
                const absl::Status status =
                    numbers.Finish(absl::MakeSpan(values));
                EXPECT_EQ(values, (Values{3}));
                return status;
              }).ok());
}

TEST(RankNumbersTest, ARankThatIsAloneKeepsItsOwn) {
  ASSERT_TRUE(OnRanks(1, [](const Rank& rank, RankNumbers& numbers, Bench&) {
                Values values = {42};
                const absl::Status status = numbers.AllReduce(
                    "sum", ReduceOp::kSum, absl::MakeSpan(values));
                EXPECT_EQ(values, (Values{42}));
                EXPECT_EQ(rank.scalar->Total().calls, 0);
                return status;
              }).ok());
}

TEST(RankNumbersTest, ReadsTensorsLargerThanItsMemory) {
  ASSERT_TRUE(OnRanks(1, [](const Rank&, RankNumbers& numbers, Bench& bench) {
                const int64_t n = kReadBytes / sizeof(float) * 2 + 3;
                const Tensor from =
                    Tensor::Empty(*bench.arena, {n}, DType::kF32,
                                  MemoryCategory::kActivations);
                for (int64_t i = 0; i < n; ++i) from.As<float>()[i] = i;
                std::vector<float> to(n);
                numbers.Read(from, to.data());
                for (int64_t i = 0; i < n; ++i) EXPECT_EQ(to[i], i);
                return absl::OkStatus();
              }).ok());
}

TEST(RankNumbersTest, RanksThatPlannedAnotherStepAreNamedOnAllRanks) {
  const absl::Status status =
      OnRanks(3, [](const Rank& rank, RankNumbers& numbers, Bench& bench) {
        EXPECT_TRUE(numbers.CheckSchedule("aaaa", *bench.arena).ok());
        const absl::Status differs = numbers.CheckSchedule(
            rank.rank() == 1 ? "bbbb" : "aaaa", *bench.arena);
        EXPECT_EQ(differs.code(), absl::StatusCode::kFailedPrecondition);
        EXPECT_THAT(std::string(differs.message()),
                    HasSubstr("rank 1 (schedule bbbb) planned another step "
                              "than rank 0 (schedule aaaa)"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace zero
