#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/op_checks.h"

namespace zero::cuda {
namespace {

// Moves 3 * itemsize bytes per element. Goal: 90 % of copy bandwidth.
struct Addition {
  __device__ static float Of(const float (&x)[2]) { return x[0] + x[1]; }
};

// Moves the bytes of source and destination. Goal: 90 % of copy bandwidth.
struct Same {
  __device__ static float Of(const float (&x)[1]) { return x[0]; }
};

template <class S, class D>
void CastSpan(cudaStream_t stream, const CastArgs& args) {
  const bool aligned = IsAligned(args.src.data) && IsAligned(args.dst.data);
  MapFlat(stream, args.dst.size, aligned,
          SpanPass<Same, D, S, 1>{static_cast<D*>(args.dst.data),
                                  {static_cast<const S*>(args.src.data)}});
}

// Writes the span once. Goal: 90 % of the bandwidth of cudaMemset.
template <class T>
struct FillPass {
  T value;
  T* dst;

  template <bool kWhole>
  __device__ void Run(const Slice<kFlatElems>& slice) const {
    Packed<T, kFlatElems> out;
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) out.x[k] = value;
    Store<kWhole>(dst, slice, out);
  }
};

template <class T>
void FillSpan(cudaStream_t stream, const Vector& dst, T value) {
  MapFlat(stream, dst.size, IsAligned(dst.data),
          FillPass<T>{value, static_cast<T*>(dst.data)});
}

}  // namespace

void CudaOps::Add(Stream& stream, const AddArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.a, args.b, args.y);
  MapSpans<Addition>(HandleOf(stream), args.y, args.a, args.b);
}

void CudaOps::Cast(Stream& stream, const CastArgs& args) {
  CheckCast(args);
  const DType from = args.src.dtype, to = args.dst.dtype;
  if (args.dst.size == 0) return;
  if (from == to) {
    ZERO_CUDA_CHECK(cudaMemcpyAsync(args.dst.data, args.src.data,
                                    args.dst.size * DTypeBytes(to),
                                    cudaMemcpyDefault, HandleOf(stream)));
  } else if (from == DType::kBF16) {
    CastSpan<Bf16, float>(HandleOf(stream), args);
  } else if (from == DType::kF16) {
    CastSpan<F16, float>(HandleOf(stream), args);
  } else if (to == DType::kBF16) {
    CastSpan<float, Bf16>(HandleOf(stream), args);
  } else {
    CastSpan<float, F16>(HandleOf(stream), args);
  }
}

void CudaOps::Fill(Stream& stream, const FillArgs& args) {
  const cudaStream_t handle = HandleOf(stream);
  const float value = args.value;
  switch (args.dst.dtype) {
    case DType::kF32:
      return FillSpan(handle, args.dst, value);
    case DType::kBF16:
      return FillSpan(handle, args.dst, F32ToBF16(value));
    case DType::kF16:
      return FillSpan(handle, args.dst, F32ToF16(value));
    case DType::kF64:
      return FillSpan(handle, args.dst, static_cast<double>(value));
    case DType::kI32:
      return FillSpan(handle, args.dst, static_cast<int32_t>(value));
    case DType::kI64:
      return FillSpan(handle, args.dst, static_cast<int64_t>(value));
    case DType::kU8:
      return FillSpan(handle, args.dst, static_cast<uint8_t>(value));
    case DType::kU16:
      return FillSpan(handle, args.dst, static_cast<uint16_t>(value));
  }
}

}  // namespace zero::cuda
