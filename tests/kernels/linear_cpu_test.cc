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

// Threads cut a product into other tiles; 17 rows are the fewest in panels.
TEST(LinearCpuTest, BitsOfFp32DoNotDependOnTheNumberOfThreads) {
  for (const int64_t m : {17, 300}) {
    for (const bool backward : {false, true}) {
      std::vector<float> results[2];
      for (std::vector<float>& y : results) {
        cpu::CpuDevice::Options options;
        options.num_threads = &y == results ? 1 : 3;
        cpu::CpuDevice device(options);
        const auto stream = device.MakeStream(StreamRole::kCompute);
        constexpr int64_t kOut = 401, kIn = 1100;
        std::vector<float> x(static_cast<size_t>(m * kIn));
        std::vector<float> w(static_cast<size_t>(kOut * kIn)), dw = w;
        for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(i);
        for (size_t i = 0; i < w.size(); ++i) w[i] = std::cos(i);
        y.assign(static_cast<size_t>(m * kOut), 0.0f);
        const LinearArgs forward = {
            .x = {x.data(), DType::kF32, m, kIn, kIn},
            .w = {w.data(), DType::kF32, kOut, kIn, kIn},
            .y = {y.data(), DType::kF32, m, kOut, kOut}};
        std::vector<char> scratch(device.ops().LinearWorkspaceBytes(forward));
        device.ops().Linear(*stream, forward, {scratch.data(), scratch.size()});
        if (!backward) continue;
        const LinearBackwardWeightArgs args = {
            .dy = forward.y,
            .x = forward.x,
            .dw = {dw.data(), DType::kF32, kOut, kIn, kIn},
            .accumulate_dw = true};
        scratch.resize(device.ops().LinearBackwardWeightWorkspaceBytes(args));
        device.ops().LinearBackwardWeight(*stream, args,
                                          {scratch.data(), scratch.size()});
        y = dw;
      }
      EXPECT_EQ(results[0], results[1]) << m << " " << backward;
    }
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
