#include <utility>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/workspace.h"
#include "kernels/op_checks.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

// ---- Rows in registers -----------------------------------------------------
//
// A group of threads has a row, kChunks chunks of it per thread: chunk c of
// lane l begins at column (c * kGroup + l) * 8 (16-bit) or * 4 (fp32). Narrow
// rows share a block of 128 threads; wide ones have a block each.

template <int kThreadsOfRow, int kChunksOfThread>
struct Group {
  static constexpr int kSize = kThreadsOfRow;
  static constexpr int kChunks = kChunksOfThread;
  static constexpr int kBlock = kSize < 128 ? 128 : kSize;
  static constexpr int kPerBlock = kBlock / kSize;
  static constexpr int kWarps = kBlock / kWarpSize;
};

// Rows wider than any group's registers: a block of that many threads reads a
// row more than once.
constexpr int kWideThreads = 512;
constexpr int kWideWarps = kWideThreads / kWarpSize;

// Calls fn(Group<>) with the smallest group that holds a row, or `wide()`. Two
// rows and two sums do not fit the registers of more than 256 threads.
enum class Pass { kForward, kBackward };
template <class T, Pass kPass, class Fn, class Wide>
void WithGroup(int64_t width, const Fn& fn, const Wide& wide) {
  const int64_t chunks = (width + Chunk<T>::kSize - 1) / Chunk<T>::kSize;
  if (chunks <= 16) {
    fn(Group<16, 1>());
  } else if (chunks <= 32 * 4) {
    fn(Group<32, 4>());
  } else if (chunks <= 128 * 4) {
    fn(Group<128, 4>());
  } else if (chunks <= 256 * 4) {
    fn(Group<256, 4>());
  } else if (kPass == Pass::kForward && chunks <= 512 * 4) {
    if constexpr (kPass == Pass::kForward) fn(Group<512, 4>());
  } else {
    wide();
  }
}

// Where a row lies in all operands of a norm, which have the same outer and
// inner rows: one division.
struct RowPlace {
  uint32_t outer, inner;
};
__device__ inline RowPlace PlaceOf(const ConstRows& rows, uint32_t row) {
  const uint32_t inner = static_cast<uint32_t>(rows.inner);
  const uint32_t outer = row / inner;
  return {outer, row - outer * inner};
}
template <class T, class Data>
__device__ inline ConstAs<T, Data>* RowOf(const RowsView<Data>& rows,
                                          const RowPlace& at) {
  return static_cast<ConstAs<T, Data>*>(rows.data) + at.outer * rows.stride +
         int64_t{at.inner} * static_cast<int>(rows.width);
}
__host__ __device__ inline uint32_t NumRows(const ConstRows& rows) {
  return static_cast<uint32_t>(rows.outer * rows.inner);
}

template <class T>
bool IsAligned(const ConstRows& rows) {
  return rows.data == nullptr ||
         HasAlignedRows<T>(rows.data, rows.stride, rows.width);
}

// Column of the first element of chunk c of this thread.
template <class T, class G>
__device__ inline int ColumnOf(int c) {
  return (c * G::kSize + static_cast<int>(threadIdx.x) % G::kSize) *
         Chunk<T>::kSize;
}

template <class G, bool kAligned, class T>
__device__ inline void LoadRow(const T* row, int width,
                               Chunk<T> (&x)[G::kChunks]) {
#pragma unroll
  for (int c = 0; c < G::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    x[c] = LoadPart<kAligned>(row + column, width - column);
  }
}
template <class G, bool kAligned, class T>
__device__ inline void StoreRow(T* row, int width,
                                const Chunk<T> (&x)[G::kChunks]) {
#pragma unroll
  for (int c = 0; c < G::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    StorePart<kAligned>(row + column, x[c], width - column);
  }
}

