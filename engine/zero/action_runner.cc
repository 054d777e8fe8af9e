#include "engine/zero/action_runner.h"

#include <utility>

#include "engine/comm/channel.h"

namespace zero {
namespace {

Channel ChannelOf(const Action& action) {
  switch (action.stream) {
    case StreamRole::kGather:
      return Channel::kGather;
    case StreamRole::kReduce:
      return action.kind == ActionKind::kReduce ? Channel::kReduce
                                                : Channel::kAcross;
    case StreamRole::kRead:
    case StreamRole::kWrite:
      return Channel::kDisk;
    default:
      return Channel::kHost;
  }
}

// The unit whose parameters or gradients an action moves, the first of several.
const std::string& UnitOf(const Action& action, const Plan& plan) {
  int unit = action.index;
  switch (action.kind) {
    case ActionKind::kGatherUpdated:
      unit = plan.gather_buckets[unit].unit;
      break;
    case ActionKind::kReduce:
    case ActionKind::kReduceAcross:
    case ActionKind::kOffload:
    case ActionKind::kAddOffloaded:
      unit = plan.reduce_buckets[unit].unit;
      break;
    default:
      break;
  }
  return plan.units[unit].name;
}

}  // namespace

ActionRunner::ActionRunner(const Rank& rank, const Plan& plan, StepClock& clock,
                           const RankStreams& streams)
    : rank_(&rank),
      plan_(&plan),
      clock_(&clock),
      streams_(streams),
      joined_(rank.device->MakeEvent()) {}

ActionList ActionRunner::MakeList(std::vector<Action> actions) const {
  ActionList list{.actions = std::move(actions)};
  const int size = static_cast<int>(list.actions.size());
  list.done.resize(size);
  for (const Action& action : list.actions) {
    for (int wait : action.waits) {
      const int i = wait < 0 ? wait + size : wait;
      if (list.done[i] == nullptr) list.done[i] = rank_->device->MakeEvent();
      const bool arrives = list.actions[i].stream != StreamRole::kCompute;
      if (wait < 0 && arrives) list.arriving.push_back(i);
    }
  }
  return list;
}

void ActionRunner::Enter(const ActionList& list) {
  if (last_ == &list) return;
  AwaitArriving();
  compute().Record(*joined_);
  for (Stream* stream : streams_) {
    if (stream != nullptr && stream != &compute()) stream->Wait(*joined_);
  }
  last_ = &list;
}

void ActionRunner::Await(const ActionList& list, const Action& action) {
  Stream& stream = StreamFor(action);
  for (const int wait : action.waits) {
    const int i =
        wait < 0 ? wait + static_cast<int>(list.actions.size()) : wait;
    const StreamRole awaited = list.actions[i].stream;
    const bool for_disk =
        (action.stream == StreamRole::kHost ||
         (action.stream == StreamRole::kUp &&
          !rank_->device->asynchronous())) &&
        (awaited == StreamRole::kRead || awaited == StreamRole::kWrite);
    if (for_disk) {
      clock_->WaitForDisk(stream, [&] { stream.Wait(*list.done[i]); });
    } else if (&stream != &compute() || awaited == StreamRole::kCompute) {
      stream.Wait(*list.done[i]);
    } else if (wait >= 0 || std::erase(arriving_, i) > 0) {
      // Work before this list was waited for at its start.
      AwaitOther(list, i);
    }
  }
}

void ActionRunner::AwaitOther(const ActionList& list, int i) {
  const Action& action = list.actions[i];
  clock_->Wait(ChannelOf(action), UnitOf(action, *plan_),
               [&] { compute().Wait(*list.done[i]); });
}

void ActionRunner::AwaitArriving() {
  for (const int i : std::exchange(arriving_, {})) AwaitOther(*last_, i);
}

void ActionRunner::Leave() {
  AwaitArriving();
  last_ = nullptr;
}

}  // namespace zero
