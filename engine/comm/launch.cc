#include "engine/comm/launch.h"

#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"

namespace zero {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr char kNoLauncher[] =
    "; start the ranks by torchrun or srun, which set it, or as threads by "
    "--ranks N";

// Numbers by the names of their variables.
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

absl::Status ReadMaster(const Variables& variables, const std::string& because,
                        Launch* launch) {
  ZERO_ASSIGN_OR_RETURN(launch->store.host,
                        variables.Text("MASTER_ADDR", because));
  ZERO_ASSIGN_OR_RETURN(launch->store.port,
                        variables.Number("MASTER_PORT", 1, 65535, because));
  return absl::OkStatus();
}

absl::StatusOr<Launch> ReadTorch(const Variables& variables,
                                 const GetEnvFn& env) {
  Launch launch;
  launch.world_name = "WORLD_SIZE";
  const char* given = variables.Has("RANK") ? "RANK" : "WORLD_SIZE";
  const std::string because = variables.Is(given);
  ZERO_ASSIGN_OR_RETURN(launch.rank,
                        variables.Number("RANK", 0, kMaxInt, because));
  ZERO_ASSIGN_OR_RETURN(launch.world,
                        variables.Number("WORLD_SIZE", 1, kMaxInt, because));
  ZERO_RETURN_IF_ERROR(
      CheckBelow("RANK", launch.rank, "WORLD_SIZE", launch.world));
  if (launch.world == 1) return launch;
  const std::string several = variables.Is("WORLD_SIZE");
  ZERO_RETURN_IF_ERROR(ReadMaster(variables, several, &launch));
  const bool has_local = variables.Has("LOCAL_RANK"),
             has_local_world = variables.Has("LOCAL_WORLD_SIZE");
  if (!has_local && !has_local_world && IsLoopback(launch.store.host)) {
    launch.local_rank = launch.rank;
    launch.local_world = launch.world;
  } else {
    ZERO_ASSIGN_OR_RETURN(launch.local_rank,
                          variables.Number("LOCAL_RANK", 0, kMaxInt, several));
    ZERO_ASSIGN_OR_RETURN(
        launch.local_world,
        variables.Number("LOCAL_WORLD_SIZE", 1, kMaxInt, several));
  }
  const absl::optional<std::string> agent = env("TORCHELASTIC_USE_AGENT_STORE");
  if (agent.has_value() && (*agent == "True" || *agent == "1")) {
    if (++launch.store.port > 65535) launch.store.port = 1024;
  }
  return launch;
}

absl::StatusOr<Launch> ReadSlurm(const Variables& variables,
                                 const GetEnvFn& env) {
  Launch launch;
  const std::string because = variables.Is("SLURM_PROCID");
  launch.world_name = variables.Has("SLURM_STEP_NUM_TASKS")
                          ? "SLURM_STEP_NUM_TASKS"
                          : "SLURM_NTASKS";
  ZERO_ASSIGN_OR_RETURN(launch.rank,
                        variables.Number("SLURM_PROCID", 0, kMaxInt, because));
  ZERO_ASSIGN_OR_RETURN(
      launch.world, variables.Number(launch.world_name, 1, kMaxInt, because));
  ZERO_RETURN_IF_ERROR(
      CheckBelow("SLURM_PROCID", launch.rank, launch.world_name, launch.world));
  if (launch.world == 1) return launch;
  ZERO_ASSIGN_OR_RETURN(launch.local_rank,
                        variables.Number("SLURM_LOCALID", 0, kMaxInt, because));
  int nodes = 1;
  if (variables.Has("SLURM_STEP_NUM_NODES")) {
    ZERO_ASSIGN_OR_RETURN(
        nodes, variables.Number("SLURM_STEP_NUM_NODES", 1, kMaxInt, because));
  }
  if (nodes == 1) {
    launch.local_world = launch.world;
  } else {
    ZERO_ASSIGN_OR_RETURN(
        launch.local_world,
        variables.Number("SLURM_NTASKS_PER_NODE", 1, kMaxInt,
                         absl::StrCat(variables.Is("SLURM_STEP_NUM_NODES"),
                                      " (srun --ntasks-per-node)")));
  }
  if (variables.Has("MASTER_ADDR") || variables.Has("MASTER_PORT")) {
    ZERO_RETURN_IF_ERROR(ReadMaster(variables, because, &launch));
    return launch;
  }
  ZERO_ASSIGN_OR_RETURN(const std::string list,
                        variables.Text(variables.Has("SLURM_STEP_NODELIST")
                                           ? "SLURM_STEP_NODELIST"
                                           : "SLURM_JOB_NODELIST",
                                       because));
  launch.store.host = FirstNode(list);
  int job = 0, step = 0;
  (void)absl::SimpleAtoi(env("SLURM_JOB_ID").value_or("0"), &job);
  (void)absl::SimpleAtoi(env("SLURM_STEP_ID").value_or("0"), &step);
  // Below the ports that Linux gives away by itself.
  launch.store.port = 16000 + (job * 16LL + step) % 16000;
  return launch;
}

// Open MPI's mpirun does not say where rank 0 is.
absl::StatusOr<Launch> ReadMpi(const Variables& variables) {
  Launch launch;
  launch.world_name = "OMPI_COMM_WORLD_SIZE";
  const std::string because = variables.Is(launch.world_name);
  ZERO_ASSIGN_OR_RETURN(
      launch.world, variables.Number(launch.world_name, 1, kMaxInt, because));
  if (launch.world == 1) return launch;
  ZERO_ASSIGN_OR_RETURN(launch.rank, variables.Number("OMPI_COMM_WORLD_RANK", 0,
                                                      kMaxInt, because));
  ZERO_RETURN_IF_ERROR(CheckBelow("OMPI_COMM_WORLD_RANK", launch.rank,
                                  launch.world_name, launch.world));
  ZERO_ASSIGN_OR_RETURN(
      launch.local_rank,
      variables.Number("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMaxInt, because));
  ZERO_ASSIGN_OR_RETURN(
      launch.local_world,
      variables.Number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxInt, because));
  ZERO_RETURN_IF_ERROR(ReadMaster(
      variables,
      absl::StrCat(because, " (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=N)"),
      &launch));
  return launch;
}

absl::Status CheckPlaces(const Launch& launch, const char* local_rank,
                         const char* local_world) {
  ZERO_RETURN_IF_ERROR(CheckBelow(local_rank, launch.local_rank, local_world,
                                  launch.local_world));
  if (launch.local_world <= launch.world) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(local_world, " is ", launch.local_world, ", more than the ",
                   launch.world, " of ", launch.world_name));
}

}  // namespace