// The sums over the group, in each of its threads, by a fixed tree. Calls that
// follow one another alternate between two arrays of `scratch`, so that one
// barrier each is enough.
template <class G>
__device__ inline float2 GroupSum(float2 value, float2* scratch) {
#pragma unroll
  for (int offset = (G::kSize < kWarpSize ? G::kSize : kWarpSize) / 2;
       offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(kWholeWarp, value.x, offset);
    value.y += __shfl_xor_sync(kWholeWarp, value.y, offset);
  }
  if constexpr (G::kSize > kWarpSize) {
    if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = scratch[0];
#pragma unroll
    for (int warp = 1; warp < G::kWarps; ++warp) {
      value.x += scratch[warp].x;
      value.y += scratch[warp].y;
    }
  }
  return value;
}

template <class Args>
__device__ inline bool IsCentered(const Args& args) {
  return args.kind == NormKind::kLayerNorm;
}

// ---- Forward ---------------------------------------------------------------

// x += residual, rounded to storage: the statistics are of the values that the
// backward pass will read.
template <class T>
__device__ inline void AddChunk(Chunk<T>& x, const Chunk<T>& residual) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    x.x[i] = FromFloat<T>(ToFloat(x.x[i]) + ToFloat(residual.x[i]));
  }
}

template <class T>
__device__ inline Chunk<T> Normalize(const Chunk<T>& x, float mean, float rstd,
                                     const Chunk<T>& weight,
                                     const Chunk<T>& bias, bool has_bias) {
  Chunk<T> y;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    const float xhat = (ToFloat(x.x[i]) - mean) * rstd;
    const float w = ToFloat(weight.x[i]);
    y.x[i] =
        FromFloat<T>(has_bias ? fmaf(xhat, w, ToFloat(bias.x[i])) : xhat * w);
  }
  return y;
}

__device__ inline void StoreStatistics(const NormForwardArgs& args,
                                       uint32_t row, float mean, float rstd) {
  if (IsCentered(args) && args.mean != nullptr) args.mean[row] = mean;
  if (args.rstd != nullptr) args.rstd[row] = rstd;
}

template <class T>
__device__ inline float ChunkSum(const Chunk<T>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) sum += ToFloat(x.x[i]);
  return sum;
}
// Of the first n elements: those beyond are not at the mean.
template <class T>
__device__ inline float ChunkSquares(const Chunk<T>& x, float mean, int n) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    const float d = i < n ? ToFloat(x.x[i]) - mean : 0.0f;
    sum = fmaf(d, d, sum);
  }
  return sum;
}

// A group per row, which stays in registers between the passes over it: moves
// 4 bytes per 16-bit element, 8 with a residual; to reach 90 % of copy
// bandwidth.
template <class T, class G, bool kAligned>
__global__ void __launch_bounds__(G::kBlock)
    NormForwardKernel(const NormForwardArgs p) {
  SHARED_ARRAY(float2, scratch, 2 * G::kWarps);
  const uint32_t row = blockIdx.x * G::kPerBlock + threadIdx.x / G::kSize;
  const RowPlace at = PlaceOf(p.x, row);
  const bool active = row < NumRows(p.x);
  // Groups without a row have one of no columns, and take part in shuffles.
  const int width = active ? static_cast<int>(p.x.width) : 0;
  const float count = static_cast<float>(static_cast<int>(p.x.width));
  const T* const weights = static_cast<const T*>(p.weight.data);
  const T* const biases = static_cast<const T*>(p.bias.data);

  Chunk<T> x[G::kChunks];
  LoadRow<G, kAligned>(RowOf<T>(p.x, at), width, x);
  if (p.residual.data != nullptr) {
    Chunk<T> residual[G::kChunks];
    LoadRow<G, kAligned>(RowOf<T>(p.residual, at), width, residual);
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) AddChunk(x[c], residual[c]);
    StoreRow<G, kAligned>(RowOf<T>(p.sum, at), width, x);
  }
  float2 sum = make_float2(0, 0);
  float mean = 0;
  if (IsCentered(p)) {
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) sum.x += ChunkSum(x[c]);
    mean = GroupSum<G>(sum, scratch).x / count;
  }
  float2 squares = make_float2(0, 0);
