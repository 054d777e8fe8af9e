#include <algorithm>
#include <bit>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/cuda/sort.h"
#include "kernels/cuda/workspace.h"
#include "kernels/op_checks.h"
#include "kernels/runs.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// A matrix as a kernel takes it.
template <class T>
struct Table {
  T* data;
  int64_t ld;
  __device__ T* Row(int64_t row) const { return data + row * ld; }
};

template <class T, class Data>
Table<ConstAs<T, Data>> TableOf(const MatrixView<Data>& m) {
  return {static_cast<ConstAs<T, Data>*>(m.data), m.ld};
}

// Where element `at` of the whole table lies in `pieces` of it, laid end to
// end; -1 if it is in none of them.
__device__ inline int64_t PlaceIn(const TablePieces& pieces, int64_t at) {
  if (at < pieces.first || at >= pieces.last) return -1;
  at -= pieces.first;
  const int64_t lap = at / pieces.period;
  const int64_t place = at - lap * pieces.period - pieces.begin;
  return 0 <= place && place < pieces.elems ? lap * pieces.elems + place : -1;
}

// ---- Forward ---------------------------------------------------------------

// Reads a row of each table and writes one: 4 (6 with positions) bytes per
// 16-bit element. Goal: 85 % of copy bandwidth.
template <class T>
struct GatherPass {
  const int32_t* ids;    // null: 0, 1, ...
  int64_t first, count;  // the ids in the table
  Table<const T> table;
  const int32_t* position_ids;  // null: no positions
  Table<const T> positions;
  Table<T> out;

  template <bool kWhole>
  __device__ void Run(int64_t row, const Slice<kFlatElems>& slice) const {
    const int64_t id = ids == nullptr ? row : ids[row] - first;
    if (id < 0 || id >= count) return;
    auto x = Load<kWhole>(table.Row(id), slice);
    if (position_ids != nullptr) {
      const auto y = Load<kWhole>(positions.Row(position_ids[row]), slice);
#pragma unroll
      for (int k = 0; k < kFlatElems; ++k) {
        x.x[k] = FromFloat<T>(ToFloat(x.x[k]) + ToFloat(y.x[k]));
      }
    }
    Store<kWhole>(out.Row(row), slice, x);
  }
};

// The same from pieces of the table, -0 for what is not in them. Writes every
// element once, and reads those that are stored.
// REQUIRES: with kWhole, slices lie in one piece each.
template <class T>
struct GatherPiecesPass {
  const int32_t* ids;
  const T* table;
  TablePieces pieces;
  int64_t width;
  Table<T> out;

  template <bool kWhole>
  __device__ void Run(int64_t row, const Slice<kFlatElems>& slice) const {
    const int64_t at = ids[row] * width + slice.base;
    if constexpr (kWhole) {
      if (at < pieces.first || at >= pieces.last) return;
      const int64_t place = PlaceIn(pieces, at);
      auto x = Load<true>(table + (place - slice.base), slice.If(place >= 0));
      if (place < 0) {
#pragma unroll
        for (int k = 0; k < kFlatElems; ++k) x.x[k] = FromFloat<T>(-0.0f);
      }
      Store<true>(out.Row(row), slice, x);
    } else {
#pragma unroll
      for (int k = 0; k < kFlatElems; ++k) {
        if (!slice.Has(k) || at + k < pieces.first || at + k >= pieces.last) {
          continue;
        }
        const int64_t place = PlaceIn(pieces, at + k);
        out.Row(row)[slice.base + k] =
            place >= 0 ? table[place] : FromFloat<T>(-0.0f);
      }
    }
  }
};

// ---- Backward --------------------------------------------------------------

// Positions 0 .. M-1 are sorted by their id, stably, so that the rows of one id
// are neighbours in their old order: a run. One warp adds a run (for a chunk of
// columns per lane) to its row of the table, so that no two threads write one
// element. A run of more than kPartRows rows, as of a token that fills half a
// batch, is cut into parts of that size, whose sums are added in order.
constexpr int64_t kPartRows = kEmbeddingPartRows;

struct IdRuns {
  const int32_t* ids;    // [M], sorted
  const int32_t* order;  // [M]: the row of dout
  int64_t count;         // M
};

