#include "engine/train/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <random>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/print.h"
#include "engine/train/run_manifest.h"
#include "engine/train/trained_model.h"
#include "engine/zero/rank_numbers.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// A folder of weights is not a run's: its config.json would be lost.
absl::Status CheckHoldsNoModel(const std::string& out_dir) {
  for (const char* weights :
       {"model.safetensors", "model.safetensors.index.json"}) {
    if (PathExists(absl::StrCat(out_dir, "/", weights))) {
      return absl::FailedPreconditionError(absl::StrCat(
          out_dir, " holds a model (", weights,
          "), whose config.json a run would replace; choose another folder"));
    }
  }
  return absl::OkStatus();
}

// The end of a run must not replace its own start.
absl::Status CheckKeepsItsStart(const std::string& out_dir,
                                const std::string& start) {
  std::error_code error;
  if (start.empty() ||
      !std::filesystem::equivalent(start, out_dir + "/final", error)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("training starts from ", start,
                   " (model.from_pretrained), and this run's weights would "
                   "replace it; choose another folder"));
}

// Checks now, not when the last of them is written, that the disk has room. An
// earlier final/ goes only when the new one is complete. `checkpoints`: how
// many exist together.
absl::Status CheckRoom(const std::string& out_dir, int64_t weight_bytes,
                       int64_t checkpoints, int64_t checkpoint_bytes) {
  const int64_t free = FreeDiskBytes(out_dir);
  // A double holds the product: keep_last may be any number.
  const double needed =
      static_cast<double>(weight_bytes) +
      static_cast<double>(checkpoints) * static_cast<double>(checkpoint_bytes);
  if (free < 0 || needed <= static_cast<double>(free)) return absl::OkStatus();
  std::vector<std::string> what, remedies;
  if (checkpoints > 0) {
    what.push_back(absl::StrCat(
        Counted(checkpoints, "checkpoint"), " of ",
        HumanBytes(static_cast<double>(checkpoint_bytes)),
        " that will exist together (training.keep_last, and one that is "
        "being written)"));
    remedies.push_back("lower training.keep_last");
  }
  if (weight_bytes > 0) {
    what.insert(what.begin(), "the weights");
    remedies.push_back("set training.save_final=false");
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(absl::StrJoin(what, " and "), " take ", HumanBytes(needed),
                   " and the disk of ", out_dir, " has ",
                   HumanBytes(static_cast<double>(free)),
                   " free; make room, choose another folder, or ",
                   absl::StrJoin(remedies, ", or ")));
}

// A file by which the other ranks recognize the folder, for a moment.
constexpr char kProbe[] = "probe";

using Json = nlohmann::ordered_json;

// The complete lines of metrics.jsonl, of the first `step` steps and of
// evaluations up to step `last_eval`.
absl::StatusOr<std::vector<std::string>> LinesUntil(const std::string& path,
                                                    int64_t step,
                                                    int64_t last_eval) {
  std::vector<std::string> lines;
  if (step == 0 || !PathExists(path)) return lines;
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("step") ||
        !json["step"].is_number_integer()) {
      continue;  // a kill cut it off
    }
    const int64_t until =
        json.contains("validation_loss") ? std::min(step, last_eval) : step;
    if (json["step"].get<int64_t>() <= until) lines.emplace_back(line);
  }
  return lines;
}

}  // namespace

int64_t CheckpointsAtOnce(const TrainingConfig& training) {
  if (!training.saves()) return 0;
  const bool by_steps = training.save_every > 0 &&
                        training.save_every_minutes == 0 && training.steps > 0;
  const int64_t saves = by_steps
                            ? (training.steps - 1) / training.save_every + 1
                            : std::numeric_limits<int64_t>::max();
  return std::min(saves, training.keep_last + 1);
}

std::string NoCheckpointIn(const std::string& out_dir) {
  const auto text = ReadFile(out_dir + "/config.json");
  const Json config = Json::parse(text.ok() ? *text : "", /*cb=*/nullptr,
                                  /*allow_exceptions=*/false);
  const Json training =
      config.is_object() ? config.value("training", Json()) : Json();
  const bool saves_nothing = training.is_object() &&
                             training.value("save_every", Json()) == 0 &&
                             training.value("save_every_minutes", Json()) == 0;
  return absl::StrCat("there is no checkpoint in ", out_dir,
                      saves_nothing ? " (its training.save_every is 0)" : "");
}

absl::Status RunFolder::Prepare() {
  const std::string& out_dir = training().out_dir;
  ZERO_RETURN_IF_ERROR(CheckHoldsNoModel(out_dir));
  ZERO_RETURN_IF_ERROR(MakeFolders(out_dir));
  ZERO_ASSIGN_OR_RETURN(lock_, LockFolder(out_dir));
  if (lock_ == nullptr) {
    console_->Line(absl::StrCat(
        "note: the file system of ", out_dir,
        " has no locks; make sure that no other run writes there"));
  }
  ZERO_RETURN_IF_ERROR(RemoveStaleFiles(
      out_dir,
      {"config.json", "summary.json", "final", "final.failed", kProbe}));
  if (training().save_final) {
    ZERO_RETURN_IF_ERROR(
        CheckKeepsItsStart(out_dir, session_->config().model.from_pretrained));
  }
  const int64_t weight_bytes =
      session_->model().NumParameters() *
      static_cast<int64_t>(DTypeBytes(session_->config().param_dtype()));
  const auto present = static_cast<int64_t>(
      ListCheckpoints(CheckpointsFolder(session_->config())).size());
  return CheckRoom(
      out_dir, training().save_final ? weight_bytes : 0,
      std::max<int64_t>(CheckpointsAtOnce(training()) - present, 0),
      session_->executor().states().KeptBytes());
}

