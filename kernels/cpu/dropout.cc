#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/philox-inl.h"
#include "kernels/op_checks.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// x scaled if the word's uniform number is >= p, else 0.
HWY_INLINE VF Drop(VF x, const uint32_t* words, float p, float scale) {
  const VU top = hn::ShiftRight<8>(hn::LoadU(du, words));
  const VF uniform = hn::Mul(hn::ConvertTo(df, hn::BitCast(di, top)),
                             hn::Set(df, 1.0f / 16777216.0f));
  return hn::IfThenElseZero(hn::Ge(uniform, hn::Set(df, p)),
                            hn::Mul(x, hn::Set(df, scale)));
}

template <class T>
void DropoutRows(const DropoutArgs& args, int64_t begin, int64_t end) {
  const int64_t chunk = 4 * NumLanes();
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
      ForEachVector(column, stop, [&](auto at) ZERO_CPU_BODY {
        at.Store(Drop(at.Load(x), words + (at.i - column), p, scale), y);
      });
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
  ZERO_CHECK_ONE_DTYPE(args.x, args.y);
  ParallelRanges(num_threads_, args.x.rows, RowGrain(args.x.cols),
                 HWY_DYNAMIC_DISPATCH(DropoutRange), args);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
