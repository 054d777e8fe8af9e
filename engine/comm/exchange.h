// The data movement of a collective over memory that all ranks reach: that of
// the host, or of GPUs.
#ifndef ZERO_ENGINE_COMM_EXCHANGE_H_
#define ZERO_ENGINE_COMM_EXCHANGE_H_

#include <cstdint>

#include "absl/types/span.h"
#include "engine/comm/communicator.h"
#include "engine/comm/ring.h"

namespace zero {

// Does the share of `rank` in the collectives `all`, one per rank and fitting
// together: reads every rank's memory and writes its own, on `stream`. What it
// writes no other rank reads in the same collective, so the ranks may do their
// shares at once; nobody may change its memory before all have done theirs.
// Only a ring waits: it calls `meet` between its steps. On a GPU nothing blocks
// the host.
// Returns the bytes that it has read from other ranks' memory.
int64_t Exchange(Stream& stream, int rank,
                 absl::Span<const Collective* const> all, const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_EXCHANGE_H_
