#include <limits>

#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

// Sizes around a vector, a whole grain and two threads' work.
constexpr int64_t kSizes[] = {0, 1, 31, 33, 1023, 10007};

TEST(AddTest, IsTheRoundedSumAndMayBeInPlace) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t n : kSizes) {
        const Array a = Array::Normal(dtype, n, 1);
        const Array b = Array::Normal(dtype, n, 2);
        Array y(dtype, n);
        path.ops.Add(path.stream, {a.vector(), b.vector(), y.vector()});
        Array in_place = a;
        path.ops.Add(path.stream,
                     {in_place.vector(), b.vector(), in_place.vector()});
        Array want(dtype, n);
        for (int64_t i = 0; i < n; ++i) want.Set(i, a[i] + b[i]);
        EXPECT_TRUE(y.SameBits(want)) << DTypeName(dtype) << " " << n;
        EXPECT_TRUE(in_place.SameBits(want)) << DTypeName(dtype) << " " << n;
      }
    }
  });
}

TEST(CastTest, RoundsToNearestEvenToAndFromFp32) {
  ForEachPath([](const Path& path) {
    for (const DType from : kFloatTypes) {
      for (const DType to : kFloatTypes) {
        if (from != to && from != DType::kF32 && to != DType::kF32) continue;
        for (const int64_t n : kSizes) {
          // Spread over many binades, fp16's subnormals among them.
          Array src = Array::Normal(from, n, 3);
          for (int64_t i = 0; i < n; ++i) {
            src.Set(i, std::ldexp(src[i], static_cast<int>(i % 40) - 28));
          }
          Array dst(to, n);
          path.ops.Cast(path.stream, {src.vector(), dst.vector()});
          Array want(to, n);
          for (int64_t i = 0; i < n; ++i) want.Set(i, src[i]);
          EXPECT_TRUE(dst.SameBits(want))
              << DTypeName(from) << " -> " << DTypeName(to) << " " << n;
        }
      }
    }
  });
}

TEST(CastDeathTest, OtherPairsAreRefusedByName) {
  OnPath([](const Path& path) {
    Array src(DType::kBF16, 3), dst(DType::kF16, 3);
    EXPECT_DEATH(path.ops.Cast(path.stream, {src.vector(), dst.vector()}),
                 "Cast: bf16 to fp16; want fp32 to or from");
  });
}

TEST(CastTest, TiesGoToEvenAndOverflowToInfinity) {
  // Highway 1.0.3's own bf16 conversion truncates all of these.
  const std::vector<std::pair<float, float>> bf16 = {
      {1.0f + 0x1p-8f, 1.0f},                    // tie, even below
      {1.0f + 3 * 0x1p-8f, 1.0f + 4 * 0x1p-8f},  // tie, even above
      {1.0f + 0x1p-8f + 0x1p-23f, 1.0f + 0x1p-7f},
      {3.4028235e38f, std::numeric_limits<float>::infinity()},
      {-0.0f, -0.0f},
      {0x1p-140f, 0.0f},      // below half of the smallest subnormal
      {0x1p-133f, 0x1p-133f}  // the smallest subnormal
  };
  const std::vector<std::pair<float, float>> fp16 = {
      {1.0f + 0x1p-11f, 1.0f},
      {1.0f + 3 * 0x1p-11f, 1.0f + 4 * 0x1p-11f},
      {65520.0f, std::numeric_limits<float>::infinity()},
      {65519.0f, 65504.0f},
      {-0.0f, -0.0f},
      {0x1p-25f, 0.0f},  // tie, even below
      {3 * 0x1p-25f, 2 * 0x1p-24f},
  };
  ForEachPath([&](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const auto& [value, rounded] : dtype == DType::kBF16 ? bf16 : fp16) {
        // Alone (a partial vector) and among 64 (whole vectors).
        for (const int64_t n : {1, 64}) {
          Array src(DType::kF32, n);
          for (int64_t i = 0; i < n; ++i) src.Set(i, value);
          Array dst(dtype, n);
          path.ops.Cast(path.stream, {src.vector(), dst.vector()});
          for (int64_t i = 0; i < n; ++i) {
            EXPECT_EQ(dst[i], rounded) << DTypeName(dtype) << " " << value;
            EXPECT_EQ(std::signbit(dst[i]), std::signbit(rounded));
          }
        }
      }
    }
  });
}

