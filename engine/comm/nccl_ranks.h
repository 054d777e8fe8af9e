// Ranks that NCCL connects: a GPU and communicators for each, as threads of
// one process or one in each of several processes.
#ifndef ZERO_ENGINE_COMM_NCCL_RANKS_H_
#define ZERO_ENGINE_COMM_NCCL_RANKS_H_

#include <functional>

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// As RunLocalRanks, by NCCL. Of options.local the timeout counts.
absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device,
                          const std::function<absl::Status(const Rank&)>& body);

// The rank of this process, with those of the others that `launch` is about:
// runs `body` once, on a thread of its own, and returns when all ranks have
// done theirs. Where one fails, or its process dies, all return an error.
// options.on_hang is called where this rank does not come back within the
// timeout after another one failed.
absl::Status RunNcclProcess(
    const Launch& launch, const LocalRanksOptions& options,
    const MakeDeviceFn& make_device,
    const std::function<absl::Status(const Rank&)>& body);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_RANKS_H_
