// Bulk collectives as rings: world - 1 steps, and in each a rank reads the
// memory of its left neighbour, rank - 1, alone: what a network of links
// between neighbours can do. `direct` (exchange.h) reads everybody's at once.
#ifndef ZERO_ENGINE_COMM_RING_H_
#define ZERO_ENGINE_COMM_RING_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/types/span.h"
#include "engine/comm/communicator.h"

namespace zero {

// Waits until all ranks of the collective have come as far.
using MeetFn = std::function<void()>;

// Copies on `stream`, within the work of a collective: at once on the CPU,
// whose streams are in that work.
void CopyOn(Stream& stream, void* dst, const void* src, size_t bytes);

// Element `index` of what a segment sends.
const char* Sent(const Collective& collective, size_t segment, int64_t index);

// The share of `rank` in the reduce-scatter of `all`, one per rank and fitting
// together; world > 1. The sum of rank r's piece begins at rank r + 1 and goes
// around to r, which rounds it: in that order, in fp32 (float64 for float64),
// resting in each rank's staging memory on its way.
void RingReduceScatter(Stream& stream, int rank,
                       absl::Span<const Collective* const> all,
                       const MeetFn& meet);

// Likewise the all-gather: pieces go around in the ranks' recv.
void RingAllGather(Stream& stream, int rank,
                   absl::Span<const Collective* const> all, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_RING_H_