TEST(CastTest, NanStaysNan) {
  const float nans[] = {std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::signaling_NaN(),
                        -std::numeric_limits<float>::quiet_NaN()};
  ForEachPath([&](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Array src(DType::kF32, 3);
      std::memcpy(src.data(), nans, sizeof(nans));
      // The smallest payload, which rounding must not turn into infinity.
      const uint32_t payload = 0x7F800001u;
      std::memcpy(src.data(), &payload, 4);
      Array dst(dtype, 3);
      path.ops.Cast(path.stream, {src.vector(), dst.vector()});
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(dst[i]));
    }
  });
}

TEST(CastTest, EverySixteenBitPatternSurvivesARoundTrip) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Array src(dtype, 65536);
      auto* bits = static_cast<uint16_t*>(src.data());
      for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
      Array wide(DType::kF32, 65536);
      Array back(dtype, 65536);
      path.ops.Cast(path.stream, {src.vector(), wide.vector()});
      path.ops.Cast(path.stream, {wide.vector(), back.vector()});
      const auto* result = static_cast<const uint16_t*>(back.data());
      int64_t wrong = 0;
      for (int i = 0; i < 65536; ++i) {
        if (std::isnan(src[i])) {
          wrong += !std::isnan(back[i]);
        } else {
          wrong += bits[i] != result[i];
        }
      }
      EXPECT_EQ(wrong, 0) << DTypeName(dtype);
    }
  });
}

// If vectors begin at an odd element, memory moves one element at a time.
TEST(ElementwiseTest, OddAddressesChangeNoBit) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      constexpr int64_t kCount = 100;
      const int64_t bytes = static_cast<int64_t>(DTypeBytes(dtype));
      Array a = Array::Normal(dtype, kCount + 1, 5);
      Array y(dtype, kCount + 1), wide(DType::kF32, kCount);
      const auto from_one = [&](Array& array) -> Vector {
        return {static_cast<char*>(array.data()) + bytes, dtype, kCount};
      };
      path.ops.Add(path.stream, {from_one(a), from_one(a), from_one(y)});
      path.ops.Cast(path.stream, {from_one(a), wide.vector()});
      EXPECT_EQ(y[0], 0);
      for (int64_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(y[i + 1], 2 * a[i + 1]);
        ASSERT_EQ(wide[i], a[i + 1]);
      }
      path.ops.Fill(path.stream, {from_one(y), 3});
      EXPECT_EQ(y[0], 0);
      for (int64_t i = 0; i < kCount; ++i) ASSERT_EQ(y[i + 1], 3);
    }
  });
}

TEST(FillTest, WritesTheRoundedValueAndNothingBeyond) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const double value : {0.0, -0.0, 1.0, 0.1}) {
        for (const int64_t n : kSizes) {
          Array dst = Array::Normal(dtype, n + 1, 4);
          const double guard = dst[n];
          path.ops.Fill(path.stream,
                        {{dst.data(), dtype, n}, static_cast<float>(value)});
          Array want(dtype, n + 1);
          for (int64_t i = 0; i < n; ++i) want.Set(i, value);
          want.Set(n, guard);
          EXPECT_TRUE(dst.SameBits(want)) << DTypeName(dtype) << " " << n;
        }
      }
    }
  });
}

TEST(FillTest, FillsIntegersAndDoubles) {
  OnPath([](const Path& path) {
    TestVector<int64_t> i64(5, 7);
    TestVector<int32_t> i32(5, 7);
    TestVector<double> f64(5, 7);
    TestVector<uint8_t> u8(20, 7);
    TestVector<uint16_t> u16(20, 7);
    path.ops.Fill(path.stream, {{i64.data(), DType::kI64, 4}, -2.0f});
    path.ops.Fill(path.stream, {{i32.data(), DType::kI32, 4}, 3.0f});
    path.ops.Fill(path.stream, {{f64.data(), DType::kF64, 4}, 0.5f});
    path.ops.Fill(path.stream, {{u8.data(), DType::kU8, 19}, 9.0f});
    path.ops.Fill(path.stream, {{u16.data(), DType::kU16, 19}, 9.0f});
    EXPECT_EQ(i64, (TestVector<int64_t>{-2, -2, -2, -2, 7}));
    EXPECT_EQ(i32, (TestVector<int32_t>{3, 3, 3, 3, 7}));
    EXPECT_EQ(f64, (TestVector<double>{0.5, 0.5, 0.5, 0.5, 7}));
    for (int i = 0; i < 19; ++i) {
      EXPECT_EQ(u8[i], 9);
      EXPECT_EQ(u16[i], 9);
    }
    EXPECT_EQ(u8[19], 7);
    EXPECT_EQ(u16[19], 7);
  });
}

}  // namespace
}  // namespace zero
