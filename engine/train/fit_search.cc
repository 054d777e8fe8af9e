#include "engine/train/fit_search.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "engine/train/console.h"
#include "engine/train/memory_fit.h"

namespace zero {
namespace {

// The splits of the global batch: micro-batch x accumulation, ascending by
// micro-batch. keep_all is not tried with a micro-batch below the config's:
// that costs more than keep_all saves.
std::vector<std::pair<int64_t, int64_t>> SplitsOf(const Config& config,
                                                  Recompute recompute) {
  const int64_t configured = config.train_micro_batch_size_per_gpu;
  const int64_t sequences = configured * config.gradient_accumulation_steps;
  const int64_t least = recompute == Recompute::kKeepAll ? configured : 1;
  std::vector<std::pair<int64_t, int64_t>> splits;
  for (int64_t micro = least; micro <= sequences; ++micro) {
    if (sequences % micro == 0) splits.emplace_back(micro, sequences / micro);
  }
  return splits;
}

// Sets the bytes and the cost of a proposal. `config` is the one with it.
void Price(const Config& config, const Rehearsal& rehearsal,
           const ModelTools& tools, const MachineSpeed& speed,
           FitProposal* proposal) {
  const Plan& plan = rehearsal.plan;
  TokenFlops flops;
  if (tools.flops_per_token != nullptr) {
    flops = tools.flops_per_token(config.model, config.data.sequence_length,
                                  proposal->recompute);
  }
  const double tokens =
      static_cast<double>(proposal->micro_batch * proposal->accumulation *
                          config.data.sequence_length);
  const StepWire& wire = rehearsal.wire;
  proposal->peak_bytes = rehearsal.needed_bytes();
  proposal->host_bytes = rehearsal.host_bytes();
  proposal->disk_bytes = rehearsal.disk_bytes;
  proposal->sent_bytes = wire.sent();
  proposal->flops = tokens * (flops.model + flops.recomputed);
  proposal->seconds =
      proposal->flops / speed.flops_per_second +
      tokens * RecomputedPassElemsPerToken(config.model, proposal->recompute) *
          DTypeBytes(config.param_dtype()) / speed.memory_bytes_per_second +
      (wire.gathered + wire.reduced) / speed.BytesPerSecond(plan.shard.size) +
      wire.across / speed.BytesPerSecond(plan.world);
  if (proposal->offload != Offload::kNone) {
    proposal->seconds += OffloadSeconds(rehearsal, plan.world, speed);
  }
}

class Search {
 public:
  Search(const Rank& rank, const Config& config, const ModelTools& tools,
         const FitLimits& limits, const MachineSpeed& speed)
      : rank_(rank),
        config_(config),
        tools_(tools),
        limits_(limits),
        speed_(speed) {}

  const MachineSpeed& speed() const { return speed_; }

  // Appends the one with the config's micro-batch, which may take less for the
  // same price, and the one with the largest, of those that fit. With one
  // micro-step there is no sum of gradients during backward, so it may take
  // less than several; among several the peak grows with the micro-batch.
  absl::Status Try(FitProposal proposal,
                   std::vector<FitProposal>* found) const {
    const auto splits = SplitsOf(config_, proposal.recompute);
    const auto fits = [&](size_t i) -> absl::StatusOr<bool> {
      std::tie(proposal.micro_batch, proposal.accumulation) = splits[i];
      ZERO_RETURN_IF_ERROR(Rehearse(&proposal));
      return proposal.peak_bytes <= limits_.device &&
             proposal.disk_bytes <= limits_.disk &&
             (one_memory() || proposal.host_bytes <= limits_.host);
    };
    const size_t whole = splits.size() - 1;
    size_t own = 0;
    while (splits[own].first != config_.train_micro_batch_size_per_gpu) ++own;
    ZERO_ASSIGN_OR_RETURN(const bool own_fits, fits(own));
    if (own_fits) found->push_back(proposal);
    if (own < whole) {
      ZERO_ASSIGN_OR_RETURN(const bool whole_fits, fits(whole));
      if (whole_fits) {
        found->push_back(proposal);
        return absl::OkStatus();
      }
    }
    // The first `fitting` fit; from `ends` on none does.
    const size_t known = own_fits ? own + 1 : 0;
    size_t fitting = known, ends = own_fits ? whole : own;
    FitProposal best;
    while (fitting < ends) {
      const size_t middle = (fitting + ends) / 2;
      ZERO_ASSIGN_OR_RETURN(const bool fit, fits(middle));
      if (fit) {
        best = proposal;
        fitting = middle + 1;
      } else {
        ends = middle;
      }
    }
    if (fitting > known) found->push_back(best);
    return absl::OkStatus();
  }

