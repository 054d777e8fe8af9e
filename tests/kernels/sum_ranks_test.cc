#include <cstdint>
#include <vector>

#include "tests/kernels/kernel_test.h"

namespace zero {
namespace {

// Around a vector and around four of them, on every target.
constexpr int64_t kSizes[] = {0, 1, 3, 15, 31, 33, 63, 64, 65, 1023};

std::vector<Array> Sources(int num_ranks, DType dtype, int64_t size) {
  std::vector<Array> sources;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sources.push_back(Array::Normal(dtype, size, 10 + rank));
  }
  return sources;
}

std::vector<const void*> Addresses(const std::vector<Array>& arrays) {
  std::vector<const void*> addresses;
  for (const Array& array : arrays) addresses.push_back(array.data());
  return addresses;
}

// SumRanks' result, one fp32 addition at a time.
float Want(const std::vector<Array>& sources, int64_t i) {
  float sum = static_cast<float>(sources[0][i]);
  for (size_t rank = 1; rank < sources.size(); ++rank) {
    sum += static_cast<float>(sources[rank][i]);
  }
  return sum;
}

TEST(SumRanksTest, AddsInRankOrderAndRoundsOnceBetweenAllDtypes) {
  ForEachPath([](const Path& path) {
    for (const DType from : kFloatTypes) {
      for (const DType to : kFloatTypes) {
        for (const int num_ranks : {1, 2, 3, 5}) {
          for (const int64_t n : kSizes) {
            const std::vector<Array> sources = Sources(num_ranks, from, n);
            const std::vector<const void*> src = Addresses(sources);
            Array dst = Array::Normal(to, n, 1);
            Array sum = dst;  // accumulated
            Array want(to, n), want_sum(to, n);
            for (int64_t i = 0; i < n; ++i) {
              want.Set(i, Want(sources, i));
              want_sum.Set(i, static_cast<float>(sum[i]) + Want(sources, i));
            }
            path.ops.SumRanks(path.stream, {src, from, dst.vector()});
            path.ops.SumRanks(path.stream, {src, from, sum.vector(), true});
            EXPECT_TRUE(dst.SameBits(want))
                << from << " -> " << to << " " << num_ranks << " x " << n;
            EXPECT_TRUE(sum.SameBits(want_sum))
                << from << " += " << to << " " << num_ranks << " x " << n;
          }
        }
      }
    }
  });
}

TEST(SumRanksTest, MayWriteToAnyOfItsSources) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      for (const int64_t n : kSizes) {
        Array want(dtype, n);
        const std::vector<Array> sources = Sources(3, dtype, n);
        for (int64_t i = 0; i < n; ++i) want.Set(i, Want(sources, i));
        for (int own = 0; own < 3; ++own) {
          std::vector<Array> in_place = sources;
          path.ops.SumRanks(path.stream, {Addresses(in_place), dtype,
                                          in_place[own].vector()});
          EXPECT_TRUE(in_place[own].SameBits(want)) << dtype << " " << n;
        }
      }
    }
  });
}

// More ranks than fit into a kernel's parameters are still rounded once.
TEST(SumRanksTest, ManyRanksAreAddedInOneRounding) {
  ForEachPath([](const Path& path) {
    for (const int num_ranks : {64, 65, 200}) {
      std::vector<Array> sources = Sources(num_ranks, DType::kBF16, 37);
      const int last = num_ranks - 1;
      Array want(DType::kBF16, 37);
      for (int64_t i = 0; i < 37; ++i) {
        want.Set(i, static_cast<float>(sources[last][i]) + Want(sources, i));
      }
      path.ops.SumRanks(path.stream, {Addresses(sources), DType::kBF16,
                                      sources[last].vector(), true});
      EXPECT_TRUE(sources[last].SameBits(want)) << num_ranks;
    }
  });
}

TEST(SumRanksTest, OddAddressesChangeNoBit) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : kFloatTypes) {
      const std::vector<Array> sources = Sources(3, dtype, 34);
      std::vector<const void*> odd;
      for (const Array& source : sources) {
        odd.push_back(static_cast<const char*>(source.data()) +
                      DTypeBytes(dtype));
      }
      Array dst(dtype, 33);
      path.ops.SumRanks(path.stream, {odd, dtype, dst.vector()});
      Array want(dtype, 33);
      for (int64_t i = 0; i < 33; ++i) want.Set(i, Want(sources, i + 1));
      EXPECT_TRUE(dst.SameBits(want)) << dtype;
    }
  });
}

TEST(SumRanksTest, Float64StaysFloat64) {
  OnPath([](const Path& path) {
    const TestVector<double> a = {1, 0x1p53, -3}, b = {0x1p-52, 1, 5};
    const TestVector<double> c = {0x1p-52, 1, 7};
    const void* const src[] = {a.data(), b.data(), c.data()};
    TestVector<double> dst = {10, 20, 30};
    const Vector out = {dst.data(), DType::kF64, 3};
    path.ops.SumRanks(path.stream, {src, DType::kF64, out});
    EXPECT_EQ(dst[0], 1 + 0x1p-51);
    EXPECT_EQ(dst[1], 0x1p53);  // 1 is lost twice: from left to right
    EXPECT_EQ(dst[2], 9);
    path.ops.SumRanks(path.stream, {src, DType::kF64, out, true});
    EXPECT_EQ(dst[2], 18);
  });
}

TEST(SumRanksDeathTest, RefusesFloat64BesideAnotherDtype) {
  OnPath([](const Path& path) {
    const TestVector<double> a(1);
    Array dst(DType::kF32, 1);
    const void* const src[] = {a.data()};
    EXPECT_DEATH(
        path.ops.SumRanks(path.stream, {src, DType::kF64, dst.vector()}),
        "fp64");
  });
}

}  // namespace
}  // namespace zero
