// Settings that help if communication is not hidden by computation.
#ifndef ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
#define ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_

#include <string>

#include "engine/comm/channel.h"
#include "engine/config/config.h"

namespace zero {

// The share of the training time above which to advise.
inline constexpr double kExposedShareWorthAWord = 0.05;

// Where a run waited, and for what.
struct OverlapSituation {
  WaitTimes waited;
  int ranks = 1;
  int cores = 1;     // that compute for the ranks; with GPUs one each
  std::string link;  // the simulated link; empty: none
  // How often a step gathers the parameters, by bytes: 1 if all units stay in
  // place; NaN for one rank, which gathers nothing.
  double gathers = 0;
};

// A run's longest wait, its share of all waiting, and the two settings that
// help most there, free ones first, each with its cost. If ranks share cores
// without a slow link, only fewer ranks help.
std::string OverlapAdvice(const Config& config,
                          const OverlapSituation& situation);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
