#include <algorithm>

#include "tests/kernels/kernel_test.h"
#include "tests/support/max_or_nan.h"

namespace zero {
namespace {

constexpr Gelu kKinds[] = {Gelu::kTanh, Gelu::kErf};

// Both written so that their float64 values keep a small relative error in the
// left tail: 1 + tanh u = 2 / (1 + e^-2u), 1 + erf z = erfc(-z).
double Reference(Gelu kind, double x) {
  if (kind == Gelu::kErf) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return x / (1 + std::exp(-2 * u));
}

double Derivative(Gelu kind, double x) {
  return NumericalDerivative([&](double t) { return Reference(kind, t); }, x);
}

// The errors that kernels/cpu/gelu-inl.h documents. Seen on [-8, 8] on the CPU:
// erf 3.6 ulp; tanh 2.1 ulp for x >= -1, and below it grows with |2u|, the
// argument of the exponential, whose own rounding error (1.5 half-ulps) is
// magnified by it. A GPU's exponential is good to 1 ulp and its reciprocal to
// 0.6: one more for erf; tanh has room for it.
double RelativeError(const Path& path, Gelu kind, double x) {
  const double ulp = std::ldexp(1.0, -23);
  if (kind == Gelu::kErf) {
    return (path.device.kind() == DeviceKind::kCuda ? 5 : 4) * ulp;
  }
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return (4 + (x < -1 ? 2 * std::abs(2 * u) : 0)) * ulp;
}

TEST(GeluTest, ForwardHasTheDocumentedRelativeError) {
  constexpr int64_t kCount = 160001;  // [-8, 8] in steps of 1e-4
  ForEachPath([](const Path& path) {
    for (const Gelu kind : kKinds) {
      Array x(DType::kF32, kCount);
      for (int64_t i = 0; i < kCount; ++i) x.Set(i, -8 + 1e-4 * i);
      Array y(DType::kF32, kCount);
      path.ops.GeluForward(path.stream, {kind, x.vector(), y.vector()});
      double worst = 0;
      double worst_right = 0;  // where x >= -1, in ulps
      for (int64_t i = 0; i < kCount; ++i) {
        const double want = Reference(kind, x[i]);
        const double error = std::abs(y[i] - want) / std::abs(want);
        if (want == 0) continue;
        worst = MaxOrNan(worst, error / RelativeError(path, kind, x[i]));
        if (x[i] >= -1) {
          worst_right = MaxOrNan(worst_right, std::ldexp(error, 23));
        }
      }
      EXPECT_LE(worst, 1) << (kind == Gelu::kTanh ? "tanh" : "erf");
      RecordProperty(kind == Gelu::kTanh ? "tanh_ulp" : "erf_ulp",
                     std::to_string(worst_right));
    }
  });
}

TEST(GeluTest, EveryDtypeIsRoundedOnceFromTheFp32Value) {
  ForEachPath([](const Path& path) {
    for (const Gelu kind : kKinds) {
      for (const DType dtype : kFloatTypes) {
        for (const int64_t n : {0, 1, 31, 33, 1023, 10007}) {
          const Array x = Array::Normal(dtype, n, 5, 2.0);
          Array y(dtype, n);
          path.ops.GeluForward(path.stream, {kind, x.vector(), y.vector()});
          for (int64_t i = 0; i < n; ++i) {
            const double want = Reference(kind, x[i]);
            ASSERT_NEAR(y[i], want,
                        std::abs(want) * (RelativeError(path, kind, x[i]) +
                                          HalfUlp(dtype)) +
                            TinyStep(dtype))
                << x[i];
          }
        }
      }
    }
  });
}

TEST(GeluTest, BackwardIsTheNumericalDerivative) {
  ForEachPath([](const Path& path) {
    for (const Gelu kind : kKinds) {
      for (const DType dtype : kFloatTypes) {
        for (const int64_t n : {1, 31, 33, 1023, 10007}) {
          const Array x = Array::Normal(dtype, n, 6, 2.0);
          const Array dy = Array::Normal(dtype, n, 7);
          Array dx(dtype, n);
          path.ops.GeluBackward(path.stream,
                                {kind, x.vector(), dy.vector(), dx.vector()});
          Array in_place = dy;
          path.ops.GeluBackward(
              path.stream,
              {kind, x.vector(), in_place.vector(), in_place.vector()});
          EXPECT_TRUE(in_place.SameBits(dx));
          for (int64_t i = 0; i < n; ++i) {
            const double want = dy[i] * Derivative(kind, x[i]);
            // The derivative is a sum of terms of size <= 1.2; 1e-9 is the
            // difference quotient's own error.
            const double error = 6 * std::ldexp(1.0, -23) * std::abs(dy[i]);
            ASSERT_NEAR(dx[i], want,
                        error + std::abs(want) * HalfUlp(dtype) +
                            TinyStep(dtype) + 1e-9)
                << x[i];
          }
        }
      }
    }
  });
}

TEST(GeluTest, LargeArgumentsSaturateWithoutNan) {
  ForEachPath([](const Path& path) {
    for (const Gelu kind : kKinds) {
      Array x(DType::kF32, 6);
      const double values[] = {20, -20, 1e20, -1e20, 3e38, -3e38};
      Array dy(DType::kF32, 6);
      for (int i = 0; i < 6; ++i) {
        x.Set(i, values[i]);
        dy.Set(i, 1);
      }
      Array y(DType::kF32, 6);
      Array dx(DType::kF32, 6);
      path.ops.GeluForward(path.stream, {kind, x.vector(), y.vector()});
      path.ops.GeluBackward(path.stream,
                            {kind, x.vector(), dy.vector(), dx.vector()});
      for (int i = 0; i < 6; ++i) {
        EXPECT_EQ(y[i], x[i] > 0 ? x[i] : 0) << x[i];
        EXPECT_EQ(dx[i], x[i] > 0 ? 1 : 0) << x[i];
      }
    }
  });
}

TEST(GeluTest, NanStaysNan) {
  ForEachPath([](const Path& path) {
    for (const Gelu kind : kKinds) {
      Array x(DType::kF32, 9);
      for (int i = 0; i < 9; ++i) x.Set(i, NAN);
      Array y(DType::kF32, 9);
      path.ops.GeluForward(path.stream, {kind, x.vector(), y.vector()});
      for (int i = 0; i < 9; ++i) EXPECT_TRUE(std::isnan(y[i]));
    }
  });
}

}  // namespace
}  // namespace zero
