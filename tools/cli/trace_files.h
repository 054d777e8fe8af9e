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

// Every process writes its own ranks' part. Rank 0's process then merges the
// other parts that it sees into its file, by the clocks of their hosts.
class TraceFiles {
 public:
  // `file` is empty without a trace.
  TraceFiles(const RunOptions& run, const std::string& file);

  bool wanted() const { return !own_.empty(); }

  // Checks, before the run, that this process can write its own part. Removes
  // parts that an earlier run left for rank 0.
  absl::Status Check() const;

  // `awaits`: all processes end normally, so rank 0 may wait for their parts.
  absl::Status Write(const Trace& trace, bool awaits, Console* console) const;

 private:
  std::string own_;                 // this process's file
  std::vector<std::string> parts_;  // the others', on rank 0
  bool is_part_ = false;
};

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_TRACE_FILES_H_
