// What a user can set where communication is not hidden by computation.
#ifndef ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
#define ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_

#include <string>

#include "engine/comm/channel.h"
#include "engine/config/config.h"

namespace zero {

// The share of the training time above which it is worth a word.
inline constexpr double kExposedShareWorthAWord = 0.05;

// Where a run waited, and on what.
struct OverlapSituation {
  WaitTimes waited;
  int ranks = 1;
  int cores = 1;     // that compute for the ranks; with GPUs one each
  std::string link;  // what slows communication on purpose; empty: nothing
  // How often a step gathers the parameters (units that stay in place make it
  // less than a whole number), and how often if all units might stay.
  double gathers = 0;
  double fewest_gathers = 0;
};

// What a run of this config waited for longest, its share of all waiting, and
// the two settings that help most there: what costs nothing first, with what
// each of them costs. Where ranks share cores over no slow link, nothing but
// fewer ranks helps.
std::string OverlapAdvice(const Config& config,
                          const OverlapSituation& situation);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_OVERLAP_ADVICE_H_
