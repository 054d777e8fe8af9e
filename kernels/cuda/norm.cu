#include <utility>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/slices.cuh"
#include "kernels/cuda/workspace.h"
#include "kernels/op_checks.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

// ---- Groups ----------------------------------------------------------------
//
// A group of threads works on one row, in chunks: chunk c of lane l begins at
// column (c * size + l) * 8 (16-bit) or * 4 (fp32). Rows of whole aligned
// chunks are held in registers, kValues elements per thread. A row of up to
// kNarrowRow elements has 16 lanes, and eight such rows share a block; a wider
// one has a block, of as many warps as it needs, or, forward and up to 1024
// elements, a warp.
//
// Other rows are AnyRow: a block reads its row again for every pass over it and
// keeps its sums over rows in the workspace. In the engine the width alone
// decides, since arenas, and parameters in them, begin at multiples of 128
// bytes. At unaligned addresses rows of more than kNarrowRow elements keep
// their bits; narrower rows do not.

template <int kLanesOfRow, int kValuesOfThread>
struct Group {
  static constexpr bool kIsBlock = kLanesOfRow == 0;
  static constexpr int kValues = kValuesOfThread;
  static constexpr int kMaxThreads = kIsBlock ? kMaxRowThreads : 128;
  static constexpr int kRows = kIsBlock ? 1 : 128 / kLanesOfRow;  // of a block
  static constexpr int kMaxWarps = kMaxThreads / kWarpSize;
  // The least number of blocks of backward that a multiprocessor must hold.
  static constexpr int MinBlocks() {
    if constexpr (kValues == 0) {
      return 1;
    } else {
      return kRowThreads * 8 / kValues / kMaxThreads;
    }
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
using AnyRow = Group<0, 0>;

// Calls fn(Group<>, threads of a block) with the group of a row. Forward has
// few threads with much work each: they wait for one another twice a row.
template <class Fn>
void WithForwardGroup(int64_t width, bool aligned, const Fn& fn) {
  const bool is_warp = width <= 1024;
  const unsigned threads = is_warp ? kWarpSize : ThreadsOfRow(width, 32);
  if (!aligned) return fn(AnyRow(), threads);
  if (width <= kNarrowRow) return fn(Group<16, 8>(), 128u);
  if (is_warp) return fn(Group<kWarpSize, 32>(), 128u);
  fn(Group<0, 32>(), threads);
}
// The same for backward, which keeps two sums of each element: more than 16
// elements do not fit the registers of a thread.
template <class Fn>
void WithBackwardGroup(int64_t width, bool aligned, const Fn& fn) {
  const RowThreads block = BackwardThreads(width);
  if (!aligned || block.values > 16) return fn(AnyRow(), block.threads);
  if (width <= kNarrowRow) return fn(Group<16, 8>(), 128u);
  if (block.values == 8) return fn(Group<0, 8>(), block.threads);
  fn(Group<0, 16>(), block.threads);
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

bool AreAligned(const ConstRows& rows) {
  return IsAligned(rows.data, rows.dtype, rows.stride, rows.width);
}

// Chunk c of a thread's part of a row.
template <int N, bool kWhole>
struct ChunkPlace {
  int c;
  Slice<N> slice;

  template <class T>
  __device__ Packed<T, N> LoadFrom(const T* row, bool exists = true) const {
    return Load<kWhole>(row, slice.If(exists));
  }
  template <class T>
  __device__ void StoreTo(T* row, const Packed<T, N>& chunk,
                          bool exists = true) const {
    Store<kWhole>(row, slice.If(exists), chunk);
  }
};

// Calls fn(ChunkPlace<>) for every chunk of this thread's part of a row.
template <class T, class G, class Fn>
__device__ inline void ForEachChunk(int width, bool aligned, const Fn& fn) {
  constexpr int kSize = Chunk<T>::kSize;
  const auto slice_of = [&](int c) {
    return SliceOf<kSize>((c * G::size() + G::lane()) * kSize, width);
  };
  if constexpr (G::kValues > 0) {
#pragma unroll
    for (int c = 0; c < G::kValues / kSize; ++c) {
      fn(ChunkPlace<kSize, true>{c, slice_of(c)});
    }
  } else {
    for (int c = 0; !slice_of(c).IsEmpty(); ++c) {
      const auto slice = slice_of(c);
      if (aligned && slice.IsWhole()) {
        fn(ChunkPlace<kSize, true>{c, slice});
      } else {
        fn(ChunkPlace<kSize, false>{c, slice});
      }
    }
  }
}

// A thread's part of a row, loaded at once.
template <class T, class G>
struct Part {
  Chunk<T> chunks[G::kValues / Chunk<T>::kSize];

  __device__ Part(const T* row, int width) {
    ForEachChunk<T, G>(
        width, true, [&](const auto& at) { chunks[at.c] = at.LoadFrom(row); });
  }
  template <class Place>
  __device__ Chunk<T> At(const Place& at) const {
    return chunks[at.c];
  }
  template <class Place>
  __device__ void Set(const Place& at, const Chunk<T>& chunk) {
    chunks[at.c] = chunk;
  }
  __device__ void MoveTo(const T*) {}
};
// The same, read from memory whenever it is needed.
template <class T>
struct Part<T, AnyRow> {
  const T* row;
  bool exists;

  __device__ Part(const T* row, int width) : row(row), exists(width > 0) {}
  template <class Place>
  __device__ Chunk<T> At(const Place& at) const {
    return at.LoadFrom(row, exists);
  }
  template <class Place>
  __device__ void Set(const Place&, const Chunk<T>&) {}
  __device__ void MoveTo(const T* other) { row = other; }
};

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
__device__ inline Chunk<T> AddChunks(Chunk<T> x, const Chunk<T>& residual) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    x.x[i] = FromFloat<T>(ToFloat(x.x[i]) + ToFloat(residual.x[i]));
  }
  return x;
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
// The sum of squares of a slice's elements minus the mean. The zeros beyond it
// are not at the mean.
template <class T, int N>
__device__ inline float ChunkSquares(const Packed<T, N>& x, float mean,
                                     const Slice<N>& slice) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float d = slice.Has(i) ? ToFloat(x.x[i]) - mean : 0.0f;
    sum = fmaf(d, d, sum);
  }
  return sum;
}

