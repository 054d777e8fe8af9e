// Ranks that NCCL connects: a GPU and communicators for each, as threads of one
// process or one per process.
#ifndef ZERO_ENGINE_COMM_NCCL_RANKS_H_
#define ZERO_ENGINE_COMM_NCCL_RANKS_H_

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// Makes CUDA load kernels when a device is opened, not when they are first
// launched, unless the environment sets CUDA_MODULE_LOADING. For ranks that
// NCCL connects as threads of one process; it costs GPU memory.
// REQUIRES: the process has not called CUDA yet, which reads the variable once.
//
// Loading a kernel holds process-wide locks and may wait until the GPU is idle.
// Meanwhile a collective may spin there for one that another thread cannot
// launch because of these locks. Processes of one rank each are safe without
// this: all ranks issue in one order, so a kernel that spins before a loading
// one waits only for launches that precede it on every rank.
// Source: CUDA Programming Guide, Lazy Loading: hazards of concurrent kernels.
void LoadKernelsEarly();

// Like RunLocalRanks, but connected by NCCL. Call LoadKernelsEarly first. Of
// options.local only the timeout is used.
absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device,
                          const RankBody& body);

// Runs `body` for this process's rank of `launch`, on its own thread, and
// returns when all ranks are done. If a rank fails or its process dies, all
// processes return an error. options.on_hang is called if this rank does not
// return within the timeout after another failed, if another rank waited for it
// in vain, or if its watch is stuck in CUDA.
// Errors: besides those of ranks: InvalidArgument if options.must_match or the
//         world differs from rank 0's; Cancelled if options.patience ends
//         before all ranks are connected.
absl::Status RunNcclProcess(const Launch& launch,
                            const LocalRanksOptions& options,
                            const MakeDeviceFn& make_device,
                            const RankBody& body);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_RANKS_H_
