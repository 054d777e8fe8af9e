#include <cmath>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/ranges.cuh"

namespace zero::cuda {
namespace {

// Ranges of a launch: fewer than elsewhere, for their parts travel with them.
constexpr int kRanges = 96;
static_assert(kUpdateThreads == kSumThreads);

struct Rule {
  explicit Rule(const LambArgs& args)
      : beta1(args.beta1),
        beta2(args.beta2),
        one_minus_beta1(static_cast<float>(1.0 - args.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - args.beta2)),
        eps(args.eps),
        m_scale(static_cast<float>(1.0 /
                                   static_cast<double>(args.bias_correction1))),
        v_scale(static_cast<float>(
            1.0 / std::sqrt(static_cast<double>(args.bias_correction2)))) {}

  // Both passes compute it: the same bits.
  __device__ float Update(float weight_decay, float p, float m, float v) const {
    const float direction = m * m_scale / fmaf(sqrtf(v), v_scale, eps);
    return fmaf(weight_decay, p, direction);
  }

  float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, m_scale, v_scale;
};

// ---- Pass 1 -----------------------------------------------------------------

struct Owners {
  int32_t part[kRanges];
};

template <class G>
struct MomentsPass {
  // Updates m and v; p and the update go into their tiles.
  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice, float grad_scale,
                      float weight_decay, float* p_tile,
                      float* update_tile) const {
    const auto p = Load<kWhole>(span.master, slice);
    auto moment = Load<kWhole>(m, slice);
    auto square = Load<kWhole>(v, slice);
    const auto grad = Load<kWhole>(static_cast<const G*>(span.grad), slice);
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float g = ToFloat(grad.x[k]) * grad_scale;
      moment.x[k] = fmaf(rule.beta1, moment.x[k], rule.one_minus_beta1 * g);
      square.x[k] = fmaf(rule.beta2, square.x[k], rule.one_minus_beta2 * g * g);
      p_tile[k] = p.x[k];
      update_tile[k] =
          rule.Update(weight_decay, p.x[k], moment.x[k], square.x[k]);
    }
    Store<kWhole>(m, slice, moment);
    Store<kWhole>(v, slice, square);
  }

  UpdateSpan span;
  Rule rule;
  float* m;
  float* v;
};

// A block does a run of a range, as the sums of squares want it; the last one
// adds the runs. Squares are taken on the way, so that the update is never
// stored: moves 22 bytes per parameter with 16-bit gradients (p, grad, m and v
// both ways); >= 80 % of copy bandwidth.
template <class G>
__global__ void __launch_bounds__(kUpdateThreads)
    MomentsKernel(RangeBatch<kRanges> batch, Owners owners, MomentsPass<G> pass,
                  bool aligned, double* runs, unsigned* counter,
                  double* norms) {
  SHARED_ARRAY(float4, p_memory, kTileWords / 4);
  SHARED_ARRAY(float4, update_memory, kTileWords / 4);
  SHARED_ARRAY(double, p_sums, kRunBlocks);
  SHARED_ARRAY(double, update_sums, kRunBlocks);
  if (pass.span.Skips()) return;
  float* const p_tile = reinterpret_cast<float*>(p_memory);
  float* const update_tile = reinterpret_cast<float*>(update_memory);
  const int range = batch.Find(blockIdx.x);
  const float grad_scale = pass.span.GradScale();
  const float weight_decay = batch.weight[range];
  const int64_t run =
      batch.begin[range] + (blockIdx.x - batch.first_block[range]) * kRunElems;
  const int64_t end = batch.end[range];
  const bool whole_slices = aligned && run % kUpdateElems == 0;
  for (int t = 0; t < kRunElems / kTileElems; ++t) {
    const int64_t tile = run + t * kTileElems;
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x) * kUpdateElems; k < kTileElems;
         k += kUpdateThreads * kUpdateElems) {
      const auto slice = SliceOf<kUpdateElems>(tile + k, tile, end);
      float* const p_row = p_tile + TileWord(k);
      float* const update_row = update_tile + TileWord(k);
      if (whole_slices && IsFull(slice)) {
        pass.template Run<true>(slice, grad_scale, weight_decay, p_row,
                                update_row);
      } else if (slice.to > 0) {
        pass.template Run<false>(slice, grad_scale, weight_decay, p_row,
                                 update_row);
      }
    }
    __syncthreads();
    const int64_t left = end - tile;
    const int elems = left < 0            ? 0
                      : left < kTileElems ? static_cast<int>(left)
                                          : kTileElems;
    SumTileSquares(p_tile, elems, p_sums + t * kTileBlocks);
    SumTileSquares(update_tile, elems, update_sums + t * kTileBlocks);
    __syncthreads();
  }
  if (threadIdx.x == 0) runs[2 * blockIdx.x] = SumBlocks(p_sums);
  if (threadIdx.x == kWarpSize) {
    runs[2 * blockIdx.x + 1] = SumBlocks(update_sums);
  }
  if (!IsLastBlock(counter)) return;
  // A warp does a range at a time.
  for (int r = static_cast<int>(threadIdx.x) / kWarpSize; r < batch.count;
       r += kUpdateThreads / kWarpSize) {
    const unsigned first = batch.first_block[r];
    const unsigned next =
        r + 1 < batch.count ? batch.first_block[r + 1] : gridDim.x;
    const double p = OrderedSum(runs + 2 * first, next - first, 2, 0);
    const double update = OrderedSum(runs + 2 * first + 1, next - first, 2, 0);
    if (threadIdx.x % kWarpSize == 0) {
      norms[2 * owners.part[r]] += p;
      norms[2 * owners.part[r] + 1] += update;
    }
  }
}

