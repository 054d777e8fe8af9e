// The actual memory of a run, as counted by the operating system: a short run
// of `zero train`, in its own process.
#ifndef ZERO_TOOLS_CLI_MEASURED_RUN_H_
#define ZERO_TOOLS_CLI_MEASURED_RUN_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/config/config.h"
#include "tools/cli/commands.h"

namespace zero {

// Bytes of one rank.
struct MeasuredRun {
  std::map<std::string, int64_t> peaks;  // by category, of its ledger
  // Bytes resident at the end of the run: arenas, and this rank's share of the
  // process's code and files. Empty on a GPU.
  std::map<std::string, int64_t> resident;
  // The process's peak divided by its ranks; on a GPU as counted by the driver.
  int64_t peak = 0;
  int64_t host = 0;  // states on the host
};

// A folder for measured runs, removed with the object.
class MeasureFolder {
 public:
  // From here on signals end only the measured run, and then Measure. REQUIRES:
  // as InstallStopSignals.
  static absl::StatusOr<std::unique_ptr<MeasureFolder>> Make();
  ~MeasureFolder();

  // Overrides for `run` that replace missing data by random tokens, enough for
  // kSteps steps; also for the prediction.
  absl::Status GiveData(const Config& config, RunOptions* run);

  // Takes kSteps steps. Its files are removed.
  // Errors: the run's last message; Cancelled: by a signal.
  absl::StatusOr<MeasuredRun> Measure(const Config& config,
                                      const RunOptions& run);

  static constexpr int kSteps = 2;

 private:
  MeasureFolder(std::string path, const std::atomic<bool>* stop)
      : path_(std::move(path)), stop_(stop) {}

  const std::string path_;
  const std::atomic<bool>* const stop_;  // set by a signal
};

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_MEASURED_RUN_H_
