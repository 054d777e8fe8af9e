// A run's checkpoints, in training.out_dir/checkpoints/: when one is due, what
// is in it, and how a run goes on from one.
//
// A checkpoint holds the model states (StateAccess::ForEachKept), each element
// once, the RunRecord, the config, and what tells the data apart from others.
// It knows no number of ranks and no stage: engine/checkpoint finds any range
// of any tensor in it.
// Order: all ranks make the same calls, in the same order.
#ifndef ZERO_ENGINE_TRAIN_CHECKPOINTS_H_
#define ZERO_ENGINE_TRAIN_CHECKPOINTS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/train/console.h"
#include "engine/train/run_data.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"

namespace zero {

class RunCheckpoints {
 public:
  // Session, data and console must outlive it.
  RunCheckpoints(Session& session, const RunData& data, Console* console);

  // What training.resume asks for: fills the model states and returns where
  // the run was. None: it begins anew. Rank 0, which has the run's folder to
  // itself, looks and decides.
  // Errors: NotFound; FailedPrecondition where the checkpoint is of another
  //         run, naming the first difference, or where this run would begin
  //         anew beside the checkpoints of another; those of CheckpointReader.
  // A damaged one gives way to the one before, with a warning.
  absl::StatusOr<absl::optional<RunRecord>> Resume();
  // Whether the run goes on in the folder of the run that it resumes.
  bool in_place() const { return own_; }

  // Whether training.save_every_minutes have passed on this rank.
  bool MinutesPassed() const;

  // Writes one, and removes those that training.keep_* does not keep. Nothing
  // where that was done at this step, or tried.
  // Errors: those of the communicators; where a rank can not write, its error,
  //         Unavailable on the others, and all can go on.
  absl::Status Save(const RunRecord& record);
  // "checkpoints/step-00000010", the last of this run; empty: none.
  std::string saved() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Choice {
    std::string path;  // empty: begin anew
    std::unique_ptr<CheckpointReader> reader;
  };
  const TrainingConfig& training() const { return session_->config().training; }
  bool leads() const { return session_->rank().rank() == 0; }
  // Whether training.resume leaves it to rank 0 to find one.
  bool finds() const {
    return training().resume == "auto" || training().resume == "latest";
  }
  absl::StatusOr<absl::optional<RunRecord>> TryResume();
  absl::StatusOr<Choice> Choose() const;
  absl::Status BesideAnother() const;
  absl::Status MoveAway() const;
  // Newer ones get other names: this run takes their steps again.
  absl::Status SetAside(int64_t later_than) const;
  absl::Status Rename(const std::string& path, const std::string& to) const;
  absl::Status CheckMatches(const CheckpointManifest& manifest) const;
  absl::Status Write(const RunRecord& record);
  absl::Status WritePart(const std::string& folder, const std::string& save);
  CheckpointManifest Describe(const RunRecord& record,
                              const std::string& save) const;
  // OK where it is that on every rank; else this rank's error, or Unavailable.
  absl::Status Agree(const char* name, const absl::Status& own);

  Session* session_;
  const RunData* data_;
  Console* console_;
  const std::string folder_;
  std::string run_;     // id of the run, on rank 0
  std::string chosen_;  // the checkpoint that is resumed
  bool own_ = false;    // it is in folder_
  int64_t saved_step_ = -1, tried_step_ = -1;
  Clock::time_point saved_at_ = Clock::now();
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_CHECKPOINTS_H_
