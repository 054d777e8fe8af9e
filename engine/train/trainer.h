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

  // Where the run is between two steps.
  const RunRecord& record() const { return record_; }

  Session& session() { return *session_; }
  const RunData& data() const { return *data_; }
  RunCheckpoints& checkpoints() { return *checkpoints_; }

 private:
  Trainer(const Rank& rank, const LoadedConfig& loaded, const ModelTools& tools,
          Console* console, const std::atomic<bool>* stop, RunStart* start);
  absl::Status OpenData();
  absl::Status PlanSteps();
  // Takes the run's folder, and goes on where training.resume says so.
  absl::Status OpenFolder();
  // Runs `work`; what it throws (the system may refuse memory) is an error of
  // all ranks.
  absl::Status CatchForAll(const std::function<absl::Status()>& work);
  absl::Status TakeSteps();
  // Between two steps, and after the last one.
  absl::Status EvaluateAndSampleIfDue();
  absl::Status SaveIfDue();
  absl::Status Save();
  // At the end: of a run that was stopped, and of one that writes checkpoints.
  absl::Status SaveLast();
  absl::Status Evaluate();
  absl::Status Sample();
  // The lowest rank that is still there.
  bool WritesSummary() const;

  // One step, in the order of the calls. False: a rank was asked to stop, and
  // no step was taken.
  absl::StatusOr<bool> Step();
  // Reads this rank's micro-batches of step `index` (from 0) and starts to
  // agree on it; nothing where that was done ahead.
  void Fill(int64_t index);
  // Waits for all ranks and returns their valid targets of step `index`.
  // Empty: a rank was asked to stop, or, where steps are launched, rank 0
  // cannot write, which the next agreement says.
  absl::StatusOr<absl::optional<double>> Agree(int64_t index);
  absl::Status Launch(int64_t index, double num_valid_targets);
  // Waits for the first step that is launched.
  absl::StatusOr<StepRecord> Await();
  // Records, prints and checks a step that was taken.
  absl::Status Report(const StepRecord& taken);

  // Where the first of two launched steps was skipped, both are dropped and the
  // first is taken again: only its time shows, which counts in this step.
  absl::StatusOr<StepOutput> TakeAgain();
  // Whether the step behind step `index` may be launched before the results of
  // that one are known: what it is launched with does not depend on them,
  // unless step `index` is skipped, and nothing is due between the two.
  bool RunsAheadOf(int64_t index) const;
  // `status` with the step that it hit, or with those that it may have hit.
  absl::Status InStep(const absl::Status& status, int64_t last) const;
  double FillBatches(int64_t index);  // returns this rank's valid targets
  // Since the run began, outside of steps too.
  StepCommunication Communicated() const;
  // What of a step that took `seconds` was this rank's own work.
  OwnTimes OwnTimesOf(double seconds, const WaitTimes& waited);
  // What all ranks brought to the agreement that was finished last.
  std::vector<OwnTimes> OwnTimesOfRanks() const;

  // Numbers that are added up over the ranks: those that were asked to stop,
  // those that could not write metrics (rank 0), RunCheckpoints::PhaseVotes,
  // those whose time has come for a checkpoint (rank 0), valid targets of a
  // step; and, not to be added up, each rank's OwnTimes of the step before.
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
  // What this rank brings to one.
  Agreement Propose(double num_valid_targets) const;
  // Whether any rank was asked to stop: the same answer on all. An error where
  // rank 0 could not write its metrics; Unavailable on the other ranks.
  absl::StatusOr<bool> ShouldStop(const Agreement& agreed) const;
  // The same, asked now, without the last two.
  absl::StatusOr<bool> AgreeToStop();

  bool leads() const { return rank_->rank() == 0; }
  Executor& executor() const { return session_->executor(); }
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
  std::unique_ptr<RunFolder> folder_;
  std::unique_ptr<RunCheckpoints> checkpoints_;
  std::unique_ptr<RunReport> report_;
  LrSchedule schedule_;
  LrScaling scaling_;
  LossScaler scaler_;
  int64_t total_steps_ = 0;
  RunRecord record_;
  // One per micro-step, memory reused; of two steps in turn.
  std::array<std::vector<Batch>, 2> batches_;
  Agreement agreement_ = {};
  int64_t agreeing_on_ = -1;  // the step, while its agreement is on its way
  OwnTimes own_times_;        // of the step that was taken last
  double fill_seconds_ = 0;   // reading batches, since the step before
  double busy_ms_ = 0;        // with collectives, when the step before ended
  bool save_agreed_ = false;  // a checkpoint behind the steps under way
  const std::chrono::steady_clock::time_point made_at_ =
      std::chrono::steady_clock::now();
  // A step whose results are not known yet.
  struct LaunchedStep {
    double num_valid_targets;
    double lr;
    StepCommunication communication;  // what it waits for is not known either
  };
  std::deque<LaunchedStep> launched_;  // from record_.step on, at most two
  std::chrono::steady_clock::time_point step_end_;  // of the last one
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_TRAINER_H_