  // The smallest step, with everything offloaded: no proposal takes less of the
  // device. `host`: what the host holds, unless null.
  absl::StatusOr<FitProposal> Least(MemoryLedger* host) const {
    FitProposal least = {.stage = 3,
                         .mics_shard_size = -1,
                         .micro_batch = 1,
                         .accumulation = 1,
                         .recompute = Recompute::kFull,
                         .offload = Offload::kAll,
                         .on_disk = config_.zero_optimization.may_use_disk()};
    ZERO_RETURN_IF_ERROR(Rehearse(&least, host));
    return least;
  }

  // Whether the host has room for its gradient sums, which stay off the disk.
  // Checked early: a model without room has many units.
  absl::StatusOr<bool> HoldsGradients() const {
    MemoryLedger host;
    ZERO_RETURN_IF_ERROR(Least(&host).status());
    return host.at_peak()[static_cast<int>(MemoryCategory::kGradients)] <=
           (one_memory() ? limits_.device : limits_.host);
  }

  // The step that takes the least of the device: that one, or, of a model whose
  // states are less than what offload adds, the same in place.
  absl::StatusOr<FitProposal> Smallest() const {
    ZERO_ASSIGN_OR_RETURN(const FitProposal offloaded, Least(nullptr));
    FitProposal in_place = offloaded;
    in_place.offload = Offload::kNone;
    in_place.on_disk = false;
    ZERO_RETURN_IF_ERROR(Rehearse(&in_place));
    return in_place.peak_bytes < offloaded.peak_bytes ? in_place : offloaded;
  }

 private:
  bool one_memory() const { return rank_.one_memory(); }

  absl::Status Rehearse(FitProposal* proposal,
                        MemoryLedger* host = nullptr) const {
    const Config config = WithProposal(config_, *proposal);
    const int64_t shards = config.zero_optimization.shards(rank_.world());
    Rank rank =
        MakeSoloRank(*rank_.device, rank_.rank(), rank_.world(),
                     static_cast<int>(shards), rank_.gather->algorithm());
    rank.memory = rank_.memory;
    ZERO_ASSIGN_OR_RETURN(
        const Rehearsal rehearsal,
        RehearseRun(rank, config, tools_, TrainingWorkload(config)));
    Price(config, rehearsal, tools_, speed_, proposal);
    if (host != nullptr) *host = rehearsal.host_ledger;
    return absl::OkStatus();
  }

