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
// A group of threads has a row, kValues elements of it per thread, in chunks:
// chunk c of lane l begins at column (c * size + l) * 8 (16-bit) or * 4 (fp32).
// Up to kNarrowRow elements are a row of 16 lanes, and eight such rows share a
// block; wider ones have a block each, of as many warps as they need. Forward,
// up to 1024 elements are the row of a warp.

template <int kLanesOfRow, int kValuesOfThread>
struct Group {
  static constexpr bool kIsBlock = kLanesOfRow == 0;
  static constexpr int kValues = kValuesOfThread;
  static constexpr int kMaxThreads = kIsBlock ? kMaxRowThreads : 128;
  static constexpr int kRows = kIsBlock ? 1 : 128 / kLanesOfRow;  // of a block
  static constexpr int kMaxWarps = kMaxThreads / kWarpSize;
  // The blocks of backward that a multiprocessor holds at least.
  static constexpr int MinBlocks() {
    return kRowThreads * 8 / kValues / kMaxThreads;
  }

  __device__ static int size() {
    return kIsBlock ? static_cast<int>(blockDim.x) : kLanesOfRow;
  }
  __device__ static int lane() {
    const int thread = static_cast<int>(threadIdx.x);
    return kIsBlock ? thread : thread % kLanesOfRow;
  }
  // The index, within the block, of the row that this thread works on.
  __device__ static uint32_t index() {
    return kIsBlock ? 0 : threadIdx.x / kLanesOfRow;
  }
};

// Calls fn(Group<>, threads of a block) with the group of a row. Forward, a few
// threads with much work each are the fastest: they wait for one another twice
// a row.
template <class Fn>
void WithForwardGroup(int64_t width, const Fn& fn) {
  if (width <= kNarrowRow) return fn(Group<16, 8>(), 128u);
  if (width <= 1024) return fn(Group<kWarpSize, 32>(), 128u);
  fn(Group<0, 32>(), ThreadsOfRow(width, 32));
}
// The same for backward, which keeps two sums of each element. Calls wide()
// where 32 elements do not fit the registers of a thread.
template <class Fn, class Wide>
void WithBackwardGroup(int64_t width, const Fn& fn, const Wide& wide) {
  if (width <= kNarrowRow) return fn(Group<16, 8>(), 128u);
  const RowThreads block = BackwardThreads(width);
  if (block.values == 8) return fn(Group<0, 8>(), block.threads);
  if (block.values == 16) return fn(Group<0, 16>(), block.threads);
  wide();
}

// The place of a row in all operands of a norm, which have the same outer and
// inner rows: one division finds it.
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
  return (c * G::size() + G::lane()) * Chunk<T>::kSize;
}

// A thread's part of a row.
template <class T, class G>
struct Part {
  static constexpr int kChunks = G::kValues / Chunk<T>::kSize;
  Chunk<T> x[kChunks];
};

template <class G, bool kAligned, class T>
__device__ inline void LoadRow(const T* row, int width, Part<T, G>& part) {
#pragma unroll
  for (int c = 0; c < Part<T, G>::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    part.x[c] = LoadPart<kAligned>(row + column, width - column);
  }
}
template <class G, bool kAligned, class T>
__device__ inline void StoreRow(T* row, int width, const Part<T, G>& part) {
#pragma unroll
  for (int c = 0; c < Part<T, G>::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    StorePart<kAligned>(row + column, part.x[c], width - column);
  }
}

