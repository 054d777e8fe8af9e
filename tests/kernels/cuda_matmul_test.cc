// Plans of matrix products and the epilogues of cuBLASLt, on the emulated GPU
// and on a real one. linear_test has the odd shapes; these are the even ones
// that a model has, where epilogues are fused.
#include "kernels/cuda/check.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/workspace.h"
#include "tests/kernels/cross_entropy_checks.h"
#include "tests/kernels/matrix.h"
#include "tests/support/max_or_nan.h"

namespace zero {
namespace {

using cuda::Epilogue;
using cuda::MatmulPlans;
using cuda::Product;

constexpr DType kShortTypes[] = {DType::kBF16, DType::kF16};

// Calls fn on GPU 0, opened with `options`. Ops are queued: fn waits.
void OnGpu(const CudaOptions& options,
           const std::function<void(Ops&, Stream&)>& fn) {
  auto device = MakeCudaDevice(0, options);
  ASSERT_TRUE(device.ok()) << device.status();
  const auto stream = (*device)->MakeStream(StreamRole::kCompute);
  fn((*device)->ops(), *stream);
  stream->Synchronize();
}

void RunProduct(MatmulPlans& plans, Stream& stream, const Product& p) {
  Scratch scratch(plans.WorkspaceBytes(p));
  plans.Run(stream, p, scratch.workspace());
  stream.Synchronize();
}

Product ProductOf(GuardedMatrix& a, GuardedMatrix& b, GuardedMatrix& c) {
  Product p;
  p.a = a.view();
  p.b = b.view();
  p.c = c.view();
  return p;
}

// The error of |a b| in dtype in, in element (i, j) of c.
ErrorBound BoundOf(const Dense& a, const Dense& b, const Dense& want,
                   DType out) {
  return [a, b_t = Transposed(b), want, out](int64_t i, int64_t j) {
    return SumError(Norm(a, i), Norm(b_t, j)) +
           2 * HalfUlp(out) * std::abs(want(i, j)) + TinyStep(out);
  };
}

TEST(CudaMatmulTest, APlanIsMadeOncePerShapeStrideDtypeAndAlignment) {
  OnGpu({}, [](Ops& ops, Stream& stream) {
    MatmulPlans plans(ops, {});
    EXPECT_EQ(plans.num_plans(), 0);
    const auto run = [&](DType dtype, int64_t m, int64_t pad, int64_t offset) {
      GuardedMatrix a = GuardedMatrix::Normal(dtype, m, 32, pad, 1, 1, offset);
      GuardedMatrix b = GuardedMatrix::Normal(dtype, 32, 24, 0, 2);
      GuardedMatrix c(dtype, m, 24);
      RunProduct(plans, stream, ProductOf(a, b, c));
      const Dense want = Matmul(a.dense(), b.dense());
      ExpectNear(c, want, BoundOf(a.dense(), b.dense(), want, dtype), "c");
      return plans.num_plans();
    };
    EXPECT_EQ(run(DType::kBF16, 16, 0, 0), 1);
    EXPECT_EQ(run(DType::kBF16, 16, 0, 0), 1);
    EXPECT_EQ(run(DType::kBF16, 16, 0, 8), 1);  // 16 bytes on
    EXPECT_EQ(run(DType::kBF16, 48, 0, 0), 2);
    EXPECT_EQ(run(DType::kBF16, 16, 8, 0), 3);
    EXPECT_EQ(run(DType::kF16, 16, 0, 0), 4);
    EXPECT_EQ(run(DType::kBF16, 16, 0, 1), 5);  // 2 bytes on
    EXPECT_EQ(run(DType::kBF16, 16, 0, 3), 5);
    EXPECT_EQ(plans.num_runs(), 8);
  });
}

// The fused activation reads the sum in fp32, the separate one its rounded
// form: |gelu'| <= 1.13 halves of an ulp of it. cuBLASLt may take tanh from the
// hardware: 2^-11 of it at most (PTX, tanh.approx.f32), times |x| / 2.
double FusedGeluError(DType dtype, double pre, double y) {
  return 1.13 * 2 * HalfUlp(dtype) * std::abs(pre) +
         HalfUlp(dtype) * std::abs(y) + std::ldexp(std::abs(pre), -12) +
         std::ldexp(1.0, -20);
}

TEST(CudaMatmulTest, FusedGeluIsTheSeparateOneWithinRounding) {
  OnGpu({}, [](Ops& ops, Stream& stream) {
    for (const DType dtype : kShortTypes) {
      for (const bool with_bias : {false, true}) {
        for (const bool with_pre : {false, true}) {
          const int64_t m = 24, k = 64, n = 40;
          GuardedMatrix x = GuardedMatrix::Normal(dtype, m, k, 8, 1);
          GuardedMatrix w = GuardedMatrix::Normal(dtype, n, k, 0, 2, 0.125);
          GuardedMatrix bias = GuardedMatrix::Normal(dtype, 1, n, 0, 3);
          GuardedMatrix pre(dtype, m, n, 16), y(dtype, m, n, 8);
          LinearArgs args;
          args.x = x.view();
          args.w = w.view();
          if (with_bias) args.bias = bias.row_vector();
          args.y = y.view();
          args.act = Gelu::kTanh;
          if (with_pre) args.pre_act = pre.view();
          Scratch scratch(ops.LinearWorkspaceBytes(args));
          ops.Linear(stream, args, scratch.workspace());
          stream.Synchronize();

          Dense sum = Matmul(x.dense(), Transposed(w.dense()));
          Dense want = sum;
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              if (with_bias) sum(i, j) += bias(0, j);
              want(i, j) = ReferenceGelu(Gelu::kTanh, sum(i, j));
            }
          }
          ExpectNear(
              y, want,
              [&](int64_t i, int64_t j) {
                return FusedGeluError(dtype, sum(i, j), want(i, j)) +
                       TinyStep(dtype);
              },
              "gelu");
          if (!with_pre) continue;
          ExpectNear(pre, sum,
                     BoundOf(x.dense(), Transposed(w.dense()), sum, dtype),
                     "input of gelu");
        }
      }
    }
  });
}

