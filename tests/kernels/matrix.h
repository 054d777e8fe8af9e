// Matrices for the tests of products: strided, of any dtype, at any address,
// with guards around every row.
#ifndef ZERO_TESTS_KERNELS_MATRIX_H_
#define ZERO_TESTS_KERNELS_MATRIX_H_

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "tests/kernels/kernel_test.h"
#include "tests/support/reference.h"

namespace zero {

// rows x cols with `pad` elements after every row and `offset` elements before
// the first, all of them holding a value that no kernel may read or write.
class GuardedMatrix {
 public:
  static constexpr double kGuard = -12288;  // exact in every dtype

  GuardedMatrix(DType dtype, int64_t rows, int64_t cols, int64_t pad = 0,
                int64_t offset = 0)
      : rows_(rows),
        cols_(cols),
        ld_(cols + pad),
        offset_(offset),
        array_(dtype, offset + rows * (cols + pad)) {
    for (int64_t i = 0; i < array_.size(); ++i) array_.Set(i, kGuard);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) Set(i, j, 0);
    }
  }
  static GuardedMatrix Normal(DType dtype, int64_t rows, int64_t cols,
                              int64_t pad, uint64_t seed, double scale = 1,
                              int64_t offset = 0) {
    GuardedMatrix m(dtype, rows, cols, pad, offset);
    const Array values = Array::Normal(dtype, rows * cols, seed, scale);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) m.Set(i, j, values[i * cols + j]);
    }
    return m;
  }

  double operator()(int64_t i, int64_t j) const {
    return array_[offset_ + i * ld_ + j];
  }
  void Set(int64_t i, int64_t j, double value) {
    array_.Set(offset_ + i * ld_ + j, value);
  }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return array_.dtype(); }
  Matrix view() {
    return {static_cast<char*>(array_.data()) +
                offset_ * static_cast<int64_t>(DTypeBytes(dtype())),
            dtype(), rows_, cols_, ld_};
  }
  Vector row_vector() { return {view().data, dtype(), cols_}; }

  Dense dense() const {
    Dense d(rows_, cols_);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) d(i, j) = (*this)(i, j);
    }
    return d;
  }
  bool GuardsAreIntact() const {
    for (int64_t i = 0; i < offset_; ++i) {
      if (array_[i] != kGuard) return false;
    }
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = cols_; j < ld_; ++j) {
        if (array_[offset_ + i * ld_ + j] != kGuard) return false;
      }
    }
    return true;
  }
  // Equal bits of the elements; strides and addresses may differ.
  bool SameElements(const GuardedMatrix& other) const {
    const Dense a = dense(), b = other.dense();
    return std::memcmp(a.values.data(), b.values.data(),
                       a.values.size() * sizeof(double)) == 0;
  }

 private:
  int64_t rows_, cols_, ld_, offset_;
  Array array_;
};

// Memory that an op may scribble on, full of NaN at first.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : bytes_(bytes), memory_(bytes + 64, '\xff') {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + (64 - address % 64) % 64;
  }
  Workspace workspace() { return {data_, bytes_}; }

 private:
  size_t bytes_;
  TestVector<char> memory_;
  char* data_;
};

// The tolerance of a comparison at (i, j).
using ErrorBound = std::function<double(int64_t, int64_t)>;

inline void ExpectNear(const GuardedMatrix& got, const Dense& want,
                       const ErrorBound& bound, const std::string& what) {
  EXPECT_TRUE(got.GuardsAreIntact()) << what;
  double worst = 0;
  int64_t at_row = 0, at_col = 0;
  // The first NaN is the worst: unwritten memory starts as NaN.
  for (int64_t i = 0; i < want.rows && !std::isnan(worst); ++i) {
    for (int64_t j = 0; j < want.cols && !std::isnan(worst); ++j) {
      const double error = std::abs(got(i, j) - want(i, j));
      const double ratio = error == 0 ? 0 : error / bound(i, j);
      if (!(ratio <= worst)) worst = ratio, at_row = i, at_col = j;
    }
  }
  EXPECT_LE(worst, 1) << what << " at (" << at_row << ", " << at_col
                      << "): got " << got(at_row, at_col) << ", want "
                      << want(at_row, at_col) << ", bound "
                      << bound(at_row, at_col);
}

// Rounding errors of a sum of products in fp32: a random walk, with a standard
// deviation of at most 2^-24 |a| |b| for any order of summation (partial sums
// are no larger than the product of the norms); six of those.
inline double SumError(double norm_a, double norm_b) {
  return 6 * HalfUlp(DType::kF32) * norm_a * norm_b + 1e-38;
}

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_MATRIX_H_
