#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/cuda/partials.cuh"

namespace zero::cuda {
namespace {

// Spans of a launch, given to the kernel by value.
constexpr int kSpans = 128;

struct SpanBatch {
  const void* src[kSpans];
  int64_t size[kSpans];
  double* out[kSpans];
  uint32_t first_run[kSpans + 1];  // the last: how many there are
  int count;
  bool continues;  // *out[0] is the sum of what came before
};

// Reads this thread's elements of the tile at `begin`; zeros from `end` on.
template <class T>
__device__ Packed<T, 8> LoadShare(const T* src, int64_t begin, int64_t end,
                                  bool aligned) {
  const auto slice =
      SliceOf<8>(begin + static_cast<int>(threadIdx.x) * 8, begin, end);
  return aligned && slice.IsWhole() ? Load<true>(src, slice)
                                    : Load<false>(src, slice);
}

// Writes the elements as fp32 into `tile`.
template <class T>
__device__ void PutShare(const Packed<T, 8>& share, float* tile) {
  float4* const halves = reinterpret_cast<float4*>(
      tile + TileWord(static_cast<int>(threadIdx.x) * 8));
  const T* const x = share.x;
  halves[0] = {ToFloat(x[0]), ToFloat(x[1]), ToFloat(x[2]), ToFloat(x[3])};
  halves[1] = {ToFloat(x[4]), ToFloat(x[5]), ToFloat(x[6]), ToFloat(x[7])};
}

// A block squares and adds a run of a span. Reads itemsize bytes per element.
// The ordered sums of a tile's blocks are formed while the next tile is on its
// way, and other blocks of the multiprocessor load theirs.
template <class T>
__global__ void __launch_bounds__(kSumThreads, 6)
    SumSquaresKernel(SpanBatch batch, bool aligned, double* runs) {
  SHARED_ARRAY(float4, tile_memory, kTileWords / 4);
  float* const tile = reinterpret_cast<float*>(tile_memory);
  SHARED_ARRAY(double, sums, kRunBlocks);
  const int span = FindSpan(batch.first_run, batch.count, blockIdx.x);
  const T* const src = static_cast<const T*>(batch.src[span]);
  const int64_t run = (blockIdx.x - batch.first_run[span]) * kRunElems;
  const int64_t size = batch.size[span];
  const int64_t end = run + kRunElems < size ? run + kRunElems : size;
  double sum = 0;
  Packed<T, 8> share = LoadShare(src, run, end, aligned);
  for (int t = 0; t < kRunElems / kTileElems; ++t) {
    const int64_t begin = run + t * kTileElems;
    PutShare(share, tile);
    __syncthreads();
    share = LoadShare(src, begin + kTileElems, end, aligned);
    double* const tile_sums = sums + t * kTileBlocks;
    SumTileSquares(tile, end - begin, tile_sums);
    __syncthreads();
    if (threadIdx.x == 0) sum = AddBlocks<kTileBlocks>(tile_sums, sum);
  }
  if (threadIdx.x == 0) runs[blockIdx.x] = sum;
}

// A warp per span adds its runs.
__global__ void __launch_bounds__(kWarpSize)
    SumRunsKernel(SpanBatch batch, const double* runs) {
  const int span = static_cast<int>(blockIdx.x);
  const uint32_t first = batch.first_run[span];
  double* const out = batch.out[span];
  const double start = batch.continues && span == 0 ? *out : 0;
  const double sum =
      OrderedSum(runs + first, batch.first_run[span + 1] - first, 1, start);
  if (threadIdx.x == 0) *out = sum;
}

template <class T>
void SumSquaresOf(Stream& stream, absl::Span<const SquaredSpan> spans) {
  double* const sums = static_cast<double*>(ScratchOf(stream));
  constexpr int64_t kMaxRuns = kScratchBytes / sizeof(double);
  bool aligned = true;
  for (const SquaredSpan& span : spans) {
    aligned = aligned && IsAligned(span.src.data);
  }
  size_t next = 0;
  int64_t begin = 0;  // of what is left of spans[next]
  while (next < spans.size()) {
    SpanBatch batch = {};
    batch.continues = begin > 0;
    int64_t runs = 0;
    while (next < spans.size() && batch.count < kSpans && runs < kMaxRuns) {
      const SquaredSpan& span = spans[next];
      const int64_t size =
          std::min(span.src.size - begin, (kMaxRuns - runs) * kRunElems);
      const int i = batch.count++;
      batch.src[i] = static_cast<const T*>(span.src.data) + begin;
      batch.size[i] = size;
      batch.out[i] = span.out;
      runs += NumRuns(size);
      batch.first_run[i + 1] = static_cast<uint32_t>(runs);
      begin += size;
      if (begin < span.src.size) break;  // goes on in the next launch
      ++next;
      begin = 0;
    }
    Launch(SumSquaresKernel<T>, static_cast<unsigned>(runs), kSumThreads, 0,
           HandleOf(stream), batch, aligned, sums);
    Launch(SumRunsKernel, static_cast<unsigned>(batch.count), kWarpSize, 0,
           HandleOf(stream), batch, sums);
  }
}

__global__ void SumKernel(const double* src, int64_t size, double* out) {
  const double sum = OrderedSum(src, size, 1, 0);
  if (threadIdx.x == 0) *out = sum;
}

__device__ bool IsFinite(float x) { return fabsf(x) < INFINITY; }

// *count += the elements that are not finite. They are rare, so a thread that
// finds some adds them by itself.
template <class T>
struct CountPass {
  const T* src;
  unsigned long long* count;

