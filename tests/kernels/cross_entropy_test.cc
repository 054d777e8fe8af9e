#include "tests/kernels/matrix.h"

namespace zero {
namespace {

struct Problem {
  GuardedMatrix x, w, dx, dw;
  std::vector<int32_t> targets;
  std::vector<float> losses;
  double loss_sum = 0;
  float grad_scale = 1;

  Problem(DType dtype, int64_t m, int64_t c, int64_t v, DType sink)
      : x(GuardedMatrix::Normal(dtype, m, c, 2, 1)),
        w(GuardedMatrix::Normal(dtype, v, c, 1, 2, 2 / std::sqrt(c))),
        dx(GuardedMatrix::Normal(dtype, m, c, 3, 3)),
        dw(GuardedMatrix::Normal(sink, v, c, 0, 4)),
        losses(static_cast<size_t>(m), -1.0f) {
    for (int64_t i = 0; i < m; ++i) {
      targets.push_back(static_cast<int32_t>((i * 7919 + 3) % v));
    }
  }

  LinearCrossEntropyArgs Args() {
    LinearCrossEntropyArgs args;
    args.x = x.view();
    args.w = w.view();
    args.targets = targets.data();
    args.losses = losses.data();
    args.loss_sum = &loss_sum;
    args.grad_scale = &grad_scale;
    args.dx = dx.view();
    args.dw = dw.view();
    return args;
  }
};

void RunOp(Ops& ops, Stream& stream, const LinearCrossEntropyArgs& args) {
  Scratch scratch(ops.LinearCrossEntropyWorkspaceBytes(args));
  ops.LinearCrossEntropy(stream, args, scratch.workspace());
}

// Compares losses and gradients with float64. `native` products round the
// gradient of the logits to the dtype of x.
void Check(Problem& p, const Dense& old_dw, bool native,
           const std::string& what) {
  const CrossEntropyReference want =
      ReferenceCrossEntropy(p.x.dense(), p.w.dense(), p.targets, p.grad_scale);
  const DType dtype = p.x.dtype();
  const Dense x = p.x.dense(), w = p.w.dense();
  double w_norm = 0, total = 0, total_error = 0;
  for (int64_t j = 0; j < w.rows; ++j) w_norm = std::max(w_norm, Norm(w, j));
  // A logit's error reaches the loss and, relatively, every probability.
  std::vector<double> logit_error;
  for (int64_t i = 0; i < x.rows; ++i) {
    const size_t n = static_cast<size_t>(i);
    logit_error.push_back(SumError(Norm(x, i), w_norm));
    const double loss = want.losses[n];
    // Twice (logsumexp and target), the exponentials and the sum in fp32, and
    // the store.
    const double error =
        2 * logit_error[n] + HalfUlp(DType::kF32) * (4 + 2 * loss);
    EXPECT_NEAR(p.losses[n], loss, error) << what << " loss of row " << i;
    total += loss;
    total_error += error;
  }
  EXPECT_NEAR(p.loss_sum, total, total_error) << what;

  const double rounding = native ? HalfUlp(dtype) : 0;
  const Dense w_t = Transposed(w), x_t = Transposed(x);
  const Dense g_t = Transposed(want.dlogits);
  double worst_logit = 0;
  for (double e : logit_error) worst_logit = std::max(worst_logit, e);
  const double relative = 2 * worst_logit + 8 * HalfUlp(DType::kF32) + rounding;
  std::vector<double> w_col, g_row;
  for (int64_t j = 0; j < x.cols; ++j) w_col.push_back(Norm(w_t, j));
  for (int64_t i = 0; i < x.rows; ++i) g_row.push_back(Norm(want.dlogits, i));
  ExpectNear(
      p.dx, want.dx,
      [&](int64_t i, int64_t j) {
        const double size =
            g_row[static_cast<size_t>(i)] * w_col[static_cast<size_t>(j)];
        return relative * size + SumError(size, 1) +
               HalfUlp(dtype) * std::abs(want.dx(i, j)) + TinyStep(dtype);
      },
      what + ": dx");
  Dense dw = want.dw;
  for (size_t i = 0; i < dw.values.size(); ++i) {
    dw.values[i] += old_dw.values[i];
  }
  std::vector<double> x_col, g_col;
  for (int64_t j = 0; j < x.cols; ++j) x_col.push_back(Norm(x_t, j));
  for (int64_t v = 0; v < w.rows; ++v) g_col.push_back(Norm(g_t, v));
  const DType sink = p.dw.dtype();
  ExpectNear(
      p.dw, dw,
      [&](int64_t v, int64_t j) {
        const double size =
            g_col[static_cast<size_t>(v)] * x_col[static_cast<size_t>(j)];
        return relative * size + SumError(size, 1) +
               2 * HalfUlp(sink) *
                   (std::abs(dw(v, j)) + std::abs(old_dw(v, j))) +
               TinyStep(sink);
      },
      what + ": dw");
}

Dense Zeros(const Problem& p) { return Dense(p.w.rows(), p.w.cols()); }

TEST(CrossEntropyTest, LossAndGradientsAreThoseOfFloat64) {
  struct Shape {
    int64_t m, c, v;
  };
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Shape& s :
           {Shape{1, 1, 2}, Shape{31, 33, 1023}, Shape{33, 7, 31},
            Shape{65, 16, 257}, Shape{3, 64, 5003}}) {
        for (const bool accumulate : {false, true}) {
          Problem p(dtype, s.m, s.c, s.v, DType::kF32);
          p.grad_scale = 0.25f;
          p.targets[static_cast<size_t>(s.m / 2)] = -100;
          const Dense old_dw = accumulate ? p.dw.dense() : Zeros(p);
          LinearCrossEntropyArgs args = p.Args();
          args.accumulate_dw = accumulate;
          RunOp(path.ops, path.stream, args);
          const std::string what = std::to_string(s.m) + "x" +
                                   std::to_string(s.c) + "x" +
                                   std::to_string(s.v) + " " + DTypeName(dtype);
          Check(p, old_dw, path.native_products && dtype == DType::kBF16, what);
        }
      }
    }
  });
}

