#include "engine/comm/nccl/transfers.h"

#include <vector>

#include "kernels/check.h"
#include "kernels/ops.h"

namespace zero {
namespace {

int64_t Bytes(const Collective& collective, int64_t elems) {
  return elems * static_cast<int64_t>(DTypeBytes(collective.dtype));
}

const char* At(const void* base, int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* At(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

// NCCL rounds sums to the dtype at every hop.
bool IsNarrow(DType dtype) { return SumDType(dtype) != dtype; }

// Calls fn(segment, its part of the staging memory, if any) for each segment.
template <class Fn>
ncclResult_t ForEachSegment(const NcclPlace& place,
                            const Collective& collective, const Fn& fn) {
  char* staging = static_cast<char*>(collective.staging);
  for (const CollectiveSegment& segment : collective.segments) {
    if (segment.elems == 0) continue;
    const ncclResult_t result = fn(segment, staging);
    if (IsNcclError(result)) return result;
    if (staging == nullptr) continue;
    const bool narrow = IsNarrow(collective.dtype);
    staging += Bytes(collective, segment.elems) / (narrow ? 1 : place.world);
  }
  return ncclSuccess;
}

// Sends to every other rank its piece of `send`, of `bytes` each.
ncclResult_t Exchange(const NcclPlace& place, const void* send, void* recv,
                      int64_t bytes) {
  for (int step = 1; step < place.world; ++step) {
    // Each rank begins with a different peer.
    const int to = (place.rank + step) % place.world;
    const int from = (place.rank - step + place.world) % place.world;
    ncclResult_t result = ncclSend(At(send, to * bytes), bytes, ncclUint8, to,
                                   place.comm, place.stream);
    if (!IsNcclError(result)) {
      result = ncclRecv(At(recv, from * bytes), bytes, ncclUint8, from,
                        place.comm, place.stream);
    }
    if (IsNcclError(result)) return result;
  }
  return ncclSuccess;
}

// The calls of one segment; counts what they bring from other ranks.
ncclResult_t Transfer(const NcclPlace& place, const Collective& collective,
                      const CollectiveSegment& segment, char* staging) {
  const void* const send = segment.send;
  void* const recv = segment.recv;
  const int64_t elems = segment.elems, piece = elems / place.world;
  const int64_t bytes = Bytes(collective, elems);
  const int64_t others = place.world - 1, root = collective.root;
  const bool is_root = place.rank == root;
  const ncclDataType_t sum_type =
      collective.dtype == DType::kF64 ? ncclFloat64 : ncclFloat32;
  switch (collective.kind) {
    case CollectiveKind::kAllGather:
      *place.received_bytes += others * Bytes(collective, piece);
      return ncclAllGather(send, recv, Bytes(collective, piece), ncclUint8,
                           place.comm, place.stream);
    case CollectiveKind::kReduceScatter:
      *place.received_bytes += others * Bytes(collective, piece);
      if (IsNarrow(collective.dtype)) {
        return Exchange(place, send, staging, Bytes(collective, piece));
      }
      return ncclReduceScatter(send, collective.accumulate ? staging : recv,
                               piece, sum_type, ncclSum, place.comm,
                               place.stream);
    case CollectiveKind::kReduce:
      ZERO_CHECK(!IsNarrow(collective.dtype))
          << "nccl: reduce \"" << collective.name << "\" of "
          << collective.dtype << " would round at every hop; want fp32 or fp64";
      *place.received_bytes += is_root ? others * bytes : 0;
      return ncclReduce(send, recv, elems, sum_type, ncclSum, root, place.comm,
                        place.stream);
    case CollectiveKind::kBroadcast:
      *place.received_bytes += is_root ? 0 : bytes;
      return ncclBroadcast(send, recv, bytes, ncclUint8, root, place.comm,
                           place.stream);
    case CollectiveKind::kBarrier:
      break;  // has no segments
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t EnqueueTransfers(const NcclPlace& place,
                              const Collective& collective) {
  if (collective.kind == CollectiveKind::kBarrier) {
    return ncclAllReduce(place.scratch, place.scratch, 1, ncclUint8, ncclSum,
                         place.comm, place.stream);
  }
  return ForEachSegment(place, collective,
                        [&](const CollectiveSegment& segment, char* staging) {
                          return Transfer(place, collective, segment, staging);
                        });
}

void EnqueueSums(const NcclPlace& place, Stream& stream,
                 const Collective& collective) {
  if (collective.kind != CollectiveKind::kReduceScatter) return;
  const bool narrow = IsNarrow(collective.dtype);
  if (!narrow && !collective.accumulate) return;
  ForEachSegment(
      place, collective, [&](const CollectiveSegment& segment, char* staging) {
        const int64_t piece = segment.elems / place.world;
        const int64_t bytes = Bytes(collective, piece);
        std::vector<const void*> src(narrow ? place.world : 1, staging);
        for (int r = 0; narrow && r < place.world; ++r) {
          src[r] = At(r == place.rank ? segment.send : staging, r * bytes);
        }
        const Vector dst{segment.recv, collective.dtype, piece};
        stream.device().ops().SumRanks(
            stream, {src, collective.dtype, dst, collective.accumulate});
        return ncclSuccess;
      });
}

}  // namespace zero
