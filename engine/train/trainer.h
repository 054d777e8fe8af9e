// The run: data in, steps, metrics and weights out.
//
// Start reading at Trainer::Run and Trainer::Step. The trainer knows why a step
// is taken; the executor (engine/zero) performs it.
#ifndef ZERO_ENGINE_TRAIN_TRAINER_H_
#define ZERO_ENGINE_TRAIN_TRAINER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/config/load.h"
#include "engine/data/loader.h"
#include "engine/train/checkpoints.h"
#include "engine/train/console.h"
#include "engine/train/report.h"
#include "engine/train/run_data.h"
#include "engine/train/run_folder.h"
#include "engine/train/run_record.h"
#include "engine/train/run_start.h"
#include "engine/train/session.h"
#include "engine/train/stragglers.h"
#include "optim/loss_scaler.h"
#include "optim/lr_scaling.h"
#include "optim/lr_schedule.h"

namespace zero {

class Trainer {
 public:
  // `rank` must outlive the trainer. All ranks make the same calls; rank 0
  // writes the files, and the others' console should be a silent one. `stop`
  // (may be null) asks the run to end at the next step boundary; one rank's is
  // enough. On an asynchronous device that is after the steps agreed on, at
  // most two more. The ranks of a process share one `start`, which must outlive
  // them; null: this rank makes its own.
  // Errors: those of data, memory and weights; out_dir not writable, or in use
  //         by another run.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(
      const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
      Console* console, const std::atomic<bool>* stop,
      RunStart* start = nullptr);

  // Trains to the end (or to `stop`), evaluates, samples, writes out_dir.
  // Errors: Aborted after training.max_consecutive_skips, or if the run ends
  //         diverged; those of writing.
  //         summary.json then has the progress and the error, an earlier final/
  //         stays, and finite weights are in final.failed/. If rank 0 hangs,
  //         the next rank writes it.
  absl::StatusOr<RunSummary> Run();

  // The run's state between two steps.
  const RunRecord& record() const { return record_; }

  Session& session() { return *session_; }
  const RunData& data() const { return *data_; }
  RunCheckpoints& checkpoints() { return *checkpoints_; }

 private:
  Trainer(const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
          Console* console, const std::atomic<bool>* stop, RunStart* start);
  absl::Status OpenData();
  absl::Status PlanSteps();
  // Locks the run's folder, and resumes if training.resume says so.
  absl::Status OpenFolder();
  // Runs `work`; an exception (the system may refuse memory) is an error of all
  // ranks.
  absl::Status AbortOnThrow(const std::function<absl::Status()>& work);
  absl::Status TakeSteps();
  // Evaluates and samples if the config says so for this step; called between
  // steps, and after the last one.
  absl::Status EvaluateAndSampleIfDue();
  absl::Status SaveIfDue();
  absl::Status Save();
  // Saves a checkpoint at the end of a stopped run, or of one that writes them.
  absl::Status SaveLast();
  // Saves the weights, unless an interrupted run would replace those of a run
  // that was not.
  absl::Status SaveWeights();
  absl::Status Evaluate();
  absl::Status Sample();
  // Whether this rank is the lowest one still running, which writes it.
  bool WritesSummary() const;

  // Takes one step. Returns false, without a step, if a rank was asked to stop.
  absl::StatusOr<bool> Step();
  // Reads this rank's micro-batches of step `index` (from 0) and starts the
  // agreement on it; does nothing if that was done ahead.
  void Fill(int64_t index);
  // Waits for all ranks and returns their valid targets of step `index`.
  // Empty: a rank was asked to stop, or, with launched steps, rank 0 cannot
  // write, which the next agreement reports.
  absl::StatusOr<absl::optional<double>> Agree(int64_t index);
  absl::Status Launch(int64_t index, double num_valid_targets);
  // Waits for the first launched step.
  absl::StatusOr<StepRecord> Await();
  // Records, prints and checks a finished step.
  absl::Status Report(const StepRecord& taken);

