#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/cuda/partials.cuh"

namespace zero::cuda {
namespace {

// Copies src[begin, end), at most a tile, as fp32 into `tile`.
template <class T>
__device__ void LoadTile(const T* src, int64_t begin, int64_t end, bool aligned,
                         float* tile) {
  const int first = static_cast<int>(threadIdx.x) * 8;
  float* const row = tile + TileWord(first);
  const Slice<8> slice = SliceOf<8>(begin + first, begin, end);
  if (aligned && IsFull(slice)) {
    const auto x = Load<true>(src, slice);
    float4* const halves = reinterpret_cast<float4*>(row);
    halves[0] = {ToFloat(x.x[0]), ToFloat(x.x[1]), ToFloat(x.x[2]),
                 ToFloat(x.x[3])};
    halves[1] = {ToFloat(x.x[4]), ToFloat(x.x[5]), ToFloat(x.x[6]),
                 ToFloat(x.x[7])};
  } else {
    for (int k = 0; k < slice.to; ++k) row[k] = ToFloat(src[slice.base + k]);
  }
}

// A block squares and adds a run; the last one adds the runs to *out, which
// begins as 0 where `begins`. Reads itemsize bytes per element; to reach 75 %
// of copy bandwidth in fp32, 60 % in 16 bits: the ordered sum comes after the
// rest, at the latency of an addition (about 5 ns) per run of 16384 elements.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    SumSquaresKernel(const T* src, int64_t size, bool aligned, bool begins,
                     double* runs, unsigned* counter, double* out) {
  SHARED_ARRAY(float4, tile_memory, kTileWords / 4);
  float* const tile = reinterpret_cast<float*>(tile_memory);
  SHARED_ARRAY(double, sums, kRunBlocks);
  const int64_t run = blockIdx.x * kRunElems;
  for (int t = 0; t < kRunElems / kTileElems; ++t) {
    const int64_t begin = run + t * kTileElems;
    const int64_t left = size - begin;
    const int elems = left < 0            ? 0
                      : left < kTileElems ? static_cast<int>(left)
                                          : kTileElems;
    LoadTile(src, begin, begin + elems, aligned, tile);
    __syncthreads();
    SumTileSquares(tile, elems, sums + t * kTileBlocks);
    __syncthreads();
  }
  if (threadIdx.x == 0) runs[blockIdx.x] = SumBlocks(sums);
  if (IsLastBlock(counter) && threadIdx.x < kWarpSize) {
    const double sum = OrderedSum(runs, gridDim.x, 1, begins ? 0 : *out);
    if (threadIdx.x == 0) *out = sum;
  }
}

template <class T>
void SumSquaresOf(Stream& stream, const SumSquaresArgs& args) {
  char* const scratch = static_cast<char*>(ScratchOf(stream));
  double* const runs = reinterpret_cast<double*>(scratch + kCounterBytes);
  constexpr int64_t kMaxRuns = (kScratchBytes - kCounterBytes) / sizeof(double);
  const T* src = static_cast<const T*>(args.src.data);
  const bool aligned = IsSliceAligned<8>(src, args.src.dtype);
  int64_t left = args.src.size;
  bool begins = true;
  do {
    const int64_t size = std::min(left, kMaxRuns * kRunElems);
    // An empty span has one empty run, so that its sum is written.
    const int64_t num_runs = std::max<int64_t>(NumRuns(size), 1);
    Launch(SumSquaresKernel<T>, static_cast<unsigned>(num_runs), kSumThreads, 0,
           HandleOf(stream), src, size, aligned, begins, runs,
           reinterpret_cast<unsigned*>(scratch), args.out);
    src += size;
    left -= size;
    begins = false;
  } while (left > 0);
}

__global__ void SumKernel(const double* src, int64_t size, double* out) {
  const double sum = OrderedSum(src, size, 1, 0);
  if (threadIdx.x == 0) *out = sum;
}

__device__ bool IsFinite(float x) { return fabsf(x) < INFINITY; }

template <class T>
__device__ int CountSlice(const Packed<T, kFlatElems>& x,
                          const Slice<kFlatElems>& slice) {
  int count = 0;
#pragma unroll
  for (int k = 0; k < kFlatElems; ++k) {
    count += slice.Has(k) && !IsFinite(ToFloat(x.x[k])) ? 1 : 0;
  }
  return count;
}

struct CountCounters {
  unsigned done;
  unsigned long long count;
};

// Integers may be added in any order. Reads itemsize bytes per element;
// >= 90 % of copy bandwidth.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    CountNonFiniteKernel(const T* src, int64_t size, bool aligned,
                         CountCounters* counters, int64_t* out) {
  SHARED_ARRAY(int, warp_counts, kSumThreads / kWarpSize);
  const int64_t stride = int64_t{gridDim.x} * kSumThreads * kFlatElems;
  int count = 0;
  for (int64_t base =
           (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kFlatElems;
       base < size; base += stride) {
    const auto slice = SliceOf<kFlatElems>(base, 0, size);
    const auto x = aligned && IsFull(slice) ? Load<true>(src, slice)
                                            : Load<false>(src, slice);
    count += CountSlice(x, slice);
  }
  count = BlockSum<kSumThreads>(count, warp_counts);
  if (threadIdx.x == 0 && count > 0) atomicAdd(&counters->count, count);
  if (IsLastBlock(&counters->done) && threadIdx.x == 0) {
    *out = static_cast<int64_t>(atomicExch(&counters->count, 0));
  }
}

template <class T>
void CountNonFiniteOf(Stream& stream, int num_sms,
                      const CountNonFiniteArgs& args) {
  const T* src = static_cast<const T*>(args.src.data);
  constexpr int64_t kElems = kSumThreads * kFlatElems;
  const int64_t pieces = (args.src.size + kElems - 1) / kElems;
  const int64_t blocks =
      std::min<int64_t>(std::max<int64_t>(pieces, 1), 8 * num_sms);
  Launch(CountNonFiniteKernel<T>, static_cast<unsigned>(blocks), kSumThreads, 0,
         HandleOf(stream), src, args.src.size,
         IsSliceAligned<kFlatElems>(src, args.src.dtype),
         static_cast<CountCounters*>(ScratchOf(stream)), args.out);
}

__global__ void ClipKernel(const double* sum_squares, float max_norm,
                           float inverse_scale, bool keep_found, float* norm,
                           float* grad_scale, uint32_t* found_non_finite) {
  if (threadIdx.x != 0) return;
  const double unscaled = sqrt(*sum_squares) * inverse_scale;
  double coefficient = 1;
  if (max_norm > 0) {
    const double most = max_norm / (unscaled + 1e-6);
    if (most < 1) coefficient = most;
  }
  // Judged as the fp32 number that is reported.
  const float reported = static_cast<float>(unscaled);
  *norm = reported;
  *grad_scale = static_cast<float>(inverse_scale * coefficient);
  const bool found = keep_found && *found_non_finite != 0;
  *found_non_finite = found || !IsFinite(reported) ? 1 : 0;
}

}  // namespace

void CudaOps::SumSquares(Stream& stream, const SumSquaresArgs& args) {
  ZERO_CUDA_WITH_FLOAT_TYPE(args.src.dtype, T, SumSquaresOf<T>(stream, args));
}

void CudaOps::Sum(Stream& stream, const SumArgs& args) {
  Launch(SumKernel, 1, kWarpSize, 0, HandleOf(stream), args.src, args.size,
         args.out);
}

void CudaOps::CountNonFinite(Stream& stream, const CountNonFiniteArgs& args) {
  ZERO_CUDA_WITH_FLOAT_TYPE(args.src.dtype, T,
                            CountNonFiniteOf<T>(stream, num_sms_, args));
}

void CudaOps::Clip(Stream& stream, const ClipArgs& args) {
  Launch(ClipKernel, 1, kWarpSize, 0, HandleOf(stream), args.sum_squares,
         args.max_norm, args.inverse_scale, args.keep_found, args.norm,
         args.grad_scale, args.found_non_finite);
}

}  // namespace zero::cuda
