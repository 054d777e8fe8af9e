#include "engine/train/checkpoints.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/comm/launch.h"
#include "engine/train/run_manifest.h"

namespace zero {
namespace {

// A shorter wait is not worth a note.
constexpr double kShortWaitSeconds = 0.01;

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

RunCheckpoints::RunCheckpoints(Session& session, const RunData& data,
                               const RunFolder& run_folder,
                               const ResumedRun& resumed, Console* console)
    : session_(&session),
      data_(&data),
      run_folder_(&run_folder),
      console_(console),
      folder_(CheckpointsFolder(session.config())),
      run_(resumed.run) {
  if (resumed.in_place) saved_step_ = tried_step_ = resumed.record->step;
}

bool RunCheckpoints::MinutesPassed() const {
  const double minutes = training().save_every_minutes;
  return minutes > 0 && phase_ == Phase::kNone &&
         Seconds(Clock::now() - began_at_) >= 60 * minutes;
}

std::string RunCheckpoints::saved() const {
  return saved_step_ < 0 ? "" : CheckpointFolder("checkpoints", saved_step_);
}

// ---- On the training thread -------------------------------------------------

absl::Status RunCheckpoints::Save(const RunRecord& record) {
  ZERO_RETURN_IF_ERROR(last_save_);
  if (std::exchange(tried_step_, record.step) == record.step) {
    return absl::OkStatus();
  }
  const auto begin = Clock::now();
  if (phase_ != Phase::kNone) {
    ZERO_RETURN_IF_ERROR(Finish());
    const double waited = Seconds(Clock::now() - begin);
    if (waited >= kShortWaitSeconds && !std::exchange(waited_before_, true)) {
      console_->Line(absl::StrFormat(
          "note: at step %d training waited %.2f s for the checkpoint of step "
          "%d; one is written at a time, so save less often, or to a faster "
          "disk",
          record.step, waited, record_.step));
    }
  }
  began_at_ = begin;
  const absl::Status status = Begin(record);
  blocked_ = Clock::now() - begin;
  ZERO_RETURN_IF_ERROR(status);
  return beside() ? last_save_ : Finish();
}

absl::Status RunCheckpoints::Begin(const RunRecord& record) {
  record_ = record;
  // Rank 0's; none if there is no folder.
  const absl::Status folder =
      leads() ? BeginCheckpoint(folder_, record.step) : absl::OkStatus();
  double id = leads() && folder.ok() ? RandomNumber() : -1;
  ZERO_RETURN_IF_ERROR(session_->executor().numbers().AllReduce(
      "checkpoint begins", ReduceOp::kMax, {&id, 1}));
  if (id < 0) {
    EndPhase(leads() ? folder : CannotWrite(0));
    return absl::OkStatus();
  }
  id_ = Id(id);
  phase_ = Phase::kWriting;
  StateAccess& states = session_->executor().states();
  if (!beside()) {
    Do([&] {
      return WritePart(states, states.KeptPieces(),
                       [&](const auto& kept) { return states.Bytes(kept); });
    });
    return absl::OkStatus();
  }
  session_->snapshot()->Take(states);
  Do([this, &states] {
    std::vector<float> floats;
    return WritePart(states, session_->snapshot()->pieces(),
                     [&](const auto& kept) {
                       return StateAccess::HostBytes(kept, &floats);
                     });
  });
  return absl::OkStatus();
}

RunCheckpoints::PhaseVotes RunCheckpoints::Vote() const {
  if (phase_ == Phase::kNone || !work_.ended()) return {};
  return {.ended = 1, .failed = work_.status().ok() ? 0.0 : 1.0};
}

absl::Status RunCheckpoints::Advance(const PhaseVotes& votes) {
  if (phase_ == Phase::kNone || votes.ended < session_->rank().world()) {
    return absl::OkStatus();
  }
  if (votes.failed == 0) {
    EndPhase(work_.Wait());
    return absl::OkStatus();
  }
  const absl::Status status = Agree("checkpoint fails", work_.Wait());
  ZERO_RETURN_IF_ERROR(session_->rank().status());
  EndPhase(status);
  return absl::OkStatus();
}

absl::Status RunCheckpoints::Finish() {
  while (phase_ != Phase::kNone) {
    const bool completing = phase_ == Phase::kCompleting;
    // A single rank loses no other.
    const auto lost = [this] {
      return session_->rank().world() > 1 ? session_->rank().status()
                                          : absl::OkStatus();
    };
    if (!lost().ok()) cancelled_ = true;
    const absl::Status own = work_.Wait();
    const absl::Status all = Agree(
        completing ? "checkpoint is complete" : "checkpoint is written", own);
    if (const absl::Status why = lost(); !why.ok()) {
      EndPhase(completing && leads() ? own : why);
      phase_ = Phase::kNone;
      return why;
    }
    EndPhase(all);
  }
  return last_save_;
}

void RunCheckpoints::EndPhase(const absl::Status& status) {
  if (status.ok() && phase_ == Phase::kWriting) {
    phase_ = Phase::kCompleting;
    return Do([this] { return leads() ? Complete() : absl::OkStatus(); });
  }
  phase_ = Phase::kNone;
  last_save_ =
      WithContext(absl::StrCat("no checkpoint at step ", record_.step), status);
  if (!status.ok()) {
    // Its partial files take space that the weights may need.
    if (leads()) AbandonCheckpoint(folder_, record_.step).IgnoreError();
    return;
  }
  saved_step_ = record_.step;
  const double seconds = Seconds(Clock::now() - began_at_);
  console_->Line(absl::StrFormat(
      "step %d  checkpoint %s  (%.2f s, of which training waited %.2f s)",
      record_.step, saved(), seconds, beside() ? Seconds(blocked_) : seconds));
  if (!tidied_.ok()) {
    console_->Line(absl::StrCat("warning: ", tidied_.message()));
  }
}

void RunCheckpoints::Do(std::function<absl::Status()> work) {
  if (beside()) return work_.Start(std::move(work));
  work_.Run(work);
}

absl::Status RunCheckpoints::Agree(const char* name, const absl::Status& own) {
  // The highest rank that failed.
  double failed =
      own.ok() ? -1.0 : static_cast<double>(session_->rank().rank());
  ZERO_RETURN_IF_ERROR(session_->executor().numbers().AllReduce(
      name, ReduceOp::kMax, {&failed, 1}));
  if (own.ok() && failed >= 0) return CannotWrite(static_cast<int>(failed));
  // Only rank 0 has a console.
  if (!own.ok() && !leads()) {
    absl::FPrintF(stderr, "zero: rank %d: %s\n", session_->rank().rank(),
                  own.message());
  }
  return own;
}

absl::Status RunCheckpoints::CannotWrite(int rank) const {
  const std::vector<std::string>& hosts = session_->rank().hosts;
  return absl::UnavailableError(
      absl::StrCat("rank ", rank, " on ",
                   hosts.empty() ? HostName() : hosts[rank], " cannot write"));
}

// ---- On the writing thread --------------------------------------------------

absl::Status RunCheckpoints::WritePart(
    const StateAccess& states,
    const std::vector<StateAccess::KeptPiece>& pieces,
    const BytesFn& bytes) const {
  // Consecutive elements of a state's parameter are one range.
  std::vector<CheckpointRange> ranges;
  const auto continues = [&](const StateAccess::KeptRun& kept) {
    if (ranges.empty()) return false;
    const CheckpointRange& last = ranges.back();
    return last.state == kept.state &&
           last.parameter == kept.run.parameter->name &&
           last.begin + last.elems == kept.run.begin;
  };
  states.ForEachKept(pieces, [&](const StateAccess::KeptRun& kept) {
    if (!continues(kept)) {
      ranges.push_back({kept.state, kept.run.parameter->name, kept.run.begin, 0,
                        kept.dtype});
    }
    ranges.back().elems += kept.run.values.num_elems();
  });
  const int rank = session_->rank().rank();
  ZERO_ASSIGN_OR_RETURN(
      const auto writer,
      CheckpointPartWriter::Create(PartialFolder(folder_, record_.step), rank,
                                   id_, ranges));
  absl::Status status;
  size_t range = 0;
  int64_t written = 0;  // of the range
  states.ForEachKept(pieces, [&](const StateAccess::KeptRun& kept) {
    if (status.ok() && write_hook_) status = write_hook_();
    if (status.ok() && cancelled_) status = absl::CancelledError("given up");
    if (!status.ok()) return;
    const int64_t elems = kept.run.values.num_elems();
    status = writer->Write(range, written, bytes(kept).data(), elems);
    written += elems;
    if (written < ranges[range].elems) return;
    ++range;
    written = 0;
  });
  ZERO_RETURN_IF_ERROR(status);
  // Reading states from a disk may have failed.
  if (!beside()) ZERO_RETURN_IF_ERROR(session_->rank().status());
  return writer->Commit();
}

absl::Status RunCheckpoints::Complete() {
  ZERO_RETURN_IF_ERROR(run_folder_->SyncMetrics());
  ZERO_RETURN_IF_ERROR(CommitCheckpoint(
      folder_, DescribeRun(*session_, *data_, record_, run_, id_)));
  tidied_ = WriteLatest(folder_, record_.step);
  tidied_.Update(
      PruneCheckpoints(folder_, training().keep_last, training().keep_every));
  return absl::OkStatus();
}

}  // namespace zero
