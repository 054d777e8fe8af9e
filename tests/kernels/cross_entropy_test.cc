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

// A caller's choices for parts.
struct Parts {
  bool keeps_logits = false;
  bool late_dw = false;  // at the end, from the first part to the last
};

// A table with one part at a time in memory: each part's row statistics, then
// the last one's loss, then the gradients down to the first.
void RunInParts(const Path& path, LinearCrossEntropyArgs args,
                const Parts& parts) {
  using Work = LossPart::Work;
  const ConstMatrix w = args.w;
  const Matrix dw = args.dw, to = args.dx;
  const int64_t size = args.part_rows;
  const int64_t num_parts = (w.rows + size - 1) / size;
  // Strides are part of a product's plan, and so of its bits.
  const int64_t pad = to.dtype == DType::kF32 ? to.ld - to.cols : 0;
  GuardedMatrix dx =
      GuardedMatrix::Normal(DType::kF32, args.x.rows, args.x.cols, pad, 9);
  Scratch known(static_cast<size_t>(args.x.rows) * sizeof(LossRow));
  std::vector<std::unique_ptr<Scratch>> logits;
  args.part.rows = w.rows;
  args.part.statistics = static_cast<LossRow*>(known.workspace().data);
  const auto run = [&](int64_t part, Work work, bool with_dx, bool with_dw) {
    const int64_t first = part * size;
    const int64_t rows = std::min(size, w.rows - first);
    args.w = w.Rows(first, rows);
    args.dx = with_dx && to.data != nullptr ? dx.view() : Matrix();
    args.dw = with_dw && dw.data != nullptr ? dw.Rows(first, rows) : Matrix();
    args.part.first = first;
    args.part.work = work;
    args.part.logits = nullptr;
    if (parts.keeps_logits && part + 1 < num_parts) {
      if (work == Work::kStatistics) {
        logits.push_back(
            std::make_unique<Scratch>(path.ops.LossLogitsBytes(args)));
      }
      args.part.logits = logits[static_cast<size_t>(part)]->workspace().data;
    }
    RunCrossEntropy(path.ops, path.stream, args);
  };
  for (int64_t part = 0; part + 1 < num_parts; ++part) {
    run(part, Work::kStatistics, false, false);
  }
  run(num_parts - 1, Work::kAll, true, !parts.late_dw);
  if (to.data == nullptr) return;
  for (int64_t part = num_parts - 2; part >= 0; --part) {
    run(part, Work::kGradients, true, !parts.late_dw);
  }
  for (int64_t part = 0; part < num_parts && parts.late_dw; ++part) {
    run(part, Work::kGradients, false, true);
  }
  for (int64_t i = 0; i < to.rows; ++i) {
    path.ops.Cast(path.stream, {{dx.view().Row(i), DType::kF32, to.cols},
                                {to.Row(i), to.dtype, to.cols}});
  }
  path.stream.Synchronize();
}

constexpr Parts kWaysOfParts[] = {
    {}, {.keeps_logits = true}, {.late_dw = true}};

// 401 words in parts of 128, the last of which has words and 47 more rows; or
// 256, so that the last part has none.
TEST(CrossEntropyTest, PartsOfTheTableGiveTheBitsOfTheWholeTable) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const bool accumulate : {false, true}) {
        for (const auto& [words, others] : {std::pair(401, 47), {256, 64}}) {
          const auto make = [&, words = words, others = others] {
            CrossEntropyProblem p(dtype, 65, 32, words, DType::kF32, others);
            p.grad_scale[0] = 0.25f;
            p.targets[3] = -1;
            p.targets[4] = words - 1;
            return p;
          };
          CrossEntropyProblem whole = make();
          const Dense old_dw = accumulate ? whole.dw.dense() : ZeroDw(whole);
          LinearCrossEntropyArgs args = whole.Args();
          args.accumulate_dw = accumulate;
          args.part_rows = 128;
          RunCrossEntropy(path.ops, path.stream, args);
          CheckCrossEntropy(whole, old_dw, RoundingOf(path, dtype),
                            std::string("tiles ") + DTypeName(dtype));

          for (const Parts& ways : kWaysOfParts) {
            SCOPED_TRACE(testing::Message()
                         << DTypeName(dtype) << " keeps " << ways.keeps_logits
                         << " late " << ways.late_dw);
            CrossEntropyProblem parts = make();
            args = parts.Args();
            args.accumulate_dw = accumulate;
            args.part_rows = 128;
            RunInParts(path, args, ways);
            EXPECT_EQ(whole.losses, parts.losses);
            EXPECT_EQ(whole.loss_sum[0], parts.loss_sum[0]);
            EXPECT_TRUE(whole.dx.SameElements(parts.dx));
            EXPECT_TRUE(whole.dw.SameElements(parts.dw));
          }
          CrossEntropyProblem forward = make();
          args = forward.Args();
          args.part_rows = 128;
          args.dx = args.dw = {};
          args.grad_scale = nullptr;
          RunInParts(path, args, {});
          EXPECT_EQ(forward.losses, whole.losses);
        }
      }
    }
  });
}

