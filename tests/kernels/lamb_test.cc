#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/kernels/optimizer_test_util.h"
#include "tests/kernels/sum_squares.h"

namespace zero {
namespace {

constexpr float kLr = 0.01f, kBeta1 = 0.9f, kBeta2 = 0.999f, kEps = 1e-6f;
constexpr float kScale = 0.5f;

struct Lamb : Moments {
  Lamb(DType param, DType grad, int64_t size = kSpan)
      : Moments(FlatParams(param, grad, size)) {
    for (int64_t i = 0; i < size; ++i) v.Set(i, 0.01 + 1e-4 * (i % 97));
  }

  // Both passes' arguments; every range is a tensor, and its norms are zero.
  LambArgs Args(const std::vector<UpdateRange>& ranges) {
    parts.clear();
    for (int64_t i = 0; i < static_cast<int64_t>(ranges.size()); ++i) {
      parts.push_back({i, i, i + 1});
    }
    norms.assign(2 * ranges.size(), 0);
    LambArgs args;
    args.state = params.state(ranges);
    args.state.grad_scale = scale.data();
    args.m = m.floats();
    args.v = v.floats();
    args.parts = parts;
    args.norms = norms.data();
    args.lr = kLr;
    args.beta1 = kBeta1;
    args.beta2 = kBeta2;
    args.eps = kEps;
    args.bias_correction1 = 0.5f;
    args.bias_correction2 = 0.25f;
    return args;
  }
  void Step(const Path& path, const std::vector<UpdateRange>& ranges) {
    const LambArgs args = Args(ranges);
    path.ops.LambMoments(path.stream, args);
    path.ops.LambApply(path.stream, args);
  }
  // The update of element i in the kernels' own steps, where p was its value:
  // both bias corrections multiply by 2.
  float Update(int64_t i, float p, float weight_decay) const {
    const float direction =
        static_cast<float>(m[i]) * 2.0f /
        std::fma(std::sqrt(static_cast<float>(v[i])), 2.0f, kEps);
    return std::fma(weight_decay, p, direction);
  }
  bool SameBits(const Lamb& other) const {
    return Moments::SameBits(other) && norms == other.norms;
  }

