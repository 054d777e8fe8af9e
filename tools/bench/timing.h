// Clocks and medians of the benchmarks.
#ifndef ZERO_TOOLS_BENCH_TIMING_H_
#define ZERO_TOOLS_BENCH_TIMING_H_

#include <algorithm>
#include <chrono>
#include <vector>

namespace zero::bench {

// Seconds on a clock that only moves forward.
inline double Now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class Fn>
double SecondsOf(const Fn& fn) {
  const double start = Now();
  fn();
  return Now() - start;
}

// The lower median; 0 of nothing.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + (values.size() - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_TIMING_H_
