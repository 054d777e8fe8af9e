#include <limits>

#include "tests/kernels/sum_squares.h"

namespace zero {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(SumSquaresTest, HasTheDocumentedBitsOnEveryPathAndThreadCount) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t n : {0, 1, 31, 33, 63, 64, 65, 1023, 16385, 200003}) {
      const Array x = Array::Normal(dtype, n, 1);
      const double want = DocumentedSum(x);
      ForEachPath([&](const Path& path) {
        EXPECT_EQ(SumByOp(path.ops, path.stream, x.vector()), want)
            << DTypeName(dtype) << " " << n;
      });
    }
  }
}

TEST(SumSquaresTest, OddAddressesChangeNoBit) {
  for (const DType dtype : kFloatTypes) {
    const Array x = Array::Normal(dtype, 3001, 2);
    Array rest(dtype, 3000);
    for (int64_t i = 0; i < 3000; ++i) rest.Set(i, x[i + 1]);
    const double want = DocumentedSum(rest);
    const void* const odd =
        static_cast<const char*>(x.data()) + DTypeBytes(dtype);
    ForEachPath([&](const Path& path) {
      EXPECT_EQ(SumByOp(path.ops, path.stream, {odd, dtype, 3000}), want);
      TestVector<int64_t> count = {-1};
      path.ops.CountNonFinite(path.stream, {{odd, dtype, 3000}, count.data()});
      EXPECT_EQ(count[0], 0);
    });
  }
}

// More than go into one launch of a GPU, some empty, some of several runs.
TEST(SumSquaresTest, EachOfManySpansHasTheBitsThatItHasAlone) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<Array> spans;
    for (int64_t i = 0; i < 300; ++i) {
      const int64_t size = i % 50 == 49 ? 30'011 + i : i % 7 * 41 + i % 2 * i;
      spans.push_back(Array::Normal(dtype, size, static_cast<uint64_t>(i)));
    }
    const auto run = [&](const Path& path) {
      TestVector<double> sums(2 * spans.size(), -1);
      std::vector<SquaredSpan> list;
      for (size_t i = 0; i < spans.size(); ++i) {
        list.push_back({spans[i].vector(), &sums[2 * i]});
      }
      path.ops.SumSquares(path.stream, {list});
      for (size_t i = 0; i < spans.size(); ++i) {
        EXPECT_EQ(sums[2 * i], DocumentedSum(spans[i])) << i;
        EXPECT_EQ(sums[2 * i + 1], -1) << i;
      }
      path.ops.SumSquares(path.stream, {});
    };
    ForEachPath(run);
  }
}

TEST(SumTest, AddsInOrder) {
  OnPath([](const Path& path) {
    // From left to right the small one is lost at once; else it would stay.
    const TestVector<double> values = {1e17, 1, -1e17, 3};
    TestVector<double> sum = {-1};
    path.ops.Sum(path.stream, {values.data(), 4, sum.data()});
    EXPECT_EQ(sum[0], 3);
    path.ops.Sum(path.stream, {values.data(), 0, sum.data()});
    EXPECT_EQ(sum[0], 0);
  });
}

TEST(SumTest, AddsManyInOrder) {
  OnPath([](const Path& path) {
    const Array noise = Array::Normal(DType::kF32, 1000, 1);
    TestVector<double> values(1000), sum(1);
    double want = 0;
    for (int i = 0; i < 1000; ++i) {
      values[i] = noise[i] / 3;
      want += values[i];
    }
    path.ops.Sum(path.stream, {values.data(), 1000, sum.data()});
    EXPECT_EQ(sum[0], want);
  });
}

TEST(SumSquaresTest, LargestFloatsDoNotOverflowAndNonFiniteShows) {
  ForEachPath([](const Path& path) {
    Array x(DType::kF32, 1000);
    for (int i = 0; i < 1000; ++i) x.Set(i, 3.4e38f);
    const double sum = SumByOp(path.ops, path.stream, x.vector());
    // 1000 roundings of half an ulp at most.
    EXPECT_NEAR(sum / (1000 * std::pow(double{3.4e38f}, 2)), 1, 1.2e-13);
    for (const float bad : {kInfinity, -kInfinity, NAN}) {
      x.Set(500, bad);
      EXPECT_FALSE(std::isfinite(SumByOp(path.ops, path.stream, x.vector())));
    }
  });
}