TEST(CrossEntropyTest, GradientIntoA16BitSinkIsRoundedOnce) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Problem p(dtype, 33, 31, 65, dtype);
      RunOp(path.ops, path.stream, p.Args());
      Check(p, Zeros(p), path.native_products && dtype == DType::kBF16,
            DTypeName(dtype));
    }
  });
}

// 70001 words make 68 MiB of logits at 254 rows, below the least chunk of 272:
// 300 rows are two chunks of 160 and 140.
TEST(CrossEntropyTest, ChunksAddUp) {
  const auto device = MakeCpuDevice(2);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  for (const bool accumulate : {false, true}) {
    Problem p(DType::kF32, 300, 3, 70001, DType::kF32);
    const Dense old_dw = accumulate ? p.dw.dense() : Zeros(p);
    LinearCrossEntropyArgs args = p.Args();
    args.accumulate_dw = accumulate;
    const size_t bytes = device->ops().LinearCrossEntropyWorkspaceBytes(args);
    EXPECT_LT(bytes, size_t{160} * 70016 * 4 + 65536);
    RunOp(device->ops(), *stream, args);
    Check(p, old_dw, false, "two chunks");
  }
}

TEST(CrossEntropyTest, FullyIgnoredChunksStillOverwriteWhatTheyOwn) {
  const auto device = MakeCpuDevice(2);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  for (const int first_ignored : {0, 160}) {
    Problem p(DType::kF32, 300, 3, 70001, DType::kF32);
    const int last_ignored = first_ignored == 0 ? 160 : 300;
    std::fill(p.targets.begin() + first_ignored,
              p.targets.begin() + last_ignored, -1);
    RunOp(device->ops(), *stream, p.Args());
    Check(p, Zeros(p), false, "one chunk ignored");
  }
  Problem p(DType::kF32, 33, 3, 31, DType::kF32);
  std::fill(p.targets.begin(), p.targets.end(), -1);
  RunOp(device->ops(), *stream, p.Args());
  EXPECT_EQ(p.loss_sum, 0);
  for (const double v : p.dx.dense().values) EXPECT_EQ(v, 0);
  for (const double v : p.dw.dense().values) EXPECT_EQ(v, 0);

  Problem kept(DType::kF32, 33, 3, 31, DType::kF32);
  std::fill(kept.targets.begin(), kept.targets.end(), -1);
  const Dense old_dw = kept.dw.dense();
  LinearCrossEntropyArgs args = kept.Args();
  args.accumulate_dw = true;
  RunOp(device->ops(), *stream, args);
  EXPECT_EQ(kept.dw.dense().values, old_dw.values);
}

