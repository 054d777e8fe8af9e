#include <optional>

#include "tests/kernels/optimizer_test_util.h"

namespace zero {
namespace {

constexpr float kLr = 0.1f, kScale = 0.25f;

struct Rule {
  bool buffer;
  float momentum, dampening;
  bool nesterov, first_step;
};
constexpr Rule kRules[] = {{false, 0, 0, false, false},
                           {true, 0.9f, 0, false, true},
                           {true, 0.9f, 0.1f, false, false},
                           {true, 0.9f, 0, true, true},
                           {true, 0.9f, 0, true, false}};

struct Momentum {
  Momentum(DType param, DType grad)
      : params(param, grad, kSpan),
        buffer(Array::Normal(DType::kF32, kSpan, 4)) {}

  SgdArgs Args(const Rule& rule, const std::vector<UpdateRange>& ranges) {
    SgdArgs args;
    args.state = params.state(ranges);
    args.state.grad_scale = scale.data();
    args.momentum_buffer = rule.buffer ? buffer.floats() : nullptr;
    args.lr = kLr;
    args.momentum = rule.momentum;
    args.dampening = rule.dampening;
    args.nesterov = rule.nesterov;
    args.first_step = rule.first_step;
    return args;
  }
  void KeepPieces(const std::vector<Piece>& pieces) {
    params.master = Pick(params.master, pieces);
    buffer = Pick(buffer, pieces);
  }
  bool SameBits(const Momentum& other) const {
    return params.SameBits(other.params) && buffer.SameBits(other.buffer);
  }

