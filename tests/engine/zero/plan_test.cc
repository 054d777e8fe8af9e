#include "engine/zero/plan.h"

#include <vector>

#include "engine/zero/schedule.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

UnitSpec Unit(const std::string& name, std::vector<Shape> shapes) {
  UnitSpec unit{.name = name};
  for (size_t i = 0; i < shapes.size(); ++i) {
    unit.parameters.push_back({name + "." + std::to_string(i), shapes[i]});
  }
  return unit;
}

// Odd sizes, fewer elements than ranks, no parameters at all, more than one
// segment, exactly one segment and one element above it.
std::vector<UnitSpec> OddUnits() {
  constexpr int64_t kSegment = Plan::kMaxSegmentElems;
  return {Unit("embedding", {{61, 33}, {27, 33}}),
          Unit("nothing", {}),
          Unit("tiny", {{1}, {3}, {64}, {65}}),
          Unit("large", {{1000, 12345}, {7}}),
          Unit("even", {{kSegment}}),
          Unit("odd", {{kSegment + 1}}),
          Unit("empty", {{0, 5}}),
          Unit("head", {{33}})};
}

TEST(PlanTest, ParametersAreAlignedDisjointAndInside) {
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan = MakePlan(OddUnits(), {.world = world});
    for (const PlannedUnit& unit : plan.units) {
      int64_t end = 0;
      for (const PlannedParameter& parameter : unit.parameters) {
        EXPECT_EQ(parameter.offset % Plan::kAlignElems, 0);
        EXPECT_GE(parameter.offset, end) << parameter.spec.name;
        EXPECT_EQ(parameter.elems, parameter.spec.shape.num_elems());
        end = parameter.offset + parameter.elems;
      }
      EXPECT_LE(end, unit.padded_elems) << unit.name;
    }
  }
}

TEST(PlanTest, SegmentsTileTheUnitAndUnitsTileThePlan) {
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan = MakePlan(OddUnits(), {.world = world});
    int64_t unit_end = 0;
    for (const PlannedUnit& unit : plan.units) {
      EXPECT_EQ(unit.offset, unit_end) << unit.name;
      unit_end += unit.padded_elems;
      int64_t end = 0;
      for (const Segment& segment : unit.segments) {
        EXPECT_EQ(segment.begin, end);
        EXPECT_GT(segment.elems, 0);
        EXPECT_EQ(segment.elems % (Plan::kAlignElems * world), 0);
        EXPECT_LE(segment.elems,
                  Plan::kMaxSegmentElems + Plan::kAlignElems * world);
        end += segment.elems;
      }
      EXPECT_EQ(end, unit.padded_elems) << unit.name;
    }
    EXPECT_EQ(unit_end, plan.padded_elems);
  }
}

TEST(PlanTest, EveryElementHasExactlyOneOwner) {
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan = MakePlan(OddUnits(), {.world = world});
    int64_t owned = 0;
    for (const PlannedUnit& unit : plan.units) {
      for (const Segment& segment : unit.segments) {
        int64_t end = segment.begin;
        for (int64_t rank = 0; rank < world; ++rank) {
          const Segment piece = plan.Piece(segment, rank);
          EXPECT_EQ(piece.begin, end);
          EXPECT_EQ(piece.begin % Plan::kAlignElems, 0);
          EXPECT_EQ(piece.elems, plan.Piece(segment, 0).elems);
          end = piece.begin + piece.elems;
          owned += piece.elems;
        }
        EXPECT_EQ(end, segment.begin + segment.elems);
      }
    }
    EXPECT_EQ(owned, plan.padded_elems);
  }
}

TEST(PlanTest, PaddingStaysSmall) {
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan = MakePlan(OddUnits(), {.world = world});
    for (const PlannedUnit& unit : plan.units) {
      const int64_t aligned = [&] {
        int64_t total = 0;
        for (const PlannedParameter& p : unit.parameters) {
          total += (p.elems + 63) / 64 * 64;
        }
        return total;
      }();
      EXPECT_LT(unit.padded_elems - aligned,
                std::max<int64_t>(unit.segments.size(), 1) * Plan::kAlignElems *
                    world)
          << unit.name << " for " << world;
    }
  }
}

