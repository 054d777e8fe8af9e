#include "engine/comm/launch.h"

#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"

namespace zero {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr char kNoLauncher[] =
    "; start the ranks by torchrun or srun, which set it, or as threads by "
    "--ranks N";

// Reads numbers from environment variables, by their names.
class Variables {
 public:
  explicit Variables(const GetEnvFn& env) : env_(env) {}

  bool Has(const std::string& name) const { return env_(name).has_value(); }

  absl::StatusOr<std::string> Text(const std::string& name,
                                   const std::string& because) const {
    absl::optional<std::string> text = env_(name);
    if (text.has_value()) return *std::move(text);
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is not set, but ", because, kNoLauncher));
  }

  absl::StatusOr<int> Number(const std::string& name, int min, int max,
                             const std::string& because) const {
    ZERO_ASSIGN_OR_RETURN(const std::string text, Text(name, because));
    int value = 0;
    if (absl::SimpleAtoi(text, &value) && value >= min && value <= max) {
      return value;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        name, " \"", text, "\" is not a number ",
        max == kMaxInt ? absl::StrCat(">= ", min)
                       : absl::StrCat("in [", min, ", ", max, "]")));
  }

  // "RANK is 3".
  std::string Is(const std::string& name) const {
    return absl::StrCat(name, " is ", env_(name).value_or("not set"));
  }

 private:
  const GetEnvFn& env_;
};

// `low` must be below `high`.
absl::Status CheckBelow(const std::string& name, int low,
                        const std::string& limit, int high) {
  if (low < high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", low, ", but ",
                                                 limit, " is ", high, ": want ",
                                                 name, " in [0, ", high, ")"));
}

// "node[03-05,9],other" begins with node03.
std::string FirstNode(const std::string& list) {
  const size_t bracket = list.find('[');
  const size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) {
    return list.substr(0, comma);
  }
  const size_t end = list.find_first_of(",-]", bracket);
  if (end == std::string::npos) return list.substr(0, bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

// A Slurm step's default meeting point: its first node.
absl::StatusOr<TcpStoreAddress> SlurmAddress(const Variables& variables,
                                             const GetEnvFn& env,
                                             const std::string& because) {
  const bool has_step = variables.Has("SLURM_STEP_NODELIST");
  ZERO_ASSIGN_OR_RETURN(
      const std::string nodes,
      variables.Text(has_step ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST",
                     because));
  int job = 0, step = 0;
  (void)absl::SimpleAtoi(env("SLURM_JOB_ID").value_or("0"), &job);
  (void)absl::SimpleAtoi(env("SLURM_STEP_ID").value_or("0"), &step);
  // Below Linux's ephemeral ports.
  const int port = 16000 + static_cast<int>((job * 16LL + step) % 16000);
  return TcpStoreAddress{FirstNode(nodes), port};
}

// A launcher's variables for the numbers of a Launch.
struct Names {
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;
};
constexpr Names kTorch = {"RANK", "WORLD_SIZE", "LOCAL_RANK",
                          "LOCAL_WORLD_SIZE"};
constexpr Names kSlurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                          "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"};
constexpr Names kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kMpich = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                          "MPI_LOCALNRANKS"};

constexpr char kSlurmTasks[] = "SLURM_STEP_TASKS_PER_NODE";

// "2(x4)": two on each of four nodes.
absl::StatusOr<int> TasksOfEachNode(const std::string& text) {
  int tasks = 0;
  if (absl::SimpleAtoi(text.substr(0, text.find("(x")), &tasks) && tasks > 0 &&
      !absl::StrContains(text, ',')) {
    return tasks;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(kSlurmTasks, " is \"", text,
                   "\": every node needs the same number of tasks (srun "
                   "--ntasks-per-node)"));
}

// The store's address from MASTER_ADDR and MASTER_PORT.
absl::StatusOr<TcpStoreAddress> AddressOf(const Variables& variables,
                                          const std::string& because) {
  TcpStoreAddress address;
  ZERO_ASSIGN_OR_RETURN(address.host, variables.Text("MASTER_ADDR", because));
  ZERO_ASSIGN_OR_RETURN(address.port,
                        variables.Number("MASTER_PORT", 1, 65535, because));
  return address;
}

}  // namespace

std::string HostName() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

absl::optional<std::string> GetEnv(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  if (value == nullptr || value[0] == '\0') return absl::nullopt;
  return std::string(value);
}

