#include <type_traits>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/partials.cuh"
#include "kernels/cuda/ranges.cuh"

namespace zero::cuda {
namespace {

static_assert(kUpdateThreads == kSumThreads);

struct LambPass : MomentPass {
  explicit LambPass(const LambArgs& args)
      : MomentPass(args),
        m_scale(static_cast<float>(
            1.0 / static_cast<double>(args.bias_correction1))) {}

  // Both passes compute it: the same bits.
  __device__ float Update(float p, float moment, float square) const {
    const float direction = moment * m_scale / Denominator(square);
    return fmaf(weight_decay, p, direction);
  }

  float m_scale;
};

// ---- Pass 1 -----------------------------------------------------------------

template <bool kSplit, class G>
struct MomentsPass : LambPass {
  using LambPass::LambPass;

  // Updates m and v; p and the update go into their tiles.
  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice, float* p_tile,
                      float* update_tile) const {
    const auto masters = LoadMasters<kWhole, kSplit>(span, slice);
    auto moment = Load<kWhole>(m, slice);
    auto square = Load<kWhole>(v, slice);
    const auto grad = Load<kWhole>(static_cast<const G*>(span.grad), slice);
    const auto p = masters.Values();
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float g = ToFloat(grad.x[k]) * grad_scale;
      Follow(g, moment.x[k], square.x[k]);
      p_tile[k] = p.x[k];
      update_tile[k] = Update(p.x[k], moment.x[k], square.x[k]);
    }
    Store<kWhole>(m, slice, moment);
    Store<kWhole>(v, slice, square);
  }
};

// A block does one run of a range, the unit in which squares are summed. It
// sums the squares on the way, so that the update is never stored: moves 22
// bytes per parameter with 16-bit gradients (p, grad, m and v both ways). Goal:
// 80 % of copy bandwidth.
template <bool kSplit, class G>
__global__ void __launch_bounds__(kUpdateThreads)
    MomentsKernel(RangeBatch batch, MomentsPass<kSplit, G> pass, bool aligned,
                  double* runs) {
  SHARED_ARRAY(float4, p_memory, kTileWords / 4);
  SHARED_ARRAY(float4, update_memory, kTileWords / 4);
  SHARED_ARRAY(double, p_sums, kRunBlocks);
  SHARED_ARRAY(double, update_sums, kRunBlocks);
  if (pass.span.Skips()) return;
  float* const p_tile = reinterpret_cast<float*>(p_memory);
  float* const update_tile = reinterpret_cast<float*>(update_memory);
  const int range = batch.Find(blockIdx.x);
  pass.Enter(batch, range);
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
      if (whole_slices && slice.IsWhole()) {
        pass.template Run<true>(slice, p_row, update_row);
      } else if (!slice.IsEmpty()) {
        pass.template Run<false>(slice, p_row, update_row);
      }
    }
    __syncthreads();
    SumTileSquares(p_tile, end - tile, p_sums + t * kTileBlocks);
    SumTileSquares(update_tile, end - tile, update_sums + t * kTileBlocks);
    __syncthreads();
  }
  // One warp has the squares of p, another those of the update.
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  if (threadIdx.x % kWarpSize == 0 && warp < 2) {
    runs[2 * blockIdx.x + warp] =
        AddBlocks<kRunBlocks>(warp == 0 ? p_sums : update_sums, 0);
  }
}

struct Owners {
  int32_t part[kRangesPerLaunch];
};

// A block per range adds its runs: one warp the squares of p, one the update's.
__global__ void __launch_bounds__(2 * kWarpSize)
    SumRunsKernel(RangeBatch batch, Owners owners, UpdateSpan span,
                  const double* runs, double* norms) {
  if (span.Skips()) return;
  const int range = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const uint32_t first = batch.first_block[range];
  const double sum = OrderedSum(runs + 2 * first + warp,
                                batch.first_block[range + 1] - first, 2, 0);
  if (threadIdx.x % kWarpSize == 0) norms[2 * owners.part[range] + warp] += sum;
}

// ---- Pass 2 -----------------------------------------------------------------

struct Tensors {
  int32_t begin[kRangesPerLaunch];
  int32_t end[kRangesPerLaunch];
};

struct TrustRatio {
  const double* norms;
  double lr, min_coeff, max_coeff;
};