  std::vector<TensorPart> parts;
  TestVector<double> norms;
  TestVector<float> scale = {kScale};
};

TEST(LambTest, MatchesFloat64InBothPasses) {
  const std::vector<UpdateRange> ranges = TestRanges();
  ForEachPath([&](const Path& path) {
    ForEachDtypePair([&](DType param, DType grad) {
      const Lamb before(param, grad);
      Lamb after = before;
      after.Step(path, ranges);
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
          // Values up to 10 with about ten roundings: 1e-5 of the norm.
          update.push_back((m / 0.5) / (std::sqrt(v / 0.25) + double{kEps}) +
                           double{ranges[r].weight_decay} * p);
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

TEST(LambTest, BitsAreTheCpusOnEveryPathAndThreadCount) {
  const std::vector<UpdateRange> ranges = TestRanges();
  std::optional<Lamb> first;
  const auto run = [&](const Path& path) {
    Lamb lamb(DType::kBF16, DType::kF32);
    for (int step = 0; step < 3; ++step) lamb.Step(path, ranges);
    if (!first.has_value()) first.emplace(lamb);
    EXPECT_TRUE(lamb.SameBits(*first));
  };
  OnCpu(run);
  ForEachPath(run);
}

TEST(LambTest, ManyRangesAreAllUpdated) {
  Lamb want(DType::kBF16, DType::kBF16);
  OnCpu([&](const Path& path) { want.Step(path, ManyRanges()); });
  OnPath([&](const Path& path) {
    Lamb lamb(DType::kBF16, DType::kBF16);
    lamb.Step(path, ManyRanges());
    EXPECT_TRUE(lamb.SameBits(want));
  });
}

// Runs of 16384 elements are measured one by one and added in order.
TEST(LambTest, NormsOfLongTensorsAreSumsOfSquares) {
  constexpr int64_t kLong = 40007;
  const std::vector<UpdateRange> ranges = {{1, 20001, 0.1f},
                                           {20001, kLong, 0.1f}};
  ForEachPath([&](const Path& path) {
    Lamb lamb(DType::kF32, DType::kF32, kLong);
    const LambArgs args = lamb.Args(ranges);
    path.ops.LambMoments(path.stream, args);
    for (int r = 0; r < 2; ++r) {
      const int64_t size = ranges[r].end - ranges[r].begin;
      Array p(DType::kF32, size), update(DType::kF32, size);
      for (int64_t i = 0; i < size; ++i) {
        p.Set(i, lamb.params.param[ranges[r].begin + i]);
        update.Set(i, lamb.Update(ranges[r].begin + i, p.floats()[i], 0.1f));
      }
      EXPECT_EQ(lamb.norms[2 * r], DocumentedSum(p));
      EXPECT_EQ(lamb.norms[2 * r + 1], DocumentedSum(update));
    }
  });
}

TEST(LambTest, StochasticRoundingChangesTheParametersOnly) {
  for (const DType param : {DType::kBF16, DType::kF16}) {
    CheckStochasticRounding<Lamb>(
        Lamb(param, param),
        [](const Path& path, Lamb& lamb, const UpdateState& state) {
          const std::vector<UpdateRange> ranges(state.ranges.begin(),
                                                state.ranges.end());
          LambArgs args = lamb.Args(ranges);
          args.state = state;
          path.ops.LambMoments(path.stream, args);
          path.ops.LambApply(path.stream, args);
        });
  }
}

void Update(const Path& path, Lamb& lamb, const UpdateState& state) {
  LambArgs args = lamb.Args({state.ranges.begin(), state.ranges.end()});
  args.state = state;
  path.ops.LambMoments(path.stream, args);
  path.ops.LambApply(path.stream, args);
}

TEST(LambTest, SplitMastersHaveTheBitsOfWholeOnes) {
  CheckSplitMasters<Lamb>(Lamb(DType::kBF16, DType::kF32), Update);
}

TEST(LambTest, PiecesOfAWholeHaveItsBits) {
  for (const DType param : {DType::kF32, DType::kBF16}) {
    CheckPiecesOfAWhole<Lamb>(Lamb(param, DType::kF32), Update);
  }
  Lamb split = Lamb(DType::kBF16, DType::kF32);
  split.params.Split();
  CheckPiecesOfAWhole<Lamb>(split, Update);
}

TEST(LambTest, NormsOfManyRangesOfATensorAreAddedInOrder) {
  const auto run = [](const Path& path) {
    const std::vector<UpdateRange> ranges = ManyRanges();
    Lamb lamb(DType::kBF16, DType::kF32);
    const LambArgs args = lamb.Args(ranges);
    for (TensorPart& part : lamb.parts) {
      part.begin = part.own < 150 ? 0 : 150;
      part.end = part.own < 150 ? 150 : 400;
    }
    path.ops.LambMoments(path.stream, args);
    path.ops.LambApply(path.stream, args);
    return lamb;
  };
  std::optional<Lamb> want;
  OnCpu([&](const Path& path) { want.emplace(run(path)); });
  ForEachPath(
      [&](const Path& path) { EXPECT_TRUE(run(path).SameBits(*want)); });
}

// Norms are measured in parts and added in order; the second pass uses the
// first one's measurements, to the bit.
TEST(LambTest, ATensorMayComeInParts) {
  ForEachPath([](const Path& path) {
    const std::vector<UpdateRange> cut = {
        {0, 192, 0.1f}, {192, 5000, 0.1f}, {5000, kSpan, 0.1f}};
    Lamb parts(DType::kF32, DType::kF32);
    const Lamb before = parts;
    LambArgs args = parts.Args(cut);
    // Another tensor's part is between them, and stays unchanged.
    parts.parts = {{0, 0, 2}, {1, 0, 2}, {3, 3, 4}};
    parts.norms = {0, 0, 0, 0, 5, 7, 0, 0};
    args.parts = parts.parts;
    args.norms = parts.norms.data();
    path.ops.LambMoments(path.stream, args);
    EXPECT_EQ(parts.norms[4], 5);
    EXPECT_EQ(parts.norms[5], 7);
    path.ops.LambApply(path.stream, args);
    const auto& norms = parts.norms;
    const auto step = [&](double p, double update) {
      return static_cast<float>(kLr * (std::sqrt(p) / std::sqrt(update)));
    };
    const float two = step(norms[0] + norms[2], norms[1] + norms[3]);
    const float one = step(norms[6], norms[7]);
    for (int64_t i = 0; i < kSpan; ++i) {
      const float was = static_cast<float>(before.params.value(i));
      const float update = parts.Update(i, was, 0.1f);
      ASSERT_EQ(parts.params.param[i],
                std::fma(-(i < 5000 ? two : one), update, was));
    }
  });
}

TEST(LambTest, NormsAddToWhatIsThere) {
  OnPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = {{0, kSpan, 0.1f}};
    Lamb fresh(DType::kF32, DType::kF32);
    path.ops.LambMoments(path.stream, fresh.Args(ranges));
    Lamb added(DType::kF32, DType::kF32);
    const LambArgs args = added.Args(ranges);
    added.norms = {3, 5};
    path.ops.LambMoments(path.stream, args);
    EXPECT_EQ(added.norms[0], 3 + fresh.norms[0]);
    EXPECT_EQ(added.norms[1], 5 + fresh.norms[1]);
  });
}

TEST(LambTest, TrustRatioIsClampedAndOneWhereANormIsZero) {
  ForEachPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = {
        {0, 1, 0}, {1, 2, 0}, {2, 3, 0}, {3, 4, 0}};
    Lamb lamb(DType::kF32, DType::kF32);
    LambArgs args = lamb.Args(ranges);
    args.eps = 0;
    for (int64_t i = 0; i < 4; ++i) {
      lamb.params.param.Set(i, 0);
      // An update of 1: both moments are 1 once corrected.
      lamb.m.Set(i, 0.5);
      lamb.v.Set(i, 0.25);
    }
    lamb.norms = {1e12, 1, 1e-12, 1, 0, 1, 1, 0};
    path.ops.LambApply(path.stream, args);
    EXPECT_EQ(lamb.params.param[0], -static_cast<float>(10.0 * kLr));
    EXPECT_NEAR(lamb.params.param[1], -0.01 * kLr, 1e-10);
    EXPECT_EQ(lamb.params.param[2], -kLr);
    EXPECT_EQ(lamb.params.param[3], -kLr);
  });
}

TEST(LambTest, NonFiniteStepWritesNothing) {
  OnPath([](const Path& path) {
    const std::vector<UpdateRange> ranges = TestRanges();
    const Lamb before(DType::kBF16, DType::kBF16);
    Lamb after = before;
    LambArgs args = after.Args(ranges);
    const TestVector<uint32_t> found = {1};
    args.state.found_non_finite = found.data();
    path.ops.LambMoments(path.stream, args);
    path.ops.LambApply(path.stream, args);
    EXPECT_TRUE(after.params.param.SameBits(before.params.param));
    EXPECT_TRUE(after.m.SameBits(before.m));
    EXPECT_EQ(after.norms, TestVector<double>(2 * ranges.size(), 0));
  });
}

}  // namespace
}  // namespace zero
