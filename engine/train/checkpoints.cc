#include "engine/train/checkpoints.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/file.h"
#include "engine/base/hash.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/train/metrics.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

// ---- RunRecord as JSON ------------------------------------------------------

// Calls visit(name, field) for every field that a later run needs.
template <typename Record, typename Visit>
void ForEachField(Record& record, const Visit& visit) {
  visit("optimizer_steps", record.optimizer_steps);
  visit("consecutive_skips", record.consecutive_skips);
  visit("loss_scale", record.scaler.scale);
  visit("loss_scale_steps", record.scaler.steps);
  visit("loss_scale_last_overflow", record.scaler.last_overflow_step);
  visit("loss_scale_hysteresis_left", record.scaler.hysteresis_left);
  visit("loss", record.last.output.loss);
  visit("grad_norm", record.last.output.grad_norm);
  visit("lr", record.last.lr);
  visit("first_loss", record.first_loss);
  visit("validation_loss", record.validation_loss);
  visit("last_eval_step", record.last_eval_step);
  visit("last_sample_step", record.last_sample_step);
  visit("train_seconds", record.train_seconds);
  for (const Channel channel : kWaits) {
    visit(absl::StrCat("waited_ms_", ChannelName(channel)),
          record.waited.ms[static_cast<size_t>(channel)]);
  }
}

Json ToJson(const RunRecord& record) {
  Json json;
  ForEachField(record, [&](const std::string& name, const auto& field) {
    json[name] = field;
  });
  json["resumed_at"] = record.resumed_at;
  return json;
}

absl::StatusOr<RunRecord> ReadRecord(const CheckpointManifest& manifest) {
  RunRecord record{.step = manifest.step};
  const Json& json = manifest.progress;
  std::string wrong;
  ForEachField(record, [&](const std::string& name, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    const auto it = json.find(name);
    if (it == json.end()) {
      wrong = name;
    } else if (it->is_number()) {
      field = it->template get<Field>();
    } else if (it->is_null() && std::is_floating_point_v<Field>) {
      field = static_cast<Field>(kNotKnown);  // JSON has no NaN
    } else {
      wrong = name;
    }
  });
  for (const Json& step : json.value("resumed_at", Json::array())) {
    if (step.is_number_integer()) record.resumed_at.push_back(step);
  }
  if (wrong.empty()) return record;
  return absl::DataLossError(
      absl::StrCat("the manifest has no usable progress.", wrong));
}

// ---- What a run must have in common with the one that it continues ----------

// Keys that may change between the parts of a run. Of data.train the tokens are
// compared and not the name.
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
  for (const char* section : {"zero_optimization.", "communication.", "device.",
                              "activation_checkpointing."}) {
    if (absl::StartsWith(key, section)) return true;
  }
  return absl::StartsWith(key, "training.") && key != "training.seed";
}

// The keys that differ and may not, with both values: what chooses a kind (and
// with it other keys) first.
std::vector<std::string> ChangedKeys(const Json& was, const Json& is) {
  std::vector<std::string> kinds, others;
  for (const JsonDifference& one : Differences(was, is)) {
    if (MayDiffer(one.name)) continue;
    (absl::EndsWith(one.name, "type") ? kinds : others)
        .push_back(absl::StrCat(one.name, " was ", one.a, ", now ", one.b));
  }
  kinds.insert(kinds.end(), others.begin(), others.end());
  return kinds;
}

// Tells the training data apart from other data: its size and a sample of it.
Json DescribeData(const TokenSource& tokens) {
  constexpr int64_t kWindows = 64, kWindow = 1024;
  const int64_t n = std::min(tokens.size(), kWindow);
  std::vector<int32_t> sample(kWindows * n);
  for (int64_t i = 0; i < kWindows; ++i) {
    tokens.Read((tokens.size() - n) / (kWindows - 1) * i, n, &sample[i * n]);
  }
  return {
      {"tokens", tokens.size()},
      {"sample_xxh3_128", HashOf({reinterpret_cast<const char*>(sample.data()),
                                  sample.size() * sizeof(int32_t)})}};
}

