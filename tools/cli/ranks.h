// Who the ranks of a run are: threads of this process, or ranks in each of the
// processes that mpirun, srun or torchrun started; and what connects them.
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

// Where a launcher started this process, options->launch is its place: on the
// CPU --ranks are those of each process, on GPUs every process is one rank.
// options->ranks becomes the number of all.
// Errors: InvalidArgument: of the launcher's variables, with their names, or
//         --ranks asks for something else.
absl::Status ReadRanks(RunOptions* options);

// A command that one process can do: of those that a launcher started rank 0
// does it, and says so; the others end with OK.
Command OnRankZero(const std::string& name, Command command);

// Whether NCCL shall connect the ranks where each has a GPU, be that here or,
// in a plan, elsewhere.
bool WantsNccl(const RunOptions& options, const Config& config);

// What connects the ranks: communication.backend, or what `auto` stands for.
// Order:  before anything calls CUDA: see LoadKernelsEarly, which it does where
//         NCCL may connect threads.
// Errors: what communication.backend asks for cannot be, with the remedy.
absl::StatusOr<CommunicationBackend> ChooseBackend(const RunOptions& options,
                                                   const Config& config);

// The device that a plan is for, which this machine need not have.
struct PlannedDevice {
  // Of one rank; a GPU that cannot be opened is assumed.
  PlannedDevice(const RunOptions& options, const Config& config);

  // Rank `rank` of the run, with a device to itself and communicators that move
  // nothing. This must outlive it.
  Rank MakeRank(const RunOptions& options, const Config& config,
                int rank = 0) const;

  // What offload goes over is measured, where that is here: copies and updates
  // of the host, and the disk, where the config has one that is there.
  MachineSpeed Speed(const Config& config, bool offloads) const;

  std::unique_ptr<Device> device;
  bool assumed = false;            // there is no such GPU here
  std::vector<std::string> notes;  // what to know of its memory
};

// Runs `body` on every rank of this process, as RunLocalRanks does. Processes
// must have the same values of `config`, but for names of files.
absl::Status RunRanks(const RunOptions& options, const Config& config,
                      const LocalRanksOptions& ranks,
                      const std::function<absl::Status(const Rank&)>& body);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_RANKS_H_
