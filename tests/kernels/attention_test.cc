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

// On the emulated GPU the 16-bit dtypes run in one order of threads: they
// differ from fp32 in how elements are loaded and stored, not in what threads
// share.
bool IsWorthIt(const Path& path, DType dtype) {
  const bool is_ordered = path.name == "emulated, threads forward" ||
                          path.name == "emulated, threads in reverse";
  return dtype == DType::kF32 || !is_ordered;
}

// A problem and what float64 makes of it, once for all paths.
struct ForwardCase {
  Problem p;
  std::string what;
  Dense out;
  std::vector<double> lse;
  double probability_error, largest_v;

  ForwardCase(const Shape& s, DType dtype, const Lengths& lengths = {})
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
  Problem p;
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
    // these weights; dk and dv are sums over what saw the key.
    const double ds = 2 * HeadNorm(p.dout, p.s.dim) * HeadNorm(p.v, p.s.dim) *
                      static_cast<double>(p.scale);
    dq_size = ds * Largest(p.k.dense());
    dk_size = ds * Largest(p.q.dense()) * most_seen;
    dv_size = Largest(p.dout.dense()) * most_seen;
  }

  // Fills dq, dk and dv; returns the sum of probabilities of the key that has
  // most of them.
  double Differentiate() {
    const Shape& s = p.s;
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

// batch, heads, kv heads, queries, keys, head width, pad.
constexpr Shape kShapes[] = {
    {1, 1, 1, 1, 1, 1},         {2, 1, 1, 1, 1, 64, 8},
    {2, 3, 3, 31, 31, 31},      {1, 4, 2, 33, 33, 16, 8},
    {1, 3, 1, 65, 65, 64, 8},   {1, 2, 2, 130, 130, 33},
    {1, 1, 1, 300, 300, 12, 8}, {1, 6, 2, 1, 61, 40, 8},
    {1, 2, 2, 5, 200, 80},      {1, 1, 1, 70, 199, 128, 8},
    {1, 1, 1, 67, 67, 99},      {1, 2, 1, 19, 35, 136, 16},
    {1, 1, 1, 33, 33, 201},     {1, 1, 1, 17, 17, 256, 8},
};

template <class Case>
void RunOnEveryPath(std::vector<Case> cases) {
  ForEachMatmulPath([&](const Path& path) {
    for (Case& c : cases) {
      if (IsWorthIt(path, c.p.dtype)) c.Run(path);
    }
  });
}

TEST(AttentionTest, ForwardIsTheCausalSoftmaxOfFloat64) {
  std::vector<ForwardCase> cases;
  for (const DType dtype : kFloatTypes) {
    for (const Shape& s : kShapes) cases.emplace_back(s, dtype);
  }
  RunOnEveryPath(std::move(cases));
}

TEST(AttentionTest, BackwardIsTheGradientOfFloat64) {
  std::vector<BackwardCase> cases;
  for (const DType dtype : kFloatTypes) {
    for (Shape s : kShapes) {
      s.kv_len = s.q_len;
      cases.emplace_back(ForwardCase(s, dtype));
    }
  }
  RunOnEveryPath(std::move(cases));
}

// ---- Packed sequences -----------------------------------------------------

// Sequences of one token, of a whole row, of odd lengths, that begin within a
// tile (of 16, 32, 64 or 128 rows), at its first row and at its last.
std::vector<ForwardCase> PackedCases() {
  const std::pair<Shape, Lengths> kCases[] = {
      {{1, 2, 1, 72, 72, 16, 8}, {1, 1, 61, 1, 8}},
      {{2, 1, 1, 70, 70, 31}, {70, 33, 37}},
      {{1, 4, 2, 80, 80, 64, 8}, {32, 43, 5}},
      {{1, 2, 1, 160, 160, 24, 8}, {128, 3, 29}},
      {{1, 1, 1, 64, 64, 8, 8}, Lengths(64, 1)},
      {{1, 1, 1, 41, 41, 99}, {16, 1, 15, 9}},
      {{1, 1, 1, 35, 35, 136, 8}, {7, 28}},
  };
  std::vector<ForwardCase> cases;
  for (const DType dtype : kFloatTypes) {
    for (const auto& [s, lengths] : kCases) {
      cases.emplace_back(s, dtype, lengths);
    }
  }
  return cases;
}

TEST(AttentionTest, PackedForwardIsThatOfEverySequence) {
  RunOnEveryPath(PackedCases());
}

TEST(AttentionTest, PackedBackwardIsThatOfEverySequence) {
  std::vector<BackwardCase> cases;
  for (const ForwardCase& c : PackedCases()) cases.emplace_back(c);
  RunOnEveryPath(std::move(cases));
}

// A tile is the same work wherever it lies. (Rows that cuDNN does not take,
// which promises nothing of the kind.)
TEST(AttentionTest, SequencesThatBeginWithATileHaveTheBitsOfTheirOwnRow) {
  OnPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      const Lengths lengths = {128, 90, 38, 44};
      Problem packed({1, 2, 1, 300, 300, 20}, dtype);
      packed.Pack(lengths);
      packed.Forward(path.ops, path.stream);
      packed.Backward(path.ops, path.stream);
      for (const size_t i : {0, 1, 3}) {
        const int64_t n = lengths[i], first = packed.offsets[i];
        Problem alone({1, 2, 1, n, n, 20}, dtype);
        const auto copy = [&](const GuardedMatrix& from, GuardedMatrix& to) {
          for (int64_t t = 0; t < n; ++t) {
            for (int64_t j = 0; j < to.cols(); ++j) {
              to.Set(t, j, from(first + t, j));
            }
          }
        };
        copy(packed.q, alone.q);
        copy(packed.k, alone.k);
        copy(packed.v, alone.v);
        copy(packed.dout, alone.dout);
        alone.Forward(path.ops, path.stream);
        alone.Backward(path.ops, path.stream);
        const auto expect_same = [&](const GuardedMatrix& whole,
                                     const GuardedMatrix& own,
                                     const char* name) {
          GuardedMatrix part = own;
          copy(whole, part);
          EXPECT_TRUE(part.SameElements(own)) << name << " of sequence " << i;
        };
        expect_same(packed.out, alone.out, "out");
        expect_same(packed.dq, alone.dq, "dq");
        expect_same(packed.dk, alone.dk, "dk");
        expect_same(packed.dv, alone.dv, "dv");
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t t = 0; t < n; ++t) {
            EXPECT_EQ(packed.lse[packed.LseAt(first + t, h)],
                      alone.lse[alone.LseAt(t, h)]);
          }
        }
      }
    }
  });
}

TEST(AttentionTest, BitsDoNotDependOnAddressesStridesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      if (!IsWorthIt(path, dtype)) continue;
      for (const int64_t dim : {20, 24}) {
        Problem first({1, 2, 1, 35, 35, dim, 8}, dtype);
        first.Forward(path.ops, path.stream);
        first.Backward(path.ops, path.stream);
        for (const int64_t shift : {0, 1, 5}) {
          Problem again({1, 2, 1, 35, 35, dim, shift}, dtype, shift);
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
    const int64_t dim = 8, length = 130;
    Problem p({2, 3, 3, length, length, dim}, DType::kF32);
    p.scale = 100;
    p.Forward(path.ops, path.stream);
    p.Backward(path.ops, path.stream);
    for (GuardedMatrix* m : {&p.out, &p.dq, &p.dk, &p.dv}) {
      for (const double v : m->dense().values) EXPECT_TRUE(std::isfinite(v));
    }
    // The first token sees itself alone, however negative its score.
    for (const int64_t row : {int64_t{0}, length}) {
      for (int64_t i = 0; i < 3 * dim; ++i) {
        EXPECT_EQ(p.out(row, i), p.v(row, i));
      }
    }
  });
}

}  // namespace
}  // namespace zero
