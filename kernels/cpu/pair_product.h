// Small products of bf16 matrices with sums in fp32, by the instructions that
// multiply pairs of neighbours: AMX's tiles or AVX-512's vectors. One thread,
// operands in the caches, no allocation.
#ifndef ZERO_KERNELS_CPU_PAIR_PRODUCT_H_
#define ZERO_KERNELS_CPU_PAIR_PRODUCT_H_

#include <cstdint>
#include <vector>

namespace zero::cpu {

// Sizes of a product are multiples of kPairRows (m and n) and kPairDepth (k).
inline constexpr int64_t kPairRows = 16;
inline constexpr int64_t kPairDepth = 32;

// a[m, k]: element (i, p) is the bf16 at data[i * ld + p].
struct PairLeft {
  const uint16_t* data;
  int64_t ld;
};
// b[k, n] in words: data[p / 2 * ld + j] has element (p, j) in its low half if
// p is even, else in its high half.
struct PairRight {
  const uint32_t* data;
  int64_t ld;
};

enum class PairIsa { kAmx, kAvx512 };

// The instruction sets of this machine that can do it, the fastest first; empty
// if there is none. ONEDNN_MAX_CPU_ISA limits them as it limits oneDNN.
const std::vector<PairIsa>& PairIsas();

// A thread's products; it must not run other AMX code while this lives.
class PairProducts {
 public:
  explicit PairProducts(PairIsa isa);
  ~PairProducts();
  PairProducts(const PairProducts&) = delete;
  PairProducts& operator=(const PairProducts&) = delete;

  // c[m, n] (+)= a b, where c has rows ldc floats apart. Each sum is in an
  // order that depends on k and the instruction set alone. Subnormal operands
  // count as zero.
  void Run(int64_t m, int64_t n, int64_t k, const PairLeft& a,
           const PairRight& b, float* c, int64_t ldc, bool accumulate) const;

 private:
  const PairIsa isa_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_PAIR_PRODUCT_H_