bool IsLaunchVariable(absl::string_view name) {
  return name == kTorch.rank || name == kTorch.world || name == kMpich.rank ||
         name == kMpich.world || absl::StartsWith(name, "SLURM_") ||
         absl::StartsWith(name, "PMIX_") ||
         absl::StartsWith(name, "OMPI_COMM_WORLD_");
}

absl::StatusOr<absl::optional<Launch>> ReadLaunch(const GetEnvFn& env) {
  const Variables variables(env);
  const absl::optional<Launch> none;
  const bool torch = variables.Has(kTorch.rank) || variables.Has(kTorch.world);
  const bool open_mpi = !torch && variables.Has(kOpenMpi.world);
  const bool slurm = !torch && !open_mpi && variables.Has(kSlurm.rank) &&
                     variables.Has("SLURM_STEP_ID");
  const bool mpich =
      !torch && !open_mpi && !slurm && variables.Has(kMpich.world);
  if (!torch && !open_mpi && !slurm && !mpich) return none;
  Names names = torch ? kTorch : open_mpi ? kOpenMpi : slurm ? kSlurm : kMpich;
  if (slurm && !variables.Has(names.world)) names.world = "SLURM_NTASKS";

  Launch launch;
  launch.world_name = names.world;
  launch.has_mpi = !torch;
  ZERO_ASSIGN_OR_RETURN(
      launch.world,
      variables.Number(names.world, 1, kMaxInt, variables.Is(names.rank)));
  if (launch.world == 1) return none;
  std::string because = variables.Is(names.world);
  ZERO_ASSIGN_OR_RETURN(launch.rank,
                        variables.Number(names.rank, 0, kMaxInt, because));
  ZERO_RETURN_IF_ERROR(
      CheckBelow(names.rank, launch.rank, names.world, launch.world));

  if (open_mpi || mpich) {
    // They do not give rank 0's address.
    launch.store = AddressOf(
        variables,
        absl::StrCat(because,
                     " (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=N)"));
  } else if (slurm && !variables.Has("MASTER_ADDR") &&
             !variables.Has("MASTER_PORT")) {
    ZERO_ASSIGN_OR_RETURN(launch.store, SlurmAddress(variables, env, because));
  } else {
    ZERO_ASSIGN_OR_RETURN(launch.store, AddressOf(variables, because));
  }
  const std::string agent =
      torch ? env("TORCHELASTIC_USE_AGENT_STORE").value_or("") : "";
  if (agent == "True" || agent == "1") {
    if (++launch.store->port > 65535) launch.store->port = 1024;
  }

  launch.local_rank = launch.rank;
  launch.local_world = launch.world;
  if (torch && !variables.Has(names.local_rank) &&
      !variables.Has(names.local_world) && IsLoopback(launch.store->host)) {
    return absl::optional<Launch>(std::move(launch));
  }
  ZERO_ASSIGN_OR_RETURN(launch.local_rank, variables.Number(names.local_rank, 0,
                                                            kMaxInt, because));
  int nodes = 2;
  if (slurm) {
    constexpr char kNodes[] = "SLURM_STEP_NUM_NODES";
    because = absl::StrCat(variables.Is(kNodes), " (srun --ntasks-per-node)");
    nodes = 1;
    if (variables.Has(kNodes)) {
      ZERO_ASSIGN_OR_RETURN(nodes,
                            variables.Number(kNodes, 1, kMaxInt, because));
    }
  }
  if (nodes > 1 && slurm && !variables.Has(names.local_world) &&
      variables.Has(kSlurmTasks)) {
    ZERO_ASSIGN_OR_RETURN(launch.local_world,
                          TasksOfEachNode(*env(kSlurmTasks)));
  } else if (nodes > 1) {
    ZERO_ASSIGN_OR_RETURN(
        launch.local_world,
        variables.Number(names.local_world, 1, kMaxInt, because));
  }
  ZERO_RETURN_IF_ERROR(CheckBelow(names.local_rank, launch.local_rank,
                                  names.local_world, launch.local_world));
  if (launch.local_world > launch.world) {
    return absl::InvalidArgumentError(absl::StrCat(
        names.local_world, " is ", launch.local_world, ", more than the ",
        launch.world, " of ", launch.world_name));
  }
  return absl::optional<Launch>(std::move(launch));
}

}  // namespace zero
