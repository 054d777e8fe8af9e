#include "engine/comm/ring.h"

namespace zero {
namespace {

int LeftOf(const PeerMemory& peers) {
  return (peers.rank() + peers.world() - 1) % peers.world();
}

// The number of the piece that reaches this rank from its neighbour in `step`.
int64_t PieceAt(const PeerMemory& peers, int step) {
  return (peers.rank() - step + peers.world()) % peers.world();
}

// Element `index` of the running sums that a rank left in `step`: a neighbour
// reads them in the next step, so two sets take turns.
char* Staged(const Collective& collective, int step, int64_t index) {
  const int64_t set = collective.staging_bytes / 2;
  return static_cast<char*>(collective.staging) + step % 2 * set +
         index * static_cast<int64_t>(DTypeBytes(SumDType(collective.dtype)));
}

}  // namespace

void RingReduceScatter(PeerMemory& peers, const MeetFn& meet) {
  const Collective& own = peers.own();
  const int rank = peers.rank(), left = LeftOf(peers), world = peers.world();
  const DType sum_dtype = SumDType(own.dtype);
  for (int step = 1; step < world; ++step) {
    if (step > 1) meet();
    // A sum begins one rank after its owner.
    const int64_t index = PieceAt(peers, step + 1);
    const bool first = step == 1, last = step == world - 1;
    int64_t staged = 0;
    for (size_t i = 0; i < own.segments.size(); ++i) {
      const int64_t piece = own.segments[i].elems / world;
      PeerMemory::Source sum[] = {peers.Sent(left, i, index * piece),
                                  peers.Sent(rank, i, index * piece)};
      DType dtype = own.dtype;
      if (!first) sum[0].data = Staged(peers.of(left), step - 1, staged);
      if (!first && dtype != sum_dtype) {
        const Vector wide{Staged(own, step, staged), sum_dtype, piece};
        peers.Sum({sum + 1, 1}, dtype, wide);
        sum[1].data = wide.data;
        dtype = sum_dtype;
      }
      const Vector dst =
          last ? Vector{own.segments[i].recv, own.dtype, piece}
               : Vector{Staged(own, step, staged), sum_dtype, piece};
      peers.Sum(sum, dtype, dst, last && own.accumulate);
      staged += piece;
    }
  }
}

void RingAllGather(PeerMemory& peers, const MeetFn& meet) {
  const Collective& own = peers.own();
  const int rank = peers.rank(), left = LeftOf(peers), world = peers.world();
  // Step 0 is the rank's own piece; the neighbour's is read from its send
  // memory.
  for (int step = 0; step < world; ++step) {
    if (step > 1) meet();
    const int64_t index = PieceAt(peers, step);
    for (size_t i = 0; i < own.segments.size(); ++i) {
      const int64_t bytes = own.segments[i].elems / world *
                            static_cast<int64_t>(DTypeBytes(own.dtype));
      const auto received = [&](const Collective& collective) {
        return static_cast<char*>(collective.segments[i].recv) + index * bytes;
      };
      PeerMemory::Source src = peers.Sent(step == 0 ? rank : left, i, 0);
      if (step > 1) src.data = received(peers.of(left));
      peers.Copy(received(own), src, bytes);
    }
  }
}

}  // namespace zero
