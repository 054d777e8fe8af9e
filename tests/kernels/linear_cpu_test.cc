// Products of 16-bit operands that a CPU converts.
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

// Of what a kernel left out, the elements behind it are right.
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