TEST(CountNonFiniteTest, CountsNansAndInfinitiesOfEveryDtype) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t n : {0, 1, 31, 33, 1023, 20011}) {
        Array x = Array::Normal(dtype, n, 3);
        int64_t want = 0;
        const float bad[] = {kInfinity, -kInfinity, NAN, -NAN};
        for (int64_t i = 0; i < n; i += 7) {
          x.Set(i, bad[want % 4]);
          ++want;
        }
        TestVector<int64_t> count = {-1};
        path.ops.CountNonFinite(path.stream, {x.vector(), count.data()});
        EXPECT_EQ(count[0], want) << DTypeName(dtype) << " " << n;
      }
    }
  });
}

TEST(CountNonFiniteTest, LargestAndSmallestFiniteNumbersAreFinite) {
  ForEachPath([](const Path& path) {
    Array x(DType::kF32, 4);
    x.Set(0, std::numeric_limits<float>::max());
    x.Set(1, -std::numeric_limits<float>::max());
    x.Set(2, std::numeric_limits<float>::denorm_min());
    TestVector<int64_t> count = {-1};
    path.ops.CountNonFinite(path.stream, {x.vector(), count.data()});
    EXPECT_EQ(count[0], 0);
  });
}

struct Clipped {
  float norm = -1;
  float scale = -1;
  uint32_t found = 7;
};
// `found`: the previous flag, which counts with `keep_found`.
Clipped Clip(double sum_squares, float max_norm, float inverse_scale,
             bool keep_found = false, uint32_t found = 7) {
  Clipped c;
  OnPath([&](const Path& path) {
    const TestVector<double> sum = {sum_squares};
    TestVector<Clipped> out(1);
    out[0].found = found;
    path.ops.Clip(path.stream, {.sum_squares = sum.data(),
                                .max_norm = max_norm,
                                .inverse_scale = inverse_scale,
                                .keep_found = keep_found,
                                .norm = &out[0].norm,
                                .grad_scale = &out[0].scale,
                                .found_non_finite = &out[0].found});
    c = out[0];
  });
  return c;
}

TEST(ClipTest, ScalesToTheLargestNormAsTorchDoes) {
  const Clipped c = Clip(25, 1, 1);
  EXPECT_EQ(c.norm, 5);
  EXPECT_EQ(c.scale, static_cast<float>(1 / (5 + 1e-6)));
  EXPECT_EQ(c.found, 0u);
}

TEST(ClipTest, IsTheIdentityBelowTheLargestNormAndWithoutOne) {
  EXPECT_EQ(Clip(25, 1e30f, 1).scale, 1);
  EXPECT_EQ(Clip(25, 6, 1).scale, 1);
  EXPECT_EQ(Clip(25, 0, 1).scale, 1);
  EXPECT_EQ(Clip(0, 1, 1).scale, 1);
}

TEST(ClipTest, UndoesTheLossScaleBeforeItClips) {
  const Clipped c = Clip(25 * 65536.0 * 65536.0, 2, 1 / 65536.0f);
  EXPECT_EQ(c.norm, 5);
  EXPECT_EQ(c.scale, static_cast<float>(2 / (5 + 1e-6) / 65536));
}

TEST(ClipTest, FindsNonFiniteNorms) {
  EXPECT_EQ(Clip(NAN, 1, 1).found, 1u);
  EXPECT_EQ(Clip(std::numeric_limits<double>::infinity(), 1, 1).found, 1u);
  // A norm beyond fp32 is reported as not finite.
  EXPECT_EQ(Clip(1e100, 1, 1).found, 1u);
}

TEST(ClipTest, WhatWasFoundStaysWhereItIsKept) {
  for (const double sum_squares : {25.0, 1e100}) {
    const bool finite = sum_squares == 25;
    for (const uint32_t found : {0u, 1u}) {
      const Clipped kept = Clip(sum_squares, 1, 1, /*keep_found=*/true, found);
      EXPECT_EQ(kept.found, finite ? found : 1u);
      const Clipped fresh = Clip(sum_squares, 1, 1, false, found);
      EXPECT_EQ(fresh.found, finite ? 0u : 1u);
      EXPECT_EQ(kept.norm, fresh.norm);
      EXPECT_EQ(kept.scale, fresh.scale);
    }
  }
}

}  // namespace
}  // namespace zero
