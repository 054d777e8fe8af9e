#include "kernels/dtype.h"

#include <bit>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace zero {
namespace {

TEST(DTypeTest, BytesAndNamesOfAll) {
  EXPECT_EQ(DTypeBytes(DType::kF64), 8u);
  EXPECT_EQ(DTypeBytes(DType::kBF16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kU8), 1u);
  EXPECT_STREQ(DTypeName(DType::kF32), "fp32");
  EXPECT_STREQ(DTypeName(DType::kI32), "int32");
  EXPECT_TRUE(IsFloat(DType::kF16));
  EXPECT_FALSE(IsFloat(DType::kU16));
}

TEST(DTypeTest, Every16BitPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float bf16 = BF16ToF32(half), fp16 = F16ToF32(half);
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(BF16ToF32(F32ToBF16(bf16))));
    } else {
      EXPECT_EQ(F32ToBF16(bf16), half);
    }
    if (std::isnan(fp16)) {
      EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(fp16))));
    } else {
      EXPECT_EQ(F32ToF16(fp16), half);
    }
  }
}

// Between two neighbours: below the middle down, above it up, in the middle to
// the even one; the next after the largest finite value is infinity.
void CheckRounding(uint16_t (*round)(float), float (*widen)(uint16_t),
                   uint32_t infinity, double largest_step) {
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const double low = widen(static_cast<uint16_t>(bits));
    const double high = bits + 1 == infinity
                            ? low + largest_step
                            : widen(static_cast<uint16_t>(bits + 1));
    const float middle = static_cast<float>((low + high) / 2);
    if (std::isinf(middle)) continue;
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(round(middle), even);
    ASSERT_EQ(round(-middle), even | 0x8000u);
    ASSERT_EQ(round(std::nextafter(middle, 0.0f)), bits);
    const float above =
        std::nextafter(middle, std::numeric_limits<float>::infinity());
    if (std::isinf(above)) continue;
    ASSERT_EQ(round(above), bits + 1);
  }
}

TEST(DTypeTest, RoundsToNearestEvenBetweenAllNeighbours) {
  CheckRounding(F32ToBF16, BF16ToF32, 0x7f80, std::ldexp(1.0, 120));
  CheckRounding(F32ToF16, F16ToF32, 0x7c00, 32);
}

TEST(DTypeTest, NaNStaysNaNWhateverItsPayload) {
  for (uint32_t payload = 1; payload < 0x800000; payload = payload * 3 + 1) {
    const float nan = std::bit_cast<float>(0x7f800000u | payload);
    EXPECT_TRUE(std::isnan(BF16ToF32(F32ToBF16(nan)))) << payload;
    EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(nan)))) << payload;
  }
}

}  // namespace
}  // namespace zero
