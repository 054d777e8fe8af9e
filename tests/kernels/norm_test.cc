#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

// Rows of a strided operand in the order of the statistics.
struct Layout {
  int64_t outer, inner, width, extra;
  int64_t stride() const { return inner * width + extra; }
  int64_t size() const { return outer * stride(); }
  int64_t num_rows() const { return outer * inner; }
  int64_t At(int64_t row, int64_t i) const {
    return row / inner * stride() + row % inner * width + i;
  }
};
constexpr Layout kLayouts[] = {{0, 1, 8, 0},   {1, 1, 1, 0},    {3, 1, 31, 2},
                               {5, 3, 33, 7},  {2, 1, 1023, 0}, {70, 2, 64, 0},
                               {300, 1, 40, 1}};

struct Norm {
  bool layer;  // LayerNorm, else RMSNorm
  bool bias;
};
constexpr Norm kNorms[] = {{true, true}, {true, false}, {false, false}};

constexpr double kEps = 1e-5;

// y of one row in float64.
std::vector<double> Reference(const Norm& norm, const std::vector<double>& x,
                              const Array& weight, const Array& bias,
                              double* mean_out = nullptr,
                              double* rstd_out = nullptr) {
  const double n = static_cast<double>(x.size());
  double mean = 0, variance = 0;
  if (norm.layer) {
    for (const double v : x) mean += v / n;
  }
  for (const double v : x) variance += (v - mean) * (v - mean) / n;
  const double rstd = 1 / std::sqrt(variance + kEps);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - mean) * rstd * weight[i] + (norm.bias ? bias[i] : 0);
  }
  if (mean_out != nullptr) *mean_out = mean;
  if (rstd_out != nullptr) *rstd_out = rstd;
  return y;
}

Rows View(Array& a, const Layout& l) {
  return a.rows(l.outer, l.inner, l.width, l.stride());
}

void Forward(const Path& path, const Norm& norm,
             const NormForwardArgs& args) {
  if (norm.layer) {
    path.ops.LayerNormForward(path.stream, args);
  } else {
    path.ops.RmsNormForward(path.stream, args);
  }
}

TEST(NormTest, ForwardMatchesFloat64OfTheStoredSum) {
  ForEachPath([](const Path& path) {
    for (const Norm& norm : kNorms) {
      for (const DType dtype : kFloatTypes) {
        for (const Layout& l : kLayouts) {
          Array x = Array::Normal(dtype, l.size(), 1, 2.0);
          Array residual = Array::Normal(dtype, l.size(), 2);
          Array weight = Array::Normal(dtype, l.width, 3);
          Array bias = Array::Normal(dtype, l.width, 4);
          Array sum(dtype, l.size()), y(dtype, l.size());
          Array mean(DType::kF32, l.num_rows());
          Array rstd(DType::kF32, l.num_rows());
          NormForwardArgs args;
          args.x = View(x, l);
          args.residual = View(residual, l);
          args.sum = View(sum, l);
          args.weight = weight.vector();
          if (norm.bias) args.bias = bias.vector();
          args.y = View(y, l);
          args.mean = mean.floats();
          args.rstd = rstd.floats();
          args.eps = static_cast<float>(kEps);
          Forward(path, norm, args);
          for (int64_t row = 0; row < l.num_rows(); ++row) {
            std::vector<double> s(l.width);
            for (int64_t i = 0; i < l.width; ++i) {
              Array rounded(dtype, 1);
              rounded.Set(0, x[l.At(row, i)] + residual[l.At(row, i)]);
              s[i] = sum[l.At(row, i)];
              ASSERT_EQ(s[i], rounded[0]);
            }
            double want_mean, want_rstd;
            const std::vector<double> want =
                Reference(norm, s, weight, bias, &want_mean, &want_rstd);
            // fp32 sums of up to 1023 terms in lanes: about 20 half-ulps of
            // the largest partial sums; one rounding to storage.
            if (norm.layer) {
              ASSERT_NEAR(mean[row], want_mean, 2e-6);
            }
            ASSERT_NEAR(rstd[row] / want_rstd, 1, 2e-6);
            for (int64_t i = 0; i < l.width; ++i) {
              ASSERT_NEAR(y[l.At(row, i)], want[i],
                          1e-5 + std::abs(want[i]) * HalfUlp(dtype))
                  << "row " << row << " column " << i;
            }
          }
        }
      }
    }
  });
}

