// Helpers for kernel tests: typed arrays that read and write doubles, and a
// loop over every way to run a kernel.
#ifndef ZERO_TESTS_KERNELS_KERNEL_TEST_H_
#define ZERO_TESTS_KERNELS_KERNEL_TEST_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace zero {

// Memory that the host and the kernels of this program's paths can reach:
// plain memory on the CPU and for the emulator (of exactly this size, so that
// asan sees an access beyond it), managed memory for a GPU.
void* AllocateTestMemory(size_t bytes);
void FreeTestMemory(void* data);

template <class T>
struct TestAllocator {
  using value_type = T;
  TestAllocator() = default;
  template <class U>
  TestAllocator(const TestAllocator<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(AllocateTestMemory(n * sizeof(T)));
  }
  void deallocate(T* p, size_t) { FreeTestMemory(p); }
  template <class U>
  bool operator==(const TestAllocator<U>&) const {
    return true;
  }
};

// A vector that kernels may read and write: ids, positions, scalars.
template <class T>
using TestVector = std::vector<T, TestAllocator<T>>;

// n elements of a float dtype (fp32, bf16, fp16), zero at first.
class Array {
 public:
  Array(DType dtype, int64_t size)
      : dtype_(dtype), size_(size), bytes_(size * DTypeBytes(dtype) + 1) {}

  // Values of a fixed seed, rounded to the dtype. Large arrays repeat them
  // (drawing the operands of a real model takes a minute), with a prime period,
  // so that no two rows are equal.
  static Array Normal(DType dtype, int64_t size, uint64_t seed,
                      double scale = 1) {
    Array a(dtype, size);
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, scale);
    constexpr int64_t kNumDrawn = 65521;
    const int64_t drawn = std::min(size, kNumDrawn);
    for (int64_t i = 0; i < drawn; ++i) a.Set(i, normal(random));
    const int64_t item = DTypeBytes(dtype);
    for (int64_t i = drawn; i < size; i += drawn) {
      std::memcpy(a.bytes_.data() + i * item, a.bytes_.data(),
                  std::min(drawn, size - i) * item);
    }
    return a;
  }

  double operator[](int64_t i) const {
    if (dtype_ == DType::kF32) return At<float>(i);
    const uint16_t bits = At<uint16_t>(i);
    return dtype_ == DType::kBF16 ? BF16ToF32(bits) : F16ToF32(bits);
  }
  void Set(int64_t i, double value) {
    const float f = static_cast<float>(value);
    if (dtype_ == DType::kF32) {
      Put(i, f);
    } else {
      Put(i, dtype_ == DType::kBF16 ? F32ToBF16(f) : F32ToF16(f));
    }
  }

  DType dtype() const { return dtype_; }
  int64_t size() const { return size_; }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.data()); }

  Vector vector() { return {data(), dtype_, size_}; }
  ConstVector vector() const { return {data(), dtype_, size_}; }
  Matrix matrix(int64_t rows, int64_t cols, int64_t ld) {
    return {data(), dtype_, rows, cols, ld};
  }
  Rows rows(int64_t outer, int64_t inner, int64_t width, int64_t stride) {
    return {data(), dtype_, outer, inner, width, stride};
  }

  // Equal bits, so that NaNs and the signs of zeros count.
  bool SameBits(const Array& other) const {
    return dtype_ == other.dtype_ && bytes_ == other.bytes_;
  }

 private:
  template <class T>
  T At(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void Put(int64_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }

  DType dtype_;
  int64_t size_;
  TestVector<char> bytes_;
};

// Without fp16 under tsan: it shares its code with bf16, and threads share
// memory in the same way.
#if defined(__SANITIZE_THREAD__)
inline constexpr DType kFloatTypes[] = {DType::kF32, DType::kBF16};
#else
inline constexpr DType kFloatTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
#endif

// Half a unit in the last place of 1.0: the relative error of one rounding.
inline double HalfUlp(DType dtype) {
  if (dtype == DType::kF32) return std::ldexp(1.0, -24);
  return std::ldexp(1.0, dtype == DType::kBF16 ? -8 : -11);
}

// The smallest step of a dtype: the error of a subnormal result.
inline double TinyStep(DType dtype) {
  if (dtype == DType::kF32) return std::ldexp(1.0, -149);
  return std::ldexp(1.0, dtype == DType::kBF16 ? -133 : -24);
}

// One way to run a kernel: a SIMD target and a number of threads of the CPU,
// an order of threads of the emulated GPU, or a GPU. Ops are done when they
// return.
struct Path {
  std::string name;
  Device& device;
  Ops& ops;
  Stream& stream;
  // 16-bit products are computed in 16 bits, not converted.
  bool native_products = true;
  // Attention of bf16 rounds its weights to bf16.
  bool attention_in_bf16 = false;
};

// Calls fn for every way this test program has: cpu_paths.cc (SimdTargets x
// ThreadCounts), emulated_paths.cc (orders of threads) or cuda_paths.cc (GPU
// 0), whichever is linked.
void ForEachPath(const std::function<void(const Path&)>& fn);

// The same for matrix products, which the CPU may also convert.
void ForEachMatmulPath(const std::function<void(const Path&)>& fn);

// The best of these paths.
void OnPath(const std::function<void(const Path&)>& fn);

// df/dx by central differences in float64; the error is about 1e-10 for
// functions and arguments of size 1.
inline double NumericalDerivative(const std::function<double(double)>& f,
                                  double x) {
  const double h = 1e-5 * std::max(1.0, std::abs(x));
  return (f(x + h) - f(x - h)) / (2 * h);
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_KERNEL_TEST_H_
