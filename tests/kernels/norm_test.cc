#include "tests/kernels/norm_checks.h"

namespace zero::norm_test {
namespace {

constexpr Layout kLayouts[] = {{0, 1, 8, 0},   {1, 1, 1, 0},    {3, 1, 31, 2},
                               {5, 3, 33, 7},  {2, 1, 1023, 0}, {70, 2, 64, 0},
                               {300, 1, 40, 1}};

constexpr Norm kNorms[] = {{true, true}, {true, false}, {false, false}};

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
      Forward(path, norm, args);  // without mean and rstd

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

// Every way to hold a row: widths between the limits of the GPU's groups of
// threads, whole chunks of 16 bytes or not; many rows, several to a block.
TEST(NormTest, RowsOfEveryWidthMatchFloat64InBothPasses) {
  constexpr Layout kEveryWidth[] = {
      {130, 3, 16, 8}, {100, 2, 72, 8},  {3, 1, 1500, 8},
      {3, 1, 3000, 8}, {3, 1, 136, 8},   {2, 1, 5003, 8},
      {5, 1, 9000, 8}, {2, 1, 16383, 8}, {2, 1, 16384, 0}};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Layout& l : kEveryWidth) {
      const Norm norm = {l.width != 3000, l.width != 3000};
      Array dy = Array::Normal(dtype, l.size(), 1);
      Array x = Array::Normal(dtype, l.size(), 2, 2.0);
      Array residual = Array::Normal(dtype, l.size(), 3);
      Array weight = Array::Normal(dtype, l.width, 4);
      Array bias = Array::Normal(dtype, l.width, 5);
      ForEachPath([&](const Path& path) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " " +
                     std::to_string(l.width));
        Array sum(dtype, l.size()), y(sum);
        NormForwardArgs args;
        args.x = View(x, l);
        args.residual = View(residual, l);
        args.sum = View(sum, l);
        args.weight = weight.vector();
        if (norm.bias) args.bias = bias.vector();
        args.y = View(y, l);
        Forward(path, norm, args);
        const Grads g = Backward(path, norm, l, dy, sum, weight, &residual,
                                 false, DType::kF32, false, NAN);
        std::vector<double> dweight(l.width), dbias(l.width);
        for (int64_t row = 0; row < l.num_rows(); ++row) {
          std::vector<double> s(l.width), grad(l.width);
          for (int64_t i = 0; i < l.width; ++i) {
            s[i] = sum[l.At(row, i)];
            grad[i] = dy[l.At(row, i)];
          }
          const std::vector<double> want = Reference(norm, s, weight, bias);
          const RowGrads row_grads = ReferenceGrads(norm, s, grad, weight);
          for (int64_t i = 0; i < l.width; ++i) {
            const int64_t at = l.At(row, i);
            dweight[i] += row_grads.dweight[i];
            dbias[i] += grad[i];
            // Means of thousands of terms of size 1 by trees in fp32: a few
            // 2^-24 each; values up to 20.
            ASSERT_NEAR(y[at], want[i],
                        1e-5 + std::abs(want[i]) * HalfUlp(dtype));
            const double dx = row_grads.dx[i] + residual[at];
            ASSERT_NEAR(g.dx[at], dx, 1e-5 + std::abs(dx) * HalfUlp(dtype))
                << "row " << row << " column " << i;
          }
        }
        // Sums of that many terms of size 1 to 10, whose errors walk at random.
        const double error = 1e-5 * std::sqrt(l.num_rows());
        for (int64_t i = 0; i < l.width; ++i) {
          ASSERT_NEAR(g.dweight[i], dweight[i], error);
          if (norm.bias) {
            ASSERT_NEAR(g.dbias[i], dbias[i], error);
          }
        }
      });
    }
  }
}