// The sums over the group, in each of its threads, by a fixed tree. Calls that
// follow one another alternate between two arrays of `scratch`, so that one
// barrier each is enough.
template <class G>
__device__ inline float2 GroupSum(float2 value, float2* scratch) {
  const int lanes = G::kIsBlock ? kWarpSize : G::size();
#pragma unroll
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(kWholeWarp, value.x, offset);
    value.y += __shfl_xor_sync(kWholeWarp, value.y, offset);
  }
  if constexpr (G::kIsBlock) {
    if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < G::size() / kWarpSize; ++warp) {
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
// The sum of squares of the first n elements minus the mean. Elements beyond
// are not at the mean.
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
// 4 bytes per 16-bit element, 8 with a residual, at 89 to 96 % of an H200's
// copy bandwidth.
template <class T, class G, bool kAligned>
__global__ void __launch_bounds__(G::kMaxThreads)
    NormForwardKernel(const NormForwardArgs p) {
  SHARED_ARRAY(float2, scratch, 2 * G::kMaxWarps);
  const uint32_t row = blockIdx.x * G::kRows + G::index();
  const RowPlace at = PlaceOf(p.x, row);
  const bool active = row < NumRows(p.x);
  // A group without a row has one of no columns, and takes part in shuffles.
  const int width = active ? static_cast<int>(p.x.width) : 0;
  const float count = static_cast<float>(static_cast<int>(p.x.width));
  const T* const weights = static_cast<const T*>(p.weight.data);
  const T* const biases = static_cast<const T*>(p.bias.data);

  Part<T, G> x;
  LoadRow<G, kAligned>(RowOf<T>(p.x, at), width, x);
  if (p.residual.data != nullptr) {
    Part<T, G> residual;
    LoadRow<G, kAligned>(RowOf<T>(p.residual, at), width, residual);
#pragma unroll
    for (int c = 0; c < Part<T, G>::kChunks; ++c)
      AddChunk(x.x[c], residual.x[c]);
    StoreRow<G, kAligned>(RowOf<T>(p.sum, at), width, x);
  }
  float2 sum = make_float2(0, 0);
  float mean = 0;
  if (IsCentered(p)) {
#pragma unroll
    for (int c = 0; c < Part<T, G>::kChunks; ++c) sum.x += ChunkSum(x.x[c]);
    mean = GroupSum<G>(sum, scratch).x / count;
  }
  float2 squares = make_float2(0, 0);
#pragma unroll
  for (int c = 0; c < Part<T, G>::kChunks; ++c) {
    squares.x += ChunkSquares(x.x[c], mean, width - ColumnOf<T, G>(c));
  }
  const float variance = GroupSum<G>(squares, scratch + G::kMaxWarps).x / count;
  const float rstd = 1.0f / sqrtf(variance + p.eps);

  T* const y = RowOf<T>(p.y, at);
#pragma unroll
  for (int c = 0; c < Part<T, G>::kChunks; ++c) {
    const int column = ColumnOf<T, G>(c);
    const int n = width - column;
    const bool has_bias = biases != nullptr;
    const Chunk<T> weight = LoadPart<kAligned>(weights + column, n);
    const Chunk<T> bias = LoadPart<kAligned>(biases + column, has_bias ? n : 0);
    StorePart<kAligned>(
        y + column, Normalize(x.x[c], mean, rstd, weight, bias, has_bias), n);
  }
  if (active && G::lane() == 0) StoreStatistics(p, row, mean, rstd);
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
template <class T, class G>
__device__ inline void WritePartials(const float (&values)[G::kValues],
                                     float* shared, float* partials,
                                     int width) {
  for (int turn = 0; turn < G::kRows; ++turn) {
    if (static_cast<int>(G::index()) == turn) {
#pragma unroll
      for (int v = 0; v < G::kValues; ++v) {
        const int slot = v * G::size() + G::lane();
        const int column =
            ColumnOf<T, G>(v / Chunk<T>::kSize) + v % Chunk<T>::kSize;
        const float sum = turn == 0 ? values[v] : shared[slot] + values[v];
        if (turn + 1 < G::kRows) {
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
// 8 with dsum) and 16 bytes of partial sums per column and block. All loads of
// a row are issued together. Reaches 63 to 75 % of an H200's copy bandwidth.
template <class T, class G, bool kAligned>
__global__ void __launch_bounds__(G::kMaxThreads, kAligned ? G::MinBlocks() : 1)
    NormBackwardKernel(const NormBackwardArgs p, const Partials partials) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kChunks = Part<T, G>::kChunks;
  SHARED_ARRAY(float2, scratch, 2 * G::kMaxWarps);
  SHARED_ARRAY(float, shared, G::kRows > 1 ? kNarrowRow : 1);
  float dweight[G::kValues] = {};
  float dbias[G::kValues] = {};
  const T* const weights = static_cast<const T*>(p.weight.data);
  const uint32_t begin = blockIdx.x * partials.rows_per_block;
  const uint32_t end = min(begin + partials.rows_per_block, NumRows(p.dy));
  int parity = 0;
  for (uint32_t first = begin; first < end; first += G::kRows) {
    const uint32_t row = first + G::index();
    const RowPlace at = PlaceOf(p.dy, row);
    const bool active = row < end;
    const int width = active ? static_cast<int>(p.dy.width) : 0;
    const RowScale scale = ScaleOf(p, active ? row : begin);
    Part<T, G> dy;
    Part<T, G> x;
    Part<T, G> residual;
    LoadRow<G, kAligned>(RowOf<T>(p.dy, at), width, dy);
    LoadRow<G, kAligned>(RowOf<T>(p.sum, at), width, x);
    LoadRow<G, kAligned>(RowOf<T>(p.dsum, at),
                         p.dsum.data != nullptr ? width : 0, residual);
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = ColumnOf<T, G>(c);
      const Chunk<T> weight =
          LoadPart<kAligned>(weights + column, width - column);
      AddChunkGrads(dy.x[c], x.x[c], weight, scale, sums, dweight + c * kSize,
                    dbias + c * kSize);
    }
    const float2 means =
        MeansOf(p, GroupSum<G>(sums, scratch + parity * G::kMaxWarps));
    parity ^= 1;
    T* const dx = RowOf<T>(p.dx, at);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = ColumnOf<T, G>(c);
      const int n = width - column;
      const Chunk<T> weight = LoadPart<kAligned>(weights + column, n);
      StorePart<kAligned>(
          dx + column,
          InputGrads(dy.x[c], x.x[c], weight, residual.x[c], scale, means), n);
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

// A block per row of more than 8192 elements, which is read twice; the partial
// sums are kept in the workspace, each element by its own thread.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kMaxRowThreads)
    WideNormBackwardKernel(const NormBackwardArgs p, const Partials partials) {
  constexpr int kSize = Chunk<T>::kSize;
  constexpr int kStep = kMaxRowThreads * kSize;
  SHARED_ARRAY(float, scratch, kMaxRowThreads / kWarpSize);
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
    const float g = BlockReduce<Plus, kMaxRowThreads>(sums.x, scratch);
    const float gx = BlockReduce<Plus, kMaxRowThreads>(sums.y, scratch);
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
  WithForwardGroup(args.x.width, [&]<class G>(G, unsigned threads) {
    Launch(aligned ? NormForwardKernel<T, G, true>
                   : NormForwardKernel<T, G, false>,
           NumBlocks(NumRows(args.x), G::kRows), threads, 0, stream, args);
  });
}

template <class T>
void LaunchBackward(cudaStream_t stream, const NormBackwardArgs& args,
                    unsigned num_blocks, const Partials& partials) {
  const bool aligned = IsAligned<T>(args.dy) && IsAligned<T>(args.sum) &&
                       IsAligned<T>(args.dsum) && IsAligned<T>(args.dx) &&
                       IsChunkAligned(args.weight.data);
  WithBackwardGroup(
      args.dy.width,
      [&]<class G>(G, unsigned threads) {
        Launch(aligned ? NormBackwardKernel<T, G, true>
                       : NormBackwardKernel<T, G, false>,
               num_blocks, threads, 0, stream, args, partials);
      },
      [&] {
        Launch(aligned ? WideNormBackwardKernel<T, true>
                       : WideNormBackwardKernel<T, false>,
               num_blocks, kMaxRowThreads, 0, stream, args, partials);
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
