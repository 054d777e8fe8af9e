#include "engine/train/memory_fit.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/train/console.h"

namespace zero {
namespace {

int64_t LateBytes(const Rank& rank) {
  return rank.device->kind() == DeviceKind::kCuda ? kLateKernelsBytes : 0;
}

// If the states do not fit: changes that keep the run equal come first.
std::string RemedyOfStates(const Config& config, bool train, const Rank& rank) {
  std::vector<std::string> remedies;
  const bool server = config.communication.algorithm ==
                      CommunicationAlgorithm::kParameterServer;
  const bool several = rank.world() > 1;
  const bool shards_all = config.zero_optimization.stage == 3;
  if (train && several && server) {
    remedies.push_back("set communication.algorithm to \"direct\"");
  } else if (train && several && !shards_all) {
    remedies.push_back("set zero_optimization.stage to 3");
  }
  // On the CPU more ranks would share the same memory.
  if (train && !server && rank.device->kind() == DeviceKind::kCuda) {
    remedies.push_back(absl::StrCat(
        "start more ranks on GPUs of their own",
        several || shards_all ? "" : " with zero_optimization.stage 3"));
  }
  // When training, bf16 states are as large, since they have master weights.
  if (!train && config.param_dtype() == DType::kF32) {
    remedies.push_back("set bf16.enabled");
  }
  remedies.push_back("choose a smaller model.preset");
  return absl::StrJoin(remedies, ", or ");
}

// Advice without a search, by the largest category.
std::string Remedy(const MemoryLedger& predicted, const Config& config,
                   bool train, const Rank& rank) {
  const auto bytes = [&](MemoryCategory category) {
    return predicted.at_peak()[static_cast<int>(category)];
  };
  const int64_t transient =
      bytes(MemoryCategory::kActivations) + bytes(MemoryCategory::kWorkspace);
  if (transient < predicted.total_peak_bytes() / 2) {
    return RemedyOfStates(config, train, rank);
  }
  if (config.recompute() != Recompute::kFull) {
    return absl::StrCat("set activation_checkpointing.",
                        config.activation_checkpointing ? "granularity to full"
                                                        : "enabled to true",
                        ", or lower train_micro_batch_size_per_gpu");
  }
  return "lower train_micro_batch_size_per_gpu or data.sequence_length";
}

// The total need of one device's ranks, in bytes: equal ranks, or a server and
// its workers.
int64_t NeededBy(const Rank& rank, int64_t own, int64_t other) {
  const int64_t sharers = SharersOf(rank);
  if (own == other || (rank.rank() > 0 && sharers < rank.world())) {
    return sharers * own;
  }
  return rank.rank() == 0 ? own + (sharers - 1) * other
                          : other + (sharers - 1) * own;
}

// Ranks of other processes are not known here.
absl::Status CheckHostFits(
    const Rehearsal& predicted, const Config& config, bool train,
    const Rank& rank,
    const std::function<absl::optional<std::string>()>& advice) {
  if (predicted.one_memory || predicted.host_bytes() == 0) {
    return absl::OkStatus();
  }
  int64_t memory = TakeableHostBytes(rank);
  if (rank.device->kind() == DeviceKind::kCpu) {  // with budgets for both
    memory = std::min(memory, TakeableBytes(*rank.device) / SharersOf(rank) -
                                  predicted.ledger.total_peak_bytes());
  }
  if (predicted.host_bytes() <= memory) return absl::OkStatus();
  const ZeroConfig& zero = config.zero_optimization;
  const bool disk_helps = train && zero.may_use_disk() &&
                          (zero.offload_optimizer == OffloadDevice::kCpu ||
                           zero.offload_param == OffloadDevice::kCpu);
  const absl::optional<std::string> searched = advice();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "this run keeps %s of each rank's states in the host's memory, of which "
      "a rank may take %s; %s",
      HumanBytes(predicted.host_bytes()), HumanBytes(memory),
      searched.has_value()
          ? *searched
          : absl::StrCat(
                disk_helps
                    ? "set the device of offload to \"nvme\" with nvme_path, a "
                      "folder on a local disk, or "
                    : "",
                "start more ranks, on other machines, or leave "
                "zero_optimization.offload_optimizer out")));
}

}  // namespace

int SharersOf(const Rank& rank) {
  return rank.memory.sharers == 0 ? rank.world() : rank.memory.sharers;
}

