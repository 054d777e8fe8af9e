#include "optim/lr_schedule.h"

#include <cmath>

#include "gtest/gtest.h"

namespace zero {
namespace {

LrSchedule Warmup(LrScheduleKind kind, LrWarmupType type) {
  LrSchedule s;
  s.kind = kind;
  s.lr = 1.0;
  s.warmup_min_lr = 0.1;
  s.warmup_max_lr = 1.1;
  s.warmup_num_steps = 10;
  s.warmup_type = type;
  s.total_num_steps = 30;
  return s;
}

TEST(LrScheduleTest, ConstantIsConstant) {
  LrSchedule s;
  s.lr = 0.25;
  EXPECT_EQ(s.LrAt(0), 0.25);
  EXPECT_EQ(s.LrAt(1000000), 0.25);
}

TEST(LrScheduleTest, LinearWarmupMovesAtOnceAndArrivesAtItsLastStep) {
  const LrSchedule s = Warmup(LrScheduleKind::kWarmupLr, LrWarmupType::kLinear);
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.1 + 1.0 * 1 / 10);
  EXPECT_DOUBLE_EQ(s.LrAt(4), 0.1 + 1.0 * 5 / 10);
  EXPECT_DOUBLE_EQ(s.LrAt(8), 0.1 + 1.0 * 9 / 10);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(10), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(1000), 1.1);
}

// DeepSpeed's log warm-up, log(iteration + 1) / log(steps), at iteration =
// step + 1.
TEST(LrScheduleTest, LogWarmupHasDeepSpeedsShapeOneStepAhead) {
  const LrSchedule s = Warmup(LrScheduleKind::kWarmupLr, LrWarmupType::kLog);
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.1 + std::log(2.0) / std::log(10.0));
  EXPECT_DOUBLE_EQ(s.LrAt(3), 0.1 + std::log(5.0) / std::log(10.0));
  EXPECT_DOUBLE_EQ(s.LrAt(8), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(500), 1.1);
}

TEST(LrScheduleTest, WarmupsOfZeroAndOneStepAreThePeakAtOnce) {
  for (const auto type : {LrWarmupType::kLog, LrWarmupType::kLinear}) {
    LrSchedule s = Warmup(LrScheduleKind::kWarmupLr, type);
    for (const int64_t steps : {0, 1}) {
      s.warmup_num_steps = steps;
      EXPECT_DOUBLE_EQ(s.LrAt(0), 1.1);
    }
  }
}

TEST(LrScheduleTest, DefaultWarmupStartsAboveZero) {
  LrSchedule s;
  s.kind = LrScheduleKind::kWarmupLr;
  EXPECT_DOUBLE_EQ(s.LrAt(0), 1e-3 * std::log(2.0) / std::log(1000.0));
  EXPECT_DOUBLE_EQ(s.LrAt(999), 1e-3);
}

TEST(LrScheduleTest, WarmupDecayFallsLinearlyAndItsLastStepMoves) {
  const LrSchedule s =
      Warmup(LrScheduleKind::kWarmupDecayLr, LrWarmupType::kLinear);
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.2);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(10), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(20), 0.1 + 0.5);
  EXPECT_DOUBLE_EQ(s.LrAt(29), 0.1 + 1.0 / 20);
  EXPECT_DOUBLE_EQ(s.LrAt(30), 0.1);
  EXPECT_DOUBLE_EQ(s.LrAt(10000), 0.1);
}

TEST(LrScheduleTest, CosineRunsFromTheRateToItsRatioAndStays) {
  LrSchedule s = Warmup(LrScheduleKind::kWarmupCosineLr, LrWarmupType::kLinear);
  s.lr = 2;
  s.warmup_min_ratio = 0.2;
  s.cos_min_ratio = 0.1;
  EXPECT_DOUBLE_EQ(s.LrAt(0), 2 * (0.2 + 0.8 * 0.1));
  EXPECT_DOUBLE_EQ(s.LrAt(9), 2.0);
  EXPECT_DOUBLE_EQ(s.LrAt(10), 2.0);
  EXPECT_DOUBLE_EQ(s.LrAt(20), 2 * (0.1 + 0.9 * 0.5));
  EXPECT_DOUBLE_EQ(s.LrAt(29),
                   2 * (0.1 + 0.9 * (1 + std::cos(M_PI * 19 / 20)) / 2));
  EXPECT_DOUBLE_EQ(s.LrAt(30), 0.2);
  EXPECT_DOUBLE_EQ(s.LrAt(35), 0.2) << "rises again beyond the end";
}

TEST(LrScheduleTest, FewerTotalStepsThanWarmupStepsNeverReachThePeak) {
  for (const auto kind :
       {LrScheduleKind::kWarmupDecayLr, LrScheduleKind::kWarmupCosineLr}) {
    LrSchedule s = Warmup(kind, LrWarmupType::kLinear);
    s.total_num_steps = 5;
    double last = 0;
    for (int64_t step = 0; step < 5; ++step) {
      EXPECT_GT(s.LrAt(step), last);
      last = s.LrAt(step);
    }
    EXPECT_LT(last, 1.1);
    EXPECT_TRUE(std::isfinite(s.LrAt(10)));
    EXPECT_TRUE(std::isfinite(s.LrAt(11)));
  }
}

