#include "engine/comm/exchange.h"

#include <cstring>
#include <vector>

#include "engine/comm/ring.h"

namespace zero {
namespace {

// What every rank sends of a piece, in rank order.
std::vector<PeerMemory::Source> SentByAll(const PeerMemory& peers,
                                          int64_t piece, const Window& window) {
  std::vector<PeerMemory::Source> sources;
  for (int rank = 0; rank < peers.world(); ++rank) {
    sources.push_back(peers.Sent(rank, piece, window));
  }
  return sources;
}

// Element `index` of what this rank receives in a segment.
char* Received(const PeerMemory& peers, size_t segment, int64_t index) {
  return static_cast<char*>(peers.own().segments[segment].recv) +
         index * static_cast<int64_t>(DTypeBytes(peers.own().dtype));
}

void AllGather(PeerMemory& peers, const Window& window) {
  const Collective& own = peers.own();
  const int world = peers.world();
  const int64_t piece = PieceElems(own, window.segment, world);
  // Every rank begins at another one's memory.
  for (int step = 0; step < world; ++step) {
    const int from = (peers.rank() + step) % world;
    peers.Copy(Received(peers, window.segment, from * piece + window.begin),
               peers.Sent(from, 0, window),
               window.elems * static_cast<int64_t>(DTypeBytes(own.dtype)));
  }
}

void ReduceScatter(PeerMemory& peers, const Window& window) {
  const Collective& own = peers.own();
  const auto src = SentByAll(peers, peers.rank(), window);
  const Vector dst{Received(peers, window.segment, window.begin), own.dtype,
                   window.elems};
  if (peers.world() == 1 && src[0].data == dst.data) return;
  peers.Sum(src, own.dtype, dst, own.accumulate);
}

void Reduce(PeerMemory& peers, const Window& window) {
  if (peers.rank() != peers.own().root) return;
  peers.Sum(SentByAll(peers, 0, window), peers.own().dtype,
            {Received(peers, window.segment, window.begin), peers.own().dtype,
             window.elems});
}

void Broadcast(PeerMemory& peers, const Window& window) {
  peers.Copy(
      Received(peers, window.segment, window.begin),
      peers.Sent(peers.own().root, 0, window),
      window.elems * static_cast<int64_t>(DTypeBytes(peers.own().dtype)));
}

}  // namespace

int64_t PieceElems(const Collective& collective, size_t segment, int world) {
  const bool pieces = collective.kind == CollectiveKind::kAllGather ||
                      collective.kind == CollectiveKind::kReduceScatter;
  return collective.segments[segment].elems / (pieces ? world : 1);
}

std::vector<Window> WholePieces(const Collective& collective, int world) {
  std::vector<Window> windows;
  int64_t before = 0;
  for (size_t i = 0; i < collective.segments.size(); ++i) {
    const int64_t elems = PieceElems(collective, i, world);
    windows.push_back({i, 0, elems, before});
    before += elems;
  }
  return windows;
}

PeerMemory::Source PeerMemory::Sent(int rank, size_t segment,
                                    int64_t index) const {
  const auto item = static_cast<int64_t>(DTypeBytes(of(rank).dtype));
  return {rank, static_cast<const char*>(of(rank).segments[segment].send) +
                    index * item};
}

PeerMemory::Source PeerMemory::Sent(int rank, int64_t piece,
                                    const Window& window) const {
  if (all_[rank] == nullptr) return {rank, received_(rank, piece, window)};
  const int64_t elems = PieceElems(of(rank), window.segment, world());
  return Sent(rank, window.segment, piece * elems + window.begin);
}

void PeerMemory::Copy(void* dst, Source src, int64_t bytes) {
  Count(src, bytes);
  if (bytes == 0 || dst == src.data) return;
  if (stream_.device().asynchronous()) {
    stream_.device().Copy(stream_, dst, src.data, bytes);
  } else {
    std::memcpy(dst, src.data, bytes);
  }
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

void DoShare(PeerMemory& peers, absl::Span<const Window> windows) {
  for (const Window& window : windows) {
    switch (peers.own().kind) {
      case CollectiveKind::kAllGather:
        AllGather(peers, window);
        break;
      case CollectiveKind::kReduceScatter:
        ReduceScatter(peers, window);
        break;
      case CollectiveKind::kReduce:
        Reduce(peers, window);
        break;
      case CollectiveKind::kBroadcast:
        Broadcast(peers, window);
        break;
      case CollectiveKind::kBarrier:
        break;
    }
  }
}

int64_t Exchange(Stream& stream, int rank,
                 absl::Span<const Collective* const> all, const MeetFn& meet) {
  PeerMemory peers(stream, rank, all);
  const Collective& own = peers.own();
  if (own.algorithm == BulkAlgorithm::kRing && peers.world() > 1) {
    own.kind == CollectiveKind::kAllGather ? RingAllGather(peers, meet)
                                           : RingReduceScatter(peers, meet);
  } else {
    DoShare(peers, WholePieces(own, peers.world()));
  }
  return peers.read_bytes();
}

}  // namespace zero
