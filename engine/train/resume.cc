#include "engine/train/resume.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_reads.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/run_manifest.h"
#include "engine/zero/state_access.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// ---- What a run must have in common with the one that it continues ----------

// Whether a key may change between the parts of a run. For data.train the
// tokens are compared, not the name.
bool MayDiffer(const std::string& key) {
  static const std::set<std::string> kKeys = {"train_micro_batch_size_per_gpu",
                                              "gradient_accumulation_steps",
                                              "steps_per_print",
                                              "wall_clock_breakdown",
                                              "memory_breakdown",
                                              "dump_state",
                                              "data.train",
                                              "data.validation",
                                              "data.validation_fraction",
                                              "data_types.split_master_weights",
                                              "model.from_pretrained"};
  if (kKeys.count(key) > 0) return true;
  constexpr char kDelay[] =
      "zero_optimization.offload_optimizer.delayed_update";
  if (absl::StartsWith(key, kDelay)) return false;
  for (const char* section :
       {"aio.", "zero_optimization.", "communication.", "device.",
        "activation_checkpointing.", "elasticity."}) {
    if (absl::StartsWith(key, section)) return true;
  }
  return absl::StartsWith(key, "training.") && key != "training.seed";
}

// The keys that differ but must not, with both values: keys that choose a kind
// (and with it other keys) first.
std::vector<std::string> ChangedKeys(const Json& was, const Json& is) {
  std::vector<std::string> kinds, others;
  std::string length;  // of the run, which a schedule may follow
  for (const JsonDifference& one : Differences(was, is)) {
    std::string text = absl::StrCat(one.name, " was ", one.a, ", now ", one.b);
    if (one.name == "training.steps" || one.name == "training.epochs") {
      length = text;
    }
    if (MayDiffer(one.name)) continue;
    (absl::EndsWith(one.name, "type") ? kinds : others)
        .push_back(std::move(text));
  }
  for (std::string& other : others) {
    if (!length.empty() && absl::StrContains(other, "total_num_steps")) {
      // First the key that the user has changed.
      other = absl::StrCat(length, ", and with it the learning rates: ", other);
    }
  }
  kinds.insert(kinds.end(), others.begin(), others.end());
  return kinds;
}

// The first parameter that only one of the two has, or has in another shape;
// empty: none.
std::string DifferentTensor(const CheckpointManifest& manifest,
                            const Model& model) {
  std::map<std::string, std::vector<int64_t>> missing = manifest.parameters;
  for (const Parameter* parameter : model.AllParameters()) {
    const std::vector<int64_t> shape = parameter->shape.dims();
    const auto it = missing.find(parameter->name);
    if (it == missing.end()) {
      return absl::StrCat("it has no ", parameter->name);
    }
    if (it->second != shape) {
      return absl::StrCat(parameter->name, " is ", Json(it->second).dump(),
                          " there, ", Json(shape).dump(), " here");
    }
    missing.erase(it);
  }
  return missing.empty()
             ? ""
             : absl::StrCat("this one has no ", missing.begin()->first);
}

// How the training data differ: by the keys that choose them if those have
// changed, and by their size.
std::string OtherData(const Json& was, const Json& is, const Json& config_was,
                      const Json& config_is) {
  std::string text = "data.train had other tokens";
  const Json before = was.is_object() ? was.value("tokens", Json()) : Json();
  if (before.is_number_integer() && before != is["tokens"]) {
    absl::StrAppend(&text, " (", before.get<int64_t>(), ", now ",
                    is["tokens"].get<int64_t>(), ")");
  }
  for (const JsonDifference& one : Differences(config_was, config_is)) {
    if (!absl::StartsWith(one.name, "data.")) continue;
    absl::StrAppend(&text, ": ", one.name, " was ", one.a, ", now ", one.b);
    break;
  }
  return text;
}

bool IsIn(const std::string& path, const std::string& folder) {
  std::error_code error;
  return std::filesystem::equivalent(FolderOf(path), folder, error);
}