// The first k with ids[k] == ids[at].
__device__ inline int64_t BeginOfRun(const IdRuns& runs, int64_t at) {
  const int32_t id = runs.ids[at];
  int64_t low = 0;
  int64_t high = at;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (runs.ids[middle] < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether there is a position `other`, and it is of the same run as k.
__device__ inline bool HasSameId(const IdRuns& runs, int64_t k, int64_t other) {
  return 0 <= other && other < runs.count && runs.ids[k] == runs.ids[other];
}

// sum += a slice of rows order[begin], order[begin + 1], ... of the run, in
// that order, at most kPartRows of them. All lanes of a warp call it with the
// same `begin`.
template <bool kAligned, class T, int N>
__device__ inline void AddPart(const IdRuns& runs, const Table<const T>& dout,
                               int64_t begin, const Slice<N>& slice,
                               float (&sum)[N]) {
  constexpr int kBatch = 8;  // loads in flight
  const int32_t id = runs.ids[begin];
  const int lane = threadIdx.x % kWarpSize;
  for (int offset = 0; offset < kPartRows; offset += kWarpSize) {
    const int64_t k = begin + offset + lane;
    const bool inside = k < runs.count && runs.ids[k] == id;
    const int32_t own_row = inside ? runs.order[k] : 0;
    const int count = __popc(__ballot_sync(kWholeWarp, inside));
    for (int first = 0; first < count; first += kBatch) {
      Packed<T, N> x[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int64_t row = __shfl_sync(kWholeWarp, own_row, first + j);
        x[j] = Load<kAligned>(dout.Row(row), slice.If(first + j < count));
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j < count) {
#pragma unroll
          for (int i = 0; i < N; ++i) sum[i] += ToFloat(x[j].x[i]);
        }
      }
    }
    if (count < kWarpSize) break;
  }
}

// partials[t] = the sum of the part, not a run's first, that begins in
// positions [256 t, 256 t + 256); there is at most one, since the part before
// it has 256 rows. Only runs of more than 256 rows have such parts.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    LaterPartsKernel(const IdRuns runs, Table<const T> dout, int64_t width,
                     float* partials) {
  static_assert(kPartRows == kThreads);
  constexpr int kSize = Chunk<T>::kSize;
  SHARED_ARRAY(int, begin, 1);  // within the tile; -1: none
  if (threadIdx.x == 0) begin[0] = -1;
  __syncthreads();
  const int64_t tile = int64_t{blockIdx.x} * kPartRows;
  const int64_t k = tile + threadIdx.x;
  if (k < runs.count && HasSameId(runs, k, k - kPartRows) &&
      (k - BeginOfRun(runs, k)) % kPartRows == 0) {
    begin[0] = static_cast<int>(threadIdx.x);
  }
  __syncthreads();
  if (begin[0] < 0) return;
  // Each warp sums a stripe of columns.
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t first = int64_t{threadIdx.x} - lane; first * kSize < width;
       first += kThreads) {
    const auto slice = SliceOf<kSize>((first + lane) * kSize, width);
    float sum[kSize] = {};
    AddPart<kAligned>(runs, dout, tile + begin[0], slice, sum);
    float* const out = partials + blockIdx.x * width + slice.base;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (slice.Has(i)) out[i] = sum[i];
    }
  }
}