  template <bool kWhole>
  __device__ void Run(const Slice<kFlatElems>& slice) const {
    const auto x = Load<kWhole>(src, slice);
    unsigned found = 0;
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) {
      found += IsFinite(ToFloat(x.x[k])) ? 0 : 1;
    }
    if (found > 0) atomicAdd(count, found);
  }
};

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
  // The test is of the fp32 number that is reported.
  const float reported = static_cast<float>(unscaled);
  *norm = reported;
  *grad_scale = static_cast<float>(inverse_scale * coefficient);
  const bool found = keep_found && *found_non_finite != 0;
  *found_non_finite = found || !IsFinite(reported) ? 1 : 0;
}

}  // namespace

void CudaOps::SumSquares(Stream& stream, const SumSquaresArgs& args) {
  if (args.spans.empty()) return;
  const DType dtype = args.spans[0].src.dtype;
  for (const SquaredSpan& span : args.spans) {
    ZERO_CHECK_EQ(span.src.dtype, dtype) << "SumSquares: of one dtype";
  }
  ZERO_CUDA_WITH_FLOAT_TYPE(dtype, T, SumSquaresOf<T>(stream, args.spans));
}

void CudaOps::Sum(Stream& stream, const SumArgs& args) {
  Launch(SumKernel, 1, kWarpSize, 0, HandleOf(stream), args.src, args.size,
         args.out);
}

void CudaOps::CountNonFinite(Stream& stream, const CountNonFiniteArgs& args) {
  const ConstVector& src = args.src;
  ZERO_CUDA_CHECK(
      cudaMemsetAsync(args.out, 0, sizeof(*args.out), HandleOf(stream)));
  ZERO_CUDA_WITH_FLOAT_TYPE(
      src.dtype, T,
      MapFlat(HandleOf(stream), src.size, IsAligned(src.data),
              CountPass<T>{static_cast<const T*>(src.data),
                           reinterpret_cast<unsigned long long*>(args.out)}));
}

void CudaOps::Clip(Stream& stream, const ClipArgs& args) {
  Launch(ClipKernel, 1, kWarpSize, 0, HandleOf(stream), args.sum_squares,
         args.max_norm, args.inverse_scale, args.keep_found, args.norm,
         args.grad_scale, args.found_non_finite);
}

}  // namespace zero::cuda
