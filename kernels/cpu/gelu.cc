#include "kernels/cpu/gelu.h"

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/gelu-inl.h"
#include "kernels/cpu/parallel.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <Gelu kKind, class T>
void ForwardSpan(const T* x, T* y, int64_t begin, int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    at.Store(GeluValue<kKind>(at.Load(x)), y);
  });
}

template <Gelu kKind, class T>
void BackwardSpan(const T* x, const T* dy, T* dx, int64_t begin, int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    const VF slope = GeluDerivative<kKind>(at.Load(x));
    at.Store(hn::Mul(at.Load(dy), slope), dx);
  });
}

void Forward(Gelu kind, DType dtype, const void* x, void* y, int64_t begin,
             int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, {
    const auto run = kind == Gelu::kTanh ? ForwardSpan<Gelu::kTanh, T>
                                         : ForwardSpan<Gelu::kErf, T>;
    run(static_cast<const T*>(x), static_cast<T*>(y), begin, end);
  });
}

void Backward(Gelu kind, DType dtype, const void* x, const void* dy, void* dx,
              int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(dtype, T, {
    const auto run = kind == Gelu::kTanh ? BackwardSpan<Gelu::kTanh, T>
                                         : BackwardSpan<Gelu::kErf, T>;
    run(static_cast<const T*>(x), static_cast<const T*>(dy),
        static_cast<T*>(dx), begin, end);
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
  ParallelRanges(num_threads_, args.y.size, kElementGrain, GeluForwardRange,
                 args.kind, args.x.dtype, args.x.data, args.y.data);
}

void CpuOps::GeluBackward(Stream&, const GeluBackwardArgs& args) {
  ZERO_CHECK(args.x.dtype == args.dx.dtype && args.dy.dtype == args.dx.dtype)
      << "GeluBackward: x " << args.x.dtype << ", dy " << args.dy.dtype
      << " -> " << args.dx.dtype;
  ParallelRanges(num_threads_, args.dx.size, kElementGrain, GeluBackwardRange,
                 args.kind, args.x.dtype, args.x.data, args.dy.data,
                 args.dx.data);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
