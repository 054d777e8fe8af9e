// What a user can set where communication is not hidden by computation.
#ifndef ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
#define ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_

#include <string>

#include "engine/comm/channel.h"
#include "engine/config/config.h"

namespace zero {

// The share of the training time above which it is worth a word.
inline constexpr double kExposedShareWorthAWord = 0.05;

// What a run of this config waited for longest, its share of all waiting, and
// the two settings that help most there: what costs nothing first, with what
// each of them costs.
std::string OverlapAdvice(const Config& config, const WaitTimes& waited);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
