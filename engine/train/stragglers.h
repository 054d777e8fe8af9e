// Ranks that are slower than the others, from the times of their own work.
//
// Waiting is left out: a slow rank waits least, and all others wait for it. One
// slow step means nothing if ranks share cores with each other and with other
// programs. So each step is compared with the same step of the others, and a
// rank is named if many of its last steps were slow. A slow link is therefore
// not found: until a message has arrived both its ends wait, as they do for a
// late rank, and every other rank waits for these two. Pure: a function of a
// table of times.
#ifndef ZERO_ENGINE_TRAIN_STRAGGLERS_H_
#define ZERO_ENGINE_TRAIN_STRAGGLERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zero {

enum class StepPart {
  kCompute,        // the step without the parts below and without waiting
  kData,           // reading batches
  kOffload,        // waiting for this rank's host and disk
  kCommunication,  // this rank's copies and sums in collectives
};
inline constexpr StepPart kStepParts[] = {StepPart::kCompute, StepPart::kData,
                                          StepPart::kOffload,
                                          StepPart::kCommunication};

// "compute", "data", "offload", "communication".
constexpr const char* StepPartName(StepPart part) {
  constexpr const char* kNames[] = {"compute", "data", "offload",
                                    "communication"};
  return kNames[static_cast<size_t>(part)];
}

// The part of that name; kCompute if there is none.
StepPart StepPartOf(absl::string_view name);

// Milliseconds of a rank's own work in a step.
struct OwnTimes {
  std::array<double, std::size(kStepParts)> ms = {};

  double& operator[](StepPart part) { return ms[static_cast<size_t>(part)]; }
  double operator[](StepPart part) const {
    return ms[static_cast<size_t>(part)];
  }
  double total() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }
};

struct Straggler {
  int rank = 0;
  int64_t step = 0;   // when it was detected
  double factor = 0;  // median of its steps / median of the others'
  StepPart part = StepPart::kCompute;  // with the largest difference
  std::string host = {};               // of the rank; not set by the detector
};

// "rank 3 on node2 takes 2.1 times as long as the other ranks for its own work;
// the largest difference is in compute".
std::string StragglerText(const Straggler& straggler);

class StragglerDetector {
 public:
  // A rank is named when kSlowSteps of its last kSteps steps were slow. Steps
  // that are too short are combined until a rank has worked long enough: over
  // less time the ranks' shares of the cores are not even.
  static constexpr int kSteps = 20, kSlowSteps = 16;
  static constexpr double kLeastMs = 250;

  // A step is slow if the rank's own work takes more than `factor` times the
  // median of the other ranks'. 0: no rank is ever named.
  explicit StragglerDetector(double factor) : factor_(factor) {}

  // Takes all ranks' times of a step, in rank order, and returns the newly slow
  // ranks.
  std::vector<Straggler> Add(int64_t step, std::vector<OwnTimes> of_ranks);

 private:
  const double factor_;
  std::vector<OwnTimes> sums_;               // of combined steps, by rank
  std::deque<std::vector<OwnTimes>> steps_;  // the last kSteps, by rank
  std::vector<int> num_slow_;                // of these, by rank
  std::deque<std::vector<bool>> slow_;       // of these, by rank
  std::vector<bool> named_;                  // by rank
};

// The middle value, or the mean of the middle two. 0 if empty.
double Median(std::vector<double> values);

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_STRAGGLERS_H_