// A group per row. From registers it moves 4 bytes per 16-bit element, 8 with a
// residual.
template <class T, class G>
__global__ void __launch_bounds__(G::kMaxThreads)
    NormForwardKernel(const NormForwardArgs p, bool aligned) {
  SHARED_ARRAY(float2, scratch, 2 * G::kMaxWarps);
  const uint32_t row = blockIdx.x * G::kRows + G::index();
  const RowPlace place = PlaceOf(p.x, row);
  const bool active = row < NumRows(p.x);
  // A group without a row has one of no columns, and takes part in shuffles.
  const int width = active ? static_cast<int>(p.x.width) : 0;
  const float count = static_cast<float>(static_cast<int>(p.x.width));
  const T* const weights = static_cast<const T*>(p.weight.data);
  const T* const biases = static_cast<const T*>(p.bias.data);
  const auto for_each = [&](const auto& fn) {
    ForEachChunk<T, G>(width, aligned, fn);
  };

  Part<T, G> x(RowOf<T>(p.x, place), width);
  if (p.residual.data != nullptr) {
    const Part<T, G> residual(RowOf<T>(p.residual, place), width);
    T* const sum = RowOf<T>(p.sum, place);
    for_each([&](const auto& at) {
      const Chunk<T> chunk = AddChunks(x.At(at), residual.At(at));
      at.StoreTo(sum, chunk);
      x.Set(at, chunk);
    });
    x.MoveTo(sum);
  }
  float2 sum = make_float2(0, 0);
  float mean = 0;
  if (IsCentered(p)) {
    for_each([&](const auto& at) { sum.x += ChunkSum(x.At(at)); });
    mean = GroupSum<G>(sum, scratch).x / count;
  }
  float2 squares = make_float2(0, 0);
  for_each([&](const auto& at) {
    squares.x += ChunkSquares(x.At(at), mean, at.slice);
  });
  const float variance = GroupSum<G>(squares, scratch + G::kMaxWarps).x / count;
  const float rstd = 1.0f / sqrtf(variance + p.eps);

  T* const y = RowOf<T>(p.y, place);
  for_each([&](const auto& at) {
    const bool has_bias = biases != nullptr;
    at.StoreTo(y, Normalize(x.At(at), mean, rstd, at.LoadFrom(weights),
                            at.LoadFrom(biases, has_bias), has_bias));
  });
  if (active && G::lane() == 0) StoreStatistics(p, row, mean, rstd);
}

