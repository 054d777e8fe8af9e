// Bulk collectives as rings: world - 1 steps, and in each a rank reads the
// memory of its left neighbour, rank - 1, alone: what a network of links
// between neighbours can do. `direct` (exchange.h) reads everybody's at once.
#ifndef ZERO_ENGINE_COMM_RING_H_
#define ZERO_ENGINE_COMM_RING_H_

#include "engine/comm/exchange.h"

namespace zero {

// One rank's share in a reduce-scatter; world > 1. The sum of rank r's piece
// begins at rank r + 1 and goes around to r, which rounds it: in that order, in
// SumDType, staying in each rank's staging memory on its way.
void RingReduceScatter(PeerMemory& peers, const MeetFn& meet);

// Likewise the all-gather: pieces go around in the ranks' recv.
void RingAllGather(PeerMemory& peers, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RING_H_
