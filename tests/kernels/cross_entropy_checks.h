// A problem of linear cross-entropy and its comparison with float64, for the
// tests of all paths and for those of one device.
#ifndef ZERO_TESTS_KERNELS_CROSS_ENTROPY_CHECKS_H_
#define ZERO_TESTS_KERNELS_CROSS_ENTROPY_CHECKS_H_

#include <string>
#include <vector>

#include "tests/kernels/matrix.h"

namespace zero {

struct CrossEntropyProblem {
  int64_t words;
  GuardedMatrix x, w, dx, dw;
  TestVector<int32_t> targets;
  TestVector<float> losses;
  TestVector<double> loss_sum = {0};
  TestVector<float> grad_scale = {1};

  // `v` words; w has `others` more rows.
  CrossEntropyProblem(DType dtype, int64_t m, int64_t c, int64_t v, DType sink,
                      int64_t others = 0)
      : words(v),
        x(GuardedMatrix::Normal(dtype, m, c, 2, 1)),
        w(GuardedMatrix::Normal(dtype, v + others, c, 1, 2, 2 / std::sqrt(c))),
        dx(GuardedMatrix::Normal(dtype, m, c, 3, 3)),
        dw(GuardedMatrix::Normal(sink, v + others, c, 0, 4)),
        losses(static_cast<size_t>(m), -1.0f) {
    for (int64_t i = 0; i < m; ++i) {
      targets.push_back(static_cast<int32_t>((i * 7919 + 3) % v));
    }
  }

  LinearCrossEntropyArgs Args() {
    LinearCrossEntropyArgs args;
    args.x = x.view();
    args.w = w.view();
    args.vocab = words;
    args.targets = targets.data();
    args.losses = losses.data();
    args.loss_sum = loss_sum.data();
    args.grad_scale = grad_scale.data();
    args.dx = dx.view();
    args.dw = dw.view();
    return args;
  }
};

inline void RunCrossEntropy(Ops& ops, Stream& stream,
                            const LinearCrossEntropyArgs& args) {
  Scratch scratch(ops.LinearCrossEntropyWorkspaceBytes(args));
  ops.LinearCrossEntropy(stream, args, scratch.workspace());
}

// The roundings to the dtype of x.
struct CrossEntropyRounding {
  bool logits = false;
  bool gradient = false;  // of the logits
};

inline CrossEntropyRounding RoundingOf(const Path& path, DType dtype) {
  if (dtype == DType::kF32) return {};
  if (path.device.kind() == DeviceKind::kCuda) return {true, true};
  return {false, path.native_products && dtype == DType::kBF16};
}

// The error bound of each row's logits.
inline std::vector<double> LogitErrors(const Dense& x, const Dense& w,
                                       DType dtype, bool rounded) {
  double w_norm = 0;
  for (int64_t j = 0; j < w.rows; ++j) w_norm = std::max(w_norm, Norm(w, j));
  const Dense logits = rounded ? Matmul(x, Transposed(w)) : Dense(x.rows, 0);
  std::vector<double> errors;
  for (int64_t i = 0; i < x.rows; ++i) {
    errors.push_back(SumError(Norm(x, i), w_norm));
    if (!rounded) continue;
    double largest = 0;
    for (int64_t j = 0; j < logits.cols; ++j) {
      largest = std::max(largest, std::abs(logits(i, j)));
    }
    errors.back() += HalfUlp(dtype) * largest + TinyStep(dtype) / 2;
  }
  return errors;
}

// Compares losses and gradients with float64.
inline void CheckCrossEntropy(CrossEntropyProblem& p, const Dense& old_dw,
                              CrossEntropyRounding rounding,
                              const std::string& what) {
  const DType dtype = p.x.dtype();
  const Dense x = p.x.dense();
  Dense w(p.words, p.w.cols());
  for (int64_t v = 0; v < w.rows; ++v) {
    for (int64_t j = 0; j < w.cols; ++j) w(v, j) = p.w(v, j);
  }
  const CrossEntropyReference want = ReferenceCrossEntropy(
      x, w, {p.targets.begin(), p.targets.end()}, p.grad_scale[0]);
  double total = 0, total_error = 0;
  const std::vector<double> logit_error =
      LogitErrors(x, w, dtype, rounding.logits);
  for (int64_t i = 0; i < x.rows; ++i) {
    const size_t n = static_cast<size_t>(i);
    const double loss = want.losses[n];
    // Twice (logsumexp and target), the exponentials and the sum in fp32, and
    // the store.
    const double error =
        2 * logit_error[n] + HalfUlp(DType::kF32) * (4 + 2 * loss);
    EXPECT_NEAR(p.losses[n], loss, error) << what << " loss of row " << i;
    total += loss;
    total_error += error;
  }
  EXPECT_NEAR(p.loss_sum[0], total, total_error) << what;

  // Relative to an element, or the subnormal step in fp16.
  const double rounded = rounding.gradient ? HalfUlp(dtype) : 0;
  const double tiny = rounding.gradient ? TinyStep(dtype) / 2 : 0;
  const Dense w_t = Transposed(w), x_t = Transposed(x);
  const Dense g_t = Transposed(want.dlogits);
  double worst_logit = 0;
  for (double e : logit_error) worst_logit = std::max(worst_logit, e);
  // Logits that are off by at most E multiply a probability p, and 1 - p, by
  // e^(-2E) to e^(2E).
  const double relative =
      std::expm1(2 * worst_logit) + 8 * HalfUlp(DType::kF32) + rounded;
  std::vector<double> w_col, g_row;
  for (int64_t j = 0; j < x.cols; ++j) w_col.push_back(Norm(w_t, j));
  for (int64_t i = 0; i < x.rows; ++i) g_row.push_back(Norm(want.dlogits, i));
  ExpectNear(
      p.dx, want.dx,
      [&](int64_t i, int64_t j) {
        const double size =
            g_row[static_cast<size_t>(i)] * w_col[static_cast<size_t>(j)];
        return relative * size + SumError(size, 1) +
               tiny * std::sqrt(w.rows) * w_col[static_cast<size_t>(j)] +
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
               tiny * std::sqrt(x.rows) * x_col[static_cast<size_t>(j)] +
               2 * HalfUlp(sink) *
                   (std::abs(dw(v, j)) + std::abs(old_dw(v, j))) +
               TinyStep(sink);
      },
      what + ": dw");
  for (int64_t v = p.words; v < p.dw.rows(); ++v) {
    for (int64_t j = 0; j < x.cols; ++j) {
      EXPECT_EQ(p.dw(v, j), old_dw(v, j)) << what << " row " << v;
    }
  }
}

inline Dense ZeroDw(const CrossEntropyProblem& p) {
  return Dense(p.w.rows(), p.w.cols());
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_CROSS_ENTROPY_CHECKS_H_
