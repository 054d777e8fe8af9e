#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

constexpr int64_t kPositions = 50;

struct Tables {
  explicit Tables(int64_t half)
      : cos(DType::kF32, kPositions * half), sin(cos) {
    for (int64_t p = 0; p < kPositions; ++p) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle = p * std::pow(10000.0, -double(i) / double(half));
        cos.Set(p * half + i, std::cos(angle));
        sin.Set(p * half + i, std::sin(angle));
      }
    }
  }
  Array cos, sin;
};

struct Case {
  int64_t tokens, heads, width, extra;
};
constexpr Case kCases[] = {{0, 2, 8, 0},   {1, 1, 2, 0},   {5, 3, 62, 4},
                           {7, 2, 66, 0},  {40, 6, 64, 9}, {9, 3, 64, 8},
                           {3, 1, 1024, 0}};

RotaryArgs Args(const Case& c, Array& x, const TestVector<int32_t>& positions,
                Tables& tables, bool inverse) {
  RotaryArgs args;
  args.x = x.rows(c.tokens, c.heads, c.width, c.heads * c.width + c.extra);
  args.positions = positions.data();
  args.cos = tables.cos.floats();
  args.sin = tables.sin.floats();
  args.inverse = inverse;
  return args;
}

TestVector<int32_t> Positions(int64_t tokens) {
  TestVector<int32_t> positions(tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    positions[t] = static_cast<int32_t>((t * 13 + 5) % kPositions);
  }
  return positions;
}

TEST(RotaryTest, RotatesThePairsOfEachHead) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Case& c : kCases) {
        const int64_t half = c.width / 2;
        const int64_t stride = c.heads * c.width + c.extra;
        Tables tables(half);
        const TestVector<int32_t> positions = Positions(c.tokens);
        const Array x = Array::Normal(dtype, c.tokens * stride, 1);
        Array y = x;
        path.ops.Rotary(path.stream, Args(c, y, positions, tables, false));
        for (int64_t t = 0; t < c.tokens; ++t) {
          for (int64_t e = 0; e < stride; ++e) {
            const int64_t at = t * stride + e;
            if (e >= c.heads * c.width) {
              ASSERT_EQ(y[at], x[at]) << "wrote into the padding";
              continue;
            }
            const int64_t d = e % c.width;
            const int64_t angle = positions[t] * half + d % half;
            const double cos = tables.cos[angle], sin = tables.sin[angle];
            const double want = d < half ? x[at] * cos - x[at + half] * sin
                                         : x[at] * cos + x[at - half] * sin;
            // Two products of size <= 4.5 in fp32, one rounding to storage.
            ASSERT_NEAR(y[at], want,
                        9 * HalfUlp(DType::kF32) +
                            std::abs(want) * HalfUlp(dtype) + TinyStep(dtype));
          }
        }
      }
    }
  });
}

// <R x, y> = <x, R^T y>: the inverse is the adjoint, so the backward pass of a
// linear map, without a difference quotient's error.
TEST(RotaryTest, InverseIsTheBackwardPass) {
  ForEachPath([](const Path& path) {
    const Case c = {7, 3, 62, 5};
    const int64_t stride = c.heads * c.width + c.extra;
    Tables tables(c.width / 2);
    const TestVector<int32_t> positions = Positions(c.tokens);
    const Array x = Array::Normal(DType::kF32, c.tokens * stride, 2);
    const Array dy = Array::Normal(DType::kF32, c.tokens * stride, 3);
    Array y = x, dx = dy, back = x;
    path.ops.Rotary(path.stream, Args(c, y, positions, tables, false));
    path.ops.Rotary(path.stream, Args(c, dx, positions, tables, true));
    double forward = 0, backward = 0;
    for (int64_t i = 0; i < x.size(); ++i) {
      forward += y[i] * dy[i];
      backward += x[i] * dx[i];
    }
    // 1337 products with errors of about 1e-7 of random sign.
    EXPECT_NEAR(forward, backward, 1e-5);
    path.ops.Rotary(path.stream, Args(c, back, positions, tables, false));
    path.ops.Rotary(path.stream, Args(c, back, positions, tables, true));
    for (int64_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(back[i], x[i], 30 * HalfUlp(DType::kF32));
    }
  });
}

TEST(RotaryTest, PositionZeroIsTheIdentity) {
  ForEachPath([](const Path& path) {
    const Case c = {1, 4, 64, 0};
    Tables tables(32);
    const TestVector<int32_t> positions = {0};
    const Array x = Array::Normal(DType::kBF16, 4 * 64, 4);
    Array y = x;
    path.ops.Rotary(path.stream, Args(c, y, positions, tables, false));
    EXPECT_TRUE(y.SameBits(x));
  });
}

}  // namespace
}  // namespace zero
