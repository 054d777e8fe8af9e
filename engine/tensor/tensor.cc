#include "engine/tensor/tensor.h"

#include "kernels/check.h"

namespace zero {

Tensor Tensor::Empty(Arena& arena, const Shape& shape, DType dtype,
                     MemoryCategory category) {
  Tensor tensor;
  tensor.block_ =
      arena.Allocate(shape.num_elems() * DTypeBytes(dtype), category);
  tensor.data_ = tensor.block_->data();
  tensor.shape_ = shape;
  tensor.dtype_ = dtype;
  return tensor;
}

Tensor Tensor::Borrow(void* data, const Shape& shape, DType dtype) {
  Tensor tensor;
  tensor.data_ = data;
  tensor.shape_ = shape;
  tensor.dtype_ = dtype;
  return tensor;
}

Tensor Tensor::Slice(int64_t offset, const Shape& shape) const {
  ZERO_CHECK_GE(offset, 0);
  ZERO_CHECK_LE(offset + shape.num_elems(), num_elems())
      << "Slice of " << shape << " at " << offset << " from " << shape_;
  Tensor tensor = *this;
  tensor.data_ = static_cast<char*>(data_) + offset * DTypeBytes(dtype_);
  tensor.shape_ = shape;
  return tensor;
}

void Tensor::GiveBackRest(MemoryCategory category) const {
  ZERO_CHECK(block_ != nullptr && data_ == block_->data());
  block_->Shrink(bytes(), category);
}

Matrix Tensor::matrix() const {
  const int64_t cols = shape_.num_dims() == 0 ? 1 : shape_[-1];
  const int64_t rows = cols == 0 ? 0 : num_elems() / cols;
  return {data_, dtype_, rows, cols, cols};
}

Rows Tensor::rows() const {
  const Matrix m = matrix();
  return {data_, dtype_, m.rows, 1, m.cols, m.cols};
}

}  // namespace zero
