// The extents of a tensor, outermost first. Up to five dimensions, no heap.
#ifndef ZERO_ENGINE_TENSOR_SHAPE_H_
#define ZERO_ENGINE_TENSOR_SHAPE_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/check.h"

namespace zero {

class Shape {
 public:
  static constexpr int kMaxDims = 5;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    ZERO_CHECK_LE(dims.size(), size_t{kMaxDims});
    for (int64_t dim : dims) {
      ZERO_CHECK_GE(dim, 0);
      dims_[num_dims_++] = dim;
    }
  }

  int num_dims() const { return num_dims_; }

  std::vector<int64_t> dims() const {
    return {dims_.begin(), dims_.begin() + num_dims_};
  }

  // The extent of dimension `i`; negative counts from the last.
  int64_t operator[](int i) const { return dims_[i < 0 ? i + num_dims_ : i]; }

  // The product of all extents; 1 for a scalar.
  int64_t num_elems() const {
    int64_t product = 1;
    for (int i = 0; i < num_dims_; ++i) product *= dims_[i];
    return product;
  }

  // "[4, 256, 768]"
  std::string ToString() const;

  friend bool operator==(const Shape& a, const Shape& b) {
    return a.num_dims_ == b.num_dims_ && a.dims_ == b.dims_;
  }

 private:
  std::array<int64_t, kMaxDims> dims_ = {};
  int num_dims_ = 0;
};

std::ostream& operator<<(std::ostream& os, const Shape& shape);

}  // namespace zero

#endif  // ZERO_ENGINE_TENSOR_SHAPE_H_
