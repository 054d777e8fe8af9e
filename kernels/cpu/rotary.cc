#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// Rotates one head; `sign` is -1 for the inverse.
template <class T>
HWY_INLINE void RotateHead(T* x, const float* cos, const float* sin, VF sign,
                           int64_t half) {
  ForEachVector(0, half, [&](auto at) ZERO_CPU_BODY {
    const VF low = at.Load(x), high = at.Load(x + half);
    const VF c = at.Load(cos), s = hn::Mul(sign, at.Load(sin));
    at.Store(NegFma(high, s, hn::Mul(low, c)), x);
    at.Store(Fma(low, s, hn::Mul(high, c)), x + half);
  });
}

template <class T>
void RotaryTokens(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.x.width;
  const int64_t half = width / 2;
  const VF sign = hn::Set(df, args.inverse ? -1.0f : 1.0f);
  for (int64_t token = begin; token < end; ++token) {
    T* row = static_cast<T*>(args.x.data) + token * args.x.stride;
    const int64_t angle = args.positions[token] * half;
    for (int64_t head = 0; head < args.x.inner; ++head) {
      RotateHead(row + head * width, args.cos + angle, args.sin + angle, sign,
                 half);
    }
  }
}

void RotaryRange(const RotaryArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.x.dtype, T, RotaryTokens<T>(args, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(RotaryRange);

void CpuOps::Rotary(Stream&, const RotaryArgs& args) {
  ZERO_CHECK_EQ(args.x.width % 2, 0) << "Rotary: pairs need an even width";
  ParallelRanges(num_threads_, args.x.outer,
                 RowGrain(args.x.inner * args.x.width),
                 HWY_DYNAMIC_DISPATCH(RotaryRange), args);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
