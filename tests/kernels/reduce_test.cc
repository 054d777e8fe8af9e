#include <limits>

#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Written as reduce.h documents the order, in plain code.
double DocumentedSum(const Array& x) {
  double total = 0;
  for (int64_t run = 0; run < x.size(); run += 256 * 64) {
    double run_sum = 0;
    const int64_t run_end = std::min<int64_t>(x.size(), run + 256 * 64);
    for (int64_t block = run; block < run_end; block += 64) {
      double lane[8] = {};
      for (int64_t k = 0; k < 64 && block + k < x.size(); ++k) {
        lane[k % 8] = std::fma(x[block + k], x[block + k], lane[k % 8]);
      }
      run_sum += ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
                 ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
    total += run_sum;
  }
  return total;
}

TEST(SumSquaresTest, HasTheDocumentedBitsOnEveryPathAndThreadCount) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t n : {0, 1, 31, 33, 63, 64, 65, 1023, 16385, 200003}) {
      const Array x = Array::Normal(dtype, n, 1);
      const double want = DocumentedSum(x);
      ForEachPath([&](const Path& path) {
        double sum = -1;
        path.ops.SumSquares(path.stream, {x.vector(), &sum});
        EXPECT_EQ(sum, want) << DTypeName(dtype) << " " << n;
      });
    }
  }
}

TEST(SumSquaresTest, MoreRunsThanFitOnTheStackKeepTheirOrder) {
  // 1024 runs of 16384 elements are summed at a time.
  const int64_t n = 1024 * 16384 + 12345;
  Array x(DType::kBF16, n);
  for (int64_t i = 0; i < n; ++i) x.Set(i, 1.0 + 1e-3 * (i % 1009));
  const double want = DocumentedSum(x);
  for (const int threads : {1, 2}) {
    const auto device = MakeCpuDevice(threads);
    const auto stream = device->MakeStream(StreamRole::kCompute);
    double sum = 0;
    device->ops().SumSquares(*stream, {x.vector(), &sum});
    EXPECT_EQ(sum, want);
  }
}

TEST(SumTest, AddsInOrder) {
  OnPath([](const Path& path) {
    // From left to right the small one is lost at once; else it would stay.
    const double values[] = {1e17, 1, -1e17, 3};
    double sum = -1;
    path.ops.Sum(path.stream, {.src = values, .size = 4, .out = &sum});
    EXPECT_EQ(sum, 3);
    path.ops.Sum(path.stream, {.src = values, .size = 0, .out = &sum});
    EXPECT_EQ(sum, 0);
  });
}

TEST(SumSquaresTest, LargestFloatsDoNotOverflowAndNonFiniteShows) {
  ForEachPath([](const Path& path) {
    Array x(DType::kF32, 1000);
    for (int i = 0; i < 1000; ++i) x.Set(i, 3.4e38f);
    double sum = 0;
    path.ops.SumSquares(path.stream, {x.vector(), &sum});
    // 1000 roundings of half an ulp at most.
    EXPECT_NEAR(sum / (1000 * std::pow(double{3.4e38f}, 2)), 1, 1.2e-13);
    for (const float bad : {kInfinity, -kInfinity, NAN}) {
      x.Set(500, bad);
      path.ops.SumSquares(path.stream, {x.vector(), &sum});
      EXPECT_FALSE(std::isfinite(sum));
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
        int64_t count = -1;
        path.ops.CountNonFinite(path.stream, {x.vector(), &count});
        EXPECT_EQ(count, want) << DTypeName(dtype) << " " << n;
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
    int64_t count = -1;
    path.ops.CountNonFinite(path.stream, {x.vector(), &count});
    EXPECT_EQ(count, 0);
  });
}

struct Clipped {
  float norm = -1;
  float scale = -1;
  uint32_t found = 7;
};
Clipped Clip(double sum_squares, float max_norm, float inverse_scale) {
  Clipped c;
  OnPath([&](const Path& path) {
    path.ops.Clip(path.stream, {&sum_squares, max_norm, inverse_scale, &c.norm,
                              &c.scale, &c.found});
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
  // A norm beyond fp32 is not finite as it is reported.
  EXPECT_EQ(Clip(1e100, 1, 1).found, 1u);
}

}  // namespace
}  // namespace zero
