// Runs a list of actions on a rank's streams: waits for each action's
// dependencies, performs it, and records its completion.
#ifndef ZERO_ENGINE_ZERO_ACTION_RUNNER_H_
#define ZERO_ENGINE_ZERO_ACTION_RUNNER_H_

#include <array>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/status.h"
#include "engine/comm/rank.h"
#include "engine/zero/plan.h"
#include "engine/zero/schedule.h"
#include "engine/zero/step_clock.h"
#include "kernels/device.h"

namespace zero {

// A rank's streams, by StreamRole; null: the plan has no action there.
using RankStreams = std::array<Stream*, kNumStreamRoles>;

// Actions, with a completion event for those that others wait for.
struct ActionList {
  std::vector<Action> actions;
  std::vector<std::unique_ptr<Event>> done;
  std::vector<int> arriving;  // on other streams; the next run waits for them
};

class ActionRunner {
 public:
  // REQUIRES: all arguments outlive the runner.
  ActionRunner(const Rank& rank, const Plan& plan, StepClock& clock,
               const RankStreams& streams);

  ActionList MakeList(std::vector<Action> actions) const;

  // Calls `perform(action)` for each. A second run of the same list waits for
  // the first as its actions say; between different lists all streams
  // synchronize.
  template <typename Work>
  absl::Status Run(const ActionList& list, bool in_step, StepTimes* times,
                   const Work& perform) {
    Enter(list);
    for (size_t i = 0; i < list.actions.size(); ++i) {
      const Action& action = list.actions[i];
      Await(list, action);
      clock_->Perform(action, StreamFor(action), in_step, times,
                      [&] { perform(action); });
      if (list.done[i] != nullptr) StreamFor(action).Record(*list.done[i]);
      ZERO_RETURN_IF_ERROR(rank_->status());
    }
    arriving_ = list.arriving;
    return absl::OkStatus();
  }

  // Makes computation wait for the last run's work on other streams, and the
  // next run there wait for the computation up to now. The last run's list may
  // then be destroyed.
  void Leave();

 private:
  void AwaitArriving();
  void Enter(const ActionList& list);
  void Await(const ActionList& list, const Action& action);
  Stream& StreamFor(const Action& action) const {
    return *streams_[static_cast<int>(action.stream)];
  }
  Stream& compute() const {
    return *streams_[static_cast<int>(StreamRole::kCompute)];
  }
  // Makes computation wait for action i of a list, on another stream.
  void AwaitOther(const ActionList& list, int i);

  const Rank* rank_;
  const Plan* plan_;
  StepClock* clock_;
  const RankStreams streams_;
  const ActionList* last_ = nullptr;
  std::vector<int> arriving_;  // of last_, not yet waited for
  std::unique_ptr<Event> joined_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_ACTION_RUNNER_H_
