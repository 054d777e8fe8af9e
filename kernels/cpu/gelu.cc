#include "kernels/cpu/gelu.h"

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gelu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/gelu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <Gelu kKind, class T>
void ForwardSpan(const T* x, T* y, int64_t begin, int64_t end) {
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    Store(GeluValue<kKind>(Load(x + i)), y + i);
  }
  if (i < end) {
    StoreN(GeluValue<kKind>(LoadN(x + i, end - i)), y + i, end - i);
  }
}

template <Gelu kKind, class T>
void BackwardSpan(const T* x, const T* dy, T* dx, int64_t begin, int64_t end) {
  const int64_t lanes = NumLanes();
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const VF slope = GeluDerivative<kKind>(Load(x + i));
    Store(hn::Mul(Load(dy + i), slope), dx + i);
  }
  if (i < end) {
    const int64_t n = end - i;
    const VF slope = GeluDerivative<kKind>(LoadN(x + i, n));
    StoreN(hn::Mul(LoadN(dy + i, n), slope), dx + i, n);
  }
}

void Forward(Gelu kind, DType dtype, const void* x, void* y, int64_t begin,
             int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, {
    const T* in = static_cast<const T*>(x);
    T* out = static_cast<T*>(y);
    if (kind == Gelu::kTanh) {
      ForwardSpan<Gelu::kTanh>(in, out, begin, end);
    } else {
      ForwardSpan<Gelu::kErf>(in, out, begin, end);
    }
  });
}

void Backward(Gelu kind, DType dtype, const void* x, const void* dy, void* dx,
              int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, {
    const T* in = static_cast<const T*>(x);
    const T* grad = static_cast<const T*>(dy);
    T* out = static_cast<T*>(dx);
    if (kind == Gelu::kTanh) {
      BackwardSpan<Gelu::kTanh>(in, grad, out, begin, end);
    } else {
      BackwardSpan<Gelu::kErf>(in, grad, out, begin, end);
    }
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

void GeluForwardRange(Gelu kind, DType dtype, const void* x, void* y,
                      int64_t begin, int64_t end) {
  ZERO_CHECK(kind != Gelu::kNone) << "Gelu: kind none has nothing to compute";
  HWY_DYNAMIC_DISPATCH(Forward)(kind, dtype, x, y, begin, end);
}

void GeluBackwardRange(Gelu kind, DType dtype, const void* x, const void* dy,
                       void* dx, int64_t begin, int64_t end) {
  ZERO_CHECK(kind != Gelu::kNone) << "Gelu: kind none has nothing to compute";
  HWY_DYNAMIC_DISPATCH(Backward)(kind, dtype, x, dy, dx, begin, end);
}

void CpuOps::GeluForward(Stream&, const GeluForwardArgs& args) {
  ZERO_CHECK(args.x.dtype == args.y.dtype)
      << "GeluForward: " << args.x.dtype << " -> " << args.y.dtype;
  ParallelRanges(num_threads_, args.y.size, kElementGrain,
                 [&](int64_t begin, int64_t end) {
                   GeluForwardRange(args.kind, args.x.dtype, args.x.data,
                                    args.y.data, begin, end);
                 });
}

void CpuOps::GeluBackward(Stream&, const GeluBackwardArgs& args) {
  ZERO_CHECK(args.x.dtype == args.dx.dtype && args.dy.dtype == args.dx.dtype)
      << "GeluBackward: x " << args.x.dtype << ", dy " << args.dy.dtype
      << " -> " << args.dx.dtype;
  ParallelRanges(num_threads_, args.dx.size, kElementGrain,
                 [&](int64_t begin, int64_t end) {
                   GeluBackwardRange(args.kind, args.x.dtype, args.x.data,
                                     args.dy.data, args.dx.data, begin, end);
                 });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
