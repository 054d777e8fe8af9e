#include "tests/kernels/cross_entropy_checks.h"

namespace zero {
namespace {

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
          CrossEntropyProblem p(dtype, s.m, s.c, s.v, DType::kF32);
          p.grad_scale[0] = 0.25f;
          p.targets[static_cast<size_t>(s.m / 2)] = -100;
          const Dense old_dw = accumulate ? p.dw.dense() : ZeroDw(p);
          LinearCrossEntropyArgs args = p.Args();
          args.accumulate_dw = accumulate;
          RunCrossEntropy(path.ops, path.stream, args);
          const std::string what = std::to_string(s.m) + "x" +
                                   std::to_string(s.c) + "x" +
                                   std::to_string(s.v) + " " + DTypeName(dtype);
          CheckCrossEntropy(p, old_dw, RoundingOf(path, dtype), what);
        }
      }
    }
  });
}

// Tables are stored with more rows than there are words.
TEST(CrossEntropyTest, RowsBehindTheWordsAreNoneAndGetNoGradient) {
  struct Shape {
    int64_t words, others;
  };
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      // The second begins within a tile of a GPU's rows and ends in the next.
      for (const Shape& s : {Shape{61, 67}, Shape{4001, 223}}) {
        for (const bool accumulate : {false, true}) {
          CrossEntropyProblem p(dtype, 33, 31, s.words, DType::kF32, s.others);
          p.targets[5] = -1;
          const Dense old_dw = accumulate ? p.dw.dense() : ZeroDw(p);
          LinearCrossEntropyArgs args = p.Args();
          args.accumulate_dw = accumulate;
          RunCrossEntropy(path.ops, path.stream, args);
          CheckCrossEntropy(p, old_dw, RoundingOf(path, dtype),
                            std::to_string(s.words) + " " + DTypeName(dtype));
        }
      }
    }
  });
}

TEST(CrossEntropyTest, GradientIntoA16BitSinkIsRoundedOnce) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      CrossEntropyProblem p(dtype, 33, 31, 65, dtype);
      RunCrossEntropy(path.ops, path.stream, p.Args());
      CheckCrossEntropy(p, ZeroDw(p), RoundingOf(path, dtype),
                        DTypeName(dtype));
    }
  });
}

// Whole numbers up to 24, which 16 bits hold: softmax and loss are in fp32.
TEST(CrossEntropyTest, LogitsThatFitTheDtypeLoseNothingByIt) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      CrossEntropyProblem p(dtype, 9, 4, 1023, DType::kF32);
      for (int64_t k = 0; k < 4; ++k) {
        for (int64_t i = 0; i < 9; ++i) p.x.Set(i, k, (i * 5 + k * 3) % 7 - 3);
        for (int64_t j = 0; j < 1023; ++j) {
          p.w.Set(j, k, (j * 7 + k * j / 5) % 5 - 2);
        }
      }
      RunCrossEntropy(path.ops, path.stream, p.Args());
      CrossEntropyRounding rounding = RoundingOf(path, dtype);
      rounding.logits = false;
      CheckCrossEntropy(p, ZeroDw(p), rounding, DTypeName(dtype));
    }
  });
}

TEST(CrossEntropyTest, IgnoredRowsGiveZerosAndOverwriteWhatTheyOwn) {
  OnPath([](const Path& path) {
    CrossEntropyProblem p(DType::kF32, 33, 3, 31, DType::kF32);
    std::fill(p.targets.begin(), p.targets.end(), -1);
    RunCrossEntropy(path.ops, path.stream, p.Args());
    EXPECT_EQ(p.loss_sum[0], 0);
    for (const double v : p.dx.dense().values) EXPECT_EQ(v, 0);
    for (const double v : p.dw.dense().values) EXPECT_EQ(v, 0);

    CrossEntropyProblem kept(DType::kF32, 33, 3, 31, DType::kF32);
    std::fill(kept.targets.begin(), kept.targets.end(), -1);
    const Dense old_dw = kept.dw.dense();
    LinearCrossEntropyArgs args = kept.Args();
    args.accumulate_dw = true;
    RunCrossEntropy(path.ops, path.stream, args);
    EXPECT_EQ(kept.dw.dense().values, old_dw.values);
  });
}

