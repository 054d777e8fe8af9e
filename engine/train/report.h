// A run's report: a line per step, and its summary.
#ifndef ZERO_ENGINE_TRAIN_REPORT_H_
#define ZERO_ENGINE_TRAIN_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/product_rate.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"
#include "engine/train/stragglers.h"
#include "engine/train/utilization.h"

namespace zero {

struct RunSummary {
  int64_t steps = 0;
  int64_t skipped = 0;  // of the steps
  int64_t tokens = 0;
  double seconds = 0;
  // Of this part of the run (RunRecord::first_step): earlier ones may have had
  // other ranks or another machine.
  double part_seconds = 0;
  double tokens_per_second = 0;  // over whole steps, without evaluation
  Utilization utilization;       // at that speed
  // A rank's FLOP/s that count as 100 %. Measured again during the run, which
  // may find more than at its start.
  double peak_flops = 0;
  WaitTimes waited;  // in steps, for communication
  double first_loss = kNotKnown, final_loss = kNotKnown;  // NaN: of no step
  double validation_loss = kNotKnown;                     // NaN: not evaluated
  int64_t validation_step = -1;  // after this many steps; -1: not evaluated
  std::string parameters_hash;
  std::string wire;  // bytes of a step against the formula
  // How often a step gathers the parameters, by bytes: 1 if all units stay in
  // place. 0: parameters are not sharded.
  double gathers = 0;
  double peak_bytes = 0;            // of all ranks' memory together,
  double host_bytes = 0;            // and of that the hosts' part
  double process_peak_bytes = 0;    // on the CPU: of those in rank 0's process
  bool interrupted = false;         // by `stop`
  std::string weights;              // their folder in out_dir; empty: none
  std::string checkpoint;           // likewise, the last one
  std::vector<int64_t> resumed_at;  // steps where later parts of the run began
  std::vector<Straggler> stragglers;

  // Whether this part has a speed, a utilization and waits.
  bool took_steps() const { return part_seconds > 0; }
};

class RunReport {
 public:
  // `measured`: the device's ceiling, before the run. `start`: where this part
  // of the run begins. `link`: RunStart's. The session, tools and console must
  // outlive the report.
  RunReport(const Session& session, const ModelTools& tools,
            const ProductRate& measured, const RunRecord& start,
            int64_t total_steps, std::string link, Console* console);

  // Takes each rank's own times of a step (`step`, or shortly before it), and
  // reports slow ranks. Rank 0 only.
  void TakeRankTimes(int64_t step, std::vector<OwnTimes> of_ranks);

  // Prints the last step of `record` and returns its line for metrics.jsonl.
  // `idle`: the device has not begun the next step.
  nlohmann::ordered_json Step(const RunRecord& record, bool idle);

  // Prints the device's new notes: at the start, and later, since a batch may
  // need kernels that earlier ones did not.
  void PrintDeviceNotes();

  // Measures the device's ceiling again and keeps the best. Rank 0 only; the
  // others return at once.
  void MeasurePeak();

  RunSummary Summarize(const RunRecord& record) const;
  // summary.json. `status`: how the run ended.
  std::string SummaryJson(const RunSummary& summary,
                          const absl::Status& status) const;

  const Session& session() const { return *session_; }
  int64_t total_steps() const { return total_steps_; }
  const std::string& link() const { return link_; }
  const TokenFlops& flops_per_token() const { return flops_per_token_; }
  const PeakRate& peak() const { return peak_; }

 private:
  const Config& config() const { return session_->config(); }
  const Rank& rank() const { return session_->rank(); }
  void AddRankTimes(nlohmann::ordered_json* line);
  void KeepPeak(const ProductRate& measured);
  Utilization UtilizationOf(double tokens_per_second) const;
  // Tokens per second since the previous line; if this line is kept, the next
  // one counts from it.
  double SpeedSinceLine(const RunRecord& record, bool keep);
  void PrintBreakdowns(const RunRecord& record) const;

  const Session* session_;
  const ModelTools* tools_;
  const RunRecord start_;
  int64_t total_steps_;
  std::string link_;
  Console* console_;
  int64_t tokens_per_step_;
  TokenFlops flops_per_token_;
  PeakRate peak_;
  int64_t line_step_;            // of the previous line, or of `start_`
  double line_seconds_;          // of training until then
  size_t num_device_notes_ = 0;  // printed so far
  StragglerDetector detector_;
  std::vector<Straggler> stragglers_;
  size_t num_written_ = 0;      // of these, in metrics
  std::vector<double> own_ms_;  // of the ranks; empty: none since
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_REPORT_H_
