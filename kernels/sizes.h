// Sizes rounded up: of grids, rows and parts of a workspace.
#ifndef ZERO_KERNELS_SIZES_H_
#define ZERO_KERNELS_SIZES_H_

#include <cstdint>
#include <type_traits>

namespace zero {

// REQUIRES: n >= 0, divisor or multiple > 0.
template <class Int>
constexpr Int CeilDiv(Int n, std::type_identity_t<Int> divisor) {
  return (n + divisor - 1) / divisor;
}
template <class Int>
constexpr Int RoundUp(Int n, std::type_identity_t<Int> multiple) {
  return CeilDiv(n, multiple) * multiple;
}

// Blocks of a grid for n items, `size` of them a block.
constexpr unsigned NumBlocks(int64_t n, int64_t size) {
  return static_cast<unsigned>(CeilDiv(n, size));
}

}  // namespace zero

#endif  // ZERO_KERNELS_SIZES_H_
