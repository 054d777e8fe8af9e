#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/op_checks.h"
#include "kernels/runs.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

// Calls fn(place, begin, end) for the stored parts of columns [begin, end) of
// row `id` of a table with `cols` columns: column c of them lies at element
// place + c of the pieces.
template <class Fn>
void ForEachPiece(const TablePieces& pieces, int64_t cols, int64_t id,
                  int64_t begin, int64_t end, const Fn& fn) {
  const int64_t row = id * cols - pieces.first;
  const int64_t row_end = std::min(row + end, pieces.last - pieces.first);
  for (int64_t at = std::max<int64_t>(row + begin, 0); at < row_end;) {
    const int64_t lap = at / pieces.period;
    const int64_t piece = lap * pieces.period + pieces.begin;
    const int64_t first = std::max(at, piece);
    const int64_t last = std::min(row_end, piece + pieces.elems);
    if (first < last) {
      fn(lap * pieces.elems + row - piece, first - row, last - row);
    }
    at = (lap + 1) * pieces.period;
  }
}

template <class T>
T NegativeZero() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return -0.0f;
  } else {
    return std::bit_cast<T>(uint16_t{0x8000});
  }
}

// One row of `out` from pieces of the table.
template <class T>
void GatherPieces(const EmbeddingForwardArgs& args, int64_t id, T* out) {
  const TablePieces& pieces = args.pieces;
  const int64_t width = args.out.cols, row = id * width;
  const int64_t begin = std::max<int64_t>(pieces.first - row, 0);
  const int64_t end = std::min(pieces.last - row, width);
  if (begin >= end) return;
  std::fill(out + begin, out + end, NegativeZero<T>());
  ForEachPiece(pieces, width, id, begin, end,
               [&](int64_t place, int64_t first, int64_t last) {
                 const T* const table = static_cast<const T*>(args.table.data);
                 std::copy(table + (place + first), table + (place + last),
                           out + first);
               });
}

template <class T>
void GatherRows(const EmbeddingForwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.out.cols;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = args.ids == nullptr ? row : args.ids[row] - args.first;
    if (id < 0 || id >= args.table.rows) continue;
    T* out = static_cast<T*>(args.out.data) + row * args.out.ld;
    if (args.pieces.period != 0) {
      GatherPieces(args, id, out);
      continue;
    }
    const T* token =
        static_cast<const T*>(args.table.data) + id * args.table.ld;
    if (args.position_ids == nullptr) {
      std::memcpy(out, token, static_cast<size_t>(width) * sizeof(T));
      continue;
    }
    const T* position = static_cast<const T*>(args.position_table.data) +
                        args.position_ids[row] * args.position_table.ld;
    AddSpans(token, position, out, 0, width);
  }
}

void EmbeddingForwardRange(const EmbeddingForwardArgs& args, int64_t begin,
                           int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.out.dtype, T, GatherRows<T>(args, begin, end));
}

// Calls fn(row, begin, end) for the stored parts of columns [begin, end) of a
// row of dtable: row[begin .. end).
template <class T, class Fn>
void ForEachPart(const EmbeddingBackwardArgs& args, int64_t id, int64_t begin,
                 int64_t end, const Fn& fn) {
  T* const table = static_cast<T*>(args.dtable.data);
  if (args.pieces.period == 0) {
    return fn(table + id * args.dtable.ld, begin, end);
  }
  ForEachPiece(args.pieces, args.dtable.cols, id, begin, end,
               [&](int64_t place, int64_t first, int64_t last) {
                 fn(table + place, first, last);
               });
}

// fp32 tables: columns [begin, end) of every row of dout, in order of i.
template <class T>
void ScatterColumns(const EmbeddingBackwardArgs& args, int64_t begin,
                    int64_t end) {
  const T* dout = static_cast<const T*>(args.dout.data);
  for (int64_t i = 0; i < args.dout.rows; ++i) {
    ForEachPart<float>(args, args.ids[i], begin, end,
                       [&](float* row, int64_t first, int64_t last) {
                         AddSpans(row, dout + i * args.dout.ld, row, first,
                                  last);
                       });
  }
}