// 52 random bits, which a double carries.
double RandomNumber() {
  std::random_device device;
  const uint64_t bits = (uint64_t{device()} << 32) ^ device();
  return static_cast<double>(bits >> 12);
}

std::string Id(double number) {
  return absl::StrFormat("%013x", static_cast<uint64_t>(number));
}

bool IsIn(const std::string& path, const std::string& folder) {
  std::error_code error;
  return std::filesystem::equivalent(FolderOf(path), folder, error);
}

constexpr char kRemedy[] =
    "; set it back, or go on all the same with training.resume_changed=true";

}  // namespace

RunCheckpoints::RunCheckpoints(Session& session, const RunData& data,
                               Console* console)
    : session_(&session),
      data_(&data),
      console_(console),
      folder_(session.config().training.out_dir + "/checkpoints") {}

// ---- Going on ---------------------------------------------------------------

absl::Status RunCheckpoints::BesideAnother() const {
  return absl::FailedPreconditionError(absl::StrCat(
      folder_,
      " has checkpoints of an earlier run; go on from them with --resume auto, "
      "or remove that folder, or choose another training.out_dir"));
}

// A run that nobody asked to write checkpoints has at most the one of a signal.
// The weights of that run are replaced; this stays.
absl::Status RunCheckpoints::MoveAway() const {
  const std::string place = FreeName(folder_ + ".previous");
  std::error_code error;
  std::filesystem::rename(folder_, place, error);
  if (error) return FileError("cannot move away", folder_, error.value());
  console_->Line(absl::StrCat(
      "note: this run begins anew, and the checkpoints of the one before are ",
      place, " now; --resume auto goes on from checkpoints"));
  return absl::OkStatus();
}

absl::StatusOr<RunCheckpoints::Choice> RunCheckpoints::Choose() const {
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
    ZERO_ASSIGN_OR_RETURN(auto reader, CheckpointReader::Open(resume));
    if (!present.empty() && !IsIn(resume, folder_)) return BesideAnother();
    return Choice{resume, std::move(reader)};
  }
  if (resume == "auto" && present.empty()) return Choice();
  ZERO_ASSIGN_OR_RETURN(FoundCheckpoint found, FindNewestCheckpoint(folder_));
  for (const std::string& note : found.notes) {
    console_->Line("warning: " + note);
  }
  return Choice{found.path, std::move(found.reader)};
}

absl::StatusOr<absl::optional<RunRecord>> RunCheckpoints::Resume() {
  while (true) {
    absl::StatusOr<absl::optional<RunRecord>> record = TryResume();
    // Damage in the values themselves shows only now, on all ranks at once.
    if (!absl::IsDataLoss(record.status()) || !finds() || chosen_.empty()) {
      return record;
    }
    if (leads()) {
      // With no other left the run does not begin anew: that is not asked for.
      if (ListCheckpoints(folder_).size() < 2) return record;
      console_->Line(absl::StrCat("warning: ", record.status().message()));
      ZERO_RETURN_IF_ERROR(Rename(chosen_, FreeName(chosen_ + ".damaged")));
    }
  }
}

absl::StatusOr<absl::optional<RunRecord>> RunCheckpoints::TryResume() {
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
    run_ = Id(RandomNumber());
    return absl::optional<RunRecord>();
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
  ZERO_RETURN_IF_ERROR(session_->executor().states().Restore(
      [&](const std::string& state, const Parameter& parameter, int64_t begin,
          int64_t count, DType dtype, void* out) -> absl::Status {
        const auto stored = reader.dtype(state, parameter.name);
        if (stored != dtype) {
          return absl::FailedPreconditionError(absl::StrCat(
              choice.path, " has ", state, " of ", parameter.name, " ",
              stored ? absl::StrCat("in ", DTypeName(*stored)) : "not at all",
              ", this run wants it in ", DTypeName(dtype),
              "; resume with the precision and the optimizer of the run"));
        }
        return reader.Read(state, parameter.name, begin, count, out);
      }));
  run_ = manifest.run;
  record->resumed_at.push_back(record->step);
  // One that was read elsewhere is no checkpoint of this run's folder.
  own_ = finds() || IsIn(choice.path, folder_);
  if (own_) saved_step_ = tried_step_ = record->step;
  if (leads()) {
    if (own_) ZERO_RETURN_IF_ERROR(SetAside(record->step));
    console_->Line(absl::StrCat("resumed from ", choice.path, ": step ",
                                record->step, ", ", manifest.samples,
                                " sequences"));
  }
  return absl::make_optional(*record);
}