TEST(CudaMatmulTest, FusedGeluGradientIsTheSeparateOneWithinRounding) {
  OnGpu({}, [](Ops& ops, Stream& stream) {
    for (const DType dtype : kShortTypes) {
      const int64_t m = 24, k = 40, n = 64;
      GuardedMatrix dy = GuardedMatrix::Normal(dtype, m, n, 0, 1);
      GuardedMatrix w = GuardedMatrix::Normal(dtype, n, k, 8, 2, 0.125);
      GuardedMatrix pre = GuardedMatrix::Normal(dtype, m, k, 16, 3, 2);
      GuardedMatrix dx(dtype, m, k, 8);
      LinearBackwardInputArgs args;
      args.dy = dy.view();
      args.w = w.view();
      args.dx = dx.view();
      args.act = Gelu::kTanh;
      args.pre_act = pre.view();
      Scratch scratch(ops.LinearBackwardInputWorkspaceBytes(args));
      ops.LinearBackwardInput(stream, args, scratch.workspace());
      stream.Synchronize();
      const Dense product = Matmul(dy.dense(), w.dense());
      Dense want = product;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          want(i, j) *= ReferenceGeluDerivative(Gelu::kTanh, pre(i, j));
        }
      }
      // The slope from the hardware's tanh: terms of 2^-11 and, times x, of
      // 2^-11 twice; the product rounded once if the kernels are separate.
      ExpectNear(
          dx, want,
          [&](int64_t i, int64_t j) {
            return std::abs(product(i, j)) *
                       (1.13 * 2 * HalfUlp(dtype) +
                        std::ldexp(2 + std::abs(pre(i, j)), -11)) +
                   std::ldexp(1.0, -20);
          },
          "gelu gradient");
    }
  });
}

TEST(CudaMatmulTest, SumsOfTheOperandComeWithTheProduct) {
  OnGpu({}, [](Ops& ops, Stream& stream) {
    MatmulPlans plans(ops, {});
    const int64_t m = 48, n = 40, k = 64;
    GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, k, m, 0, 1);
    GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, k, n, 0, 2);
    GuardedMatrix dw(DType::kF32, m, n), sums(DType::kF32, 1, m);
    Product p = ProductOf(dy, x, dw);
    p.a_transposed = true;
    p.a_sums = sums.row_vector();
    Scratch scratch(plans.WorkspaceBytes(p));
    if (!plans.TryRun(stream, p, scratch.workspace())) {
      GTEST_SKIP() << "no such epilogue on this GPU";
    }
    stream.Synchronize();
    const Dense dy_t = Transposed(dy.dense());
    const Dense want = Matmul(dy_t, x.dense());
    ExpectNear(dw, want, BoundOf(dy_t, x.dense(), want, DType::kF32), "dw");
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t r = 0; r < k; ++r) sum += dy(r, i);
      EXPECT_NEAR(sums(0, i), sum, SumError(Norm(dy_t, i), std::sqrt(k)));
    }
  });
}

