// Ranks on the CPU in several processes, as threads of each: within a process
// over shared memory, between processes over MPI.
#ifndef ZERO_ENGINE_COMM_MPI_RANKS_H_
#define ZERO_ENGINE_COMM_MPI_RANKS_H_

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// The ranks of this process, `ranks_here` in each of the processes that
// `launch` is about, consecutive: runs `body` for each as RunLocalRanks does,
// and returns when those of all processes are done. Where one fails, or its
// process dies, all return an error that names it, its process and its host.
// Order:  once in a process, by all processes.
// Errors: besides those of ranks: InvalidArgument where this process has
//         another of options.must_match than process 0's; FailedPrecondition
//         where MPI knows of other processes than the launcher; those of
//         MpiNetwork::Open.
absl::Status RunMpiProcess(const Launch& launch, int ranks_here,
                           const LocalRanksOptions& options,
                           const MakeDeviceFn& make_device,
                           const RankBody& body);

// "; rank 5 is of process 1, pid 4711 on node2" for the ranks and processes
// that `text` names, some of them. `processes`: "pid 4711 on node2" of each.
std::string PlacesNamedIn(const std::string& text, int ranks_per_process,
                          const std::vector<std::string>& processes);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_RANKS_H_
