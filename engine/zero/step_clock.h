// When the actions of a rank were performed, and what computation waited for:
// by the host's clock, or by events if the device is asynchronous.
#ifndef ZERO_ENGINE_ZERO_STEP_CLOCK_H_
#define ZERO_ENGINE_ZERO_STEP_CLOCK_H_

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/channel.h"
#include "engine/zero/schedule.h"
#include "kernels/device.h"

namespace zero {

// Milliseconds of a step per kind of computation, for wall_clock_breakdown;
// without waits for other ranks, except those for the norm's numbers.
struct StepTimes {
  double forward_ms = 0, backward_ms = 0, optimizer_ms = 0;
};

class StepClock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  // Called before and after every action, once its waits are over. Actions of a
  // pass without gradients are outside a step.
  using ActionHook = std::function<void(const Action&, bool done)>;
  // Called after computation has waited for communication: for a unit's
  // parameters, for the bucket that begins with the unit, or for an agreement.
  using WaitHook = std::function<void(Channel, const std::string& name,
                                      TimePoint begin, TimePoint end)>;
  // Called with the time of every action: for copies and host computation on
  // the thread that did them, for others on the rank's.
  using TimeHook = std::function<void(const Action&, bool in_step,
                                      TimePoint begin, TimePoint end)>;
  using CountFn = std::function<void(TimePoint begin, TimePoint end)>;

  // Work of an asynchronous device whose time has not been read.
  struct TimedWork {
    std::unique_ptr<Event> begin, end;
    CountFn count;
  };

  // `plan` must outlive the clock.
  StepClock(Device& device, Stream& compute, const Plan& plan)
      : device_(&device), compute_(&compute), plan_(&plan) {}

  // On an asynchronous device the wait and time hooks, times and waited() are
  // updated in Read.
  void set_hook(ActionHook hook) { hook_ = std::move(hook); }
  void set_wait_hook(WaitHook hook) { wait_hook_ = std::move(hook); }
  void set_time_hook(TimeHook hook) { time_hook_ = std::move(hook); }

  // How long computation waited for other ranks, including between steps.
  const WaitTimes& waited() const { return waited_; }

  // Performs `work` of an action, which launches on `stream`, between its hooks
  // and in a profiler's range.
  template <typename Work>
  void Perform(const Action& action, Stream& stream, bool in_step,
               StepTimes* times, const Work& work) {
    if (hook_) hook_(action, /*done=*/false);
    device_->PushRange(
        device_->asynchronous() ? ActionName(action, *plan_).c_str() : "");
    double* const spent = SpentOn(action, times);
    if (spent == nullptr && !time_hook_) {
      work();
    } else {
      // A collective's time is that of its launch.
      const bool collective = action.stream == StreamRole::kGather ||
                              action.stream == StreamRole::kReduce;
      Time(collective ? *compute_ : stream, work,
           [this, action, in_step, spent](TimePoint begin, TimePoint end) {
             if (spent != nullptr) *spent += Millis(end - begin);
             if (time_hook_) time_hook_(action, in_step, begin, end);
           });
    }
    device_->PopRange();
    if (hook_) hook_(action, /*done=*/true);
  }

  // Runs `work`, which makes computation wait for `name` on `channel`.
  template <typename Work>
  void Wait(Channel channel, const std::string& name, const Work& work) {
    const bool local = channel == Channel::kHost || channel == Channel::kDisk;
    if (plan_->world == 1 && !local) return work();
    Time(*compute_, work,
         [this, channel, name](TimePoint begin, TimePoint end) {
           const double disk =
               channel == Channel::kHost || channel == Channel::kGather
                   ? DiskMillis(begin, end)
                   : 0;
           const double all = Millis(end - begin);
           waited_[Channel::kDisk] += disk;
           waited_[channel] += all - disk;
           if (!wait_hook_) return;
           wait_hook_(2 * disk > all ? Channel::kDisk : channel, name, begin,
                      end);
         });
  }

  // Runs `work`, which makes a host stream wait for a disk. If computation
  // waits for that stream meanwhile, it waits for the disk.
  template <typename Work>
  void WaitForDisk(Stream& stream, const Work& work) {
    auto begin = std::make_shared<TimePoint>();
    stream.Enqueue([begin] { *begin = std::chrono::steady_clock::now(); });
    work();
    stream.Enqueue([waits = disk_waits_, begin] {
      const std::lock_guard<std::mutex> lock(waits->mutex);
      waits->times.emplace_back(*begin, std::chrono::steady_clock::now());
    });
  }

  // The times since the last call.
  std::vector<TimedWork> Take() { return std::exchange(timed_, {}); }
  // Waits for `last` and reports the times of finished work; the rest follows
  // in the next call.
  void Read(Event& last, std::vector<TimedWork> timed);

 private:
  static double Millis(std::chrono::steady_clock::duration duration) {
    return std::chrono::duration<double, std::milli>(duration).count();
  }
  // The part of a computation's wait that the host waited for a disk.
  double DiskMillis(TimePoint begin, TimePoint end);
  // The counter for an action's time; null: it is not counted.
  static double* SpentOn(const Action& action, StepTimes* times);

  template <typename Work>
  void Time(Stream& stream, const Work& work, CountFn count) {
    const auto now = std::chrono::steady_clock::now;
    if (device_->asynchronous()) {
      TimedWork timed{Mark(stream), nullptr, std::move(count)};
      work();
      timed.end = Mark(stream);
      timed_.push_back(std::move(timed));
    } else if (&stream == compute_) {
      const TimePoint begin = now();
      work();
      count(begin, now());
    } else {
      auto begin = std::make_shared<TimePoint>();
      stream.Enqueue([now, begin] { *begin = now(); });
      work();
      stream.Enqueue(
          [now, begin, count = std::move(count)] { count(*begin, now()); });
    }
  }
  std::unique_ptr<Event> Mark(Stream& stream);

  // Disk waits of host streams, which may outlive the clock.
  struct DiskWaits {
    std::mutex mutex;
    std::vector<std::pair<TimePoint, TimePoint>> times;
  };

  Device* device_;
  Stream* compute_;
  const Plan* plan_;
  WaitTimes waited_;
  std::shared_ptr<DiskWaits> disk_waits_ = std::make_shared<DiskWaits>();
  ActionHook hook_;
  WaitHook wait_hook_;
  TimeHook time_hook_;
  std::vector<TimedWork> timed_;
  std::vector<std::unique_ptr<Event>> idle_events_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_ZERO_STEP_CLOCK_H_
