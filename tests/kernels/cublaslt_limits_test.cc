// Fallbacks if cuBLASLt lacks a feature: each gives the result of the fused
// form, and errors name the shape. The emulator's cuBLASLt can be made to lack
// features.
#include "absl/strings/str_join.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/matmul.h"
#include "tests/kernels/cross_entropy_checks.h"
#include "tests/kernels/linear_checks.h"
#include "tests/support/cuda_emulator/control.h"
#include "tests/support/cuda_emulator/fake_cublaslt.h"

namespace zero {
namespace {

using emulator::CublasLt;
using emulator::NumKernels;

// Restores everything after a test.
class CublasLtLimitsTest : public testing::Test {
 protected:
  ~CublasLtLimitsTest() override { emulator::SetCublasLt({}); }

  // Opens the GPU with a cuBLASLt that has `what`.
  void Open(const CublasLt& what, const CudaOptions& options = {}) {
    emulator::SetCublasLt(what);
    auto device = MakeCudaDevice(0, options);
    ASSERT_TRUE(device.ok()) << device.status();
    stream_.reset();
    device_ = *std::move(device);
    stream_ = device_->MakeStream(StreamRole::kCompute);
  }
  Ops& ops() { return device_->ops(); }

  GuardedMatrix Gelu16(const CublasLt& what, GuardedMatrix& pre) {
    Open(what);
    GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 1);
    GuardedMatrix w = GuardedMatrix::Normal(DType::kBF16, 40, 64, 0, 2, 0.125);
    GuardedMatrix y(DType::kBF16, 24, 40);
    LinearArgs args;
    args.x = x.view();
    args.w = w.view();
    args.y = y.view();
    args.act = Gelu::kTanh;
    args.pre_act = pre.view();
    Scratch scratch(ops().LinearWorkspaceBytes(args));
    ops().Linear(*stream_, args, scratch.workspace());
    stream_->Synchronize();
    return y;
  }

  GuardedMatrix GeluGradient16(const CublasLt& what) {
    Open(what);
    GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 1);
    GuardedMatrix w = GuardedMatrix::Normal(DType::kBF16, 64, 40, 0, 2, 0.125);
    GuardedMatrix pre = GuardedMatrix::Normal(DType::kBF16, 24, 40, 0, 3);
    GuardedMatrix dx(DType::kBF16, 24, 40);
    LinearBackwardInputArgs args;
    args.dy = dy.view();
    args.w = w.view();
    args.dx = dx.view();
    args.act = Gelu::kTanh;
    args.pre_act = pre.view();
    Scratch scratch(ops().LinearBackwardInputWorkspaceBytes(args));
    ops().LinearBackwardInput(*stream_, args, scratch.workspace());
    stream_->Synchronize();
    return dx;
  }

  struct WeightGradients {
    GuardedMatrix dw, dbias;
  };
  WeightGradients Weight16(const CublasLt& what, const CudaOptions& options,
                           int64_t pad) {
    Open(what, options);
    GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, 24, 40, 0, 1);
    GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 2);
    WeightGradients g = {GuardedMatrix::Normal(DType::kF32, 40, 64, pad, 3),
                         GuardedMatrix::Normal(DType::kF32, 1, 40, 0, 4)};
    LinearBackwardWeightArgs args;
    args.dy = dy.view();
    args.x = x.view();
    args.dw = g.dw.view();
    args.accumulate_dw = true;
    args.dbias = g.dbias.row_vector();
    args.accumulate_dbias = true;
    Scratch scratch(ops().LinearBackwardWeightWorkspaceBytes(args));
    ops().LinearBackwardWeight(*stream_, args, scratch.workspace());
    stream_->Synchronize();
    EXPECT_TRUE(g.dw.GuardsAreIntact());
    return g;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

void ExpectClose(const GuardedMatrix& got, const GuardedMatrix& want,
                 double relative, double absolute) {
  for (int64_t i = 0; i < want.rows(); ++i) {
    for (int64_t j = 0; j < want.cols(); ++j) {
      EXPECT_NEAR(got(i, j), want(i, j),
                  relative * std::abs(want(i, j)) + absolute);
    }
  }
}