TEST(CudaMatmulTest, AccumulatedProductsAreTimedWithoutAddingUp) {
  OnGpu({.time_algorithms = true}, [](Ops& ops, Stream& stream) {
    for (const bool accumulate : {false, true}) {
      const int64_t m = 64, n = 48, k = 40;
      GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, m, n, 0, 1);
      GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, m, k, 0, 2);
      GuardedMatrix dw = GuardedMatrix::Normal(DType::kF32, n, k, 0, 3);
      GuardedMatrix dbias = GuardedMatrix::Normal(DType::kF32, 1, n, 0, 4);
      const Dense old_dw = dw.dense(), old_dbias = dbias.dense();
      LinearBackwardWeightArgs args;
      args.dy = dy.view();
      args.x = x.view();
      args.dw = dw.view();
      args.accumulate_dw = accumulate;
      args.dbias = dbias.row_vector();
      args.accumulate_dbias = accumulate;
      const int runs = accumulate ? 3 : 2;
      for (int i = 0; i < runs; ++i) {
        Scratch scratch(ops.LinearBackwardWeightWorkspaceBytes(args));
        ops.LinearBackwardWeight(stream, args, scratch.workspace());
        stream.Synchronize();
      }
      const double times = accumulate ? runs : 1;
      const Dense dy_t = Transposed(dy.dense()), x_t = Transposed(x.dense());
      Dense want = Matmul(dy_t, x.dense()), want_bias(1, n);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t r = 0; r < m; ++r) want_bias(0, i) += times * dy(r, i);
        if (accumulate) want_bias(0, i) += old_dbias(0, i);
        for (int64_t j = 0; j < k; ++j) {
          want(i, j) = times * want(i, j) + (accumulate ? old_dw(i, j) : 0);
        }
      }
      const auto bound = [&](double size, double old) {
        return times * (size + 2 * HalfUlp(DType::kF32) * std::abs(old));
      };
      ExpectNear(
          dw, want,
          [&](int64_t i, int64_t j) {
            return bound(2 * SumError(Norm(dy_t, i), Norm(x_t, j)),
                         old_dw(i, j));
          },
          "dw");
      ExpectNear(
          dbias, want_bias,
          [&](int64_t, int64_t j) {
            return bound(2 * SumError(Norm(dy_t, j), std::sqrt(m)),
                         old_dbias(0, j));
          },
          "dbias");
    }
  });
}

TEST(CudaMatmulTest, WorkspaceIsAFunctionOfTheShapeWithinItsBound) {
  OnGpu({}, [](Ops& ops, Stream&) {
    MatmulPlans plans(ops, {});
    if (!plans.AccumulatesIntoF32()) GTEST_SKIP() << "adds apart";
    for (const int64_t m : {0, 1, 63, 1024, 65536}) {
      for (const int64_t n : {0, 1, 768, 50257}) {
        LinearArgs args;
        args.x = {nullptr, DType::kBF16, m, 768, 768};
        args.w = {nullptr, DType::kBF16, n, 768, 768};
        args.y = {nullptr, DType::kBF16, m, n, n};
        const size_t bytes = ops.LinearWorkspaceBytes(args);
        EXPECT_LE(bytes, cuda::kMaxLibraryBytes + 256) << m << " " << n;
        EXPECT_EQ(bytes == 0, m * n == 0) << m << " " << n;
        if (m * n <= 4096) {
          EXPECT_LE(bytes, (size_t{1} << 20) + 256);
        }
      }
    }
  });
}

// fp32 with 10 bits of mantissa, and with all 23 unless that was asked for.
TEST(CudaMatmulTest, Tf32IsUsedWhereItIsAllowedAndNotElsewhere) {
  for (const bool allow : {false, true}) {
    OnGpu({.allow_tf32 = allow}, [&](Ops& ops, Stream& stream) {
      GuardedMatrix x = GuardedMatrix::Normal(DType::kF32, 64, 128, 0, 1);
      GuardedMatrix w = GuardedMatrix::Normal(DType::kF32, 64, 128, 0, 2);
      GuardedMatrix y(DType::kF32, 64, 64);
      LinearArgs args;
      args.x = x.view();
      args.w = w.view();
      args.y = y.view();
      Scratch scratch(ops.LinearWorkspaceBytes(args));
      ops.Linear(stream, args, scratch.workspace());
      stream.Synchronize();
      const Dense want = Matmul(x.dense(), Transposed(w.dense()));
      double worst = 0;
      for (int64_t i = 0; i < 64; ++i) {
        for (int64_t j = 0; j < 64; ++j) {
          const double size = Norm(x.dense(), i) * Norm(w.dense(), j);
          worst = MaxOrNan(worst, std::abs(y(i, j) - want(i, j)) / size);
        }
      }
      // Six deviations of 128 terms with two roundings of 2^-11 each, over the
      // product of the norms: 6 * sqrt(2) 2^-11 / sqrt(3); exact in fp32.
      EXPECT_LE(worst, allow ? 5 * std::ldexp(1.0, -11) : SumError(1, 1));
    });
  }
}

