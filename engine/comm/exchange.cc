#include "engine/comm/exchange.h"

#include <vector>

namespace zero {
namespace {

using Collectives = absl::Span<const Collective* const>;
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

// Of the greater ones; a NaN stays, whichever rank has it.
void Max(Collectives all, double* out) {
  const auto sent = [](const Collective& one) {
    return static_cast<const double*>(one.segments[0].send);
  };
  for (int64_t i = 0; i < all[0]->segments[0].elems; ++i) {
    out[i] = sent(*all[0])[i];
    for (const Collective* one : all.subspan(1)) {
      const double other = sent(*one)[i];
      if (other > out[i] || other != other) out[i] = other;
    }
  }
}

// The few numbers of a device, by way of the host.
void MaxOfDevice(Stream& stream, Collectives all, void* out) {
  const size_t bytes = ResultBytes(*all[0]);
  std::vector<char> numbers((all.size() + 1) * bytes);
  std::vector<Collective> on_host;
  std::vector<const Collective*> pointers;
  on_host.reserve(all.size());
  for (const Collective* one : all) {
    char* const copy = numbers.data() + on_host.size() * bytes;
    stream.device().Copy(stream, copy, one->segments[0].send, bytes);
    on_host.push_back({.kind = one->kind});
    on_host.back().segments = {{copy, nullptr, one->segments[0].elems}};
    pointers.push_back(&on_host.back());
  }
  stream.Synchronize();
  char* const most = numbers.data() + all.size() * bytes;
  Max(pointers, reinterpret_cast<double*>(most));
  stream.device().Copy(stream, out, most, bytes);
  stream.Synchronize();
}

void AllReduce(Stream& stream, PeerMemory& peers, Collectives all,
               void* result) {
  const Collective& own = peers.own();
  if (own.op == ReduceOp::kSum) {
    peers.Sum(SentByAll(peers, 0, 0), own.dtype,
              {result, own.dtype, own.segments[0].elems});
  } else if (stream.device().asynchronous()) {
    MaxOfDevice(stream, all, result);
  } else {
    Max(all, static_cast<double*>(result));
  }
}

}  // namespace

int64_t ResultBytes(const Collective& collective) {
  if (collective.kind != CollectiveKind::kAllReduce) return 0;
  return collective.segments[0].elems *
         static_cast<int64_t>(DTypeBytes(collective.dtype));
}

int64_t Exchange(Stream& stream, int rank, Collectives all, const MeetFn& meet,
                 void* result) {
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
    case CollectiveKind::kAllReduce:
      AllReduce(stream, peers, all, result);
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
