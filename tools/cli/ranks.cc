#include "tools/cli/ranks.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/comm/mpi_network.h"
#include "engine/comm/mpi_ranks.h"
#include "engine/comm/nccl/nccl.h"
#include "engine/comm/nccl_ranks.h"
#include "engine/config/keys.h"
#include "engine/train/console.h"
#include "engine/train/fit_search.h"
#include "engine/train/memory_fit.h"
#include "engine/train/session.h"

namespace zero {
namespace {

// "WORLD_SIZE is 8".
std::string LaunchText(const Launch& launch) {
  return absl::StrCat(launch.world_name, " is ", launch.world);
}

// Lines that must match on all processes. Texts are left out: paths may differ
// between machines.
std::vector<std::string> MustMatch(const Config& config) {
  std::vector<std::string> lines = {kVersion};
  for (const KeySpec& key : AllKeys()) {
    if (key.get == nullptr || key.kind == KeyKind::kString ||
        key.kind == KeyKind::kFiles) {
      continue;
    }
    lines.push_back(absl::StrCat(key.path, ": ", ValueText(key.get(config))));
  }
  return lines;
}

// Whether the config asks for sums that NCCL does not offer.
bool WantsLocal(const Config& config) {
  return config.communication.algorithm == CommunicationAlgorithm::kRing ||
         (config.communication.algorithm ==
              CommunicationAlgorithm::kParameterServer &&
          config.communication_data_type != DType::kF32);
}

absl::Status CheckNccl(const RunOptions& options) {
  ZERO_RETURN_IF_ERROR(NcclVersion().status());
  if (!options.launch.has_value()) {
    return CheckRanksOfGpus(options.ranks, NumCudaDevices());
  }
  // A launcher may show every process a GPU of its own.
  if (NumCudaDevices() <= 1) return absl::OkStatus();
  return CheckRanksOfGpus(options.launch->local_world, NumCudaDevices());
}

bool IsHierarchical(const Config& config) {
  return config.communication.algorithm ==
         CommunicationAlgorithm::kHierarchical;
}

// The number of ranks on a host, for sums within it, if the config leaves it to
// the launcher.
absl::StatusOr<int> RanksPerHost(const RunOptions& options) {
  const int ranks = options.ranks_per_host;
  if (ranks == 0) return options.ranks;
  if (options.ranks % ranks == 0) return ranks;
  return absl::InvalidArgumentError(
      absl::StrCat("communication.ranks_per_host: of the ", options.ranks,
                   " ranks the launcher started ", ranks,
                   " on this host, and other numbers on other hosts; name a "
                   "number that divides them all"));
}

// Allocating memory on one rank while collectives of others spin on their GPUs
// could deadlock: threads share the driver's locks. A process waits only for
// collectives that it has issued, and all issue theirs in one order, so the
// earliest that has not ended never needs a rank that waits for a later one.
absl::Status CheckThreads(const RunOptions& options, const Config& config) {
  if (options.ranks == 1 || !config.device.cuda.time_algorithms) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "device.time_algorithms: takes memory in the middle of the first step, "
      "which can stop ranks that NCCL connects as threads of one process; want "
      "false, or start the ",
      options.ranks,
      " ranks by torchrun or srun, or set communication.backend to \"local\""));
}

// Connects processes.
absl::StatusOr<CommunicationBackend> ChooseLaunched(const RunOptions& options,
                                                    const Config& config) {
  const std::string launched = LaunchText(*options.launch);
  const bool on_gpu = options.device == "cuda";
  const CommunicationBackend fits =
      on_gpu ? CommunicationBackend::kNccl : CommunicationBackend::kMpi;
  const CommunicationBackend wanted = config.communication.backend;
  if (wanted != CommunicationBackend::kAuto && wanted != fits) {
    const bool local = wanted == CommunicationBackend::kLocal;
    return absl::InvalidArgumentError(absl::StrCat(
        "communication.backend: ",
        local    ? "\"local\" connects threads of one process"
        : on_gpu ? "\"mpi\" connects ranks on the CPU"
                 : "\"nccl\" connects GPUs",
        ", but ",
        local ? launched : absl::StrCat("--device is ", options.device),
        "; want \"", on_gpu ? "nccl" : "mpi", "\"",
        local ? absl::StrCat(", or --ranks ", options.ranks,
                             " without a launcher")
              : ""));
  }
  if (!on_gpu && !options.launch->has_mpi) {
    return absl::InvalidArgumentError(absl::StrCat(
        launched,
        ", but torchrun cannot connect ranks on the CPU; start them by mpirun "
        "or srun --mpi=pmix, or --ranks ",
        options.ranks, " without a launcher, or take --device cuda"));
  }
  if (on_gpu
          ? WantsLocal(config)
          : config.communication.algorithm == CommunicationAlgorithm::kRing) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communication.algorithm: only threads of one process do this, but ",
        launched, "; want \"direct\"",
        on_gpu ? ", or a parameter server with fp32 in communication_data_type"
               : ""));
  }
  ZERO_RETURN_IF_ERROR(WithContext("communication.backend",
                                   on_gpu ? CheckNccl(options) : CheckMpi()));
  return fits;
}

}  // namespace

