// Keys of several ranks that change less in this run than they seem to.
#ifndef ZERO_ENGINE_TRAIN_RANK_NOTES_H_
#define ZERO_ENGINE_TRAIN_RANK_NOTES_H_

#include <string>
#include <vector>

#include "engine/config/load.h"
#include "engine/zero/plan.h"

namespace zero {

// One line for all keys that only several ranks read, if `plan` is for one
// rank; one each for a bucket size below the smallest segment and for a
// persistence threshold, which applies to whole units.
std::vector<std::string> RankNotes(const LoadedConfig& loaded,
                                   const Plan& plan);

// One line for all keys that only a GPU reads, if the run is on the CPU.
std::vector<std::string> DeviceNotes(const LoadedConfig& loaded,
                                     const Device& device);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RANK_NOTES_H_
