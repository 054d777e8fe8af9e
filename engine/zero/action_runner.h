// Runs a list of actions on the streams of a rank: waits for what an action
// waits for, performs it, and records that it is done.
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

// Of a rank, by StreamRole; null: its plan has no action there.
using RankStreams = std::array<Stream*, kNumStreamRoles>;

// Actions, and for those that others wait for an event that they are done.
struct ActionList {
  std::vector<Action> actions;
  std::vector<std::unique_ptr<Event>> done;
  std::vector<int> arriving;  // on other streams; the next run waits for them
};

class ActionRunner {
 public:
  // All must outlive the runner.
  ActionRunner(const Rank& rank, const Plan& plan, StepClock& clock,
               const RankStreams& streams);

  ActionList MakeList(std::vector<Action> actions) const;

  // Calls `perform(action)` for each. Of two runs of one list the second waits
  // for the first as its actions say; between two lists all streams meet.
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

  // Makes computation wait for what the last run has in flight on other
  // streams. What the next run does there will wait for what is computed until
  // then; the list of the last run may go.
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
  std::vector<int> arriving_;  // of last_, not waited for yet
  std::unique_ptr<Event> joined_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_ACTION_RUNNER_H_
