// Small integer math used everywhere.
#ifndef ZERO_ENGINE_BASE_MATH_H_
#define ZERO_ENGINE_BASE_MATH_H_

#include <cstdint>

namespace zero {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest multiple of `multiple` that is >= a.
constexpr int64_t RoundUp(int64_t a, int64_t multiple) {
  return CeilDiv(a, multiple) * multiple;
}

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_MATH_H_
