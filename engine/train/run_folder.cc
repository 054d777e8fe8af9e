#include "engine/train/run_folder.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// A folder of weights is no run's: its config.json would be lost.
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

// Now, and not when the weights are written. An earlier final/ goes only when
// the new one is complete.
absl::Status CheckRoom(const std::string& out_dir, int64_t weight_bytes) {
  const int64_t free = FreeDiskBytes(out_dir);
  if (free < 0 || weight_bytes <= free) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the weights take ", HumanBytes(static_cast<double>(weight_bytes)),
      " and the disk of ", out_dir, " has ",
      HumanBytes(static_cast<double>(free)),
      " free; make room, choose another folder, or set "
      "training.save_final=false"));
}

}  // namespace

absl::Status RunFolder::Prepare() {
  const std::string& out_dir = training().out_dir;
  ZERO_RETURN_IF_ERROR(CheckHoldsNoModel(out_dir));
  ZERO_RETURN_IF_ERROR(MakeFolders(out_dir));
  ZERO_ASSIGN_OR_RETURN(lock_, LockFolder(out_dir));
  ZERO_RETURN_IF_ERROR(RemoveStaleFiles(
      out_dir, {"config.json", "summary.json", "final", "final.failed"}));
  if (training().save_final) {
    ZERO_RETURN_IF_ERROR(CheckRoom(
        out_dir, session_->model().NumParameters() *
                     static_cast<int64_t>(
                         DTypeBytes(session_->config().param_dtype()))));
  }
  return RemoveFile(out_dir + "/summary.json");
}

absl::StatusOr<std::unique_ptr<RunFolder>> RunFolder::Open(
    Session& session, const ModelTools& tools, int64_t end_of_text,
    Console* console) {
  std::unique_ptr<RunFolder> folder(
      new RunFolder(session, tools, end_of_text, console));
  if (session.rank().rank() > 0) return folder;
  const absl::Status prepared = folder->Prepare();
  if (!prepared.ok()) {
    return absl::Status(prepared.code(),
                        absl::StrCat("training.out_dir: ", prepared.message()));
  }
  const std::string& out_dir = folder->training().out_dir;
  const std::string metrics = out_dir + "/metrics.jsonl";
  if (PathExists(metrics)) {  // of one that was killed, too
    console->Line(absl::StrCat(
        "note: this run replaces the one in ", out_dir,
        "; to go on from the weights of a run, start with --model DIR/final "
        "and another training.out_dir"));
  }
  ZERO_RETURN_IF_ERROR(WriteFileAtomically(
      out_dir + "/config.json", PrintResolvedJson(session.config())));
  ZERO_ASSIGN_OR_RETURN(folder->metrics_, MetricsWriter::Create(metrics));
  const std::string events = absl::StrCat(out_dir, "/tensorboard/", kEventFile);
  if (folder->training().tensorboard) {
    ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(events)));
    ZERO_ASSIGN_OR_RETURN(folder->event_file_, MetricsWriter::Create(events));
  } else {
    ZERO_RETURN_IF_ERROR(RemoveFile(events));  // of an earlier run
  }
  return folder;
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
      session_->Save(training().out_dir + "/" + name, *tools_, end_of_text_));
  for (const std::string& note : notes) console_->Line("note: " + note);
  weights_ = name;
  return absl::OkStatus();
}

absl::Status RunFolder::WriteSummary(const std::string& json) const {
  return WriteFileAtomically(training().out_dir + "/summary.json", json + "\n");
}

}  // namespace zero
