#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"

namespace zero::cuda {
namespace {

// Rows are the heads of tokens, columns the pairs of a head. In place: moves 4
// bytes per 16-bit element (8 of fp32) and reads the angles from cache. Goal:
// 85 % of copy bandwidth.
template <class T>
struct RotaryPass {
  T* x;
  int64_t stride;
  uint32_t heads;
  int64_t half;  // D / 2
  const int32_t* positions;
  const float* cos;
  const float* sin;
  float sign;  // of the angle

  template <bool kWhole>
  __device__ void Run(int64_t row, const Slice<kFlatElems>& slice) const {
    const uint32_t token = static_cast<uint32_t>(row) / heads;
    const uint32_t head = static_cast<uint32_t>(row) - token * heads;
    T* const low = x + token * stride + int64_t{head} * 2 * half;
    const int64_t angle = int64_t{positions[token]} * half;
    auto a = Load<kWhole>(low, slice);
    auto b = Load<kWhole>(low + half, slice);
    const auto cosines = Load<kWhole>(cos + angle, slice);
    const auto sines = Load<kWhole>(sin + angle, slice);
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) {
      const float c = cosines.x[k];
      const float s = sign * sines.x[k];
      const float left = ToFloat(a.x[k]);
      const float right = ToFloat(b.x[k]);
      a.x[k] = FromFloat<T>(fmaf(-right, s, left * c));
      b.x[k] = FromFloat<T>(fmaf(left, s, right * c));
    }
    Store<kWhole>(low, slice, a);
    Store<kWhole>(low + half, slice, b);
  }
};

}  // namespace

void CudaOps::Rotary(Stream& stream, const RotaryArgs& args) {
  ZERO_CHECK_EQ(args.x.width % 2, 0) << "Rotary: pairs need an even width";
  const Rows& x = args.x;
  const int64_t half = x.width / 2;
  const bool aligned = IsAligned(x.data, x.dtype, x.stride, half) &&
                       IsAligned(args.cos, DType::kF32, half) &&
                       IsAligned(args.sin, DType::kF32, half);
  ZERO_CUDA_WITH_FLOAT_TYPE(
      x.dtype, T,
      MapRows(
          HandleOf(stream), x.outer * x.inner, half, aligned,
          RotaryPass<T>{static_cast<T*>(x.data), x.stride,
                        static_cast<uint32_t>(x.inner), half, args.positions,
                        args.cos, args.sin, args.inverse ? -1.0f : 1.0f}));
}

}  // namespace zero::cuda
