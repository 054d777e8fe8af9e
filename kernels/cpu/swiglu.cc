#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/swiglu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

HWY_INLINE VF Swiglu(VF gate, VF up) {
  return hn::Mul(hn::Mul(gate, Sigmoid(gate).value), up);
}

struct SwigluGrads {
  VF dgate;
  VF dup;
};
HWY_INLINE SwigluGrads SwigluGrad(VF gate, VF up, VF dy) {
  const SigmoidPair s = Sigmoid(gate);
  const VF slope = hn::Mul(s.value, Fma(gate, s.complement, hn::Set(df, 1.0f)));
  return {hn::Mul(hn::Mul(dy, up), slope), hn::Mul(dy, hn::Mul(gate, s.value))};
}

template <class T>
void ForwardRows(const SwigluForwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.y.cols;
  const int64_t lanes = NumLanes();
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x.data) + row * args.x.ld;
    const T* up = gate + width;
    T* y = static_cast<T*>(args.y.data) + row * args.y.ld;
    int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
      Store(Swiglu(Load(gate + i), Load(up + i)), y + i);
    }
    if (const int64_t n = width - i; n > 0) {
      StoreN(Swiglu(LoadN(gate + i, n), LoadN(up + i, n)), y + i, n);
    }
  }
}

template <class T>
void BackwardRows(const SwigluBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.dy.cols;
  const int64_t lanes = NumLanes();
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x.data) + row * args.x.ld;
    const T* up = gate + width;
    const T* dy = static_cast<const T*>(args.dy.data) + row * args.dy.ld;
    T* dgate = static_cast<T*>(args.dx.data) + row * args.dx.ld;
    T* dup = dgate + width;
    int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
      const SwigluGrads grads =
          SwigluGrad(Load(gate + i), Load(up + i), Load(dy + i));
      Store(grads.dgate, dgate + i);
      Store(grads.dup, dup + i);
    }
    if (const int64_t n = width - i; n > 0) {
      const SwigluGrads grads =
          SwigluGrad(LoadN(gate + i, n), LoadN(up + i, n), LoadN(dy + i, n));
      StoreN(grads.dgate, dgate + i, n);
      StoreN(grads.dup, dup + i, n);
    }
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
  ZERO_CHECK(args.x.dtype == args.y.dtype)
      << "SwigluForward: " << args.x.dtype << " -> " << args.y.dtype;
  ParallelRanges(num_threads_, args.y.rows, RowGrain(args.y.cols),
                 [&](int64_t begin, int64_t end) {
                   HWY_DYNAMIC_DISPATCH(SwigluForwardRange)(args, begin, end);
                 });
}

void CpuOps::SwigluBackward(Stream&, const SwigluBackwardArgs& args) {
  ZERO_CHECK(args.x.dtype == args.dx.dtype && args.dy.dtype == args.dx.dtype)
      << "SwigluBackward: x " << args.x.dtype << ", dy " << args.dy.dtype
      << " -> " << args.dx.dtype;
  ParallelRanges(num_threads_, args.dy.rows, RowGrain(args.dy.cols),
                 [&](int64_t begin, int64_t end) {
                   HWY_DYNAMIC_DISPATCH(SwigluBackwardRange)(args, begin, end);
                 });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