  const Rank& rank_;
  const Config& config_;
  const ModelTools& tools_;
  const FitLimits limits_;
  const MachineSpeed& speed_;
};

// Finds, for every stage, recompute level, group size and offload, the config's
// micro-batch and the largest one, of those that fit.
absl::StatusOr<std::vector<FitProposal>> FindFits(const Search& search,
                                                  const Rank& rank,
                                                  const ZeroConfig& zero,
                                                  bool on_disk) {
  const int64_t world = rank.world();
  const int64_t node = search.speed().ranks_per_node;
  std::set<int64_t> groups = {-1, zero.mics_shard_size};
  if (node < world && world % node == 0) groups.insert(node);
  // If the host's memory is the device's, offload saves nothing.
  const bool offloads = on_disk || !rank.one_memory();
  std::vector<FitProposal> found;
  for (const Offload offload : kOffloads) {
    if (!offloads && offload != Offload::kNone && offload != zero.offload()) {
      continue;
    }
    if (on_disk && offload == Offload::kNone) continue;
    // Without offload no update is delayed, which changes results.
    if (zero.delayed_update && offload == Offload::kNone) continue;
    for (const Recompute recompute : kRecomputeLevels) {
      for (int64_t stage = FirstStageOf(offload); stage <= 3; ++stage) {
        // One rank shards nothing: without offload all stages are the same,
        // with it stages 2 and 3.
        if (world == 1 && stage != zero.stage &&
            (offload == Offload::kNone || stage == 2)) {
          continue;
        }
        for (const int64_t group : groups) {
          if (stage == 0 && group != -1) continue;
          ZERO_RETURN_IF_ERROR(search.Try({.stage = stage,
                                           .mics_shard_size = group,
                                           .recompute = recompute,
                                           .offload = offload,
                                           .on_disk = on_disk},
                                          &found));
        }
      }
    }
  }
  return found;
}

}  // namespace

std::string FitProposal::Patch(const Config& config) const {
  std::vector<std::string> sets;
  const ZeroConfig& zero = config.zero_optimization;
  if (stage != zero.stage) {
    sets.push_back(absl::StrCat("zero_optimization.stage=", stage));
  }
  if (mics_shard_size != zero.mics_shard_size) {
    sets.push_back(
        absl::StrCat("zero_optimization.mics_shard_size=", mics_shard_size));
  }
  const Config changed = WithProposal(config, *this);
  const ZeroConfig& after = changed.zero_optimization;
  const auto offload_key = [&](const char* key, OffloadDevice was,
                               OffloadDevice is, const std::string& had_path,
                               const std::string& path) {
    constexpr const char* kNames[] = {"none", "cpu", "nvme"};
    const std::string section = absl::StrCat("zero_optimization.", key);
    if (was != is) {
      sets.push_back(
          absl::StrCat(section, ".device=", kNames[static_cast<int>(is)]));
    }
    if (is == OffloadDevice::kNvme && path != had_path) {
      sets.push_back(absl::StrCat(section, ".nvme_path=", path));
    }
  };
  offload_key("offload_optimizer", zero.offload_optimizer,
              after.offload_optimizer, zero.optimizer_nvme_path,
              after.optimizer_nvme_path);
  offload_key("offload_param", zero.offload_param, after.offload_param,
              zero.param_nvme_path, after.param_nvme_path);
  if (zero.offload_optimizer_ratio != after.offload_optimizer_ratio) {
    sets.push_back(absl::StrCat("zero_optimization.offload_optimizer.ratio=",
                                after.offload_optimizer_ratio));
  }
  const auto recompute_key = [&](const char* key, const char* value) {
    sets.push_back(absl::StrCat("activation_checkpointing.", key, "=", value));
  };
  const auto yes_no = [](bool yes) { return yes ? "true" : "false"; };
  if (config.activation_checkpointing != changed.activation_checkpointing) {
    recompute_key("enabled", yes_no(changed.activation_checkpointing));
  }
  if (config.recompute_granularity != changed.recompute_granularity) {
    recompute_key("granularity", RecomputeName(changed.recompute_granularity));
  }
  if (config.keep_all_activations != changed.keep_all_activations) {
    recompute_key("keep_all", yes_no(changed.keep_all_activations));
  }
  if (micro_batch != config.train_micro_batch_size_per_gpu) {
    sets.push_back(absl::StrCat("train_micro_batch_size_per_gpu=", micro_batch,
                                " gradient_accumulation_steps=", accumulation));
  }
  return sets.empty() ? "" : "--set " + absl::StrJoin(sets, " ");
}

Config WithProposal(Config config, const FitProposal& proposal) {
  ZeroConfig& zero = config.zero_optimization;
  zero.stage = proposal.stage;
  zero.mics_shard_size = proposal.mics_shard_size;
  zero.set_offload(proposal.offload);
  if (proposal.on_disk) {
    const std::string path =
        zero.uses_nvme() ? zero.nvme_path() : std::string("nvme");
    zero.offload_optimizer = OffloadDevice::kNvme;
    zero.optimizer_nvme_path = path;
    if (zero.offload_param != OffloadDevice::kNone) {
      zero.offload_param = OffloadDevice::kNvme;
      zero.param_nvme_path = path;
    }
  }
  config.set_recompute(proposal.recompute);
  config.train_micro_batch_size_per_gpu = proposal.micro_batch;
  config.gradient_accumulation_steps = proposal.accumulation;
  return config;
}

std::string DiskFolderOf(const Config& config) {
  const FitProposal on_disk = {.offload = Offload::kOptimizer, .on_disk = true};
  return WithProposal(config, on_disk).zero_optimization.nvme_path();
}

absl::StatusOr<std::vector<FitProposal>> ProposeFits(
    const Rank& rank, const Config& config, const ModelTools& tools,
    const FitLimits& limits, const MachineSpeed& speed) {
  const Search search(rank, config, tools, limits, speed);
  const ZeroConfig& zero = config.zero_optimization;
  ZERO_ASSIGN_OR_RETURN(std::vector<FitProposal> found,
                        FindFits(search, rank, zero, /*on_disk=*/false));
  // A disk is slow, and excludes other orders of updates.
  if (found.empty() && zero.may_use_disk()) {
    ZERO_ASSIGN_OR_RETURN(const bool may_fit, search.HoldsGradients());
    if (may_fit) {
      ZERO_ASSIGN_OR_RETURN(found,
                            FindFits(search, rank, zero, /*on_disk=*/true));
    }
  }
  // Of equals, the one with the shortest patch.
  const auto key = [&](const FitProposal& fit) {
    return std::tuple(fit.seconds, fit.peak_bytes, fit.Patch(config).size());
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const FitProposal& a, const FitProposal& b) {
                     return key(a) < key(b);
                   });
  std::vector<FitProposal> worthwhile;
  for (const FitProposal& proposal : found) {
    if (worthwhile.empty() ||
        proposal.peak_bytes < worthwhile.back().peak_bytes) {
      worthwhile.push_back(proposal);
    }
  }
  return worthwhile;
}

