// The run: data in, steps, metrics and weights out.
//
// Start reading at Trainer::Run and Trainer::Step. The trainer knows why a
// step is taken; how it is performed is the executor's (engine/zero).
#ifndef ZERO_ENGINE_TRAIN_TRAINER_H_
#define ZERO_ENGINE_TRAIN_TRAINER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/base/folder_lock.h"
#include "engine/config/load.h"
#include "engine/data/loader.h"
#include "engine/train/console.h"
#include "engine/train/evaluate.h"
#include "engine/train/metrics.h"
#include "engine/train/product_rate.h"
#include "engine/train/run_data.h"
#include "engine/train/run_start.h"
#include "engine/train/session.h"
#include "engine/train/training_state.h"
#include "engine/train/utilization.h"
#include "optim/loss_scaler.h"
#include "optim/lr_scaling.h"
#include "optim/lr_schedule.h"

namespace zero {

struct RunSummary {
  int64_t steps = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double tokens_per_second = 0;  // over whole steps, without evaluation
  Utilization utilization;       // at that speed
  // NaN: of no step, not evaluated.
  double first_loss = std::numeric_limits<double>::quiet_NaN();
  double final_loss = std::numeric_limits<double>::quiet_NaN();
  double validation_loss = std::numeric_limits<double>::quiet_NaN();
  int64_t validation_step = -1;  // after this many steps; -1: not evaluated
  std::string parameters_hash;
  WaitTimes waited;  // in steps, for communication
  std::string wire;  // bytes of a step against the formula
  // How often a step gathers the parameters, and how often without
  // stage3_max_live_parameters. 0: parameters are not sharded.
  double gathers = 0;
  double fewest_gathers = 0;
  double peak_bytes = 0;     // of all ranks' memory together
  bool interrupted = false;  // by `stop`
  std::string weights;       // the folder in out_dir that has them; empty: none
};

// What one step sent, received and waited for, on this rank.
struct StepCommunication {
  StepWire wire;
  int64_t collectives = 0;
  WaitTimes waited;

  StepCommunication operator-(const StepCommunication& before) const {
    return {.wire = {.gathered = wire.gathered - before.wire.gathered,
                     .reduced = wire.reduced - before.wire.reduced,
                     .across = wire.across - before.wire.across,
                     .received = wire.received - before.wire.received},
            .collectives = collectives - before.collectives,
            .waited = waited - before.waited};
  }
};

class Trainer {
 public:
  // `rank` must outlive the trainer. All ranks make the same calls; rank 0
  // writes the files, and the others' console should be a silent one. `stop`
  // (may be null) asks the run to end at the next step boundary; one rank that
  // is asked is enough. On an asynchronous device that is behind the steps that
  // were agreed on, two more at most. The ranks of a process give one `start`,
  // which must outlive them; null: this rank makes its own.
  // Errors: those of data, memory and weights; out_dir not writable, or another
  //         run is writing there.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(
      const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
      Console* console, const std::atomic<bool>* stop,
      RunStart* start = nullptr);

  // Trains to the end (or to `stop`), evaluates, samples, writes out_dir.
  // Errors: Aborted after training.max_consecutive_skips, and where the run
  //         ends diverged; those of writing.
  //         summary.json then says how far the run came and the error, an
  //         earlier final/ stays, and finite weights are in final.failed/.
  //         Where rank 0 hangs, the next rank writes it.
  absl::StatusOr<RunSummary> Run();

  // The state between two steps: before Run, or after it. Taken up by a new
  // trainer of the same config before its Run, which then goes on to the same
  // bits. A rank keeps its own; none waits for another.
  TrainingState ExportState();
  // Errors: InvalidArgument where the arrays are not those of this model,
  //         precision, optimizer, ZeRO stage and world; nothing is changed.
  absl::Status Restore(const TrainingState& state);

  Session& session() { return *session_; }
  const RunData& data() const { return *data_; }
  int64_t total_steps() const { return total_steps_; }