TEST(PlanTest, AUnitsLayoutDependsOnNothingElse) {
  // Parameter offsets do not even depend on the number of ranks; the cut into
  // segments depends on the unit and the ranks, never on the other units.
  const std::vector<UnitSpec> units = OddUnits();
  const Plan alone = MakePlan(units, {.world = 1});
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan = MakePlan(units, {.world = world});
    for (size_t u = 0; u < units.size(); ++u) {
      for (size_t p = 0; p < units[u].parameters.size(); ++p) {
        EXPECT_EQ(plan.units[u].parameters[p].offset,
                  alone.units[u].parameters[p].offset);
      }
      const Plan single = MakePlan({units[u]}, {.world = world});
      ASSERT_EQ(single.units[0].segments.size(), plan.units[u].segments.size());
      for (size_t s = 0; s < single.units[0].segments.size(); ++s) {
        EXPECT_EQ(single.units[0].segments[s].begin,
                  plan.units[u].segments[s].begin);
        EXPECT_EQ(single.units[0].segments[s].elems,
                  plan.units[u].segments[s].elems);
      }
    }
  }
}

TEST(PlanTest, CountsByValue) {
  const Plan plan =
      MakePlan({Unit("a", {{5, 13}, {3}}), Unit("b", {}), Unit("c", {{1}})},
               {.world = 3});
  EXPECT_EQ(plan.num_parameters, 69);
  EXPECT_EQ(plan.units[0].parameters[1].offset, 128);
  EXPECT_EQ(plan.units[0].padded_elems, 192);  // 131 to a multiple of 64 * 3
  EXPECT_EQ(plan.units[1].padded_elems, 0);
  EXPECT_TRUE(plan.units[1].segments.empty());
  EXPECT_EQ(plan.units[2].offset, 192);
  EXPECT_EQ(plan.padded_elems, 384);
  const Segment piece = plan.Piece(plan.units[2].segments[0], 2);
  EXPECT_EQ(piece.begin, 128);
  EXPECT_EQ(piece.elems, 64);
}

TEST(PlanDeathTest, AWorldWithoutRanksIsACallerMistake) {
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 0}), "0 against 1");
}

TEST(ScheduleTest, ByValue) {
  const Plan plan = MakePlan(
      {Unit("embedding", {{5}}), Unit("block", {{5}}), Unit("head", {{5}})},
      {.world = 1});
  const std::vector<Action> want = {{ActionKind::kForward, 0, 0},
                                    {ActionKind::kForward, 1, 0},
                                    {ActionKind::kForwardBackward, 2, 0},
                                    {ActionKind::kBackward, 1, 0},
                                    {ActionKind::kBackward, 0, 0},
                                    {ActionKind::kForward, 0, 1},
                                    {ActionKind::kForward, 1, 1},
                                    {ActionKind::kForwardBackward, 2, 1},
                                    {ActionKind::kBackward, 1, 1},
                                    {ActionKind::kBackward, 0, 1},
                                    {ActionKind::kNorm, -1, 0},
                                    {ActionKind::kUpdate, 0, 0},
                                    {ActionKind::kUpdate, 1, 0},
                                    {ActionKind::kUpdate, 2, 0}};
  EXPECT_EQ(MakeSchedule(plan, {.micro_steps = 2}), want);
}

TEST(ScheduleTest, ActionsHaveReadableNames) {
  const Plan plan =
      MakePlan({Unit("embedding", {{5}}), Unit("block.3", {{5}})}, {});
  EXPECT_EQ(ActionName({ActionKind::kForward, 1, 0}, plan), "Forward(block.3)");
  EXPECT_EQ(ActionName({ActionKind::kForwardBackward, 1, 0}, plan),
            "ForwardBackward(block.3)");
  EXPECT_EQ(ActionName({ActionKind::kBackward, 0, 0}, plan),
            "Backward(embedding)");
  EXPECT_EQ(ActionName({ActionKind::kUpdate, 0, 0}, plan), "Update(embedding)");
  EXPECT_EQ(ActionName({ActionKind::kNorm}, plan), "Norm");
}

}  // namespace
}  // namespace zero
