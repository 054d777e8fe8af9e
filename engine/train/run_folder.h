// training.out_dir: config.json, metrics.jsonl, summary.json, weights and, if
// requested, tensorboard/.
#ifndef ZERO_ENGINE_TRAIN_RUN_FOLDER_H_
#define ZERO_ENGINE_TRAIN_RUN_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/data/tokenizer.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/session.h"
#include "engine/train/tensorboard.h"

namespace zero {

// How many checkpoints a run has at once: training.keep_last, and the one that
// is being written. Those that stay for good (keep_last 0, keep_every) are not
// counted: their number depends on when the run is stopped.
int64_t CheckpointsAtOnce(const TrainingConfig& training);

// "there is no checkpoint in OUT_DIR", with the reason if the config of the run
// there has it.
std::string NoCheckpointIn(const std::string& out_dir);

class RunFolder {
 public:
  // Rank 0 locks the folder and removes stale files of a crash. The other ranks
  // touch nothing. Weights are those of `session`, saved with `tokenizer`
  // (null: none). All of these must outlive the folder.
  // Errors: FailedPrecondition if another run is writing there or it holds a
  //         model; ResourceExhausted if the disk has no room for the weights
  //         and CheckpointsAtOnce; FileError.
  static absl::StatusOr<std::unique_ptr<RunFolder>> Open(
      Session& session, const ModelTools& tools, const Tokenizer* tokenizer,
      Console* console);

  // If the ranks write checkpoints, or read one: checks that all of them see
  // the folder that rank 0 has made, now and not at the first save.
  // Order: all ranks call it.
  // Errors: FailedPrecondition on all ranks, naming one that does not.
  absl::Status CheckAllRanksSeeIt() const;

  // Removes, on rank 0, an earlier summary, writes config.json, and truncates
  // metrics and events to the first `step` steps and to evaluations up to step
  // `last_eval`.
  absl::Status Begin(int64_t step, int64_t last_eval);

  // Makes the metrics durable: they must not be older than a checkpoint.
  // Threads: any.
  absl::Status SyncMetrics() const {
    return metrics_ == nullptr ? absl::OkStatus() : metrics_->Sync();
  }

  // Adds a line to metrics.jsonl and its values to TensorBoard's events; does
  // nothing on other ranks, nor after an error, which `metrics_status` keeps.
  void WriteMetrics(const nlohmann::ordered_json& line);
  const absl::Status& metrics_status() const { return metrics_status_; }

  // Saves the weights in the subfolder `name`, unless training.save_final says
  // not to. All ranks call it. Errors: as Session::Save.
  absl::Status SaveWeights(const std::string& name);
  // The subfolder that was saved; empty: none.
  const std::string& weights() const { return weights_; }
  // True on rank 0 if final/ has the weights of an earlier run that was not
  // interrupted, as far as a summary says, and that this one does not resume.
  bool has_final_of_whole_run() const { return has_final_of_whole_run_; }

  // Writes the summary on the calling rank. Errors: FileError.
  absl::Status WriteSummary(const std::string& json) const;

 private:
  RunFolder(Session& session, const ModelTools& tools,
            const Tokenizer* tokenizer, Console* console)
      : session_(&session),
        tools_(&tools),
        tokenizer_(tokenizer),
        console_(console) {}
  const TrainingConfig& training() const { return session_->config().training; }
  absl::Status Prepare();
  absl::Status WriteEvents(const nlohmann::ordered_json& line);

  Session* session_;
  const ModelTools* tools_;
  const Tokenizer* tokenizer_;
  Console* console_;
  std::shared_ptr<void> lock_;
  std::unique_ptr<MetricsWriter> metrics_;
  EventFile events_;
  std::unique_ptr<MetricsWriter> event_file_;  // null: not requested
  absl::Status metrics_status_;
  bool has_final_of_whole_run_ = false;
  std::string weights_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_RUN_FOLDER_H_