  FlatParams params;
  Array buffer;
  TestVector<float> scale = {kScale};
};

TEST(SgdTest, MatchesTorchsRuleInFloat64) {
  const std::vector<UpdateRange> ranges = TestRanges();
  ForEachPath([&](const Path& path) {
    ForEachDtypePair([&](DType param, DType grad) {
      for (const Rule& rule : kRules) {
        const Momentum before(param, grad);
        Momentum after = before;
        path.ops.Sgd(path.stream, after.Args(rule, ranges));
        for (const UpdateRange& range : ranges) {
          for (int64_t i = range.begin; i < range.end; ++i) {
            const double p = before.params.value(i);
            const double g = before.params.grad[i] * double{kScale} +
                             double{range.weight_decay} * p;
            double buffer = before.buffer[i];
            double direction = g;
            if (rule.buffer) {
              buffer = rule.first_step ? g
                                       : double{rule.momentum} * buffer +
                                             (1 - double{rule.dampening}) * g;
              direction =
                  rule.nesterov ? g + double{rule.momentum} * buffer : buffer;
            }
            // Roundings of values of size <= 5.
            const double error = 4 * 5 * HalfUlp(DType::kF32);
            ASSERT_NEAR(after.params.value(i), p - double{kLr} * direction,
                        error);
            ASSERT_NEAR(after.buffer[i], buffer, error);
            if (after.params.has_master()) {
              ASSERT_EQ(after.params.param[i],
                        RoundedMaster(param, after.params.master[i]));
            }
          }
        }
        for (int64_t i = 0; i < kSpan; ++i) {
          if (InRanges(ranges, i)) continue;
          ASSERT_EQ(after.params.param[i], before.params.param[i]);
          ASSERT_EQ(after.buffer[i], before.buffer[i]);
        }
      }
    });
  });
}

TEST(SgdTest, BitsAreTheCpusOnEveryPathAndThreadCount) {
  for (const Rule& rule : kRules) {
    std::optional<Momentum> first;
    const auto run = [&](const Path& path) {
      Momentum sgd(DType::kBF16, DType::kF32);
      const std::vector<UpdateRange> ranges = TestRanges();
      for (int step = 0; step < 3; ++step) {
        path.ops.Sgd(path.stream, sgd.Args(rule, ranges));
      }
      if (!first.has_value()) first.emplace(sgd);
      EXPECT_TRUE(sgd.SameBits(*first));
    };
    OnCpu(run);
    ForEachPath(run);
  }
}

TEST(SgdTest, StochasticRoundingChangesTheParametersOnly) {
  for (const DType param : {DType::kBF16, DType::kF16}) {
    CheckStochasticRounding<Momentum>(
        Momentum(param, param),
        [](const Path& path, Momentum& sgd, const UpdateState& state) {
          SgdArgs args = sgd.Args(kRules[2], {});
          args.state = state;
          path.ops.Sgd(path.stream, args);
        });
  }
}

void Update(const Path& path, Momentum& sgd, const UpdateState& state) {
  SgdArgs args = sgd.Args(kRules[2], {});
  args.state = state;
  path.ops.Sgd(path.stream, args);
}

TEST(SgdTest, SplitMastersHaveTheBitsOfWholeOnes) {
  CheckSplitMasters<Momentum>(Momentum(DType::kBF16, DType::kF32), Update);
}

TEST(SgdTest, PiecesOfAWholeHaveItsBits) {
  for (const DType param : {DType::kF32, DType::kF16}) {
    CheckPiecesOfAWhole<Momentum>(Momentum(param, DType::kF32), Update);
  }
  Momentum split = Momentum(DType::kBF16, DType::kF32);
  split.params.Split();
  CheckPiecesOfAWhole<Momentum>(split, Update);
}

// A step of zero on every lower half with upper halves at the ends of their
// ranges: a split master keeps every bit.
TEST(SgdTest, SplitMastersKeepEveryValue) {
  std::vector<uint32_t> uppers;
  for (const uint32_t upper : {0x0000, 0x0001, 0x007f, 0x0080, 0x3f80, 0x3f81,
                               0x7f7f, 0x7f80, 0x7fbf, 0x7fff}) {
    uppers.insert(uppers.end(), {upper << 16, (upper | 0x8000) << 16});
  }
  const auto size = static_cast<int64_t>(uppers.size()) << 16;
  FlatParams before(DType::kBF16, DType::kF32, size);
  before.grad = Array(DType::kF32, size);
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = uppers[i >> 16] + static_cast<uint32_t>(i & 0xffff);
    std::memcpy(before.master.floats() + i, &bits, sizeof(bits));
  }
  const std::vector<UpdateRange> ranges = {{0, size, 0}};
  ForEachPath([&](const Path& path) {
    FlatParams whole = before, split = before;
    split.Split();
    for (FlatParams* params : {&whole, &split}) {
      path.ops.Sgd(path.stream, {.state = params->state(ranges)});
    }
    split.Join();
    int64_t num_nan = 0;
    for (int64_t i = 0; i < size; ++i) {
      const float value = before.master.floats()[i];
      const float got = split.master.floats()[i];
      if (std::isfinite(value)) {
        ASSERT_EQ(BitsOfFloat(got), BitsOfFloat(value)) << i;
        ASSERT_EQ(BitsOfFloat(whole.master.floats()[i]), BitsOfFloat(value));
        // The nearest, which may be infinity.
        ASSERT_EQ(split.param[i], RoundedMaster(DType::kBF16, value));
        ASSERT_EQ(whole.param[i], split.param[i]);
      } else {  // infinity times a weight decay of 0 is NaN
        ASSERT_TRUE(std::isnan(got) && std::isnan(split.param[i])) << i;
        ++num_nan;
      }
    }
    EXPECT_EQ(num_nan, 6 << 16);
  });
}

TEST(SgdTest, FirstStepDoesNotReadTheBuffer) {
  OnPath([](const Path& path) {
    Momentum sgd(DType::kF32, DType::kF32);
    for (int64_t i = 0; i < kSpan; ++i) sgd.buffer.Set(i, NAN);
    const std::vector<UpdateRange> ranges = {{0, kSpan, 0}};
    path.ops.Sgd(path.stream, sgd.Args({true, 0.9f, 0, false, true}, ranges));
    for (int64_t i = 0; i < kSpan; ++i) {
      ASSERT_TRUE(std::isfinite(sgd.buffer[i]));
      ASSERT_TRUE(std::isfinite(sgd.params.param[i]));
    }
  });
}

TEST(SgdTest, NonFiniteStepWritesNothing) {
  OnPath([](const Path& path) {
    const Momentum before(DType::kBF16, DType::kBF16);
    Momentum after = before;
    const std::vector<UpdateRange> ranges = TestRanges();
    SgdArgs args = after.Args(kRules[2], ranges);
    const TestVector<uint32_t> found = {1};
    args.state.found_non_finite = found.data();
    path.ops.Sgd(path.stream, args);
    EXPECT_TRUE(after.SameBits(before));
  });
}

}  // namespace
}  // namespace zero
