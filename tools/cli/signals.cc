#include "tools/cli/signals.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

namespace zero {
namespace {

std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void OnSignal(int signal) {
  if (stop_requested.exchange(true)) _exit(128 + signal);
  constexpr char kText[] =
      "\nstopping after this step; once more to stop at once\n";
  // Only async-signal-safe calls here.
  if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) return;
}

}  // namespace

const std::atomic<bool>* InstallStopSignals() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  return &stop_requested;
}

}  // namespace zero