TEST(CrossEntropyTest, ForwardOnlyHasTheSameLossAndWritesNoGradient) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      CrossEntropyProblem both(dtype, 33, 31, 1023, DType::kF32);
      RunCrossEntropy(path.ops, path.stream, both.Args());
      CrossEntropyProblem forward(dtype, 33, 31, 1023, DType::kF32);
      LinearCrossEntropyArgs args = forward.Args();
      args.dx = {};
      args.dw = {};
      args.grad_scale = nullptr;
      RunCrossEntropy(path.ops, path.stream, args);
      EXPECT_EQ(forward.losses, both.losses);
      EXPECT_EQ(forward.loss_sum[0], both.loss_sum[0]);

      CrossEntropyProblem frozen(dtype, 33, 31, 1023, DType::kF32);
      const Dense old_dw = frozen.dw.dense();
      args = frozen.Args();
      args.dw = {};
      args.losses = nullptr;
      args.loss_sum = nullptr;
      RunCrossEntropy(path.ops, path.stream, args);
      EXPECT_TRUE(frozen.dx.SameElements(both.dx));
      EXPECT_EQ(frozen.dw.dense().values, old_dw.values);
      EXPECT_EQ(frozen.loss_sum[0], 0);
    }
  });
}

TEST(CrossEntropyTest, BitsDoNotDependOnAddressesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      CrossEntropyProblem first(dtype, 65, 33, 1023, DType::kF32);
      RunCrossEntropy(path.ops, path.stream, first.Args());
      CrossEntropyProblem second(dtype, 65, 33, 1023, DType::kF32);
      second.x = GuardedMatrix::Normal(dtype, 65, 33, 2, 1, 1, 5);
      RunCrossEntropy(path.ops, path.stream, second.Args());
      EXPECT_EQ(first.losses, second.losses);
      EXPECT_EQ(first.loss_sum[0], second.loss_sum[0]);
      EXPECT_TRUE(first.dx.SameElements(second.dx));
      EXPECT_TRUE(first.dw.SameElements(second.dw));
    }
  });
}

TEST(CrossEntropyTest, LossSumIsAddedTo) {
  OnPath([](const Path& path) {
    CrossEntropyProblem p(DType::kF32, 5, 3, 7, DType::kF32);
    RunCrossEntropy(path.ops, path.stream, p.Args());
    const double once = p.loss_sum[0];
    p.loss_sum[0] = 100;
    RunCrossEntropy(path.ops, path.stream, p.Args());
    EXPECT_EQ(p.loss_sum[0], 100 + once);
  });
}

TEST(CrossEntropyTest, HugeLogitsNeitherOverflowNorLoseTheLoss) {
  OnPath([](const Path& path) {
    CrossEntropyProblem p(DType::kF32, 1, 1, 3, DType::kF32);
    p.x.Set(0, 0, 1000);
    p.w.Set(0, 0, 1);
    p.w.Set(1, 0, -1);
    p.w.Set(2, 0, 0.999);
    p.targets[0] = 1;
    RunCrossEntropy(path.ops, path.stream, p.Args());
    // log(e^1000 + e^-1000 + e^999) + 1000.
    EXPECT_NEAR(p.losses[0], 2000 + std::log1p(std::exp(-1.0)), 2e-4);
    EXPECT_NEAR(p.dx(0, 0), 0.731059 + 0.268941 * 0.999 + 1, 1e-5);
  });
}

