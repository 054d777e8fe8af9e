// Column sums, which are not a separate op, on the GPU's paths.
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device.h"
#include "tests/kernels/matrix.h"

namespace zero {
namespace {

struct Shape {
  int64_t rows, cols, pad, offset;
};
// Widths around a warp's columns (256 of 16 bits, 128 of fp32); more rows than
// one block of rows has, than 256 blocks of the least size have; misaligned.
constexpr Shape kShapes[] = {{0, 5, 0, 0},    {1, 1, 0, 0},     {63, 128, 0, 0},
                             {65, 264, 8, 0}, {130, 257, 3, 0}, {200, 96, 0, 1},
                             {17000, 8, 0, 0}};

// The path's sums, into `out`.
void Sum(const Path& path, const ConstMatrix& dy, const Vector& out,
         bool accumulate) {
  Scratch scratch(cuda::ColumnSumBytes(dy.rows, dy.cols));
  cuda::ColumnSums(cuda::HandleOf(path.stream), dy, out, accumulate,
                   scratch.workspace().data);
  path.stream.Synchronize();
}

TEST(CudaColumnSumsTest, MatchesFloat64) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const Shape& s : kShapes) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " " +
                     std::to_string(s.rows) + " x " + std::to_string(s.cols));
        GuardedMatrix dy = GuardedMatrix::Normal(dtype, s.rows, s.cols, s.pad,
                                                 1, 1.0, s.offset);
        GuardedMatrix sums(DType::kF32, 1, s.cols, 3);
        Sum(path, dy.view(), sums.row_vector(), false);
        Dense want(1, s.cols);
        for (int64_t i = 0; i < s.rows; ++i) {
          for (int64_t j = 0; j < s.cols; ++j) want(0, j) += dy(i, j);
        }
        // A product with a column of ones.
        const double norm = std::sqrt(static_cast<double>(s.rows)) + 1;
        ExpectNear(
            sums, want, [&](int64_t, int64_t) { return SumError(norm, norm); },
            "column sums");
      }
    }
  });
}

TEST(CudaColumnSumsTest, AddsToWhatIsThereAndRoundsOnce) {
  ForEachPath([](const Path& path) {
    GuardedMatrix dy = GuardedMatrix::Normal(DType::kBF16, 300, 40, 0, 1);
    Array fresh(DType::kF32, 40), added(fresh), narrow(DType::kBF16, 40);
    for (int64_t j = 0; j < 40; ++j) {
      fresh.Set(j, NAN);
      added.Set(j, 3);
      narrow.Set(j, 3);
    }
    Sum(path, dy.view(), fresh.vector(), false);
    Sum(path, dy.view(), added.vector(), true);
    Sum(path, dy.view(), narrow.vector(), true);
    for (int64_t j = 0; j < 40; ++j) {
      EXPECT_EQ(added[j], 3 + static_cast<float>(fresh[j]));
      Array rounded(DType::kBF16, 1);
      rounded.Set(0, added[j]);
      EXPECT_EQ(narrow[j], rounded[0]);
    }
  });
}

TEST(CudaColumnSumsTest, BitsDoNotDependOnAddresses) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      GuardedMatrix aligned = GuardedMatrix::Normal(dtype, 150, 520, 8, 2);
      GuardedMatrix shifted =
          GuardedMatrix::Normal(dtype, 150, 520, 3, 2, 1.0, 1);
      Array a(DType::kF32, 520), b(a);
      Sum(path, aligned.view(), a.vector(), false);
      Sum(path, shifted.view(), b.vector(), false);
      EXPECT_TRUE(a.SameBits(b)) << DTypeName(dtype);
    }
  });
}

}  // namespace
}  // namespace zero
