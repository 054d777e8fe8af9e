#include <algorithm>
#include <optional>

#include "tests/kernels/optimizer_test_util.h"

namespace zero {
namespace {

constexpr float kLr = 0.01f, kBeta1 = 0.9f, kBeta2 = 0.999f, kEps = 1e-6f;
constexpr float kScale = 0.5f;

struct Lamb {
  Lamb(DType param, DType grad)
      : params(param, grad, kSpan),
        m(Array::Normal(DType::kF32, kSpan, 4, 0.1)),
        v(DType::kF32, kSpan),
        update(DType::kF32, kSpan) {
    for (int64_t i = 0; i < kSpan; ++i) v.Set(i, 0.01 + 1e-4 * (i % 97));
  }

  LambMomentsArgs Moments(const std::vector<UpdateRange>& ranges) {
    norms.assign(2 * ranges.size(), 0);
    LambMomentsArgs args;
    args.state = params.state(ranges);
    args.state.grad_scale = &scale;
    args.m = m.floats();
    args.v = v.floats();
    args.update = update.floats();
    args.norms = norms.data();
    args.beta1 = kBeta1;
    args.beta2 = kBeta2;
    args.eps = kEps;
    args.bias_correction1 = 0.5f;
    args.bias_correction2 = 0.25f;
    return args;
  }
  LambApplyArgs Apply(const std::vector<UpdateRange>& ranges) {
    LambApplyArgs args;
    args.state = params.state(ranges);
    args.update = update.floats();
    args.norms = norms.data();
    args.lr = kLr;
    return args;
  }
  bool SameBits(const Lamb& other) const {
    return params.param.SameBits(other.params.param) &&
           params.master.SameBits(other.params.master) && m.SameBits(other.m) &&
           v.SameBits(other.v) && norms == other.norms;
  }

  FlatParams params;
  Array m, v, update;
  std::vector<double> norms;
  float scale = kScale;
};

TEST(LambTest, MatchesFloat64InBothPasses) {
  const std::vector<UpdateRange> ranges = TestRanges();
  ForEachCpuPath([&](const CpuPath& cpu) {
    ForEachDtypePair([&](DType param, DType grad) {
      const Lamb before(param, grad);
      Lamb after = before;
      cpu.ops.LambMoments(cpu.stream, after.Moments(ranges));
      cpu.ops.LambApply(cpu.stream, after.Apply(ranges));
      for (size_t r = 0; r < ranges.size(); ++r) {
        double p2 = 0, u2 = 0;
        std::vector<double> update;
        for (int64_t i = ranges[r].begin; i < ranges[r].end; ++i) {
          const double p = before.params.value(i);
          const double g = before.params.grad[i] * double{kScale};
          const double m =
              double{kBeta1} * before.m[i] + (1 - double{kBeta1}) * g;
          const double v =
              double{kBeta2} * before.v[i] + (1 - double{kBeta2}) * g * g;
          ASSERT_NEAR(after.m[i], m, 1e-6);
          ASSERT_NEAR(after.v[i], v, 1e-6);
          update.push_back((m / 0.5) / (std::sqrt(v / 0.25) + double{kEps}) +
                           double{ranges[r].weight_decay} * p);
          // Values up to 10 with about ten roundings.
          ASSERT_NEAR(after.update[i], update.back(), 1e-5);
          p2 += p * p;
          u2 += update.back() * update.back();
        }
        ASSERT_NEAR(after.norms[2 * r], p2, 1e-12 * p2);
        ASSERT_NEAR(after.norms[2 * r + 1], u2, 1e-5 * u2);
        const double ratio =
            p2 == 0 || u2 == 0
                ? 1
                : std::clamp(std::sqrt(p2) / std::sqrt(u2), 0.01, 10.0);
        for (int64_t i = ranges[r].begin; i < ranges[r].end; ++i) {
          const double step = ratio * kLr * update[i - ranges[r].begin];
          ASSERT_NEAR(after.params.value(i), before.params.value(i) - step,
                      2e-5 * std::abs(step) + 1e-6);
        }
      }
      for (int64_t i = 0; i < kSpan; ++i) {
        if (InRanges(ranges, i)) continue;
        ASSERT_EQ(after.params.param[i], before.params.param[i]);
        ASSERT_EQ(after.m[i], before.m[i]);
      }
    });
  });
}

TEST(LambTest, BitsAreEqualOnEveryPathAndThreadCount) {
  const std::vector<UpdateRange> ranges = TestRanges();
  std::optional<Lamb> first;
  ForEachCpuPath([&](const CpuPath& cpu) {
    Lamb lamb(DType::kBF16, DType::kF32);
    for (int step = 0; step < 3; ++step) {
      cpu.ops.LambMoments(cpu.stream, lamb.Moments(ranges));
      cpu.ops.LambApply(cpu.stream, lamb.Apply(ranges));
    }
    if (!first.has_value()) first.emplace(lamb);
    EXPECT_TRUE(lamb.SameBits(*first));
  });
}

TEST(LambTest, NormsAccumulateSoThatATensorMayComeInParts) {
  OnCpu([](const CpuPath& cpu) {
    const std::vector<UpdateRange> ranges = {{0, kSpan, 0.1f}};
    Lamb fresh(DType::kF32, DType::kF32);
    cpu.ops.LambMoments(cpu.stream, fresh.Moments(ranges));
    Lamb added(DType::kF32, DType::kF32);
    const LambMomentsArgs args = added.Moments(ranges);
    added.norms = {3, 5};
    cpu.ops.LambMoments(cpu.stream, args);
    EXPECT_EQ(added.norms[0], 3 + fresh.norms[0]);
    EXPECT_EQ(added.norms[1], 5 + fresh.norms[1]);
  });
}

TEST(LambTest, TrustRatioIsClampedAndOneWhereANormIsZero) {
  ForEachCpuPath([](const CpuPath& cpu) {
    const std::vector<UpdateRange> ranges = {
        {0, 1, 0}, {1, 2, 0}, {2, 3, 0}, {3, 4, 0}};
    Lamb lamb(DType::kF32, DType::kF32);
    for (int64_t i = 0; i < 4; ++i) {
      lamb.params.param.Set(i, 0);
      lamb.update.Set(i, 1);
    }
    lamb.norms = {1e12, 1, 1e-12, 1, 0, 1, 1, 0};
    cpu.ops.LambApply(cpu.stream, lamb.Apply(ranges));
    EXPECT_EQ(lamb.params.param[0], -static_cast<float>(10.0 * kLr));
    EXPECT_NEAR(lamb.params.param[1], -0.01 * kLr, 1e-10);
    EXPECT_EQ(lamb.params.param[2], -kLr);
    EXPECT_EQ(lamb.params.param[3], -kLr);
  });
}

TEST(LambTest, NonFiniteStepWritesNothing) {
  OnCpu([](const CpuPath& cpu) {
    const std::vector<UpdateRange> ranges = TestRanges();
    const Lamb before(DType::kBF16, DType::kBF16);
    Lamb after = before;
    LambMomentsArgs moments = after.Moments(ranges);
    LambApplyArgs apply = after.Apply(ranges);
    const uint32_t found = 1;
    moments.state.found_non_finite = &found;
    apply.state.found_non_finite = &found;
    cpu.ops.LambMoments(cpu.stream, moments);
    cpu.ops.LambApply(cpu.stream, apply);
    EXPECT_TRUE(after.params.param.SameBits(before.params.param));
    EXPECT_TRUE(after.m.SameBits(before.m));
    EXPECT_EQ(after.norms, std::vector<double>(2 * ranges.size(), 0));
  });
}

}  // namespace
}  // namespace zero
