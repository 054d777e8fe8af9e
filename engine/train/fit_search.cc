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
#include "kernels/check.h"

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

}  // namespace

std::string FitSettings::Patch(const Config& config) const {
  std::vector<std::string> sets;
  const ZeroConfig& zero = config.zero_optimization;
  if (stage != zero.stage) {
    sets.push_back(absl::StrCat("zero_optimization.stage=", stage));
  }
  if (mics_shard_size != zero.mics_shard_size) {
    sets.push_back(
        absl::StrCat("zero_optimization.mics_shard_size=", mics_shard_size));
  }
  const Config changed = WithSettings(config, *this);
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
  if (config.training.async_save != changed.training.async_save) {
    sets.push_back("training.async_save=false");
  }
  return sets.empty() ? "" : "--set " + absl::StrJoin(sets, " ");
}

FitSettings SettingsOf(const Config& config) {
  return {.stage = config.zero_optimization.stage,
          .mics_shard_size = config.zero_optimization.mics_shard_size,
          .micro_batch = config.train_micro_batch_size_per_gpu,
          .accumulation = config.gradient_accumulation_steps,
          .recompute = config.recompute(),
          .offload = config.zero_optimization.offload()};
}

Config WithSettings(Config config, const FitSettings& settings) {
  ZeroConfig& zero = config.zero_optimization;
  zero.stage = settings.stage;
  zero.mics_shard_size = settings.mics_shard_size;
  zero.set_offload(settings.offload);
  // The device's own update is never delayed.
  if (settings.offload == Offload::kNone) zero.delayed_update = false;
  if (settings.on_disk) {
    const std::string path =
        zero.uses_nvme() ? zero.nvme_path() : std::string("nvme");
    zero.offload_optimizer = OffloadDevice::kNvme;
    zero.optimizer_nvme_path = path;
    if (zero.offload_param != OffloadDevice::kNone) {
      zero.offload_param = OffloadDevice::kNvme;
      zero.param_nvme_path = path;
    }
  }
  config.set_recompute(settings.recompute);
  config.train_micro_batch_size_per_gpu = settings.micro_batch;
  config.gradient_accumulation_steps = settings.accumulation;
  if (settings.without_copy) config.training.async_save = false;
  return config;
}

std::string DiskFolderOf(const Config& config) {
  FitSettings on_disk = SettingsOf(config);
  on_disk.offload = Offload::kOptimizer;
  on_disk.on_disk = true;
  return WithSettings(config, on_disk).zero_optimization.nvme_path();
}

absl::StatusOr<Rehearsal> FitSearch::Rehearse(const FitSettings& settings) {
  const Config config = WithSettings(config_, settings);
  const int64_t shards = config.zero_optimization.shards(rank_.world());
  Rank rank = MakeSoloRank(*rank_.device, rank_.rank(), rank_.world(),
                           static_cast<int>(shards), rank_.gather->algorithm());
  rank.memory = rank_.memory;
  ZERO_ASSIGN_OR_RETURN(
      Rehearsal rehearsal,
      RehearseRun(rank, config, tools_, TrainingWorkload(config)));
  const Plan& plan = rehearsal.plan;
  TokenFlops flops;
  if (tools_.flops_per_token != nullptr) {
    flops = tools_.flops_per_token(config.model, config.data.sequence_length,
                                   settings.recompute);
  }
  const double tokens =
      static_cast<double>(settings.micro_batch * settings.accumulation *
                          config.data.sequence_length);
  const StepWire& wire = rehearsal.wire;
  FitProposal priced{settings};
  priced.peak_bytes = rehearsal.needed_bytes();
  priced.host_bytes = rehearsal.host_bytes();
  priced.host_gradient_bytes =
      rehearsal.host_ledger
          .at_peak()[static_cast<int>(MemoryCategory::kGradients)];
  priced.disk_bytes = rehearsal.disk_bytes;
  const MemoryLedger& of_copy =
      rehearsal.one_memory ? rehearsal.ledger : rehearsal.host_ledger;
  priced.copy_bytes =
      of_copy.at_peak()[static_cast<int>(MemoryCategory::kSnapshot)];
  priced.sent_bytes = wire.sent();
  priced.flops = tokens * (flops.model + flops.recomputed);
  priced.seconds =
      priced.flops / speed_.flops_per_second +
      tokens * RecomputedPassElemsPerToken(config.model, settings.recompute) *
          DTypeBytes(config.param_dtype()) / speed_.memory_bytes_per_second +
      (wire.gathered + wire.reduced) / speed_.BytesPerSecond(plan.shard.size) +
      wire.across / speed_.BytesPerSecond(plan.world);
  if (settings.offload != Offload::kNone) {
    priced.seconds += OffloadSeconds(rehearsal, plan.world, speed_);
  }
  priced_.insert_or_assign(settings, priced);
  return rehearsal;
}

