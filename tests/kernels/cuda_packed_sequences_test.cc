// The description of packed sequences for cuDNN, on the GPU's paths.
#include <utility>

#include "kernels/cuda/device.h"
#include "kernels/cuda/packed_attention.h"
#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

TEST(CudaPackedSequencesTest, TablesHoldLengthsAndFirstElements) {
  ForEachPath([](const Path& path) {
    for (const int64_t num_sequences : {1, 2, 3, 300}) {
      // At most three of them; the others are after the last token.
      const int64_t tokens = 400;
      TestVector<int32_t> offsets(tokens + 1, tokens);
      const int32_t begins[] = {0, 1, 250};
      for (int64_t i = 0; i < std::min<int64_t>(3, num_sequences); ++i) {
        offsets[i] = begins[i];
      }
      const int64_t strides[] = {8, int64_t{1} << 40};
      TestVector<int32_t> lengths(num_sequences, -1);
      const int64_t table = cuda::OffsetTableStride(num_sequences);
      EXPECT_GT(table, num_sequences);
      EXPECT_EQ(table * sizeof(int64_t) % 16, 0u);
      TestVector<int64_t> elements(2 * table, -1);
      cuda::FillSequenceTables(cuda::HandleOf(path.stream),
                               {.offsets = offsets.data(),
                                .num_sequences = num_sequences,
                                .num_tables = 2,
                                .token_strides = {strides[0], strides[1]},
                                .lengths = lengths.data(),
                                .elements = elements.data()});
      path.stream.Synchronize();
      for (int64_t i = 0; i <= num_sequences; ++i) {
        for (int64_t j = 0; j < 2; ++j) {
          EXPECT_EQ(elements[j * table + i], offsets[i] * strides[j]);
        }
        if (i == num_sequences) continue;
        EXPECT_EQ(lengths[i], offsets[i + 1] - offsets[i]);
      }
    }
  });
}

TEST(CudaPackedSequencesTest, StatisticsAreTransposedRowByRow) {
  ForEachPath([](const Path& path) {
    // Whole tiles and less, both ways.
    const std::pair<int64_t, int64_t> shapes[] = {{5, 70}, {37, 12}, {64, 32}};
    for (const auto& [rows, cols] : shapes) {
      const int64_t batch = 3;
      TestVector<float> from(batch * rows * cols), to(from.size(), NAN);
      for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
      cuda::TransposeStatistics(cuda::HandleOf(path.stream), from.data(), batch,
                                rows, cols, to.data());
      path.stream.Synchronize();
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < cols; ++j) {
            EXPECT_EQ(to[(b * cols + j) * rows + i],
                      from[(b * rows + i) * cols + j]);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace zero
