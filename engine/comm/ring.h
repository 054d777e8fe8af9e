// Bulk collectives as rings: world - 1 steps, and in each a rank reads only the
// memory of its left neighbour, rank - 1: as on a network of links between
// neighbours. `direct` (exchange.h) reads all ranks' at once.
#ifndef ZERO_ENGINE_COMM_RING_H_
#define ZERO_ENGINE_COMM_RING_H_

#include "engine/comm/exchange.h"

namespace zero {

// One rank's share of a reduce-scatter; world > 1. The sum of rank r's piece
// begins at rank r + 1 and goes around to r, which rounds it: in that order, in
// SumDType, through each rank's staging memory.
void RingReduceScatter(PeerMemory& peers, const MeetFn& meet);

// Likewise the all-gather: pieces go around in the ranks' recv.
void RingAllGather(PeerMemory& peers, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RING_H_
