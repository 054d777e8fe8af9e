#ifndef ZERO_TESTS_SUPPORT_MAX_OR_NAN_H_
#define ZERO_TESTS_SUPPORT_MAX_OR_NAN_H_

#include <cmath>

namespace zero {

// The larger of two errors, where NaN is the largest and stays: std::max
// forgets it with the next element, and with it the one that was never written.
inline double MaxOrNan(double a, double b) {
  return a >= b || std::isnan(a) ? a : b;
}

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_MAX_OR_NAN_H_
