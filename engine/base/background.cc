#include "engine/base/background.h"

#include <utility>

#include "engine/base/exceptions.h"
#include "kernels/check.h"

namespace zero {

void Background::Start(std::function<absl::Status()> work) {
  ZERO_CHECK(!thread_.joinable()) << "Background: not waited for";
  ended_ = false;
  // The system may refuse a thread.
  const absl::Status started = CatchExceptions([&] {
    thread_ = std::thread([this, work = std::move(work)] { Run(work); });
    return absl::OkStatus();
  });
  if (started.ok()) return;
  status_ = started;
  ended_ = true;
}

void Background::Run(const std::function<absl::Status()>& work) {
  status_ = CatchExceptions(work);
  ended_.store(true, std::memory_order_release);
}

absl::Status Background::Wait() {
  if (thread_.joinable()) thread_.join();
  return status_;
}

}  // namespace zero
