#include "engine/train/utilization.h"

#include <string>
#include <vector>

#include "engine/train/metrics.h"
#include "engine/train/product_rate.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

TEST(UtilizationTest, IsTheShareOfThePeak) {
  // Llama-3-8B at 8192 on an H100: 57.9 GFLOP per token, 5762 tokens per
  // second, 989 TFLOP/s.
  const TokenFlops flops{.model = 57.9e9, .causal = 51.5e9, .recomputed = 0};
  TokenFlops more = flops;
  more.recomputed = 18e9;
  const Utilization plain = UtilizationAt(5762, flops, 989e12);
  EXPECT_NEAR(plain.mfu, 0.337, 0.0005);
  EXPECT_DOUBLE_EQ(plain.mfu_causal, plain.mfu * 51.5 / 57.9);
  EXPECT_EQ(plain.hfu, 0);
  EXPECT_EQ(plain.ToString(), "mfu 34%");

  const Utilization recompute = UtilizationAt(5762, more, 989e12);
  EXPECT_EQ(recompute.mfu, plain.mfu);
  EXPECT_DOUBLE_EQ(recompute.hfu, plain.mfu * (57.9 + 18) / 57.9);
  EXPECT_EQ(recompute.ToString(), "mfu 34% (hfu 44%)");
}

TEST(UtilizationTest, HfuIsWrittenOnlyWithRecompute) {
  const TokenFlops flops{.model = 8, .causal = 6};
  const TokenFlops more{.model = 8, .causal = 6, .recomputed = 2};
  nlohmann::ordered_json plain, recompute;
  UtilizationAt(1, flops, 16).AddTo(&plain);
  UtilizationAt(1, more, 16).AddTo(&recompute);
  EXPECT_EQ(ToLine(plain), R"({"mfu":0.5,"mfu_causal":0.375})");
  EXPECT_EQ(ToLine(recompute), R"({"mfu":0.5,"mfu_causal":0.375,"hfu":0.625})");
}

TEST(UtilizationTest, WithoutAPeakEverythingIsZero) {
  const Utilization none = UtilizationAt(100, {1, 1, 1}, 0);
  EXPECT_EQ(none.mfu, 0);
  EXPECT_EQ(none.mfu_causal, 0);
  EXPECT_EQ(none.hfu, 0);
}

// A past bug: 600 % was printed if other work had disturbed the measured
// ceiling.
TEST(UtilizationTest, MoreThanThePeakIsNotKnown) {
  const TokenFlops flops{.model = 8, .causal = 6};
  const TokenFlops more{.model = 8, .causal = 6, .recomputed = 2};
  EXPECT_EQ(UtilizationAt(2, flops, 16).ToString(), "mfu 100%");
  const Utilization busy = UtilizationAt(2.1, flops, 16);
  EXPECT_FALSE(busy.known());
  EXPECT_EQ(busy.ToString(), "mfu unknown: machine busy while measuring");
  nlohmann::ordered_json line;
  busy.AddTo(&line);
  EXPECT_EQ(ToLine(line), R"({"mfu":null,"mfu_causal":null})");
  EXPECT_FALSE(UtilizationAt(1.9, more, 16).known());  // hfu 119 %
}

TEST(ProductRateTest, IsMeasuredInEveryPrecision) {
  const auto device = MakeCpuDevice(1);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const ProductRate rate = MeasureProductRate(*device, dtype, {});
    EXPECT_GT(rate.flops, 0) << DTypeName(dtype);
    EXPECT_GE(rate.size, 512) << DTypeName(dtype);
  }
}

TEST(ProductRateTest, TakesNoMemoryBesidesWhatItIsGiven) {
  const auto device = MakeCpuDevice(1);
  // Of fp32 the operands of 512 rows are 3 MiB, those of 1024 rows 12 MiB.
  std::vector<char> memory(size_t{11} << 20);
  const ProductRate rate =
      MeasureProductRate(*device, DType::kF32, absl::MakeSpan(memory));
  EXPECT_GT(rate.flops, 0);
  EXPECT_EQ(rate.size, 512);
  memory.resize(size_t{2} << 20);
  EXPECT_EQ(
      MeasureProductRate(*device, DType::kF32, absl::MakeSpan(memory)).flops,
      0);
}

TEST(ProductRateTest, ABusyMomentTakesNothingFromTheBestOfEarlierRuns) {
  TempDir dir;
  const std::string file = dir.File("product_rates.json");
  const DeviceInfo two{.name = "CPU", .isa = "avx2", .num_threads = 2};
  const auto best = [&](const DeviceInfo& device, double flops) {
    return BestProductRate(file, device, DType::kF32, {flops, 1024});
  };
  EXPECT_EQ(best(two, 170e9).flops, 170e9);
  EXPECT_FALSE(best(two, 171e9).earlier);
  const ProductRate busy = best(two, 82e9);
  EXPECT_EQ(busy.flops, 171e9);
  EXPECT_EQ(busy.size, 1024);
  EXPECT_TRUE(busy.earlier);
  // It does not apply to other threads and dtypes.
  DeviceInfo one = two;
  one.num_threads = 1;
  EXPECT_EQ(best(one, 82e9).flops, 82e9);
  EXPECT_EQ(BestProductRate(file, two, DType::kBF16, {9e9, 512}).flops, 9e9);
  EXPECT_EQ(best(two, 1).flops, 171e9);
  // An invalid file starts over, and a folder keeps nothing.
  for (const char* text :
       {"", "{", "[1]", R"({"CPU, avx2, 2 threads, fp32": 7})",
        R"({"CPU, avx2, 2 threads, fp32": {"flops": "x"}})"}) {
    dir.Write("product_rates.json", text);
    EXPECT_EQ(best(two, 5e9).flops, 5e9) << text;
    EXPECT_EQ(best(two, 4e9).flops, 5e9) << text;
  }
  EXPECT_EQ(BestProductRate(dir.File(""), two, DType::kF32, {3e9, 512}).flops,
            3e9);
}

}  // namespace
}  // namespace zero
