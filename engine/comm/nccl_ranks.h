// Ranks that NCCL connects: a GPU and communicators for each, as threads of
// one process or one in each of several processes.
#ifndef ZERO_ENGINE_COMM_NCCL_RANKS_H_
#define ZERO_ENGINE_COMM_NCCL_RANKS_H_

#include <functional>

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// As RunLocalRanks, by NCCL. Of options.local the timeout counts. The error is
// that of the lowest rank that came back, as a summary of the run has it.
absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device,
                          const std::function<absl::Status(const Rank&)>& body);

// The rank of this process, with those of the others that `launch` is about:
// runs `body` once, on a thread of its own, and returns when all ranks have
// done theirs. Where one fails, or its process dies, all return an error.
// options.on_hang is called where this rank does not come back within the
// timeout after another one failed, or is the one for which that waited.
// Errors: besides those of ranks: InvalidArgument where this process has
//         another of options.alike than rank 0's, or is of another world;
//         Cancelled where options.patience ends before all ranks are connected.
absl::Status RunNcclProcess(
    const Launch& launch, const LocalRanksOptions& options,
    const MakeDeviceFn& make_device,
    const std::function<absl::Status(const Rank&)>& body);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_RANKS_H_
