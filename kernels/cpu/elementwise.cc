#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/op_checks.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

void AddRange(const AddArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.y.dtype, T,
                           AddSpans(static_cast<const T*>(args.a.data),
                                    static_cast<const T*>(args.b.data),
                                    static_cast<T*>(args.y.data), begin, end));
}

void CastRange(const CastArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      args.src.dtype, S,
      ZERO_CPU_WITH_FLOAT_TYPE(
          args.dst.dtype, D,
          ConvertSpan(static_cast<const S*>(args.src.data),
                      static_cast<D*>(args.dst.data), begin, end)));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(AddRange);
HWY_EXPORT(CastRange);

void CpuOps::Add(Stream&, const AddArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.a, args.b, args.y);
  ParallelRanges(num_threads_, args.y.size, kElementGrain,
                 HWY_DYNAMIC_DISPATCH(AddRange), args);
}

void CpuOps::Cast(Stream&, const CastArgs& args) {
  CheckCast(args);
  const auto copy = [](const CastArgs& args, int64_t begin, int64_t end) {
    const size_t bytes = DTypeBytes(args.dst.dtype);
    std::memmove(static_cast<char*>(args.dst.data) + begin * bytes,
                 static_cast<const char*>(args.src.data) + begin * bytes,
                 (end - begin) * bytes);
  };
  ParallelRanges(num_threads_, args.dst.size, kElementGrain,
                 args.src.dtype == args.dst.dtype
                     ? +copy
                     : &HWY_DYNAMIC_DISPATCH(CastRange),
                 args);
}

namespace {

template <class T>
void FillSpan(T value, void* dst, int64_t begin, int64_t end) {
  std::fill(static_cast<T*>(dst) + begin, static_cast<T*>(dst) + end, value);
}

void FillRange(const FillArgs& args, int64_t begin, int64_t end) {
  void* dst = args.dst.data;
  switch (args.dst.dtype) {
    case DType::kF32:
      return FillSpan(args.value, dst, begin, end);
    case DType::kBF16:
      return FillSpan(F32ToBF16(args.value), dst, begin, end);
    case DType::kF16:
      return FillSpan(F32ToF16(args.value), dst, begin, end);
    case DType::kF64:
      return FillSpan(static_cast<double>(args.value), dst, begin, end);
    case DType::kI32:
      return FillSpan(static_cast<int32_t>(args.value), dst, begin, end);
    case DType::kI64:
      return FillSpan(static_cast<int64_t>(args.value), dst, begin, end);
    case DType::kU8:
      return FillSpan(static_cast<uint8_t>(args.value), dst, begin, end);
    case DType::kU16:
      return FillSpan(static_cast<uint16_t>(args.value), dst, begin, end);
  }
}

}  // namespace

void CpuOps::Fill(Stream&, const FillArgs& args) {
  const size_t bytes = DTypeBytes(args.dst.dtype);
  const bool zero = args.value == 0 && !std::signbit(args.value);
  ParallelRanges(
      team(), args.dst.size, kElementGrain, [&](int64_t begin, int64_t end) {
        if (zero) {
          std::memset(static_cast<char*>(args.dst.data) + begin * bytes, 0,
                      (end - begin) * bytes);
        } else {
          FillRange(args, begin, end);
        }
      });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
