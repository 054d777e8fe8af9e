// The 16-bit storage types as distinct C++ types, so that kernels can be
// templates over what they load and store; the math is always fp32.
#ifndef ZERO_KERNELS_CPU_STORAGE_H_
#define ZERO_KERNELS_CPU_STORAGE_H_

#include <cstdint>

#include "kernels/check.h"
#include "kernels/dtype.h"

namespace zero::cpu {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
// The upper half of 32 bits, stored without rounding.
struct Upper16 {
  uint16_t bits;
};

}  // namespace zero::cpu

// Runs the statement with T = float, BF16 or F16 as `dtype` says. A macro and
// not a generic lambda, because a lambda's body would lose the target
// attributes of the SIMD namespace that it is written in.
#define ZERO_CPU_WITH_FLOAT_TYPE(dtype_value, T, ...)                 \
  switch (dtype_value) {                                              \
    case ::zero::DType::kF32: {                                       \
      using T = float;                                                \
      __VA_ARGS__;                                                    \
      break;                                                          \
    }                                                                 \
    case ::zero::DType::kBF16: {                                      \
      using T = ::zero::cpu::BF16;                                    \
      __VA_ARGS__;                                                    \
      break;                                                          \
    }                                                                 \
    case ::zero::DType::kF16: {                                       \
      using T = ::zero::cpu::F16;                                     \
      __VA_ARGS__;                                                    \
      break;                                                          \
    }                                                                 \
    default:                                                          \
      ZERO_CHECK(false) << "dtype " << ::zero::DTypeName(dtype_value) \
                        << " is not fp32, bf16 or fp16";              \
  }

#endif  // ZERO_KERNELS_CPU_STORAGE_H_
