#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/math-inl.h"
#include "kernels/cpu/parallel.h"
#include "kernels/op_checks.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void ForwardRows(const SwigluForwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.y.cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x.data) + row * args.x.ld;
    const T* up = gate + width;
    T* y = static_cast<T*>(args.y.data) + row * args.y.ld;
    ForEachVector(0, width, [&](auto at) ZERO_CPU_BODY {
      const VF g = at.Load(gate);
      at.Store(hn::Mul(hn::Mul(g, Sigmoid(g).value), at.Load(up)), y);
    });
  }
}

template <class T>
void BackwardRows(const SwigluBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.dy.cols;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x.data) + row * args.x.ld;
    const T* up = gate + width;
    const T* dy = static_cast<const T*>(args.dy.data) + row * args.dy.ld;
    T* dgate = static_cast<T*>(args.dx.data) + row * args.dx.ld;
    T* dup = dgate + width;
    ForEachVector(0, width, [&](auto at) ZERO_CPU_BODY {
      const VF g = at.Load(gate), d = at.Load(dy);
      const VF d_up = hn::Mul(d, at.Load(up));
      const SigmoidPair s = Sigmoid(g);
      const VF slope =
          hn::Mul(s.value, Fma(g, s.complement, hn::Set(df, 1.0f)));
      at.Store(hn::Mul(d_up, slope), dgate);
      at.Store(hn::Mul(d, hn::Mul(g, s.value)), dup);
    });
  }
}

void SwigluForwardRange(const SwigluForwardArgs& args, int64_t begin,
                        int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.y.dtype, T, ForwardRows<T>(args, begin, end));
}

void SwigluBackwardRange(const SwigluBackwardArgs& args, int64_t begin,
                         int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.dx.dtype, T, BackwardRows<T>(args, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(SwigluForwardRange);
HWY_EXPORT(SwigluBackwardRange);

void CpuOps::SwigluForward(Stream&, const SwigluForwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.x, args.y);
  ParallelRanges(num_threads_, args.y.rows, RowGrain(args.y.cols),
                 HWY_DYNAMIC_DISPATCH(SwigluForwardRange), args);
}

void CpuOps::SwigluBackward(Stream&, const SwigluBackwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.x, args.dy, args.dx);
  ParallelRanges(num_threads_, args.dy.rows, RowGrain(args.dy.cols),
                 HWY_DYNAMIC_DISPATCH(SwigluBackwardRange), args);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
