#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"

namespace zero::cuda {
namespace {

// Sources that travel in a kernel's parameters. Earlier kernels store any
// others in the stream's scratch: a copy would read host memory after the call.
constexpr int kInline = 64;

struct Sources {
  const void* first[kInline];
  const void* const* others;  // device memory: sources kInline, ...
  int count;

  template <class T>
  __device__ const T* Get(int rank) const {
    return static_cast<const T*>(rank < kInline ? first[rank]
                                                : others[rank - kInline]);
  }
};

struct SourceBatch {
  const void* p[kInline];
};

__global__ void StoreSourcesKernel(SourceBatch batch, const void** dst,
                                   int count) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) dst[i] = batch.p[i];
}

Sources MakeSources(Stream& stream, absl::Span<const void* const> src) {
  Sources sources = {};
  sources.count = static_cast<int>(src.size());
  const size_t inlined = std::min<size_t>(src.size(), kInline);
  std::copy_n(src.begin(), inlined, sources.first);
  if (inlined == src.size()) return sources;
  ZERO_CHECK_LE((src.size() - inlined) * sizeof(void*), kScratchBytes)
      << "SumRanks: sources";
  const void** const others = static_cast<const void**>(ScratchOf(stream));
  for (size_t i = inlined; i < src.size(); i += kInline) {
    const size_t count = std::min<size_t>(src.size() - i, kInline);
    SourceBatch batch = {};
    std::copy_n(src.begin() + i, count, batch.p);
    Launch(StoreSourcesKernel, 1, kInline, 0, HandleOf(stream), batch,
           others + (i - inlined), static_cast<int>(count));
  }
  sources.others = others;
  return sources;
}

// Moves world * itemsize of the sources + itemsize of dst (twice that to
// accumulate) per element. Goal: 90 % of copy bandwidth on one GPU, and of the
// link where sources are a peer's. A thread reads its elements of all sources
// before it writes: dst may be one of them.
template <class S, class D>
struct SumPass {
  Sources src;
  D* dst;
  bool accumulate;

  template <bool kWhole>
  __device__ void Run(const Slice<kFlatElems>& slice) const {
    float sum[kFlatElems];
    const auto own = Load<kWhole>(src.Get<S>(0), slice);
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) sum[k] = ToFloat(own.x[k]);
#pragma unroll 4
    for (int rank = 1; rank < src.count; ++rank) {
      const auto other = Load<kWhole>(src.Get<S>(rank), slice);
#pragma unroll
      for (int k = 0; k < kFlatElems; ++k) sum[k] += ToFloat(other.x[k]);
    }
    Packed<D, kFlatElems> out;
    if (accumulate) out = Load<kWhole>(dst, slice);
#pragma unroll
    for (int k = 0; k < kFlatElems; ++k) {
      out.x[k] = FromFloat<D>(accumulate ? ToFloat(out.x[k]) + sum[k] : sum[k]);
    }
    Store<kWhole>(dst, slice, out);
  }
};

// Sums the few float64 scalars of a step.
struct SumDoublesPass {
  Sources src;
  double* dst;
  bool accumulate;

  template <bool kWhole>
  __device__ void Run(const Slice<kFlatElems>& slice) const {
    for (int64_t i = slice.base; i < slice.base + slice.to; ++i) {
      double sum = src.Get<double>(0)[i];
      for (int rank = 1; rank < src.count; ++rank) {
        sum += src.Get<double>(rank)[i];
      }
      dst[i] = accumulate ? dst[i] + sum : sum;
    }
  }
};

bool AreAligned(const SumRanksArgs& args) {
  for (const void* src : args.src) {
    if (!IsAligned(src)) return false;
  }
  return IsAligned(args.dst.data);
}

}  // namespace

void CudaOps::SumRanks(Stream& stream, const SumRanksArgs& args) {
  ZERO_CHECK_GE(args.src.size(), 1u);
  const cudaStream_t handle = HandleOf(stream);
  if (args.src_dtype == DType::kF64 && args.dst.dtype == DType::kF64) {
    MapFlat(
        handle, args.dst.size, /*aligned=*/false,
        SumDoublesPass{MakeSources(stream, args.src),
                       static_cast<double*>(args.dst.data), args.accumulate});
    return;
  }
  ZERO_CUDA_WITH_FLOAT_TYPE(
      args.src_dtype, S,
      ZERO_CUDA_WITH_FLOAT_TYPE(
          args.dst.dtype, D,
          MapFlat(
              handle, args.dst.size, AreAligned(args),
              SumPass<S, D>{MakeSources(stream, args.src),
                            static_cast<D*>(args.dst.data), args.accumulate})));
}

}  // namespace zero::cuda
