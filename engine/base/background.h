// Work in the background of the thread that needs it.
#ifndef ZERO_ENGINE_BASE_BACKGROUND_H_
#define ZERO_ENGINE_BASE_BACKGROUND_H_

#include <atomic>
#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace zero {

// Runs one task at a time, each in its own thread.
// Threads: used by one thread.
class Background {
 public:
  Background() = default;
  ~Background() { Wait().IgnoreError(); }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // REQUIRES: the previous task has been waited for.
  void Start(std::function<absl::Status()> work);
  // The same on the calling thread: the task has ended when this returns.
  void Run(const std::function<absl::Status()>& work);

  // Whether the task has ended; true if none was started. Never blocks.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // The status of the last task; OK if none was started. REQUIRES: ended().
  const absl::Status& status() const { return status_; }
  // Waits for the task's end and returns its status.
  absl::Status Wait();

 private:
  std::thread thread_;
  std::atomic<bool> ended_ = true;
  absl::Status status_;  // of the ended task
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_BACKGROUND_H_
