#include <cmath>
#include <vector>

#include "engine/nn/module.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

Parameter Normal(const std::string& name, float std) {
  Parameter parameter;
  parameter.name = name;
  parameter.init = {.std = std};
  return parameter;
}

std::vector<float> Values(const Parameter& parameter, uint64_t seed,
                          int64_t begin, int64_t count) {
  std::vector<float> values(count, -99.0f);
  InitialValues(parameter, seed, begin, count, values.data());
  return values;
}

TEST(InitialValuesTest, AreTheOnesOfTheFirstRelease) {
  // Computed independently, in float64 Python, from the definition:
  // Philox-4x32-10 under splitmix64(seed, FNV-1a(name)), Box-Muller. If this
  // fails, every published run starts from other weights.
  EXPECT_EQ(
      Values(Normal("embedding.wte", 0.02f), 1234, 0, 6),
      (std::vector<float>{0x1.7acdd2p-6f, 0x1.15e562p-6f, -0x1.62fd48p-7f,
                          -0x1.a8e28ap-7f, -0x1.00537ep-5f, -0x1.c526eep-6f}));
  EXPECT_EQ(
      Values(Normal("block.0.attn.qkv.weight", 0.02f), 1234, 0, 6),
      (std::vector<float>{0x1.7656b8p-9f, 0x1.337510p-6f, -0x1.eac844p-8f,
                          -0x1.1648fep-8f, 0x1.28177cp-8f, -0x1.43ca3ep-6f}));
  EXPECT_EQ(
      Values(Normal("embedding.wte", 0.02f), 1, 0, 3),
      (std::vector<float>{-0x1.1554fep-8f, 0x1.13dd70p-7f, 0x1.2e9292p-7f}));
}

TEST(InitialValuesTest, AnyCutGivesTheSameElements) {
  const Parameter parameter = Normal("p", 1.0f);
  const std::vector<float> whole = Values(parameter, 5, 0, 1023);
  for (int64_t begin : {0, 1, 2, 3, 4, 31, 33, 1022}) {
    for (int64_t count : {0, 1, 2, 3, 5, 64}) {
      if (begin + count > 1023) continue;
      const std::vector<float> part = Values(parameter, 5, begin, count);
      EXPECT_EQ(part, std::vector<float>(whole.begin() + begin,
                                         whole.begin() + begin + count))
          << begin << " + " << count;
    }
  }
}

TEST(InitialValuesTest, SeedAndNameChangeEverything) {
  const std::vector<float> base = Values(Normal("block.1.w", 1), 5, 0, 256);
  for (const auto& other : {Values(Normal("block.1.w", 1), 6, 0, 256),
                            Values(Normal("block.2.w", 1), 5, 0, 256)}) {
    int equal = 0;
    double product = 0;
    for (int i = 0; i < 256; ++i) {
      equal += base[i] == other[i];
      product += base[i] * other[i];
    }
    EXPECT_EQ(equal, 0);
    // Independent normals: the mean product has deviation 1/16.
    EXPECT_LT(std::fabs(product / 256), 5.0 / 16);
  }
}

TEST(InitialValuesTest, AreNormalWithTheStandardDeviation) {
  constexpr int64_t kCount = 1 << 20;
  const std::vector<float> values = Values(Normal("w", 0.02f), 1, 0, kCount);
  double sum = 0, squares = 0, fourth = 0, neighbours = 0;
  int64_t beyond_2 = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double z = values[i] / 0.02;
    sum += z;
    squares += z * z;
    fourth += z * z * z * z;
    beyond_2 += std::fabs(z) > 2;
    if (i > 0) neighbours += z * values[i - 1] / 0.02;
  }
  // Five deviations of each estimate: 1/sqrt(n), sqrt(2/n), sqrt(96/n).
  const double root = std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(sum / kCount, 0, 5 / root);
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(fourth / kCount, 3, 5 * std::sqrt(96.0) / root);
  EXPECT_NEAR(neighbours / kCount, 0, 5 / root);
  EXPECT_NEAR(static_cast<double>(beyond_2) / kCount, 0.0455003,
              5 * std::sqrt(0.0455 * 0.9545) / root);
}

TEST(InitialValuesTest, AConstantIsExact) {
  Parameter parameter;
  parameter.name = "norm.weight";
  parameter.init = {.value = 1};
  EXPECT_EQ(Values(parameter, 3, 17, 5), std::vector<float>(5, 1.0f));
}

}  // namespace
}  // namespace zero