absl::optional<std::string> GetEnv(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  if (value == nullptr || value[0] == '\0') return absl::nullopt;
  return std::string(value);
}

absl::StatusOr<absl::optional<Launch>> ReadLaunch(const GetEnvFn& env) {
  const Variables variables(env);
  const absl::optional<Launch> none;
  if (variables.Has("RANK") || variables.Has("WORLD_SIZE")) {
    ZERO_ASSIGN_OR_RETURN(Launch launch, ReadTorch(variables, env));
    if (launch.world == 1) return none;
    ZERO_RETURN_IF_ERROR(CheckPlaces(launch, "LOCAL_RANK", "LOCAL_WORLD_SIZE"));
    return absl::optional<Launch>(std::move(launch));
  }
  if (variables.Has("SLURM_PROCID") && variables.Has("SLURM_STEP_ID")) {
    ZERO_ASSIGN_OR_RETURN(Launch launch, ReadSlurm(variables, env));
    if (launch.world == 1) return none;
    ZERO_RETURN_IF_ERROR(
        CheckPlaces(launch, "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"));
    return absl::optional<Launch>(std::move(launch));
  }
  if (variables.Has("OMPI_COMM_WORLD_SIZE")) {
    ZERO_ASSIGN_OR_RETURN(Launch launch, ReadMpi(variables));
    if (launch.world == 1) return none;
    ZERO_RETURN_IF_ERROR(CheckPlaces(launch, "OMPI_COMM_WORLD_LOCAL_RANK",
                                     "OMPI_COMM_WORLD_LOCAL_SIZE"));
    return absl::optional<Launch>(std::move(launch));
  }
  return none;
}

}  // namespace zero
