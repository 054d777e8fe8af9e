#include <optional>

#include "tests/kernels/optimizer_test_util.h"

namespace zero {
namespace {

constexpr float kLr = 0.01f, kBeta1 = 0.9f, kBeta2 = 0.999f, kEps = 1e-8f;
constexpr float kScale = 0.5f;

struct Adam : Moments {
  explicit Adam(FlatParams of) : Moments(std::move(of)) {
    const Array root = Array::Normal(DType::kF32, v.size(), 5, 0.3);
    for (int64_t i = 0; i < v.size(); ++i) v.Set(i, root[i] * root[i]);
  }

  AdamWArgs Args(const std::vector<UpdateRange>& ranges, bool adam_w) {
    AdamWArgs args;
    args.state = params.state(ranges);
    args.state.grad_scale = scale.data();
    args.m = m.floats();
    args.v = v.floats();
    args.lr = kLr;
    args.beta1 = kBeta1;
    args.beta2 = kBeta2;
    args.eps = kEps;
    args.bias_correction1 = 1 - kBeta1 * kBeta1 * kBeta1;
    args.bias_correction2 = 1 - kBeta2 * kBeta2 * kBeta2;
    args.adam_w = adam_w;
    return args;
  }

  TestVector<float> scale = {kScale};
};

// The update of ops.h in float64.
struct Expected {
  double p, m, v;
};
Expected Reference(double p, double m, double v, double g, double wd,
                   bool adam_w, const AdamWArgs& args) {
  g *= kScale;
  if (!adam_w) g += wd * p;
  m = double{kBeta1} * m + (1 - double{kBeta1}) * g;
  v = double{kBeta2} * v + (1 - double{kBeta2}) * g * g;
  if (adam_w) p -= double{kLr} * wd * p;
  const double c1 = args.bias_correction1, c2 = args.bias_correction2;
  p -= double{kLr} * (m / c1) / (std::sqrt(v / c2) + double{kEps});
  return {p, m, v};
}

TEST(AdamWTest, MatchesFloat64InEveryStorageTypeAndLeavesGapsAlone) {
  const std::vector<UpdateRange> ranges = TestRanges();
  ForEachPath([&](const Path& path) {
    ForEachDtypePair([&](DType param, DType grad) {
      for (const bool adam_w : {true, false}) {
        const Adam before(FlatParams(param, grad, kSpan));
        Adam after = before;
        AdamWArgs args = after.Args(ranges, adam_w);
        path.ops.AdamW(path.stream, args);
        for (const UpdateRange& range : ranges) {
          for (int64_t i = range.begin; i < range.end; ++i) {
            const Expected want = Reference(before.params.value(i), before.m[i],
                                            before.v[i], before.params.grad[i],
                                            range.weight_decay, adam_w, args);
            // Half-ulps of fp32 in g, m and v (three to four each); the step
            // is at most lr / c1 * |m| / sqrt(v), so 1 for most, and p is one
            // rounding.
            const double ulp = HalfUlp(DType::kF32);
            const double g = std::abs(before.params.grad[i]) + 1;
            ASSERT_NEAR(after.m[i], want.m, 4 * ulp * g);
            ASSERT_NEAR(after.v[i], want.v, 4 * ulp * (want.v + 1e-3 * g * g));
            const double step = std::abs(before.params.value(i) - want.p);
            ASSERT_NEAR(after.params.value(i), want.p,
                        2 * ulp * (std::abs(want.p) + 1) + 16 * ulp * step +
                            16 * ulp * kLr * g / std::sqrt(want.v))
                << i;
            if (after.params.has_master()) {
              ASSERT_EQ(after.params.param[i],
                        RoundedMaster(param, after.params.master[i]));
            }
          }
        }
        for (int64_t i = 0; i < kSpan; ++i) {
          if (InRanges(ranges, i)) continue;
          ASSERT_EQ(after.params.param[i], before.params.param[i]) << i;
          ASSERT_EQ(after.m[i], before.m[i]) << i;
          ASSERT_EQ(after.v[i], before.v[i]) << i;
        }
      }
    });
  });
}

TEST(AdamWTest, BitsAreTheCpusOnEveryPathAndThreadCount) {
  const std::vector<UpdateRange> ranges = TestRanges();
  ForEachDtypePair([&](DType param, DType grad) {
    std::optional<Adam> first;
    const auto run = [&](const Path& path) {
      Adam adam(FlatParams(param, grad, kSpan));
      for (int step = 0; step < 3; ++step) {
        path.ops.AdamW(path.stream, adam.Args(ranges, true));
      }
      if (!first.has_value()) first.emplace(adam);
      EXPECT_TRUE(adam.SameBits(*first));
    };
    OnCpu(run);
    ForEachPath(run);
  });
}

TEST(AdamWDeathTest, GradientsOfAnotherDtypeAreRefusedByName) {
  OnPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = TestRanges();
    Adam adam(FlatParams(DType::kBF16, DType::kF16, kSpan));
    EXPECT_DEATH(path.ops.AdamW(path.stream, adam.Args(ranges, true)),
                 "AdamW: fp16 gradients of bf16 parameters; want fp32");
  });
}

