#include "tests/kernels/attention_problem.h"

namespace zero {
namespace {

using Problem = AttentionProblem;
using Shape = AttentionTestShape;

double Largest(const Dense& x) {
  double largest = 0;
  for (const double v : x.values) largest = std::max(largest, std::abs(v));
  return largest;
}

// The largest norm of a head's row.
double HeadNorm(const GuardedMatrix& m, int64_t dim) {
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
double ProbabilityError(const Problem& p) {
  const double score = HeadNorm(p.q, p.s.dim) * HeadNorm(p.k, p.s.dim) *
                       static_cast<double>(p.scale);
  return 2 * SumError(score, 1) +
         (8 + std::sqrt(p.s.kv_len)) * HalfUlp(DType::kF32);
}

// cuDNN's part of a 16-bit call: it rounds the probabilities, and in the
// backward pass their gradients, to the dtype before it multiplies with them;
// one relative error of each weight, and one more where it scales. 0 where our
// own kernels run: their sums are in fp32 throughout.
double WeightRounding(const Path& path, const Problem& p) {
  const bool may_be_cudnn = path.name.rfind("cuda", 0) == 0 &&
                            p.dtype != DType::kF32 && p.s.q_len == p.s.kv_len &&
                            p.s.dim % 8 == 0 && p.s.pad % 8 == 0;
  return may_be_cudnn ? 2 * HalfUlp(p.dtype) : 0;
}

void CheckForward(const Path& path, Problem& p, const std::string& what) {
  const double probability_error = ProbabilityError(p);
  Dense want(p.out.rows(), p.out.cols());
  const int64_t group = p.s.heads / p.s.kv_heads;
  for (int64_t b = 0; b < p.s.batch; ++b) {
    for (int64_t h = 0; h < p.s.heads; ++h) {
      const AttentionReference r =
          ReferenceAttention(p.Head(p.q, b, h), p.Head(p.k, b, h / group),
                             p.Head(p.v, b, h / group), p.scale);
      p.PutHead(want, b, h, r.out, false);
      for (int64_t t = 0; t < p.s.q_len; ++t) {
        const double got =
            p.lse[static_cast<size_t>((b * p.s.heads + h) * p.s.q_len + t)];
        const double lse = r.lse[static_cast<size_t>(t)];
        EXPECT_NEAR(
            got, lse,
            probability_error + HalfUlp(DType::kF32) * (2 * std::abs(lse) + 4))
            << what << " lse of token " << t;
      }
    }
  }
  // A weighted mean of v: the weights' errors times the largest |v|.
  const double weight_error = probability_error + WeightRounding(path, p);
  const double largest = Largest(p.v.dense());
  ExpectNear(
      p.out, want,
      [&](int64_t i, int64_t j) {
        return weight_error * largest +
               HalfUlp(p.dtype) * std::abs(want(i, j)) + TinyStep(p.dtype);
      },
      what);
}

void CheckBackward(const Path& path, Problem& p, const std::string& what) {
  Dense dq(p.dq.rows(), p.dq.cols());
  Dense dk(p.dk.rows(), p.dk.cols());
  Dense dv(p.dv.rows(), p.dv.cols());
  const int64_t group = p.s.heads / p.s.kv_heads;
  std::vector<double> seen(static_cast<size_t>(dk.rows * p.s.kv_heads));
  for (int64_t b = 0; b < p.s.batch; ++b) {
    for (int64_t h = 0; h < p.s.heads; ++h) {
      const auto first =
          p.lse.begin() + static_cast<int64_t>((b * p.s.heads + h) * p.s.q_len);
      const std::vector<double> lse(first, first + p.s.q_len);
      const AttentionGradient r = ReferenceAttentionGradient(
          p.Head(p.q, b, h), p.Head(p.k, b, h / group),
          p.Head(p.v, b, h / group), p.Head(p.out, b, h), p.Head(p.dout, b, h),
          lse, p.scale);
      p.PutHead(dq, b, h, r.dq, false);
      p.PutHead(dk, b, h / group, r.dk, true);
      p.PutHead(dv, b, h / group, r.dv, true);
      for (int64_t j = 0; j < p.s.kv_len; ++j) {
        seen[static_cast<size_t>((b * p.s.kv_heads + h / group) * p.s.kv_len +
                                 j)] += r.seen[static_cast<size_t>(j)];
      }
    }
  }
  // ds = p (dp - delta) scale, where dp and delta are sums over D of size
  // |dout| |v| and |dout| |out|, and |out| <= |v|: the sums' own errors, and
  // p's. dq is a mean of k with these weights; dk and dv are sums over what
  // saw the key. One rounding at the end.
  const double error =
      ProbabilityError(p) + 12 * HalfUlp(DType::kF32) + WeightRounding(path, p);
  const double dp = 2 * HeadNorm(p.dout, p.s.dim) * HeadNorm(p.v, p.s.dim) *
                    static_cast<double>(p.scale);
  const double most_seen = *std::max_element(seen.begin(), seen.end());
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
  check(p.dq, dq, dp * Largest(p.k.dense()), "dq");
  check(p.dk, dk, dp * Largest(p.q.dense()) * most_seen, "dk");
  check(p.dv, dv, Largest(p.dout.dense()) * most_seen, "dv");
}

// batch, heads, kv heads, queries, keys, head width, pad.
constexpr Shape kForwardShapes[] = {
    {1, 1, 1, 1, 1, 1},         {2, 1, 1, 1, 1, 64, 8},
    {2, 3, 3, 31, 31, 31},      {1, 4, 2, 33, 33, 16, 8},
    {1, 4, 1, 65, 65, 64, 8},   {2, 2, 1, 65, 65, 64},
    {1, 2, 2, 130, 130, 33},    {1, 1, 1, 300, 300, 16, 8},
    {1, 6, 2, 1, 77, 64, 8},    {1, 4, 4, 5, 200, 80},
    {1, 2, 1, 70, 199, 128, 8}, {1, 1, 1, 67, 67, 99},
    {1, 2, 1, 19, 35, 136, 16}, {1, 1, 1, 33, 33, 201},
    {1, 1, 1, 17, 17, 256, 8},
};

TEST(AttentionTest, ForwardIsTheCausalSoftmaxOfFloat64) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Shape& s : kForwardShapes) {
        Problem p(s, dtype);
        p.Forward(path.ops, path.stream);
        CheckForward(path, p, Name(s, dtype));
      }
    }
  });
}

