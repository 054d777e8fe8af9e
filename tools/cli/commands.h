// The subcommands of `zero`. Each Add function declares its options on the
// program and returns the function that runs it.
//
// To add one: a file here, a line in main.cc's table, a line in README.
#ifndef ZERO_TOOLS_CLI_COMMANDS_H_
#define ZERO_TOOLS_CLI_COMMANDS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/comm/launch.h"
#include "engine/config/load.h"
#include "engine/data/tokenizer.h"
#include "kernels/device.h"

namespace CLI {
class App;
}

namespace zero {

inline constexpr char kVersion[] = "zero 0.1";

// Runs a parsed command.
using Command = std::function<absl::Status()>;

// The exit status: 0 for OK, StopExitCode() for Cancelled (ended by a signal,
// everything written), WithExitCode's if set, 1 for anything else.
int ExitCodeOf(const absl::Status& status);
// REQUIRES: !status.ok().
absl::Status WithExitCode(absl::Status status, int code);
// The exit status of a run whose time is over and that --resume auto continues.
inline constexpr int kWantsToGoOn = 85;

Command AddTrain(CLI::App& app);
Command AddEval(CLI::App& app);
Command AddGenerate(CLI::App& app);
Command AddTokenize(CLI::App& app);
Command AddModels(CLI::App& app);
Command AddConfig(CLI::App& app);
Command AddPlan(CLI::App& app);
Command AddMemory(CLI::App& app);
Command AddReport(CLI::App& app);
Command AddCheckpoint(CLI::App& app);
Command AddDevices(CLI::App& app);

// Options of every command on a config.
struct RunOptions {
  std::string config;             // file
  std::vector<std::string> sets;  // "a.b=value"
  std::string model_dir;          // --model: a Hugging Face folder
  int ranks = 1;                  // data-parallel ranks, of all processes
  int threads = 0;                // per rank; 0: an equal share of the cores
  int host_threads = 0;           // of a rank's host; 0: as many as `threads`
  // None: all ranks are threads of this process; else it has ranks_here of
  // them, in process order (ReadRanks in ranks.h).
  absl::optional<Launch> launch;
  int ranks_here = 1;
  // Budgets in bytes per rank (Rank::memory); 0: the rank's share.
  double device_memory = 0, host_memory = 0;
  int ranks_per_host = 0;  // of the launcher; 0: all ranks are on one
  int first_rank() const { return launch ? launch->rank * ranks_here : 0; }
  bool IsHere(int rank) const {
    return rank >= first_rank() && rank < first_rank() + ranks_here;
  }
  std::string device = "cpu";
};

// Declares the options of a run. `config_required`: CONFIG must be given.
void AddRunOptions(CLI::App& app, RunOptions* options, bool config_required);

// Makes the command refuse to run without CONFIG or --model.
void RequireConfigOrModel(CLI::App& app, const RunOptions* options);

// The config file with --set and --model applied. Without a file, --model is
// enough for a command that ignores the rest of a config.
absl::StatusOr<LoadedConfig> LoadRunConfig(const RunOptions& options,
                                           MissingFiles missing_files);

// The same for a command on a trained model: --model or --set
// model.from_pretrained, else FindTrainedModel.
absl::StatusOr<LoadedConfig> LoadTrainedConfig(RunOptions* options,
                                               MissingFiles missing_files);

// Prints a note on stderr if the model was probably trained with another
// tokenizer.
void NoteStrangeTokenizer(const Tokenizer& tokenizer, const ModelConfig& model);

// Declares --ranks, for the commands that have it.
void AddRanksOption(CLI::App& app, RunOptions* options);
// Declares --host-threads.
void AddHostThreadsOption(CLI::App& app, RunOptions* options);
// Replaces a size with its unit, such as "80GiB", by its bytes. Returns what is
// wrong with it, or nothing, as CLI::Validator wants.
std::string SizeToBytes(std::string& size);
// Declares --device-memory and --host-memory, for commands whose run may be
// limited.
void AddMemoryOptions(CLI::App& app, RunOptions* options);
// Makes a command without --ranks refuse the option by name.
void RefuseRanksOption(CLI::App& app);

// Cores this process may run on (a container or taskset may allow fewer than
// the machine has).
int AllowedCores();

// The device of one rank, for the calling thread: ranks are assigned to GPUs
// round-robin.
absl::StatusOr<std::unique_ptr<Device>> OpenDevice(
    const RunOptions& options, int rank = 0, const CudaOptions& cuda = {});

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_COMMANDS_H_
