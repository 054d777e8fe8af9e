// What a user can set where communication is not hidden by computation.
#ifndef ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
#define ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_

#include <string>

#include "engine/config/config.h"

namespace zero {

// The share of the training time above which it is worth a word.
inline constexpr double kExposedShareWorthAWord = 0.05;

// The two settings that help this config most, what costs nothing first, with
// what each of them costs.
std::string OverlapAdvice(const Config& config);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
