// Ranks on the CPU in several processes, as threads of each: within a process
// over shared memory, between processes over MPI.
#ifndef ZERO_ENGINE_COMM_MPI_RANKS_H_
#define ZERO_ENGINE_COMM_MPI_RANKS_H_

#include "absl/status/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"

namespace zero {

// Runs `body` for this process's ranks, as RunLocalRanks does: `ranks_here`
// consecutive ranks in each process of `launch`. Returns when all processes are
// done. If a rank fails or its process dies, all return an error that names it,
// its process and its host.
// Order:  once in a process, by all processes.
// Errors: besides those of ranks: InvalidArgument if options.must_match differs
//         from process 0's; FailedPrecondition if MPI and the launcher disagree
//         on the processes; those of MpiNetwork::Open.
absl::Status RunMpiProcess(const Launch& launch, int ranks_here,
                           const LocalRanksOptions& options,
                           const MakeDeviceFn& make_device,
                           const RankBody& body);

// "; rank 5 is of process 1, pid 4711 on node2": says where some of the ranks
// and processes are that `text` names. `processes`: "pid 4711 on node2" of
// each.
std::string PlacesNamedIn(const std::string& text, int ranks_per_process,
                          const std::vector<std::string>& processes);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_MPI_RANKS_H_
