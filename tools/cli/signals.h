// SIGINT and SIGTERM: the first asks the run to end at a step boundary, the
// second ends the process at once.
#ifndef ZERO_TOOLS_CLI_SIGNALS_H_
#define ZERO_TOOLS_CLI_SIGNALS_H_

#include <atomic>

namespace zero {

// Installs the handlers and returns the flag that the first signal sets. The
// flag is the process's one global: a signal handler can reach nothing else.
const std::atomic<bool>* InstallStopSignals();

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_SIGNALS_H_
