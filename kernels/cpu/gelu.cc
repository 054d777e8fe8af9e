#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/gelu-inl.h"
#include "kernels/cpu/parallel.h"
#include "kernels/op_checks.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <Gelu kKind, class T>
void ForwardSpan(const GeluForwardArgs& args, int64_t begin, int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    const VF x = at.Load(static_cast<const T*>(args.x.data));
    at.Store(GeluValue<kKind>(x), static_cast<T*>(args.y.data));
  });
}

template <Gelu kKind, class T>
void BackwardSpan(const GeluBackwardArgs& args, int64_t begin, int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    const VF x = at.Load(static_cast<const T*>(args.x.data));
    const VF dy = at.Load(static_cast<const T*>(args.dy.data));
    at.Store(hn::Mul(dy, GeluDerivative<kKind>(x)),
             static_cast<T*>(args.dx.data));
  });
}

void Forward(const GeluForwardArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.y.dtype, T, {
    const auto run = args.kind == Gelu::kTanh ? ForwardSpan<Gelu::kTanh, T>
                                              : ForwardSpan<Gelu::kErf, T>;
    run(args, begin, end);
  });
}

void Backward(const GeluBackwardArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.dx.dtype, T, {
    const auto run = args.kind == Gelu::kTanh ? BackwardSpan<Gelu::kTanh, T>
                                              : BackwardSpan<Gelu::kErf, T>;
    run(args, begin, end);
  });
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

void CpuOps::GeluForward(Stream&, const GeluForwardArgs& args) {
  ZERO_CHECK(args.kind != Gelu::kNone) << "Gelu: kind none";
  ZERO_CHECK_ONE_DTYPE(args.x, args.y);
  ParallelRanges(num_threads_, args.y.size, kElementGrain,
                 HWY_DYNAMIC_DISPATCH(Forward), args);
}

void CpuOps::GeluBackward(Stream&, const GeluBackwardArgs& args) {
  ZERO_CHECK(args.kind != Gelu::kNone) << "Gelu: kind none";
  ZERO_CHECK_ONE_DTYPE(args.x, args.dy, args.dx);
  ParallelRanges(num_threads_, args.dx.size, kElementGrain,
                 HWY_DYNAMIC_DISPATCH(Backward), args);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