FitProposal PriceAsItIs(const Config& config, const Rehearsal& rehearsal,
                        const ModelTools& tools, const MachineSpeed& speed) {
  FitProposal own = {
      .stage = config.zero_optimization.stage,
      .mics_shard_size = config.zero_optimization.mics_shard_size,
      .micro_batch = config.train_micro_batch_size_per_gpu,
      .accumulation = config.gradient_accumulation_steps,
      .recompute = config.recompute(),
      .offload = config.zero_optimization.offload()};
  Price(config, rehearsal, tools, speed, &own);
  return own;
}

absl::StatusOr<std::string> NothingFits(const Rank& rank, const Config& config,
                                        const ModelTools& tools,
                                        const FitLimits& limits,
                                        const MachineSpeed& speed) {
  if (limits.disk != INT64_MAX) {
    FitLimits any_disk = limits;
    any_disk.disk = INT64_MAX;
    ZERO_ASSIGN_OR_RETURN(const std::vector<FitProposal> fits,
                          ProposeFits(rank, config, tools, any_disk, speed));
    const auto least =
        std::min_element(fits.begin(), fits.end(),
                         [](const FitProposal& a, const FitProposal& b) {
                           return a.disk_bytes < b.disk_bytes;
                         });
    if (least != fits.end()) {
      return absl::StrFormat(
          "with this global batch only offload to a disk fits, and the disk at "
          "'%s' has no room: a rank needs at least %s there and may take %s; "
          "set nvme_path to a folder on a larger disk",
          DiskFolderOf(config),
          HumanBytes(static_cast<double>(least->disk_bytes)),
          HumanBytes(static_cast<double>(limits.disk)));
    }
  }
  const Search search(rank, config, tools, limits, speed);
  ZERO_ASSIGN_OR_RETURN(const FitProposal least, search.Smallest());
  const bool on_host = !rank.one_memory() && least.peak_bytes <= limits.device;
  const int64_t needed = on_host ? least.host_bytes : least.peak_bytes;
  const int64_t limit = on_host ? limits.host : limits.device;
  const bool has_budget =
      (on_host ? rank.memory.host_budget : rank.memory.device_budget) > 0;
  const bool on_gpu = rank.device->kind() == DeviceKind::kCuda;
  return absl::StrFormat(
      "with this global batch nothing fits, whatever the stage, the recompute "
      "and the micro-batch: %sa rank may take %s%s of the %s's memory%s; take "
      "a shorter data.sequence_length, a smaller model or %s",
      on_host ? "with offload the device has room, but " : "",
      HumanBytes(static_cast<double>(limit)),
      !has_budget ? ""
      : on_host   ? " (--host-memory)"
      : on_gpu    ? absl::StrFormat(" (%s by --device-memory, less %s for "
                                       "kernels that load later)",
                                    HumanBytes(rank.memory.device_budget),
                                    HumanBytes(kLateKernelsBytes))
                  : " (--device-memory)",
      on_host ? "host" : "device",
      needed > limit ? absl::StrCat(" and needs at least ",
                                    HumanBytes(static_cast<double>(needed)))
                     : "",
      on_host  ? "more ranks, on other hosts"
      : on_gpu ? "more ranks, on GPUs of their own"
               : "a machine with more memory");
}

}  // namespace zero