// Row ids[k] of the table += the run that begins at k, rounded once, by a warp
// per run and stripe of columns. Reads dout once, and reads and writes every
// row of the table that has an id. Goal: 80 % of copy bandwidth where ids
// differ.
template <class T, class TableT, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    AddRunsKernel(const IdRuns runs, Table<const T> dout, Table<TableT> dtable,
                  TablePieces pieces, int64_t width, const float* partials) {
  constexpr int kSize = Chunk<T>::kSize;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t k = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (k >= runs.count || HasSameId(runs, k, k - 1)) return;
  auto slice =
      SliceOf<kSize>((int64_t{blockIdx.y} * kWarpSize + lane) * kSize, width);
  // An aligned slice lies in one piece; otherwise a lane asks for each element.
  const bool cut = pieces.period != 0;
  const int64_t at = runs.ids[k] * width + slice.base;
  const int64_t place = cut ? PlaceIn(pieces, at) : 0;
  if (kAligned) slice = slice.If(place >= 0);
  TableT* const row =
      cut ? dtable.data + (place - slice.base) : dtable.Row(runs.ids[k]);
  Packed<TableT, kSize> grads;
  if (kAligned || !cut) {
    grads = Load<kAligned>(row, slice);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int64_t one = slice.Has(i) ? PlaceIn(pieces, at + i) : -1;
      grads.x[i] = one >= 0 ? dtable.data[one] : TableT{};
    }
  }
  float sum[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum[i] = ToFloat(grads.x[i]);
  AddPart<kAligned>(runs, dout, k, slice, sum);
  for (int64_t part = k + kPartRows; HasSameId(runs, k, part);
       part += kPartRows) {
    const float* const more = partials + part / kPartRows * width + slice.base;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (slice.Has(i)) sum[i] += more[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) grads.x[i] = FromFloat<TableT>(sum[i]);
  if (kAligned || !cut) {
    Store<kAligned>(row, slice, grads);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int64_t one = slice.Has(i) ? PlaceIn(pieces, at + i) : -1;
      if (one >= 0) dtable.data[one] = grads.x[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    CountUpKernel(int32_t* values, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) values[i] = static_cast<int32_t>(i);
}

template <class T>
T* At(const Workspace& workspace, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace.data) + offset);
}

IdRuns SortIds(cudaStream_t stream, const EmbeddingBackwardArgs& args,
               const EmbeddingLayout& layout, const Workspace& workspace) {
  const int64_t m = args.dout.rows;
  const auto last_id = static_cast<uint64_t>(args.dtable.rows - 1);
  const int id_bits = std::max(1, static_cast<int>(std::bit_width(last_id)));
  int32_t* const positions = At<int32_t>(workspace, layout.positions);
  int32_t* const ids = At<int32_t>(workspace, layout.sorted_ids);
  int32_t* const order = At<int32_t>(workspace, layout.order);
  Launch(CountUpKernel, NumBlocks(m, kThreads), kThreads, 0, stream, positions,
         m);
  SortPairs(stream, args.ids, positions, ids, order, m, id_bits,
            At<void>(workspace, layout.temp));
  return {ids, order, m};
}

template <class T, class TableT>
void AddRuns(cudaStream_t stream, const EmbeddingBackwardArgs& args,
             const IdRuns& runs, float* partials) {
  const ConstMatrix& dout = args.dout;
  const Matrix& dtable = args.dtable;
  const bool aligned = IsAligned(dout.data, dout.dtype, dout.ld, dout.cols) &&
                       IsAligned(dtable.data, dtable.dtype, dtable.ld);
  Launch(aligned ? LaterPartsKernel<T, true> : LaterPartsKernel<T, false>,
         NumBlocks(runs.count, kPartRows), kThreads, 0, stream, runs,
         TableOf<T>(dout), dout.cols, partials);
  const dim3 grid(NumBlocks(runs.count, kWarps),
                  NumBlocks(dout.cols, kWarpSize * Chunk<T>::kSize));
  Launch(aligned ? AddRunsKernel<T, TableT, true>
                 : AddRunsKernel<T, TableT, false>,
         grid, kThreads, 0, stream, runs, TableOf<T>(dout),
         TableOf<TableT>(dtable), args.pieces, dout.cols, partials);
}

}  // namespace

void CudaOps::EmbeddingForward(Stream& stream,
                               const EmbeddingForwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.out, args.table, args.position_table);
  CheckPieces(args);
  if (args.pieces.period != 0) {
    // Pieces begin at multiples of 64 elements.
    const bool whole_slices = args.out.cols % kFlatElems == 0 &&
                              IsAligned(args.table.data) &&
                              AreRowsAligned(args.out);
    ZERO_CUDA_WITH_FLOAT_TYPE(
        args.out.dtype, T,
        MapRows(HandleOf(stream), args.out.rows, args.out.cols, whole_slices,
                GatherPiecesPass<T>{
                    args.ids, static_cast<const T*>(args.table.data),
                    args.pieces, args.out.cols, TableOf<T>(args.out)}));
    return;
  }
  const bool aligned = AreRowsAligned(args.table) && AreRowsAligned(args.out) &&
                       AreRowsAligned(args.position_table);
  ZERO_CUDA_WITH_FLOAT_TYPE(
      args.out.dtype, T,
      MapRows(HandleOf(stream), args.out.rows, args.out.cols, aligned,
              GatherPass<T>{args.ids, args.first, args.table.rows,
                            TableOf<T>(args.table), args.position_ids,
                            TableOf<T>(args.position_table),
                            TableOf<T>(args.out)}));
}

void CudaOps::EmbeddingBackward(Stream& stream,
                                const EmbeddingBackwardArgs& args,
                                Workspace workspace) {
  const Matrix& dtable = args.dtable;
  ZERO_CHECK(dtable.dtype == DType::kF32 || dtable.dtype == args.dout.dtype)
      << "EmbeddingBackward: dout " << args.dout.dtype << " -> "
      << dtable.dtype;
  CheckPieces(args);
  const cudaStream_t handle = HandleOf(stream);
  if (!args.accumulate) Zero(*this, stream, dtable);
  if (args.dout.rows == 0) return;
  const EmbeddingLayout layout(args);
  const IdRuns runs = SortIds(handle, args, layout, workspace);
  float* const partials = At<float>(workspace, layout.partials);
  ZERO_CUDA_WITH_FLOAT_TYPE(args.dout.dtype, T, {
    if (dtable.dtype == DType::kF32) {
      AddRuns<T, float>(handle, args, runs, partials);
    } else {
      AddRuns<T, T>(handle, args, runs, partials);
    }
  });
}

}  // namespace zero::cuda
