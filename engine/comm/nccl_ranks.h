// Ranks that NCCL connects: a GPU and communicators for each, as threads of
// one process or one in each of several processes.
#ifndef ZERO_ENGINE_COMM_NCCL_RANKS_H_
#define ZERO_ENGINE_COMM_NCCL_RANKS_H_

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// Lets CUDA load kernels when a device is opened instead of when they are first
// launched, unless the environment has CUDA_MODULE_LOADING. For ranks that NCCL
// connects as threads of one process; it costs them memory of the GPU.
// REQUIRES: the process has not called CUDA yet, which looks there once.
//
// What loads a kernel holds locks of the process and may wait until the GPU has
// nothing left to do, while a collective spins there and waits for one that
// another thread cannot launch for these locks. A process per rank is sound
// without: all ranks issue in one order, so whatever spins before a kernel that
// loads waits for launches that come before that kernel on every rank.
// Source: CUDA Programming Guide, Lazy Loading: hazards of concurrent kernels.
void LoadKernelsEarly();

// As RunLocalRanks, by NCCL, after LoadKernelsEarly. Of options.local the
// timeout counts.
absl::Status RunNcclRanks(int world, const LocalRanksOptions& options,
                          const MakeDeviceFn& make_device,
                          const RankBody& body);

// The rank of this process, with those of the others that `launch` is about:
// runs `body` once, on a thread of its own, and returns when all ranks have
// done theirs. Where one fails, or its process dies, all return an error.
// options.on_hang is called where this rank does not come back within the
// timeout after another one failed, or is the one for which that waited, or
// whose watch CUDA does not let go on.
// Errors: besides those of ranks: InvalidArgument where this process has
//         another of options.must_match than rank 0's, or is of another world;
//         Cancelled where options.patience ends before all ranks are connected.
absl::Status RunNcclProcess(const Launch& launch,
                            const LocalRanksOptions& options,
                            const MakeDeviceFn& make_device,
                            const RankBody& body);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_NCCL_RANKS_H_
