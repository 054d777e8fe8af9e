#include "engine/comm/exchange.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/comm/ring.h"

namespace zero {
namespace {

// Elements of the hosts' sums that are summed at once, so that they stay in the
// cache.
constexpr int64_t kHostSumBytes = int64_t{256} << 10;

// Element `index` of what this rank receives in a segment.
char* Received(const PeerMemory& peers, size_t segment, int64_t index) {
  return static_cast<char*>(peers.own().segments[segment].recv) +
         index * static_cast<int64_t>(DTypeBytes(peers.own().dtype));
}

void AllGather(PeerMemory& peers, const Window& window) {
  const Collective& own = peers.own();
  const int world = peers.world();
  const int64_t piece = PieceElems(own, window.segment, world);
  // Every rank begins at a different rank's memory.
  for (int step = 0; step < world; ++step) {
    const int from = (peers.rank() + step) % world;
    peers.Copy(Received(peers, window.segment, from * piece + window.begin),
               peers.Sent(from, 0, window),
               window.elems * static_cast<int64_t>(DTypeBytes(own.dtype)));
  }
}

void ReduceScatter(PeerMemory& peers, const Window& window) {
  const Collective& own = peers.own();
  const Vector dst{Received(peers, window.segment, window.begin), own.dtype,
                   window.elems};
  if (peers.world() == 1 &&
      peers.Sent(0, /*piece=*/0, window).data == dst.data) {
    return;
  }
  peers.SumOfAll(peers.rank(), window, dst, own.accumulate);
}

void Reduce(PeerMemory& peers, const Window& window) {
  if (peers.rank() != peers.own().root) return;
  peers.SumOfAll(/*piece=*/0, window,
                 {Received(peers, window.segment, window.begin),
                  peers.own().dtype, window.elems});
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
  if (all_[rank] == nullptr) {
    const Block block = received_(rank, piece, window);
    return {rank, block.data, block.ranks};
  }
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

void PeerMemory::SumOfAll(int64_t piece, const Window& window,
                          const Vector& dst, bool accumulate) {
  std::vector<Source> sources;
  for (int rank = 0; rank < world(); rank += sources.back().ranks) {
    sources.push_back(Sent(rank, piece, window));
  }
  if (own().algorithm == BulkAlgorithm::kHierarchical) {
    SumByHosts(sources, dst, accumulate);
  } else {
    Sum(sources, own().dtype, dst, accumulate);
  }
}

// The sum is made piece by piece, since each host's sum needs memory.
void PeerMemory::SumByHosts(absl::Span<const Source> sources, const Vector& dst,
                            bool accumulate) {
  const DType dtype = own().dtype;
  const auto item = static_cast<int64_t>(DTypeBytes(dtype));
  const int num_hosts = hosts_.back() - hosts_.front() + 1;
  const int64_t most =
      std::max(kHostSumBytes / (num_hosts * item), int64_t{64});
  std::vector<char> sums(num_hosts * std::min(most, dst.size) * item);
  for (int64_t begin = 0; begin < dst.size; begin += most) {
    const int64_t elems = std::min(most, dst.size - begin);
    const auto from = [&](Source source) {
      source.data = static_cast<const char*>(source.data) + begin * item;
      return source;
    };
    std::vector<Source> of_hosts;
    for (size_t i = 0; i < sources.size();) {
      const int host = hosts_[sources[i].rank];
      std::vector<Source> of_ranks;
      for (; i < sources.size() && hosts_[sources[i].rank] == host; ++i) {
        of_ranks.push_back(from(sources[i]));
      }
      if (of_ranks.size() == 1) {
        of_hosts.push_back(of_ranks[0]);
        continue;
      }
      char* const sum = &sums[of_hosts.size() * elems * item];
      Sum(of_ranks, dtype, {sum, dtype, elems});
      of_hosts.push_back({rank_, sum});  // counted already
    }
    Sum(of_hosts, dtype,
        {static_cast<char*>(dst.data) +
             begin * static_cast<int64_t>(DTypeBytes(dst.dtype)),
         dst.dtype, elems},
        accumulate);
  }
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
                 absl::Span<const Collective* const> all,
                 absl::Span<const int> hosts, const MeetFn& meet) {
  PeerMemory peers(stream, rank, all, hosts);
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
