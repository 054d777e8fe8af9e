#include "tests/kernels/matrix.h"

namespace zero {
namespace {

struct Shape {
  int64_t batch, heads, kv_heads, q_len, kv_len, dim;
};

std::string Name(const Shape& s, DType dtype) {
  std::string name = DTypeName(dtype);
  for (const int64_t n :
       {s.batch, s.heads, s.kv_heads, s.q_len, s.kv_len, s.dim}) {
    name += " " + std::to_string(n);
  }
  return name;
}

// [B * T, heads * D] matrices with room after every token, as in a packed
// projection.
struct Problem {
  Shape s;
  DType dtype;
  GuardedMatrix q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;
  float scale;

  Problem(const Shape& s, DType dtype, int64_t pad = 7, int64_t offset = 0)
      : s(s),
        dtype(dtype),
        q(Input(s.q_len, s.heads, pad, 1, offset)),
        k(Input(s.kv_len, s.kv_heads, pad, 2, offset)),
        v(Input(s.kv_len, s.kv_heads, pad, 3, offset)),
        out(Output(s.q_len, s.heads, pad)),
        dout(Input(s.q_len, s.heads, pad, 4, offset)),
        dq(Output(s.q_len, s.heads, pad)),
        dk(Output(s.kv_len, s.kv_heads, pad)),
        dv(Output(s.kv_len, s.kv_heads, pad)),
        lse(static_cast<size_t>(s.batch * s.heads * s.q_len)),
        scale(static_cast<float>(1 / std::sqrt(s.dim))) {}

  GuardedMatrix Input(int64_t tokens, int64_t heads, int64_t pad, uint64_t seed,
                      int64_t offset) const {
    return GuardedMatrix::Normal(dtype, s.batch * tokens, heads * s.dim, pad,
                                 seed, 1, offset);
  }
  GuardedMatrix Output(int64_t tokens, int64_t heads, int64_t pad) const {
    return GuardedMatrix(dtype, s.batch * tokens, heads * s.dim, pad);
  }
  AttentionShape shape() const {
    return {dtype,   s.batch,    s.q_len, s.kv_len,
            s.heads, s.kv_heads, s.dim,   scale};
  }
  MutableHeadsRef Mutable(GuardedMatrix& m) const {
    const Matrix view = m.view();
    return {view.data, view.rows / s.batch * view.ld, view.ld};
  }
  HeadsRef Const(GuardedMatrix& m) const {
    const MutableHeadsRef r = Mutable(m);
    return {r.data, r.batch_stride, r.token_stride};
  }

  void Forward(Ops& ops, Stream& stream, bool with_lse = true) {
    AttentionForwardArgs args;
    args.shape = shape();
    args.q = Const(q);
    args.k = Const(k);
    args.v = Const(v);
    args.out = Mutable(out);
    args.lse = with_lse ? lse.data() : nullptr;
    Scratch scratch(ops.AttentionForwardWorkspaceBytes(args));
    ops.AttentionForward(stream, args, scratch.workspace());
  }
  void Backward(Ops& ops, Stream& stream) {
    AttentionBackwardArgs args;
    args.shape = shape();
    args.q = Const(q);
    args.k = Const(k);
    args.v = Const(v);
    args.out = Const(out);
    args.dout = Const(dout);
    args.lse = lse.data();
    args.dq = Mutable(dq);
    args.dk = Mutable(dk);
    args.dv = Mutable(dv);
    Scratch scratch(ops.AttentionBackwardWorkspaceBytes(args));
    ops.AttentionBackward(stream, args, scratch.workspace());
  }

  // One head of one sample.
  Dense Head(const GuardedMatrix& m, int64_t b, int64_t h) const {
    const int64_t tokens = m.rows() / s.batch;
    Dense d(tokens, s.dim);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < s.dim; ++i) {
        d(t, i) = m(b * tokens + t, h * s.dim + i);
      }
    }
    return d;
  }
  void PutHead(Dense& whole, int64_t b, int64_t h, const Dense& d,
               bool add) const {
    for (int64_t t = 0; t < d.rows; ++t) {
      for (int64_t i = 0; i < s.dim; ++i) {
        double& to = whole(b * d.rows + t, h * s.dim + i);
        to = add ? to + d(t, i) : d(t, i);
      }
    }
  }
};

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

void CheckForward(Problem& p, const std::string& what) {
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
  const double largest = Largest(p.v.dense());
  ExpectNear(
      p.out, want,
      [&](int64_t i, int64_t j) {
        return probability_error * largest +
               HalfUlp(p.dtype) * std::abs(want(i, j)) + TinyStep(p.dtype);
      },
      what);
}