// The copy is there for all of a run, so the price without it needs no other
// rehearsal.
absl::StatusOr<FitProposal> FitSearch::Price(FitSettings settings) {
  const bool without_copy = std::exchange(settings.without_copy, false);
  if (!priced_.contains(settings)) {
    ZERO_RETURN_IF_ERROR(Rehearse(settings).status());
  }
  FitProposal priced = priced_.at(settings);
  if (!without_copy || priced.copy_bytes == 0) return priced;
  priced.without_copy = true;
  (rank_.one_memory() ? priced.peak_bytes : priced.host_bytes) -=
      priced.copy_bytes;
  const TrainingConfig& training = config_.training;
  const double write_seconds =
      std::exchange(priced.copy_bytes, 0) / speed_.disk_bytes_per_second;
  if (training.save_every > 0) {
    priced.seconds += write_seconds / training.save_every;
  } else {
    priced.seconds *= 1 + write_seconds / (60 * training.save_every_minutes);
  }
  return priced;
}

FitSearch::Shortage FitSearch::Short(const FitProposal& needs,
                                     const FitLimits& limits) const {
  return {.disk = needs.disk_bytes > limits.disk,
          .device = needs.peak_bytes > limits.device,
          .host = !rank_.one_memory() && needs.host_bytes > limits.host};
}

// Appends the one with the config's micro-batch, which may take less for the
// same price, and the one with the largest, of those that fit. With one
// micro-step there is no sum of gradients during backward, so it may take less
// than several; among several the peak grows with the micro-batch.
void FitSearch::Try(FitSettings settings, const FitLimits& limits,
                    Tried* tried) {
  const auto splits = SplitsOf(config_, settings.recompute);
  FitProposal priced;
  const auto fits = [&](size_t i) {
    std::tie(settings.micro_batch, settings.accumulation) = splits[i];
    for (const bool without_copy : {false, true}) {
      settings.without_copy = without_copy;
      const absl::StatusOr<FitProposal> price = Price(settings);
      if (!price.ok()) return false;  // more tokens than kernels take
      priced = *price;
      if (Short(priced, limits).none()) return true;
      tried->too_large.push_back(priced);
    }
    return false;
  };
  const size_t whole = splits.size() - 1;
  size_t own = 0;
  while (splits[own].first != config_.train_micro_batch_size_per_gpu) ++own;
  const bool own_fits = fits(own);
  if (own_fits) tried->fits.push_back(priced);
  if (own < whole && fits(whole)) {
    tried->fits.push_back(priced);
    return;
  }
  // The first `fitting` fit; from `ends` on none does.
  const size_t known = own_fits ? own + 1 : 0;
  size_t fitting = known, ends = own_fits ? whole : own;
  FitProposal best;
  while (fitting < ends) {
    const size_t middle = (fitting + ends) / 2;
    if (fits(middle)) {
      best = priced;
      fitting = middle + 1;
    } else {
      ends = middle;
    }
  }
  if (fitting > known) tried->fits.push_back(best);
}

FitSearch::Tried FitSearch::TryAll(const FitLimits& limits, bool on_disk) {
  const ZeroConfig& zero = config_.zero_optimization;
  const int64_t world = rank_.world();
  const int64_t node = speed_.ranks_per_node;
  std::set<int64_t> groups = {-1, zero.mics_shard_size};
  if (node < world && world % node == 0) groups.insert(node);
  // If the host's memory is the device's, offload saves nothing.
  const bool offloads = on_disk || !rank_.one_memory();
  Tried tried;
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
          Try({.stage = stage,
               .mics_shard_size = group,
               .recompute = recompute,
               .offload = offload,
               .on_disk = on_disk},
              limits, &tried);
        }
      }
    }
  }
  return tried;
}

absl::StatusOr<bool> FitSearch::DiskMayHelp(const FitLimits& limits) {
  if (!config_.zero_optimization.may_use_disk()) return false;
  ZERO_ASSIGN_OR_RETURN(const FitProposal least, Price(SmallestSettings()));
  return least.host_gradient_bytes <=
         (rank_.one_memory() ? limits.device : limits.host);
}

