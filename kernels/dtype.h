// Element types of device memory.
#ifndef ZERO_KERNELS_DTYPE_H_
#define ZERO_KERNELS_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <ostream>

namespace zero {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kI32, kI64, kU8, kU16 };

// Bytes of one element.
constexpr size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kU16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

// "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "uint16".
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kF64:
      return "fp64";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kU16:
      return "uint16";
  }
  return "?";
}

constexpr bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16 || dtype == DType::kF64;
}

inline std::ostream& operator<<(std::ostream& os, DType dtype) {
  return os << DTypeName(dtype);
}

// Scalar conversions on the host, rounding to nearest even; NaN stays NaN.
uint16_t F32ToBF16(float value);
float BF16ToF32(uint16_t bits);
uint16_t F32ToF16(float value);
float F16ToF32(uint16_t bits);

}  // namespace zero

#endif  // ZERO_KERNELS_DTYPE_H_
