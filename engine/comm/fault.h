// A fault on purpose, in the middle of a step: for tests, and for users who
// want to see how a run ends.
#ifndef ZERO_ENGINE_COMM_FAULT_H_
#define ZERO_ENGINE_COMM_FAULT_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/comm/communicator.h"

namespace zero {

enum class FaultKind {
  kThrow,     // the rank throws
  kStop,      // the rank hangs, for good
  kMismatch,  // the rank issues another collective than the others
};

struct Fault {
  int rank = 0;
  int64_t step = 1;  // of this run, from 1
  FaultKind kind = FaultKind::kThrow;
};

// Reads "1:3:stop": RANK:STEP:KIND, with KIND throw, stop or mismatch.
// `num_steps`: of the run; 0: not known yet.
// Errors: InvalidArgument with the text, the reason and an example; there is
//         no such rank among `world`, or nobody to notice, or no such step.
absl::StatusOr<Fault> ParseFault(absl::string_view text, int world,
                                 int64_t num_steps = 0);

// Happens where the rank issues its first collective of the step on the
// channel "reduce", which every ZeRO stage has in its backward pass.
// Threads: all ranks use one.
class FaultInjector {
 public:
  // A rank's step is over when it issues a collective of this name.
  FaultInjector(Fault fault, std::string step_end)
      : fault_(fault), step_end_(std::move(step_end)) {}

  // `end` of `rank` on a channel with the fault in it; the injector must
  // outlive it.
  std::unique_ptr<Communicator> Wrap(int rank, const std::string& channel,
                                     std::unique_ptr<Communicator> end);

  // Whether it has happened.
  bool happened() const;

  // Lets a rank that hangs go on: a test must end.
  void Release();

 private:
  class Faulty;

  // Whether the faulty rank is to issue another collective than this one.
  // Throws, or hangs.
  bool IssuesAnother(const std::string& channel, const Collective& collective);

  const Fault fault_;
  const std::string step_end_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t step_ = 1;  // of the faulty rank
  bool happened_ = false;
  bool released_ = false;
};

}  // namespace zero

#endif  // ZERO_ENGINE_COMM_FAULT_H_