// Orders two folders of checkpoints by step: above 10^8 the numbers have more
// digits.
bool IsOlder(const std::string& path, const std::string& than) {
  return std::make_pair(path.size(), path) < std::make_pair(than.size(), than);
}

constexpr char kRemedy[] =
    "; set it back, or resume anyway with training.resume_changed=true";
// The remedy if the two runs have different states.
constexpr char kWeightsAlone[] =
    "; set it back, or start a new run from the weights only: zero checkpoint "
    "export RUN DIR, then zero train --model DIR";

class Resumption {
 public:
  Resumption(Session& session, const RunData& data, int64_t total_steps,
             Console* console)
      : session_(&session),
        data_(&data),
        total_steps_(total_steps),
        console_(console),
        folder_(CheckpointsFolder(session.config())) {}

  absl::StatusOr<ResumedRun> Resume();

 private:
  struct Choice {
    std::string path;  // empty: start over
    std::unique_ptr<CheckpointReader> reader;
  };
  const TrainingConfig& training() const { return session_->config().training; }
  bool leads() const { return session_->rank().rank() == 0; }
  // Whether training.resume lets rank 0 choose one.
  bool finds() const {
    return training().resume == "auto" || training().resume == "latest";
  }
  absl::StatusOr<ResumedRun> TryResume();
  absl::StatusOr<Choice> Choose() const;
  // Refuses a run's folder, or its checkpoints/, and names its newest one.
  absl::Status CheckIsNoRun(const std::string& given) const;
  // Reads this rank's states one after the other.
  absl::StatusOr<StateAccess::ReadNextFn> OpenStates(
      const CheckpointReader& reader,
      const std::vector<StateAccess::KeptRange>& wanted) const;
  // For "auto": refuses a run that finished without a checkpoint of its last
  // step; training would start over.
  absl::Status CheckUnfinished(const std::vector<std::string>& present) const;
  absl::Status BesideAnother() const;
  absl::Status MoveAway() const;
  // Newer ones are renamed: this run repeats their steps.
  absl::Status SetAside(int64_t later_than) const;
  absl::Status Rename(const std::string& path, const std::string& to) const;
  absl::Status CheckMatches(const CheckpointManifest& manifest) const;

  Session* session_;
  const RunData* data_;
  const int64_t total_steps_;
  Console* console_;
  const std::string folder_;
  std::string chosen_;  // the checkpoint that is resumed
};

// The remedy for checkpoints that were set aside.
constexpr char kHowToContinue[] =
    "to continue from one of them, give --resume and its path, and another "
    "training.out_dir";

absl::Status Resumption::CheckUnfinished(
    const std::vector<std::string>& present) const {
  const std::string& out_dir = training().out_dir;
  const auto text = ReadFile(out_dir + "/summary.json");
  const Json summary = Json::parse(text.ok() ? *text : "", /*cb=*/nullptr,
                                   /*allow_exceptions=*/false);
  const bool ended = summary.is_object() && !summary.contains("error");
  const int64_t steps = ended ? summary.value("steps", int64_t{0}) : 0;
  if (!ended || steps < total_steps_) return absl::OkStatus();
  // Its own steps, not this run's: it may have been longer.
  const std::string last = CheckpointFolder(folder_, steps);
  if (!present.empty() && !IsOlder(present.back(), last)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the run in ", out_dir, " is finished (summary.json: ",
      Counted(steps, "step"), ") and has no checkpoint of its end; ",
      present.empty()
          ? "choose another training.out_dir, or leave out --resume, to "
            "repeat it"
          : absl::StrCat("raise training.steps to continue from ",
                         present.back(),
                         ", give --resume latest to repeat what follows it"),
      ", or start another run from its weights: --model ", out_dir,
      "/final and another training.out_dir"));
}