absl::Status ReadRanks(RunOptions* options) {
  options->ranks_here = options->ranks;
  ZERO_ASSIGN_OR_RETURN(options->launch, ReadLaunch());
  if (!options->launch.has_value()) return absl::OkStatus();
  const int world = options->launch->world;
  const int processes = options->launch->local_world;
  if (options->device != "cuda") {
    options->ranks_per_host = processes * options->ranks;
    options->ranks *= world;
    return absl::OkStatus();
  }
  if (options->ranks != 1 && options->ranks != world) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--ranks ", options->ranks, ", but ", LaunchText(*options->launch),
        ", one rank in each process; leave --ranks out"));
  }
  options->ranks = world;
  options->ranks_here = 1;
  options->ranks_per_host = processes;
  return absl::OkStatus();
}

Command OnRankZero(const std::string& name, Command command) {
  return [name, command = std::move(command)]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(const absl::optional<Launch> launch, ReadLaunch());
    if (!launch.has_value()) return command();
    if (launch->rank > 0) return absl::OkStatus();
    std::fprintf(stderr,
                 "zero: note: %s, and %s takes one process: rank 0 does it, "
                 "the others exit\n",
                 LaunchText(*launch).c_str(), name.c_str());
    return command();
  };
}

bool WantsNccl(const RunOptions& options, const Config& config) {
  const CommunicationBackend backend = config.communication.backend;
  if (backend != CommunicationBackend::kAuto) {
    return backend == CommunicationBackend::kNccl;
  }
  return options.ranks > 1 && options.device == "cuda" && !WantsLocal(config);
}

absl::StatusOr<CommunicationBackend> ChooseBackend(const RunOptions& options,
                                                   const Config& config) {
  if (IsHierarchical(config) && options.ranks > 1 && options.device == "cuda") {
    return absl::InvalidArgumentError(
        "communication.algorithm: \"hierarchical\" sums on the CPU, but "
        "--device is cuda; want \"direct\": NCCL knows the hosts itself");
  }
  if (options.launch.has_value()) return ChooseLaunched(options, config);
  constexpr CommunicationBackend kLocal = CommunicationBackend::kLocal;
  constexpr CommunicationBackend kNccl = CommunicationBackend::kNccl;
  switch (config.communication.backend) {
    case CommunicationBackend::kLocal:
      return kLocal;
    case CommunicationBackend::kMpi:
      return absl::InvalidArgumentError(
          "communication.backend: \"mpi\" connects processes, and no launcher "
          "started this one; start it by mpirun or srun --mpi=pmix, or want "
          "\"auto\"");
    case CommunicationBackend::kAuto:
      if (!WantsNccl(options, config) || !NcclVersion().ok()) return kLocal;
      LoadKernelsEarly();  // before the first CUDA call
      if (options.ranks > NumCudaDevices()) return kLocal;
      ZERO_RETURN_IF_ERROR(CheckThreads(options, config));
      return kNccl;
    case CommunicationBackend::kNccl:
      break;
  }
  if (options.device != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat(
        "communication.backend: \"nccl\" connects GPUs, but --device is ",
        options.device, "; use --device cuda, or \"local\""));
  }
  if (options.ranks > 1) LoadKernelsEarly();
  ZERO_RETURN_IF_ERROR(
      WithContext("communication.backend", CheckNccl(options)));
  ZERO_RETURN_IF_ERROR(CheckThreads(options, config));
  return kNccl;
}

