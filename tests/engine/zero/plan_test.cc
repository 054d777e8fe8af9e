#include "engine/zero/plan.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/zero/schedule.h"
#include "gtest/gtest.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

UnitSpec Unit(const std::string& name, std::vector<Shape> shapes) {
  UnitSpec unit{.name = name};
  for (size_t i = 0; i < shapes.size(); ++i) {
    unit.parameters.push_back({name + "." + std::to_string(i), shapes[i]});
  }
  return unit;
}

std::vector<std::vector<SegmentRef>> SegmentsOf(
    const std::vector<Bucket>& buckets) {
  std::vector<std::vector<SegmentRef>> segments;
  for (const Bucket& bucket : buckets) segments.push_back(bucket.segments);
  return segments;
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
          const Segment shard = plan.Shard(segment, rank);
          EXPECT_EQ(shard.begin, end);
          EXPECT_EQ(shard.begin % Plan::kAlignElems, 0);
          EXPECT_EQ(shard.elems, plan.Shard(segment, 0).elems);
          end = shard.begin + shard.elems;
          owned += shard.elems;
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

TEST(PlanTest, ASegmentPerTensorIsOneOnRequest) {
  for (int64_t world = 1; world <= 8; ++world) {
    const Plan plan =
        MakePlan(OddUnits(), {.world = world, .segment_per_tensor = true});
    for (const PlannedUnit& unit : plan.units) {
      int64_t end = 0;
      size_t s = 0;
      for (const PlannedParameter& parameter : unit.parameters) {
        if (parameter.elems == 0) continue;
        ASSERT_LT(s, unit.segments.size()) << parameter.spec.name;
        const Segment& segment = unit.segments[s++];
        EXPECT_EQ(segment.begin, end);
        EXPECT_EQ(segment.begin, parameter.offset);
        EXPECT_EQ(segment.elems % (Plan::kAlignElems * world), 0);
        EXPECT_GE(segment.elems, parameter.elems);
        EXPECT_LT(segment.elems, parameter.elems + Plan::kAlignElems * world);
        end = segment.end();
      }
      EXPECT_EQ(s, unit.segments.size()) << unit.name;
      EXPECT_EQ(end, unit.padded_elems) << unit.name;
    }
  }
  // A bucket, and so a collective, each.
  const Plan plan = MakePlan(
      OddUnits(),
      {.world = 2, .segment_per_tensor = true, .reduce_bucket_elems = 1});
  EXPECT_EQ(plan.reduce_buckets.size(), 11u);
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

TEST(PlanTest, UnitsArePaddedToTheseCounts) {
  const Plan plan =
      MakePlan({Unit("a", {{5, 13}, {3}}), Unit("b", {}), Unit("c", {{1}})},
               {.world = 3});
  EXPECT_EQ(plan.units[0].parameters[1].offset, 128);
  EXPECT_EQ(plan.units[0].padded_elems, 192);  // 131 to a multiple of 64 * 3
  EXPECT_EQ(plan.units[1].padded_elems, 0);
  EXPECT_TRUE(plan.units[1].segments.empty());
  EXPECT_EQ(plan.units[2].offset, 192);
  EXPECT_EQ(plan.padded_elems, 384);
  const Segment shard = plan.Shard(plan.units[2].segments[0], 2);
  EXPECT_EQ(shard.begin, 128);
  EXPECT_EQ(shard.elems, 64);
}

TEST(PlanTest, EveryGroupHasEveryElementOnce) {
  for (int64_t world = 1; world <= 8; ++world) {
    for (int64_t shards = 1; shards <= world; ++shards) {
      if (world % shards != 0) continue;
      const Plan plan = MakePlan(
          OddUnits(),
          {.world = world, .shards = shards, .placement = PlacementOfStage(3)});
      EXPECT_EQ(plan.replicate.size, world / shards);
      EXPECT_EQ(plan.placement, PlacementOfStage(shards == 1 ? 0 : 3));
      EXPECT_EQ(
          plan.StateElems(plan.padded_elems, Placement::kSharded) * shards,
          plan.padded_elems);
      for (const PlannedUnit& unit : plan.units) {
        for (const Segment& segment : unit.segments) {
          for (int64_t group = 0; group < plan.replicate.size; ++group) {
            int64_t end = segment.begin;
            for (int64_t place = 0; place < shards; ++place) {
              const Segment shard = plan.Shard(segment, group * shards + place);
              EXPECT_EQ(shard.begin, end);
              // Cut again over the groups, it stays aligned.
              EXPECT_EQ(shard.elems % (Plan::kAlignElems * plan.replicate.size),
                        0);
              end = shard.end();
            }
            EXPECT_EQ(end, segment.end());
          }
        }
      }
    }
  }
}

TEST(PlanTest, GroupsChangeNoLayoutAndNoBucket) {
  for (int stage : {1, 2, 3}) {
    const PlanOptions options = {.world = 4,
                                 .placement = PlacementOfStage(stage)};
    PlanOptions grouped = options;
    grouped.shards = 2;
    const Plan want = MakePlan(OddUnits(), options);
    const Plan got = MakePlan(OddUnits(), grouped);
    EXPECT_EQ(got.padded_elems, want.padded_elems);
    EXPECT_EQ(got.num_trained_segments, want.num_trained_segments);
    EXPECT_EQ(SegmentsOf(got.reduce_buckets), SegmentsOf(want.reduce_buckets));
    EXPECT_EQ(SegmentsOf(got.gather_buckets), SegmentsOf(want.gather_buckets));
  }
}

TEST(PlanTest, AServerOwnsEverythingAlone) {
  const PlanOptions options = {
      .world = 3, .owners = 1, .placement = PlacementOfServer()};
  const Plan plan = MakePlan(OddUnits(), options);
  EXPECT_EQ(plan.replicate.size, 1);
  EXPECT_FALSE(plan.owners.even());
  for (int64_t rank : {0, 1, 2}) {
    const int64_t all = rank == 0 ? plan.padded_elems : 0;
    const int64_t elems = plan.padded_elems;
    EXPECT_EQ(plan.StateElems(elems, Placement::kSharded, rank), all);
    EXPECT_EQ(plan.StateElems(elems, Placement::kReplicated, rank), elems);
    for (const PlannedUnit& unit : plan.units) {
      for (const Segment& segment : unit.segments) {
        const Segment shard = plan.Shard(segment, rank);
        EXPECT_EQ(shard.begin, segment.begin);
        EXPECT_EQ(shard.elems, rank == 0 ? segment.elems : 0);
      }
    }
  }
  // Laid out and bucketed as stage 1.
  const Plan stage_1 =
      MakePlan(OddUnits(), {.world = 3, .placement = PlacementOfStage(1)});
  EXPECT_EQ(plan.padded_elems, stage_1.padded_elems);
  EXPECT_EQ(SegmentsOf(plan.reduce_buckets),
            SegmentsOf(stage_1.reduce_buckets));
  EXPECT_EQ(SegmentsOf(plan.gather_buckets),
            SegmentsOf(stage_1.gather_buckets));
  // A single rank serves no one.
  PlanOptions alone = options;
  alone.world = 1;
  EXPECT_TRUE(MakePlan(OddUnits(), alone).owners.even());
}

TEST(PlanDeathTest, AServerInGroupsOrAtAStageIsACallerMistake) {
  EXPECT_DEATH(
      MakePlan(OddUnits(),
               {.world = 4, .owners = 1, .placement = PlacementOfStage(3)}),
      "a server owns everything, alone");
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 4,
                                     .shards = 2,
                                     .owners = 1,
                                     .placement = PlacementOfServer()}),
               "a server owns everything, alone");
}