 private:
  Trainer(const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
          Console* console, const std::atomic<bool>* stop, RunStart* start);
  absl::Status OpenData();
  absl::Status PlanSteps();
  void PrintStart() const;
  // Runs `work`; what it throws (the system may refuse memory) is an error of
  // all ranks.
  absl::Status CatchForAll(const std::function<absl::Status()>& work);
  absl::Status TakeSteps();
  absl::Status DoWhatIsDue();  // between two steps
  // False: a rank was asked to stop, and no step was taken.
  absl::StatusOr<bool> Step();
  // Whether the step behind step `index` (from 0) may be launched before the
  // results of that one are known: what it is launched with does not depend on
  // them, unless step `index` is skipped, and nothing is due between the two.
  bool RunsAheadOf(int64_t index) const;
  // Agrees with the other ranks on the step behind those that are launched, and
  // launches it. False: a rank was asked to stop, or, where steps are launched,
  // rank 0 can not write, which the next agreement says.
  absl::StatusOr<bool> LaunchNext();
  // Launches step `index`, whose batches are filled.
  absl::Status Launch(int64_t index, double num_valid_targets);
  // Waits for the first step that is launched. Where it was skipped and another
  // one was launched behind it, both are dropped and this one is taken again:
  // nothing of it shows but the time, which counts in this step.
  absl::StatusOr<StepOutput> AwaitStep();
  // `status` with the step that it hit, or with those that it may have hit.
  absl::Status InStep(const absl::Status& status, int64_t last) const;
  // This rank's micro-batches of step `index`; returns its valid targets.
  double FillBatches(int64_t index);
  // Since the run began, outside of steps too.
  StepCommunication Communicated() const;
  std::string WireText() const;
  // Fills in how often a step gathers.
  void CountGathers(RunSummary* summary) const;
  absl::Status CountSkips(const StepOutput& output);
  // Keeps the best of what was measured so far and what is now. Rank 0's, which
  // reports it; the others go on.
  void MeasurePeak();
  void KeepPeak(const ProductRate& measured);
  void Report(const StepOutput& output, double seconds, double lr);
  void WriteMetrics(const JsonLine& line);
  Utilization UtilizationOf(double tokens_per_second) const;
  void PrintBreakdowns() const;
  // Those of the device's notes that were not printed yet: at the start, and
  // later, as batches may need kernels that none before them did.
  void PrintDeviceNotes();
  absl::Status CheckUnused() const;
  absl::Status EvaluateAndLog();
  absl::Status Sample();
  absl::Status EvaluateAndSampleAtEnd();
  // Aborted where the run diverged, so that its weights replace no good ones.
  absl::Status CheckFinite();
  // Saves in `folder` of out_dir.
  absl::Status SaveWeights(const std::string& folder);
  RunSummary Summarize() const;
  // `status`: how the run ended.
  absl::Status WriteSummary(const RunSummary& summary,
                            const absl::Status& status) const;
  std::vector<int32_t> SamplePrompt() const;
  // Tokens of context that samples use; 0: there are no samples.
  int64_t SampleContext() const;
  // Keeps the weights of a run that ended with `status` in final.failed/,
  // where they are finite and all ranks are still there; returns `status` with
  // that added.
  absl::Status Rescue(const absl::Status& status);
  // Numbers that are added up over the ranks: those that were asked to stop,
  // those that could not write metrics (rank 0), valid targets of a step.
  using Agreement = std::array<double, 3>;
  enum { kStop, kCanNotWrite, kValidTargets };
  // What this rank brings to one.
  Agreement Propose(double num_valid_targets) const;
  // Begins to agree on step `index`, whose batches it fills.
  void StartAgreement(int64_t index);
  // Whether any rank was asked to stop: the same answer on all. An error where
  // rank 0 could not write its metrics; Unavailable on the other ranks.
  absl::StatusOr<bool> ShouldStop(const Agreement& agreed) const;
  // The same, asked now.
  absl::StatusOr<bool> AgreeToStop();
  bool leads() const { return rank_->rank() == 0; }
  // The lowest rank that is still there.
  bool WritesSummary() const;
  BatchShape batch_shape() const {
    return BatchShapeOf(config_, rank_->world());
  }
  // After `done` steps, every so many of them (0: never).
  static bool Due(int64_t every, int64_t done) {
    return every > 0 && done % every == 0;
  }
  // The loss scale follows from which steps were skipped.
  bool scale_is_dynamic() const {
    return config_.fp16.enabled && config_.fp16.scaler.static_scale == 0;
  }

  const Rank* rank_;
  LoadedConfig loaded_;
  const Config& config_;
  ModelTools tools_;
  Console* console_;
  const std::atomic<bool>* stop_;
  std::unique_ptr<RunStart> own_start_;  // where none was given
  RunStart* start_;
  const RunData* data_ = nullptr;  // start_'s
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<EvalLoader> eval_loader_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<FolderLock> lock_;  // of out_dir; rank 0's
  std::unique_ptr<MetricsWriter> metrics_;
  absl::Status metrics_status_;  // of the first write that failed
  LrSchedule schedule_;
  LrScaling scaling_;
  LossScaler scaler_;
  // One per micro-step, memory reused; of two steps in turn.
  std::array<std::vector<Batch>, 2> batches_;
  ProductRate product_rate_;  // the best measured so far
  double peak_flops_ = 0;     // per second; what utilization is a share of
  TokenFlops flops_per_token_;
  int64_t total_steps_ = 0;
  int64_t step_ = 0;             // steps taken
  int64_t optimizer_steps_ = 0;  // steps that updated
  int64_t consecutive_skips_ = 0;
  double train_seconds_ = 0;
  // A step whose results are not known yet.
  struct LaunchedStep {
    double num_valid_targets;
    double lr;
    StepCommunication communication;  // what it waits for is not known either
  };
  std::deque<LaunchedStep> launched_;  // from step_ on, at most two
  Agreement agreement_ = {};
  int64_t agreeing_on_ = -1;  // the step, while its agreement is on its way
  std::chrono::steady_clock::time_point step_end_;  // of the last one
  StepCommunication communication_;                 // of the last step
  WaitTimes waited_;                                // of all steps
  double first_loss_ = 0, last_loss_ = 0;
  double validation_loss_;       // NaN until evaluated
  std::string weights_;          // the folder that was saved
  size_t num_device_notes_ = 0;  // that were printed
  int64_t last_eval_step_ = -1, last_sample_step_ = -1;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRAINER_H_
