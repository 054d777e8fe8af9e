// The rows of `zero memory`: the memory of device and host, and the traffic, of
// a stage with a level of recompute and offload.
#ifndef ZERO_TOOLS_CLI_MEMORY_ROWS_H_
#define ZERO_TOOLS_CLI_MEMORY_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/base/recompute.h"
#include "engine/config/config.h"
#include "engine/train/fit_search.h"
#include "engine/train/session.h"
#include "nlohmann/json_fwd.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/measured_run.h"
#include "tools/cli/ranks.h"

namespace zero {

struct MemoryRow {
  RunOptions run;  // of this row, by its --set
  int stage;
  Recompute recompute;
  Offload offload;
  bool as_configured;  // the config's own stage, recompute and offload
  Config config;
  std::string device;
  Rehearsal rehearsal;
  // The states' bytes by the closed formulas, with padding.
  int64_t formula_states;
  StepWire formula_wire, rows_wire;  // FormulaWire, RowsWire
  FitLimits limits;
  int64_t room_bytes = 0;  // what zero train may need beside the prediction
  double offload_seconds;  // OffloadSeconds
  absl::optional<MeasuredRun> measured;
  std::string failure;  // why the measured run failed

  // Parameters, gradients, master weights and moments, each at its own peak:
  // gradients are complete when backward ends and activations are freed.
  int64_t states_bytes() const;
  bool fits() const {
    return rehearsal.needed_bytes() <= limits.device &&
           rehearsal.disk_bytes <= limits.disk &&
           (rehearsal.one_memory || rehearsal.host_bytes() <= limits.host);
  }
  bool fits_barely() const {
    return fits() && rehearsal.needed_bytes() > limits.device - room_bytes;
  }
  // This rank's predicted share of the process's resident bytes.
  int64_t ResidentBytes() const {
    return rehearsal.ledger.total_peak_bytes() +
           (run.device == "cpu" ? rehearsal.host_bytes() : 0);
  }
  std::string Name() const;  // "stage 2, recompute full, offload optimizer"
};

// All stages, at every level of recompute and with `offloads` of offload:
// rehearsals of the same run on the meta device, which allocate nothing and
// read no data. `config`: `run`'s own settings.
absl::StatusOr<std::vector<MemoryRow>> PredictRows(const RunOptions& run,
                                                   const Config& config,
                                                   bool offloads,
                                                   FitSearch& search);

// Bytes of a rank by category, with `fixed` as counted by the operating system:
// the process's memory outside its arenas' blocks.
struct Compared {
  std::string name;
  int64_t predicted = 0;
  absl::optional<int64_t> measured;  // none: not run
};
// One entry for every MemoryCategory, in order, then "host_bytes".
std::vector<Compared> Compare(const MemoryRow& row);

// A row as a line of --json. With `measures` it has "measured", whose values
// are null if the row was not measured.
nlohmann::ordered_json AsJson(const MemoryRow& row, bool measures);

// A row's memory over time, for a page: each action with its purpose, and the
// bytes of each category where they change. Of many neighboring moments only
// the highest is kept.
nlohmann::ordered_json Timeline(const MemoryRow& row);

}  // namespace zero

#endif  // ZERO_TOOLS_CLI_MEMORY_ROWS_H_