TEST(AttentionTest, BackwardIsTheGradientOfFloat64) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (Shape s : kForwardShapes) {
        s.kv_len = s.q_len;
        Problem p(s, dtype);
        p.Forward(path.ops, path.stream);
        p.Backward(path.ops, path.stream);
        CheckBackward(path, p, Name(s, dtype));
      }
    }
  });
}

TEST(AttentionTest, BitsDoNotDependOnAddressesStridesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t dim : {20, 24}) {
        Problem first({2, 4, 2, 35, 35, dim, 8}, dtype);
        first.Forward(path.ops, path.stream);
        first.Backward(path.ops, path.stream);
        for (const int64_t shift : {0, 1, 5}) {
          Problem again({2, 4, 2, 35, 35, dim, shift}, dtype, shift);
          again.Forward(path.ops, path.stream);
          again.Backward(path.ops, path.stream);
          EXPECT_TRUE(first.out.SameElements(again.out)) << shift;
          EXPECT_EQ(first.lse, again.lse) << shift;
          EXPECT_TRUE(first.dq.SameElements(again.dq)) << shift;
          EXPECT_TRUE(first.dk.SameElements(again.dk)) << shift;
          EXPECT_TRUE(first.dv.SameElements(again.dv)) << shift;
        }
      }
    }
  });
}

// Generation token by token with a cache of keys sees what training saw.
TEST(AttentionTest, OneQueryAgainstACacheIsTheLastRowOfTheWhole) {
  OnPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      Problem whole({1, 4, 2, 150, 150, 32, 0}, dtype);
      whole.Forward(path.ops, path.stream);
      Problem last({1, 4, 2, 1, 150, 32, 0}, dtype);
      for (int64_t i = 0; i < 4 * 32; ++i) last.q.Set(0, i, whole.q(149, i));
      last.k = whole.k;
      last.v = whole.v;
      last.Forward(path.ops, path.stream, /*with_lse=*/false);
      const double error =
          (ProbabilityError(whole) + WeightRounding(path, whole)) *
          Largest(whole.v.dense());
      for (int64_t i = 0; i < 4 * 32; ++i) {
        EXPECT_NEAR(
            last.out(0, i), whole.out(149, i),
            2 * error + 2 * HalfUlp(dtype) * std::abs(whole.out(149, i)));
      }
    }
  });
}

TEST(AttentionTest, HugeScoresNeitherOverflowNorMix) {
  OnPath([](const Path& path) {
    Problem p({1, 1, 1, 200, 200, 8}, DType::kF32);
    p.scale = 100;
    p.Forward(path.ops, path.stream);
    p.Backward(path.ops, path.stream);
    for (GuardedMatrix* m : {&p.out, &p.dq, &p.dk, &p.dv}) {
      for (const double v : m->dense().values) EXPECT_TRUE(std::isfinite(v));
    }
  });
}

}  // namespace
}  // namespace zero
