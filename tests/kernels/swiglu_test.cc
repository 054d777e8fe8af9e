#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

double Silu(double g) { return g / (1 + std::exp(-g)); }

struct Case {
  int64_t rows, width, extra;  // extra: padding of the leading dimensions
};
constexpr Case kCases[] = {{0, 8, 0},  {1, 1, 0},    {3, 31, 0},
                           {5, 33, 7}, {2, 1023, 1}, {300, 70, 0}};

TEST(SwigluTest, ForwardIsSiluOfTheGateTimesUp) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Case& c : kCases) {
        const int64_t ldx = 2 * c.width + c.extra;
        const int64_t ldy = c.width + c.extra;
        Array x = Array::Normal(dtype, c.rows * ldx, 1, 2.0);
        Array y(dtype, c.rows * ldy);
        path.ops.SwigluForward(path.stream, {x.matrix(c.rows, 2 * c.width, ldx),
                                             y.matrix(c.rows, c.width, ldy)});
        for (int64_t r = 0; r < c.rows; ++r) {
          for (int64_t i = 0; i < c.width; ++i) {
            const double up = x[r * ldx + c.width + i];
            const double want = Silu(x[r * ldx + i]) * up;
            // Sigmoid 3 ulp, two products, one rounding to storage.
            ASSERT_NEAR(
                y[r * ldy + i], want,
                std::abs(want) * (8 * HalfUlp(DType::kF32) + HalfUlp(dtype)) +
                    TinyStep(dtype));
          }
          for (int64_t i = c.width; i < ldy; ++i) {
            ASSERT_EQ(y[r * ldy + i], 0) << "wrote into the padding";
          }
        }
      }
    }
  });
}

TEST(SwigluTest, BackwardIsTheNumericalDerivativeAndMayBeInPlace) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Case& c : kCases) {
        const int64_t ldx = 2 * c.width + c.extra;
        const int64_t ldy = c.width + c.extra;
        Array x = Array::Normal(dtype, c.rows * ldx, 2, 2.0);
        Array dy = Array::Normal(dtype, c.rows * ldy, 3);
        Array dx = x;
        path.ops.SwigluBackward(path.stream,
                                {x.matrix(c.rows, 2 * c.width, ldx),
                                 dy.matrix(c.rows, c.width, ldy),
                                 dx.matrix(c.rows, 2 * c.width, ldx)});
        Array in_place = x;
        const Matrix same = in_place.matrix(c.rows, 2 * c.width, ldx);
        path.ops.SwigluBackward(path.stream,
                                {same, dy.matrix(c.rows, c.width, ldy), same});
        EXPECT_TRUE(in_place.SameBits(dx));
        for (int64_t r = 0; r < c.rows; ++r) {
          for (int64_t i = 0; i < c.width; ++i) {
            const double gate = x[r * ldx + i];
            const double up = x[r * ldx + c.width + i];
            const double grad = dy[r * ldy + i];
            const double dgate = grad * up * NumericalDerivative(Silu, gate);
            const double dup = grad * Silu(gate);
            // silu' is a sum of terms of size <= 1.1, hence the absolute part;
            // 1e-9 is the difference quotient's own error.
            const double part = 8 * HalfUlp(DType::kF32) * std::abs(grad * up);
            ASSERT_NEAR(dx[r * ldx + i], dgate,
                        part + std::abs(dgate) * HalfUlp(dtype) +
                            TinyStep(dtype) + 1e-9 * std::abs(grad * up));
            ASSERT_NEAR(
                dx[r * ldx + c.width + i], dup,
                std::abs(dup) * (8 * HalfUlp(DType::kF32) + HalfUlp(dtype)) +
                    TinyStep(dtype));
          }
        }
      }
    }
  });
}

TEST(SwigluTest, ExtremeGatesSaturate) {
  ForEachPath([](const Path& path) {
    Array x(DType::kF32, 4);
    const double gates[] = {200, -200};
    for (int i = 0; i < 2; ++i) {
      x.Set(i, gates[i]);
      x.Set(2 + i, 3);
    }
    Array y(DType::kF32, 2);
    path.ops.SwigluForward(path.stream, {x.matrix(1, 4, 4), y.matrix(1, 2, 2)});
    EXPECT_EQ(y[0], 600);
    EXPECT_EQ(y[1], 0);
  });
}

}  // namespace
}  // namespace zero
