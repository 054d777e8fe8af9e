#include "engine/comm/exchange.h"

#include <cstring>
#include <vector>

#include "engine/comm/ring.h"

namespace zero {
namespace {

using Sources = std::vector<PeerMemory::Source>;

// Element `index` of what every rank sends in a segment, in rank order.
Sources SentByAll(const PeerMemory& peers, size_t segment, int64_t index) {
  Sources sources;
  for (int rank = 0; rank < peers.world(); ++rank) {
    sources.push_back(peers.Sent(rank, segment, index));
  }
  return sources;
}

void AllGather(PeerMemory& peers) {
  const Collective& own = peers.own();
  const int world = peers.world();
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const int64_t bytes = own.segments[i].elems / world *
                          static_cast<int64_t>(DTypeBytes(own.dtype));
    char* const recv = static_cast<char*>(own.segments[i].recv);
    // Every rank begins at another one's memory.
    for (int step = 0; step < world; ++step) {
      const int from = (peers.rank() + step) % world;
      peers.Copy(recv + from * bytes, peers.Sent(from, i, 0), bytes);
    }
  }
}

void ReduceScatter(PeerMemory& peers) {
  const Collective& own = peers.own();
  for (size_t i = 0; i < own.segments.size(); ++i) {
    const int64_t piece = own.segments[i].elems / peers.world();
    const Sources src = SentByAll(peers, i, peers.rank() * piece);
    const Vector dst{own.segments[i].recv, own.dtype, piece};
    if (peers.world() == 1 && src[0].data == dst.data) continue;
    peers.Sum(src, own.dtype, dst, own.accumulate);
  }
}

void Reduce(PeerMemory& peers) {
  const Collective& own = peers.own();
  if (peers.rank() != own.root) return;
  for (size_t i = 0; i < own.segments.size(); ++i) {
    peers.Sum(SentByAll(peers, i, 0), own.dtype,
              {own.segments[i].recv, own.dtype, own.segments[i].elems});
  }
}

void Broadcast(PeerMemory& peers) {
  const Collective& own = peers.own();
  for (size_t i = 0; i < own.segments.size(); ++i) {
    peers.Copy(
        own.segments[i].recv, peers.Sent(own.root, i, 0),
        own.segments[i].elems * static_cast<int64_t>(DTypeBytes(own.dtype)));
  }
}

}  // namespace

PeerMemory::Source PeerMemory::Sent(int rank, size_t segment,
                                    int64_t index) const {
  const auto item = static_cast<int64_t>(DTypeBytes(of(rank).dtype));
  return {rank, static_cast<const char*>(of(rank).segments[segment].send) +
                    index * item};
}

void PeerMemory::Copy(void* dst, Source src, int64_t bytes) {
  if (bytes == 0 || dst == src.data) return;
  if (stream_.device().asynchronous()) {
    stream_.device().Copy(stream_, dst, src.data, bytes);
  } else {
    std::memcpy(dst, src.data, bytes);
  }
  Count(src, bytes);
}

void PeerMemory::Sum(absl::Span<const Source> src, DType dtype,
                     const Vector& dst, bool accumulate) {
  if (dst.size == 0) return;
  std::vector<const void*> parts;
  for (const Source& one : src) {
    parts.push_back(one.data);
    Count(one, dst.size * static_cast<int64_t>(DTypeBytes(dtype)));
  }
  stream_.device().ops().SumRanks(stream_, {parts, dtype, dst, accumulate});
}

int64_t Exchange(Stream& stream, int rank,
                 absl::Span<const Collective* const> all, const MeetFn& meet) {
  PeerMemory peers(stream, rank, all);
  const bool ring =
      all[rank]->algorithm == BulkAlgorithm::kRing && all.size() > 1;
  switch (all[rank]->kind) {
    case CollectiveKind::kAllGather:
      ring ? RingAllGather(peers, meet) : AllGather(peers);
      break;
    case CollectiveKind::kReduceScatter:
      ring ? RingReduceScatter(peers, meet) : ReduceScatter(peers);
      break;
    case CollectiveKind::kReduce:
      Reduce(peers);
      break;
    case CollectiveKind::kBroadcast:
      Broadcast(peers);
      break;
    case CollectiveKind::kBarrier:
      break;
  }
  return peers.read_bytes();
}

}  // namespace zero