// Rows whose first element is `shift` elements into their array.
struct Placed {
  Placed(DType dtype, const Layout& l, int64_t shift, uint64_t seed)
      : layout(l), shift(shift), array(dtype, shift + l.size()) {
    const Array values = Array::Normal(dtype, l.num_rows() * l.width, seed);
    for (int64_t row = 0; row < l.num_rows(); ++row) {
      for (int64_t i = 0; i < l.width; ++i) {
        array.Set(shift + l.At(row, i), values[row * l.width + i]);
      }
    }
  }
  void* data() {
    return static_cast<char*>(array.data()) +
           shift * static_cast<int64_t>(DTypeBytes(array.dtype()));
  }
  Rows rows() {
    return {data(),       array.dtype(), layout.outer,
            layout.inner, layout.width,  layout.stride()};
  }
  Vector vector() { return {data(), array.dtype(), layout.width}; }
  // The elements, in order, without the padding between rows.
  std::vector<double> values() const {
    std::vector<double> v;
    for (int64_t row = 0; row < layout.num_rows(); ++row) {
      for (int64_t i = 0; i < layout.width; ++i) {
        v.push_back(array[shift + layout.At(row, i)]);
      }
    }
    return v;
  }

  Layout layout;
  int64_t shift;
  Array array;
};

// y, dx and dweight of rows that begin `shift` elements into their arrays.
std::vector<std::vector<double>> RunAt(const Path& path, DType dtype,
                                       const Layout& l, int64_t shift) {
  const Layout one_row = {1, 1, l.width, 0};
  Placed x(dtype, l, shift, 1), y(dtype, l, shift, 2), dy(dtype, l, shift, 3);
  Placed dx(dtype, l, shift, 4), weight(dtype, one_row, shift, 5);
  Placed dweight(DType::kF32, one_row, shift, 6);
  Array mean(DType::kF32, l.num_rows()), rstd(mean);
  NormForwardArgs forward;
  forward.x = x.rows();
  forward.weight = weight.vector();
  forward.y = y.rows();
  forward.mean = mean.floats();
  forward.rstd = rstd.floats();
  path.ops.NormForward(path.stream, forward);
  NormBackwardArgs backward;
  backward.dy = dy.rows();
  backward.sum = x.rows();
  backward.weight = weight.vector();
  backward.mean = mean.floats();
  backward.rstd = rstd.floats();
  backward.dx = dx.rows();
  backward.dweight = dweight.vector();
  Scratch scratch(path.ops.NormBackwardWorkspaceBytes(backward));
  path.ops.NormBackward(path.stream, backward, scratch.workspace());
  return {y.values(), dx.values(), dweight.values()};
}

// Rows of up to 128 elements have other groups of threads if they begin at odd
// addresses, which no model's do.
TEST(NormTest, BitsOfWideRowsDoNotDependOnAddresses) {
  OnPath([](const Path& path) {
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      for (const int64_t width : {136, 768, 2304, 8704, 16384}) {
        const int64_t rows = width < 1000 ? 20 : 2;
        const auto aligned = RunAt(path, dtype, {rows, 1, width, 16}, 0);
        const auto shifted = RunAt(path, dtype, {rows, 1, width, 3}, 1);
        EXPECT_EQ(aligned, shifted) << DTypeName(dtype) << " " << width;
      }
    }
  });
}

TEST(NormTest, FrozenWeightsNeedNoWorkspace) {
  ForEachPath([](const Path& path) {
    const Layout l = {5, 2, 40, 0};
    Placed x(DType::kBF16, l, 0, 1), dy(DType::kBF16, l, 0, 2);
    Placed weight(DType::kBF16, {1, 1, l.width, 0}, 0, 3);
    Array dx(DType::kBF16, l.size()), dx_frozen(dx);
    Array dweight(DType::kF32, l.width), rstd(DType::kF32, l.num_rows());
    for (int64_t row = 0; row < l.num_rows(); ++row) rstd.Set(row, 1 + row);
    NormBackwardArgs args;
    args.kind = NormKind::kRmsNorm;
    args.dy = dy.rows();
    args.sum = x.rows();
    args.weight = weight.vector();
    args.rstd = rstd.floats();
    args.dx = View(dx, l);
    args.dweight = dweight.vector();
    Scratch scratch(path.ops.NormBackwardWorkspaceBytes(args));
    path.ops.NormBackward(path.stream, args, scratch.workspace());
    args.dweight = {};
    args.dx = View(dx_frozen, l);
    EXPECT_EQ(path.ops.NormBackwardWorkspaceBytes(args), 0u);
    path.ops.NormBackward(path.stream, args, {});
    EXPECT_TRUE(dx.SameBits(dx_frozen));
  });
}

}  // namespace
}  // namespace zero::norm_test