absl::Status Resumption::BesideAnother() const {
  return absl::FailedPreconditionError(absl::StrCat(
      folder_,
      " has checkpoints of an earlier run; resume from them with --resume "
      "auto, remove that folder, or choose another training.out_dir"));
}

// A run without requested checkpoints has at most a signal's.
// The weights of that run are replaced; this stays.
absl::Status Resumption::MoveAway() const {
  const std::string place = FreeName(folder_ + ".previous");
  std::error_code error;
  std::filesystem::rename(folder_, place, error);
  if (error) return FileError("cannot move away", folder_, error.value());
  console_->Line(
      absl::StrCat("note: this run starts over, and the checkpoints of the run "
                   "before it are ",
                   place, " now: ", kHowToContinue));
  return absl::OkStatus();
}

absl::Status Resumption::CheckIsNoRun(const std::string& given) const {
  for (const std::string& folder : {given, given + "/checkpoints"}) {
    const auto found = FindNewestCheckpoint(folder);
    if (absl::IsNotFound(found.status())) continue;
    ZERO_RETURN_IF_ERROR(found.status());
    return absl::InvalidArgumentError(absl::StrCat(
        "'", given,
        "' is a run's folder, not a checkpoint; pass its newest one, ",
        std::filesystem::path(found->path).lexically_normal().string(),
        IsIn(found->path, folder_) ? ", or auto" : ""));
  }
  return absl::OkStatus();
}

absl::StatusOr<Resumption::Choice> Resumption::Choose() const {
  ZERO_RETURN_IF_ERROR(RemoveUnfinishedCheckpoints(folder_));
  const std::vector<std::string> present = ListCheckpoints(folder_);
  const std::string& resume = training().resume;
  if (resume.empty()) {
    if (present.empty()) return Choice();
    if (training().saves()) return BesideAnother();
    ZERO_RETURN_IF_ERROR(MoveAway());
    return Choice();
  }
  if (!finds()) {
    if (!PathExists(resume)) {
      return absl::NotFoundError(
          absl::StrCat("'", resume,
                       "' does not exist; want auto, latest or a checkpoint "
                       "such as ",
                       folder_, "/step-00001000"));
    }
    ZERO_RETURN_IF_ERROR(CheckIsNoRun(resume));
    ZERO_ASSIGN_OR_RETURN(auto reader, CheckpointReader::Open(resume));
    if (!IsIn(resume, folder_)) {
      if (!present.empty()) return BesideAnother();
    } else if (!absl::EndsWith("/" + reader->folder(),
                               CheckpointFolder("", reader->manifest().step))) {
      // Resumed in place, it would mix with the steps of the run that continued
      // without it.
      return absl::FailedPreconditionError(absl::StrCat(
          resume,
          " was set aside; resume from it in another training.out_dir"));
    }
    return Choice{resume, std::move(reader)};
  }
  if (resume == "auto") ZERO_RETURN_IF_ERROR(CheckUnfinished(present));
  if (resume == "auto" && present.empty()) {
    const std::string aside = folder_ + ".previous";
    if (PathExists(aside)) {
      console_->Line(absl::StrCat(
          "note: ", folder_, " has no checkpoints, and this run starts over; ",
          aside, " has those of an earlier run: ", kHowToContinue));
    }
    return Choice();
  }
  ZERO_ASSIGN_OR_RETURN(FoundCheckpoint found, FindNewestCheckpoint(folder_));
  for (const std::string& note : found.notes) {
    console_->Line("warning: " + note);
  }
  return Choice{found.path, std::move(found.reader)};
}

absl::StatusOr<ResumedRun> Resumption::Resume() {
  while (true) {
    absl::StatusOr<ResumedRun> resumed = TryResume();
    // Damage in the values themselves shows only now, on all ranks at once. A
    // run that failed did so for a reason of its own, such as the disk of
    // nvme_path.
    if (!absl::IsDataLoss(resumed.status()) ||
        !session_->rank().status().ok() || !finds() || chosen_.empty()) {
      return resumed;
    }
    if (leads()) {
      // If none is left the run does not start over: that was not requested.
      if (ListCheckpoints(folder_).size() < 2) return resumed;
      console_->Line(absl::StrCat("warning: ", resumed.status().message()));
      ZERO_RETURN_IF_ERROR(Rename(chosen_, FreeName(chosen_ + ".damaged")));
    }
  }
}

