// The matrix ops in float64, written for clarity and not for speed: the
// reference for the kernels. Nothing here shares code with kernels/.
#ifndef ZERO_TESTS_SUPPORT_REFERENCE_H_
#define ZERO_TESTS_SUPPORT_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "kernels/ops.h"

namespace zero {

// Row-major, dense.
struct Dense {
  Dense() = default;
  Dense(int64_t rows, int64_t cols)
      : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {}

  double& operator()(int64_t i, int64_t j) {
    return values[static_cast<size_t>(i * cols + j)];
  }
  double operator()(int64_t i, int64_t j) const {
    return values[static_cast<size_t>(i * cols + j)];
  }

  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> values;
};

Dense Transposed(const Dense& x);
Dense Matmul(const Dense& a, const Dense& b);
double Norm(const Dense& x, int64_t row);  // Euclidean, of one row

double ReferenceGelu(Gelu kind, double x);
double ReferenceGeluDerivative(Gelu kind, double x);

// Losses and gradients of softmax cross-entropy of x w^T, the gradients scaled
// by `scale`; ignored targets (< 0) give zeros.
struct CrossEntropyReference {
  std::vector<double> losses;
  Dense dx, dw;
  Dense dlogits;
};
CrossEntropyReference ReferenceCrossEntropy(const Dense& x, const Dense& w,
                                            const std::vector<int32_t>& targets,
                                            double scale);

// One head of one sample: q, out [T, D]; k, v [S, D]; lse [T]. Query i sees
// keys 0 .. S - T + i.
struct AttentionReference {
  Dense out;
  std::vector<double> lse;
};
AttentionReference ReferenceAttention(const Dense& q, const Dense& k,
                                      const Dense& v, double scale);

// The gradients as functions of out and lse as they are given (a kernel gets
// them rounded). T == S.
struct AttentionGradient {
  Dense dq, dk, dv;
  std::vector<double> seen;  // [S]: the probabilities of each key, summed
};
AttentionGradient ReferenceAttentionGradient(const Dense& q, const Dense& k,
                                             const Dense& v, const Dense& out,
                                             const Dense& dout,
                                             const std::vector<double>& lse,
                                             double scale);

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_REFERENCE_H_