TEST(CrossEntropyTest, NonFiniteInputGivesANonFiniteLoss) {
  OnPath([](const Path& path) {
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      for (const int64_t where : {0, 30}) {
        CrossEntropyProblem p(DType::kF32, 2, 1, 31, DType::kF32);
        p.x.Set(0, 0, 1);  // else -inf could be a probability of 0
        p.w.Set(where, 0, bad);
        RunCrossEntropy(path.ops, path.stream, p.Args());
        EXPECT_FALSE(std::isfinite(p.loss_sum[0])) << bad << " at " << where;
      }
    }
  });
}

// A table of which one part at a time is there: the logits of the parts, then
// the last one's loss, then the gradients down to the first.
void RunInParts(const Path& path, LinearCrossEntropyArgs args,
                GuardedMatrix& dx) {
  const ConstMatrix w = args.w;
  const Matrix dw = args.dw, to = args.dx;
  const int64_t size = args.part_rows;
  const int64_t num_parts = (w.rows + size - 1) / size;
  args.part.rows = w.rows;
  char any = 0;
  args.part.logits = &any;
  Scratch logits(path.ops.LossLogitsBytes(args));
  args.part.logits = logits.workspace().data;
  const auto run = [&](int64_t part, LossPart::Work work) {
    const int64_t first = part * size;
    const int64_t rows = std::min(size, w.rows - first);
    args.w = w.Rows(first, rows);
    if (dw.data != nullptr) args.dw = dw.Rows(first, rows);
    args.part.first = first;
    args.part.work = work;
    args.dx = work == LossPart::Work::kLogits || to.data == nullptr ? Matrix()
                                                                    : dx.view();
    RunCrossEntropy(path.ops, path.stream, args);
  };
  for (int64_t part = 0; part + 1 < num_parts; ++part) {
    run(part, LossPart::Work::kLogits);
  }
  run(num_parts - 1, LossPart::Work::kAll);
  if (to.data == nullptr) return;
  for (int64_t part = num_parts - 2; part >= 0; --part) {
    run(part, LossPart::Work::kGradients);
  }
  for (int64_t i = 0; i < to.rows; ++i) {
    path.ops.Cast(path.stream, {{dx.view().Row(i), DType::kF32, to.cols},
                                {to.Row(i), to.dtype, to.cols}});
  }
  path.stream.Synchronize();
}

TEST(CrossEntropyTest, PartsOfTheTableGiveTheBitsOfTheWholeTable) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const bool accumulate : {false, true}) {
        const auto make = [&] {
          CrossEntropyProblem p(dtype, 65, 32, 401, DType::kF32, 47);
          p.grad_scale[0] = 0.25f;
          p.targets[3] = -1;
          return p;
        };
        CrossEntropyProblem whole = make(), parts = make();
        const Dense old_dw = accumulate ? whole.dw.dense() : ZeroDw(whole);
        LinearCrossEntropyArgs args = whole.Args();
        args.accumulate_dw = accumulate;
        args.part_rows = 128;
        RunCrossEntropy(path.ops, path.stream, args);
        CheckCrossEntropy(whole, old_dw, RoundingOf(path, dtype),
                          std::string("tiles ") + DTypeName(dtype));

        args = parts.Args();
        args.accumulate_dw = accumulate;
        args.part_rows = 128;
        GuardedMatrix dx = GuardedMatrix::Normal(DType::kF32, 65, 32, 0, 9);
        RunInParts(path, args, dx);
        EXPECT_EQ(whole.losses, parts.losses);
        EXPECT_EQ(whole.loss_sum[0], parts.loss_sum[0]);
        EXPECT_TRUE(whole.dx.SameElements(parts.dx)) << DTypeName(dtype);
        EXPECT_TRUE(whole.dw.SameElements(parts.dw)) << DTypeName(dtype);

        CrossEntropyProblem forward = make();
        args = forward.Args();
        args.part_rows = 128;
        args.dx = args.dw = {};
        args.grad_scale = nullptr;
        RunInParts(path, args, dx);
        EXPECT_EQ(forward.losses, whole.losses);
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