TEST(AdamWTest, CuttingARangeChangesNoBit) {
  OnPath([](const Path& path) {
    const std::vector<UpdateRange> whole = {{0, kSpan, 0.1f}};
    const std::vector<UpdateRange> cut = {
        {0, 5, 0.1f}, {5, 1028, 0.1f}, {1028, 1029, 0.1f}, {1029, kSpan, 0.1f}};
    Adam a(FlatParams(DType::kBF16, DType::kF32, kSpan));
    Adam b(FlatParams(DType::kBF16, DType::kF32, kSpan));
    path.ops.AdamW(path.stream, a.Args(whole, true));
    path.ops.AdamW(path.stream, b.Args(cut, true));
    EXPECT_TRUE(a.SameBits(b));
  });
}

TEST(AdamWTest, ManyRangesAreAllUpdated) {
  const std::vector<UpdateRange> ranges = ManyRanges();
  Adam want(FlatParams(DType::kBF16, DType::kBF16, kSpan));
  OnCpu([&](const Path& path) {
    path.ops.AdamW(path.stream, want.Args(ranges, true));
  });
  OnPath([&](const Path& path) {
    Adam adam(FlatParams(DType::kBF16, DType::kBF16, kSpan));
    path.ops.AdamW(path.stream, adam.Args(ranges, true));
    EXPECT_TRUE(adam.SameBits(want));
  });
}

TEST(AdamWTest, StochasticRoundingChangesTheParametersOnly) {
  for (const DType param : {DType::kBF16, DType::kF16}) {
    CheckStochasticRounding<Adam>(
        Adam(FlatParams(param, param, kSpan)),
        [](const Path& path, Adam& adam, const UpdateState& state) {
          AdamWArgs args = adam.Args({}, true);
          args.state = state;
          path.ops.AdamW(path.stream, args);
        });
  }
}

void Update(const Path& path, Adam& adam, const UpdateState& state) {
  AdamWArgs args = adam.Args({}, true);
  args.state = state;
  path.ops.AdamW(path.stream, args);
}

TEST(AdamWTest, SplitMastersHaveTheBitsOfWholeOnes) {
  CheckSplitMasters<Adam>(Adam(FlatParams(DType::kBF16, DType::kBF16, kSpan)),
                          Update);
}

TEST(AdamWTest, PiecesOfAWholeHaveItsBits) {
  for (const DType param : {DType::kF32, DType::kBF16}) {
    CheckPiecesOfAWhole<Adam>(Adam(FlatParams(param, param, kSpan)), Update);
  }
  Adam split = Adam(FlatParams(DType::kBF16, DType::kBF16, kSpan));
  split.params.Split();
  CheckPiecesOfAWhole<Adam>(split, Update);
}

TEST(AdamWTest, NonFiniteGradientsElsewhereSkipTheWholeStep) {
  ForEachPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = TestRanges();
    const Adam before(FlatParams(DType::kBF16, DType::kF32, kSpan));
    Adam after = before;
    AdamWArgs args = after.Args(ranges, true);
    TestVector<uint32_t> found = {1};
    args.state.found_non_finite = found.data();
    path.ops.AdamW(path.stream, args);
    EXPECT_TRUE(after.SameBits(before));
    found[0] = 0;
    path.ops.AdamW(path.stream, args);
    EXPECT_FALSE(after.SameBits(before));
  });
}

TEST(AdamWTest, NoRangesAndNoGradScaleAreFine) {
  ForEachPath([](const Path& path) {
    Adam adam(FlatParams(DType::kF32, DType::kF32, 33));
    const Adam before = adam;
    path.ops.AdamW(path.stream, adam.Args({}, true));
    EXPECT_TRUE(adam.SameBits(before));
    AdamWArgs args = adam.Args({}, true);
    const std::vector<UpdateRange> ranges = {{0, 33, 0}};
    Adam scaled = before;
    scaled.scale[0] = 1;
    args.state.ranges = ranges;
    args.state.grad_scale = nullptr;
    path.ops.AdamW(path.stream, args);
    path.ops.AdamW(path.stream, scaled.Args(ranges, true));
    EXPECT_TRUE(adam.SameBits(scaled));
  });
}

// From zero moments the first step is lr in the direction of the gradient,
// for any size: the error of 1 - beta2 for beta2 = 0.999 in fp32 must cancel in
// the bias correction.
TEST(AdamWTest, FirstStepIsTheLearningRate) {
  ForEachPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = {{0, 31, 0}};
    Adam adam(FlatParams(DType::kF32, DType::kF32, 31));
    for (int64_t i = 0; i < 31; ++i) {
      adam.params.param.Set(i, 0);
      adam.params.grad.Set(
          i, std::ldexp(i % 2 == 0 ? 1.0 : -1.0, static_cast<int>(i) - 15));
      adam.m.Set(i, 0);
      adam.v.Set(i, 0);
    }
    AdamWArgs args = adam.Args(ranges, true);
    args.bias_correction1 = static_cast<float>(1 - double{kBeta1});
    args.bias_correction2 = static_cast<float>(1 - double{kBeta2});
    path.ops.AdamW(path.stream, args);
    for (int64_t i = 0; i < 31; ++i) {
      const double sign = i % 2 == 0 ? -1 : 1;
      // eps is 1e-8 of the smallest |g| of 2^-16; roundings: 4 half-ulps.
      EXPECT_NEAR(adam.params.param[i] / (sign * kLr), 1,
                  4 * HalfUlp(DType::kF32) + 1e-8 * std::ldexp(1.0, 16));
    }
  });
}

}  // namespace
}  // namespace zero
