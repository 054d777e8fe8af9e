#include "kernels/rounding.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

uint16_t Round(DType dtype, float value, uint32_t word) {
  return dtype == DType::kBF16 ? StochasticBF16(value, word)
                               : StochasticF16(value, word);
}
float ToFloat(DType dtype, uint16_t bits) {
  return dtype == DType::kBF16 ? BF16ToF32(bits) : F16ToF32(bits);
}
constexpr DType kNarrow[] = {DType::kBF16, DType::kF16};

TEST(RoundingTest, EveryExactValueStays) {
  for (const DType dtype : kNarrow) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const float value = ToFloat(dtype, static_cast<uint16_t>(bits));
      if (std::isnan(value)) continue;
      for (const uint32_t word : {0u, 0xffffffffu, 0x12345678u}) {
        ASSERT_EQ(Round(dtype, value, word), bits) << DTypeName(dtype);
      }
    }
  }
}

TEST(RoundingTest, NanIsQuietAndInfinityStays) {
  const float infinity = std::numeric_limits<float>::infinity();
  float smallest, largest;  // of the payloads
  const uint32_t bits[] = {0x7f800001u, 0xffffffffu};
  std::memcpy(&smallest, bits, 4);
  std::memcpy(&largest, bits + 1, 4);
  for (const DType dtype : kNarrow) {
    for (const uint32_t word : {0u, 0xffffffffu}) {
      EXPECT_TRUE(std::isnan(ToFloat(dtype, Round(dtype, smallest, word))));
      EXPECT_TRUE(std::isnan(ToFloat(dtype, Round(dtype, largest, word))));
      EXPECT_EQ(ToFloat(dtype, Round(dtype, infinity, word)), infinity);
      EXPECT_EQ(ToFloat(dtype, Round(dtype, -infinity, word)), -infinity);
    }
  }
  EXPECT_EQ(F16ToF32(StochasticF16(70000.0f, 0)), infinity);
  EXPECT_EQ(F16ToF32(StochasticF16(65519.0f, 0)), 65504.0f);
  EXPECT_EQ(F16ToF32(StochasticF16(65519.0f, 0xffffffffu)), infinity);
}

// Ties go away from zero; a halved master is joined to the bit.
TEST(RoundingTest, EveryHalfOfAMasterJoinsTheOther) {
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower :
         {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, upper * 40503u % 65536}) {
      const float master = std::bit_cast<float>(upper << 16 | lower);
      const auto [param, rest] = SplitMaster(master);
      const float joined = JoinMaster(param, rest);
      if (std::isnan(master)) {
        ASSERT_TRUE(std::isnan(BF16ToF32(param)) && std::isnan(joined));
        ASSERT_EQ(std::signbit(joined), std::signbit(master));
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(joined), upper << 16 | lower);
        ASSERT_EQ(param, upper + (lower >= 0x8000));
        if (lower != 0x8000) {
          ASSERT_EQ(param, F32ToBF16(master));
        }
      }
    }
  }
}

// Of 2^16 elements the share that went up is the part cut off, within five
// standard deviations of sqrt(q (1 - q) / n) <= 1 / 512.
TEST(RoundingTest, MeanIsTheValueInEveryRangeOfExponents) {
  constexpr int64_t kCount = 1 << 16;
  for (const DType dtype : kNarrow) {
    // fp16's subnormals are below 6.1e-5, and below 6e-8 it is 0 or one step.
    for (const float value : {1.0f, 0.7f, -3.1f, 1000.3f, 6.2e-5f, 3.3e-5f,
                              -1.7e-6f, 9.1e-8f, 2.2e-8f}) {
      for (const float nudge : {1.0001f, 1.001f, 1.0037f}) {
        const float x = value * nudge;
        const float low = ToFloat(dtype, Round(dtype, x, 0));
        const float high = ToFloat(dtype, Round(dtype, x, 0xffffffffu));
        ASSERT_LE(std::abs(low), std::abs(x));
        ASSERT_GE(std::abs(high), std::abs(x));
        if (low == high) continue;
        int64_t up = 0;
        for (int64_t i = 0; i < kCount; ++i) {
          const uint16_t bits = Round(dtype, x, RoundingWord(99, i));
          const float rounded = ToFloat(dtype, bits);
          ASSERT_TRUE(rounded == low || rounded == high);
          up += rounded == high;
        }
        const double want = (double{x} - low) / (double{high} - low);
        EXPECT_NEAR(static_cast<double>(up) / kCount, want, 5.0 / 512)
            << DTypeName(dtype) << " " << x;
      }
    }
  }
}

// A step of a thousandth of a unit in the last place is lost by rounding to
// nearest; here the parameters follow it on the average.
TEST(RoundingTest, StepsBelowAHalfUlpAddUpOverManyElements) {
  constexpr int64_t kCount = 1 << 16;
  const float x = 1.0f + std::ldexp(1.0f, -7) / 1024;
  EXPECT_EQ(BF16ToF32(F32ToBF16(x)), 1.0f);
  double sum = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    sum += BF16ToF32(StochasticBF16(x, RoundingWord(5, i))) - 1.0;
  }
  // Up with q = 1/1024: deviation of the mean ulp * sqrt(q / n) = 1.2e-4 ulp.
  EXPECT_NEAR(sum / kCount * 128, 1.0 / 1024, 5 * 1.2e-4);
}

TEST(RoundingTest, WordsOfNeighboursAreOneBlock) {
  for (const uint64_t element : {uint64_t{0}, uint64_t{4}, uint64_t{3} << 40}) {
    const PhiloxBlock block = Philox(7, element / 4, 0);
    for (int k = 0; k < 4; ++k) {
      EXPECT_EQ(RoundingWord(7, element + k), block.x[k]);
    }
  }
}

}  // namespace
}  // namespace zero
