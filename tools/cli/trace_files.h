// The file of --trace, and how the processes of a run share it.
#ifndef ZERO_TOOLS_CLI_TRACE_FILES_H_
#define ZERO_TOOLS_CLI_TRACE_FILES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/train/console.h"
#include "engine/train/trace.h"
#include "tools/cli/commands.h"

namespace zero {

// Every process writes its ranks; that of rank 0 then takes the others' parts
// into its file, where it sees them, by the clocks of their hosts.
class TraceFiles {
 public:
  // `file` is empty where no trace is asked for.
  TraceFiles(const RunOptions& run, const std::string& file);

  bool wanted() const { return !own_.empty(); }

  // Before the run: whether this process can write its own. Removes what an
  // earlier run left there for rank 0.
  absl::Status Check() const;

  // `awaits`: all processes end alike, so that rank 0 may wait for their parts.
  absl::Status Write(const Trace& trace, bool awaits, Console* console) const;

 private:
  std::string own_;                 // what this process writes
  std::vector<std::string> parts_;  // of the others, on rank 0
  bool is_part_ = false;
};

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_TRACE_FILES_H_
