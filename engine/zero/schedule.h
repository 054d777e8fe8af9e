// The step as a list of actions: a pure function of the plan, tested by
// values, the same on every rank. The executor performs it; the planners print
// it and count it.
//
// Today's world is one rank, where every state is in place and nothing is
// gathered or reduced; further placements add their actions between these.
#ifndef ZERO_ENGINE_ZERO_SCHEDULE_H_
#define ZERO_ENGINE_ZERO_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "engine/zero/plan.h"

namespace zero {

enum class ActionKind {
  kForward,          // unit, without the last
  kForwardBackward,  // the last unit: the loss writes its gradients at once
  kBackward,         // unit; recomputes its forward first where asked
  kNorm,             // global gradient norm, clip factor, finite check
  kUpdate,           // optimizer step of the unit
};

struct Action {
  ActionKind kind;
  int unit = -1;  // -1: all
  int64_t micro_step = 0;

  bool operator==(const Action&) const = default;
};

// "Forward(block.3)".
std::string ActionName(const Action& action, const Plan& plan);

// The actions of one step of `micro_steps` micro-batches, in issue order.
std::vector<Action> MakeSchedule(const Plan& plan, int64_t micro_steps);

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_SCHEDULE_H_
