#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/targets.h"
#include "kernels/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dropout.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// The words of Philox blocks block, block + 1, ... (one per lane) of `row`,
// in column order: words[4 * lane + w] is Philox(key, block + lane, row).x[w].
// The same function as kernels/philox.h, one block per lane.
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

// x scaled where the word's uniform number is >= p, else 0.
HWY_INLINE VF Drop(VF x, const uint32_t* words, float p, float scale) {
  const VU top = hn::ShiftRight<8>(hn::LoadU(du, words));
  const VF uniform = hn::Mul(hn::ConvertTo(df, hn::BitCast(di, top)),
                             hn::Set(df, 1.0f / 16777216.0f));
  return hn::IfThenElseZero(hn::Ge(uniform, hn::Set(df, p)),
                            hn::Mul(x, hn::Set(df, scale)));
}

template <class T>
void DropoutRows(const DropoutArgs& args, int64_t begin, int64_t end) {
  const int64_t lanes = NumLanes();
  const int64_t chunk = 4 * lanes;
  const float p = args.probability;
  const float scale = 1.0f / (1.0f - p);
  HWY_ALIGN uint32_t words[4 * kMaxLanes];
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x.data) + row * args.x.ld;
    T* y = static_cast<T*>(args.y.data) + row * args.y.ld;
    const uint64_t id = static_cast<uint64_t>(args.row_ids[row]);
    for (int64_t column = 0; column < args.x.cols; column += chunk) {
      PhiloxWords(args.key, static_cast<uint64_t>(column / 4), id, words);
      const int64_t stop = std::min(column + chunk, args.x.cols);
      int64_t i = column;
      for (; i + lanes <= stop; i += lanes) {
        Store(Drop(Load(x + i), words + (i - column), p, scale), y + i);
      }
      if (const int64_t n = stop - i; n > 0) {
        StoreN(Drop(LoadN(x + i, n), words + (i - column), p, scale), y + i, n);
      }
    }
  }
}

void DropoutRange(const DropoutArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.y.dtype, T, DropoutRows<T>(args, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(DropoutRange);

void CpuOps::Dropout(Stream&, const DropoutArgs& args) {
  ZERO_CHECK(args.x.dtype == args.y.dtype)
      << "Dropout: " << args.x.dtype << " -> " << args.y.dtype;
  ParallelRanges(num_threads_, args.x.rows, RowGrain(args.x.cols),
                 [&](int64_t begin, int64_t end) {
                   HWY_DYNAMIC_DISPATCH(DropoutRange)(args, begin, end);
                 });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
