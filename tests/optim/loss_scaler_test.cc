#include "optim/loss_scaler.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace zero {
namespace {

LossScalerOptions Small() {
  LossScalerOptions options;
  options.initial_scale_power = 4;
  options.loss_scale_window = 3;
  options.hysteresis = 1;
  return options;
}

// The scale after each step; 'x' overflows, '.' does not.
std::vector<double> Scales(const LossScalerOptions& options,
                           const std::string& steps) {
  LossScaler scaler(options);
  std::vector<double> scales;
  for (const char step : steps) {
    scaler.Update(step == 'x');
    scales.push_back(scaler.scale());
  }
  return scales;
}

using Scale = std::vector<double>;

TEST(LossScalerTest, DefaultsAreDeepSpeeds) {
  LossScaler scaler{LossScalerOptions()};
  EXPECT_EQ(scaler.scale(), 65536);
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 65536) << "hysteresis 2 forgives one overflow";
  scaler.Update(true);
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST(LossScalerTest, DoublesAfterEachWindowOfGoodSteps) {
  EXPECT_EQ(Scales(Small(), "......."), (Scale{16, 16, 32, 32, 32, 64, 64}));
}

TEST(LossScalerTest, HalvesAtOverflowAndCountsTheWindowAnew) {
  EXPECT_EQ(Scales(Small(), "..x...x."), (Scale{16, 16, 8, 8, 8, 16, 8, 8}));
}

TEST(LossScalerTest, AllOverflowsEndAtTheMinimum) {
  LossScalerOptions options = Small();
  options.min_loss_scale = 4;
  EXPECT_EQ(Scales(options, "xxxx..."), (Scale{8, 4, 4, 4, 4, 4, 8}));
}

TEST(LossScalerTest, HysteresisIsUsedUpAndRefilledByADoubling) {
  LossScalerOptions options = Small();
  options.hysteresis = 2;
  // The first overflow is forgiven, later ones are not, until the scale has
  // doubled.
  EXPECT_EQ(Scales(options, "x.x.x...xx"),
            (Scale{16, 16, 8, 8, 4, 4, 4, 8, 8, 4}));
}

TEST(LossScalerTest, ConsecutiveHysteresisIsRefilledByAnyGoodStep) {
  LossScalerOptions options = Small();
  options.hysteresis = 2;
  options.consecutive_hysteresis = true;
  EXPECT_EQ(Scales(options, "x.x.xx"), (Scale{16, 16, 16, 16, 16, 8}));
}

TEST(LossScalerTest, StaticScaleNeverMoves) {
  LossScalerOptions options = Small();
  options.static_scale = 128;
  EXPECT_EQ(Scales(options, "xx......"), Scale(8, 128));
}

TEST(LossScalerTest, ARestoredScalerContinuesAlike) {
  LossScalerOptions options = Small();
  options.hysteresis = 2;
  LossScaler whole(options);
  for (const char step : std::string("..x..x")) whole.Update(step == 'x');
  LossScaler resumed(options);
  resumed.Restore(whole.state());
  for (const char step : std::string("..x...xx....")) {
    whole.Update(step == 'x');
    resumed.Update(step == 'x');
    EXPECT_EQ(whole.scale(), resumed.scale());
  }
}

TEST(LossScalerTest, ATokensGradientIsScaledTheSameForAnyNumberOfRanks) {
  constexpr int64_t kSequences = 3, kTokens = 100;  // of a rank, of a sequence
  const auto seed = [](int64_t world) {
    const int64_t sequences = world * kSequences;
    return LossScaleOfStep(65536, sequences) /
           static_cast<double>(sequences * kTokens);
  };
  for (int64_t world = 1; world <= 1024; world *= 2) {
    EXPECT_EQ(seed(world), seed(1)) << world;
  }
  // A power of two is at most a factor of two away.
  for (int64_t world = 1; world <= 1024; ++world) {
    EXPECT_LE(seed(world), 65536.0 / kTokens) << world;
    EXPECT_GT(seed(world), 65536.0 / 2 / kTokens) << world;
  }
}

}  // namespace
}  // namespace zero
