// Properties of attention on the CPU only, and of the reference itself.
#include "tests/kernels/attention_problem.h"

namespace zero {
namespace {

void ExpectSameBitsHoweverItIsCut(DType dtype, const Lengths& lengths) {
  const AttentionTestShape s{1, 2, 1, 600, 600, 24};
  AttentionProblem whole(s, dtype), cut(s, dtype);
  for (AttentionProblem* p : {&whole, &cut}) {
    if (!lengths.empty()) p->Pack(lengths);
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
}

// With fewer kv heads than threads the backward pass is cut by keys and by
// queries; with as many, by heads. A tile's work is the same either way.
TEST(AttentionCpuTest, BackwardHasTheSameBitsHoweverItIsCut) {
  for (const DType dtype : kFloatTypes) {
    ExpectSameBitsHoweverItIsCut(dtype, {});
    ExpectSameBitsHoweverItIsCut(dtype, {130, 1, 260, 209});
  }
}

// The reference's own gradients, by central differences of its own output.
TEST(AttentionCpuTest, ReferenceGradientsAreTheDerivativesOfTheOutput) {
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