absl::StatusOr<std::unique_ptr<RunFolder>> RunFolder::Open(
    Session& session, const ModelTools& tools, const Tokenizer* tokenizer,
    Console* console) {
  std::unique_ptr<RunFolder> folder(
      new RunFolder(session, tools, tokenizer, console));
  if (session.rank().rank() > 0) return folder;
  ZERO_RETURN_IF_ERROR(WithContext("training.out_dir", folder->Prepare()));
  return folder;
}

absl::Status RunFolder::CheckAllRanksSeeIt() const {
  const Rank& rank = session_->rank();
  if (rank.world() == 1) return absl::OkStatus();
  if (!training().saves() && !training().save_interrupted &&
      training().resume.empty()) {
    return absl::OkStatus();
  }
  // The name is made of rank 0's process and a random number.
  std::array<double, 2> name = {0, 0};
  const auto probe = [&] {
    return absl::StrFormat("%s/%s.zero-tmp.%.0f.%.0f", training().out_dir,
                           kProbe, name[0], name[1]);
  };
  if (rank.rank() == 0) {
    name = {static_cast<double>(::getpid()),
            static_cast<double>(std::random_device()() >> 1)};
    ZERO_RETURN_IF_ERROR(WriteFileAtomically(probe(), ""));
  }
  RankNumbers& numbers = session_->executor().numbers();
  ZERO_RETURN_IF_ERROR(
      numbers.AllReduce("run folder", ReduceOp::kMax, absl::MakeSpan(name)));
  double blind = PathExists(probe()) ? -1.0 : rank.rank();
  ZERO_RETURN_IF_ERROR(
      numbers.AllReduce("run folder is seen", ReduceOp::kMax, {&blind, 1}));
  if (rank.rank() == 0) ZERO_RETURN_IF_ERROR(RemoveFile(probe()));
  if (blind < 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "training.out_dir: rank %.0f does not see the folder %s that rank 0 has "
      "made; checkpoints need one folder for all ranks: name one on a file "
      "system that all hosts share, by an absolute path",
      blind, training().out_dir));
}

absl::Status RunFolder::Begin(int64_t step, int64_t last_eval) {
  if (session_->rank().rank() > 0) return absl::OkStatus();
  const std::string& out_dir = training().out_dir;
  const std::string metrics = out_dir + "/metrics.jsonl";
  const LastRun last = ReadLastRun(out_dir);
  const bool is_part = last.why_no_final.empty() && last.interrupted;
  has_final_of_whole_run_ =
      step == 0 && PathExists(out_dir + "/final") && !is_part;
  if (step == 0 && PathExists(metrics)) {  // even of a killed run
    console_->Line(
        absl::StrCat("note: ",
                     training().resume == "auto"
                         ? NoCheckpointIn(out_dir) + ": training starts over; "
                         : "",
                     "this run replaces the one in ", out_dir,
                     "; to start from the weights of a run, give --model "
                     "DIR/final and another training.out_dir"));
  }
  ZERO_RETURN_IF_ERROR(RemoveFile(out_dir + "/summary.json"));
  ZERO_RETURN_IF_ERROR(WriteFileAtomically(
      out_dir + "/config.json", PrintResolvedJson(session_->config())));
  ZERO_ASSIGN_OR_RETURN(const std::vector<std::string> kept,
                        LinesUntil(metrics, step, last_eval));
  ZERO_ASSIGN_OR_RETURN(metrics_, MetricsWriter::Create(metrics, kept));
  const std::string events = absl::StrCat(out_dir, "/tensorboard/", kEventFile);
  if (!training().tensorboard) return RemoveFile(events);  // of an earlier run
  ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(events)));
  ZERO_ASSIGN_OR_RETURN(event_file_, MetricsWriter::Create(events));
  for (const std::string& line : kept) {
    ZERO_RETURN_IF_ERROR(WriteEvents(Json::parse(line)));
  }
  return absl::OkStatus();
}

void RunFolder::WriteMetrics(const nlohmann::ordered_json& line) {
  if (metrics_ == nullptr || !metrics_status_.ok()) return;
  metrics_status_ = metrics_->Write(line);
  if (event_file_ != nullptr && metrics_status_.ok()) {
    metrics_status_ = WriteEvents(line);
  }
}

absl::Status RunFolder::WriteEvents(const nlohmann::ordered_json& line) {
  std::vector<std::pair<std::string, double>> scalars;
  for (const auto& [name, value] : Flatten(line)) {
    if (name != "step" && value.is_number()) {
      scalars.emplace_back(name, value.get<double>());
    }
  }
  events_.Add(1e-6 * absl::ToUnixMicros(absl::Now()),
              line["step"].get<int64_t>(), scalars);
  return event_file_->Append(events_.TakeContents());
}

absl::Status RunFolder::SaveWeights(const std::string& name) {
  if (!training().save_final) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(
      const std::vector<std::string> notes,
      session_->Save(training().out_dir + "/" + name, *tools_, tokenizer_));
  for (const std::string& note : notes) console_->Line("note: " + note);
  weights_ = name;
  if (name != "final" || session_->rank().rank() > 0) return absl::OkStatus();
  // The weights are an earlier run's, which this run replaces.
  return RemoveTree(training().out_dir + "/final.failed");
}

absl::Status RunFolder::WriteSummary(const std::string& json) const {
  return WriteFileAtomically(training().out_dir + "/summary.json", json + "\n");
}

}  // namespace zero
