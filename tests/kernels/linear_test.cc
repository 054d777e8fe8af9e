#include "tests/kernels/linear_checks.h"

namespace zero {
namespace {

constexpr LinearShape kShapes[] = {{1, 1, 1},    {1, 31, 33},   {33, 31, 1},
                                   {31, 33, 65}, {5, 1023, 31}, {130, 64, 96}};

void RunInput(const Path& path, const LinearBackwardInputArgs& args) {
  Scratch scratch(path.ops.LinearBackwardInputWorkspaceBytes(args));
  path.ops.LinearBackwardInput(path.stream, args, scratch.workspace());
}
void RunWeight(const Path& path, const LinearBackwardWeightArgs& args) {
  Scratch scratch(path.ops.LinearBackwardWeightWorkspaceBytes(args));
  path.ops.LinearBackwardWeight(path.stream, args, scratch.workspace());
}

void CheckForwards(const Path& path, const LinearShape& s, DType dtype,
                   int64_t pad) {
  CheckForward(path, s, dtype, false, false, Gelu::kNone, false, pad);
  CheckForward(path, s, dtype, true, false, Gelu::kNone, false, pad);
  CheckForward(path, s, dtype, false, true, Gelu::kNone, false, pad);
  CheckForward(path, s, dtype, true, true, Gelu::kNone, false, pad);
  CheckForward(path, s, dtype, true, false, Gelu::kTanh, true, pad);
  CheckForward(path, s, dtype, false, false, Gelu::kErf, false, pad);
  CheckForward(path, s, dtype, true, true, Gelu::kErf, true, pad);
  CheckForward(path, s, dtype, true, true, Gelu::kTanh, false, pad);
}

TEST(LinearTest, ForwardIsTheProductWithBiasActivationAndResidual) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const LinearShape& s : kShapes) CheckForwards(path, s, dtype, 0);
      // As models have them: every row on 16 bytes.
      CheckForwards(path, {130, 64, 96}, dtype, 8);
    }
  });
}

void CheckInput(const Path& path, const LinearShape& s, DType dtype,
                bool accumulate, Gelu act) {
  const std::string what = Name(s, dtype) + (accumulate ? " accumulate" : "");
  GuardedMatrix dy = GuardedMatrix::Normal(dtype, s.m, s.n, 1, 1);
  GuardedMatrix w =
      GuardedMatrix::Normal(dtype, s.n, s.k, 0, 2, 1 / std::sqrt(s.n));
  GuardedMatrix dx = GuardedMatrix::Normal(dtype, s.m, s.k, 3, 3);
  GuardedMatrix pre = GuardedMatrix::Normal(dtype, s.m, s.k, 2, 4, 2);
  const Dense before = dx.dense();
  LinearBackwardInputArgs args;
  args.dy = dy.view();
  args.w = w.view();
  args.dx = dx.view();
  args.accumulate = accumulate;
  args.act = act;
  if (act != Gelu::kNone) args.pre_act = pre.view();
  RunInput(path, args);

  const Dense dy_dense = dy.dense();
  const Dense product = Matmul(dy_dense, w.dense());
  const Dense w_columns = Transposed(w.dense());
  Dense want(s.m, s.k), bound(s.m, s.k);
  for (int64_t i = 0; i < s.m; ++i) {
    const double dy_norm = Norm(dy_dense, i);
    for (int64_t j = 0; j < s.k; ++j) {
      const double slope =
          act == Gelu::kNone ? 1 : ReferenceGeluDerivative(act, pre(i, j));
      const double old = accumulate ? before(i, j) : 0;
      want(i, j) = slope * product(i, j) + old;
      // The sum, its rounding to the dtype (twice with an activation), and
      // gelu' in fp32: 4 half ulps of its largest value.
      const double size = std::abs(product(i, j)) + std::abs(old);
      bound(i, j) = 1.13 * (SumError(dy_norm, Norm(w_columns, j)) +
                            2 * HalfUlp(dtype) * size) +
                    5 * HalfUlp(DType::kF32) * size + TinyStep(dtype);
    }
  }
  ExpectNear(
      dx, want, [&](int64_t i, int64_t j) { return bound(i, j); }, what);
}

TEST(LinearTest, InputGradientIsTheProductTimesTheActivationsSlope) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const LinearShape& s : kShapes) {
        CheckInput(path, s, dtype, false, Gelu::kNone);
        CheckInput(path, s, dtype, true, Gelu::kNone);
        CheckInput(path, s, dtype, false, Gelu::kTanh);
        CheckInput(path, s, dtype, false, Gelu::kErf);
      }
    }
  });
}

