#include "engine/tensor/tensor.h"

#include <sstream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device.h"

namespace zero {
namespace {

class TensorTest : public testing::Test {
 protected:
  TensorTest() : device_(MakeCpuDevice(1)) {
    auto arena = Arena::Make(*device_, MemoryKind::kDevice, 1 << 16, "tensors",
                             &ledger_);
    EXPECT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
  }
  Tensor Empty(const Shape& shape, DType dtype = DType::kF32) {
    return Tensor::Empty(*arena_, shape, dtype, MemoryCategory::kActivations);
  }

  std::unique_ptr<Device> device_;
  MemoryLedger ledger_;
  std::unique_ptr<Arena> arena_;
};

TEST(ShapeTest, ExtentsCountFromBothEnds) {
  const Shape shape{4, 256, 768};
  EXPECT_EQ(shape.num_dims(), 3);
  EXPECT_EQ(shape[0], 4);
  EXPECT_EQ(shape[-1], 768);
  EXPECT_EQ(shape[-3], 4);
  EXPECT_EQ(shape.num_elems(), 4 * 256 * 768);
  EXPECT_EQ(shape.ToString(), "[4, 256, 768]");
}

TEST(ShapeTest, AScalarHasOneElementAndAnEmptyExtentNone) {
  EXPECT_EQ(Shape().num_elems(), 1);
  EXPECT_EQ(Shape().ToString(), "[]");
  EXPECT_EQ(Shape({3, 0, 5}).num_elems(), 0);
  // 175 B elements and more: no product may pass through int32.
  EXPECT_EQ(Shape({int64_t{1} << 20, int64_t{1} << 20}).num_elems(),
            int64_t{1} << 40);
}

TEST(ShapeTest, ATrailingOneIsAnotherShape) {
  EXPECT_EQ(Shape({2, 3}), Shape({2, 3}));
  EXPECT_FALSE(Shape({2, 3}) == Shape({2, 3, 1}));
  EXPECT_FALSE(Shape({2, 3}) == Shape({3, 2}));
  // An extent of zero is not a missing dimension.
  EXPECT_FALSE(Shape({2}) == Shape({2, 0}));
}

TEST(ShapeDeathTest, NegativeExtentsAndSixDimensionsAreCallerMistakes) {
  EXPECT_DEATH(Shape({2, -1}), "-1 against 0");
  EXPECT_DEATH(Shape({1, 1, 1, 1, 1, 1}), "6 against 5");
}

TEST_F(TensorTest, CopiesShareMemoryThatReturnsWithTheLast) {
  Tensor a = Empty({3, 5});
  EXPECT_TRUE(a.unique());
  const int64_t live = arena_->live_bytes();
  {
    const Tensor b = a;
    EXPECT_EQ(a.data(), b.data());
    EXPECT_FALSE(a.unique());
    EXPECT_FALSE(b.unique());
  }
  EXPECT_TRUE(a.unique());
  Tensor c = std::move(a);
  EXPECT_EQ(arena_->live_bytes(), live);
  c = Tensor();
  EXPECT_EQ(arena_->live_bytes(), 0);
}

TEST_F(TensorTest, AViewKeepsItsMemoryAliveAndSpoilsUniqueness) {
  Tensor a = Empty({4, 6}, DType::kBF16);
  Tensor slice = a.Slice(6, {2, 6});
  EXPECT_EQ(static_cast<char*>(slice.data()),
            static_cast<char*>(a.data()) + 6 * 2);
  EXPECT_EQ(slice.bytes(), 24);
  EXPECT_FALSE(a.unique());
  a = Tensor();
  EXPECT_GT(arena_->live_bytes(), 0);
  EXPECT_TRUE(slice.unique());
}

TEST_F(TensorTest, BorrowedMemoryIsNeverUnique) {
  std::vector<float> memory(12, 1.0f);
  const Tensor borrowed = Tensor::Borrow(memory.data(), {3, 4}, DType::kF32);
  EXPECT_TRUE(borrowed.defined());
  EXPECT_FALSE(borrowed.unique());
  EXPECT_EQ(borrowed.As<float>(), memory.data());
  EXPECT_EQ(arena_->live_bytes(), 0);
}

TEST_F(TensorTest, MatrixFoldsAllButTheLastDimension) {
  const Matrix m = Empty({2, 3, 7}).matrix();
  EXPECT_EQ(m.rows, 6);
  EXPECT_EQ(m.cols, 7);
  EXPECT_EQ(m.ld, 7);
  const Matrix scalar = Empty({}).matrix();
  EXPECT_EQ(scalar.rows, 1);
  EXPECT_EQ(scalar.cols, 1);
  EXPECT_EQ(Empty({3, 0}).matrix().rows, 0);
  const Rows rows = Empty({2, 3, 7}).rows();
  EXPECT_EQ(rows.outer, 6);
  EXPECT_EQ(rows.inner, 1);
  EXPECT_EQ(rows.stride, 7);
}

TEST_F(TensorTest, UndefinedTensorsHaveNoData) {
  const Tensor tensor;
  EXPECT_FALSE(tensor.defined());
  EXPECT_FALSE(tensor.unique());
}

using TensorDeathTest = TensorTest;

TEST_F(TensorDeathTest, ViewsThatDoNotFitAreCallerMistakes) {
  const Tensor a = Empty({4, 6});
  EXPECT_DEATH(a.Slice(20, {5}), "25 against 24");
  EXPECT_DEATH(a.Slice(-1, {5}), "-1 against 0");
  EXPECT_DEATH(a.As<double>(), "8 against 4");
}

}  // namespace
}  // namespace zero