TEST(LrScheduleTest, WsdIsStableThenFallsInItsLastSteps) {
  LrSchedule s = Warmup(LrScheduleKind::kWsd, LrWarmupType::kLinear);
  s.warmup_min_lr = 0;
  s.warmup_max_lr = 1;
  s.decay_num_steps = 4;  // steps 26 ... 29
  s.min_lr_ratio = 0.2;
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.1);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 1);
  EXPECT_DOUBLE_EQ(s.LrAt(25), 1);
  EXPECT_DOUBLE_EQ(s.LrAt(26), 1);
  EXPECT_DOUBLE_EQ(s.LrAt(27), 0.2 + 0.8 * (1 - std::sqrt(0.25)));
  EXPECT_DOUBLE_EQ(s.LrAt(30), 0.2);
  EXPECT_DOUBLE_EQ(s.LrAt(99), 0.2);
  s.decay_type = LrDecayType::kLinear;
  EXPECT_DOUBLE_EQ(s.LrAt(29), 0.2 + 0.8 * 0.25);
  s.decay_type = LrDecayType::kCosine;
  EXPECT_DOUBLE_EQ(s.LrAt(28), 0.2 + 0.8 * 0.5);
}

TEST(LrScheduleTest, WsdDecayLongerThanTheRunMeetsTheWarmup) {
  LrSchedule s = Warmup(LrScheduleKind::kWsd, LrWarmupType::kLinear);
  s.warmup_min_lr = 0;
  s.warmup_max_lr = 1;
  s.total_num_steps = 12;
  s.decay_num_steps = 12;
  s.decay_type = LrDecayType::kLinear;
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.1);
  EXPECT_DOUBLE_EQ(s.LrAt(8), 1 - 8.0 / 12);
  EXPECT_DOUBLE_EQ(s.LrAt(11), 1 - 11.0 / 12);
}

LrSchedule Cycle() {
  LrSchedule s;
  s.kind = LrScheduleKind::kOneCycle;
  s.cycle_min_lr = 0.1;
  s.cycle_max_lr = 1.1;
  s.cycle_first_step_size = 4;
  s.cycle_second_step_size = 5;
  s.decay_step_size = 2;
  s.decay_lr_rate = 0.5;
  s.decay_mom_rate = 0.01;
  return s;
}

TEST(LrScheduleTest, OneCycleRisesFallsAndDecays) {
  const LrSchedule s = Cycle();
  EXPECT_DOUBLE_EQ(s.LrAt(0), 0.1 + 0.25);
  EXPECT_DOUBLE_EQ(s.LrAt(3), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(4), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(5), 0.1 + 4.0 / 5);
  EXPECT_DOUBLE_EQ(s.LrAt(8), 0.1 + 1.0 / 5);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 0.1);
  EXPECT_DOUBLE_EQ(s.LrAt(11), 0.1 / (1 + 0.5 * 1));
  EXPECT_DOUBLE_EQ(s.LrAt(12), 0.1 / (1 + 0.5 * 1.5));
}

TEST(LrScheduleTest, OneCycleWithoutDecayStaysAtItsMinimum) {
  LrSchedule s = Cycle();
  s.decay_step_size = 0;
  EXPECT_DOUBLE_EQ(s.LrAt(1000), 0.1);
  EXPECT_DOUBLE_EQ(s.MomentumAt(1000), 0.9);
}

TEST(LrScheduleTest, OneCycleMomentumRunsAgainstTheRate) {
  LrSchedule s = Cycle();
  EXPECT_DOUBLE_EQ(s.MomentumAt(0), 0.9 - 0.1 * 0.25);
  EXPECT_DOUBLE_EQ(s.MomentumAt(3), 0.8);
  EXPECT_DOUBLE_EQ(s.MomentumAt(5), 0.9 - 0.1 * 0.8);
  EXPECT_DOUBLE_EQ(s.MomentumAt(11), 0.9 * 1.01);
  EXPECT_DOUBLE_EQ(s.MomentumAt(1000000), 0.999) << "beta1 reached 1";
  s.cycle_momentum = false;
  EXPECT_LT(s.MomentumAt(0), 0);
  s = LrSchedule();
  EXPECT_LT(s.MomentumAt(0), 0) << "only OneCycle cycles the momentum";
}

TEST(LrScheduleTest, OneCycleStairsAreLevelsAboveTheMinimum) {
  LrSchedule s = Cycle();
  s.cycle_first_step_size = 8;
  s.cycle_second_step_size = 8;
  s.cycle_first_stair_count = 2;
  s.cycle_second_stair_count = 4;
  for (const int64_t step : {0, 1, 2, 3}) EXPECT_DOUBLE_EQ(s.LrAt(step), 0.6);
  for (const int64_t step : {4, 5, 6, 7}) EXPECT_DOUBLE_EQ(s.LrAt(step), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(8), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(9), 1.1);
  EXPECT_DOUBLE_EQ(s.LrAt(10), 0.1 + 0.75);
  EXPECT_DOUBLE_EQ(s.LrAt(15), 0.1 + 0.25);
}

TEST(LrScheduleTest, EveryKindMovesAtItsFirstAndLastStepByDefault) {
  for (const auto kind :
       {LrScheduleKind::kConstant, LrScheduleKind::kWarmupLr,
        LrScheduleKind::kWarmupDecayLr, LrScheduleKind::kWarmupCosineLr,
        LrScheduleKind::kOneCycle, LrScheduleKind::kWsd}) {
    LrSchedule s;
    s.kind = kind;
    s.total_num_steps = 4000;
    s.decay_num_steps = 400;
    s.cycle_max_lr = 1e-3;
    EXPECT_GT(s.LrAt(0), 0) << static_cast<int>(kind);
    EXPECT_GT(s.LrAt(3999), 0) << static_cast<int>(kind);
  }
}

}  // namespace
}  // namespace zero