// A warp per range: lr times the trust ratio of the tensor of parts
// [begin, end).
__global__ void __launch_bounds__(kWarpSize)
    StepsKernel(Tensors tensors, TrustRatio rule, float* steps) {
  const int begin = tensors.begin[blockIdx.x];
  const int num_parts = tensors.end[blockIdx.x] - begin;
  const double* const norms = rule.norms + 2 * int64_t{begin};
  const double p = OrderedSum(norms, num_parts, 2, 0);
  const double update = OrderedSum(norms + 1, num_parts, 2, 0);
  double ratio = 1;
  if (p != 0 && update != 0) {
    ratio = sqrt(p) / sqrt(update);
    ratio = ratio < rule.min_coeff   ? rule.min_coeff
            : rule.max_coeff < ratio ? rule.max_coeff
                                     : ratio;
  }
  if (threadIdx.x == 0) {
    steps[blockIdx.x] = static_cast<float>(rule.lr * ratio);
  }
}

// Moves 16 bytes per parameter with bf16 parameters (p and its rest both ways,
// m, v). Goal: 90 % of copy bandwidth.
template <class Rounding>
struct ApplyPass : LambPass {
  ApplyPass(const LambArgs& args, const float* range_steps)
      : LambPass(args), steps(range_steps) {}

  __device__ void Enter(const RangeBatch& batch, int range) {
    LambPass::Enter(batch, range);
    step = steps[range];
  }

  template <bool kWhole>
  __device__ void Run(const Slice<kUpdateElems>& slice) const {
    const auto masters = LoadMasters<kWhole, Rounding::kSplit>(span, slice);
    const auto moment = Load<kWhole>(m, slice);
    const auto square = Load<kWhole>(v, slice);
    auto p = masters.Values();
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      const float update = Update(p.x[k], moment.x[k], square.x[k]);
      p.x[k] = fmaf(-step, update, p.x[k]);
    }
    StoreMasters<kWhole, Rounding>(span, slice, p);
  }

  const float* steps;  // of the batch's ranges
  float step = 0;
};

// -----------------------------------------------------------------------------

int32_t PartIndex(int64_t part) {
  ZERO_CHECK_LT(part, int64_t{1} << 30) << "parts of tensors";
  return static_cast<int32_t>(part);
}

template <bool kSplit, class G>
void Moments(Stream& stream, const LambArgs& args) {
  double* const runs = static_cast<double*>(ScratchOf(stream));
  constexpr int64_t kMaxRuns = kScratchBytes / (2 * sizeof(double));
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  const MomentsPass<kSplit, G> pass(args);
  ForEachBatch(
      args.state.ranges, kMaxRuns,
      [](const UpdateRange& range) { return NumRuns(range.end - range.begin); },
      [&](const RangeBatch& batch, const int* indices, unsigned blocks) {
        Owners owners = {};
        for (int i = 0; i < batch.count; ++i) {
          owners.part[i] = PartIndex(args.parts[indices[i]].own);
        }
        Launch(MomentsKernel<kSplit, G>, blocks, kUpdateThreads, 0,
               HandleOf(stream), batch, pass, aligned, runs);
        Launch(SumRunsKernel, static_cast<unsigned>(batch.count), 2 * kWarpSize,
               0, HandleOf(stream), batch, owners, pass.span, runs, args.norms);
      });
}

template <class Rounding>
void Apply(Stream& stream, const LambArgs& args) {
  float* const steps = static_cast<float*>(ScratchOf(stream));
  static_assert(kRangesPerLaunch * sizeof(float) <= kScratchBytes);
  const bool aligned = IsUpdateAligned(args.state, {args.m, args.v});
  const TrustRatio ratio{args.norms, args.lr, args.min_coeff, args.max_coeff};
  UpdateRanges(HandleOf(stream), args.state.ranges, aligned,
               ApplyPass<Rounding>(args, steps),
               [&](const RangeBatch& batch, const int* indices) {
                 Tensors tensors = {};
                 for (int i = 0; i < batch.count; ++i) {
                   tensors.begin[i] = PartIndex(args.parts[indices[i]].begin);
                   tensors.end[i] = PartIndex(args.parts[indices[i]].end);
                 }
                 Launch(StepsKernel, static_cast<unsigned>(batch.count),
                        kWarpSize, 0, HandleOf(stream), tensors, ratio, steps);
               });
}

}  // namespace

void CudaOps::LambMoments(Stream& stream, const LambArgs& args) {
  CheckUpdateState("LambMoments", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  ZERO_CUDA_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
    // fp16 gradients are of fp16 parameters, whose masters are not split.
    constexpr bool kMaySplit = !std::is_same_v<G, F16>;
    if (kMaySplit && args.state.splits_master()) {
      Moments<kMaySplit, G>(stream, args);
    } else {
      Moments<false, G>(stream, args);
    }
  });
}

void CudaOps::LambApply(Stream& stream, const LambArgs& args) {
  CheckUpdateState("LambApply", args.state);
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  ZERO_CUDA_WITH_ROUNDING(args.state, Rounding, Apply<Rounding>(stream, args));
}

}  // namespace zero::cuda
