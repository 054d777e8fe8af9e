#include "tests/kernels/attention_checks.h"

namespace zero {
namespace {

using Problem = AttentionProblem;
using Shape = AttentionTestShape;

// On the emulated GPU the 16-bit dtypes run in one order of threads: they
// differ from fp32 in how elements are loaded and stored, not in what threads
// share.
bool IsWorthIt(const Path& path, DType dtype) {
  const bool is_ordered = path.name == "emulated, threads forward" ||
                          path.name == "emulated, threads in reverse";
  return dtype == DType::kF32 || !is_ordered;
}

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

// A tile's work does not depend on its position. (For rows that cuDNN does not
// take: it gives no such guarantee.)
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

// Generation token by token with a cache of keys gives the results of training.
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
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const int64_t dim = 8, length = 130;
      Problem p({2, 3, 3, length, length, dim}, dtype);
      p.scale = 100;
      p.Forward(path.ops, path.stream);
      p.Backward(path.ops, path.stream);
      for (GuardedMatrix* m : {&p.out, &p.dq, &p.dk, &p.dv}) {
        for (const double v : m->dense().values) EXPECT_TRUE(std::isfinite(v));
      }
      // The first token sees only itself, however negative its score.
      for (const int64_t row : {int64_t{0}, length}) {
        for (int64_t i = 0; i < 3 * dim; ++i) {
          EXPECT_EQ(p.out(row, i), p.v(row, i));
        }
      }
    }
  });
}

}  // namespace
}  // namespace zero
