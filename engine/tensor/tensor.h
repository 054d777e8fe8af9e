// Tensor = spec (shape, dtype) + a piece of an arena.
//
// Tensors are contiguous, row-major and cheap to copy: copies share memory,
// which returns to its arena with the last one. On the meta device data() is
// an address that must not be read. Tensors know nothing of gradients
// (engine/autograd) or of who owns a parameter (engine/zero).
#ifndef ZERO_ENGINE_TENSOR_TENSOR_H_
#define ZERO_ENGINE_TENSOR_TENSOR_H_

#include <cstdint>
#include <memory>

#include "engine/tensor/arena.h"
#include "engine/tensor/shape.h"
#include "kernels/dtype.h"
#include "kernels/ops.h"

namespace zero {

class Tensor {
 public:
  Tensor() = default;  // undefined

  // Uninitialized memory from `arena`.
  static Tensor Empty(Arena& arena, const Shape& shape, DType dtype,
                      MemoryCategory category);

  // A view of memory owned elsewhere, which outlives the tensor.
  static Tensor Borrow(void* data, const Shape& shape, DType dtype);

  bool defined() const { return data_ != nullptr; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  int64_t num_elems() const { return shape_.num_elems(); }
  int64_t bytes() const { return num_elems() * DTypeBytes(dtype_); }
  void* data() const { return data_; }

  // The data as T; the size of T must be that of the dtype.
  template <typename T>
  T* As() const {
    ZERO_CHECK_EQ(sizeof(T), DTypeBytes(dtype_));
    return static_cast<T*>(data_);
  }

  // `num_elems` elements from element `offset`, sharing the memory.
  Tensor Slice(int64_t offset, const Shape& shape) const;

  // Returns the memory after this tensor, which is at the start of its block,
  // and counts its own as `category` (ArenaBlock::Shrink).
  void GiveBackRest(MemoryCategory category) const;

  // True when no other tensor shares the memory, so that it may be
  // overwritten. Borrowed memory is never unique.
  bool unique() const { return block_ != nullptr && block_.use_count() == 1; }

  // The tensor as a matrix; its rows are all dimensions but the last.
  Matrix matrix() const;
  Vector vector() const { return {data_, dtype_, num_elems()}; }
  // The tensor as rows of its last dimension (Rows in kernels/ops.h).
  Rows rows() const;

 private:
  std::shared_ptr<ArenaBlock> block_;
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::kF32;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TENSOR_TENSOR_H_