// Extreme logits, the largest in the first part, in the last one, or in both:
// the other parts then have no weight, and their sums vanish.
TEST(CrossEntropyTest, PartsWhoseLogitsAreFarApartAddUp) {
  ForEachMatmulPath([](const Path& path) {
    for (const double size : {1.0, 200.0, 30000.0}) {
      for (const auto& [first, last] :
           {std::pair(0.0, size), {size, 0.0}, {size, size}, {-size, -size}}) {
        const auto make = [&, first = first, last = last] {
          CrossEntropyProblem p(DType::kF32, 3, 1, 200, DType::kF32);
          for (int64_t i = 0; i < 3; ++i) p.x.Set(i, 0, 1);
          for (int64_t v = 0; v < 200; ++v) {
            p.w.Set(v, 0, v < 64 ? first : v >= 192 ? last : -size);
          }
          p.targets = {0, 100, 199};
          return p;
        };
        CrossEntropyProblem whole = make();
        LinearCrossEntropyArgs args = whole.Args();
        args.part_rows = 64;
        RunCrossEntropy(path.ops, path.stream, args);
        CheckCrossEntropy(whole, ZeroDw(whole), RoundingOf(path, DType::kF32),
                          std::to_string(first) + " " + std::to_string(last));
        for (const Parts& ways : kWaysOfParts) {
          CrossEntropyProblem parts = make();
          args = parts.Args();
          args.part_rows = 64;
          RunInParts(path, args, ways);
          EXPECT_EQ(whole.losses, parts.losses);
          EXPECT_TRUE(whole.dx.SameElements(parts.dx));
          EXPECT_TRUE(whole.dw.SameElements(parts.dw));
        }
      }
    }
  });
}

// A part with only -inf logits has no weight; if all parts are like that, or a
// target is -inf, there is no finite loss.
TEST(CrossEntropyTest, PartsOfInfiniteLogitsWeighNothing) {
  ForEachMatmulPath([](const Path& path) {
    for (const int64_t finite : {0, 1, 2, 3}) {
      CrossEntropyProblem p(DType::kF32, 2, 1, 192, DType::kF32);
      for (int64_t i = 0; i < 2; ++i) p.x.Set(i, 0, 1);
      for (int64_t v = 0; v < 192; ++v) {
        p.w.Set(v, 0, v / 64 == finite ? 0 : -HUGE_VAL);
      }
      p.targets = {static_cast<int32_t>(finite % 3 * 64), -1};
      LinearCrossEntropyArgs args = p.Args();
      args.part_rows = 64;
      args.dx = args.dw = {};
      RunCrossEntropy(path.ops, path.stream, args);
      if (finite == 3) {
        EXPECT_FALSE(std::isfinite(p.losses[0]));
      } else {
        EXPECT_NEAR(p.losses[0], std::log(64.0), 1e-6);
        p.targets[0] = static_cast<int32_t>((finite + 1) % 3 * 64);
        RunCrossEntropy(path.ops, path.stream, args);
        EXPECT_FALSE(std::isfinite(p.losses[0]));
      }
      EXPECT_EQ(p.losses[1], 0);
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
