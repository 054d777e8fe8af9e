#include "engine/train/fit_search.h"

#include <algorithm>
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
         int64_t memory)
      : rank_(rank), config_(config), tools_(tools), memory_(memory) {}

  // Appends the one with the largest micro-batch that fits, if any does: with
  // the micro-batch the peak grows.
  absl::Status Try(int64_t stage, Recompute recompute,
                   std::vector<FitProposal>* found) const {
    const auto splits = SplitsOf(config_);
    size_t fits = 0, ends = splits.size();  // how many do; and how many may
    FitProposal best;
    while (fits < ends) {
      const size_t middle = (fits + ends) / 2;
      const auto [micro, accumulation] = splits[middle];
      ZERO_ASSIGN_OR_RETURN(const FitProposal proposal,
                            Rehearsed({.stage = stage,
                                       .micro_batch = micro,
                                       .accumulation = accumulation,
                                       .recompute = recompute}));
      if (proposal.peak_bytes <= memory_) {
        best = proposal;
        fits = middle + 1;
      } else {
        ends = middle;
      }
    }
    if (fits > 0) found->push_back(best);
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<FitProposal> Rehearsed(FitProposal proposal) const {
    const Config config = WithProposal(config_, proposal);
    ZERO_ASSIGN_OR_RETURN(
        const Rehearsal rehearsal,
        RehearseRun(rank_, config, tools_, TrainingWorkload(config)));
    TokenFlops flops;
    if (tools_.flops_per_token != nullptr) {
      flops = tools_.flops_per_token(config.model, config.data.sequence_length,
                                     proposal.recompute);
    }
    const double tokens =
        static_cast<double>(proposal.micro_batch * proposal.accumulation *
                            config.data.sequence_length);
    const AssumedSpeed speed = AssumedSpeedOf(*rank_.device);
    proposal.peak_bytes = rehearsal.ledger.total_peak_bytes();
    proposal.sent_bytes = rehearsal.wire.sent();
    proposal.flops = tokens * (flops.model + flops.recomputed);
    proposal.seconds = proposal.flops / speed.flops_per_second +
                       proposal.sent_bytes / speed.bytes_per_second;
    return proposal;
  }

  const Rank& rank_;
  const Config& config_;
  const ModelTools& tools_;
  const int64_t memory_;
};

}  // namespace

AssumedSpeed AssumedSpeedOf(const Device& device) {
  if (device.kind() == DeviceKind::kCuda) return {4e14, 5e10};
  return {1e11 * device.info().num_threads, 5e9};
}

std::string FitProposal::Patch(const Config& config) const {
  std::vector<std::string> sets;
  if (stage != config.zero_optimization.stage) {
    sets.push_back(absl::StrCat("--set zero_optimization.stage=", stage));
  }
  if (recompute != config.recompute()) {
    sets.push_back(
        absl::StrCat("--set activation_checkpointing.enabled=true "
                     "--set activation_checkpointing.granularity=",
                     RecomputeName(recompute)));
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
                                                     int64_t memory) {
  const Search search(rank, config, tools, memory);
  // One rank has nothing to shard.
  const int64_t last_stage =
      rank.world() > 1 ? 3 : config.zero_optimization.stage;
  std::vector<FitProposal> found;
  for (const Recompute recompute : kRecomputeLevels) {
    if (recompute < config.recompute()) continue;
    for (int64_t stage = config.zero_optimization.stage; stage <= last_stage;
         ++stage) {
      ZERO_RETURN_IF_ERROR(search.Try(stage, recompute, &found));
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