absl::StatusOr<ResumedRun> Resumption::TryResume() {
  constexpr double kAnew = -1, kFollows = -2;
  chosen_.clear();
  const std::string& resume = training().resume;
  Choice choice;
  double step = kFollows;
  if (leads()) {
    absl::StatusOr<Choice> chosen = Choose();
    if (!chosen.ok()) {
      return WithContext(
          resume.empty() ? "training.out_dir" : "training.resume",
          chosen.status());
    }
    choice = *std::move(chosen);
    step = choice.reader == nullptr
               ? kAnew
               : static_cast<double>(choice.reader->manifest().step);
  }
  if (!resume.empty()) {
    ZERO_RETURN_IF_ERROR(session_->executor().numbers().AllReduce(
        "resume", ReduceOp::kMax, {&step, 1}));
  }
  if (resume.empty() || step == kAnew) {
    return ResumedRun{.run = Id(RandomNumber())};
  }
  if (!leads()) {
    choice.path = finds()
                      ? CheckpointFolder(folder_, static_cast<int64_t>(step))
                      : resume;
    absl::StatusOr<std::unique_ptr<CheckpointReader>> reader =
        CheckpointReader::Open(choice.path);
    if (!reader.ok()) {
      return WithContext(
          absl::StrCat("training.resume: rank ", session_->rank().rank(),
                       " (all ranks must see the folder that rank 0 sees)"),
          reader.status());
    }
    choice.reader = *std::move(reader);
  }
  chosen_ = choice.path;
  const CheckpointReader& reader = *choice.reader;
  const CheckpointManifest& manifest = reader.manifest();
  ZERO_RETURN_IF_ERROR(WithContext(
      absl::StrCat("training.resume: ", choice.path), CheckMatches(manifest)));
  absl::StatusOr<RunRecord> record = ReadRecord(manifest);
  if (!record.ok()) return WithContext(choice.path, record.status());
  if (record->step > total_steps_) {
    return absl::FailedPreconditionError(
        absl::StrCat("training.resume: the checkpoint is of step ",
                     record->step, ", the run is of ",
                     Counted(total_steps_, "step"), "; raise training.steps"));
  }
  ZERO_RETURN_IF_ERROR(session_->executor().states().Restore(
      [&](const auto& ranges) { return OpenStates(reader, ranges); },
      absl::c_linear_search(reader.states(), ModelStates::kStale)));
  record->resumed_at.push_back(record->step);
  const bool in_place = finds() || IsIn(choice.path, folder_);
  if (leads()) {
    if (in_place) ZERO_RETURN_IF_ERROR(SetAside(record->step));
    console_->Line(absl::StrCat("resumed from ", choice.path, ": step ",
                                record->step, ", ",
                                Counted(manifest.samples, "sequence")));
    if (record->step == total_steps_) {
      console_->Line(absl::StrCat(
          "note: the run is already finished, at step ", total_steps_,
          ": nothing is trained; to continue it, raise training.steps"));
    }
  }
  return ResumedRun{
      .record = *record, .run = manifest.run, .in_place = in_place};
}

