// The ranks of a run: threads of this process, or ranks in each process that
// mpirun, srun or torchrun started; and how they are connected.
#ifndef ZERO_TOOLS_CLI_RANKS_H_
#define ZERO_TOOLS_CLI_RANKS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/comm/local_ranks.h"
#include "engine/config/config.h"
#include "engine/train/machine_speed.h"
#include "tools/cli/commands.h"

namespace zero {

// If a launcher started this process, sets options->launch: on the CPU --ranks
// is per process, on GPUs every process is one rank. options->ranks becomes the
// total.
// Errors: InvalidArgument if the launcher's variables are wrong, with their
//         names, or if --ranks contradicts them.
absl::Status ReadRanks(RunOptions* options);

// Wraps a command of one process: under a launcher rank 0 runs it, with a note,
// and the other processes return OK.
Command OnRankZero(const std::string& name, Command command);

// Whether NCCL connects the ranks if each has a GPU, here or, in a plan,
// elsewhere.
bool WantsNccl(const RunOptions& options, const Config& config);

// What connects the ranks: communication.backend, with `auto` resolved.
// Order:  before anything calls CUDA: see LoadKernelsEarly, which this calls if
//         NCCL may connect threads.
// Errors: communication.backend is not possible, with the remedy.
absl::StatusOr<CommunicationBackend> ChooseBackend(const RunOptions& options,
                                                   const Config& config);

// The device of a plan, which this machine need not have.
struct PlannedDevice {
  // Opens the device of one rank. A GPU that cannot be opened is replaced by
  // assumed figures.
  PlannedDevice(const RunOptions& options, const Config& config);

  // Rank `rank` of the run, with its own device and communicators that move
  // nothing. This must outlive it.
  Rank MakeRank(const RunOptions& options, const Config& config,
                int rank = 0) const;

  // The speeds of the run's links. Offload's are measured if they are here:
  // copies and the host's updates, and the disk if the config names an existing
  // one.
  MachineSpeed Speed(const Config& config, bool offloads) const;

  std::unique_ptr<Device> device;
  bool assumed = false;            // no such GPU is here
  std::vector<std::string> notes;  // on its memory
};

// Runs `body` on every rank of this process, as RunLocalRanks does. Processes
// must have the same values of `config`, except names of files.
absl::Status RunRanks(const RunOptions& options, const Config& config,
                      const LocalRanksOptions& ranks,
                      const std::function<absl::Status(const Rank&)>& body);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_RANKS_H_
