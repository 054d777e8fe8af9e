// Products that a CPU computes in panels.
#include <cmath>
#include <vector>

#include "gtest/gtest-spi.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/matmul.h"
#include "tests/kernels/linear_checks.h"

namespace zero {
namespace {

// Shapes that a converted product cuts in k, in n and in m.
constexpr LinearShape kLargeShapes[] = {{70, 2100, 3700}, {3700, 2100, 70}};

TEST(LinearCpuTest, ConvertedProductsLargerThanATileAreCut) {
  cpu::CpuDevice::Options options;
  options.num_threads = 2;
  options.low_precision = cpu::LowPrecision::kConvert;
  cpu::CpuDevice device(options);
  const auto stream = device.MakeStream(StreamRole::kCompute);
  const Path path{"", device, device.ops(), *stream, false};
  for (const LinearShape& s : kLargeShapes) {
    CheckForward(path, s, DType::kBF16, true, true, Gelu::kNone, false);
  }
}

// y = x w^T and dw += y^T x of `rows` rows.
std::vector<Dense> Products(DType dtype, int64_t rows, int num_threads) {
  cpu::CpuDevice::Options options;
  options.num_threads = num_threads;
  options.low_precision = cpu::LowPrecision::kConvert;
  cpu::CpuDevice device(options);
  const auto stream = device.MakeStream(StreamRole::kCompute);
  const Path path{"", device, device.ops(), *stream, false};
  constexpr int64_t kOut = 401, kIn = 1100;
  GuardedMatrix x = GuardedMatrix::Normal(dtype, rows, kIn, 0, 1);
  GuardedMatrix w = GuardedMatrix::Normal(dtype, kOut, kIn, 0, 2);
  GuardedMatrix dw = GuardedMatrix::Normal(DType::kF32, kOut, kIn, 0, 3);
  GuardedMatrix y(dtype, rows, kOut);
  RunLinear(path, {.x = x.view(), .w = w.view(), .y = y.view()});
  const LinearBackwardWeightArgs args = {
      .dy = y.view(), .x = x.view(), .dw = dw.view(), .accumulate_dw = true};
  Scratch scratch(device.ops().LinearBackwardWeightWorkspaceBytes(args));
  device.ops().LinearBackwardWeight(*stream, args, scratch.workspace());
  return {y.dense(), dw.dense()};
}

// Threads cut a product into other tiles. 17 rows are the fewest of fp32 in
// panels; converted operands always are.
TEST(LinearCpuTest, BitsOfPanelsDoNotDependOnTheNumberOfThreads) {
  const auto expect_equal = [](DType dtype, int64_t rows) {
    const std::vector<Dense> one = Products(dtype, rows, 1);
    const std::vector<Dense> three = Products(dtype, rows, 3);
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(one[i].values, three[i].values)
          << DTypeName(dtype) << ", " << rows << " rows, product " << i;
    }
  };
  for (const int64_t rows : {17, 300}) expect_equal(DType::kF32, rows);
  for (const int64_t rows : {1, 17, 300}) expect_equal(DType::kBF16, rows);
}

TEST(LinearCpuTest, ConvertedWorkspaceStaysWithinItsBound) {
  cpu::CpuDevice::Options options;
  options.low_precision = cpu::LowPrecision::kConvert;
  cpu::CpuDevice device(options);
  char memory = 0;
  for (const int64_t m : {1, 63, 1024, 8192, 100000}) {
    for (const int64_t k : {1, 768, 2048, 2049, 14336, 50257}) {
      for (const int64_t n : {1, 64, 768, 3072, 50257}) {
        LinearArgs args;
        args.x = {&memory, DType::kBF16, m, k, k};
        args.w = {&memory, DType::kBF16, n, k, k};
        args.y = {&memory, DType::kBF16, m, n, n};
        EXPECT_LE(device.ops().LinearWorkspaceBytes(args),
                  cpu::MatmulCache::kThreadBytes)
            << m << " " << k << " " << n;
      }
    }
  }
}

// If a kernel skipped elements, later ones are still right.
TEST(ExpectNearTest, ANanInTheMiddleIsFound) {
  GuardedMatrix got(DType::kF32, 3, 4, 0);
  const Dense want = got.dense();
  const auto bound = [](int64_t, int64_t) { return 1.0; };
  ExpectNear(got, want, bound, "zeros");
  got.Set(1, 2, std::nan(""));
  EXPECT_NONFATAL_FAILURE(ExpectNear(got, want, bound, "a row"),
                          "a row at (1, 2): got nan");
}

}  // namespace
}  // namespace zero
