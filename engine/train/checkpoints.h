// A run's checkpoints, in training.out_dir/checkpoints/: when one is due, and
// how it is written while training continues.
//
// A checkpoint holds the model states (StateAccess::ForEachKept), each element
// once, and the manifest (run_manifest.h). It is independent of the number of
// ranks and the stage: engine/checkpoint finds any range of any tensor in it.
//
// A save has two phases: every rank writes its part; when all parts are
// durable, rank 0 completes the checkpoint and removes older ones. With
// training.async_save a thread of each rank does this work, from a copy of the
// states (StateSnapshot), and training waits only for the copy. The numbers
// that the ranks agree on before every step say whether each rank's work of the
// phase has ended (Vote); once all have, all ranks learn it at the same step
// boundary (Advance) and begin the next phase. Without the copy each rank's own
// thread does the work. Invariant: there is one save at a time.
// Order: all ranks make the same calls, in the same order.
#ifndef ZERO_ENGINE_TRAIN_CHECKPOINTS_H_
#define ZERO_ENGINE_TRAIN_CHECKPOINTS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/base/background.h"
#include "engine/train/console.h"
#include "engine/train/resume.h"
#include "engine/train/run_data.h"
#include "engine/train/run_folder.h"
#include "engine/train/run_record.h"
#include "engine/train/session.h"
#include "engine/zero/state_access.h"

namespace zero {

class RunCheckpoints {
 public:
  // Session, data, run folder and console must outlive it.
  RunCheckpoints(Session& session, const RunData& data,
                 const RunFolder& run_folder, const ResumedRun& resumed,
                 Console* console);
  // Aborts a save in progress. Finish, below, waits for it.
  ~RunCheckpoints() { cancelled_ = true; }

  // Whether training.save_every_minutes have passed on this rank and no save is
  // in progress.
  bool MinutesPassed() const;

  // Begins a checkpoint of the current states, after any save in progress. Does
  // nothing if this step was saved already.
  // Errors: those of the communicators, here and below; here and from Finish
  //         also last_save(), after which the run must end.
  absl::Status Save(const RunRecord& record);

  // How many ranks have ended their work of the phase, and how many of these
  // failed: of this rank alone as its vote, or summed over all ranks.
  struct PhaseVotes {
    double ended = 0, failed = 0;
  };
  PhaseVotes Vote() const;
  absl::Status Advance(const PhaseVotes& votes);

  // Waits until no save is in progress. If ranks are lost, a save they have not
  // written is aborted, and one that rank 0 was completing is completed.
  absl::Status Finish();

  // The step of the save in progress, or of the last one.
  int64_t step() const { return record_.step; }
  // "checkpoints/step-00000010", the last of this run; empty: none.
  std::string saved() const;
  // Why there is no checkpoint at step(): an error on all ranks if one of them
  // could not write, with its number and host. That rank has printed the file.
  const absl::Status& last_save() const { return last_save_; }

  // Tests set a hook that is called on the writing thread before each piece;
  // its error counts as a write error.
  void set_write_hook(std::function<absl::Status()> hook) {
    write_hook_ = std::move(hook);
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kNone, kWriting, kCompleting };
  using BytesFn =
      std::function<absl::Span<const char>(const StateAccess::KeptRun&)>;

  const TrainingConfig& training() const { return session_->config().training; }
  bool leads() const { return session_->rank().rank() == 0; }
  // Whether training continues while a checkpoint is written.
  bool beside() const { return session_->snapshot() != nullptr; }
  absl::Status Begin(const RunRecord& record);
  // The work of the two phases.
  absl::Status WritePart(const StateAccess& states,
                         const std::vector<StateAccess::KeptPiece>& pieces,
                         const BytesFn& bytes) const;
  absl::Status Complete();
  void Do(std::function<absl::Status()> work);
  // Ends a phase once the ranks' work of it has ended, with the same result on
  // all.
  void EndPhase(const absl::Status& status);
  // OK if it is OK on every rank; else this rank's error, or CannotWrite.
  absl::Status Agree(const char* name, const absl::Status& own);
  // Unavailable: another rank's error.
  absl::Status CannotWrite(int rank) const;

  Session* session_;
  const RunData* data_;
  const RunFolder* run_folder_;
  Console* console_;
  const std::string folder_;
  const std::string run_;  // id of the run, on rank 0
  int64_t saved_step_ = -1, tried_step_ = -1;
  absl::Status last_save_;
  bool waited_before_ = false;  // for a save, before the next one
  std::function<absl::Status()> write_hook_;

  // The save in progress, or the last one.
  Phase phase_ = Phase::kNone;
  RunRecord record_;
  std::string id_;
  Clock::time_point began_at_ = Clock::now();
  Clock::duration blocked_ = {};  // training was, by it
  absl::Status tidied_;           // on rank 0: latest, and older ones
  std::atomic<bool> cancelled_ = false;
  Background work_;  // last: it uses the members above
};

}  // namespace zero

#endif  // ZERO_ENGINE_TRAIN_CHECKPOINTS_H_