void ScatterRange(const EmbeddingBackwardArgs& args, int64_t begin,
                  int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.dout.dtype, T,
                           ScatterColumns<T>(args, begin, end));
}

// 16-bit tables: the rows of one id, order[first..last), are summed in fp32 in
// order of i and rounded into the table once.
template <class T>
void ScatterSortedColumns(const EmbeddingBackwardArgs& args,
                          const uint64_t* order, int64_t count, int64_t begin,
                          int64_t end) {
  constexpr int64_t kColumns = 256;
  HWY_ALIGN float sums[kColumns];
  const T* dout = static_cast<const T*>(args.dout.data);
  for (int64_t first = 0; first < count;) {
    const uint64_t id = order[first] >> 32;
    int64_t last = first;
    while (last < count && order[last] >> 32 == id) ++last;
    const auto add = [&](T* row, int64_t from, int64_t to) {
      for (int64_t column = from; column < to; column += kColumns) {
        const int64_t n = std::min(kColumns, to - column);
        std::fill_n(sums, n, 0.0f);
        AddSpans(sums, row + column, sums, 0, n);
        for (int64_t k = first; k < last; ++k) {
          const int64_t i = static_cast<uint32_t>(order[k]);
          AddSpans(sums, dout + i * args.dout.ld + column, sums, 0, n);
        }
        ConvertSpan(sums, row + column, 0, n);
      }
    };
    ForEachPart<T>(args, static_cast<int64_t>(id), begin, end, add);
    first = last;
  }
}

void ScatterSortedRange(const EmbeddingBackwardArgs& args,
                        const uint64_t* order, int64_t count, int64_t begin,
                        int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      args.dout.dtype, T,
      ScatterSortedColumns<T>(args, order, count, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(EmbeddingForwardRange);
HWY_EXPORT(ScatterRange);
HWY_EXPORT(ScatterSortedRange);

void CpuOps::EmbeddingForward(Stream&, const EmbeddingForwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.out, args.table, args.position_table);
  CheckPieces(args);
  // Pieces are read beside computation, whose threads are busy.
  const int threads = args.pieces.period == 0 ? num_threads_ : 1;
  ParallelRanges(threads, args.out.rows, RowGrain(args.out.cols),
                 HWY_DYNAMIC_DISPATCH(EmbeddingForwardRange), args);
}

namespace {

// Threads split the columns, so that each row of the table has its sums in
// order of i for any ids; 16 columns are a cache line of fp32.
constexpr int64_t kColumnGrain = 16;

// (id, i) pairs sorted on the stack, this many rows of dout at a time.
constexpr int64_t kSortedRows = 4096;

}  // namespace

size_t CpuOps::EmbeddingBackwardWorkspaceBytes(
    const EmbeddingBackwardArgs&) const {
  return 0;
}

void CpuOps::EmbeddingBackward(Stream& stream,
                               const EmbeddingBackwardArgs& args, Workspace) {
  ZERO_CHECK(args.dtable.dtype == DType::kF32 ||
             args.dtable.dtype == args.dout.dtype)
      << "EmbeddingBackward: dout " << args.dout.dtype << " -> "
      << args.dtable.dtype;
  CheckPieces(args);
  if (!args.accumulate) Zero(*this, stream, args.dtable);
  if (args.dtable.dtype == DType::kF32) {
    ParallelRanges(num_threads_, args.dtable.cols, kColumnGrain,
                   HWY_DYNAMIC_DISPATCH(ScatterRange), args);
    return;
  }
  uint64_t order[kSortedRows];
  for (int64_t row = 0; row < args.dout.rows; row += kSortedRows) {
    const int64_t count = std::min(kSortedRows, args.dout.rows - row);
    for (int64_t k = 0; k < count; ++k) {
      order[k] = static_cast<uint64_t>(args.ids[row + k]) << 32 |
                 static_cast<uint64_t>(row + k);
    }
    std::sort(order, order + count);
    ParallelRanges(num_threads_, args.dtable.cols, kColumnGrain,
                   HWY_DYNAMIC_DISPATCH(ScatterSortedRange), args, order,
                   count);
  }
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
