// This process's rank in a run of several processes, from the variables that
// launchers set.
#ifndef ZERO_ENGINE_COMM_LAUNCH_H_
#define ZERO_ENGINE_COMM_LAUNCH_H_

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "engine/comm/tcp_store.h"

namespace zero {

// Ranks number processes: with NCCL each is one rank of the run.
struct Launch {
  int rank = 0;
  int world = 1;
  int local_rank = 0;      // among the processes of this machine
  int local_world = 1;     // number of these
  std::string world_name;  // the variable with `world`: "WORLD_SIZE"
  bool has_mpi = false;    // the launcher may connect its processes by MPI

  // Rank 0's store address, or why it is unknown: MPI can provide it.
  absl::StatusOr<TcpStoreAddress> store = TcpStoreAddress();
};

// Reads an environment variable; nothing if it is unset or empty.
using GetEnvFn =
    std::function<absl::optional<std::string>(const std::string& name)>;
absl::optional<std::string> GetEnv(const std::string& name);

// The name of this machine.
std::string HostName();

// Whether some launcher sets this variable to a process's rank. A process with
// none of these variables is its own world.
bool IsLaunchVariable(absl::string_view name);

// torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
// MASTER_PORT; without RANK and WORLD_SIZE Open MPI's OMPI_COMM_WORLD_RANK,
// _SIZE, _LOCAL_RANK and _LOCAL_SIZE (inside a Slurm job its mpirun leaves the
// Slurm variables of its helper, the same for all processes of a host), with
// MASTER_ADDR and MASTER_PORT for `store`; without these a Slurm step's
// SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID and
// SLURM_NTASKS_PER_NODE (or SLURM_STEP_TASKS_PER_NODE), with the first node of
// the step and a port derived from the job's and the step's number if
// MASTER_ADDR and MASTER_PORT are not set (a shell inside a Slurm job is not a
// step of it); without these MPICH's PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and
// MPI_LOCALNRANKS, like Open MPI's.
//
// LOCAL_RANK and LOCAL_WORLD_SIZE may both be omitted on one machine, if
// MASTER_ADDR is its loopback. torchrun's own store listens at MASTER_PORT (it
// sets TORCHELASTIC_USE_AGENT_STORE): then ours takes the next port.
//
// Nothing: no launcher, or a world of one process.
// Errors: InvalidArgument with the variable that is missing or contradicts
//         another, and its value.
absl::StatusOr<absl::optional<Launch>> ReadLaunch(const GetEnvFn& env = GetEnv);

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_LAUNCH_H_
