// The order in which squares are added, in plain code.
#ifndef ZERO_TESTS_KERNELS_SUM_SQUARES_H_
#define ZERO_TESTS_KERNELS_SUM_SQUARES_H_

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace zero {

// As kernels/cpu/reduce-inl.h documents it.
inline double DocumentedSum(const Array& x) {
  double total = 0;
  for (int64_t run = 0; run < x.size(); run += 256 * 64) {
    double run_sum = 0;
    const int64_t run_end = std::min<int64_t>(x.size(), run + 256 * 64);
    for (int64_t block = run; block < run_end; block += 64) {
      double lane[8] = {};
      for (int64_t k = 0; k < 64 && block + k < x.size(); ++k) {
        lane[k % 8] = std::fma(x[block + k], x[block + k], lane[k % 8]);
      }
      run_sum += ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
                 ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
    total += run_sum;
  }
  return total;
}

// The op's result for one span.
inline double SumByOp(Ops& ops, Stream& stream, const ConstVector& src) {
  TestVector<double> sum = {-1};
  const SquaredSpan span = {src, sum.data()};
  ops.SumSquares(stream, {{&span, 1}});
  return sum[0];
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_SUM_SQUARES_H_