#pragma unroll
  for (int c = 0; c < G::kChunks; ++c) {
    squares.x += ChunkSquares(x[c], mean, width - ColumnOf<T, G>(c));
  }
  const float variance = GroupSum<G>(squares, scratch + G::kWarps).x / count;
  const float rstd = 1.0f / sqrtf(variance + p.eps);

  T* const y = RowOf<T>(p.y, at);
#pragma unroll
  for (int c = 0; c < G::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    const int n = width - column;
    const bool has_bias = biases != nullptr;
    const Chunk<T> weight = LoadPart<kAligned>(weights + column, n);
    const Chunk<T> bias = LoadPart<kAligned>(biases + column, has_bias ? n : 0);
    StorePart<kAligned>(y + column,
                        Normalize(x[c], mean, rstd, weight, bias, has_bias), n);
  }
  if (active && threadIdx.x % G::kSize == 0) {
    StoreStatistics(p, row, mean, rstd);
  }
}

// A block per row of any width: reads it up to three times, from L2 after the
// first, each thread its own elements.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kWideThreads, 2)
    WideNormForwardKernel(const NormForwardArgs p) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kStep = kWideThreads * kSize;
  SHARED_ARRAY(float, scratch, kWideWarps);
  const uint32_t row = blockIdx.x;
  const RowPlace at = PlaceOf(p.x, row);
  const int width = static_cast<int>(p.x.width);
  const T* const weights = static_cast<const T*>(p.weight.data);
  const T* const biases = static_cast<const T*>(p.bias.data);
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const T* x = RowOf<T>(p.x, at);
  if (p.residual.data != nullptr) {
    const T* const residual = RowOf<T>(p.residual, at);
    T* const sum = RowOf<T>(p.sum, at);
    for (int i = first; i < width; i += kStep) {
      Chunk<T> chunk = LoadPart<kAligned>(x + i, width - i);
      AddChunk(chunk, LoadPart<kAligned>(residual + i, width - i));
      StorePart<kAligned>(sum + i, chunk, width - i);
    }
    x = sum;
  }
  const float count = static_cast<float>(width);
  float mean = 0;
  if (IsCentered(p)) {
    float sum = 0;
    for (int i = first; i < width; i += kStep) {
      sum += ChunkSum(LoadPart<kAligned>(x + i, width - i));
    }
    mean = BlockReduce<Plus, kWideThreads>(sum, scratch) / count;
  }
  float squares = 0;
  for (int i = first; i < width; i += kStep) {
    squares +=
        ChunkSquares(LoadPart<kAligned>(x + i, width - i), mean, width - i);
  }
  const float variance =
      BlockReduce<Plus, kWideThreads>(squares, scratch) / count;
  const float rstd = 1.0f / sqrtf(variance + p.eps);
  T* const y = RowOf<T>(p.y, at);
  for (int i = first; i < width; i += kStep) {
    const int n = width - i;
    const bool has_bias = biases != nullptr;
    StorePart<kAligned>(
        y + i,
        Normalize(LoadPart<kAligned>(x + i, n), mean, rstd,
                  LoadPart<kAligned>(weights + i, n),
                  LoadPart<kAligned>(biases + i, has_bias ? n : 0), has_bias),
        n);
  }
  if (threadIdx.x == 0) StoreStatistics(p, row, mean, rstd);
}

// ---- Backward --------------------------------------------------------------

// The sums over rows, a part for each block.
struct Partials {
  uint32_t rows_per_block;
  float* dweight = nullptr;  // [blocks, width]; null: frozen
  float* dbias = nullptr;    // [blocks, width]; null: none
};

struct RowScale {
  float mean;
  float rstd;
};
__device__ inline RowScale ScaleOf(const NormBackwardArgs& p, uint32_t row) {
  return {IsCentered(p) ? p.mean[row] : 0.0f, p.rstd[row]};
}