int HostSharersOf(const Rank& rank) {
  const int sharers = rank.memory.host_sharers;
  return sharers == 0 ? rank.world() : sharers;
}

int ContextSharersOf(const Rank& rank) {
  const int sharers = rank.memory.context_sharers;
  return sharers == 0 ? SharersOf(rank) : sharers;
}

int64_t RoomBytes(const Rank& rank) {
  if (rank.device->kind() != DeviceKind::kCpu) return 0;
  return (int64_t{3} << 20) / ContextSharersOf(rank);
}

int64_t TakeableBytes(const Device& device) {
  const int64_t now = device.memory().total_bytes;
  return now > 0 ? now : device.info().memory_bytes;
}

int64_t TakeableBytes(const Rank& rank) {
  const int64_t late = LateBytes(rank);
  const int64_t budget = rank.memory.device_budget;
  if (budget > 0) return std::max<int64_t>(budget - late, 0);
  return std::max<int64_t>(TakeableBytes(*rank.device) - late, 0) /
         SharersOf(rank);
}

DeviceShare DeviceShareOf(const Rank& rank, int64_t takeable) {
  const int64_t budget = rank.memory.device_budget;
  if (budget > 0) return {budget, LateBytes(rank)};
  const int64_t late = LateBytes(rank) / SharersOf(rank);
  return {takeable + late, late};
}

int64_t TakeableHostBytes(const Rank& rank) {
  const MemoryShare& share = rank.memory;
  if (share.host_budget > 0) return share.host_budget;
  return TakeableBytes(rank.device->host()) / HostSharersOf(rank);
}

int64_t TakeableDiskBytes(const Rank& rank, const std::string& folder) {
  std::string existing = folder;
  while (!PathExists(existing) && FolderOf(existing) != existing) {
    existing = FolderOf(existing);
  }
  const int64_t free = FreeDiskBytes(existing);
  return free < 0 ? INT64_MAX : free / HostSharersOf(rank);
}

absl::Status CheckFits(
    const Rehearsal& predicted, int64_t other_rank, const Config& config,
    bool train, const Rank& rank,
    const std::function<absl::optional<std::string>()>& advice) {
  ZERO_RETURN_IF_ERROR(CheckHostFits(predicted, config, train, rank, advice));
  const DeviceInfo device = rank.device->info();
  const int sharers = SharersOf(rank);
  int64_t memory = TakeableBytes(*rank.device);
  const int64_t budget = sharers * rank.memory.device_budget;
  const bool has_budget = budget > 0 && (memory == 0 || budget < memory);
  if (has_budget) memory = budget;
  const int64_t own = predicted.needed_bytes();
  const int64_t needed = NeededBy(rank, own, other_rank);
  // Ranks that share a GPU share its loaded kernels.
  const int64_t late = LateBytes(rank);
  if (memory == 0 || needed + late <= memory) return absl::OkStatus();
  MemoryLedger::NamedBytes parts =
      MemoryLedger::Parts(predicted.ledger.at_peak());
  if (own > predicted.ledger.total_peak_bytes()) {
    parts.emplace_back("states of the host", predicted.host_bytes());
  }
  std::stable_sort(
      parts.begin(), parts.end(),
      [](const auto& a, const auto& b) { return a.second > b.second; });
  const absl::optional<std::string> searched = advice();
  const char* const on_it = sharers < rank.world() ? " on this device" : "";
  return absl::ResourceExhaustedError(absl::StrFormat(
      "this run needs %s at its peak (%s%s)%s and may take %s%s of the %s of "
      "%s; %s",
      HumanBytes(needed), PartsText(parts),
      sharers == 1 ? ""
      : own == other_rank
          ? absl::StrFormat("; times %d ranks%s", sharers, on_it)
          : "; a server and its workers",
      late > 0 ? absl::StrCat(", ", HumanBytes(late),
                              " for kernels that load later,")
               : "",
      HumanBytes(memory),
      !has_budget ? ""
      : sharers == 1
          ? " (--device-memory)"
          : absl::StrFormat(" (%d ranks of %s by --device-memory)", sharers,
                            HumanBytes(rank.memory.device_budget)),
      HumanBytes(device.memory_bytes), device.name,
      searched.has_value() ? *searched
                           : Remedy(predicted.ledger, config, train, rank)));
}

}  // namespace zero
