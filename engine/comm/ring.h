// Bulk collectives as rings. In each of world - 1 steps a rank reads only the
// memory of its left neighbour, rank - 1, as if only neighbours had links.
// `direct` (exchange.h) reads all ranks' memory at once.
#ifndef ZERO_ENGINE_COMM_RING_H_
#define ZERO_ENGINE_COMM_RING_H_

#include "engine/comm/exchange.h"

namespace zero {

// One rank's share of a reduce-scatter; world > 1. The sum of rank r's piece
// begins at rank r + 1 and goes around to r, which rounds it. It is added up in
// that order, in SumDType, in each rank's staging memory.
void RingReduceScatter(PeerMemory& peers, const MeetFn& meet);

// The same for the all-gather: pieces go around in the ranks' recv.
void RingAllGather(PeerMemory& peers, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RING_H_