absl::StatusOr<std::vector<FitProposal>> FitSearch::Propose(
    const FitLimits& limits) {
  ZERO_RETURN_IF_ERROR(Price(SettingsOf(config_)).status());
  std::vector<FitProposal> found = TryAll(limits, /*on_disk=*/false).fits;
  if (found.empty()) {
    // A disk is slow, and excludes other orders of updates.
    ZERO_ASSIGN_OR_RETURN(const bool disk_may_help, DiskMayHelp(limits));
    if (disk_may_help) found = TryAll(limits, /*on_disk=*/true).fits;
  }
  // Of equals, the one with the shortest patch.
  const auto key = [&](const FitProposal& fit) {
    return std::tuple(fit.seconds, fit.peak_bytes, fit.Patch(config_).size());
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

FitSettings FitSearch::SmallestSettings() const {
  return {.stage = 3,
          .mics_shard_size = -1,
          .micro_batch = 1,
          .accumulation = 1,
          .recompute = Recompute::kFull,
          .offload = Offload::kAll,
          .on_disk = config_.zero_optimization.may_use_disk(),
          .without_copy = true};
}

// Where nothing fits, a search has tried each setting's smallest micro-batch
// and its largest, and so what takes the least. Searching again, now with no
// memory at all, is nearly free: every price is cached.
absl::StatusOr<FitProposal> FitSearch::LeastShort(const FitLimits& limits) {
  constexpr FitLimits kNothing = {.device = 0, .host = 0, .disk = 0};
  std::vector<FitProposal> candidates =
      TryAll(kNothing, /*on_disk=*/false).too_large;
  Tried on_disk;
  ZERO_ASSIGN_OR_RETURN(const bool disk_may_help, DiskMayHelp(limits));
  if (disk_may_help) {
    on_disk = TryAll(kNothing, /*on_disk=*/true);
  } else if (config_.zero_optimization.may_use_disk()) {
    // Propose left the disk out, so a search would not be free.
    Try(SmallestSettings(), kNothing, &on_disk);
  }
  candidates.insert(candidates.end(), on_disk.too_large.begin(),
                    on_disk.too_large.end());
  ZERO_CHECK(!candidates.empty()) << "not even the config as it is";
  const auto key = [&](const FitProposal& fit) {
    const Shortage shortage = Short(fit, limits);
    return std::tuple(shortage.disk, shortage.device, shortage.host,
                      shortage.device ? fit.peak_bytes : 0, fit.host_bytes);
  };
  return *std::min_element(candidates.begin(), candidates.end(),
                           [&](const FitProposal& a, const FitProposal& b) {
                             return key(a) < key(b);
                           });
}

absl::StatusOr<std::string> FitSearch::NothingFits(const FitLimits& limits) {
  if (limits.disk != INT64_MAX) {
    FitLimits any_disk = limits;
    any_disk.disk = INT64_MAX;
    ZERO_ASSIGN_OR_RETURN(const std::vector<FitProposal> fits,
                          Propose(any_disk));
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
          DiskFolderOf(config_),
          HumanBytesUp(static_cast<double>(least->disk_bytes)),
          HumanBytesDown(static_cast<double>(limits.disk)));
    }
  }
  ZERO_ASSIGN_OR_RETURN(const FitProposal least, LeastShort(limits));
  const Shortage shortage = Short(least, limits);
  // Some candidate needs no disk.
  ZERO_CHECK(!shortage.disk && !shortage.none());
  const DeviceShare share = DeviceShareOf(rank_, limits.device);
  std::vector<std::string> needs, budgets;
  const auto add = [&](int64_t needed, const std::string& of, int64_t limit,
                       bool is_budget, const char* key) {
    needs.push_back(absl::StrCat(
        "a rank needs at least ", HumanBytesUp(static_cast<double>(needed)),
        " of ", of, " and may take ",
        HumanBytesDown(static_cast<double>(limit)),
        is_budget ? absl::StrCat(" (", key, ")") : ""));
    if (is_budget) budgets.push_back(key);
  };
  if (shortage.device) {
    const std::string late =
        share.late_bytes == 0
            ? ""
            : absl::StrCat(" (", HumanBytes(share.late_bytes),
                           " of it for kernels that load later)");
    add(least.peak_bytes + share.late_bytes + RoomBytes(rank_),
        "the device's memory" + late, share.bytes,
        rank_.memory.device_budget > 0, "--device-memory");
  }
  if (shortage.host) {
    add(least.host_bytes, "the host's memory", limits.host,
        rank_.memory.host_budget > 0, "--host-memory");
  }
  const bool on_gpu = rank_.device->kind() == DeviceKind::kCuda;
  return absl::StrCat(
      "with this global batch nothing fits, whatever the stage, the recompute "
      "and the micro-batch: ",
      shortage.device ? "" : "with offload the device has room, but ",
      absl::StrJoin(needs, "; "), "; ",
      budgets.empty()
          ? ""
          : absl::StrCat("raise ", absl::StrJoin(budgets, " and "), ", or "),
      "take a shorter data.sequence_length, a smaller model or ",
      !shortage.device ? "more ranks, on other hosts"
      : on_gpu         ? "more ranks, on GPUs of their own"
                       : "a machine with more memory");
}

}  // namespace zero