// Rank 5 of two groups of four: neighbours share the states, every fourth
// rank has the same shards.
TEST(PlanTest, TheMeshHasTheseAxes) {
  const Plan plan = MakePlan(
      OddUnits(), {.world = 8, .shards = 4, .placement = PlacementOfStage(3)});
  EXPECT_EQ(plan.shard.name, "shard");
  EXPECT_EQ(plan.shard.PlaceOf(5), 1);
  EXPECT_EQ(plan.replicate.name, "replicate");
  EXPECT_EQ(plan.replicate.size, 2);
  EXPECT_EQ(plan.replicate.PlaceOf(5), 1);
  EXPECT_EQ(plan.replicate.PlaceOf(3), 0);
}

// 192 elements of two ranks each: the sums of stage 0 return to all ranks,
// those of stage 2's groups between the groups.
TEST(PlanTest, BucketsHaveTheseTransfers) {
  using Kind = Transfer::Kind;
  const auto kinds = [](const std::vector<Transfer>& transfers) {
    std::vector<Kind> kinds;
    for (const Transfer& transfer : transfers) kinds.push_back(transfer.kind);
    return kinds;
  };
  const std::vector<UnitSpec> units = {Unit("a", {{129}}), Unit("b", {{1}})};
  const Plan all = MakePlan(units, {.world = 3});
  EXPECT_EQ(kinds(all.reduce_buckets[0].transfers),
            (std::vector<Kind>{Kind::kSum, Kind::kGather}));
  EXPECT_TRUE(all.reduce_buckets[0].across.empty());
  EXPECT_TRUE(all.units[0].gather.empty());
  const Plan groups = MakePlan(units, {.world = 4,
                                       .shards = 2,
                                       .placement = PlacementOfStage(3),
                                       .parameters = {DType::kBF16},
                                       .gradients = {DType::kF16}});
  ASSERT_EQ(kinds(groups.units[0].gather), std::vector<Kind>{Kind::kGather});
  const Transfer& gather = groups.units[0].gather[0];
  EXPECT_EQ(gather.partition.axis.name, "shard");
  EXPECT_EQ(gather.elems, 256);
  EXPECT_EQ(gather.BytesOf(3).sent, 128 * 2);
  EXPECT_EQ(gather.BytesOf(3).received, 128 * 2);
  const Bucket& last = groups.reduce_buckets.back();
  EXPECT_EQ(kinds(last.transfers), std::vector<Kind>{Kind::kSum});
  ASSERT_EQ(kinds(last.across), (std::vector<Kind>{Kind::kSum, Kind::kGather}));
  EXPECT_EQ(last.across[0].partition.axis.name, "replicate");
  EXPECT_EQ(last.across[0].codec.dtype, DType::kF16);
  EXPECT_EQ(last.across[0].elems, 128);
  EXPECT_EQ(last.across[0].BytesOf(0).sent, 64 * 2);
}

// Trained, frozen, trained; all frozen; all trained.
TEST(PlanTest, FrozenParametersLieBehindAndAreNeitherReducedNorUpdated) {
  std::vector<UnitSpec> units = {Unit("a", {{100}, {200}, {50}}),
                                 Unit("b", {{300}}), Unit("c", {{10}})};
  units[0].parameters[1].frozen = units[1].parameters[0].frozen = true;
  for (int stage : {0, 1, 2, 3}) {
    const Plan plan =
        MakePlan(units, {.world = 2, .placement = PlacementOfStage(stage)});
    const PlannedUnit& a = plan.units[0];
    EXPECT_EQ(a.parameters[0].offset, 0);
    EXPECT_EQ(a.parameters[2].offset, 128);
    EXPECT_EQ(a.trained_elems, 256);
    EXPECT_EQ(a.parameters[1].offset, 256);
    EXPECT_EQ(a.padded_elems, 512);
    EXPECT_EQ(plan.units[1].trained_elems, 0);
    EXPECT_EQ(plan.units[1].padded_elems, 384);
    EXPECT_EQ(plan.units[2].offset, 512 + 384);
    EXPECT_EQ(plan.trained_elems, 256 + 128);
    EXPECT_EQ(NumbersWire(plan, true) - NumbersWire(plan, false), 3 * 2 * 8);
    for (const auto* buckets : {&plan.reduce_buckets, &plan.gather_buckets}) {
      int64_t elems = 0;
      for (const Bucket& bucket : *buckets) elems += bucket.elems;
      EXPECT_EQ(elems, buckets->empty() ? 0 : plan.trained_elems);
    }
    const StepWire wire = CountWire(plan, MakeSchedule(plan, {}));
    EXPECT_EQ(wire.reduced, FormulaWire(plan, 1).reduced);
    EXPECT_EQ(wire.reduced, plan.trained_elems / 2 * 4 * (stage == 0 ? 2 : 1));
    if (stage < 3) {
      EXPECT_EQ(wire, FormulaWire(plan, 1));
    }
  }
}

TEST(PlanTest, BackwardEndsAtTheFirstUnitThatIsTrained) {
  std::vector<UnitSpec> units = {
      Unit("embedding", {{64}}), Unit("block.0", {{128}}),
      Unit("block.1", {{256}}), Unit("head", {{64}})};
  units[0].parameters[0].frozen = units[1].parameters[0].frozen = true;
  const auto backward = [&](int stage) {
    const Plan plan =
        MakePlan(units, {.world = 2, .placement = PlacementOfStage(stage)});
    std::vector<int> of;
    std::vector<int> gathers(units.size());
    for (const Action& action : MakeSchedule(plan, {})) {
      if (action.kind == ActionKind::kBackward) of.push_back(action.index);
      if (action.kind == ActionKind::kGather) ++gathers[action.index];
    }
    if (stage == 3) {
      EXPECT_EQ(gathers[0], 1);
      EXPECT_EQ(gathers[1], 1);
    }
    return of;
  };
  for (int stage : {0, 1, 2, 3}) {
    EXPECT_EQ(backward(stage), std::vector<int>{2}) << stage;
  }
  // A head that is tied to the embedding trains it there.
  units[0].parameters[0].frozen = false;
  EXPECT_EQ(backward(0), (std::vector<int>{2, 1, 0}));
}

TEST(PlanTest, OneRankShardsWhatGoesToTheHost) {
  const auto placement = [](int stage, const StateHomes& homes) {
    return MakePlan(OddUnits(), {.world = 1,
                                 .placement = PlacementOfStage(stage),
                                 .homes = homes})
        .placement;
  };
  constexpr Placement R = Placement::kReplicated, S = Placement::kSharded;
  const StateHomes optimizer{.optimizer = Home::kHost};
  EXPECT_EQ(placement(3, {}), (StatePlacement{R, R, R}));
  EXPECT_EQ(placement(1, optimizer), (StatePlacement{R, R, R}));
  EXPECT_EQ(placement(2, optimizer), (StatePlacement{R, S, R}));
  EXPECT_EQ(placement(3, optimizer), (StatePlacement{R, S, R}));
  EXPECT_EQ(placement(3, {Home::kHost, Home::kHost}),
            (StatePlacement{S, S, R}));
}

