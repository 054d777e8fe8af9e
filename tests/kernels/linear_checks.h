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
  Dense sum, pre;  // without bias, with it
  std::vector<double> x_norm, w_norm;
  double Error(int64_t i, int64_t j) const {
    return SumError(x_norm[static_cast<size_t>(i)],
                    w_norm[static_cast<size_t>(j)]);
  }
};

inline Expected Expect(const Dense& x, const Dense& w, const Dense& bias) {
  Expected e;
  e.sum = Matmul(x, Transposed(w));
  e.pre = e.sum;
  for (int64_t i = 0; i < x.rows; ++i) e.x_norm.push_back(Norm(x, i));
  for (int64_t j = 0; j < w.rows; ++j) {
    e.w_norm.push_back(Norm(w, j));
    for (int64_t i = 0; i < x.rows; ++i) e.pre(i, j) += bias(0, j);
  }
  return e;
}

// `pad`: elements behind each row; 0: others behind each matrix.
inline void CheckForward(const Path& path, const LinearShape& s, DType dtype,
                         bool with_bias, bool with_residual, Gelu act,
                         bool with_pre, int64_t pad = 0) {
  const std::string what = Name(s, dtype) + (with_bias ? " bias" : "") +
                           (with_residual ? " residual" : "") +
                           (act != Gelu::kNone ? " gelu" : "") +
                           (with_pre ? " pre" : "");
  const auto or_pad = [&](int64_t other) { return pad > 0 ? pad : other; };
  GuardedMatrix x = GuardedMatrix::Normal(dtype, s.m, s.k, or_pad(3), 1);
  GuardedMatrix w =
      GuardedMatrix::Normal(dtype, s.n, s.k, or_pad(1), 2, 1 / std::sqrt(s.k));
  GuardedMatrix bias(dtype, 1, s.n);
  if (with_bias) bias = GuardedMatrix::Normal(dtype, 1, s.n, 0, 3);
  GuardedMatrix residual(dtype, s.m, s.n, or_pad(5));
  if (with_residual) {
    residual = GuardedMatrix::Normal(dtype, s.m, s.n, or_pad(5), 4);
  }
  GuardedMatrix y(dtype, s.m, s.n, or_pad(2));
  GuardedMatrix pre(dtype, s.m, s.n, or_pad(7));
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
  // cuBLASLt rounds the sum before it adds to it, where rows do not begin on 16
  // bytes (seen with 13.1 on an H200).
  const double sum_ulp =
      path.device.kind() == DeviceKind::kCuda && pad == 0 ? half_ulp : 0;
  // The sum, and one rounding each for the bias and for storage.
  const auto pre_error = [&](int64_t i, int64_t j) {
    return e.Error(i, j) + sum_ulp * std::abs(e.sum(i, j)) +
           2 * half_ulp * std::abs(e.pre(i, j)) + TinyStep(dtype);
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
