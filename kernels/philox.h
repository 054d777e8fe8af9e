// Philox-4x32-10, the counter-based random generator behind initialization,
// dropout and sampling: a pure function of (key, counter), so a value does not
// depend on threads, ranks or order.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#ifndef ZERO_KERNELS_PHILOX_H_
#define ZERO_KERNELS_PHILOX_H_

#include <array>
#include <cstdint>

#ifdef __CUDACC__
#define ZERO_HOST_DEVICE __host__ __device__
#else
#define ZERO_HOST_DEVICE
#endif

namespace zero {

struct PhiloxBlock {
  uint32_t x[4];
};

// Four independent 32-bit words for a 64-bit key and a 128-bit counter.
ZERO_HOST_DEVICE inline PhiloxBlock Philox(uint64_t key, uint64_t counter_lo,
                                           uint64_t counter_hi) {
  uint32_t c0 = static_cast<uint32_t>(counter_lo);
  uint32_t c1 = static_cast<uint32_t>(counter_lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_hi);
  uint32_t c3 = static_cast<uint32_t>(counter_hi >> 32);
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1) with 24 bits, exact in fp32.
ZERO_HOST_DEVICE inline float UniformFromBits(uint32_t bits) {
  return static_cast<float>(bits >> 8) * (1.0f / 16777216.0f);
}

// A well-mixed 64-bit key from two words (splitmix64's finalizer).
ZERO_HOST_DEVICE inline uint64_t MixKey(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9E3779B97F4A7C15ull * (b + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace zero

#endif  // ZERO_KERNELS_PHILOX_H_
