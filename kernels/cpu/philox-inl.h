// Philox on vectors: the words of kernels/philox.h, one block per lane.
#include <algorithm>

#include "kernels/cpu/simd-inl.h"
#include "kernels/philox.h"

#if defined(ZERO_KERNELS_CPU_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_KERNELS_CPU_PHILOX_INL_H_
#undef ZERO_KERNELS_CPU_PHILOX_INL_H_
#else
#define ZERO_KERNELS_CPU_PHILOX_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {

// The words of Philox blocks block, block + 1, ... (one per lane) of `row`,
// in column order: words[4 * lane + w] is Philox(key, block + lane, row).x[w].
// `block` is a multiple of the number of lanes.
#if ZERO_CPU_EMULATED
HWY_INLINE void PhiloxWords(uint64_t key, uint64_t block, uint64_t row,
                            uint32_t* HWY_RESTRICT words) {
  for (int64_t lane = 0; lane < NumLanes(); ++lane) {
    const PhiloxBlock random = Philox(key, block + lane, row);
    std::copy(random.x, random.x + 4, words + 4 * lane);
  }
}
#else
// The high and low words of a * b, lane by lane.
struct Wide {
  VU high;
  VU low;
};
HWY_INLINE Wide MulWide(VU a, VU b) {
  const hn::Repartition<uint64_t, DU> du64;
  const auto even = hn::MulEven(a, b);
  const VU odd_a = hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(du64, a)));
  const VU odd_b = hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(du64, b)));
  const auto odd = hn::MulEven(odd_a, odd_b);
  return {hn::OddEven(hn::BitCast(du, odd),
                      hn::BitCast(du, hn::ShiftRight<32>(even))),
          hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(odd)),
                      hn::BitCast(du, even))};
}

HWY_INLINE void PhiloxWords(uint64_t key, uint64_t block, uint64_t row,
                            uint32_t* HWY_RESTRICT words) {
  // A block number has 64 bits; the lanes of one call share its high word
  // because `block` is a multiple of the number of lanes.
  VU c0 = hn::Add(hn::Set(du, static_cast<uint32_t>(block)), hn::Iota(du, 0));
  VU c1 = hn::Set(du, static_cast<uint32_t>(block >> 32));
  VU c2 = hn::Set(du, static_cast<uint32_t>(row));
  VU c3 = hn::Set(du, static_cast<uint32_t>(row >> 32));
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = MulWide(c0, hn::Set(du, 0xD2511F53u));
    const Wide p1 = MulWide(c2, hn::Set(du, 0xCD9E8D57u));
    c0 = hn::Xor(hn::Xor(p1.high, c1), hn::Set(du, k0));
    c2 = hn::Xor(hn::Xor(p0.high, c3), hn::Set(du, k1));
    c1 = p1.low;
    c3 = p0.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  hn::StoreInterleaved4(c0, c1, c2, c3, du, words);
}
#endif

}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // ZERO_KERNELS_CPU_PHILOX_INL_H_
