// Runs a list of actions on the streams of a rank: waits for what an action
// waits for, performs it, and records that it is done.
#ifndef ZERO_ENGINE_ZERO_ACTION_RUNNER_H_
#define ZERO_ENGINE_ZERO_ACTION_RUNNER_H_

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

// Actions, and for those that others wait for an event that they are done.
struct ActionList {
  std::vector<Action> actions;
  std::vector<std::unique_ptr<Event>> done;
  std::vector<int> arriving;  // collectives that the next run waits for
};

class ActionRunner {
 public:
  // `gather` and `reduce` may be null in a world of one. All must outlive the
  // runner.
  ActionRunner(const Rank& rank, const Plan& plan, StepClock& clock,
               Stream& compute, Stream* gather, Stream* reduce);

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
      clock_->Perform(action, in_step, times, [&] { perform(action); });
      if (list.done[i] != nullptr) StreamFor(action).Record(*list.done[i]);
      ZERO_RETURN_IF_ERROR(rank_->status());
    }
    arriving_ = list.arriving;
    return absl::OkStatus();
  }

  // Makes computation wait for collectives of the last run that are in flight.
  // The next run's collectives will wait for what is computed until then; the
  // list of the last run may go.
  void Leave();

 private:
  void AwaitArriving();
  void Enter(const ActionList& list);
  void Await(const ActionList& list, const Action& action);
  Stream& StreamFor(const Action& action) const;
  // Makes computation wait for collective i of a list.
  void AwaitCollective(const ActionList& list, int i);

  const Rank* rank_;
  const Plan* plan_;
  StepClock* clock_;
  Stream* compute_;
  Stream* gather_;
  Stream* reduce_;
  const ActionList* last_ = nullptr;
  std::vector<int> arriving_;  // of last_, not waited for yet
  std::unique_ptr<Event> joined_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_ACTION_RUNNER_H_