TEST(NormTest, ForwardWithoutResidualNormalizesXAndInPlaceSumIsTheSame) {
  ForEachPath([](const Path& path) {
    for (const Norm& norm : kNorms) {
      const Layout l = {5, 3, 33, 7};
      Array x = Array::Normal(DType::kBF16, l.size(), 5);
      Array residual = Array::Normal(DType::kBF16, l.size(), 6);
      Array weight = Array::Normal(DType::kBF16, l.width, 7);
      Array bias = Array::Normal(DType::kBF16, l.width, 8);
      Array sum(DType::kBF16, l.size()), y(sum), y_of_sum(sum), y_in_place(sum);
      NormForwardArgs args;
      args.x = View(x, l);
      args.residual = View(residual, l);
      args.sum = View(sum, l);
      args.weight = weight.vector();
      if (norm.bias) args.bias = bias.vector();
      args.y = View(y, l);
      Forward(path, norm, args);  // mean and rstd not wanted

      NormForwardArgs alone = args;
      alone.x = View(sum, l);
      alone.residual = {};
      alone.sum = {};
      alone.y = View(y_of_sum, l);
      Forward(path, norm, alone);
      EXPECT_TRUE(y.SameBits(y_of_sum));

      for (Array* target : {&x, &residual}) {
        Array saved = *target;
        NormForwardArgs in_place = args;
        in_place.sum = View(*target, l);
        in_place.y = View(y_in_place, l);
        Forward(path, norm, in_place);
        EXPECT_TRUE(y.SameBits(y_in_place));
        *target = saved;
      }
    }
  });
}

struct Grads {
  Array dx, dweight, dbias;
};

Grads Backward(const Path& path, const Norm& norm, const Layout& l, Array& dy,
               Array& sum, Array& weight, Array* dsum, bool alias,
               DType weight_grad_dtype, bool accumulate, double before) {
  // The statistics as the forward pass stores them.
  Array mean(DType::kF32, l.num_rows()), rstd(mean);
  for (int64_t row = 0; row < l.num_rows(); ++row) {
    std::vector<double> s(l.width);
    for (int64_t i = 0; i < l.width; ++i) s[i] = sum[l.At(row, i)];
    double m, r;
    Reference(norm, s, weight, weight, &m, &r);
    mean.Set(row, m);
    rstd.Set(row, r);
  }
  Grads g = {alias ? *dsum : Array(dy.dtype(), l.size()),
             Array(weight_grad_dtype, l.width),
             Array(weight_grad_dtype, l.width)};
  for (int64_t i = 0; i < l.width; ++i) {
    g.dweight.Set(i, before);
    g.dbias.Set(i, before);
  }
  NormBackwardArgs args;
  args.dy = View(dy, l);
  args.sum = View(sum, l);
  args.weight = weight.vector();
  args.mean = mean.floats();
  args.rstd = rstd.floats();
  if (dsum != nullptr) args.dsum = View(alias ? g.dx : *dsum, l);
  args.dx = View(g.dx, l);
  args.dweight = g.dweight.vector();
  args.accumulate_dweight = accumulate;
  if (norm.bias) args.dbias = g.dbias.vector();
  args.accumulate_dbias = accumulate;
  std::vector<double> workspace(
      path.ops.NormBackwardWorkspaceBytes(args) / sizeof(double) + 1, NAN);
  const Workspace scratch = {workspace.data(),
                             path.ops.NormBackwardWorkspaceBytes(args)};
  if (norm.layer) {
    path.ops.LayerNormBackward(path.stream, args, scratch);
  } else {
    path.ops.RmsNormBackward(path.stream, args, scratch);
  }
  return g;
}

TEST(NormTest, BackwardIsTheNumericalDerivative) {
  ForEachPath([](const Path& path) {
    for (const Norm& norm : kNorms) {
      for (const DType dtype : kFloatTypes) {
        for (const Layout& l :
             {Layout{1, 1, 1, 0}, Layout{3, 1, 31, 2}, Layout{4, 3, 33, 7}}) {
          Array dy = Array::Normal(dtype, l.size(), 1);
          Array sum = Array::Normal(dtype, l.size(), 2, 2.0);
          Array weight = Array::Normal(dtype, l.width, 3);
          Array bias(dtype, l.width);
          Array dsum = Array::Normal(dtype, l.size(), 4);
          const Grads g = Backward(path, norm, l, dy, sum, weight, &dsum, false,
                                   DType::kF32, false, NAN);
          std::vector<double> dweight(l.width), dbias(l.width);
          for (int64_t row = 0; row < l.num_rows(); ++row) {
            std::vector<double> s(l.width);
            for (int64_t i = 0; i < l.width; ++i) s[i] = sum[l.At(row, i)];
            Array ones(DType::kF32, l.width);
            for (int64_t i = 0; i < l.width; ++i) ones.Set(i, 1);
            const std::vector<double> xhat =
                Reference({norm.layer, false}, s, ones, bias);
            for (int64_t i = 0; i < l.width; ++i) {
              const double grad = dy[l.At(row, i)];
              dweight[i] += grad * xhat[i];
              dbias[i] += grad;
              const double dx = NumericalDerivative(
                  [&](double v) {
                    std::vector<double> moved = s;
                    moved[i] = v;
                    const std::vector<double> y =
                        Reference(norm, moved, weight, bias);
                    double loss = dsum[l.At(row, i)] * v;
                    for (int64_t j = 0; j < l.width; ++j) {
                      loss += dy[l.At(row, j)] * y[j];
                    }
                    return loss;
                  },
                  s[i]);
              // Sums of 33 terms of size <= 10 in fp32, times rstd, which is
              // about 1/2 (316 for the row of one element, where the result
              // is a difference of zeros).
              const double error = l.width == 1 ? 1e-3 : 1e-5;
              ASSERT_NEAR(g.dx[l.At(row, i)], dx,
                          error + std::abs(dx) * HalfUlp(dtype))
                  << "row " << row << " column " << i;
            }
          }
          for (int64_t i = 0; i < l.width; ++i) {
            ASSERT_NEAR(g.dweight[i], dweight[i], 1e-5);
            if (norm.bias) {
              ASSERT_NEAR(g.dbias[i], dbias[i], 1e-5);
            }
          }
        }
      }
    }
  });
}

