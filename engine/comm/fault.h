// A fault injected in the middle of a step: for tests, and for users who want
// to see how a run ends.
#ifndef ZERO_ENGINE_COMM_FAULT_H_
#define ZERO_ENGINE_COMM_FAULT_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "engine/comm/communicator.h"

namespace zero {

enum class FaultKind {
  kThrow,     // the rank throws
  kStop,      // the rank hangs, for good
  kMismatch,  // the rank issues a different collective
  kSlow,      // the rank computes as if it had a slower processor, from then on
};

struct Fault {
  int rank = 0;
  int64_t step = 1;  // of this run, from 1
  FaultKind kind = FaultKind::kThrow;
  double factor = 1;  // kSlow: slowdown
};

// Reads "1:3:stop": RANK:STEP:KIND, with KIND throw, stop, mismatch or slow=F.
// `num_steps`: the steps of the run; 0: not known yet.
// Errors: InvalidArgument with the text, the reason and an example, if the rank
//         is not in `world`, if no other rank would notice the fault, or if
//         there is no such step.
absl::StatusOr<Fault> ParseFault(absl::string_view text, int world,
                                 int64_t num_steps = 0);

// The fault happens when the rank issues its first collective of the step on
// the channel "reduce", which every ZeRO stage has in its backward pass. A slow
// rank sleeps at each such collective from that step on, for factor - 1 times
// its thread's computation since the previous one.
// Threads: all ranks use one injector.
class FaultInjector {
 public:
  // The processor time of the calling thread, and a sleep.
  struct Clock {
    std::function<absl::Duration()> computed;
    std::function<void(absl::Duration)> sleep;
    static Clock Real();
  };

  // A rank's step is over when it issues a collective of this name.
  FaultInjector(Fault fault, std::string step_end, Clock clock = Clock::Real())
      : fault_(fault),
        step_end_(std::move(step_end)),
        clock_(std::move(clock)) {}

  // Wraps `end`, the end of `rank` on a channel, so that the fault happens
  // there. The injector must outlive it.
  std::unique_ptr<Communicator> Wrap(int rank, const std::string& channel,
                                     std::unique_ptr<Communicator> end);

  // Whether it has happened.
  bool happened() const;

  // Releases a hanging rank, so that a test can end.
  void Release();

 private:
  class Faulty;

  // Whether the faulty rank must issue a different collective. Throws, hangs or
  // sleeps for the other kinds.
  bool IssuesAnother(const std::string& channel, const Collective& collective);
  void Slow(int64_t step);

  const Fault fault_;
  const std::string step_end_;
  const Clock clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t step_ = 1;  // of the faulty rank
  bool happened_ = false;
  bool released_ = false;
  absl::optional<absl::Duration> computed_;  // until the reduction before
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_FAULT_H_
