#include "engine/zero/action_runner.h"

#include <utility>

#include "engine/comm/channel.h"

namespace zero {
namespace {

Channel ChannelOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kReduce:
      return Channel::kReduce;
    case ActionKind::kReduceAcross:
      return Channel::kAcross;
    default:
      return Channel::kGather;
  }
}

// The unit whose parameters or gradients a collective moves, the first of
// several.
const std::string& UnitOf(const Action& action, const Plan& plan) {
  int unit = action.index;
  if (action.kind == ActionKind::kGatherUpdated) {
    unit = plan.gather_buckets[unit].unit;
  } else if (action.kind != ActionKind::kGather) {
    unit = plan.reduce_buckets[unit].unit;
  }
  return plan.units[unit].name;
}

}  // namespace

ActionRunner::ActionRunner(const Rank& rank, const Plan& plan, StepClock& clock,
                           Stream& compute, Stream* gather, Stream* reduce)
    : rank_(&rank),
      plan_(&plan),
      clock_(&clock),
      compute_(&compute),
      gather_(gather),
      reduce_(reduce),
      joined_(rank.device->MakeEvent()) {}

ActionList ActionRunner::MakeList(std::vector<Action> actions) const {
  ActionList list{.actions = std::move(actions)};
  const int size = static_cast<int>(list.actions.size());
  list.done.resize(size);
  for (const Action& action : list.actions) {
    for (int wait : action.waits) {
      const int i = wait < 0 ? wait + size : wait;
      if (list.done[i] == nullptr) list.done[i] = rank_->device->MakeEvent();
      const bool arrives =
          StreamOf(list.actions[i].kind) != StreamRole::kCompute;
      if (wait < 0 && arrives) list.arriving.push_back(i);
    }
  }
  return list;
}

Stream& ActionRunner::StreamFor(const Action& action) const {
  switch (StreamOf(action.kind)) {
    case StreamRole::kGather:
      return *gather_;
    case StreamRole::kReduce:
      return *reduce_;
    default:
      return *compute_;
  }
}

void ActionRunner::Enter(const ActionList& list) {
  if (last_ == &list) return;
  AwaitArriving();
  compute_->Record(*joined_);
  for (Stream* stream : {gather_, reduce_}) {
    if (stream != nullptr) stream->Wait(*joined_);
  }
  last_ = &list;
}

void ActionRunner::Await(const ActionList& list, const Action& action) {
  Stream& stream = StreamFor(action);
  for (const int wait : action.waits) {
    const int i =
        wait < 0 ? wait + static_cast<int>(list.actions.size()) : wait;
    const StreamRole awaited = StreamOf(list.actions[i].kind);
    if (&stream != compute_ || awaited == StreamRole::kCompute) {
      stream.Wait(*list.done[i]);
    } else if (wait >= 0 || std::erase(arriving_, i) > 0) {
      // What came before this list began was waited for then.
      AwaitCollective(list, i);
    }
  }
}

void ActionRunner::AwaitCollective(const ActionList& list, int i) {
  const Action& action = list.actions[i];
  clock_->Wait(ChannelOf(action.kind), UnitOf(action, *plan_),
               [&] { compute_->Wait(*list.done[i]); });
}

void ActionRunner::AwaitArriving() {
  for (const int i : std::exchange(arriving_, {})) AwaitCollective(*last_, i);
}

void ActionRunner::Leave() {
  AwaitArriving();
  last_ = nullptr;
}

}  // namespace zero
