#include <cmath>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ranges.cuh"

namespace zero::cuda {
namespace {

// Moves 28 bytes per parameter with 16-bit parameters and gradients (p, m and
// v both ways, grad, the copy), 28 with fp32 for both; >= 90 % of copy
// bandwidth. The weight of a range is 1 - lr wd for AdamW, wd for Adam.
template <class Rounding, class G>
struct AdamWPass {
  explicit AdamWPass(const AdamWArgs& args)
      : span(args.state),
        m(args.m),
        v(args.v),
        beta1(args.beta1),
        beta2(args.beta2),
        one_minus_beta1(static_cast<float>(1.0 - args.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - args.beta2)),
        eps(args.eps),
        v_scale(static_cast<float>(
            1.0 / std::sqrt(static_cast<double>(args.bias_correction2)))),
        step(static_cast<float>(static_cast<double>(args.lr) /
                                static_cast<double>(args.bias_correction1))),
        adam_w(args.adam_w) {}

  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice, float grad_scale,
                      float weight) const {
    auto p = Load<kWhole>(span.master, slice);
    auto moment = Load<kWhole>(m, slice);
    auto square = Load<kWhole>(v, slice);
    const auto grad = Load<kWhole>(static_cast<const G*>(span.grad), slice);
    const float decay = adam_w ? weight : 1.0f;
    const float l2 = adam_w ? 0.0f : weight;
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float g = fmaf(l2, p.x[k], ToFloat(grad.x[k]) * grad_scale);
      moment.x[k] = fmaf(beta1, moment.x[k], one_minus_beta1 * g);
      square.x[k] = fmaf(beta2, square.x[k], one_minus_beta2 * g * g);
      const float direction =
          moment.x[k] / fmaf(sqrtf(square.x[k]), v_scale, eps);
      p.x[k] = fmaf(-step, direction, p.x[k] * decay);
    }
    Store<kWhole>(m, slice, moment);
    Store<kWhole>(v, slice, square);
    StoreMasters<kWhole, Rounding>(span, slice, p);
  }

  UpdateSpan span;
  float* m;
  float* v;
  float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, v_scale;
  float step;  // lr / c1
  bool adam_w;
};

}  // namespace

void CudaOps::AdamW(Stream& stream, const AdamWArgs& args) {
  CheckUpdateState("AdamW", args.state);
  const auto weight_of = [&](const UpdateRange& range) {
    if (!args.adam_w) return range.weight_decay;
    return static_cast<float>(1.0 - static_cast<double>(args.lr) *
                                        range.weight_decay);
  };
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  ZERO_CUDA_WITH_ROUNDING(
      args.state, Rounding,
      ZERO_CUDA_WITH_FLOAT_TYPE(
          args.state.grad.dtype, G,
          UpdateRanges(HandleOf(stream), args.state.ranges, aligned,
                       AdamWPass<Rounding, G>(args), weight_of)));
}

}  // namespace zero::cuda
