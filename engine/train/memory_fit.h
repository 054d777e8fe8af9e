// Whether a run fits its device, and what to change if it does not.
#ifndef ZERO_ENGINE_TRAIN_MEMORY_FIT_H_
#define ZERO_ENGINE_TRAIN_MEMORY_FIT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "engine/comm/rank.h"
#include "engine/config/config.h"
#include "engine/train/session.h"

namespace zero {

// Left free on a GPU: the driver loads a kernel when it is launched first, so
// those of cuBLASLt, of cuDNN and our own come in the first step, when all
// memory is taken, and no prediction has them. On an H200 3 to 12 MB came, with
// CUDA 13.0, cuBLAS 13.1 and cuDNN 9.19.
inline constexpr int64_t kLateKernelsBytes = int64_t{128} << 20;

// Ranks that share the device's memory, `rank` included.
int SharersOf(const Rank& rank);
// And its host's.
int HostSharersOf(const Rank& rank);

// Device bytes that the ranks of this process may take together, without those
// held by other processes or forbidden by a control group.
int64_t TakeableBytes(const Device& device);
// Each rank's share of these; on a GPU kLateKernelsBytes are left.
int64_t TakeableBytes(const Rank& rank);
// Its share of the host's memory, if that is another. Both are limited to
// Rank::memory's budget, if there is one.
int64_t TakeableHostBytes(const Rank& rank);

// Each rank's share of the space that is free in `folder`, or where it would be
// made, if all ranks of a host use it; INT64_MAX if that is unknown. Files of
// dead runs, which the next run removes, are not free.
int64_t TakeableDiskBytes(const Rank& rank, const std::string& folder);

// Compares the need of `rank` (and any other rank) in a rehearsal with the
// device's memory and, if that is another, the host's before anything is taken:
// an operating system that overcommits would kill the run instead, and a GPU
// would fail halfway. `train`: the run trains.
// Errors: ResourceExhausted with what to change: what the search `advice` found
//         (none: it did not search).
absl::Status CheckFits(
    const Rehearsal& predicted, int64_t other_rank, const Config& config,
    bool train, const Rank& rank,
    const std::function<absl::optional<std::string>()>& advice);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_MEMORY_FIT_H_
