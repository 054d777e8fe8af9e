// Work beside the thread that wants it done.
#ifndef ZERO_ENGINE_BASE_BACKGROUND_H_
#define ZERO_ENGINE_BASE_BACKGROUND_H_

#include <atomic>
#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace zero {

// Does one thing at a time, each in a thread of its own.
// Threads: used by one.
class Background {
 public:
  Background() = default;
  ~Background() { Wait().IgnoreError(); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // REQUIRES: what was started before has been waited for.
  void Start(std::function<absl::Status()> work);
  // The same on the calling thread: it has ended when this returns.
  void Run(const std::function<absl::Status()>& work);

  // Never blocks. What was never started has ended well.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // REQUIRES: ended().
  const absl::Status& status() const { return status_; }
  // Waits until it has ended, and returns how.
  absl::Status Wait();

 private:
  std::thread thread_;
  std::atomic<bool> ended_ = true;
  absl::Status status_;  // of what has ended
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_BACKGROUND_H_
