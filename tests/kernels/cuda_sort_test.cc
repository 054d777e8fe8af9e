// The sort behind gradients of embeddings, CUB's and its twin.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/device.h"
#include "kernels/cuda/sort.h"
#include "tests/kernels/matrix.h"

namespace zero {
namespace {

// Sizes of one block, of several and of many; keys of one pass and of three.
TEST(CudaSortTest, EqualKeysKeepTheirOrder) {
  ForEachPath([](const Path& path) {
    for (const int64_t n : {1, 33, 5000, 100000}) {
      for (const int key_bits : {1, 7, 17, 31}) {
        TestVector<int32_t> keys(n), values(n), keys_out(n), values_out(n);
        std::mt19937_64 random(n + key_bits);
        for (int64_t i = 0; i < n; ++i) {
          keys[i] = static_cast<int32_t>(random() >> (64 - key_bits));
          values[i] = static_cast<int32_t>(7 * i);
        }
        const TestVector<int32_t> keys_before = keys, values_before = values;
        std::vector<int64_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return keys[a] < keys[b];
        });
        Scratch temp(cuda::SortPairsTempBytes(n));
        cuda::SortPairs(cuda::HandleOf(path.stream), keys.data(), values.data(),
                        keys_out.data(), values_out.data(), n, key_bits,
                        temp.workspace().data);
        path.stream.Synchronize();
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(keys_out[i], keys[order[i]]) << n << " " << key_bits;
          ASSERT_EQ(values_out[i], values[order[i]]) << n << " " << key_bits;
        }
        EXPECT_TRUE(keys == keys_before && values == values_before);
      }
    }
  });
}

}  // namespace
}  // namespace zero
