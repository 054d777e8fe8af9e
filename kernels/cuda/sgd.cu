#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ranges.cuh"

namespace zero::cuda {
namespace {

// Moves 18 bytes per parameter with momentum and bf16 parameters and gradients
// (p, its rest and buffer both ways, grad), 10 without momentum. Goal: 90 % of
// copy bandwidth.
template <class Rounding, class G>
struct SgdPass : RangePass {
  explicit SgdPass(const SgdArgs& args)
      : RangePass(args.state),
        buffer(args.momentum_buffer),
        lr(args.lr),
        momentum(args.momentum),
        one_minus_dampening(static_cast<float>(1.0 - args.dampening)),
        nesterov(args.nesterov),
        first_step(args.first_step) {}

  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice) const {
    const auto masters = LoadMasters<kWhole, Rounding::kSplit>(span, slice);
    const auto grad = Load<kWhole>(static_cast<const G*>(span.grad), slice);
    auto p = masters.Values();
    Packed<float, kUpdateElems> direction;
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      direction.x[k] =
          fmaf(weight_decay, p.x[k], ToFloat(grad.x[k]) * grad_scale);
    }
    if (buffer != nullptr) direction = Direction<kWhole>(slice, direction);
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      p.x[k] = fmaf(-lr, direction.x[k], p.x[k]);
    }
    StoreMasters<kWhole, Rounding>(span, slice, p);
  }

  // The direction with momentum; updates the buffer.
  template <bool kWhole>
  __device__ Packed<float, kUpdateElems> Direction(
      const Slice<kUpdateElems>& slice, Packed<float, kUpdateElems> g) const {
    Packed<float, kUpdateElems> buf = g;
    if (!first_step) {
      buf = Load<kWhole>(buffer, slice);
#pragma unroll
      for (int k = 0; k < kUpdateElems; ++k) {
        buf.x[k] = fmaf(momentum, buf.x[k], one_minus_dampening * g.x[k]);
      }
    }
    Store<kWhole>(buffer, slice, buf);
    if (!nesterov) return buf;
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      g.x[k] = fmaf(momentum, buf.x[k], g.x[k]);
    }
    return g;
  }

  float* buffer;  // null: no momentum
  float lr, momentum, one_minus_dampening;
  bool nesterov, first_step;
};

}  // namespace

void CudaOps::Sgd(Stream& stream, const SgdArgs& args) {
  CheckUpdateState("Sgd", args.state);
  const bool aligned = IsUpdateAligned(args.state, {args.momentum_buffer});
  ZERO_CUDA_WITH_ROUNDING_AND_GRAD(
      args.state, Rounding, G,
      UpdateRanges(HandleOf(stream), args.state.ranges, aligned,
                   SgdPass<Rounding, G>(args)));
}

}  // namespace zero::cuda
