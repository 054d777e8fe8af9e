#include "engine/zero/step_clock.h"

#include <algorithm>

namespace zero {

double* StepClock::SpentOn(const Action& action, StepTimes* times) {
  if (times == nullptr || action.stream != StreamRole::kCompute) {
    return nullptr;
  }
  switch (action.kind) {
    case ActionKind::kForward:
      return &times->forward_ms;
    case ActionKind::kForwardBackward:
    case ActionKind::kBackward:
      return &times->backward_ms;
    case ActionKind::kAddRows:
    case ActionKind::kNorm:
    case ActionKind::kMoments:
    case ActionKind::kTensorNorms:
    case ActionKind::kUpdate:
      return &times->optimizer_ms;
    default:
      return nullptr;  // no computation
  }
}

double StepClock::DiskMillis(TimePoint begin, TimePoint end) {
  const std::lock_guard<std::mutex> lock(disk_waits_->mutex);
  auto& times = disk_waits_->times;
  std::sort(times.begin(), times.end());
  double millis = 0;
  TimePoint counted = begin;
  for (const auto& [from, to] : times) {
    const TimePoint first = std::max(from, counted);
    const TimePoint last = std::min(to, end);
    if (first >= last) continue;
    millis += Millis(last - first);
    counted = last;
  }
  std::erase_if(times, [&](const auto& time) { return time.second <= end; });
  return millis;
}

std::unique_ptr<Event> StepClock::Mark(Stream& stream) {
  std::unique_ptr<Event> event;
  if (idle_events_.empty()) {
    event = device_->MakeEvent();
  } else {
    event = std::move(idle_events_.back());
    idle_events_.pop_back();
  }
  stream.Record(*event);
  return event;
}

// The host's clock is read when the last event is done, which dates the others.
void StepClock::Read(Event& last, std::vector<TimedWork> timed) {
  last.Synchronize();
  const TimePoint now = std::chrono::steady_clock::now();
  const auto time_of = [&](const Event& event) {
    const std::chrono::duration<double, std::milli> ago(
        last.MillisSince(event));
    return now -
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(ago);
  };
  for (TimedWork& work : timed) {
    // Copies and the host may still be running; their times come with the next
    // step.
    if (!work.end->IsDone()) {
      timed_.push_back(std::move(work));
      continue;
    }
    work.count(time_of(*work.begin), time_of(*work.end));
    idle_events_.push_back(std::move(work.begin));
    idle_events_.push_back(std::move(work.end));
  }
}

}  // namespace zero
