#include "tests/support/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace zero {

Dense Transposed(const Dense& x) {
  Dense t(x.cols, x.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) t(j, i) = x(i, j);
  }
  return t;
}

Dense Matmul(const Dense& a, const Dense& b) {
  Dense c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    double* const row = c.values.data() + i * c.cols;
    for (int64_t p = 0; p < a.cols; ++p) {
      const double x = a(i, p);
      const double* const right = b.values.data() + p * b.cols;
      for (int64_t j = 0; j < b.cols; ++j) row[j] += x * right[j];
    }
  }
  return c;
}

double Norm(const Dense& x, int64_t row) {
  double sum = 0;
  for (int64_t j = 0; j < x.cols; ++j) sum += x(row, j) * x(row, j);
  return std::sqrt(sum);
}

double ReferenceGelu(Gelu kind, double x) {
  if (kind == Gelu::kNone) return x;
  if (kind == Gelu::kErf) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
  const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1 + std::tanh(u));
}

double ReferenceGeluDerivative(Gelu kind, double x) {
  if (kind == Gelu::kNone) return 1;
  if (kind == Gelu::kErf) {
    return 0.5 * std::erfc(-x / std::sqrt(2.0)) +
           x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
  }
  const double c = std::sqrt(2 / M_PI);
  const double t = std::tanh(c * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

CrossEntropyReference ReferenceCrossEntropy(const Dense& x, const Dense& w,
                                            const std::vector<int32_t>& targets,
                                            double scale) {
  CrossEntropyReference r;
  r.dlogits = Matmul(x, Transposed(w));
  r.losses.resize(targets.size());
  for (int64_t i = 0; i < x.rows; ++i) {
    double* const row = r.dlogits.values.data() + i * w.rows;
    const int32_t target = targets[static_cast<size_t>(i)];
    if (target < 0) {
      std::fill(row, row + w.rows, 0.0);
      continue;
    }
    const double max = *std::max_element(row, row + w.rows);
    double sum = 0;
    for (int64_t j = 0; j < w.rows; ++j) sum += std::exp(row[j] - max);
    r.losses[static_cast<size_t>(i)] = max + std::log(sum) - row[target];
    for (int64_t j = 0; j < w.rows; ++j) {
      const double p = std::exp(row[j] - max) / sum;
      row[j] = scale * (j == target ? p - 1 : p);
    }
  }
  r.dx = Matmul(r.dlogits, w);
  r.dw = Matmul(Transposed(r.dlogits), x);
  return r;
}

AttentionReference ReferenceAttention(const Dense& q, const Dense& k,
                                      const Dense& v, double scale) {
  const Dense scores = Matmul(q, Transposed(k));
  AttentionReference r;
  r.out = Dense(q.rows, v.cols);
  for (int64_t i = 0; i < q.rows; ++i) {
    const int64_t last = k.rows - q.rows + i;
    double max = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j <= last; ++j) {
      max = std::max(max, scale * scores(i, j));
    }
    double sum = 0;
    for (int64_t j = 0; j <= last; ++j) {
      const double e = std::exp(scale * scores(i, j) - max);
      sum += e;
      for (int64_t d = 0; d < v.cols; ++d) r.out(i, d) += e * v(j, d);
    }
    for (int64_t d = 0; d < v.cols; ++d) r.out(i, d) /= sum;
    r.lse.push_back(max + std::log(sum));
  }
  return r;
}

AttentionGradient ReferenceAttentionGradient(const Dense& q, const Dense& k,
                                             const Dense& v, const Dense& out,
                                             const Dense& dout,
                                             const std::vector<double>& lse,
                                             double scale) {
  const Dense scores = Matmul(q, Transposed(k));
  const Dense dp = Matmul(dout, Transposed(v));
  Dense p(q.rows, k.rows), ds(q.rows, k.rows);
  for (int64_t i = 0; i < q.rows; ++i) {
    double delta = 0;
    for (int64_t d = 0; d < out.cols; ++d) delta += out(i, d) * dout(i, d);
    for (int64_t j = 0; j <= i; ++j) {
      p(i, j) = std::exp(scale * scores(i, j) - lse[static_cast<size_t>(i)]);
      ds(i, j) = p(i, j) * (dp(i, j) - delta) * scale;
    }
  }
  AttentionGradient g;
  g.dq = Matmul(ds, k);
  g.dk = Matmul(Transposed(ds), q);
  g.dv = Matmul(Transposed(p), dout);
  g.seen.resize(static_cast<size_t>(k.rows));
  for (int64_t i = 0; i < q.rows; ++i) {
    for (int64_t j = 0; j < k.rows; ++j) {
      g.seen[static_cast<size_t>(j)] += p(i, j);
    }
  }
  return g;
}

}  // namespace zero