// ---- Pass 2 -----------------------------------------------------------------

struct Tensors {
  int32_t begin[kRanges];
  int32_t end[kRanges];
};

template <class Rounding>
struct ApplyPass {
  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice, float weight_decay,
                      float step) const {
    auto p = Load<kWhole>(span.master, slice);
    const auto moment = Load<kWhole>(m, slice);
    const auto square = Load<kWhole>(v, slice);
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float update =
          rule.Update(weight_decay, p.x[k], moment.x[k], square.x[k]);
      p.x[k] = fmaf(-step, update, p.x[k]);
    }
    StoreMasters<kWhole, Rounding>(span, slice, p);
  }

  // lr times the trust ratio of the tensor of parts [begin, end).
  __device__ float Step(int begin, int end) const {
    double p = 0, update = 0;
    for (int k = begin; k < end; ++k) {
      p += norms[2 * k];
      update += norms[2 * k + 1];
    }
    double ratio = 1;
    if (p != 0 && update != 0) {
      ratio = sqrt(p) / sqrt(update);
      ratio = ratio < min_coeff   ? min_coeff
              : max_coeff < ratio ? max_coeff
                                  : ratio;
    }
    return static_cast<float>(lr * ratio);
  }

  UpdateSpan span;
  Rule rule;
  const float* m;
  const float* v;
  const double* norms;
  double lr, min_coeff, max_coeff;
};

// Moves 18 bytes per parameter with 16-bit parameters (p both ways, m, v, the
// copy); >= 90 % of copy bandwidth.
template <class Rounding>
__global__ void __launch_bounds__(kUpdateThreads)
    ApplyKernel(RangeBatch<kRanges> batch, Tensors tensors,
                ApplyPass<Rounding> pass, bool aligned) {
  SHARED_ARRAY(float, shared_step, 1);
  if (pass.span.Skips()) return;
  const int range = batch.Find(blockIdx.x);
  if (threadIdx.x == 0) {
    shared_step[0] = pass.Step(tensors.begin[range], tensors.end[range]);
  }
  __syncthreads();
  const float step = shared_step[0];
  const float weight_decay = batch.weight[range];
  ForEachSlice(blockIdx.x - batch.first_block[range], batch.begin[range],
               batch.end[range], aligned,
               [&](auto whole, const Slice<kUpdateElems>& slice) {
                 pass.template Run<decltype(whole)::value>(slice, weight_decay,
                                                           step);
               });
}

// -----------------------------------------------------------------------------

float WeightDecayOf(const UpdateRange& range) { return range.weight_decay; }

int32_t PartIndex(int64_t part) {
  ZERO_CHECK_LT(part, int64_t{1} << 30) << "parts of tensors";
  return static_cast<int32_t>(part);
}

template <class G>
void Moments(Stream& stream, const LambArgs& args) {
  char* const scratch = static_cast<char*>(ScratchOf(stream));
  constexpr int64_t kMaxRuns =
      (kScratchBytes - kCounterBytes) / (2 * sizeof(double));
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  const MomentsPass<G> pass{UpdateSpan(args.state), Rule(args), args.m, args.v};
  ForEachBatch<kRanges>(
      args.state.ranges, kMaxRuns,
      [](const UpdateRange& range) { return NumRuns(range.end - range.begin); },
      WeightDecayOf,
      [&](const RangeBatch<kRanges>& batch, const int* indices,
          unsigned blocks) {
        Owners owners = {};
        for (int i = 0; i < batch.count; ++i) {
          owners.part[i] = PartIndex(args.parts[indices[i]].own);
        }
        Launch(MomentsKernel<G>, blocks, kUpdateThreads, 0, HandleOf(stream),
               batch, owners, pass, aligned,
               reinterpret_cast<double*>(scratch + kCounterBytes),
               reinterpret_cast<unsigned*>(scratch), args.norms);
      });
}

template <class Rounding>
void Apply(Stream& stream, const LambArgs& args) {
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  const ApplyPass<Rounding> pass{UpdateSpan(args.state),
                                 Rule(args),
                                 args.m,
                                 args.v,
                                 args.norms,
                                 args.lr,
                                 args.min_coeff,
                                 args.max_coeff};
  ForEachBatch<kRanges>(
      args.state.ranges, kMaxGrid, BlocksOfRange, WeightDecayOf,
      [&](const RangeBatch<kRanges>& batch, const int* indices,
          unsigned blocks) {
        Tensors tensors = {};
        for (int i = 0; i < batch.count; ++i) {
          tensors.begin[i] = PartIndex(args.parts[indices[i]].begin);
          tensors.end[i] = PartIndex(args.parts[indices[i]].end);
        }
        Launch(ApplyKernel<Rounding>, blocks, kUpdateThreads, 0,
               HandleOf(stream), batch, tensors, pass, aligned);
      });
}

}  // namespace

void CudaOps::LambMoments(Stream& stream, const LambArgs& args) {
  CheckUpdateState("LambMoments", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  ZERO_CUDA_WITH_FLOAT_TYPE(args.state.grad.dtype, G, Moments<G>(stream, args));
}

void CudaOps::LambApply(Stream& stream, const LambArgs& args) {
  CheckUpdateState("LambApply", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  ZERO_CUDA_WITH_ROUNDING(args.state, Rounding, Apply<Rounding>(stream, args));
}

}  // namespace zero::cuda
