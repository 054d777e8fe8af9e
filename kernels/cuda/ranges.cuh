// How the fused optimizers walk over the ranges of a flat span. One launch
// takes many ranges, passed to the kernel by value; each is cut into blocks of
// elements, and a block of threads finds its own by a search.
#ifndef ZERO_KERNELS_CUDA_RANGES_CUH_
#define ZERO_KERNELS_CUDA_RANGES_CUH_

#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/op_checks.h"
#include "kernels/rounding.h"

namespace zero::cuda {

// Elements of a slice: 16 bytes of fp32 state.
inline constexpr int kUpdateElems = 4;
inline constexpr int kUpdateThreads = 256;

// Ranges of a launch. With a kernel's other parameters they stay below the
// 4 KiB that every GPU accepts.
inline constexpr int kRangesPerLaunch = 96;

// The ranges of one launch, without empty ones.
struct RangeBatch {
  int64_t begin[kRangesPerLaunch];
  int64_t end[kRangesPerLaunch];
  int64_t shift[kRangesPerLaunch];
  float weight_decay[kRangesPerLaunch];
  uint32_t first_block[kRangesPerLaunch + 1];  // the last: how many there are
  int count;

  // The range that a block works on.
  __device__ int Find(uint32_t block) const {
    return FindSpan(first_block, count, block);
  }
};

// Calls launch(batch, indices of its ranges, number of blocks) until every
// range was in a batch. blocks_of(range) returns how many blocks the range is
// cut into; at most max_blocks go into one launch.
template <class BlocksOf, class LaunchBatch>
void ForEachBatch(absl::Span<const UpdateRange> ranges, int64_t max_blocks,
                  const BlocksOf& blocks_of, const LaunchBatch& launch) {
  size_t next = 0;
  while (next < ranges.size()) {
    RangeBatch batch = {};
    int indices[kRangesPerLaunch] = {};
    int64_t blocks = 0;
    for (; next < ranges.size() && batch.count < kRangesPerLaunch; ++next) {
      const UpdateRange& range = ranges[next];
      if (range.begin >= range.end) continue;
      const int64_t more = blocks_of(range);
      ZERO_CHECK_LE(more, max_blocks) << "blocks of one range";
      if (blocks + more > max_blocks) break;
      const int i = batch.count++;
      batch.begin[i] = range.begin;
      batch.end[i] = range.end;
      batch.shift[i] = range.shift;
      batch.weight_decay[i] = range.weight_decay;
      indices[i] = static_cast<int>(next);
      blocks += more;
      batch.first_block[i + 1] = static_cast<uint32_t>(blocks);
    }
    launch(batch, indices, static_cast<unsigned>(blocks));
  }
}

// ---- Element-wise updates ---------------------------------------------------

// A block of threads updates this many slices per thread; their elements begin
// at a multiple of kBlockElems in the span.
inline constexpr int kSlicesPerThread = 4;
inline constexpr int64_t kBlockElems =
    int64_t{kSlicesPerThread} * kUpdateThreads * kUpdateElems;

inline int64_t BlocksOfRange(const UpdateRange& range) {
  return (range.end - 1) / kBlockElems - range.begin / kBlockElems + 1;
}

// The arrays that every rule updates: fp32 masters or the rests of split ones
// (SplitMaster), and the parameters that the model computes with. After Shift,
// all are indexed by the elements of a range.
struct UpdateSpan {
  explicit UpdateSpan(const UpdateState& state)
      : master(state.splits_master()
                   ? nullptr
                   : static_cast<float*>(state.master.data != nullptr
                                             ? state.master.data
                                             : state.param.data)),
        rest(state.splits_master() ? static_cast<uint16_t*>(state.master.data)
                                   : nullptr),
        param(state.master.data != nullptr ? state.param.data : nullptr),
        grad(state.grad.data),
        grad_scale(state.grad_scale),
        found_non_finite(state.found_non_finite),
        rounding_key(state.rounding_key),
        first_element(state.first_element),
        param_shift_bytes(state.whole_param ? ItemBytes(state.param.dtype) : 0),
        grad_shift_bytes(state.whole_grad ? ItemBytes(state.grad.dtype) : 0) {}

  static int ItemBytes(DType dtype) {
    return static_cast<int>(DTypeBytes(dtype));
  }

  __device__ void Shift(int64_t shift) {
    const int64_t param_bytes = shift * param_shift_bytes;
    if (param != nullptr) {
      param = static_cast<char*>(param) + param_bytes;
    } else {
      master = reinterpret_cast<float*>(reinterpret_cast<char*>(master) +
                                        param_bytes);
    }
    grad = static_cast<const char*>(grad) + shift * grad_shift_bytes;
    first_element += shift;
  }

  __device__ bool Skips() const {
    return found_non_finite != nullptr && *found_non_finite != 0;
  }
  __device__ float GradScale() const {
    return grad_scale == nullptr ? 1.0f : *grad_scale;
  }

