#include "tools/cli/signals.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <thread>

namespace zero {
namespace {

std::atomic<bool> stop_requested{false};

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  // A shell's background job is born ignoring SIGINT, and sigwait does not see
  // what is ignored.
  std::signal(SIGINT, SIG_DFL);
  sigaddset(&signals, SIGINT);
  // nohup wants this one ignored.
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  return signals;
}

void TakeSignals(const sigset_t& signals) {
  for (int signal = 0; sigwait(&signals, &signal) == 0;) {
    if (stop_requested.exchange(true)) _exit(128 + signal);
    std::fputs("\nstopping after this step; once more to stop at once\n",
               stderr);
  }
}

}  // namespace

const std::atomic<bool>* InstallStopSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] { TakeSignals(signals); }).detach();
  return &stop_requested;
}

}  // namespace zero
