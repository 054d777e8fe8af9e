// What to change in a config so that its run fits, and at what cost.
#ifndef ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
#define ZERO_ENGINE_TRAIN_FIT_SEARCH_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/rank.h"
#include "engine/config/config.h"
#include "engine/train/machine_speed.h"
#include "engine/train/session.h"

namespace zero {

// What may change while the training stays the same: global batch, model and
// data stay.
struct FitSettings {
  int64_t stage, mics_shard_size, micro_batch, accumulation;
  Recompute recompute;
  Offload offload;
  // What is offloaded goes to a disk. Otherwise only what the config has there.
  bool on_disk = false;
  // Checkpoints are written without a copy in memory: training waits.
  bool without_copy = false;

  auto operator<=>(const FitSettings&) const = default;

  // "--set KEY=VALUE KEY=VALUE ..." for the differences from `config`; empty:
  // none.
  std::string Patch(const Config& config) const;
};

FitSettings SettingsOf(const Config& config);

// The same run with other settings. Without a disk in the config, that of the
// current folder is assumed.
Config WithSettings(Config config, const FitSettings& settings);

// Settings, and what a rank needs with them.
struct FitProposal : FitSettings {
  int64_t peak_bytes;
  int64_t host_bytes;
  int64_t host_gradient_bytes;  // of these, sums, which stay off a disk
  int64_t disk_bytes;
  int64_t copy_bytes;  // of the device's or host's, for checkpoints
  int64_t sent_bytes;  // in a step
  double flops;        // likewise
  // Seconds of a step at the assumed speed, without overlap: only for
  // comparison.
  double seconds;
};

// Bytes that a rank may take.
struct FitLimits {
  int64_t device;
  int64_t host;  // if that is another memory
  int64_t disk = INT64_MAX;
};

// The folder of the disk that proposals use.
std::string DiskFolderOf(const Config& config);

// Searches for settings with which a run fits. Every try is a rehearsal
// (RehearseRun), and no settings are rehearsed twice. REQUIRES: no parameter
// server, which has no stages.
class FitSearch {
 public:
  // All but `speed` must outlive it.
  FitSearch(const Rank& rank, const Config& config, const ModelTools& tools,
            const MachineSpeed& speed)
      : rank_(rank), config_(config), tools_(tools), speed_(speed) {}

  // The run with these settings, whether it fits or not. Its price is kept.
  absl::StatusOr<Rehearsal> Rehearse(const FitSettings& settings);
  // What it needs.
  absl::StatusOr<FitProposal> Price(FitSettings settings);

  // Proposals with which a rank takes no more than `limits`, the cheapest
  // first. Searches every stage, level of recomputation, sharding group (the
  // config's, all ranks, a node's) and, on a GPU, offload, each with the
  // config's micro-batch and the largest one, of those that fit. Where a larger
  // one saves no traffic (stages 0 and 1), it costs the same and takes more, so
  // it is dropped. Recomputing nothing is tried only with the config's
  // micro-batch or a larger one. Drops proposals that cost no less and take no
  // less of the device than another. What fits only without the copy for
  // checkpoints is proposed so. If nothing fits, also searches offload to a
  // disk with room for it, on the CPU too. Settings that cannot be rehearsed do
  // not fit. Errors: those of rehearsing the config's own settings.
  absl::StatusOr<std::vector<FitProposal>> Propose(const FitLimits& limits);

  // Why there are no proposals, and what to do. Names each memory that is too
  // small, the device's, the host's or the disk, and how much of it is enough.
  // REQUIRES: Propose(limits) is empty.
  absl::StatusOr<std::string> NothingFits(const FitLimits& limits);

 private:
  struct Tried {
    std::vector<FitProposal> fits, too_large;
  };
  Tried TryAll(const FitLimits& limits, bool on_disk);
  void Try(FitSettings settings, const FitLimits& limits, Tried* tried);
  // Whether a disk may leave enough room. Checked early: a model without room
  // has many units.
  absl::StatusOr<bool> DiskMayHelp(const FitLimits& limits);
  // One sequence, with everything offloaded: no proposal takes less of the
  // device, unless its states are less than what offload adds.
  FitSettings SmallestSettings() const;
  // The memories in which there is too little.
  struct Shortage {
    bool disk, device, host;
    bool none() const { return !disk && !device && !host; }
  };
  Shortage Short(const FitProposal& needs, const FitLimits& limits) const;
  // The candidate to name: short of the host's memory only if there is one,
  // else of the device's; of these, the one that needs least.
  absl::StatusOr<FitProposal> LeastShort(const FitLimits& limits);

  const Rank& rank_;
  const Config& config_;
  const ModelTools& tools_;
  const MachineSpeed speed_;
  std::map<FitSettings, FitProposal> priced_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
