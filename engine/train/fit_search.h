// What to change in a config so that its run fits, and at what price.
#ifndef ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
#define ZERO_ENGINE_TRAIN_FIT_SEARCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/rank.h"
#include "engine/config/config.h"
#include "engine/train/session.h"

namespace zero {

// A way to run the same training: global batch, model and data stay.
struct FitProposal {
  int64_t stage, micro_batch, accumulation;
  Recompute recompute;
  int64_t peak_bytes;  // of a rank
  int64_t sent_bytes;  // by a rank in a step
  double flops;        // of a rank in a step
  // Seconds of a step at AssumedSpeed, with nothing hidden: only for
  // comparison.
  double seconds;

  // "--set KEY=VALUE ..." of what is not as in `config`; empty: all is.
  std::string Patch(const Config& config) const;
};

// What prices assume of a device: round figures, not measured.
struct AssumedSpeed {
  double flops_per_second, bytes_per_second;
};
AssumedSpeed AssumedSpeedOf(const Device& device);

// The same run with a proposal's values.
Config WithProposal(Config config, const FitProposal& proposal);

// Ways in which a rank's peak is at most `memory` bytes: for every stage from
// the config's on, with its recompute and more, the largest
// micro-batch. The cheapest first; none that costs and takes more than another.
// Every try is a rehearsal (RehearseRun).
// REQUIRES: no parameter server, which has no stages.
absl::StatusOr<std::vector<FitProposal>> ProposeFits(const Rank& rank,
                                                     const Config& config,
                                                     const ModelTools& tools,
                                                     int64_t memory);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_FIT_SEARCH_H_