TEST_F(CublasLtLimitsTest, GeluRunsInTheEpilogueOrInAKernelOfOurs) {
  GuardedMatrix pre(DType::kBF16, 24, 40), pre_apart(DType::kBF16, 24, 40);
  int64_t before = NumKernels();
  const GuardedMatrix fused = Gelu16({}, pre);
  EXPECT_EQ(NumKernels(), before);
  before = NumKernels();
  const GuardedMatrix apart = Gelu16({.has_gelu = false}, pre_apart);
  EXPECT_EQ(NumKernels(), before + 1);
  // The sum before and after its rounding, and one rounding more.
  ExpectClose(fused, apart, 4 * HalfUlp(DType::kBF16), 1e-3);
  ExpectClose(pre, pre_apart, 2 * HalfUlp(DType::kBF16), 1e-6);
  // Whatever cuBLASLt calls it.
  for (const cublasStatus_t missing :
       {CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_ARCH_MISMATCH}) {
    const CublasLt less = {.has_gelu = false, .missing = missing};
    EXPECT_TRUE(Gelu16(less, pre).SameElements(apart));
  }
}

TEST_F(CublasLtLimitsTest, GeluGradientRunsInTheEpilogueOrInAKernelOfOurs) {
  int64_t before = NumKernels();
  const GuardedMatrix fused = GeluGradient16({});
  EXPECT_EQ(NumKernels(), before);
  before = NumKernels();
  const GuardedMatrix apart = GeluGradient16({.has_gelu_gradient = false});
  EXPECT_EQ(NumKernels(), before + 1);
  ExpectClose(fused, apart, 4 * HalfUlp(DType::kBF16), 1e-6);
}

std::string NotesOf(const Device& device) {
  return absl::StrJoin(device.notes(), "\n");
}

TEST_F(CublasLtLimitsTest, ProductsAreAddedToFp32SinksApart) {
  const CublasLt less = {.accumulates_into_f32 = false};
  for (const int64_t pad : {0, 3}) {
    const WeightGradients direct = Weight16({}, {}, pad);
    EXPECT_TRUE(
        cuda::MatmulPlans(device_->ops(), CudaOptions()).AccumulatesIntoF32());
    const WeightGradients apart = Weight16(less, {}, pad);
    EXPECT_FALSE(
        cuda::MatmulPlans(device_->ops(), CudaOptions()).AccumulatesIntoF32());
    // The same sums with the addend added and rounded separately.
    ExpectClose(direct.dw, apart.dw, 1e-6, 1e-5);
    EXPECT_TRUE(direct.dbias.SameElements(apart.dbias));
  }
  Open({});
  EXPECT_EQ(NotesOf(*device_).find("cuBLASLt"), std::string::npos);
  Open(less);
  EXPECT_NE(
      NotesOf(*device_).find("a separate kernel adds up weight gradients"),
      std::string::npos)
      << NotesOf(*device_);
  CrossEntropyProblem p(DType::kBF16, 40, 24, 131, DType::kF32);
  const Dense old_dw = p.dw.dense();
  LinearCrossEntropyArgs args = p.Args();
  args.accumulate_dw = true;
  RunCrossEntropy(ops(), *stream_, args);
  stream_->Synchronize();
  CheckCrossEntropy(p, old_dw, {true, true}, "added apart");
}

TEST_F(CublasLtLimitsTest, BiasGradientsComeWithTheProductOrFromColumnSums) {
  const WeightGradients plain = Weight16({}, {}, 0);
  const CudaOptions timed = {.time_algorithms = true};
  for (const bool has : {true, false}) {
    const WeightGradients other =
        Weight16({.has_bias_gradient = has}, timed, 0);
    ExpectClose(other.dw, plain.dw, 1e-6, 1e-5);
    ExpectClose(other.dbias, plain.dbias, 1e-6, 1e-5);
  }
}