TEST(NormTest, DxMayAliasDsumAndResidualGradientIsOptional) {
  ForEachPath([](const Path& path) {
    for (const Norm& norm : kNorms) {
      const Layout l = {40, 2, 33, 3};
      Array dy = Array::Normal(DType::kBF16, l.size(), 1);
      Array sum = Array::Normal(DType::kBF16, l.size(), 2);
      Array weight = Array::Normal(DType::kBF16, l.width, 3);
      Array dsum = Array::Normal(DType::kBF16, l.size(), 4);
      Array zeros(DType::kBF16, l.size());
      const auto run = [&](Array* residual, bool alias) {
        return Backward(path, norm, l, dy, sum, weight, residual, alias,
                        DType::kBF16, false, 0);
      };
      const Grads apart = run(&dsum, false);
      const Grads aliased = run(&dsum, true);
      for (int64_t row = 0; row < l.num_rows(); ++row) {
        for (int64_t i = 0; i < l.width; ++i) {
          const int64_t at = l.At(row, i);
          ASSERT_EQ(apart.dx[at], aliased.dx[at]);
        }
      }
      EXPECT_TRUE(run(nullptr, false).dx.SameBits(run(&zeros, false).dx));
    }
  });
}

TEST(NormTest, WeightGradientsAccumulateAndHaveTheirOwnDtype) {
  ForEachPath([](const Path& path) {
    const Layout l = {70, 1, 33, 0};
    const Norm norm = {true, true};
    Array dy = Array::Normal(DType::kBF16, l.size(), 1);
    Array sum = Array::Normal(DType::kBF16, l.size(), 2);
    Array weight = Array::Normal(DType::kBF16, l.width, 3);
    const auto run = [&](DType dtype, bool accumulate, double before) {
      return Backward(path, norm, l, dy, sum, weight, nullptr, false, dtype,
                      accumulate, before);
    };
    const Grads fresh = run(DType::kF32, false, NAN);
    const Grads added = run(DType::kF32, true, 3);
    const Grads narrow = run(DType::kBF16, false, NAN);
    for (int64_t i = 0; i < l.width; ++i) {
      const float want_weight = 3 + static_cast<float>(fresh.dweight[i]);
      EXPECT_EQ(added.dweight[i], want_weight);
      EXPECT_EQ(added.dbias[i], 3 + static_cast<float>(fresh.dbias[i]));
      Array rounded(DType::kBF16, 1);
      rounded.Set(0, fresh.dweight[i]);
      EXPECT_EQ(narrow.dweight[i], rounded[0]);
    }
  });
}

TEST(NormTest, BitsDoNotDependOnTheNumberOfThreads) {
  const Layout l = {5000, 1, 72, 0};
  const Norm norm = {true, true};
  Array dy = Array::Normal(DType::kF32, l.size(), 1);
  Array sum = Array::Normal(DType::kF32, l.size(), 2);
  Array weight = Array::Normal(DType::kF32, l.width, 3);
  std::vector<Grads> grads;
  for (const int threads : {1, 2, 3}) {
    const auto device = MakeCpuDevice(threads);
    const auto stream = device->MakeStream(StreamRole::kCompute);
    grads.push_back(Backward({"", device->ops(), *stream}, norm, l, dy, sum,
                             weight, nullptr, false, DType::kF32, false, 0));
    EXPECT_TRUE(grads[0].dx.SameBits(grads.back().dx));
    EXPECT_TRUE(grads[0].dweight.SameBits(grads.back().dweight));
    EXPECT_TRUE(grads[0].dbias.SameBits(grads.back().dbias));
  }
}

}  // namespace
}  // namespace zero