// sums += (g, g xhat) of a chunk with g = dy w; dweight += dy xhat; dbias +=
// dy. Elements beyond the row have dy = 0.
template <class T>
__device__ inline void AddChunkGrads(const Chunk<T>& dy, const Chunk<T>& x,
                                     const Chunk<T>& weight, RowScale scale,
                                     float2& sums, float* dweight,
                                     float* dbias) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    const float grad = ToFloat(dy.x[i]);
    const float xhat = (ToFloat(x.x[i]) - scale.mean) * scale.rstd;
    const float g = grad * ToFloat(weight.x[i]);
    sums.x += g;
    sums.y = fmaf(g, xhat, sums.y);
    dweight[i] = fmaf(grad, xhat, dweight[i]);
    dbias[i] += grad;
  }
}

// (g - mean(g) - xhat mean(g xhat)) rstd + dsum.
template <class T>
__device__ inline Chunk<T> InputGrads(const Chunk<T>& dy, const Chunk<T>& x,
                                      const Chunk<T>& weight,
                                      const Chunk<T>& dsum, RowScale scale,
                                      float2 means) {
  Chunk<T> dx;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    const float xhat = (ToFloat(x.x[i]) - scale.mean) * scale.rstd;
    float g = ToFloat(dy.x[i]) * ToFloat(weight.x[i]) - means.x;
    g = fmaf(-xhat, means.y, g);
    dx.x[i] = FromFloat<T>(fmaf(g, scale.rstd, ToFloat(dsum.x[i])));
  }
  return dx;
}

__device__ inline float2 MeansOf(const NormBackwardArgs& p, float2 sums) {
  const float count = static_cast<float>(static_cast<int>(p.dy.width));
  return make_float2(IsCentered(p) ? sums.x / count : 0.0f, sums.y / count);
}

// Adds the groups' values in order and writes the block's row of `partials`.
// `shared` has room for one group; every thread of the block calls it.
template <class T, class G, int kValues>
__device__ inline void WritePartials(const float (&values)[kValues],
                                     float* shared, float* partials,
                                     int width) {
  const int group = threadIdx.x / G::kSize;
  const int lane = threadIdx.x % G::kSize;
  for (int turn = 0; turn < G::kPerBlock; ++turn) {
    if (group == turn) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const int slot = v * G::kSize + lane;
        const int column =
            ColumnOf<T, G>(v / Chunk<T>::kSize) + v % Chunk<T>::kSize;
        const float sum = turn == 0 ? values[v] : shared[slot] + values[v];
        if (turn + 1 < G::kPerBlock) {
          shared[slot] = sum;
        } else if (column < width) {
          partials[int64_t{blockIdx.x} * width + column] = sum;
        }
      }
    }
    __syncthreads();
  }
}

// A group per row at a time, its part of dweight and dbias in registers over
// all rows of the block. Moves dy, x and dx once (6 bytes per 16-bit element,
// 8 with dsum) and 16 bytes of partial sums per column and block; to reach 80 %
// of copy bandwidth from a few thousand rows on, and less for more than 4096
// columns, where the registers leave an SM a single block.
template <class T, class G, bool kAligned>
__global__ void __launch_bounds__(G::kBlock, (kAligned ? 384 : 256) / G::kBlock)
    NormBackwardKernel(const NormBackwardArgs p, const Partials partials) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kValues = G::kChunks * kSize;
  SHARED_ARRAY(float2, scratch, 2 * G::kWarps);
  SHARED_ARRAY(float, shared, G::kPerBlock > 1 ? G::kSize * kValues : 1);
  float dweight[kValues] = {};
  float dbias[kValues] = {};
  const T* const weights = static_cast<const T*>(p.weight.data);
  const uint32_t begin = blockIdx.x * partials.rows_per_block;
  const uint32_t end = min(begin + partials.rows_per_block, NumRows(p.dy));
  int parity = 0;
  for (uint32_t first = begin; first < end; first += G::kPerBlock) {
    const uint32_t row = first + threadIdx.x / G::kSize;
    const RowPlace at = PlaceOf(p.dy, row);
    const bool active = row < end;
    const int width = active ? static_cast<int>(p.dy.width) : 0;
    const RowScale scale = ScaleOf(p, active ? row : begin);
    Chunk<T> dy[G::kChunks];
    Chunk<T> x[G::kChunks];
    LoadRow<G, kAligned>(RowOf<T>(p.dy, at), width, dy);
    LoadRow<G, kAligned>(RowOf<T>(p.sum, at), width, x);
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) {
      const int column = ColumnOf<T, G>(c);
      const Chunk<T> weight =
          LoadPart<kAligned>(weights + column, width - column);
      AddChunkGrads(dy[c], x[c], weight, scale, sums, dweight + c * kSize,
                    dbias + c * kSize);
    }
    const float2 means =
        MeansOf(p, GroupSum<G>(sums, scratch + parity * G::kWarps));
    parity ^= 1;
    const T* const dsum = RowOf<T>(p.dsum, at);
    T* const dx = RowOf<T>(p.dx, at);