TEST_F(CublasLtLimitsTest, TimingWithoutMemoryKeepsTheFirstAlgorithm) {
  const WeightGradients plain = Weight16({}, {}, 0);
  Open({}, {.time_algorithms = true});
  GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, 24, 40, 0, 1);
  GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 2);
  GuardedMatrix dw = GuardedMatrix::Normal(DType::kF32, 40, 64, 0, 3);
  LinearBackwardWeightArgs args;
  args.dy = dy.view();
  args.x = x.view();
  args.dw = dw.view();
  args.accumulate_dw = true;
  Scratch scratch(ops().LinearBackwardWeightWorkspaceBytes(args));
  emulator::FailCall("cudaMalloc", 1, cudaErrorMemoryAllocation);
  ops().LinearBackwardWeight(*stream_, args, scratch.workspace());
  stream_->Synchronize();
  EXPECT_TRUE(dw.SameElements(plain.dw));
}

TEST_F(CublasLtLimitsTest, TheNextAlgorithmIsTakenWhereTheFirstDoesNotRun) {
  const WeightGradients first = Weight16({}, {}, 0);
  const WeightGradients next = Weight16({.runs_first = false}, {}, 0);
  EXPECT_TRUE(
      cuda::MatmulPlans(device_->ops(), CudaOptions()).AccumulatesIntoF32());
  EXPECT_FALSE(next.dw.SameElements(first.dw));  // another order
  ExpectClose(next.dw, first.dw, 1e-6, 1e-5);
  // It is kept, and the first is not tried again.
  cuda::MatmulPlans plans(ops(), CudaOptions());
  GuardedMatrix a = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 1);
  GuardedMatrix b = GuardedMatrix::Normal(DType::kBF16, 64, 40, 0, 2);
  GuardedMatrix c(DType::kBF16, 24, 40);
  const cuda::Product product = {{.a = a.view(), .b = b.view(), .c = c.view()}};
  Scratch scratch(plans.WorkspaceBytes(product));
  for (const int64_t calls : {2, 1}) {
    const int64_t before = emulator::NumCalls("cublasLtMatmul");
    plans.Run(*stream_, product, scratch.workspace());
    EXPECT_EQ(emulator::NumCalls("cublasLtMatmul") - before, calls);
  }
  stream_->Synchronize();
}

// The fake's first candidate then would give other bits at every call.
TEST_F(CublasLtLimitsTest, ReductionsWithoutAFixedOrderAreNotAskedFor) {
  const WeightGradients first = Weight16({}, {}, 0);
  const WeightGradients second = Weight16({}, {}, 0);
  EXPECT_TRUE(first.dw.SameElements(second.dw));
}

std::string ErrorOf(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const cuda::DeviceError& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(CublasLtLimitsTest, ErrorsNameTheCallTheStatusAndTheShape) {
  Open({});
  GuardedMatrix x = GuardedMatrix::Normal(DType::kBF16, 24, 64, 0, 1);
  GuardedMatrix w = GuardedMatrix::Normal(DType::kBF16, 40, 64, 1, 2);
  GuardedMatrix y(DType::kBF16, 24, 40);
  LinearArgs args;
  args.x = x.view();
  args.w = w.view();
  args.y = y.view();
  Scratch scratch(ops().LinearWorkspaceBytes(args));
  const auto run = [&] { ops().Linear(*stream_, args, scratch.workspace()); };
  emulator::FailCall("cublasLtMatmul", 1, cudaErrorUnknown);
  const std::string failed = ErrorOf(run);
  EXPECT_NE(failed.find("cuda:0"), std::string::npos) << failed;
  EXPECT_NE(failed.find("CUBLAS_STATUS_EXECUTION_FAILED for [24, 64] x "
                        "[64, 40] bf16 into bf16"),
            std::string::npos)
      << failed;
  Open({});
  emulator::FailCall("cublasLtMatmulAlgoGetHeuristic", 1, cudaErrorUnknown);
  const std::string unasked = ErrorOf(run);
  EXPECT_NE(unasked.find("cuda:0: cublasLtMatmulAlgoGetHeuristic at matmul.cc"),
            std::string::npos)
      << unasked;
  Open({.has_unaligned = false});
  const std::string none = ErrorOf(run);
  EXPECT_NE(
      none.find("no algorithm for [24, 64] x [64, 40] bf16 into bf16, "
                "strides 64, 65, 40 (CUBLAS_STATUS_NOT_SUPPORTED); choose "),
      std::string::npos)
      << none;
}

}  // namespace
}  // namespace zero
