// Comparison of a linear layer's forward pass with float64, for the tests of
// all paths and for those of the CPU.
#ifndef ZERO_TESTS_KERNELS_LINEAR_CHECKS_H_
#define ZERO_TESTS_KERNELS_LINEAR_CHECKS_H_

#include <string>
#include <vector>

#include "tests/kernels/matrix.h"

namespace zero {

struct LinearShape {
  int64_t m, k, n;
};

inline std::string Name(const LinearShape& s, DType dtype) {
  return std::to_string(s.m) + "x" + std::to_string(s.k) + "x" +
         std::to_string(s.n) + " " + DTypeName(dtype);
}

inline void RunLinear(const Path& path, const LinearArgs& args) {
  Scratch scratch(path.ops.LinearWorkspaceBytes(args));
  path.ops.Linear(path.stream, args, scratch.workspace());
}
// x w^T + bias in float64 and, at (i, j), its rounding error bound.
struct Expected {
  Dense pre;
  std::vector<double> x_norm, w_norm;
  double Error(int64_t i, int64_t j) const {
    return SumError(x_norm[static_cast<size_t>(i)],
                    w_norm[static_cast<size_t>(j)]);
  }
};

inline Expected Expect(const Dense& x, const Dense& w, const Dense& bias) {
  Expected e;
  e.pre = Matmul(x, Transposed(w));
  for (int64_t i = 0; i < x.rows; ++i) e.x_norm.push_back(Norm(x, i));
  for (int64_t j = 0; j < w.rows; ++j) {
    e.w_norm.push_back(Norm(w, j));
    for (int64_t i = 0; i < x.rows; ++i) e.pre(i, j) += bias(0, j);
  }
  return e;
}

inline void CheckForward(const Path& path, const LinearShape& s, DType dtype,
                         bool with_bias, bool with_residual, Gelu act,
                         bool with_pre) {
  const std::string what = Name(s, dtype) + (with_bias ? " bias" : "") +
                           (with_residual ? " residual" : "") +
                           (act != Gelu::kNone ? " gelu" : "") +
                           (with_pre ? " pre" : "");
  GuardedMatrix x = GuardedMatrix::Normal(dtype, s.m, s.k, 3, 1);
  GuardedMatrix w =
      GuardedMatrix::Normal(dtype, s.n, s.k, 1, 2, 1 / std::sqrt(s.k));
  GuardedMatrix bias(dtype, 1, s.n);
  if (with_bias) bias = GuardedMatrix::Normal(dtype, 1, s.n, 0, 3);
  GuardedMatrix residual(dtype, s.m, s.n, 5);
  if (with_residual) {
    residual = GuardedMatrix::Normal(dtype, s.m, s.n, 5, 4);
  }
  GuardedMatrix y(dtype, s.m, s.n, 2), pre(dtype, s.m, s.n, 7);
  LinearArgs args;
  args.x = x.view();
  args.w = w.view();
  if (with_bias) args.bias = bias.row_vector();
  if (with_residual) args.residual = residual.view();
  args.y = y.view();
  args.act = act;
  if (with_pre) args.pre_act = pre.view();
  RunLinear(path, args);

  const Expected e = Expect(x.dense(), w.dense(), bias.dense());
  const double half_ulp = HalfUlp(dtype);
  // The sum, and one rounding each for the bias and for storage.
  const auto pre_error = [&](int64_t i, int64_t j) {
    return e.Error(i, j) + 2 * half_ulp * std::abs(e.pre(i, j)) +
           TinyStep(dtype);
  };
  if (with_pre) ExpectNear(pre, e.pre, pre_error, what + ": pre_act");
  Dense want(s.m, s.n);
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      want(i, j) = ReferenceGelu(act, e.pre(i, j)) + residual(i, j);
    }
  }
  // |gelu'| <= 1.13; gelu itself and the stores before and after the residual
  // round by at most two half ulps of the larger of the terms, and gelu in
  // fp32 by 4 of fp32's (gelu_test).
  ExpectNear(
      y, want,
      [&](int64_t i, int64_t j) {
        const double size = std::abs(e.pre(i, j)) + std::abs(residual(i, j));
        return 1.13 * pre_error(i, j) + 2 * half_ulp * size +
               4 * HalfUlp(DType::kF32) * size + TinyStep(dtype);
      },
      what);
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_LINEAR_CHECKS_H_
