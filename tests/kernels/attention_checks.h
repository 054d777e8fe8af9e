// An attention problem and its comparison with float64, for the tests of all
// paths and of a GPU alone.
#ifndef ZERO_TESTS_KERNELS_ATTENTION_CHECKS_H_
#define ZERO_TESTS_KERNELS_ATTENTION_CHECKS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "tests/kernels/attention_problem.h"

namespace zero {

inline double Largest(const Dense& x) {
  double largest = 0;
  for (const double v : x.values) largest = std::max(largest, std::abs(v));
  return largest;
}

// The largest norm of a head's row.
inline double HeadNorm(const GuardedMatrix& m, int64_t dim) {
  double largest = 0;
  for (int64_t i = 0; i < m.rows(); ++i) {
    for (int64_t j = 0; j < m.cols(); j += dim) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += m(i, j + d) * m(i, j + d);
      largest = std::max(largest, std::sqrt(sum));
    }
  }
  return largest;
}

// The relative error of a probability: twice that of a score (a sum over D of
// size |q| |k| scale; the other time in the normalizer), exp's and the sums'.
inline double ProbabilityError(const AttentionProblem& p) {
  const double score = HeadNorm(p.q, p.s.dim) * HeadNorm(p.k, p.s.dim) *
                       static_cast<double>(p.scale);
  return 2 * SumError(score, 1) +
         (8 + std::sqrt(p.s.kv_len)) * HalfUlp(DType::kF32);
}

// What products of 16-bit operands add: the probabilities and, in the backward
// pass, their gradients are rounded to the dtype before they are multiplied;
// one relative error of each weight, and one more if it scales. 0 where our own
// kernels convert: their sums are in fp32 throughout.
inline double WeightRounding(const Path& path, const AttentionProblem& p) {
  const bool may_be_cudnn = path.name.rfind("cuda", 0) == 0 &&
                            p.dtype != DType::kF32 && p.s.q_len == p.s.kv_len &&
                            p.s.dim % 8 == 0 && p.s.pad % 8 == 0;
  const bool pairs = path.attention_in_bf16 && p.dtype == DType::kBF16;
  return may_be_cudnn || pairs ? 2 * HalfUlp(p.dtype) : 0;
}

// A problem and its float64 results, computed once for all paths.
struct ForwardCase {
  AttentionProblem p;
  std::string what;
  Dense out;
  std::vector<double> lse;
  double probability_error, largest_v;

  ForwardCase(const AttentionTestShape& s, DType dtype,
              const Lengths& lengths = {})
      : p(s, dtype),
        what(Name(s, dtype)),
        out(p.out.rows(), p.out.cols()),
        lse(p.lse.size()),
        probability_error(ProbabilityError(p)),
        largest_v(Largest(p.v.dense())) {
    if (!lengths.empty()) p.Pack(lengths);
    const int64_t group = s.heads / s.kv_heads;
    for (const auto& [q, num_queries, k, num_keys] : p.Sequences()) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const AttentionReference r = ReferenceAttention(
            p.Head(p.q, q, num_queries, h), p.Head(p.k, k, num_keys, h / group),
            p.Head(p.v, k, num_keys, h / group), p.scale);
        p.PutHead(out, q, h, r.out, false);
        std::copy(r.lse.begin(), r.lse.end(), lse.begin() + p.LseAt(q, h));
      }
    }
  }

  void Run(const Path& path) {
    p.SpoilOutputs();
    p.Forward(path.ops, path.stream);
    Check(path);
  }

  // Compares out and lse of `p`.
  void Check(const Path& path) const {
    for (size_t i = 0; i < lse.size(); ++i) {
      EXPECT_NEAR(
          p.lse[i], lse[i],
          probability_error + HalfUlp(DType::kF32) * (2 * std::abs(lse[i]) + 4))
          << what << " lse " << i;
    }
    // A weighted mean of v: the weights' errors times the largest |v|.
    const double error =
        (probability_error + WeightRounding(path, p)) * largest_v;
    ExpectNear(
        p.out, out,
        [&](int64_t i, int64_t j) {
          return error + HalfUlp(p.dtype) * std::abs(out(i, j)) +
                 TinyStep(p.dtype);
        },
        what);
  }
};

