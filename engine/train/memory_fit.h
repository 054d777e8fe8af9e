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

// Bytes left free on a GPU for kernels that the driver loads late, when they
// are first launched. Those of cuBLASLt and cuDNN and our own come in the first
// step, when all memory is taken, and no prediction counts them. On an H200
// they took 3 to 12 MB, with CUDA 13.0, cuBLAS 13.1 and cuDNN 9.19.
inline constexpr int64_t kLateKernelsBytes = int64_t{128} << 20;

// Bytes of a rank's device by which two starts of the program may differ. On
// the CPU `fixed` differs by up to 1 MiB in a process: which pages of libraries
// are mapped at once depends on their addresses. On a GPU: none.
int64_t RoomBytes(const Rank& rank);

// Ranks that share the device's memory, `rank` included.
int SharersOf(const Rank& rank);
// Ranks that share the host's memory, `rank` included.
int HostSharersOf(const Rank& rank);
// Ranks that share a process's context on the device, `rank` included: on the
// CPU those of its process, which are consecutive.
int ContextSharersOf(const Rank& rank);

// Device bytes that the ranks of this process may take together, without those
// held by other processes or forbidden by a control group.
int64_t TakeableBytes(const Device& device);
// Each rank's share of TakeableBytes(device); on a GPU kLateKernelsBytes less.
int64_t TakeableBytes(const Rank& rank);
// TakeableBytes(rank), or what is left of it, as messages name it: with the
// bytes kept for kernels that load late, which ranks on one GPU share.
struct DeviceShare {
  int64_t bytes;       // the budget, if there is one
  int64_t late_bytes;  // of them; more than a tiny budget has
};
DeviceShare DeviceShareOf(const Rank& rank, int64_t takeable);
// Each rank's share of the host's memory, if device and host have different
// memories. Rank::memory's budgets limit both shares.
int64_t TakeableHostBytes(const Rank& rank);

// Each rank's share of the free space in `folder`, or where it would be
// created, if all ranks of a host use it; INT64_MAX if that is unknown. Files
// of dead runs, which the next run removes, do not count as free.
int64_t TakeableDiskBytes(const Rank& rank, const std::string& folder);

// Compares the memory that `rank` (and any other rank) needs in a rehearsal
// with the device's and, if it is separate, the host's. It does so before
// anything is allocated: an operating system that overcommits would kill the
// run later, and a GPU would fail halfway. `train`: the run trains.
// Errors: ResourceExhausted with what to change, as found by the search
//         `advice` (none: it did not search).
absl::Status CheckFits(
    const Rehearsal& predicted, int64_t other_rank, const Config& config,
    bool train, const Rank& rank,
    const std::function<absl::optional<std::string>()>& advice);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_MEMORY_FIT_H_