  float* master;   // null: split
  uint16_t* rest;  // null: whole
  void* param;     // null: they are their own masters
  const void* grad;
  const float* grad_scale;
  const uint32_t* found_non_finite;
  uint64_t rounding_key;
  int64_t first_element;
  // Bytes by which the parameters (or masters) and gradients move per element
  // of a shift. 0: the array holds only the range, not the whole.
  int param_shift_bytes;
  int grad_shift_bytes;
};

// Whether `span` and the state's arrays may be moved in whole slices.
inline bool IsUpdateAligned(const UpdateState& state,
                            std::initializer_list<const void*> arrays) {
  bool aligned = IsAligned(state.param.data) && IsAligned(state.grad.data) &&
                 IsAligned(state.master.data);
  for (const void* array : arrays) aligned = aligned && IsAligned(array);
  for (const UpdateRange& range : state.ranges) {
    aligned = aligned && range.shift % kUpdateElems == 0;
  }
  return aligned;
}

// How a parameter is rounded from its master.
template <class T>
struct ToNearest {
  using Type = T;
  static constexpr bool kStochastic = false;
  static constexpr bool kSplit = false;
};
template <class T>
struct Stochastic : ToNearest<T> {
  static constexpr bool kStochastic = true;
};
struct Split : ToNearest<Bf16> {  // and its master is not stored as a whole
  static constexpr bool kSplit = true;
};

template <class T>
__device__ inline T RoundMaster(float master) {
  return FromFloat<T>(master);
}
template <>
__device__ inline Bf16 RoundMaster<Bf16>(float master) {
  return __ushort_as_bfloat16(SplitMaster(master).param);
}

__device__ inline void SetStochastic(float value, uint32_t word, Bf16* dst) {
  *dst = __ushort_as_bfloat16(StochasticBF16(value, word));
}
__device__ inline void SetStochastic(float value, uint32_t word, F16* dst) {
  *dst = __ushort_as_half(StochasticF16(value, word));
}

// The random words of a slice whose first element is `element` of the layout.
__device__ inline PhiloxBlock SliceWords(uint64_t key, uint64_t element) {
  if (element % 4 == 0) return RoundingWords(key, element / 4);
  PhiloxBlock words;
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    const uint32_t word = RoundingWord(key, element + k);
    words.x[0] = k == 0 ? word : words.x[0];
    words.x[1] = k == 1 ? word : words.x[1];
    words.x[2] = k == 2 ? word : words.x[2];
    words.x[3] = k == 3 ? word : words.x[3];
  }
  return words;
}

// A slice of masters as they are stored: not converted, so that loads do not
// wait for each other.
template <bool kSplit>
struct LoadedMasters {
  Packed<float, kUpdateElems> masters;
  __device__ Packed<float, kUpdateElems> Values() const { return masters; }
};
template <>
struct LoadedMasters<true> {
  Packed<uint16_t, kUpdateElems> param, rest;
  __device__ Packed<float, kUpdateElems> Values() const {
    Packed<float, kUpdateElems> values;
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      values.x[k] = JoinMaster(param.x[k], rest.x[k]);
    }
    return values;
  }
};

template <bool kWhole, bool kSplit>
__device__ inline LoadedMasters<kSplit> LoadMasters(
    const UpdateSpan& span, const Slice<kUpdateElems>& slice) {
  if constexpr (kSplit) {
    return {Load<kWhole>(static_cast<const uint16_t*>(span.param), slice),
            Load<kWhole>(span.rest, slice)};
  } else {
    return {Load<kWhole>(span.master, slice)};
  }
}

// Writes a slice of masters and, if there are any, of their parameters.
template <bool kWhole, class Rounding>
__device__ inline void StoreMasters(const UpdateSpan& span,
                                    const Slice<kUpdateElems>& slice,
                                    const Packed<float, kUpdateElems>& p) {
  using T = typename Rounding::Type;
  if constexpr (Rounding::kSplit) {
    Packed<uint16_t, kUpdateElems> rest;
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      rest.x[k] = SplitMaster(p.x[k]).rest;
    }
    Store<kWhole>(span.rest, slice, rest);
  } else {
    Store<kWhole>(span.master, slice, p);
    if (span.param == nullptr) return;
  }
  Packed<T, kUpdateElems> param;
  if constexpr (Rounding::kStochastic) {
    const PhiloxBlock words =
        SliceWords(span.rounding_key,
                   static_cast<uint64_t>(span.first_element + slice.base));
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) {
      SetStochastic(p.x[k], words.x[k], &param.x[k]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUpdateElems; ++k) param.x[k] = RoundMaster<T>(p.x[k]);
  }
  Store<kWhole>(static_cast<T*>(span.param), slice, param);
}

// Calls op.Run for the slices of block `index` of the range [begin, end).
template <class Run>
__device__ inline void ForEachSlice(uint32_t index, int64_t begin, int64_t end,
                                    bool aligned, const Run& run) {
  const int64_t first = (begin / kBlockElems + index) * kBlockElems +
                        static_cast<int64_t>(threadIdx.x) * kUpdateElems;
#pragma unroll 1
  for (int s = 0; s < kSlicesPerThread; ++s) {
    const auto slice = SliceOf<kUpdateElems>(
        first + s * kUpdateThreads * kUpdateElems, begin, end);
    if (slice.IsEmpty()) continue;
    if (aligned && slice.IsWhole()) {
      run(std::true_type(), slice);
    } else {
      run(std::false_type(), slice);
    }
  }
}