absl::Status RunCheckpoints::SetAside(int64_t later_than) const {
  const std::string last = CheckpointFolder(folder_, later_than);
  for (const std::string& path : ListCheckpoints(folder_)) {
    if (std::make_pair(path.size(), path) <=
        std::make_pair(last.size(), last)) {
      continue;
    }
    ZERO_RETURN_IF_ERROR(Rename(path, FreeName(path + ".abandoned")));
  }
  return WriteLatest(folder_, later_than);
}

absl::Status RunCheckpoints::Rename(const std::string& path,
                                    const std::string& to) const {
  std::error_code error;
  std::filesystem::rename(path, to, error);
  if (error) return FileError("cannot rename", path, error.value());
  console_->Line(absl::StrCat("note: ", path, " is ", to, " now"));
  return absl::OkStatus();
}

absl::Status RunCheckpoints::CheckMatches(
    const CheckpointManifest& manifest) const {
  std::map<std::string, std::vector<int64_t>> missing = manifest.parameters;
  for (const Parameter* parameter : session_->model().AllParameters()) {
    const std::vector<int64_t> shape = parameter->shape.dims();
    const auto it = missing.find(parameter->name);
    if (it == missing.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("of another model: it has no ", parameter->name));
    }
    if (it->second != shape) {
      return absl::FailedPreconditionError(absl::StrCat(
          "of another model: ", parameter->name, " is ",
          Json(it->second).dump(), " there, ", Json(shape).dump(), " here"));
    }
    missing.erase(it);
  }
  if (!missing.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "of another model: this one has no ", missing.begin()->first));
  }
  const Config& config = session_->config();
  if (manifest.samples != manifest.step * config.train_batch_size) {
    return absl::FailedPreconditionError(
        absl::StrCat("of another run: train_batch_size was ",
                     manifest.samples / std::max<int64_t>(manifest.step, 1),
                     ", now ", config.train_batch_size, "; set it back"));
  }
  std::vector<std::string> differences =
      ChangedKeys(manifest.config, Json::parse(PrintResolvedJson(config)));
  const Json data = DescribeData(*data_->train);
  const Json was = manifest.progress.value("data", Json());
  if (was != data) {
    differences.push_back(absl::StrCat("data.train had other tokens (",
                                       was.dump(), ", now ", data.dump(), ")"));
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

// ---- Saving -----------------------------------------------------------------

bool RunCheckpoints::MinutesPassed() const {
  const double minutes = training().save_every_minutes;
  return minutes > 0 && Clock::now() - saved_at_ >=
                            std::chrono::duration<double>(60 * minutes);
}

absl::Status RunCheckpoints::Agree(const char* name, const absl::Status& own) {
  // The highest rank that failed.
  double failed =
      own.ok() ? -1.0 : static_cast<double>(session_->rank().rank());
  ZERO_RETURN_IF_ERROR(session_->executor().numbers().AllReduce(
      name, ReduceOp::kMax, {&failed, 1}));
  if (own.ok() && failed >= 0) {
    return absl::UnavailableError(
        absl::StrCat("rank ", failed, " cannot write"));
  }
  // Only rank 0 has a console.
  if (!own.ok() && !leads()) {
    absl::FPrintF(stderr, "zero: rank %d: %s\n", session_->rank().rank(),
                  own.message());
  }
  return own;
}

absl::Status RunCheckpoints::Save(const RunRecord& record) {
  if (std::exchange(tried_step_, record.step) == record.step) {
    return absl::OkStatus();
  }
  const auto begin = Clock::now();
  const absl::Status status = Write(record);
  saved_at_ = Clock::now();
  if (status.ok()) {
    saved_step_ = record.step;
    console_->Line(absl::StrFormat(
        "step %d  checkpoint %s  (%s)", record.step, saved(),
        HumanSeconds(
            std::chrono::duration<double>(saved_at_ - begin).count())));
  }
  // What is on disk of it takes room that the next one may need.
  if (!status.ok() && leads()) {
    AbandonCheckpoint(folder_, record.step).IgnoreError();
  }
  return status;
}

absl::Status RunCheckpoints::Write(const RunRecord& record) {
  // Rank 0's.
  double id = leads() ? RandomNumber() : 0;
  ZERO_RETURN_IF_ERROR(session_->executor().numbers().AllReduce(
      "checkpoint id", ReduceOp::kMax, {&id, 1}));
  const std::string save = Id(id);
  absl::Status own =
      leads() ? BeginCheckpoint(folder_, record.step) : absl::OkStatus();
  ZERO_RETURN_IF_ERROR(Agree("checkpoint begins", own));
  own = WritePart(PartialFolder(folder_, record.step), save);
  ZERO_RETURN_IF_ERROR(Agree("checkpoint is written", own));
  if (leads()) {
    own = CommitCheckpoint(folder_, Describe(record, save));
    if (own.ok()) {
      absl::Status tidy = WriteLatest(folder_, record.step);
      tidy.Update(PruneCheckpoints(folder_, training().keep_last,
                                   training().keep_every));
      if (!tidy.ok()) {
        console_->Line(absl::StrCat("warning: ", tidy.message()));
      }
    }
  }
  return Agree("checkpoint is complete", own);
}

std::string RunCheckpoints::saved() const {
  return saved_step_ < 0 ? "" : CheckpointFolder("checkpoints", saved_step_);
}

absl::Status RunCheckpoints::WritePart(const std::string& folder,
                                       const std::string& save) {
  StateAccess& states = session_->executor().states();
  // Of a state what follows in a parameter is one range.
  std::vector<CheckpointRange> ranges;
  const auto continues = [&](const StateAccess::KeptRun& kept) {
    if (ranges.empty()) return false;
    const CheckpointRange& last = ranges.back();
    return last.state == kept.state &&
           last.parameter == kept.run.parameter->name &&
           last.begin + last.elems == kept.run.begin;
  };
  states.ForEachKept([&](const StateAccess::KeptRun& kept) {
    if (!continues(kept)) {
      ranges.push_back({kept.state, kept.run.parameter->name, kept.run.begin, 0,
                        kept.dtype});
    }
    ranges.back().elems += kept.run.values.num_elems();
  });
  const int rank = session_->rank().rank();
  if (rank >= session_->rank().shards()) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(const auto writer, CheckpointPartWriter::Create(
                                               folder, rank, save, ranges));
  absl::Status status;
  size_t range = 0;
  int64_t written = 0;  // of the range
  states.ForEachKept([&](const StateAccess::KeptRun& kept) {
    if (!status.ok()) return;
    const int64_t elems = kept.run.values.num_elems();
    status = writer->Write(range, written, states.Bytes(kept).data(), elems);
    written += elems;
    if (written < ranges[range].elems) return;
    ++range;
    written = 0;
  });
  ZERO_RETURN_IF_ERROR(status);
  return writer->Commit();
}

CheckpointManifest RunCheckpoints::Describe(const RunRecord& record,
                                            const std::string& save) const {
  const Config& config = session_->config();
  CheckpointManifest manifest{.step = record.step,
                              .samples = record.step * config.train_batch_size,
                              .parts = session_->rank().shards(),
                              .run = run_,
                              .save = save,
                              .progress = ToJson(record),
                              .config = Json::parse(PrintResolvedJson(config))};
  manifest.progress["data"] = DescribeData(*data_->train);
  for (const Parameter* parameter : session_->model().AllParameters()) {
    manifest.parameters[parameter->name] = parameter->shape.dims();
  }
  return manifest;
}

}  // namespace zero