void CheckBackward(Problem& p, const std::string& what) {
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
  const double error = ProbabilityError(p) + 12 * HalfUlp(DType::kF32);
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

constexpr Shape kForwardShapes[] = {
    {1, 1, 1, 1, 1, 1},      {2, 1, 1, 1, 1, 64},   {2, 3, 3, 31, 31, 31},
    {1, 4, 2, 33, 33, 16},   {2, 4, 1, 65, 65, 64}, {1, 2, 2, 130, 130, 33},
    {1, 1, 1, 300, 300, 16}, {1, 6, 2, 1, 77, 64},  {1, 4, 4, 5, 200, 80},
    {1, 2, 1, 70, 199, 128},
};

TEST(AttentionTest, ForwardIsTheCausalSoftmaxOfFloat64) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Shape& s : kForwardShapes) {
        Problem p(s, dtype);
        p.Forward(path.ops, path.stream);
        CheckForward(p, Name(s, dtype));
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
        CheckBackward(p, Name(s, dtype));
      }
    }
  });
}

// With fewer kv heads than threads the backward pass is cut by keys and by
// queries; with as many, by heads. A tile is the same work either way.
TEST(AttentionTest, BackwardHasTheSameBitsHoweverItIsCut) {
  for (const DType dtype : kFloatTypes) {
    const Shape s{1, 2, 1, 600, 600, 24};
    Problem whole(s, dtype), cut(s, dtype);
    for (Problem* p : {&whole, &cut}) {
      const auto device = MakeCpuDevice(p == &whole ? 1 : 3);
      const auto stream = device->MakeStream(StreamRole::kCompute);
      p->Forward(device->ops(), *stream);
      p->Backward(device->ops(), *stream);
    }
    EXPECT_TRUE(whole.out.SameElements(cut.out));
    EXPECT_EQ(whole.lse, cut.lse);
    EXPECT_TRUE(whole.dq.SameElements(cut.dq));
    EXPECT_TRUE(whole.dk.SameElements(cut.dk));
    EXPECT_TRUE(whole.dv.SameElements(cut.dv));
    CheckBackward(cut, "cut");
  }
}

TEST(AttentionTest, BitsDoNotDependOnAddressesStridesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      const Shape s{2, 4, 2, 67, 67, 20};
      Problem first(s, dtype);
      first.Forward(path.ops, path.stream);
      first.Backward(path.ops, path.stream);
      for (const int64_t shift : {0, 1, 5}) {
        Problem again(s, dtype, shift, shift);
        again.Forward(path.ops, path.stream);
        again.Backward(path.ops, path.stream);
        EXPECT_TRUE(first.out.SameElements(again.out)) << shift;
        EXPECT_EQ(first.lse, again.lse) << shift;
        EXPECT_TRUE(first.dq.SameElements(again.dq)) << shift;
        EXPECT_TRUE(first.dk.SameElements(again.dk)) << shift;
        EXPECT_TRUE(first.dv.SameElements(again.dv)) << shift;
      }
    }
  });
}

// Generation token by token with a cache of keys sees what training saw.
TEST(AttentionTest, OneQueryAgainstACacheIsTheLastRowOfTheWhole) {
  OnPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      Problem whole({1, 4, 2, 150, 150, 32}, dtype, 0);
      whole.Forward(path.ops, path.stream);
      Problem last({1, 4, 2, 1, 150, 32}, dtype, 0);
      for (int64_t i = 0; i < 4 * 32; ++i) last.q.Set(0, i, whole.q(149, i));
      last.k = whole.k;
      last.v = whole.v;
      last.Forward(path.ops, path.stream, /*with_lse=*/false);
      const double error = ProbabilityError(whole) * Largest(whole.v.dense());
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

// The reference's own gradients, by central differences of its own output.
TEST(AttentionTest, ReferenceGradientsAreTheDerivativesOfTheOutput) {
  const auto normal = [](uint64_t seed) {
    return GuardedMatrix::Normal(DType::kF32, 5, 3, 0, seed).dense();
  };
  const Dense q = normal(1), k = normal(2), v = normal(3), dout = normal(4);
  const AttentionReference r = ReferenceAttention(q, k, v, 0.7);
  const AttentionGradient g =
      ReferenceAttentionGradient(q, k, v, r.out, dout, r.lse, 0.7);
  const auto value = [&](const Dense& q, const Dense& k, const Dense& v) {
    const AttentionReference r = ReferenceAttention(q, k, v, 0.7);
    double sum = 0;
    for (size_t i = 0; i < dout.values.size(); ++i) {
      sum += r.out.values[i] * dout.values[i];
    }
    return sum;
  };
  for (size_t i = 0; i < q.values.size(); ++i) {
    const auto slope = [&](int which) {
      Dense moved[3] = {q, k, v};
      return NumericalDerivative(
          [&](double x) {
            moved[which].values[i] = x;
            return value(moved[0], moved[1], moved[2]);
          },
          moved[which].values[i]);
    };
    EXPECT_NEAR(g.dq.values[i], slope(0), 1e-8);
    EXPECT_NEAR(g.dk.values[i], slope(1), 1e-8);
    EXPECT_NEAR(g.dv.values[i], slope(2), 1e-8);
  }
}

}  // namespace
}  // namespace zero