TEST(PlanDeathTest, WhatTheHostCanNotHaveIsACallerMistake) {
  const StateHomes all{Home::kHost, Home::kHost};
  EXPECT_DEATH(
      MakePlan(OddUnits(),
               {.world = 2, .placement = PlacementOfStage(2), .homes = all}),
      "parameters in host memory are sharded");
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 2,
                                     .owners = 1,
                                     .placement = PlacementOfServer(),
                                     .homes = {.optimizer = Home::kHost}}),
               "a server's states are not in host memory");
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 2,
                                     .placement = PlacementOfStage(3),
                                     .homes = all,
                                     .host_share = 0.5}),
               "0.5");
}

TEST(PlanDeathTest, GroupsThatDoNotFillTheWorldAreACallerMistake) {
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 4, .shards = 3}),
               "3 shards do not divide 4 ranks");
}

TEST(PlanDeathTest, AWorldWithoutRanksIsACallerMistake) {
  EXPECT_DEATH(MakePlan(OddUnits(), {.world = 0}), "0 against 1");
}

TEST(ScheduleTest, OneRankDoesTheseActions) {
  const Plan plan = MakePlan(
      {Unit("embedding", {{5}}), Unit("block", {{5}}), Unit("head", {{5}})},
      {.world = 1});
  const std::vector<Action> want = {
      {ActionKind::kLoadBatch, -1, 0}, {ActionKind::kForward, 0, 0},
      {ActionKind::kForward, 1, 0},    {ActionKind::kForwardBackward, 2, 0},
      {ActionKind::kBackward, 1, 0},   {ActionKind::kBackward, 0, 0},
      {ActionKind::kLoadBatch, -1, 1}, {ActionKind::kForward, 0, 1},
      {ActionKind::kForward, 1, 1},    {ActionKind::kForwardBackward, 2, 1},
      {ActionKind::kBackward, 1, 1},   {ActionKind::kBackward, 0, 1},
      {ActionKind::kNorm, -1, 0},      {ActionKind::kUpdate, 0, 0},
      {ActionKind::kUpdate, 1, 0},     {ActionKind::kUpdate, 2, 0}};
  EXPECT_EQ(MakeSchedule(plan, {.micro_steps = 2}), want);
}

// Three units; the last borrows the first's table, as a tied head does.
Plan TiedPlan(int stage, int64_t bucket_elems = 1) {
  UnitSpec head = Unit("head", {{5}});
  head.borrowed = {"embedding.0"};
  return MakePlan({Unit("embedding", {{5}}), Unit("block", {{5}}), head},
                  {.world = 2,
                   .placement = PlacementOfStage(stage),
                   .reduce_bucket_elems = bucket_elems,
                   .gather_bucket_elems = bucket_elems});
}

std::vector<std::string> Names(const Plan& plan,
                               const std::vector<Action>& actions) {
  std::vector<std::string> names;
  for (const Action& action : actions) {
    names.push_back(ActionName(action, plan));
  }
  return names;
}

using Strings = std::vector<std::string>;

TEST(ScheduleTest, Stage0ReducesWhatBackwardHasCompleted) {
  const Plan plan = TiedPlan(0);
  EXPECT_EQ(
      Names(plan, MakeSchedule(plan, {})),
      (Strings{"LoadBatch", "Forward(embedding)", "Forward(block)",
               "ForwardBackward(head)", "Reduce(bucket 0: head)",
               "Backward(block)", "Reduce(bucket 1: block)",
               "Backward(embedding)", "Reduce(bucket 2: embedding)", "Norm",
               "Update(embedding)", "Update(block)", "Update(head)"}));
}

// "Norm after Reduce(bucket 0: head)", of actions that wait; " before" marks
// actions of the previous step.
Strings Waits(const Plan& plan, const std::vector<Action>& actions) {
  Strings lines;
  for (const Action& action : actions) {
    Strings names;
    for (int i : action.waits) {
      const int size = static_cast<int>(actions.size());
      names.push_back(ActionName(actions[i < 0 ? i + size : i], plan) +
                      (i < 0 ? " before" : ""));
    }
    if (names.empty()) continue;
    lines.push_back(absl::StrCat(ActionName(action, plan), " after ",
                                 absl::StrJoin(names, ", ")));
  }
  return lines;
}

TEST(ScheduleTest, ActionsWaitForWhatTheyReadAndWhatUsedTheirBuffer) {
  EXPECT_EQ(Waits(TiedPlan(0), MakeSchedule(TiedPlan(0), {})),
            (Strings{"Reduce(bucket 0: head) after ForwardBackward(head)",
                     "Reduce(bucket 1: block) after Backward(block)",
                     "Reduce(bucket 2: embedding) after Backward(embedding)",
                     "Norm after Reduce(bucket 0: head), "
                     "Reduce(bucket 1: block), Reduce(bucket 2: embedding)"}));
  EXPECT_EQ(
      Waits(TiedPlan(1), MakeSchedule(TiedPlan(1), {})),
      (Strings{"Forward(embedding) after GatherUpdated(bucket 0: embedding) "
               "before",
               "Forward(block) after GatherUpdated(bucket 1: block) before",
               "ForwardBackward(head) after GatherUpdated(bucket 2: head) "
               "before",
               "Reduce(bucket 0: head) after ForwardBackward(head)",
               "Reduce(bucket 1: block) after Backward(block)",
               "Reduce(bucket 2: embedding) after Backward(embedding)",
               "Norm after Reduce(bucket 0: head), Reduce(bucket 1: block), "
               "Reduce(bucket 2: embedding)",
               "GatherUpdated(bucket 0: embedding) after Update(embedding)",
               "GatherUpdated(bucket 1: block) after Update(block)",
               "GatherUpdated(bucket 2: head) after Update(head)"}));
  EXPECT_EQ(
      Waits(TiedPlan(3), MakeSchedule(TiedPlan(3), {})),
      (Strings{// Its buffer is where gradients were, until the last update.
               "Gather(embedding) after Update(head) before",
               "Forward(embedding) after Gather(embedding)",
               "Gather(head) after Forward(embedding)",
               "Forward(block) after Gather(block)",
               "ForwardBackward(head) after Gather(head)",
               "Reduce(bucket 0: head) after ForwardBackward(head)",
               "Reduce(bucket 1: block) after Backward(block)",
               "ReleaseGradients(head) after Reduce(bucket 0: head)",
               "Reduce(bucket 2: embedding) after Backward(embedding)",
               "ReleaseGradients(block) after Reduce(bucket 1: block)",
               "ReleaseGradients(embedding) after Reduce(bucket 2: "
               "embedding)"}));
}