#pragma unroll
    for (int c = 0; c < G::kChunks; ++c) {
      const int column = ColumnOf<T, G>(c);
      const int n = width - column;
      const Chunk<T> residual =
          LoadPart<kAligned>(dsum + column, p.dsum.data != nullptr ? n : 0);
      const Chunk<T> weight = LoadPart<kAligned>(weights + column, n);
      StorePart<kAligned>(
          dx + column, InputGrads(dy[c], x[c], weight, residual, scale, means),
          n);
    }
  }
  const int width = static_cast<int>(p.dy.width);
  if (partials.dweight != nullptr) {
    WritePartials<T, G>(dweight, shared, partials.dweight, width);
  }
  if (partials.dbias != nullptr) {
    WritePartials<T, G>(dbias, shared, partials.dbias, width);
  }
}

// A block per row of any width, which is read twice; the partial sums are kept
// in the workspace, each element by its own thread.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kWideThreads)
    WideNormBackwardKernel(const NormBackwardArgs p, const Partials partials) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kStep = kWideThreads * kSize;
  SHARED_ARRAY(float, scratch, kWideWarps);
  const int width = static_cast<int>(p.dy.width);
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const T* const weights = static_cast<const T*>(p.weight.data);
  const uint32_t begin = blockIdx.x * partials.rows_per_block;
  const uint32_t end = min(begin + partials.rows_per_block, NumRows(p.dy));
  const int64_t partial = int64_t{blockIdx.x} * width;
  for (uint32_t row = begin; row < end; ++row) {
    const RowPlace at = PlaceOf(p.dy, row);
    const RowScale scale = ScaleOf(p, row);
    const T* const dy = RowOf<T>(p.dy, at);
    const T* const x = RowOf<T>(p.sum, at);
    float2 sums = make_float2(0, 0);
    for (int i = first; i < width; i += kStep) {
      const int n = width - i;
      float dweight[kSize] = {};
      float dbias[kSize] = {};
      AddChunkGrads(LoadPart<kAligned>(dy + i, n), LoadPart<kAligned>(x + i, n),
                    LoadPart<kAligned>(weights + i, n), scale, sums, dweight,
                    dbias);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if (j < n && partials.dweight != nullptr) {
          float* const sum = partials.dweight + partial + i + j;
          *sum = row == begin ? dweight[j] : *sum + dweight[j];
        }
        if (j < n && partials.dbias != nullptr) {
          float* const sum = partials.dbias + partial + i + j;
          *sum = row == begin ? dbias[j] : *sum + dbias[j];
        }
      }
    }
    const float g = BlockReduce<Plus, kWideThreads>(sums.x, scratch);
    const float gx = BlockReduce<Plus, kWideThreads>(sums.y, scratch);
    const float2 means = MeansOf(p, make_float2(g, gx));
    const T* const dsum = RowOf<T>(p.dsum, at);
    T* const dx = RowOf<T>(p.dx, at);
    for (int i = first; i < width; i += kStep) {
      const int n = width - i;
      const Chunk<T> residual =
          LoadPart<kAligned>(dsum + i, p.dsum.data != nullptr ? n : 0);
      StorePart<kAligned>(dx + i,
                          InputGrads(LoadPart<kAligned>(dy + i, n),
                                     LoadPart<kAligned>(x + i, n),
                                     LoadPart<kAligned>(weights + i, n),
                                     residual, scale, means),
                          n);
    }
  }
}