TEST(CrossEntropyTest, ForwardOnlyHasTheSameLossAndWritesNoGradient) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      Problem both(dtype, 33, 31, 1023, DType::kF32);
      RunOp(path.ops, path.stream, both.Args());
      Problem forward(dtype, 33, 31, 1023, DType::kF32);
      LinearCrossEntropyArgs args = forward.Args();
      args.dx = {};
      args.dw = {};
      args.grad_scale = nullptr;
      RunOp(path.ops, path.stream, args);
      EXPECT_EQ(forward.losses, both.losses);
      EXPECT_EQ(forward.loss_sum, both.loss_sum);

      Problem frozen(dtype, 33, 31, 1023, DType::kF32);
      const Dense old_dw = frozen.dw.dense();
      args = frozen.Args();
      args.dw = {};
      args.losses = nullptr;
      args.loss_sum = nullptr;
      RunOp(path.ops, path.stream, args);
      EXPECT_TRUE(frozen.dx.SameElements(both.dx));
      EXPECT_EQ(frozen.dw.dense().values, old_dw.values);
      EXPECT_EQ(frozen.loss_sum, 0);
    }
  });
}

TEST(CrossEntropyTest, BitsDoNotDependOnAddressesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      Problem first(dtype, 65, 33, 1023, DType::kF32);
      RunOp(path.ops, path.stream, first.Args());
      Problem second(dtype, 65, 33, 1023, DType::kF32);
      second.x = GuardedMatrix::Normal(dtype, 65, 33, 2, 1, 1, 5);
      RunOp(path.ops, path.stream, second.Args());
      EXPECT_EQ(first.losses, second.losses);
      EXPECT_EQ(first.loss_sum, second.loss_sum);
      EXPECT_TRUE(first.dx.SameElements(second.dx));
      EXPECT_TRUE(first.dw.SameElements(second.dw));
    }
  });
}

TEST(CrossEntropyTest, LossSumIsAddedTo) {
  OnPath([](const Path& path) {
    Problem p(DType::kF32, 5, 3, 7, DType::kF32);
    RunOp(path.ops, path.stream, p.Args());
    const double once = p.loss_sum;
    p.loss_sum = 100;
    RunOp(path.ops, path.stream, p.Args());
    EXPECT_EQ(p.loss_sum, 100 + once);
  });
}

TEST(CrossEntropyTest, HugeLogitsNeitherOverflowNorLoseTheLoss) {
  OnPath([](const Path& path) {
    Problem p(DType::kF32, 1, 1, 3, DType::kF32);
    p.x.Set(0, 0, 1000);
    p.w.Set(0, 0, 1);
    p.w.Set(1, 0, -1);
    p.w.Set(2, 0, 0.999);
    p.targets[0] = 1;
    RunOp(path.ops, path.stream, p.Args());
    // log(e^1000 + e^-1000 + e^999) + 1000.
    EXPECT_NEAR(p.losses[0], 2000 + std::log1p(std::exp(-1.0)), 2e-4);
    EXPECT_NEAR(p.dx(0, 0), 0.731059 + 0.268941 * 0.999 + 1, 1e-5);
  });
}

TEST(CrossEntropyTest, NonFiniteInputGivesANonFiniteLoss) {
  OnPath([](const Path& path) {
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      for (const int64_t where : {0, 30}) {
        Problem p(DType::kF32, 2, 1, 31, DType::kF32);
        p.x.Set(0, 0, 1);  // else -inf could be a probability of 0
        p.w.Set(where, 0, bad);
        RunOp(path.ops, path.stream, p.Args());
        EXPECT_FALSE(std::isfinite(p.loss_sum)) << bad << " at " << where;
      }
    }
  });
}

// The reference's own gradients, by central differences of its own loss.
TEST(CrossEntropyTest, ReferenceGradientsAreTheDerivativesOfTheLoss) {
  const Dense x = GuardedMatrix::Normal(DType::kF32, 5, 3, 0, 1).dense();
  const Dense w = GuardedMatrix::Normal(DType::kF32, 7, 3, 0, 2).dense();
  const std::vector<int32_t> targets = {0, 6, -1, 3, 3};
  const CrossEntropyReference r = ReferenceCrossEntropy(x, w, targets, 0.5);
  const auto loss = [&](const Dense& x, const Dense& w) {
    double sum = 0;
    for (double l : ReferenceCrossEntropy(x, w, targets, 1).losses) sum += l;
    return 0.5 * sum;
  };
  for (size_t i = 0; i < x.values.size(); ++i) {
    Dense moved = x;
    const double slope = NumericalDerivative(
        [&](double v) {
          moved.values[i] = v;
          return loss(moved, w);
        },
        x.values[i]);
    EXPECT_NEAR(r.dx.values[i], slope, 1e-8);
  }
  for (size_t i = 0; i < w.values.size(); ++i) {
    Dense moved = w;
    const double slope = NumericalDerivative(
        [&](double v) {
          moved.values[i] = v;
          return loss(x, moved);
        },
        w.values[i]);
    EXPECT_NEAR(r.dw.values[i], slope, 1e-8);
  }
}

}  // namespace
}  // namespace zero
