// Clocks and medians for the benchmarks.
#ifndef ZERO_TOOLS_BENCH_TIMING_H_
#define ZERO_TOOLS_BENCH_TIMING_H_

#include <time.h>

#include <algorithm>
#include <vector>

namespace zero::bench {

// The clock of this process: the wall's, unless --cpu-time asked for the CPU
// time of the calling thread. With one compute thread that is steady even on a
// busy machine.
inline clockid_t& Clock() {
  static clockid_t clock = CLOCK_MONOTONIC;
  return clock;
}

// Seconds on a clock.
inline double Now(clockid_t clock = Clock()) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * now.tv_nsec;
}

template <class Fn>
double SecondsOf(const Fn& fn) {
  const double start = Now();
  fn();
  return Now() - start;
}

// The lower median; 0 if empty.
inline double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + (values.size() - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_TIMING_H_