// ---- Host ------------------------------------------------------------------

void CheckRows(const ConstRows& rows) {
  ZERO_CHECK_LT(rows.outer * rows.inner, int64_t{1} << 32) << "rows of a norm";
}

template <class T>
void LaunchForward(cudaStream_t stream, const NormForwardArgs& args) {
  const bool aligned = IsAligned<T>(args.x) && IsAligned<T>(args.residual) &&
                       IsAligned<T>(args.sum) && IsAligned<T>(args.y) &&
                       IsChunkAligned(args.weight.data) &&
                       IsChunkAligned(args.bias.data);
  WithGroup<T, Pass::kForward>(
      args.x.width,
      [&]<class G>(G) {
        Launch(aligned ? NormForwardKernel<T, G, true>
                       : NormForwardKernel<T, G, false>,
               NumBlocks(NumRows(args.x), G::kPerBlock), G::kBlock, 0, stream,
               args);
      },
      [&] {
        Launch(aligned ? WideNormForwardKernel<T, true>
                       : WideNormForwardKernel<T, false>,
               NumRows(args.x), kWideThreads, 0, stream, args);
      });
}

template <class T>
void LaunchBackward(cudaStream_t stream, const NormBackwardArgs& args,
                    unsigned num_blocks, const Partials& partials) {
  const bool aligned = IsAligned<T>(args.dy) && IsAligned<T>(args.sum) &&
                       IsAligned<T>(args.dsum) && IsAligned<T>(args.dx) &&
                       IsChunkAligned(args.weight.data);
  WithGroup<T, Pass::kBackward>(
      args.dy.width,
      [&]<class G>(G) {
        Launch(aligned ? NormBackwardKernel<T, G, true>
                       : NormBackwardKernel<T, G, false>,
               num_blocks, G::kBlock, 0, stream, args, partials);
      },
      [&] {
        Launch(aligned ? WideNormBackwardKernel<T, true>
                       : WideNormBackwardKernel<T, false>,
               num_blocks, kWideThreads, 0, stream, args, partials);
      });
}

}  // namespace

void CudaOps::NormForward(Stream& stream, const NormForwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.y, args.x, args.weight, args.bias, args.residual,
                       args.sum);
  CheckRows(args.x);
  ZERO_CUDA_WITH_FLOAT_TYPE(args.y.dtype, T,
                            LaunchForward<T>(HandleOf(stream), args));
}

void CudaOps::NormBackward(Stream& stream, const NormBackwardArgs& args,
                           Workspace workspace) {
  ZERO_CHECK_ONE_DTYPE(args.dx, args.dy, args.sum, args.weight, args.dsum);
  CheckRows(args.dy);
  const cudaStream_t handle = HandleOf(stream);
  const RowBlocks blocks = NormBlocks(args);
  // [count, width] partial sums of dweight, then of dbias.
  float* rest = static_cast<float*>(workspace.data);
  const auto take = [&](const Vector& out) {
    return out.data == nullptr
               ? nullptr
               : std::exchange(rest, rest + blocks.count * args.dy.width);
  };
  Partials partials{static_cast<uint32_t>(blocks.rows)};
  partials.dweight = take(args.dweight);
  partials.dbias = take(args.dbias);
  ZERO_CUDA_WITH_FLOAT_TYPE(
      args.dx.dtype, T,
      LaunchBackward<T>(handle, args, static_cast<unsigned>(blocks.count),
                        partials));
  if (partials.dweight != nullptr) {
    SumPartials(handle, partials.dweight, blocks.count, args.dweight,
                args.accumulate_dweight);
  }
  if (partials.dbias != nullptr) {
    SumPartials(handle, partials.dbias, blocks.count, args.dbias,
                args.accumulate_dbias);
  }
}

}  // namespace zero::cuda