// ---- Backward --------------------------------------------------------------

// The sums over rows, a part for each block.
struct Partials {
  uint32_t rows_per_block;
  float* dweight = nullptr;  // [blocks, width]; null: frozen
  float* dbias = nullptr;    // [blocks, width]; null: none

  // This block's row of one of them.
  __device__ static float* RowOf(float* sums, int width) {
    return sums == nullptr ? nullptr : sums + int64_t{blockIdx.x} * width;
  }
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

// The sums over a block's rows of this thread's elements, in registers.
template <class T, class G>
struct RowSums {
  static constexpr int kSize = Chunk<T>::kSize;
  float dweight[G::kValues] = {};
  float dbias[G::kValues] = {};

  __device__ RowSums(const Partials&, int) {}
  // Calls add(dweight, dbias) with the sums of a chunk.
  template <class Place, class Add>
  __device__ void Update(const Place& at, bool, const Add& add) {
    add(dweight + at.c * kSize, dbias + at.c * kSize);
  }
  // `shared` has room for one group; every thread of the block calls it.
  __device__ void Write(const Partials& partials, float* shared, int width) {
    Write(dweight, shared, Partials::RowOf(partials.dweight, width), width);
    Write(dbias, shared, Partials::RowOf(partials.dbias, width), width);
  }
  // Adds the groups' values in order.
  __device__ static void Write(const float (&values)[G::kValues], float* shared,
                               float* sums, int width) {
    if (sums == nullptr) return;
    for (int turn = 0; turn < G::kRows; ++turn) {
      if (static_cast<int>(G::index()) == turn) {
#pragma unroll
        for (int v = 0; v < G::kValues; ++v) {
          const int slot = v * G::size() + G::lane();
          const int column =
              (v / kSize * G::size() + G::lane()) * kSize + v % kSize;
          const float sum = turn == 0 ? values[v] : shared[slot] + values[v];
          if (turn + 1 < G::kRows) {
            shared[slot] = sum;
          } else if (column < width) {
            sums[column] = sum;
          }
        }
      }
      __syncthreads();
    }
  }
};
// The same in the workspace, where there are none before the `first` row.
template <class T>
struct RowSums<T, AnyRow> {
  float* dweight;
  float* dbias;

