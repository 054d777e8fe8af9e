#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct RotaryParams {
  T* x;
  int64_t stride;
  const int32_t* positions;
  const float* cos;
  const float* sin;
  float sign;       // of the angle
  int half;         // D / 2
  uint32_t chunks;  // of half a head
  uint32_t items;   // inner * chunks: of one token
  uint32_t num_items;
};

// A thread rotates a chunk of pairs. In place: moves 4 bytes per 16-bit
// element (8 of fp32) and reads the angles from cache; to reach 85 % of copy
// bandwidth.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    RotaryKernel(const RotaryParams<T> p) {
  constexpr int kSize = Chunk<T>::kSize;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.num_items) return;
  const uint32_t token = index / p.items;
  const uint32_t item = index - token * p.items;
  const uint32_t head = item / p.chunks;
  const int pair = static_cast<int>(item - head * p.chunks) * kSize;
  const int n = p.half - pair;

  T* const low =
      p.x + int64_t{token} * p.stride + int64_t{head} * 2 * p.half + pair;
  T* const high = low + p.half;
  const int64_t angle = int64_t{p.positions[token]} * p.half + pair;
  Chunk<T> x = LoadPart<kAligned>(low, n);
  Chunk<T> y = LoadPart<kAligned>(high, n);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i < n) {
      const float cos = p.cos[angle + i];
      const float sin = p.sign * p.sin[angle + i];
      const float a = ToFloat(x.x[i]);
      const float b = ToFloat(y.x[i]);
      x.x[i] = FromFloat<T>(fmaf(-b, sin, a * cos));
      y.x[i] = FromFloat<T>(fmaf(a, sin, b * cos));
    }
  }
  StorePart<kAligned>(low, x, n);
  StorePart<kAligned>(high, y, n);
}

template <class T>
void LaunchRotary(cudaStream_t stream, const RotaryArgs& args) {
  RotaryParams<T> p;
  p.x = static_cast<T*>(args.x.data);
  p.stride = args.x.stride;
  p.positions = args.positions;
  p.cos = args.cos;
  p.sin = args.sin;
  p.sign = args.inverse ? -1.0f : 1.0f;
  p.half = static_cast<int>(args.x.width / 2);
  const int64_t chunks = CeilDiv(p.half, Chunk<T>::kSize);
  const int64_t num_items = args.x.outer * args.x.inner * chunks;
  // The threads behind the last one are counted, too.
  ZERO_CHECK_LE(num_items, (int64_t{1} << 32) - kThreads) << "chunks of heads";
  p.chunks = static_cast<uint32_t>(chunks);
  p.items = static_cast<uint32_t>(args.x.inner * chunks);
  p.num_items = static_cast<uint32_t>(num_items);
  const auto kernel = HasAlignedRows<T>(args.x.data, args.x.stride, p.half)
                          ? RotaryKernel<T, true>
                          : RotaryKernel<T, false>;
  Launch(kernel, NumBlocks(num_items, kThreads), kThreads, 0, stream, p);
}

}  // namespace

void CudaOps::Rotary(Stream& stream, const RotaryArgs& args) {
  ZERO_CHECK_EQ(args.x.width % 2, 0) << "Rotary: pairs need an even width";
  ZERO_CUDA_WITH_FLOAT_TYPE(args.x.dtype, T,
                            LaunchRotary<T>(HandleOf(stream), args));
}

}  // namespace zero::cuda