void CheckWeight(const Path& path, const LinearShape& s, DType dtype,
                 DType sink, bool accumulate) {
  const std::string what = Name(s, dtype) + " into " + DTypeName(sink) +
                           (accumulate ? " accumulate" : "");
  GuardedMatrix dy = GuardedMatrix::Normal(dtype, s.m, s.n, 1, 1);
  GuardedMatrix x = GuardedMatrix::Normal(dtype, s.m, s.k, 2, 2);
  GuardedMatrix dw = GuardedMatrix::Normal(sink, s.n, s.k, 3, 3);
  GuardedMatrix dbias = GuardedMatrix::Normal(sink, 1, s.n, 0, 4);
  const Dense old_dw = dw.dense(), old_dbias = dbias.dense();
  LinearBackwardWeightArgs args;
  args.dy = dy.view();
  args.x = x.view();
  args.dw = dw.view();
  args.accumulate_dw = accumulate;
  args.dbias = dbias.row_vector();
  args.accumulate_dbias = accumulate;
  RunWeight(path, args);

  const Dense dy_t = Transposed(dy.dense()), x_t = Transposed(x.dense());
  Dense want = Matmul(dy_t, x.dense()), want_bias(1, s.n);
  for (int64_t i = 0; i < s.n; ++i) {
    for (int64_t j = 0; j < s.k; ++j) {
      if (accumulate) want(i, j) += old_dw(i, j);
    }
    if (accumulate) want_bias(0, i) = old_dbias(0, i);
    for (int64_t r = 0; r < s.m; ++r) want_bias(0, i) += dy(r, i);
  }
  ExpectNear(
      dw, want,
      [&](int64_t i, int64_t j) {
        return SumError(Norm(dy_t, i), Norm(x_t, j)) +
               HalfUlp(sink) * (std::abs(want(i, j)) + std::abs(old_dw(i, j))) +
               TinyStep(sink);
      },
      what);
  const double ones = std::sqrt(static_cast<double>(s.m));
  ExpectNear(
      dbias, want_bias,
      [&](int64_t, int64_t j) {
        return SumError(Norm(dy_t, j), ones) +
               HalfUlp(sink) *
                   (std::abs(want_bias(0, j)) + std::abs(old_dbias(0, j))) +
               TinyStep(sink);
      },
      what + ": dbias");
}

TEST(LinearTest, WeightAndBiasGradientsAreWrittenOrAccumulated) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const LinearShape& s : kShapes) {
        for (const bool accumulate : {false, true}) {
          CheckWeight(path, s, dtype, DType::kF32, accumulate);
          if (dtype != DType::kF32) {
            CheckWeight(path, s, dtype, dtype, accumulate);
          }
        }
      }
    }
  });
}

TEST(LinearTest, WeightOrBiasGradientAloneLeavesTheOtherAlone) {
  OnPath([](const Path& path) {
    GuardedMatrix dy = GuardedMatrix::Normal(DType::kF32, 9, 7, 0, 1);
    GuardedMatrix x = GuardedMatrix::Normal(DType::kF32, 9, 5, 0, 2);
    GuardedMatrix dbias(DType::kF32, 1, 7), dw(DType::kF32, 7, 5);
    LinearBackwardWeightArgs args;
    args.dy = dy.view();
    args.x = x.view();
    args.dbias = dbias.row_vector();
    Scratch only_bias(path.ops.LinearBackwardWeightWorkspaceBytes(args));
    path.ops.LinearBackwardWeight(path.stream, args, only_bias.workspace());
    EXPECT_NE(dbias(0, 3), 0);
    args.dbias = {};
    args.dw = dw.view();
    dbias.Set(0, 3, 7);
    Scratch only_dw(path.ops.LinearBackwardWeightWorkspaceBytes(args));
    path.ops.LinearBackwardWeight(path.stream, args, only_dw.workspace());
    EXPECT_NE(dw(3, 3), 0);
    EXPECT_EQ(dbias(0, 3), 7);
  });
}

// Bits may depend only on the number of threads: not on the operands' addresses
// or on earlier work.
TEST(LinearTest, BitsDoNotDependOnAddressesStridesOrHistory) {
  ForEachMatmulPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      const LinearShape s{65, 130, 97};
      GuardedMatrix first(dtype, s.m, s.n), first_dw(DType::kF32, s.n, s.k);
      for (const int64_t offset : {0, 0, 1, 3, 17}) {
        GuardedMatrix x =
            GuardedMatrix::Normal(dtype, s.m, s.k, 0, 1, 1, offset);
        GuardedMatrix w =
            GuardedMatrix::Normal(dtype, s.n, s.k, 0, 2, 1, offset);
        GuardedMatrix y(dtype, s.m, s.n, 0, offset);
        LinearArgs args;
        args.x = x.view();
        args.w = w.view();
        args.y = y.view();
        RunLinear(path, args);
        GuardedMatrix dw(DType::kF32, s.n, s.k, 0, offset);
        LinearBackwardWeightArgs back;
        back.dy = y.view();
        back.x = x.view();
        back.dw = dw.view();
        back.accumulate_dw = offset == 17;  // into zeros: the same bits
        RunWeight(path, back);
        if (first(0, 0) == 0) {
          first = y;
          first_dw = dw;
        }
        EXPECT_TRUE(y.SameElements(first)) << DTypeName(dtype) << " " << offset;
        EXPECT_TRUE(dw.SameElements(first_dw))
            << DTypeName(dtype) << " " << offset;
      }
    }
  });
}

TEST(LinearTest, EmptyBatchIsNoWork) {
  OnPath([](const Path& path) {
    GuardedMatrix w = GuardedMatrix::Normal(DType::kF32, 4, 3, 0, 1);
    float memory = 0;
    LinearArgs args;
    args.x = {&memory, DType::kF32, 0, 3, 3};
    args.w = w.view();
    args.y = {&memory, DType::kF32, 0, 4, 4};
    EXPECT_EQ(path.ops.LinearWorkspaceBytes(args), 0u);
    path.ops.Linear(path.stream, args, {});
    EXPECT_EQ(memory, 0);
  });
}

}  // namespace
}  // namespace zero