  __device__ RowSums(const Partials& partials, int width)
      : dweight(Partials::RowOf(partials.dweight, width)),
        dbias(Partials::RowOf(partials.dbias, width)) {}
  template <class Place, class Add>
  __device__ void Update(const Place& at, bool first, const Add& add) {
    auto w = at.LoadFrom(dweight, dweight != nullptr && !first);
    auto b = at.LoadFrom(dbias, dbias != nullptr && !first);
    add(w.x, b.x);
    at.StoreTo(dweight, w, dweight != nullptr);
    at.StoreTo(dbias, b, dbias != nullptr);
  }
  __device__ void Write(const Partials&, float*, int) {}
};

// A group per row at a time. From registers it moves dy, x and dx once (6 bytes
// per 16-bit element, 8 with dsum) and 16 bytes of partial sums per column and
// block; all loads of a row are issued together.
template <class T, class G>
__global__ void __launch_bounds__(G::kMaxThreads, G::MinBlocks())
    NormBackwardKernel(const NormBackwardArgs p, bool aligned,
                       const Partials partials) {
  SHARED_ARRAY(float2, scratch, 2 * G::kMaxWarps);
  SHARED_ARRAY(float, shared, G::kRows > 1 ? kNarrowRow : 1);
  const T* const weights = static_cast<const T*>(p.weight.data);
  const uint32_t begin = blockIdx.x * partials.rows_per_block;
  const uint32_t end = min(begin + partials.rows_per_block, NumRows(p.dy));
  RowSums<T, G> row_sums(partials, static_cast<int>(p.dy.width));
  int parity = 0;
  for (uint32_t first = begin; first < end; first += G::kRows) {
    const uint32_t row = first + G::index();
    const RowPlace place = PlaceOf(p.dy, row);
    const bool active = row < end;
    const int width = active ? static_cast<int>(p.dy.width) : 0;
    const RowScale scale = ScaleOf(p, active ? row : begin);
    const Part<T, G> dy(RowOf<T>(p.dy, place), width);
    const Part<T, G> x(RowOf<T>(p.sum, place), width);
    const Part<T, G> residual(RowOf<T>(p.dsum, place),
                              p.dsum.data != nullptr ? width : 0);
    float2 sums = make_float2(0, 0);
    ForEachChunk<T, G>(width, aligned, [&](const auto& at) {
      row_sums.Update(at, row == begin, [&](float* dweight, float* dbias) {
        AddChunkGrads(dy.At(at), x.At(at), at.LoadFrom(weights), scale, sums,
                      dweight, dbias);
      });
    });
    const float2 means =
        MeansOf(p, GroupSum<G>(sums, scratch + parity * G::kMaxWarps));
    parity ^= 1;
    T* const dx = RowOf<T>(p.dx, place);
    ForEachChunk<T, G>(width, aligned, [&](const auto& at) {
      at.StoreTo(dx, InputGrads(dy.At(at), x.At(at), at.LoadFrom(weights),
                                residual.At(at), scale, means));
    });
  }
  row_sums.Write(partials, shared, static_cast<int>(p.dy.width));
}

// ---- Host ------------------------------------------------------------------

void CheckRows(const ConstRows& rows) {
  ZERO_CHECK_LT(rows.outer * rows.inner, int64_t{1} << 32) << "rows of a norm";
}

template <class T>
void LaunchForward(cudaStream_t stream, const NormForwardArgs& args) {
  const bool aligned = AreAligned(args.x) && AreAligned(args.residual) &&
                       AreAligned(args.sum) && AreAligned(args.y) &&
                       IsAligned(args.weight.data) && IsAligned(args.bias.data);
  WithForwardGroup(args.x.width, aligned, [&]<class G>(G, unsigned threads) {
    Launch(NormForwardKernel<T, G>, NumBlocks(NumRows(args.x), G::kRows),
           threads, 0, stream, args, aligned);
  });
}

template <class T>
void LaunchBackward(cudaStream_t stream, const NormBackwardArgs& args,
                    unsigned num_blocks, const Partials& partials) {
  const bool aligned = AreAligned(args.dy) && AreAligned(args.sum) &&
                       AreAligned(args.dsum) && AreAligned(args.dx) &&
                       IsAligned(args.weight.data);
  WithBackwardGroup(args.dy.width, aligned, [&]<class G>(G, unsigned threads) {
    Launch(NormBackwardKernel<T, G>, num_blocks, threads, 0, stream, args,
           aligned, partials);
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
