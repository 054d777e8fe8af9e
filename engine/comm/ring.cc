#include "engine/comm/ring.h"

#include <cstring>

#include "kernels/ops.h"

namespace zero {
namespace {

using Collectives = absl::Span<const Collective* const>;

const Collective& LeftOf(int rank, Collectives all) {
  return *all[(rank == 0 ? all.size() : rank) - 1];
}

// The piece, of all, that reaches `rank` in `step`, having left its neighbour.
int64_t PieceAt(int rank, int step, int world) {
  return (rank - step + world) % world;
}

// Element `index` of the running sums that a rank left in `step`: a neighbour
// reads them in the next step, so two sets take turns.
char* Staged(const Collective& collective, int step, int64_t index) {
  const int64_t set = collective.staging_bytes / 2;
  return static_cast<char*>(collective.staging) + step % 2 * set +
         index * static_cast<int64_t>(DTypeBytes(SumDType(collective.dtype)));
}

}  // namespace

void CopyOn(Stream& stream, void* dst, const void* src, size_t bytes) {
  if (stream.device().asynchronous()) {
    stream.device().Copy(stream, dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

const char* Sent(const Collective& collective, size_t segment, int64_t index) {
  return static_cast<const char*>(collective.segments[segment].send) +
         index * static_cast<int64_t>(DTypeBytes(collective.dtype));
}

void RingReduceScatter(Stream& stream, int rank, Collectives all,
                       const MeetFn& meet) {
  const Collective& own = *all[rank];
  const Collective& left = LeftOf(rank, all);
  const int world = static_cast<int>(all.size());
  const DType sum_dtype = SumDType(own.dtype);
  Ops& ops = stream.device().ops();
  for (int step = 1; step < world; ++step) {
    if (step > 1) meet();
    // A sum begins one rank behind its owner.
    const int64_t index = PieceAt(rank, step + 1, world);
    const bool first = step == 1, last = step == world - 1;
    int64_t staged = 0;
    for (size_t i = 0; i < own.segments.size(); ++i) {
      const int64_t piece = own.segments[i].elems / world;
      if (piece == 0) continue;
      const void* sum[] = {
          first ? Sent(left, i, index * piece) : Staged(left, step - 1, staged),
          Sent(own, i, index * piece)};
      DType dtype = own.dtype;
      if (!first && dtype != sum_dtype) {
        const Vector wide{Staged(own, step, staged), sum_dtype, piece};
        ops.SumRanks(stream, {absl::MakeSpan(sum + 1, 1), dtype, wide});
        sum[1] = wide.data;
        dtype = sum_dtype;
      }
      const Vector dst =
          last ? Vector{own.segments[i].recv, own.dtype, piece}
               : Vector{Staged(own, step, staged), sum_dtype, piece};
      ops.SumRanks(stream, {sum, dtype, dst, last && own.accumulate});
      staged += piece;
    }
  }
}

void RingAllGather(Stream& stream, int rank, Collectives all,
                   const MeetFn& meet) {
  const Collective& own = *all[rank];
  const Collective& left = LeftOf(rank, all);
  const int world = static_cast<int>(all.size());
  // Step 0 is the own piece; the neighbour's is read where it sends it from.
  for (int step = 0; step < world; ++step) {
    if (step > 1) meet();
    const int64_t index = PieceAt(rank, step, world);
    for (size_t i = 0; i < own.segments.size(); ++i) {
      const size_t bytes =
          own.segments[i].elems / world * DTypeBytes(own.dtype);
      if (bytes == 0) continue;
      const auto received = [&](const Collective& collective) {
        return static_cast<char*>(collective.segments[i].recv) + index * bytes;
      };
      const char* const src = step == 0   ? Sent(own, i, 0)
                              : step == 1 ? Sent(left, i, 0)
                                          : received(left);
      char* const dst = received(own);
      if (dst != src) CopyOn(stream, dst, src, bytes);
    }
  }
}

}  // namespace zero