// Reused memory is waited for: the second micro-step gathers into memory that
// the first one released.
TEST(ScheduleTest, AGatherWaitsForTheLastReleaseBeforeIt) {
  const Plan plan = TiedPlan(3);
  const std::vector<Action> actions = MakeSchedule(plan, {.micro_steps = 2});
  int released = INT32_MIN, waited = INT32_MIN, num_gathers = 0;
  for (int i = 0; i < static_cast<int>(actions.size()); ++i) {
    const Action& action = actions[i];
    if (action.kind == ActionKind::kRelease ||
        action.kind == ActionKind::kReleaseGradients) {
      released = i;
    }
    if (action.kind != ActionKind::kGather) continue;
    for (int wait : action.waits) waited = std::max(waited, wait);
    EXPECT_GE(waited, released) << ActionName(action, plan);
    num_gathers += action.micro_step == 1;
  }
  EXPECT_GT(num_gathers, 0);
}

TEST(ScheduleTest, Stage1GathersEveryBucketOnceItIsUpdated) {
  const Plan plan = TiedPlan(1);
  const Strings names = Names(plan, MakeSchedule(plan, {.micro_steps = 3}));
  const Strings end(names.end() - 7, names.end());
  EXPECT_EQ(end, (Strings{"Norm", "Update(embedding)",
                          "GatherUpdated(bucket 0: embedding)", "Update(block)",
                          "GatherUpdated(bucket 1: block)", "Update(head)",
                          "GatherUpdated(bucket 2: head)"}));
  // Gradients add up locally and are reduced once.
  EXPECT_EQ(std::count(names.begin(), names.end(), "Reduce(bucket 1: block)"),
            1);
}

TEST(ScheduleTest, Stage3GathersOneUnitAhead) {
  const Plan plan = TiedPlan(3);
  EXPECT_EQ(
      Names(plan, MakeSchedule(plan, {})),
      (Strings{"LoadBatch", "Gather(embedding)", "Gather(block)",
               "Forward(embedding)",
               // Block turns right after the head and stays; so does the
               // embedding, which the head reads.
               "Gather(head)", "Forward(block)", "ForwardBackward(head)",
               "Reduce(bucket 0: head)", "Release(head)", "Backward(block)",
               "Reduce(bucket 1: block)", "Release(block)",
               "ReleaseGradients(head)", "Backward(embedding)",
               "Reduce(bucket 2: embedding)", "Release(embedding)",
               "ReleaseGradients(block)", "ReleaseGradients(embedding)", "Norm",
               "Update(embedding)", "Update(block)", "Update(head)"}));
}

// An embedding whose backward reads no parameter, four blocks of 256 padded
// elements, and a head of 128, which may borrow the embedding's.
Plan DeepPlan(bool tied = false) {
  std::vector<UnitSpec> units = {Unit("embedding", {{200}})};
  units[0].backward_reads_parameters = false;
  for (const char* name : {"a", "b", "c", "d"}) {
    units.push_back(Unit(name, {{100}, {20}}));
  }
  units.push_back(Unit("head", {{5}}));
  if (tied) units.back().borrowed = {"embedding.0"};
  return MakePlan(units, {.world = 2, .placement = PlacementOfStage(3)});
}

// Gathers and releases between the computations, e.g. "+a +b F(a) -a".
std::string Moves(const Plan& plan, const ScheduleOptions& options) {
  std::string moves;
  for (const Action& action : MakeSchedule(plan, options)) {
    const bool is_unit = action.index >= 0;
    const std::string unit = is_unit ? plan.units[action.index].name : "";
    switch (action.kind) {
      case ActionKind::kGather:
        absl::StrAppend(&moves, " +", unit);
        break;
      case ActionKind::kRelease:
        absl::StrAppend(&moves, " -", unit);
        break;
      case ActionKind::kForward:
        absl::StrAppend(&moves, " F(", unit, ")");
        break;
      case ActionKind::kForwardBackward:
      case ActionKind::kBackward:
        absl::StrAppend(&moves, " B(", unit, ")");
        break;
      default:
        break;
    }
  }
  return moves.substr(1);
}

TEST(ScheduleTest, TwoUnitsAreInPlaceByDefault) {
  EXPECT_EQ(Moves(DeepPlan(), {}),
            "+embedding +a F(embedding) -embedding +b F(a) -a +c F(b) -b +d "
            "F(c) -c +head F(d) B(head) -head +c B(d) -d +b B(c) -c +a B(b) -b "
            "B(a) -a B(embedding)");
}

// It is also released between micro-batches, since the head read it last.
TEST(ScheduleTest, ATiedEmbeddingStaysForTheHead) {
  const std::string one =
      "+embedding +a F(embedding) +b F(a) -a +c F(b) -b +d F(c) -c +head F(d) "
      "B(head) -embedding -head +c B(d) -d +b B(c) -c +a B(b) -b ";
  EXPECT_EQ(Moves(DeepPlan(/*tied=*/true), {}), one + "B(a) -a B(embedding)");
  const std::string two = Moves(DeepPlan(/*tied=*/true), {.micro_steps = 2});
  EXPECT_EQ(two.substr(0, one.size()), one);
  EXPECT_EQ(std::count(two.begin(), two.end(), '+'), 2 * 9);
}

TEST(ScheduleTest, NothingIsPrefetchedWithABucketOfZero) {
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.prefetch_elems = 0}}),
            "+embedding F(embedding) -embedding +a F(a) -a +b F(b) -b +c F(c) "
            "-c +d F(d) +head B(head) -head B(d) -d +c B(c) -c +b B(b) -b +a "
            "B(a) -a B(embedding)");
}

TEST(ScheduleTest, APrefetchBucketGathersFurtherAhead) {
  // Two blocks are in flight at once.
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.prefetch_elems = 300}}),
            "+embedding +a +b F(embedding) -embedding +c F(a) -a +d F(b) -b "
            "+head F(c) -c F(d) +c B(head) -head +b B(d) -d +a B(c) -c B(b) -b "
            "B(a) -a B(embedding)");
}

TEST(ScheduleTest, UnitsStayWhileTheyFitIntoTheLiveParameters) {
  // All of it: everything is gathered once.
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.max_live_elems = 1'000'000'000}}),
            "+embedding +a F(embedding) -embedding +b F(a) +c F(b) +d F(c) "
            "+head F(d) B(head) -head B(d) -d B(c) -c B(b) -b B(a) -a "
            "B(embedding)");
  // Three blocks: the one used again last makes room.
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.max_live_elems = 3 * 256}}),
            "+embedding +a F(embedding) -embedding +b F(a) +c F(b) -a +d F(c) "
            "-b +head F(d) B(head) -head B(d) -d +b B(c) -c +a B(b) -b B(a) -a "
            "B(embedding)");
}

TEST(ScheduleTest, AUnitThatIsSoonUsedAgainStays) {
  // Between its uses d sees only the head, c also d twice.
  const std::string twice =
      "+embedding +a F(embedding) -embedding +b F(a) -a +c F(b) -b +d F(c) ";
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.max_reuse_distance = 129}}),
            twice +
                "-c +head F(d) B(head) -head +c B(d) -d +b B(c) -c +a B(b) "
                "-b B(a) -a B(embedding)");
  EXPECT_EQ(Moves(DeepPlan(), {.gather = {.max_reuse_distance = 0}}),
            twice +
                "-c +head F(d) B(head) -head +c B(d) -d +b B(c) -c +a B(b) "
                "-b B(a) -a B(embedding)");
}

