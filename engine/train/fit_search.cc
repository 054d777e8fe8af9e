#include "engine/train/fit_search.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"

namespace zero {
namespace {

// What keeps the global batch: micro-batch x accumulation, ascending by the
// former.
std::vector<std::pair<int64_t, int64_t>> SplitsOf(const Config& config) {
  const int64_t sequences = config.train_micro_batch_size_per_gpu *
                            config.gradient_accumulation_steps;
  std::vector<std::pair<int64_t, int64_t>> splits;
  for (int64_t micro = 1; micro <= sequences; ++micro) {
    if (sequences % micro == 0) splits.emplace_back(micro, sequences / micro);
  }
  return splits;
}

class Search {
 public:
  Search(const Rank& rank, const Config& config, const ModelTools& tools,
         const FitLimits& limits)
      : rank_(rank), config_(config), tools_(tools), limits_(limits) {}

  // Appends the one with the largest micro-batch that fits, if any does. With
  // one micro-step no sum of gradients lies beside a backward pass, so it may
  // take less than several; of these the peak grows with the micro-batch.
  absl::Status Try(FitProposal proposal,
                   std::vector<FitProposal>* found) const {
    const auto splits = SplitsOf(config_);
    const auto fits = [&](size_t i) -> absl::StatusOr<bool> {
      std::tie(proposal.micro_batch, proposal.accumulation) = splits[i];
      ZERO_RETURN_IF_ERROR(Rehearse(&proposal));
      return proposal.peak_bytes <= limits_.device &&
             (one_memory() || proposal.host_bytes <= limits_.host);
    };
    ZERO_ASSIGN_OR_RETURN(const bool whole, fits(splits.size() - 1));
    if (whole) {
      found->push_back(proposal);
      return absl::OkStatus();
    }
    size_t fitting = 0, ends = splits.size() - 1;  // how many do; how many may
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
    if (fitting > 0) found->push_back(best);
    return absl::OkStatus();
  }

 private:
  bool one_memory() const { return rank_.device->kind() == DeviceKind::kCpu; }

  absl::Status Rehearse(FitProposal* proposal) const {
    const Config config = WithProposal(config_, *proposal);
    const int64_t world = rank_.world();
    const int64_t shards = config.zero_optimization.shards(world);
    Rank rank =
        MakeLoneRank(*rank_.device, rank_.rank(), rank_.world(),
                     static_cast<int>(shards), rank_.gather->algorithm());
    rank.sharers = rank_.sharers;
    rank.host_sharers = rank_.host_sharers;
    rank.context_sharers = rank_.context_sharers;
    ZERO_ASSIGN_OR_RETURN(
        const Rehearsal rehearsal,
        RehearseRun(rank, config, tools_, TrainingWorkload(config)));
    TokenFlops flops;
    if (tools_.flops_per_token != nullptr) {
      flops = tools_.flops_per_token(config.model, config.data.sequence_length,
                                     proposal->recompute);
    }
    const double tokens =
        static_cast<double>(proposal->micro_batch * proposal->accumulation *
                            config.data.sequence_length);
    const AssumedSpeed speed = AssumedSpeedOf(*rank_.device);
    const StepWire& wire = rehearsal.wire;
    proposal->peak_bytes = rehearsal.needed_bytes();
    proposal->host_bytes = rehearsal.host_bytes();
    proposal->sent_bytes = wire.sent();
    proposal->flops = tokens * (flops.model + flops.recomputed);
    proposal->seconds =
        proposal->flops / speed.flops_per_second +
        (wire.gathered + wire.reduced) / speed.BytesPerSecond(shards) +
        wire.across / speed.BytesPerSecond(world);
    if (proposal->offload == Offload::kNone) return absl::OkStatus();
    const Plan& plan = rehearsal.plan;
    const int64_t updated =
        plan.StateElems(plan.HostUpdatedElems(), plan.placement.optimizer);
    proposal->seconds +=
        (rehearsal.host_traffic.up + rehearsal.host_traffic.down) /
            speed.host_bytes_per_second +
        updated * std::min(world, speed.ranks_per_node) /
            speed.host_updates_per_second;
    return absl::OkStatus();
  }