inline constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

// The base of every rule: the arrays, and the constants of the range it is in.
struct RangePass {
  explicit RangePass(const UpdateState& state) : span(state) {}

  __device__ void Enter(const RangeBatch& batch, int range) {
    span.Shift(batch.shift[range]);
    grad_scale = span.GradScale();
    weight_decay = batch.weight_decay[range];
  }

  UpdateSpan span;
  float grad_scale = 1, weight_decay = 0;  // once entered
};

// The base of the rules with moments.
struct MomentPass : RangePass {
  explicit MomentPass(const MomentArgs& args)
      : RangePass(args.state),
        m(args.m),
        v(args.v),
        beta1(args.beta1),
        beta2(args.beta2),
        one_minus_beta1(static_cast<float>(1.0 - args.beta1)),
        one_minus_beta2(static_cast<float>(1.0 - args.beta2)),
        eps(args.eps),
        v_scale(static_cast<float>(
            1.0 / std::sqrt(static_cast<double>(args.bias_correction2)))) {}

  // Moves the moments towards the gradient.
  __device__ void Follow(float g, float& moment, float& square) const {
    moment = fmaf(beta1, moment, one_minus_beta1 * g);
    square = fmaf(beta2, square, one_minus_beta2 * g * g);
  }
  __device__ float Denominator(float square) const {
    return fmaf(sqrtf(square), v_scale, eps);
  }

  float* m;
  float* v;
  float beta1, beta2, one_minus_beta1, one_minus_beta2, eps, v_scale;
};

// Calls Run<kWhole>(slice) of op, a RangePass, over every range.
template <class Op>
__global__ void __launch_bounds__(kUpdateThreads)
    UpdateKernel(RangeBatch batch, Op op, bool aligned) {
  if (op.span.Skips()) return;
  const int range = batch.Find(blockIdx.x);
  op.Enter(batch, range);
  ForEachSlice(blockIdx.x - batch.first_block[range], batch.begin[range],
               batch.end[range], aligned,
               [&](auto whole, const Slice<kUpdateElems>& slice) {
                 op.template Run<decltype(whole)::value>(slice);
               });
}

// The same; before(batch, indices of its ranges) runs before each launch.
template <class Op, class Before>
void UpdateRanges(cudaStream_t stream, absl::Span<const UpdateRange> ranges,
                  bool aligned, const Op& op, const Before& before) {
  ForEachBatch(
      ranges, kMaxGrid, BlocksOfRange,
      [&](const RangeBatch& batch, const int* indices, unsigned blocks) {
        before(batch, indices);
        Launch(UpdateKernel<Op>, blocks, kUpdateThreads, 0, stream, batch, op,
               aligned);
      });
}
template <class Op>
void UpdateRanges(cudaStream_t stream, absl::Span<const UpdateRange> ranges,
                  bool aligned, const Op& op) {
  UpdateRanges(stream, ranges, aligned, op,
               [](const RangeBatch&, const int*) {});
}

}  // namespace zero::cuda

// Runs the statement with `Rounding` a name for how `state` rounds parameters.
#define ZERO_CUDA_WITH_ROUNDING(state, Rounding, ...)                   \
  do {                                                                  \
    const ::zero::UpdateState& zero_state = (state);                    \
    const ::zero::DType zero_param = zero_state.param.dtype;            \
    const bool zero_stochastic = zero_state.stochastic_rounding;        \
    if (zero_state.splits_master()) {                                   \
      using Rounding = ::zero::cuda::Split;                             \
      __VA_ARGS__;                                                      \
    } else if (zero_stochastic && zero_param == ::zero::DType::kBF16) { \
      using Rounding = ::zero::cuda::Stochastic<::zero::cuda::Bf16>;    \
      __VA_ARGS__;                                                      \
    } else if (zero_stochastic && zero_param == ::zero::DType::kF16) {  \
      using Rounding = ::zero::cuda::Stochastic<::zero::cuda::F16>;     \
      __VA_ARGS__;                                                      \
    } else {                                                            \
      ZERO_CUDA_WITH_FLOAT_TYPE(                                        \
          zero_param, ZeroParam,                                        \
          using Rounding = ::zero::cuda::ToNearest<ZeroParam>;          \
          __VA_ARGS__);                                                 \
    }                                                                   \
  } while (false)

// The same, and `G` a name for the type of the gradients: fp32 or that of the
// parameters (CheckUpdateState).
#define ZERO_CUDA_WITH_ROUNDING_AND_GRAD(state, Rounding, G, ...) \
  ZERO_CUDA_WITH_ROUNDING(                                        \
      state, Rounding,                                            \
      if (zero_state.grad.dtype == ::zero::DType::kF32) {         \
        using G = float;                                          \
        __VA_ARGS__;                                              \
      } else {                                                    \
        using G = Rounding::Type;                                 \
        __VA_ARGS__;                                              \
      })

#endif  // ZERO_KERNELS_CUDA_RANGES_CUH_