TEST(ScheduleTest, PersistentUnitsAreGatheredOncePerStep) {
  const GatherPolicy all = {.persistence_threshold = 1000};
  const std::string moves =
      Moves(DeepPlan(), {.micro_steps = 3, .gather = all});
  EXPECT_EQ(std::count(moves.begin(), moves.end(), '+'), 6);
  EXPECT_EQ(std::count(moves.begin(), moves.end(), '-'), 6);
  // The first units that fit.
  const GatherPolicy some = {.persistence_threshold = 1000,
                             .max_persistent_elems = 256 + 256};
  const std::vector<Action> actions =
      MakeSchedule(DeepPlan(), {.micro_steps = 3, .gather = some});
  const auto gathers = [&](int unit) {
    return std::count_if(actions.begin(), actions.end(), [&](const Action& a) {
      return a.kind == ActionKind::kGather && a.index == unit;
    });
  };
  EXPECT_EQ(gathers(0), 1);
  EXPECT_EQ(gathers(1), 1);
  EXPECT_EQ(gathers(2), 6);
  const std::vector<bool> persistent = PersistentUnits(DeepPlan(), some);
  for (size_t u = 0; u < persistent.size(); ++u) {
    EXPECT_EQ(persistent[u], u < 2) << u;
  }
}

// Groups sum all their micro-batches once.
TEST(ScheduleTest, GroupsReduceAcrossInTheLastMicroStep) {
  UnitSpec head = Unit("head", {{5}});
  const std::vector<UnitSpec> units = {Unit("embedding", {{5}}), head};
  const auto names_at = [&](int stage) {
    const Plan plan = MakePlan(
        units, {.world = 4, .shards = 2, .placement = PlacementOfStage(stage)});
    return Names(plan, MakeSchedule(plan, {.micro_steps = 2}));
  };
  EXPECT_EQ(names_at(2), (Strings{"LoadBatch",
                                  "Forward(embedding)",
                                  "ForwardBackward(head)",
                                  "Reduce(bucket 0: head)",
                                  "Backward(embedding)",
                                  "Reduce(bucket 1: embedding)",
                                  "LoadBatch",
                                  "Forward(embedding)",
                                  "ReleaseGradients(head)",
                                  "ForwardBackward(head)",
                                  "Reduce(bucket 0: head)",
                                  "ReduceAcross(bucket 0: head)",
                                  "ReleaseGradients(embedding)",
                                  "Backward(embedding)",
                                  "Reduce(bucket 1: embedding)",
                                  "ReduceAcross(bucket 1: embedding)",
                                  "ReleaseGradients(head)",
                                  "ReleaseGradients(embedding)",
                                  "Norm",
                                  "Update(embedding)",
                                  "GatherUpdated(bucket 0: embedding)",
                                  "Update(head)",
                                  "GatherUpdated(bucket 1: head)"}));
  const Strings at_3 = names_at(3);
  for (const char* bucket : {"(bucket 0: head)", "(bucket 1: embedding)"}) {
    const std::string name = bucket;
    EXPECT_EQ(std::count(at_3.begin(), at_3.end(), "Reduce" + name), 2);
    EXPECT_EQ(std::count(at_3.begin(), at_3.end(), "ReduceAcross" + name), 1);
  }
}

TEST(ScheduleTest, GroupsSendTheseBytes) {
  // 768 elements each: 384 per rank of two, cut in two again for the groups.
  const std::vector<UnitSpec> units = {Unit("embedding", {{700}}),
                                       Unit("block", {{700}}),
                                       Unit("head", {{700}})};
  constexpr int64_t kP = 2, kR = 4, kPsi = 3 * 768;
  const auto wire_at = [&](int stage, int64_t shards, int64_t micro_steps) {
    const Plan plan = MakePlan(units, {.world = 4,
                                       .shards = shards,
                                       .placement = PlacementOfStage(stage),
                                       .parameters = {DType::kBF16}});
    EXPECT_EQ(plan.padded_elems, kPsi);
    const StepWire wire =
        CountWire(plan, MakeSchedule(plan, {.micro_steps = micro_steps}));
    StepWire formula = FormulaWire(plan, micro_steps);
    if (stage == 3 && shards > 1) {
      // The head and the block stay for backward, the embedding in between.
      const int64_t kept = (micro_steps * 2 + micro_steps - 1) * 768 / shards *
                           (shards - 1) * kP;
      formula.gathered -= kept;
      formula.received -= kept;
    }
    EXPECT_EQ(wire, formula) << stage << " " << shards << " " << micro_steps;
    return wire;
  };
  for (int64_t micro_steps : {1, 3}) {
    const int64_t half = kPsi / 2;
    // Shards of Psi / 2 are all-reduced over two groups: 2 * 1/2 * Psi / 2.
    EXPECT_EQ(
        wire_at(1, 2, micro_steps),
        (StepWire{half * kP, half * kR, half * kR, half * kP + 2 * half * kR}));
    EXPECT_EQ(wire_at(2, 2, micro_steps),
              (StepWire{half * kP, micro_steps * half * kR, half * kR,
                        half * kP + (micro_steps + 1) * half * kR}));
    EXPECT_EQ(wire_at(3, 2, micro_steps).reduced, micro_steps * half * kR);
    EXPECT_EQ(wire_at(3, 2, micro_steps).across, half * kR);
    // One group: nothing goes across. Groups of one: everything, once.
    const int64_t most = kPsi / 4 * 3;
    EXPECT_EQ(wire_at(2, 4, micro_steps),
              (StepWire{most * kP, micro_steps * most * kR, 0,
                        most * (kP + micro_steps * kR)}));
    EXPECT_EQ(wire_at(3, 1, micro_steps),
              (StepWire{0, 0, 2 * most * kR, 2 * most * kR}));
  }
}

// A rank of four sends its own shard and two of running sums, in fp32.
TEST(ScheduleTest, ARingSendsTheseBytes) {
  const std::vector<UnitSpec> units = {Unit("embedding", {{700}}),
                                       Unit("head", {{700}})};
  constexpr int64_t kPsi = 2 * 768, kP = 2;
  for (int stage : {0, 1, 2}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const int64_t item = DTypeBytes(dtype);
      const Plan plan = MakePlan(units, {.world = 4,
                                         .placement = PlacementOfStage(stage),
                                         .parameters = {DType::kBF16},
                                         .gradients = {dtype, DType::kF32}});
      const int64_t scattered = kPsi / 4 * (item + 4 + 4);
      const int64_t gathered = kPsi / 4 * 3;
      StepWire want = {
          .gathered = stage == 0 ? 0 : gathered * kP,
          .reduced = scattered + (stage == 0 ? gathered * item : 0)};
      want.received = want.gathered + want.reduced;
      EXPECT_EQ(CountWire(plan, MakeSchedule(plan, {})), want);
      EXPECT_EQ(FormulaWire(plan, 1), want);
    }
  }
  // Two groups of two: no sum travels twice.
  const auto grouped = [&](DType partial_sums) {
    return MakePlan(units, {.world = 4,
                            .shards = 2,
                            .placement = PlacementOfStage(2),
                            .gradients = {DType::kBF16, partial_sums}});
  };
  const StepWire direct = FormulaWire(grouped(DType::kBF16), 1);
  EXPECT_EQ(FormulaWire(grouped(DType::kF32), 1), direct);
  const Plan ring = grouped(DType::kF32);
  EXPECT_EQ(CountWire(ring, MakeSchedule(ring, {})), direct);
}

