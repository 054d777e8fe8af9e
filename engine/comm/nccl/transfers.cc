#include "engine/comm/nccl/transfers.h"

#include <vector>

#include "kernels/check.h"
#include "kernels/ops.h"

namespace zero {
namespace {

// Of what NCCL sums.
ncclDataType_t TypeOf(const Collective& collective) {
  return collective.dtype == DType::kF64 ? ncclFloat64 : ncclFloat32;
}

int64_t Bytes(const Collective& collective, int64_t elems) {
  return elems * static_cast<int64_t>(DTypeBytes(collective.dtype));
}

const char* At(const void* base, int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* At(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

void Count(const NcclPlace& place, int64_t received_bytes) {
  *place.received_bytes += received_bytes;
}

// NCCL rounds sums to the dtype at every hop.
bool IsNarrow(DType dtype) { return SumDType(dtype) != dtype; }

// All ranks' numbers on every rank, which adds them up in rank order.
bool GathersToSum(const NcclPlace& place, const Collective& collective) {
  return collective.op == ReduceOp::kSum &&
         place.world * Bytes(collective, collective.segments[0].elems) <=
             int64_t{kNcclScratchBytes};
}

// fn(segment, its index of a piece, offset of its first byte in staging memory
// that has `copies` of each piece).
template <class Fn>
ncclResult_t ForEachSegment(const Collective& collective, int64_t world,
                            int64_t copies, const Fn& fn) {
  int64_t staged = 0;
  for (const CollectiveSegment& segment : collective.segments) {
    if (segment.elems == 0) continue;
    const int64_t piece = segment.elems / world;
    const ncclResult_t result = fn(segment, piece, staged);
    if (IsNcclError(result)) return result;
    staged += copies * Bytes(collective, piece);
  }
  return ncclSuccess;
}

ncclResult_t Exchange(const NcclPlace& place, const void* send, void* recv,
                      int64_t bytes) {
  for (int step = 1; step < place.world; ++step) {
    // Every rank begins at another one.
    const int to = (place.rank + step) % place.world;
    const int from = (place.rank - step + place.world) % place.world;
    ncclResult_t result = ncclSend(At(send, to * bytes), bytes, ncclUint8, to,
                                   place.comm, place.stream);
    if (!IsNcclError(result)) {
      result = ncclRecv(At(recv, from * bytes), bytes, ncclUint8, from,
                        place.comm, place.stream);
    }
    if (IsNcclError(result)) return result;
    Count(place, bytes);
  }
  return ncclSuccess;
}

ncclResult_t ReduceScatter(const NcclPlace& place,
                           const Collective& collective) {
  const bool narrow = IsNarrow(collective.dtype);
  return ForEachSegment(
      collective, place.world, narrow ? place.world : 1,
      [&](const CollectiveSegment& segment, int64_t piece, int64_t staged) {
        char* const staging = At(collective.staging, staged);
        if (narrow) {
          return Exchange(place, segment.send, staging,
                          Bytes(collective, piece));
        }
        Count(place, (place.world - 1) * Bytes(collective, piece));
        return ncclReduceScatter(
            segment.send, collective.accumulate ? staging : segment.recv, piece,
            TypeOf(collective), ncclSum, place.comm, place.stream);
      });
}

void SumPieces(const NcclPlace& place, Stream& stream,
               const Collective& collective) {
  const bool narrow = IsNarrow(collective.dtype);
  if (!narrow && !collective.accumulate) return;
  std::vector<const void*> src;
  ForEachSegment(
      collective, place.world, narrow ? place.world : 1,
      [&](const CollectiveSegment& segment, int64_t piece, int64_t staged) {
        const char* const staging = At(collective.staging, staged);
        const int64_t bytes = Bytes(collective, piece);
        src = {staging};
        if (narrow) {
          src.resize(place.world);
          for (int r = 0; r < place.world; ++r) {
            src[r] = At(r == place.rank ? segment.send : staging, r * bytes);
          }
        }
        stream.device().ops().SumRanks(stream,
                                       {src,
                                        collective.dtype,
                                        {segment.recv, collective.dtype, piece},
                                        collective.accumulate});
        return ncclSuccess;
      });
}

ncclResult_t AllReduce(const NcclPlace& place, const Collective& collective) {
  const CollectiveSegment& all = collective.segments[0];
  if (all.elems == 0) return ncclSuccess;
  if (GathersToSum(place, collective)) {
    return ncclAllGather(all.send, place.scratch, Bytes(collective, all.elems),
                         ncclUint8, place.comm, place.stream);
  }
  return ncclAllReduce(all.send, all.recv, all.elems, TypeOf(collective),
                       collective.op == ReduceOp::kMax ? ncclMax : ncclSum,
                       place.comm, place.stream);
}

void SumNumbers(const NcclPlace& place, Stream& stream,
                const Collective& collective) {
  const CollectiveSegment& all = collective.segments[0];
  if (all.elems == 0 || !GathersToSum(place, collective)) return;
  std::vector<const void*> src;
  for (int r = 0; r < place.world; ++r) {
    src.push_back(At(place.scratch, r * Bytes(collective, all.elems)));
  }
  stream.device().ops().SumRanks(
      stream, {src, collective.dtype, {all.recv, collective.dtype, all.elems}});
}

ncclResult_t Reduce(const NcclPlace& place, const Collective& collective) {
  ZERO_CHECK(!IsNarrow(collective.dtype))
      << "nccl: reduce \"" << collective.name << "\" of " << collective.dtype
      << " would round at every hop; want fp32 or fp64";
  return ForEachSegment(
      collective, 1, 0,
      [&](const CollectiveSegment& segment, int64_t, int64_t) {
        const int64_t bytes = Bytes(collective, segment.elems);
        if (place.rank == collective.root) {
          Count(place, (place.world - 1) * bytes);
        }
        return ncclReduce(segment.send, segment.recv, segment.elems,
                          TypeOf(collective), ncclSum, collective.root,
                          place.comm, place.stream);
      });
}

ncclResult_t AllGather(const NcclPlace& place, const Collective& collective) {
  return ForEachSegment(
      collective, place.world, 0,
      [&](const CollectiveSegment& segment, int64_t piece, int64_t) {
        const int64_t bytes = Bytes(collective, piece);
        Count(place, (place.world - 1) * bytes);
        return ncclAllGather(segment.send, segment.recv, bytes, ncclUint8,
                             place.comm, place.stream);
      });
}

ncclResult_t Broadcast(const NcclPlace& place, const Collective& collective) {
  return ForEachSegment(
      collective, 1, 0,
      [&](const CollectiveSegment& segment, int64_t elems, int64_t) {
        const int64_t bytes = Bytes(collective, elems);
        if (place.rank != collective.root) Count(place, bytes);
        return ncclBroadcast(segment.send, segment.recv, bytes, ncclUint8,
                             collective.root, place.comm, place.stream);
      });
}

}  // namespace

ncclResult_t EnqueueTransfers(const NcclPlace& place,
                              const Collective& collective) {
  switch (collective.kind) {
    case CollectiveKind::kReduceScatter:
      return ReduceScatter(place, collective);
    case CollectiveKind::kAllReduce:
      return AllReduce(place, collective);
    case CollectiveKind::kReduce:
      return Reduce(place, collective);
    case CollectiveKind::kAllGather:
      return AllGather(place, collective);
    case CollectiveKind::kBroadcast:
      return Broadcast(place, collective);
    case CollectiveKind::kBarrier:
      return ncclAllReduce(place.scratch, place.scratch, 1, ncclUint8, ncclSum,
                           place.comm, place.stream);
  }
  return ncclSuccess;
}

void EnqueueSums(const NcclPlace& place, Stream& stream,
                 const Collective& collective) {
  if (collective.kind == CollectiveKind::kReduceScatter) {
    SumPieces(place, stream, collective);
  } else if (collective.kind == CollectiveKind::kAllReduce) {
    SumNumbers(place, stream, collective);
  }
}

}  // namespace zero
