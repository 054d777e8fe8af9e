#include "tools/cli/signals.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zero {
namespace {

std::atomic<bool> stop_requested{false};
std::atomic<bool> terminated{false};  // the first signal was SIGTERM
std::mutex mutex;
// Guarded by the mutex; never destroyed, since the thread outlives main.
std::string& stopping = *new std::string("stopping after the current step");

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGUSR1);  // Slurm's warning before a time limit
  // A shell's background job is born ignoring SIGINT, and sigwait does not see
  // ignored signals.
  std::signal(SIGINT, SIG_DFL);
  sigaddset(&signals, SIGINT);
  // Under nohup this one stays ignored.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

void TakeSignals(const sigset_t& signals, const std::string& left) {
  for (int signal = 0; sigwait(&signals, &signal) == 0;) {
    if (!stop_requested && signal == SIGTERM) terminated = true;
    if (stop_requested.exchange(true)) {
      // stdio is not used: another thread may hold its lock.
      [[maybe_unused]] const ssize_t written =
          write(STDERR_FILENO, left.data(), left.size());
      _exit(128 + signal);
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (stopping.empty()) continue;
    std::fprintf(stderr, "\n%s; interrupt again to stop at once\n",
                 stopping.c_str());
  }
}

}  // namespace

void SayWhenStopping(std::string line) {
  std::lock_guard<std::mutex> lock(mutex);
  stopping = std::move(line);
}

int StopExitCode() { return terminated ? 128 + SIGTERM : 128 + SIGINT; }

const std::atomic<bool>* InstallStopSignals(std::string left) {
  const sigset_t signals = StopSignals();
  // A reader of stdout that went away must not end a run.
  std::signal(SIGPIPE, SIG_IGN);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals, left = absl::StrCat("stopped at once", left, "\n")] {
    TakeSignals(signals, left);
  }).detach();
  return &stop_requested;
}

}  // namespace zero