TEST(ScheduleTest, AServerSendsTheseBytes) {
  const std::vector<UnitSpec> units = {Unit("embedding", {{700}}),
                                       Unit("head", {{700}})};
  constexpr int64_t kP = 2, kR = 4, kPsi = 2 * 768;
  const Plan plan = MakePlan(units, {.world = 4,
                                     .owners = 1,
                                     .placement = PlacementOfServer(),
                                     .parameters = {DType::kBF16}});
  EXPECT_EQ(plan.padded_elems, kPsi);
  for (int64_t micro_steps : {1, 3}) {
    const std::vector<Action> actions =
        MakeSchedule(plan, {.micro_steps = micro_steps});
    for (int64_t rank = 0; rank < 4; ++rank) {
      const StepWire want = {.gathered = rank == 0 ? 3 * kPsi * kP : 0,
                             .reduced = rank == 0 ? 0 : kPsi * kR,
                             .received = rank == 0 ? 3 * kPsi * kR : kPsi * kP};
      EXPECT_EQ(CountWire(plan, actions, rank), want);
      EXPECT_EQ(FormulaWire(plan, micro_steps, rank), want);
    }
  }
  // The actions are those of stage 1, but not their effect.
  const Plan stage_1 =
      MakePlan(units, {.world = 4, .placement = PlacementOfStage(1)});
  const std::vector<Action> actions = MakeSchedule(plan, {});
  EXPECT_EQ(actions, MakeSchedule(stage_1, {}));
  EXPECT_NE(ScheduleHash(plan, actions), ScheduleHash(stage_1, actions));
}

TEST(ScheduleTest, WithoutOverlapNothingIsGatheredAheadOrLeftInFlight) {
  for (int stage : {0, 1, 2, 3}) {
    const Plan plan = TiedPlan(stage);
    const std::vector<Action> actions =
        MakeSchedule(plan, {.micro_steps = 2, .overlap = false});
    for (size_t i = 0; i < actions.size(); ++i) {
      const int before = static_cast<int>(i) - 1;
      const size_t at = i == 0 ? actions.size() - 1 : i - 1;
      if (actions[at].stream != actions[i].stream) {
        EXPECT_EQ(std::count(actions[i].waits.begin(), actions[i].waits.end(),
                             before),
                  1)
            << ActionName(actions[i], plan);
      }
      if (actions[i].kind != ActionKind::kGather) continue;
      size_t next = i;
      while (actions[next].kind == ActionKind::kGather) ++next;
      const std::vector<int>& required =
          plan.units[actions[next].index].required_units;
      EXPECT_EQ(std::count(required.begin(), required.end(), actions[i].index),
                1);
    }
  }
}

// The head of the next micro-batch adds to the embedding's gradient, so the
// reduction of the one before must be over.
TEST(ScheduleTest, ABufferIsNotWrittenWhileItIsReduced) {
  for (int stage : {2, 3}) {
    const Plan plan = TiedPlan(stage);
    std::set<int> reducing;  // units
    for (const Action& action : MakeSchedule(plan, {.micro_steps = 3})) {
      if (action.kind == ActionKind::kReduce) {
        reducing.insert(plan.reduce_buckets[action.index].segments[0].unit);
      }
      if (action.kind == ActionKind::kReleaseGradients) {
        reducing.erase(action.index);
      }
      if (action.kind == ActionKind::kBackward ||
          action.kind == ActionKind::kForwardBackward) {
        EXPECT_LE(reducing.size(), 1u);
        for (int needed : plan.units[action.index].required_units) {
          EXPECT_EQ(reducing.count(needed), 0u) << plan.units[needed].name;
        }
      }
    }
    EXPECT_TRUE(reducing.empty());
  }
}

// An embedding, blocks of three phases, and a head.
Plan PlanInPhases(int stage, int64_t max_one_phase_elems = 0) {
  std::vector<UnitSpec> units = {Unit("embedding", {{300}})};
  for (const char* name : {"a", "b"}) {
    units.push_back(Unit(name, {{100}, {20}, {200}, {300}, {1}}));
    for (int p = 2; p < 5; ++p)
      units.back().parameters[p].phase = p < 3 ? 1 : 2;
  }
  units.push_back(Unit("head", {{5}}));
  return MakePlan(units, {.world = 2,
                          .placement = PlacementOfStage(stage),
                          .max_one_phase_elems = max_one_phase_elems});
}

TEST(PlanTest, PhasesAreOfWholeSegments) {
  const Plan plan = PlanInPhases(2);
  const PlannedUnit& unit = plan.units[1];
  ASSERT_EQ(unit.phases.size(), 3u);
  int64_t end = unit.trained_elems;
  for (const Segment& phase : unit.phases) {
    EXPECT_EQ(phase.end(), end);
    end = phase.begin;
    EXPECT_EQ(std::count_if(unit.segments.begin(), unit.segments.end(),
                            [&](const Segment& segment) {
                              return segment.begin == phase.begin;
                            }),
              1);
  }
  EXPECT_EQ(end, 0);
  std::vector<int> phases;
  for (const PlannedParameter& parameter : unit.parameters) {
    phases.push_back(parameter.phase);
    const Segment& phase = unit.phases[parameter.phase];
    EXPECT_GE(parameter.offset, phase.begin);
    EXPECT_LE(parameter.offset + parameter.elems, phase.end());
  }
  EXPECT_EQ(phases, (std::vector<int>{2, 2, 1, 0, 0}));
  // Owners are the same at every stage; small units have one phase.
  const Plan replicated = PlanInPhases(1);
  EXPECT_EQ(replicated.units[1].phases.size(), 1u);
  ASSERT_EQ(replicated.units[1].segments.size(), unit.segments.size());
  for (size_t s = 0; s < unit.segments.size(); ++s) {
    EXPECT_EQ(replicated.units[1].segments[s].begin, unit.segments[s].begin);
  }
  EXPECT_EQ(PlanInPhases(2, 1000).units[1].phases.size(), 1u);
}

TEST(ScheduleTest, APhaseIsReducedWhileTheOthersAreComputed) {
  const Plan plan = PlanInPhases(2);
  Strings names = Names(plan, MakeSchedule(plan, {}));
  const auto begin =
      std::find(names.begin(), names.end(), "Backward(b, 1 of 3)");
  names = Strings(begin, std::find(begin, names.end(), "Norm"));
  EXPECT_EQ(
      names,
      (Strings{"Backward(b, 1 of 3)",         "Reduce(bucket 1: b)",
               "Backward(b, 2 of 3)",         "Reduce(bucket 2: b)",
               "ReleaseGradients(head)",      "Backward(b, 3 of 3)",
               "Reduce(bucket 3: b)",         "ReleaseGradients(b, 1 of 3)",
               "Backward(a, 1 of 3)",         "Reduce(bucket 4: a)",
               "ReleaseGradients(b, 2 of 3)", "Backward(a, 2 of 3)",
               "Reduce(bucket 5: a)",         "ReleaseGradients(b, 3 of 3)",
               "Backward(a, 3 of 3)",         "Reduce(bucket 6: a)",
               "ReleaseGradients(a, 1 of 3)", "ReleaseGradients(a, 2 of 3)",
               "Backward(embedding)",         "Reduce(bucket 7: embedding)",
               "ReleaseGradients(a, 3 of 3)", "ReleaseGradients(embedding)"}));
  const Strings waits = Waits(plan, MakeSchedule(plan, {}));
  EXPECT_EQ(std::count(waits.begin(), waits.end(),
                       "ReleaseGradients(b, 2 of 3) after Reduce(bucket 2: b)"),
            1);
}

