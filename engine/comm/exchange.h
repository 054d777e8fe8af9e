// The data movement of a collective over shared memory.
#ifndef ZERO_ENGINE_COMM_EXCHANGE_H_
#define ZERO_ENGINE_COMM_EXCHANGE_H_

#include <vector>

#include "absl/types/span.h"
#include "engine/comm/communicator.h"
#include "engine/comm/ring.h"

namespace zero {

// Does the share of `rank` in the collectives `all`, one per rank and fitting
// together: reads every rank's memory and writes its own. What it writes no
// other rank reads in the same collective, so the ranks may do their shares at
// once; nobody may change its memory before all have done theirs.
// The exception is all-reduce, whose ranks read what they are to overwrite:
// its result is returned, and is to be copied to recv after that.
// A ring takes several steps and calls `meet` between two of them, nothing else
// waits.
std::vector<char> Exchange(Stream& stream, int rank,
                           absl::Span<const Collective* const> all,
                           const MeetFn& meet);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_EXCHANGE_H_
