// SIGINT, SIGTERM, SIGUSR1 and SIGHUP: the first asks the run to end, at a step
// boundary or while it waits for ranks to start; the second ends the process at
// once.
//
// A dedicated thread takes them with sigwait; no other thread ever runs a
// signal handler. oneDNN's fp32 products (gemm:jit, 2.6) use the stack pointer
// as a register over a heap buffer, and a handler's frame would overwrite the
// memory just below that.
#ifndef ZERO_TOOLS_CLI_SIGNALS_H_
#define ZERO_TOOLS_CLI_SIGNALS_H_

#include <atomic>
#include <string>

namespace zero {

// Starts that thread and returns the flag that the first signal sets. Threads
// inherit the signal mask, so this must precede all others. `left` is a line on
// what remains if the second signal ends the process.
// REQUIRES: called once, before anything that may enter OpenMP.
const std::atomic<bool>* InstallStopSignals(std::string left = "");

// What the first signal prints: what the run still waits for. Empty: nothing,
// since another process does. Default: "stopping after the current step".
void SayWhenStopping(std::string line);

// The exit status after such a signal: 143 after SIGTERM, as schedulers expect,
// 130 after the others.
int StopExitCode();

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_SIGNALS_H_
