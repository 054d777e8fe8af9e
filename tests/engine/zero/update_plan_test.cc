#include "engine/zero/update_plan.h"

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace zero {
namespace {

// a [10] at 0 and b [100] at 64 decay, c [70] at 192 does not; one segment of
// 384 elements, in shards of 192 on two ranks.
Plan SmallPlan(int stage) {
  const UnitSpec unit{.name = "unit",
                      .parameters = {{"a", {10}, /*decay=*/true},
                                     {"b", {100}, /*decay=*/true},
                                     {"c", {70}, /*decay=*/false}}};
  return MakePlan({unit}, {.world = 2, .placement = PlacementOfStage(stage)});
}

// begin, end, weight decay, shift.
using Range = std::tuple<int64_t, int64_t, float, int64_t>;

std::vector<Range> RangesOf(const UpdatePlan& plan) {
  std::vector<Range> ranges;
  for (const UpdateRange& range : plan.units[0].ranges) {
    ranges.push_back({range.begin, range.end, range.weight_decay, range.shift});
  }
  return ranges;
}

// Slot and tensor of every range.
std::vector<std::pair<int64_t, int64_t>> NormsOf(const UpdatePlan& plan) {
  std::vector<std::pair<int64_t, int64_t>> norms;
  for (const TensorPart& part : plan.units[0].norms) {
    EXPECT_EQ(part.end, part.begin + 1);
    norms.push_back({part.own, part.begin});
  }
  return norms;
}

constexpr UpdateRules kDecay = {.weight_decay = 0.1f};
constexpr UpdateRules kNorms = {.weight_decay = 0.1f, .tensor_norms = true};

TEST(UpdatePlanTest, NeighboursOfEqualDecayUpdateInOneRun) {
  const std::vector<Range> want = {{0, 164, 0.1f, 0}, {192, 262, 0.0f, 0}};
  for (int rank : {0, 1}) {
    EXPECT_EQ(RangesOf(MakeUpdatePlan(SmallPlan(0), rank, kDecay)), want);
  }
  const UpdateRules all = {.weight_decay = 0.1f, .decay_all = true};
  EXPECT_EQ(RangesOf(MakeUpdatePlan(SmallPlan(0), 0, all)),
            (std::vector<Range>{{0, 262, 0.1f, 0}}));
}

TEST(UpdatePlanTest, AnOwnerUpdatesItsPieceInLocalElements) {
  for (int stage : {1, 2, 3}) {
    EXPECT_EQ(RangesOf(MakeUpdatePlan(SmallPlan(stage), 0, kDecay)),
              (std::vector<Range>{{0, 164, 0.1f, 0}}));
    EXPECT_EQ(RangesOf(MakeUpdatePlan(SmallPlan(stage), 1, kDecay)),
              (std::vector<Range>{{0, 70, 0.0f, 192}}));
  }
}

TEST(UpdatePlanTest, ARankMeasuresItsOwnPiecesAtEveryStage) {
  using Norms = std::vector<std::pair<int64_t, int64_t>>;
  const UpdatePlan owner = MakeUpdatePlan(SmallPlan(1), 0, kNorms);
  EXPECT_EQ(RangesOf(owner),
            (std::vector<Range>{{0, 10, 0.1f, 0}, {64, 164, 0.1f, 0}}));
  EXPECT_EQ(NormsOf(owner), (Norms{{0, 0}, {1, 1}}));
  EXPECT_EQ(owner.num_tensors, 3);
  EXPECT_EQ(owner.max_ranges, 1);
  EXPECT_EQ(owner.num_slots, 3);
  EXPECT_EQ(NormsOf(MakeUpdatePlan(SmallPlan(1), 1, kNorms)), (Norms{{2, 2}}));
  // A rank that updates everything has a separate slot for another rank's
  // measurements.
  const UpdatePlan whole = MakeUpdatePlan(SmallPlan(0), 0, kNorms);
  EXPECT_EQ(NormsOf(whole), (Norms{{0, 0}, {1, 1}, {3, 2}}));
  EXPECT_EQ(whole.num_slots, 4);
}

// A parameter in several segments has a range and a slot in each.
TEST(UpdatePlanTest, ATensorOfSeveralSegmentsHasARangeInEach) {
  const UnitSpec unit{.name = "unit",
                      .parameters = {{"w", {2 * Plan::kMaxSegmentElems}}}};
  const Plan plan =
      MakePlan({unit}, {.world = 2, .placement = PlacementOfStage(1)});
  ASSERT_EQ(plan.units[0].segments.size(), 2u);
  const int64_t shard = Plan::kMaxSegmentElems / 2;
  const UpdatePlan update = MakeUpdatePlan(plan, 1, kNorms);
  EXPECT_EQ(RangesOf(update),
            (std::vector<Range>{{0, shard, 0.0f, shard},
                                {shard, 2 * shard, 0.0f, 2 * shard}}));
  EXPECT_EQ(NormsOf(update),
            (std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {1, 0}}));
  EXPECT_EQ(update.max_ranges, 2);
}

}  // namespace
}  // namespace zero