  const Rank& rank_;
  const Config& config_;
  const ModelTools& tools_;
  const FitLimits limits_;
};

}  // namespace

AssumedSpeed AssumedSpeedOf(const Device& device) {
  // Adam moves 28 bytes an element, of a host's 90 GB/s.
  if (device.kind() == DeviceKind::kCuda) {
    return {.flops_per_second = 4e14,
            .node_bytes_per_second = 3e11,
            .bytes_per_second = 5e10,
            .ranks_per_node = 8,
            .host_bytes_per_second = 2.5e10,
            .host_updates_per_second = 3e9};
  }
  // Ranks are threads of one machine.
  return {.flops_per_second = 1e11 * device.info().num_threads,
          .node_bytes_per_second = 5e9,
          .bytes_per_second = 5e9,
          .ranks_per_node = INT64_MAX,
          .host_bytes_per_second = 5e9,
          .host_updates_per_second = 3e8};
}

std::string FitProposal::Patch(const Config& config) const {
  std::vector<std::string> sets;
  const ZeroConfig& zero = config.zero_optimization;
  if (stage != zero.stage) {
    sets.push_back(absl::StrCat("--set zero_optimization.stage=", stage));
  }
  if (mics_shard_size != zero.mics_shard_size) {
    sets.push_back(absl::StrCat("--set zero_optimization.mics_shard_size=",
                                mics_shard_size));
  }
  const ZeroConfig after = WithProposal(config, *this).zero_optimization;
  const auto offload_key = [&](const char* key, OffloadDevice was,
                               OffloadDevice is) {
    if (was == is) return;
    sets.push_back(absl::StrCat("--set zero_optimization.", key, ".device=",
                                is == OffloadDevice::kCpu ? "cpu" : "none"));
  };
  offload_key("offload_optimizer", zero.offload_optimizer,
              after.offload_optimizer);
  offload_key("offload_param", zero.offload_param, after.offload_param);
  if (zero.offload_optimizer_ratio != after.offload_optimizer_ratio) {
    sets.push_back(
        absl::StrCat("--set zero_optimization.offload_optimizer.ratio=",
                     after.offload_optimizer_ratio));
  }
  if (recompute != config.recompute()) {
    const bool enabled = recompute != Recompute::kOff;
    sets.push_back(absl::StrCat("--set activation_checkpointing.enabled=",
                                enabled ? "true" : "false"));
    if (enabled) {
      sets.push_back(absl::StrCat("--set activation_checkpointing.granularity=",
                                  RecomputeName(recompute)));
    }
  }
  if (micro_batch != config.train_micro_batch_size_per_gpu) {
    sets.push_back(
        absl::StrCat("--set train_micro_batch_size_per_gpu=", micro_batch,
                     " --set gradient_accumulation_steps=", accumulation));
  }
  return absl::StrJoin(sets, " ");
}

Config WithProposal(Config config, const FitProposal& proposal) {
  config.zero_optimization.stage = proposal.stage;
  config.zero_optimization.mics_shard_size = proposal.mics_shard_size;
  config.zero_optimization.set_offload(proposal.offload);
  config.activation_checkpointing = proposal.recompute != Recompute::kOff;
  if (config.activation_checkpointing) {
    config.recompute_granularity = proposal.recompute;
  }
  config.train_micro_batch_size_per_gpu = proposal.micro_batch;
  config.gradient_accumulation_steps = proposal.accumulation;
  return config;
}

absl::StatusOr<std::vector<FitProposal>> ProposeFits(const Rank& rank,
                                                     const Config& config,
                                                     const ModelTools& tools,
                                                     const FitLimits& limits) {
  const Search search(rank, config, tools, limits);
  const ZeroConfig& zero = config.zero_optimization;
  const int64_t world = rank.world();
  const int64_t node = AssumedSpeedOf(*rank.device).ranks_per_node;
  std::set<int64_t> groups = {-1, zero.mics_shard_size};
  if (node < world && world % node == 0) groups.insert(node);
  // Where the host's memory is the device's, it saves nothing.
  const bool offloads = rank.device->kind() == DeviceKind::kCuda;
  std::vector<FitProposal> found;
  for (const Offload offload : kOffloads) {
    if (!offloads && offload != zero.offload()) continue;
    // Without offload no update is delayed, and results are others.
    if (zero.delayed_update && offload == Offload::kNone) continue;
    for (const Recompute recompute : kRecomputeLevels) {
      for (int64_t stage = FirstStageOf(offload); stage <= 3; ++stage) {
        // One rank has nothing to shard but between its device and its host,
        // nor has stage 0.
        const bool configured =
            stage == zero.stage && offload == zero.offload();
        const bool keeps_least = offload != Offload::kNone && stage == 3;
        if (world == 1 && !configured && !keeps_least &&
            !(offload == Offload::kNone && stage == zero.stage)) {
          continue;
        }
        for (const int64_t group : groups) {
          if (stage == 0 && group != -1) continue;
          ZERO_RETURN_IF_ERROR(search.Try({.stage = stage,
                                           .mics_shard_size = group,
                                           .recompute = recompute,
                                           .offload = offload},
                                          &found));
        }
      }
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const FitProposal& a, const FitProposal& b) {
                     return a.seconds < b.seconds;
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

}  // namespace zero
