// What to change in a config so that its run fits, and at what cost.
#ifndef ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
#define ZERO_ENGINE_TRAIN_FIT_SEARCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/rank.h"
#include "engine/config/config.h"
#include "engine/train/machine_speed.h"
#include "engine/train/session.h"

namespace zero {

// A way to run the same training: global batch, model and data stay.
struct FitProposal {
  int64_t stage, mics_shard_size, micro_batch, accumulation;
  Recompute recompute;
  Offload offload;
  bool on_disk = false;  // offload to device nvme
  int64_t peak_bytes;    // of a rank
  int64_t host_bytes;    // likewise
  int64_t disk_bytes;    // likewise
  int64_t sent_bytes;    // by a rank in a step
  double flops;          // of a rank in a step
  // Seconds of a step at the assumed speed, without overlap: only for
  // comparison.
  double seconds;

  // "--set KEY=VALUE KEY=VALUE ..." for the differences from `config`; empty:
  // none.
  std::string Patch(const Config& config) const;
};

// The same run with a proposal's values. Without a disk in the config, that of
// the current folder is assumed.
Config WithProposal(Config config, const FitProposal& proposal);

// Bytes that a rank may take.
struct FitLimits {
  int64_t device;
  int64_t host;  // if that is another memory
  int64_t disk = INT64_MAX;
};

// The folder of the disk that proposals use.
std::string DiskFolderOf(const Config& config);

// Proposals with which a rank takes no more than `limits`, the cheapest first.
// Searches every stage, level of recomputation, sharding group (the config's,
// all ranks, a node's) and, on a GPU, offload, each with the config's
// micro-batch and the largest one, of those that fit. Where a larger one saves
// no traffic (stages 0 and 1), it costs the same and takes more, so it is
// dropped. Recomputing nothing is tried only with the config's micro-batch or a
// larger one. Drops proposals that cost no less and take no less of the device
// than another. If nothing fits, also searches offload to a disk with room for
// it, on the CPU too. Every try is a rehearsal (RehearseRun). REQUIRES: no
// parameter server, which has no stages.
absl::StatusOr<std::vector<FitProposal>> ProposeFits(const Rank& rank,
                                                     const Config& config,
                                                     const ModelTools& tools,
                                                     const FitLimits& limits,
                                                     const MachineSpeed& speed);

// Why there are no proposals, and what to do. Names the memory that is too
// small: the device's, the host's or the disk.
absl::StatusOr<std::string> NothingFits(const Rank& rank, const Config& config,
                                        const ModelTools& tools,
                                        const FitLimits& limits,
                                        const MachineSpeed& speed);

// The memory and cost of the config's own settings, whether they fit or not.
// `rehearsal`: the config's own (RehearseRun).
FitProposal PriceAsItIs(const Config& config, const Rehearsal& rehearsal,
                        const ModelTools& tools, const MachineSpeed& speed);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