// 50 rows in chunks of 16: three and a rest of 2.
TEST(CudaCrossEntropyTest, ChunksAddUp) {
  OnGpu({.loss_chunk_rows = 16}, [](Ops& ops, Stream& stream) {
    for (const DType dtype : kFloatTypes) {
      for (const bool accumulate : {false, true}) {
        CrossEntropyProblem p(dtype, 50, 24, 131, DType::kF32);
        std::fill(p.targets.begin() + 16, p.targets.begin() + 32, -1);
        const Dense old_dw = accumulate ? p.dw.dense() : ZeroDw(p);
        LinearCrossEntropyArgs args = p.Args();
        args.accumulate_dw = accumulate;
        RunCrossEntropy(ops, stream, args);
        stream.Synchronize();
        const bool rounded = dtype != DType::kF32;
        CheckCrossEntropy(p, old_dw, {rounded, rounded}, DTypeName(dtype));
      }
    }
  });
}

// 16-bit gradients replace 32-bit logits, over more than one tile.
TEST(CudaCrossEntropyTest, Fp32LogitsOf16BitModelsAreNotRounded) {
  OnGpu({.fp32_logits = true}, [](Ops& ops, Stream& stream) {
    for (const DType dtype : kShortTypes) {
      for (const int64_t words : {131, 5003}) {
        CrossEntropyProblem p(dtype, 3, 24, words, DType::kF32, /*others=*/117);
        RunCrossEntropy(ops, stream, p.Args());
        stream.Synchronize();
        CheckCrossEntropy(p, ZeroDw(p), {.logits = false, .gradient = true},
                          DTypeName(dtype));
      }
    }
  });
}

// Such a step is skipped: the gradient is not finite either.
TEST(CudaCrossEntropyTest, AnFp16LogitBeyondItsRangeIsSeen) {
  for (const bool fp32_logits : {false, true}) {
    OnGpu({.fp32_logits = fp32_logits}, [&](Ops& ops, Stream& stream) {
      for (const double weight : {300, -300}) {
        CrossEntropyProblem p(DType::kF16, 1, 1, 3, DType::kF32);
        p.x.Set(0, 0, 300);
        p.w.Set(0, 0, weight);  // a logit of 90000 or -90000
        p.targets[0] = 0;
        RunCrossEntropy(ops, stream, p.Args());
        stream.Synchronize();
        EXPECT_EQ(std::isfinite(p.losses[0]), fp32_logits) << weight;
        EXPECT_EQ(std::isfinite(p.loss_sum[0]), fp32_logits) << weight;
        EXPECT_EQ(std::isfinite(p.dx(0, 0)), fp32_logits) << weight;
      }
    });
  }
}

TEST(CudaCrossEntropyTest, LogitsOfAChunkStayWithinTwoGigabytes) {
  constexpr size_t kProducts = size_t{33} << 20;
  for (const bool fp32_logits : {false, true}) {
    const CudaOptions options = {.fp32_logits = fp32_logits,
                                 .loss_chunk_rows = 8192};
    OnGpu(options, [&](Ops& ops, Stream&) {
      for (const size_t words : {1000, 50257, 151936}) {
        LinearCrossEntropyArgs args;
        args.x = {nullptr, DType::kBF16, 65536, 768, 768};
        args.w = {nullptr, DType::kBF16, static_cast<int64_t>(words), 768, 768};
        args.vocab = static_cast<int64_t>(words);
        const size_t bytes = ops.LinearCrossEntropyWorkspaceBytes(args);
        EXPECT_LE(bytes, (size_t{2} << 30) + kProducts) << words;
        EXPECT_LE(bytes,
                  8192 * (words + 63) * (fp32_logits ? 4 : 2) + kProducts)
            << words;
      }
    });
  }
}

TEST(CudaCrossEntropyTest, EmptyBatchOverwritesTheWeightGradient) {
  OnGpu({}, [](Ops& ops, Stream& stream) {
    CrossEntropyProblem p(DType::kBF16, 1, 24, 31, DType::kF32);
    LinearCrossEntropyArgs args = p.Args();
    args.x.rows = args.dx.rows = 0;
    RunCrossEntropy(ops, stream, args);
    stream.Synchronize();
    for (const double v : p.dw.dense().values) EXPECT_EQ(v, 0);
    EXPECT_EQ(p.loss_sum[0], 0);
  });
}

}  // namespace
}  // namespace zero
