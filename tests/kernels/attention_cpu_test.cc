// Properties of attention on the CPU only, and of the reference itself.
#include "kernels/cpu/attention.h"
#include "tests/kernels/attention_checks.h"

namespace zero {
namespace {

// One kv head that the backward pass of one thread cuts, too: dk and dv of 512
// tokens are as much as its scratch holds, with 256 keys.
constexpr AttentionTestShape kSeveralTasks{1, 2, 1, 800, 800, 352};
// Sequences within a task's tokens, across two tasks', and within a block.
const Lengths kAcrossTasks = {90, 600, 110};

void ExpectSameBitsHoweverItIsCut(const AttentionTestShape& s, DType dtype,
                                  const Lengths& lengths) {
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

// With fewer kv heads than threads the backward pass is cut into blocks of
// tokens; with as many, by heads, and by what fits into a task's scratch. A
// tile's work is the same either way.
TEST(AttentionCpuTest, BackwardHasTheSameBitsHoweverItIsCut) {
  constexpr AttentionTestShape kOneTask{1, 2, 1, 600, 600, 24};
  // In fp32, a task's scratch has room for all dk and dv but not for all keys.
  constexpr AttentionTestShape kBlocksOfKeys{1, 2, 1, 900, 900, 256};
  for (const DType dtype : kFloatTypes) {
    ExpectSameBitsHoweverItIsCut(kOneTask, dtype, {});
    ExpectSameBitsHoweverItIsCut(kOneTask, dtype, {130, 1, 260, 209});
    ExpectSameBitsHoweverItIsCut(kBlocksOfKeys, dtype, {});
    ExpectSameBitsHoweverItIsCut(kSeveralTasks, dtype, {});
    ExpectSameBitsHoweverItIsCut(kSeveralTasks, dtype, kAcrossTasks);
  }
}

TEST(AttentionCpuTest, BackwardOfAHeadInSeveralTasksIsTheGradientOfFloat64) {
  OnPath([](const Path& path) {
    const auto check = [&](DType dtype, const Lengths& lengths) {
      BackwardCase c(ForwardCase(kSeveralTasks, dtype, lengths));
      const bool pairs = path.attention_in_bf16 && dtype == DType::kBF16;
      const cpu::BackwardCut cut = cpu::CutBackward(c.p.shape(), 1, pairs);
      EXPECT_EQ(cut.tokens, 512);
      EXPECT_EQ(cut.keys, 256);
      c.Run(path);
    };
    check(DType::kF32, {});
    check(DType::kBF16, kAcrossTasks);
  });
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
