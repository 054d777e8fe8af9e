#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ranges.cuh"

namespace zero::cuda {
namespace {

// Moves 26 bytes per parameter with bf16 parameters and gradients (p, its rest,
// m and v both ways, grad), 28 with fp32 for both; >= 90 % of copy bandwidth.
template <class Rounding, class G>
struct AdamWPass : MomentPass {
  explicit AdamWPass(const AdamWArgs& args)
      : MomentPass(args),
        lr(args.lr),
        step(static_cast<float>(static_cast<double>(args.lr) /
                                static_cast<double>(args.bias_correction1))),
        adam_w(args.adam_w) {}

  __device__ void Enter(const RangeBatch& batch, int range) {
    MomentPass::Enter(batch, range);
    decay = adam_w ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
    l2 = adam_w ? 0.0f : weight_decay;
  }

  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice) const {
    const auto masters = LoadMasters<kWhole, Rounding::kSplit>(span, slice);
    auto moment = Load<kWhole>(m, slice);
    auto square = Load<kWhole>(v, slice);
    const auto grad = Load<kWhole>(static_cast<const G*>(span.grad), slice);
    auto p = masters.Values();
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float g = fmaf(l2, p.x[k], ToFloat(grad.x[k]) * grad_scale);
      Follow(g, moment.x[k], square.x[k]);
      const float direction = moment.x[k] / Denominator(square.x[k]);
      p.x[k] = fmaf(-step, direction, p.x[k] * decay);
    }
    Store<kWhole>(m, slice, moment);
    Store<kWhole>(v, slice, square);
    StoreMasters<kWhole, Rounding>(span, slice, p);
  }

  double lr;
  float step;  // lr / c1
  bool adam_w;
  float decay = 1, l2 = 0;  // 1 - lr wd for AdamW, wd for Adam
};

}  // namespace

void CudaOps::AdamW(Stream& stream, const AdamWArgs& args) {
  CheckUpdateState("AdamW", args.state);
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  ZERO_CUDA_WITH_ROUNDING_AND_GRAD(
      args.state, Rounding, G,
      UpdateRanges(HandleOf(stream), args.state.ranges, aligned,
                   AdamWPass<Rounding, G>(args)));
}

}  // namespace zero::cuda
