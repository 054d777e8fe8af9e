// Sums of squares beyond the CPU's stack array.
#include "tests/kernels/sum_squares.h"

namespace zero {
namespace {

TEST(SumSquaresCpuTest, MoreRunsThanFitOnTheStackKeepTheirOrder) {
  // 1024 runs of 16384 elements are summed at a time.
  const int64_t n = 1024 * 16384 + 12345;
  Array x(DType::kBF16, n);
  for (int64_t i = 0; i < n; ++i) x.Set(i, 1.0 + 1e-3 * (i % 1009));
  const double want = DocumentedSum(x);
  for (const int threads : {1, 2}) {
    const auto device = MakeCpuDevice(threads);
    const auto stream = device->MakeStream(StreamRole::kCompute);
    EXPECT_EQ(SumByOp(device->ops(), *stream, x.vector()), want);
  }
}

}  // namespace
}  // namespace zero