  // The error of a step that update_before_norm cannot skip.
  absl::Status NotFinite(const StepOutput& output);
  // If the first of two launched steps was skipped, both are dropped and the
  // first is repeated: only its time shows, as part of this step.
  absl::StatusOr<StepOutput> TakeAgain();
  // Whether the step after step `index` may be launched before that one's
  // results are known: its inputs do not depend on them, unless step `index` is
  // skipped, and nothing is due between the two.
  bool RunsAheadOf(int64_t index) const;
  // `status` with the step or steps that it may have hit.
  absl::Status InStep(const absl::Status& status, int64_t last) const;
  double FillBatches(int64_t index);  // returns this rank's valid targets
  // The bytes that this rank sent and received, and its waits, since the run
  // began, including outside steps.
  StepCommunication Communicated() const;
  // This rank's own work in a step that took `seconds`.
  OwnTimes OwnTimesOf(double seconds, const WaitTimes& waited);
  // All ranks' numbers of the last finished agreement.
  std::vector<OwnTimes> OwnTimesOfRanks() const;

  // Numbers summed over the ranks: requests to stop, failures to write metrics
  // (rank 0), RunCheckpoints::PhaseVotes, whether a checkpoint is due by time
  // (rank 0), valid targets of a step; and, not summed, each rank's OwnTimes of
  // the previous step.
  using Agreement = std::array<double, kNumAgreed>;
  enum {
    kStop,
    kCannotWrite,
    kPhaseEnded,
    kPhaseFailed,
    kSave,
    kValidTargets,
    kOwnTimes
  };
  static_assert(kOwnTimes + std::size(kStepParts) == kNumAgreed);
  // This rank's numbers for an agreement.
  Agreement Propose(double num_valid_targets) const;
  // Whether any rank was asked to stop: the same answer on all. An error if
  // rank 0 could not write its metrics, or a rank its part of a checkpoint;
  // Unavailable on the other ranks.
  absl::StatusOr<bool> ShouldStop(const Agreement& agreed) const;
  // Agrees now on the same question; leaves out the last two numbers.
  absl::StatusOr<bool> AgreeToStop();

  bool leads() const { return rank_->rank() == 0; }
  Executor& executor() const { return session_->executor(); }
  // The loss scale follows from the skipped steps.
  bool scale_is_dynamic() const {
    return config_.fp16.enabled && config_.fp16.scaler.static_scale == 0;
  }

  const Rank* rank_;
  LoadedConfig loaded_;
  const Config& config_;
  ModelTools tools_;
  Console* console_;
  const std::atomic<bool>* stop_;
  std::unique_ptr<RunStart> own_start_;  // if none was given
  RunStart* start_;
  const RunData* data_ = nullptr;  // start_'s
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<EvalLoader> eval_loader_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<RunFolder> folder_;
  std::unique_ptr<RunCheckpoints> checkpoints_;
  std::unique_ptr<RunReport> report_;
  LrSchedule schedule_;
  LrScaling scaling_;
  LossScaler scaler_;
  int64_t total_steps_ = 0;
  RunRecord record_;
  bool updated_with_bad_ = false;  // see NotFinite
  // The batches of the micro-steps, whose memory is reused. Two steps take
  // turns.
  std::array<std::vector<Batch>, 2> batches_;
  Agreement agreement_ = {};
  int64_t agreeing_on_ = -1;  // the step whose agreement is in flight
  OwnTimes own_times_;        // of the last step
  double fill_seconds_ = 0;   // reading batches, since the previous step
  double busy_ms_ = 0;  // with collectives, at the end of the previous step
  bool save_agreed_ = false;  // a checkpoint after the steps in flight
  const std::chrono::steady_clock::time_point made_at_ =
      std::chrono::steady_clock::now();
  // A step whose results are not known yet.
  struct LaunchedStep {
    double num_valid_targets;
    double lr;
    StepCommunication communication;  // its waits are not known either
  };
  std::deque<LaunchedStep> launched_;  // from record_.step on, at most two
  std::chrono::steady_clock::time_point step_end_;  // of the last one
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRAINER_H_