PlannedDevice::PlannedDevice(const RunOptions& options, const Config& config) {
  auto opened = OpenDevice(options, /*rank=*/0, config.device.cuda);
  device =
      opened.ok() ? *std::move(opened) : MakeAssumedGpu(config.device.cuda);
  if (device->kind() == DeviceKind::kCuda) {
    notes.push_back(absl::StrCat("a run needs ",
                                 HumanBytes(double{kLateKernelsBytes}),
                                 " more, for kernels that load in its first "
                                 "step"));
  }
  assumed = !opened.ok();
  if (!assumed) return;
  const auto fixed = static_cast<double>(device->memory().context_bytes);
  notes.push_back(absl::StrCat(
      "this GPU is assumed, with ", HumanBytes(fixed),
      " for context and libraries and a bound for cuDNN's workspace"));
  notes.emplace_back(opened.status().message());
}

MachineSpeed PlannedDevice::Speed(const Config& config, bool offloads) const {
  MachineSpeed speed = AssumedSpeedOf(*device);
  if (assumed || !offloads) return speed;
  const auto origin = [](const absl::Status& measured) {
    return measured.ok() ? "measured here"
                         : absl::StrCat("assumed: ", measured.message());
  };
  const auto host = MeasureHostSpeed(*device);
  speed.host_origin = origin(host.status());
  if (host.ok()) {
    speed.host_bytes_per_second = std::min(host->down, host->up);
    speed.host_updates_per_second = host->updates;
  }
  const ZeroConfig& zero = config.zero_optimization;
  if (!zero.uses_nvme() || !IsFolder(zero.nvme_path())) return speed;
  const DiskTrial trial = {.folder = zero.nvme_path(), .pieces = 4};
  const auto seconds = MeasureDisk(trial);
  speed.disk_origin = origin(seconds.status());
  if (seconds.ok()) {
    speed.disk_bytes_per_second =
        2.0 * trial.pieces * trial.piece_bytes / *seconds;
  }
  return speed;
}

// More ranks than GPUs here: the plan is for a larger machine.
Rank PlannedDevice::MakeRank(const RunOptions& options, const Config& config,
                             int rank) const {
  const LocalRanksOptions ranks = MakeRanksOptions(config, options.ranks);
  Rank planned =
      MakeSoloRank(*device, rank, options.ranks, ranks.shards,
                   WantsNccl(options, config) ? BulkAlgorithm::kNative
                                              : ranks.local.algorithm);
  // Ranks on the CPU share the memory of their host.
  const int processes = options.launch ? options.launch->local_world : 1;
  planned.memory.sharers = device->kind() == DeviceKind::kCuda
                               ? 1
                               : processes * std::max(options.ranks_here, 1);
  planned.memory.context_sharers =
      device->kind() == DeviceKind::kCuda ? 1 : std::max(options.ranks_here, 1);
  planned.memory.host_sharers = static_cast<int>(
      std::min<int64_t>(options.ranks, AssumedSpeedOf(*device).ranks_per_node));
  planned.memory.device_budget = static_cast<int64_t>(options.device_memory);
  planned.memory.host_budget = static_cast<int64_t>(options.host_memory);
  return planned;
}

absl::Status RunRanks(const RunOptions& options, const Config& config,
                      const LocalRanksOptions& ranks,
                      const std::function<absl::Status(const Rank&)>& body) {
  ZERO_ASSIGN_OR_RETURN(const CommunicationBackend backend,
                        ChooseBackend(options, config));
  LocalRanksOptions placed = ranks;
  placed.device_budget = static_cast<int64_t>(options.device_memory);
  placed.host_budget = static_cast<int64_t>(options.host_memory);
  // Every process has its own GPU.
  placed.num_devices = options.launch.has_value() ? options.ranks
                       : options.device == "cuda"
                           ? std::max(NumCudaDevices(), 1)
                           : 1;
  const auto open = [&](int rank) {
    return OpenDevice(options, rank, config.device.cuda);
  };
  if (IsHierarchical(config) && placed.local.ranks_per_host == 0) {
    ZERO_ASSIGN_OR_RETURN(placed.local.ranks_per_host, RanksPerHost(options));
  }
  if (options.launch.has_value()) {
    placed.must_match = MustMatch(config);
    placed.must_match.push_back(
        absl::StrCat("ranks of a host: ", placed.local.ranks_per_host));
  }
  if (backend == CommunicationBackend::kMpi) {
    return RunMpiProcess(*options.launch, options.ranks_here, placed, open,
                         body);
  }
  if (options.launch.has_value()) {
    return RunNcclProcess(*options.launch, placed, open, body);
  }
  return backend == CommunicationBackend::kNccl
             ? RunNcclRanks(options.ranks, placed, open, body)
             : RunLocalRanks(options.ranks, placed, open, body);
}

}  // namespace zero