// Phases gather nothing earlier or later.
TEST(ScheduleTest, AUnitInPhasesIsGatheredForAllOfThem) {
  for (const GatherPolicy& policy :
       {GatherPolicy(), GatherPolicy{.prefetch_elems = 0},
        GatherPolicy{.prefetch_elems = 1000},
        GatherPolicy{.max_reuse_distance = 1000}}) {
    const auto moves = [&](int64_t max_one_phase_elems) {
      std::vector<Action> moves;
      for (const Action& action : MakeSchedule(
               PlanInPhases(3, max_one_phase_elems), {.gather = policy})) {
        if (action.kind == ActionKind::kGather ||
            action.kind == ActionKind::kRelease ||
            (action.stream == StreamRole::kCompute &&
             action.kind != ActionKind::kReleaseGradients &&
             action.phase == 0)) {
          moves.push_back({action.kind, action.index, action.micro_step});
        }
      }
      return moves;
    };
    EXPECT_EQ(moves(0), moves(1000));
  }
}

// Within one micro-batch and into the next.
TEST(ScheduleTest, APhasesBufferIsNotWrittenWhileItIsReduced) {
  for (int stage : {2, 3}) {
    const Plan plan = PlanInPhases(stage);
    std::set<std::pair<int, int>> taken;
    int64_t elems = 0;
    const auto size = [&](int unit, int phase) {
      return plan.units[unit].phases[phase].elems;
    };
    for (const Action& action : MakeSchedule(plan, {.micro_steps = 3})) {
      const std::pair buffer(action.index, action.phase);
      if (action.kind == ActionKind::kReleaseGradients) {
        EXPECT_EQ(taken.erase(buffer), 1u);
        elems -= size(action.index, action.phase);
      } else if (action.kind == ActionKind::kBackward ||
                 action.kind == ActionKind::kForwardBackward) {
        EXPECT_TRUE(taken.insert(buffer).second) << ActionName(action, plan);
        elems += size(action.index, action.phase);
        const PlannedUnit& unit = plan.units[action.index];
        if (unit.phases.size() == 1) continue;
        EXPECT_LE(elems, unit.trained_elems) << ActionName(action, plan);
      }
    }
    EXPECT_TRUE(taken.empty());
  }
}

// An embedding of 1,000 rows, a block, and a head with the same table (tied) or
// one of its own.
constexpr int64_t kRows = 1000, kWidth = 32;
std::vector<UnitSpec> VocabularyUnits(bool tied) {
  const auto table = [](const char* name, bool looked_up) {
    return ParameterSpec{.name = name,
                         .shape = {kRows, kWidth},
                         .vocabulary = true,
                         .looked_up = looked_up};
  };
  UnitSpec head = Unit("head", {{5}});
  if (tied) head.borrowed = {"words"};
  if (!tied) head.parameters.push_back(table("head.words", false));
  return {{.name = "embedding",
           .parameters = {table("words", true)},
           .backward_reads_parameters = false},
          Unit("block", {{100, kWidth}}),
          head};
}

PlanOptions LookupOptions() {
  return {.world = 4,
          .placement = PlacementOfStage(3),
          .parameters = {DType::kBF16},
          .micro_tokens = 20,
          .min_part_elems = 1};
}

TEST(PlanTest, ALookupGetsRowsIfTheyAreFewAndSaveAGather) {
  const auto looks_up = [](bool tied, const PlanOptions& options) {
    const Plan plan = MakePlan(VocabularyUnits(tied), options);
    return plan.LooksUpRows(plan.num_computing);
  };
  const PlanOptions options = LookupOptions();
  EXPECT_TRUE(looks_up(false, options));
  // The head reads the same table, which stays in place for it.
  EXPECT_FALSE(looks_up(true, options));
  PlanOptions other = options;
  other.vocabulary_parts = true;
  EXPECT_TRUE(looks_up(true, other));
  other = options;
  other.placement = PlacementOfStage(2);
  EXPECT_FALSE(looks_up(false, other)) << "the table is in place";
  other = options;
  other.micro_tokens = kRows / 4 * 3 / 5;
  EXPECT_TRUE(looks_up(false, other));
  other.parameters.partial_sums = DType::kF32;
  EXPECT_FALSE(looks_up(false, other)) << "sums are twice as large";
  other = options;
  other.micro_tokens = kRows / 4;
  EXPECT_FALSE(looks_up(false, other)) << "the table is no larger";
  other.micro_tokens = 0;
  EXPECT_FALSE(looks_up(false, other)) << "nobody knows";
  other = options;
  other.shards = 1;
  EXPECT_FALSE(looks_up(false, other)) << "every rank has it";
  other = options;
  other.homes = {.parameters = Home::kHost, .optimizer = Home::kHost};
  EXPECT_FALSE(looks_up(false, other)) << "the host has it";
  other.homes.parameters = Home::kDevice;
  EXPECT_TRUE(looks_up(false, other));
}

// Of a group of two or four. A turn is of at most a quarter of what a gather
// brings.
TEST(PlanTest, ALookupSendsTokensAndRowsInTurns) {
  for (const int64_t shards : {2, 4}) {
    for (const bool in_parts : {false, true}) {
      PlanOptions options = LookupOptions();
      options.shards = shards;
      options.vocabulary_parts = in_parts;
      const Plan plan = MakePlan(VocabularyUnits(in_parts), options);
      const PlannedUnit& table = plan.units[plan.num_computing];
      EXPECT_EQ(table.part.count, in_parts ? 16 : 1);
      const int64_t most = (in_parts ? table.part.rows : kRows) / 4;
      EXPECT_LE(shards * table.lookup_tokens, most);
      int64_t sent = 0, tokens = 0;
      for (size_t i = 0; i < table.lookup.size(); ++i) {
        const Transfer& transfer = table.lookup[i];
        sent += transfer.BytesOf(0).sent;
        if (i % 2 == 0) {
          tokens += transfer.elems;
        } else {
          EXPECT_EQ(transfer.elems, table.lookup[i - 1].elems * kWidth);
        }
      }
      EXPECT_EQ(table.lookup.size() / 2,
                CeilDiv(options.micro_tokens, table.lookup_tokens));
      EXPECT_EQ(tokens, shards * options.micro_tokens);
      EXPECT_EQ(sent, (shards - 1) * options.micro_tokens * (4 + kWidth * 2));
      EXPECT_EQ(RowsWire(plan, 3).gathered, 3 * sent);
    }
  }
}

