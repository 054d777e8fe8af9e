// Products of bf16 by each instruction set that this machine has.
#include "kernels/cpu/pair_product.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dtype.h"

namespace zero::cpu {
namespace {

struct Operands {
  int64_t m, n, k;
  std::vector<uint16_t> a;  // [m, k + 2]
  std::vector<uint32_t> b;  // [k / 2, n + 1]

  Operands(int64_t m, int64_t n, int64_t k)
      : m(m), n(n), k(k), a(m * (k + 2)), b(k / 2 * (n + 1)) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t p = 0; p < k; ++p) a[i * (k + 2) + p] = Bits(A(i, p));
    }
    for (int64_t p = 0; p < k; p += 2) {
      for (int64_t j = 0; j < n; ++j) {
        b[p / 2 * (n + 1) + j] = Bits(B(p, j)) | uint32_t{Bits(B(p + 1, j))}
                                                     << 16;
      }
    }
  }
  static uint16_t Bits(float x) { return F32ToBF16(x); }
  static float Rounded(double x) {
    return BF16ToF32(F32ToBF16(static_cast<float>(x)));
  }
  float A(int64_t i, int64_t p) const { return Rounded(std::sin(i * k + p)); }
  float B(int64_t p, int64_t j) const { return Rounded(std::cos(p * n + j)); }
  PairLeft left() const { return {a.data(), k + 2}; }
  PairRight right() const { return {b.data(), n + 1}; }
};

TEST(PairProductTest, IsTheSumOfProductsWhateverTheBlocks) {
  if (PairIsas().empty()) GTEST_SKIP() << "no instructions for bf16";
  for (const PairIsa isa : PairIsas()) {
    const PairProducts products(isa);
    for (const int64_t m : {16, 32, 48, 112}) {
      for (const int64_t n : {16, 32, 80}) {
        for (const int64_t k : {32, 64, 160}) {
          const Operands x(m, n, k);
          const int64_t ldc = n + 3;
          std::vector<float> c(m * ldc, 7), sum(m * ldc, 7);
          products.Run(m, n, k, x.left(), x.right(), c.data(), ldc, false);
          products.Run(m, n, k, x.left(), x.right(), sum.data(), ldc, true);
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < ldc; ++j) {
              double want = 0, size = 7;
              for (int64_t p = 0; p < k && j < n; ++p) {
                want += static_cast<double>(x.A(i, p)) * x.B(p, j);
                size += std::abs(static_cast<double>(x.A(i, p)) * x.B(p, j));
              }
              if (j >= n) want = 7;
              const double error = static_cast<double>(k) * size * 0x1p-24;
              ASSERT_NEAR(c[i * ldc + j], want, error)
                  << m << " " << n << " " << k << " at " << i << ", " << j;
              ASSERT_NEAR(sum[i * ldc + j], j < n ? 7 + want : 7, error)
                  << m << " " << n << " " << k << " at " << i << ", " << j;
            }
          }
        }
      }
    }
  }
}

// Attention computes some queries alone and others in a wider product.
TEST(PairProductTest, BitsDoNotDependOnTheNumberOfRowsAndColumns) {
  if (PairIsas().empty()) GTEST_SKIP() << "no instructions for bf16";
  for (const PairIsa isa : PairIsas()) {
    const PairProducts products(isa);
    const Operands x(64, 64, 96);
    std::vector<float> whole(64 * 64), part(64 * 64);
    products.Run(64, 64, 96, x.left(), x.right(), whole.data(), 64, false);
    for (int64_t i = 0; i < 64; i += 16) {
      for (int64_t j = 0; j < 64; j += 16) {
        const PairLeft left{x.left().data + i * x.left().ld, x.left().ld};
        const PairRight right{x.right().data + j, x.right().ld};
        products.Run(16, 16, 96, left, right, part.data() + i * 64 + j, 64,
                     false);
      }
    }
    EXPECT_EQ(whole, part);
  }
}

}  // namespace
}  // namespace zero::cpu