// The backward pass gets the reference's own output and statistics, rounded.
struct BackwardCase {
  AttentionProblem p;
  std::string what;
  Dense dq, dk, dv;
  double probability_error, dq_size, dk_size, dv_size;

  explicit BackwardCase(const ForwardCase& forward)
      : p(forward.p),
        what(forward.what),
        dq(p.dq.rows(), p.dq.cols()),
        dk(p.dk.rows(), p.dk.cols()),
        dv(p.dv.rows(), p.dv.cols()),
        probability_error(forward.probability_error) {
    for (int64_t i = 0; i < p.out.rows(); ++i) {
      for (int64_t j = 0; j < p.out.cols(); ++j) {
        p.out.Set(i, j, forward.out(i, j));
      }
    }
    for (size_t i = 0; i < p.lse.size(); ++i) {
      p.lse[i] = static_cast<float>(forward.lse[i]);
    }
    const double most_seen = Differentiate();
    // ds = p (dp - delta) scale, where dp and delta are sums over D of size
    // |dout| |v| and |dout| |out|, and |out| <= |v|. dq is a mean of k with
    // these weights; dk and dv are sums over the queries that see the key.
    const double ds = 2 * HeadNorm(p.dout, p.s.dim) * HeadNorm(p.v, p.s.dim) *
                      static_cast<double>(p.scale);
    dq_size = ds * Largest(p.k.dense());
    dk_size = ds * Largest(p.q.dense()) * most_seen;
    dv_size = Largest(p.dout.dense()) * most_seen;
  }

  // Fills dq, dk and dv; returns the largest sum of a key's probabilities.
  double Differentiate() {
    const AttentionTestShape& s = p.s;
    const int64_t group = s.heads / s.kv_heads;
    double most_seen = 0;
    for (const auto& [q, n, k, num_keys] : p.Sequences()) {
      for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
        std::vector<double> seen(static_cast<size_t>(num_keys));
        for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
          const auto first = p.lse.begin() + p.LseAt(q, h);
          const AttentionGradient r = ReferenceAttentionGradient(
              p.Head(p.q, q, n, h), p.Head(p.k, k, num_keys, kv),
              p.Head(p.v, k, num_keys, kv), p.Head(p.out, q, n, h),
              p.Head(p.dout, q, n, h), std::vector<double>(first, first + n),
              p.scale);
          p.PutHead(dq, q, h, r.dq, false);
          p.PutHead(dk, k, kv, r.dk, true);
          p.PutHead(dv, k, kv, r.dv, true);
          for (size_t j = 0; j < seen.size(); ++j) seen[j] += r.seen[j];
        }
        most_seen =
            std::max(most_seen, *std::max_element(seen.begin(), seen.end()));
      }
    }
    return most_seen;
  }

  void Run(const Path& path) {
    p.SpoilGradients();
    p.Backward(path.ops, path.stream);
    Check(path);
  }

  // Compares dq, dk and dv of `p`.
  void Check(const Path& path) const {
    // The sums' own errors, p's, and one rounding at the end.
    const double error =
        probability_error + 12 * HalfUlp(DType::kF32) + WeightRounding(path, p);
    const auto check = [&](const GuardedMatrix& got, const Dense& want,
                           double size, const char* name) {
      ExpectNear(
          got, want,
          [&](int64_t i, int64_t j) {
            return error * size + HalfUlp(p.dtype) * std::abs(want(i, j)) +
                   TinyStep(p.dtype);
          },
          what + ": " + name);
    };
    check(p.dq, dq, dq_size, "dq");
    check(p.dk, dk, dk_size, "dk");
    check(p.dv, dv, dv_size, "dv");
  }
};

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_ATTENTION_CHECKS_H_