TEST(ScheduleTest, RowsAreLookedUpOneUnitAhead) {
  const Plan plan = MakePlan(VocabularyUnits(false), LookupOptions());
  const auto lookups = [&](const ScheduleOptions& options) {
    const std::vector<Action> actions = MakeSchedule(plan, options);
    Strings names;
    for (const std::string& name : Names(plan, actions)) {
      EXPECT_NE(name, "Gather(words)");
      if (name == "LoadBatch" || name == "LookUp(words)" ||
          name.ends_with("ward(embedding)")) {
        names.push_back(name);
      }
    }
    const Strings waits = Waits(plan, actions);
    EXPECT_EQ(
        std::count(waits.begin(), waits.end(), "LookUp(words) after LoadBatch"),
        options.micro_steps);
    EXPECT_EQ(std::count(waits.begin(), waits.end(),
                         "Forward(embedding) after LookUp(words)"),
              options.micro_steps);
    return names;
  };
  EXPECT_EQ(lookups({.micro_steps = 2}),
            (Strings{"LoadBatch", "LookUp(words)", "Forward(embedding)",
                     "LoadBatch", "LookUp(words)", "Backward(embedding)",
                     "Forward(embedding)", "Backward(embedding)"}));
  EXPECT_EQ(lookups({.micro_steps = 2, .gather = {.prefetch_elems = 0}}),
            (Strings{"LoadBatch", "LookUp(words)", "Forward(embedding)",
                     "Backward(embedding)", "LoadBatch", "LookUp(words)",
                     "Forward(embedding)", "Backward(embedding)"}));
}

// With a large prefetch bucket, too, the batch whose rows arrive is the next.
TEST(ScheduleTest, OneLookupAtATimeIsUnderway) {
  PlanOptions options = LookupOptions();
  options.vocabulary_parts = true;
  for (const bool tied : {false, true}) {
    const Plan plan = MakePlan(VocabularyUnits(tied), options);
    ASSERT_TRUE(plan.LooksUpRows(plan.num_computing));
    const std::vector<Action> actions = MakeSchedule(
        plan, {.micro_steps = 4, .gather = {.prefetch_elems = 1'000'000'000}});
    int64_t next = 0;       // batch
    bool underway = false;  // until the last part of the first unit has run
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kLookUp) {
        EXPECT_FALSE(underway);
        EXPECT_EQ(action.micro_step, next++);
        underway = true;
      }
      if (action.kind != ActionKind::kForward) continue;
      const PlannedUnit& unit = plan.units[action.index];
      const bool waits =
          std::any_of(action.waits.begin(), action.waits.end(), [&](int wait) {
            return wait >= 0 && actions[wait].kind == ActionKind::kLookUp;
          });
      EXPECT_EQ(waits, action.index == 0) << ActionName(action, plan);
      if (unit.model_unit > 0) continue;
      EXPECT_EQ(action.micro_step, next - 1);
      if (unit.part.number + 1 == unit.part.count) underway = false;
    }
    EXPECT_EQ(next, 4);
  }
}

// A delayed update's parameters replace those that the last lookup has read;
// the next step's waits for them.
TEST(ScheduleTest, ALookupIsTheLastUseOfItsTable) {
  PlanOptions options = LookupOptions();
  options.homes.optimizer = Home::kHost;
  const Plan plan = MakePlan(VocabularyUnits(false), options);
  const std::vector<Action> actions =
      MakeSchedule(plan, {.micro_steps = 2, .delayed_update = true});
  const Strings names = Names(plan, actions);
  const auto upload = std::find(names.begin(), names.end(), "Upload(words)");
  ASSERT_NE(upload, names.end());
  EXPECT_EQ(std::count(names.begin(), names.end(), "Upload(words)"), 1);
  EXPECT_EQ(std::count(names.begin(), upload, "Forward(embedding)"), 2);
  const Strings waits = Waits(plan, actions);
  EXPECT_EQ(std::count(waits.begin(), waits.end(),
                       "LookUp(words) after Upload(words) before, LoadBatch"),
            1);
}

TEST(PlanTest, EverySegmentIsInOneBucketOfEachKind) {
  for (int stage : {0, 1, 2, 3}) {
    for (int64_t limit : {1, 200, 400, 1 << 20}) {
      const Plan plan =
          MakePlan(OddUnits(), {.world = 3,
                                .placement = PlacementOfStage(stage),
                                .reduce_bucket_elems = limit,
                                .gather_bucket_elems = limit});
      for (const auto* buckets : {&plan.reduce_buckets, &plan.gather_buckets}) {
        std::set<std::pair<int, int>> seen;
        for (const Bucket& bucket : *buckets) {
          int64_t elems = 0;
          for (const SegmentRef& ref : bucket.segments) {
            EXPECT_TRUE(seen.insert({ref.unit, ref.segment}).second);
            elems += plan.segment(ref).elems;
            if (stage >= 2 && buckets == &plan.reduce_buckets) {
              EXPECT_EQ(ref.unit, bucket.segments[0].unit);
            }
          }
          EXPECT_EQ(elems, bucket.elems);
          EXPECT_TRUE(bucket.segments.size() == 1 || elems <= limit);
        }
        const bool has_gathers = stage == 1 || stage == 2;
        EXPECT_EQ(static_cast<int64_t>(seen.size()),
                  buckets == &plan.gather_buckets && !has_gathers
                      ? 0
                      : plan.num_trained_segments);
      }
    }
  }
}

TEST(PlanTest, TheZeroPapersFigureIsReproduced) {
  // 7.5 B parameters, N = 64, p = a = 2, m + o = 12: 120, 31.4, 16.6, 1.9 GB.
  const double want[] = {120, 31.4, 16.6, 1.88};
  const UnitSpec unit{.name = "all",
                      .parameters = {{"w", Shape{7'500'000, 1000}}}};
  for (int stage : {0, 1, 2, 3}) {
    const Plan plan =
        MakePlan({unit}, {.world = 64, .placement = PlacementOfStage(stage)});
    const auto elems = [&](Placement placement) {
      return plan.StateElems(plan.padded_elems, placement);
    };
    const double bytes = 2.0 * elems(plan.placement.parameters) +
                         2.0 * elems(plan.placement.gradients) +
                         12.0 * elems(plan.placement.optimizer);
    // Padding takes up to 0.05 %, the figures are rounded.
    EXPECT_NEAR(bytes / 1e9, want[stage], 0.1);
  }
}

TEST(ScheduleTest, TheHashTellsEveryPlanAndScheduleApart) {
  std::set<std::string> hashes;
  for (int64_t world : {2, 3}) {
    for (int stage : {0, 1, 2, 3}) {
      for (int64_t micro_steps : {1, 2}) {
        for (bool overlap : {false, true}) {
          Plan plan =
              MakePlan(OddUnits(), {.world = world,
                                    .placement = PlacementOfStage(stage),
                                    .reduce_bucket_elems = 1});
          const std::vector<Action> actions = MakeSchedule(
              plan, {.micro_steps = micro_steps, .overlap = overlap});
          const std::string hash = ScheduleHash(plan, actions);
          EXPECT_EQ(hash, ScheduleHash(plan, actions));
          EXPECT_TRUE(hashes.insert(hash).second)
              << world << " ranks, stage " << stage << ", " << micro_steps
              << " micro-steps, overlap " << overlap;
          // Names and number of the buckets stay, their contents change.
          for (size_t b = 1; b < plan.reduce_buckets.size(); ++b) {
            std::swap(plan.reduce_buckets[b - 1], plan.reduce_buckets[b]);
            EXPECT_NE(hash, ScheduleHash(plan, actions));
            std::swap(plan.reduce_buckets[b - 1], plan.reduce_buckets[b]);
          }
        }
      }
    }
  }
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