absl::StatusOr<StateAccess::ReadNextFn> Resumption::OpenStates(
    const CheckpointReader& reader,
    const std::vector<StateAccess::KeptRange>& wanted) const {
  std::vector<CheckpointRange> ranges;
  for (const StateAccess::KeptRange& want : wanted) {
    const std::string& name = want.parameter->name;
    const auto stored = reader.dtype(want.state, name);
    if (stored != want.dtype) {
      return absl::FailedPreconditionError(absl::StrCat(
          reader.folder(), " has ", want.state, " of ", name, " ",
          stored ? absl::StrCat("in ", DTypeName(*stored)) : "not at all",
          ", this run needs it in ", DTypeName(want.dtype),
          "; resume with the precision, the optimizer and the model.freeze of "
          "the run, or start a new one from its weights only: zero checkpoint "
          "export RUN DIR, then zero train --model DIR"));
    }
    ranges.push_back({want.state, name, want.begin, want.elems, want.dtype});
  }
  ZERO_ASSIGN_OR_RETURN(std::shared_ptr<CheckpointReads> reads,
                        CheckpointReads::Open(reader, ranges));
  return [this, reads](void* out) {
    const absl::Status read = reads->Next(out);
    // Rank 0, which has the console, learns only that there is damage.
    if (absl::IsDataLoss(read) && !leads()) {
      absl::FPrintF(stderr, "zero: rank %d: %s\n", session_->rank().rank(),
                    read.message());
    }
    return read;
  };
}

absl::Status Resumption::SetAside(int64_t later_than) const {
  const std::string last = CheckpointFolder(folder_, later_than);
  for (const std::string& path : ListCheckpoints(folder_)) {
    if (path == last || IsOlder(path, last)) continue;
    const absl::Status opened = CheckpointReader::Open(path).status();
    const bool damaged = IsDamage(opened);
    if (damaged && !finds()) {  // Choose has warned of those that it found
      console_->Line(
          absl::StrCat("warning: ", path, " is damaged: ", opened.message()));
    }
    ZERO_RETURN_IF_ERROR(
        Rename(path, FreeName(path + (damaged ? ".damaged" : ".abandoned"))));
  }
  return WriteLatest(folder_, later_than);
}

absl::Status Resumption::Rename(const std::string& path,
                                const std::string& to) const {
  std::error_code error;
  std::filesystem::rename(path, to, error);
  if (error) return FileError("cannot rename", path, error.value());
  console_->Line(absl::StrCat("note: ", path, " is ", to, " now"));
  return absl::OkStatus();
}

absl::Status Resumption::CheckMatches(
    const CheckpointManifest& manifest) const {
  const Config& config = session_->config();
  const Json now = Json::parse(PrintResolvedJson(config));
  std::vector<std::string> differences = ChangedKeys(manifest.config, now);
  const std::string tensors = DifferentTensor(manifest, session_->model());
  if (!tensors.empty()) {
    // A changed key says more than a tensor.
    for (const std::string& difference : differences) {
      if (absl::StartsWith(difference, "model.")) {
        return absl::FailedPreconditionError(
            absl::StrCat("of another model: ", difference, "; set it back"));
      }
    }
    return absl::FailedPreconditionError("of another model: " + tensors);
  }
  if (manifest.samples != manifest.step * config.train_batch_size) {
    return absl::FailedPreconditionError(
        absl::StrCat("of another run: train_batch_size was ",
                     manifest.samples / std::max<int64_t>(manifest.step, 1),
                     ", now ", config.train_batch_size, "; set it back"));
  }
  const Json data = DescribeData(*data_->train);
  const Json was = manifest.progress.value("data", Json());
  if (was != data) {
    differences.push_back(OtherData(was, data, manifest.config, now));
  }
  for (const std::string& difference : differences) {
    if (absl::StartsWith(difference, "optimizer.type")) {
      return absl::FailedPreconditionError(
          absl::StrCat("of another run: ", difference, kWeightsAlone));
    }
  }
  if (training().resume_changed) {
    for (const std::string& difference : differences) {
      console_->Line(absl::StrCat("note: resumed although ", difference));
    }
    return absl::OkStatus();
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("of another run: ", differences.front(), kRemedy));
}

}  // namespace

absl::StatusOr<ResumedRun> ResumeRun(Session& session, const RunData& data,
                                     int64_t total_steps, Console* console) {
  return Resumption(session, data, total_steps, console).Resume();
}

}  // namespace zero
