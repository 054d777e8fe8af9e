// Helpers for the tests of norms: strided rows, the norms in float64, and calls
// of the two passes.
#ifndef ZERO_TESTS_KERNELS_NORM_CHECKS_H_
#define ZERO_TESTS_KERNELS_NORM_CHECKS_H_

#include <cmath>
#include <vector>

#include "tests/kernels/kernel_test.h"
#include "tests/kernels/matrix.h"

namespace zero::norm_test {

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

struct Norm {
  bool layer;  // LayerNorm, else RMSNorm
  bool bias;
  NormKind kind() const {
    return layer ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  }
};
inline constexpr double kEps = 1e-5;

// y of one row in float64.
inline std::vector<double> Reference(const Norm& norm,
                                     const std::vector<double>& x,
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

// The gradients of one row in float64; dbias is grad.
struct RowGrads {
  std::vector<double> dx, dweight;
};
inline RowGrads ReferenceGrads(const Norm& norm, const std::vector<double>& x,
                               const std::vector<double>& grad,
                               const Array& weight) {
  const double n = static_cast<double>(x.size());
  double mean, rstd, mean_g = 0, mean_gx = 0;
  Reference({norm.layer, false}, x, weight, weight, &mean, &rstd);
  RowGrads result{std::vector<double>(x.size()), std::vector<double>(x.size())};
  for (size_t i = 0; i < x.size(); ++i) {
    const double xhat = (x[i] - mean) * rstd;
    const double g = grad[i] * weight[i];
    if (norm.layer) mean_g += g / n;
    mean_gx += g * xhat / n;
    result.dweight[i] = grad[i] * xhat;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const double xhat = (x[i] - mean) * rstd;
    result.dx[i] = (grad[i] * weight[i] - mean_g - xhat * mean_gx) * rstd;
  }
  return result;
}

inline Rows View(Array& a, const Layout& l) {
  return a.rows(l.outer, l.inner, l.width, l.stride());
}

inline void Forward(const Path& path, const Norm& norm, NormForwardArgs args) {
  args.kind = norm.kind();
  path.ops.NormForward(path.stream, args);
}

struct Grads {
  Array dx, dweight, dbias;
};

inline Grads Backward(const Path& path, const Norm& norm, const Layout& l,
                      Array& dy, Array& sum, Array& weight, Array* dsum,
                      bool alias, DType weight_grad_dtype, bool accumulate,
                      double before) {
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
  args.kind = norm.kind();
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
  Scratch scratch(path.ops.NormBackwardWorkspaceBytes(args));
  path.ops.NormBackward(path.stream, args, scratch.workspace());
  return g;
}

}  // namespace zero::norm_test

#endif  // ZERO_TESTS_KERNELS_NORM_CHECKS_H_
