#include "kernels/philox.h"
#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

// Random123's known answers (kat_vectors of Salmon et al. 2011).
TEST(PhiloxTest, MatchesRandom123KnownAnswers) {
  const PhiloxBlock zeros = Philox(0, 0, 0);
  EXPECT_EQ(zeros.x[0], 0x6627e8d5u);
  EXPECT_EQ(zeros.x[1], 0xe169c58du);
  EXPECT_EQ(zeros.x[2], 0xbc57ac4cu);
  EXPECT_EQ(zeros.x[3], 0x9b00dbd8u);
  const PhiloxBlock ones = Philox(~0ull, ~0ull, ~0ull);
  EXPECT_EQ(ones.x[0], 0x408f276du);
  EXPECT_EQ(ones.x[1], 0x41c83b0eu);
  EXPECT_EQ(ones.x[2], 0xa20bc7c6u);
  EXPECT_EQ(ones.x[3], 0x6d5451fdu);
  // counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0.
  const PhiloxBlock pi = Philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull,
                                0x0370734413198a2eull);
  EXPECT_EQ(pi.x[0], 0xd16cfe09u);
  EXPECT_EQ(pi.x[1], 0x94fdccebu);
  EXPECT_EQ(pi.x[2], 0x5001e420u);
  EXPECT_EQ(pi.x[3], 0x24126ea1u);
}

bool Keeps(uint64_t key, int64_t row_id, int64_t column, float p) {
  const PhiloxBlock block =
      Philox(key, static_cast<uint64_t>(column / 4), row_id);
  return UniformFromBits(block.x[column % 4]) >= p;
}

TEST(DropoutTest, MaskIsAFunctionOfKeyRowIdAndColumn) {
  constexpr uint64_t kKey = 0x0123456789abcdefull;
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t width : {1, 31, 33, 1023}) {
        const TestVector<int64_t> ids = {0, 7, int64_t{1} << 40, 3, 7};
        const int64_t rows = 5, ld = width + 3;
        const float p = 0.3f;
        Array x = Array::Normal(dtype, rows * ld, 1);
        Array y(dtype, rows * ld);
        path.ops.Dropout(path.stream,
                         {x.matrix(rows, width, ld), y.matrix(rows, width, ld),
                          p, kKey, ids.data()});
        Array want(dtype, rows * ld);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < width; ++i) {
            if (!Keeps(kKey, ids[r], i, p)) continue;
            const float scale = 1.0f / (1.0f - p);
            want.Set(r * ld + i, static_cast<float>(x[r * ld + i]) * scale);
          }
        }
        EXPECT_TRUE(y.SameBits(want)) << DTypeName(dtype) << " " << width;
        path.ops.Dropout(path.stream,
                         {x.matrix(rows, width, ld), x.matrix(rows, width, ld),
                          p, kKey, ids.data()});
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < width; ++i) {
            ASSERT_EQ(x[r * ld + i], y[r * ld + i]) << "in place";
          }
        }
      }
    }
  });
}

TEST(DropoutTest, SplittingTheRowsOverRanksChangesNoElement) {
  OnPath([](const Path& path) {
    constexpr int64_t kRows = 8, kWidth = 100;
    const TestVector<int64_t> ids = {0, 1, 2, 3, 4, 5, 6, 7};
    Array x = Array::Normal(DType::kF32, kRows * kWidth, 2);
    Array whole(DType::kF32, kRows * kWidth);
    Array halves(DType::kF32, kRows * kWidth);
    path.ops.Dropout(path.stream, {x.matrix(kRows, kWidth, kWidth),
                                   whole.matrix(kRows, kWidth, kWidth), 0.5f, 9,
                                   ids.data()});
    for (const int64_t begin : {0, 4}) {
      path.ops.Dropout(
          path.stream,
          {{x.floats() + begin * kWidth, DType::kF32, 4, kWidth, kWidth},
           {halves.floats() + begin * kWidth, DType::kF32, 4, kWidth, kWidth},
           0.5f,
           9,
           ids.data() + begin});
    }
    EXPECT_TRUE(whole.SameBits(halves));
  });
}

TEST(DropoutTest, KeepsTheExpectedShareAndTheMean) {
  OnPath([](const Path& path) {
    constexpr int64_t kRows = 64, kWidth = 4096;
    TestVector<int64_t> ids(kRows);
    for (int64_t r = 0; r < kRows; ++r) ids[r] = r;
    Array x(DType::kF32, kRows * kWidth);
    for (int64_t i = 0; i < x.size(); ++i) x.Set(i, 1);
    Array y(DType::kF32, kRows * kWidth);
    path.ops.Dropout(path.stream,
                     {x.matrix(kRows, kWidth, kWidth),
                      y.matrix(kRows, kWidth, kWidth), 0.1f, 77, ids.data()});
    double sum = 0;
    for (int64_t i = 0; i < y.size(); ++i) sum += y[i];
    // Standard deviation of the mean: sqrt(p / (1 - p) / n) = 6.5e-4; 5 of it.
    EXPECT_NEAR(sum / static_cast<double>(y.size()), 1, 3.3e-3);
  });
}

TEST(DropoutTest, ProbabilityZeroIsTheIdentityAndOneDropsEverything) {
  ForEachPath([](const Path& path) {
    const TestVector<int64_t> id = {5};
    Array x = Array::Normal(DType::kF32, 33, 3);
    Array y(DType::kF32, 33);
    path.ops.Dropout(path.stream, {x.matrix(1, 33, 33), y.matrix(1, 33, 33),
                                   0.0f, 1, id.data()});
    EXPECT_TRUE(y.SameBits(x));
    path.ops.Dropout(path.stream, {x.matrix(1, 33, 33), y.matrix(1, 33, 33),
                                   1.0f, 1, id.data()});
    EXPECT_TRUE(y.SameBits(Array(DType::kF32, 33)));
  });
}

}  // namespace
}  // namespace zero
