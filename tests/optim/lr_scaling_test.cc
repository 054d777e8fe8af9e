#include "optim/lr_scaling.h"

#include "gtest/gtest.h"

namespace zero {
namespace {

LrScaling Scaling(LrScaleRule rule) {
  LrScaling s;
  s.rule = rule;
  s.base_batch_size = 256;
  s.global_batch_size = 4096;
  s.warmup_steps = 10;
  return s;
}

TEST(LrScalingTest, RulesScaleWithTheBatch) {
  EXPECT_EQ(Scaling(LrScaleRule::kLinear).Factor(), 16);
  EXPECT_EQ(Scaling(LrScaleRule::kSqrt).Factor(), 4);
  EXPECT_EQ(Scaling(LrScaleRule::kNone).Factor(), 1);
}

TEST(LrScalingTest, SmallerBatchesScaleDown) {
  LrScaling s = Scaling(LrScaleRule::kLinear);
  s.global_batch_size = 64;
  EXPECT_EQ(s.Factor(), 0.25);
}

// Goyal et al.: from the base rate by equal amounts to the scaled rate.
TEST(LrScalingTest, WarmupIsALineFromTheBaseRateToTheScaledRate) {
  const LrScaling s = Scaling(LrScaleRule::kLinear);
  EXPECT_DOUBLE_EQ(s.LrAt(0, 0.1, 99), 0.1);
  EXPECT_DOUBLE_EQ(s.LrAt(1, 0.1, 99), 0.1 + 0.15);
  EXPECT_DOUBLE_EQ(s.LrAt(5, 0.1, 99), (0.1 + 1.6) / 2);
  EXPECT_DOUBLE_EQ(s.LrAt(9, 0.1, 99), 1.6 - 0.15);
  EXPECT_DOUBLE_EQ(s.LrAt(10, 0.1, 1.6), 1.6);
}

TEST(LrScalingTest, SchedulerRulesAfterTheWarmup) {
  LrScaling s = Scaling(LrScaleRule::kLinear);
  EXPECT_EQ(s.LrAt(10, 0.1, 1.25), 1.25);
  EXPECT_EQ(s.LrAt(1000, 0.1, 0.5), 0.5);
  s.warmup_steps = 0;
  EXPECT_EQ(s.LrAt(0, 0.1, 1.6), 1.6);
}

}  // namespace
}  // namespace zero
