// Whether a run fits its device, and what to change where it does not.
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
// memory is taken, and no prediction has them. On an H200 3 to 9 MB came, with
// CUDA 13.0, cuBLAS 13.1 and cuDNN 9.19.
inline constexpr int64_t kLateKernelsBytes = int64_t{128} << 20;

// Ranks that share the device's memory, `rank` included.
int SharersOf(const Rank& rank);

// Bytes of the device that the ranks of this process may take together: what
// other processes hold and a control group forbids is not among them.
int64_t TakeableBytes(const Device& device);
// Of these, what each of them may take; on a GPU kLateKernelsBytes are left.
int64_t TakeableBytes(const Rank& rank);
// What each of them may take of the host's memory, where that is another. Of
// both Rank::memory's budget, where there is one.
int64_t TakeableHostBytes(const Rank& rank);

// What to do where no stage, recompute or micro-batch makes a run fit.
std::string NothingFits(const Rank& rank);

// Compares what a rehearsal says that `rank` (and any other rank) needs with
// the device and, where that is another memory, with the host before anything
// is taken: an operating system that promises more than it has would kill the
// run instead, and a GPU would refuse it piece by piece. Errors:
// ResourceExhausted with what to change: the options that `patch` found
//         (empty: it found none; none: it did not search). `train`: the run
//         trains.
absl::Status CheckFits(
    const Rehearsal& predicted, int64_t other_rank, const Config& config,
    bool train, const Rank& rank,
    const std::function<absl::optional<std::string>()>& patch);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_MEMORY_FIT_H_
