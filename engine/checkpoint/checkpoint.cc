#include "engine/checkpoint/checkpoint.h"

#include <stdio.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint_json.h"
#include "kernels/check.h"

namespace zero {
namespace {

constexpr char kPartial[] = ".partial";
constexpr char kLatest[] = "latest";

// The step of a complete checkpoint's folder; nothing for any other name.
absl::optional<int64_t> StepOf(absl::string_view name) {
  int64_t step = 0;
  if (!absl::ConsumePrefix(&name, "step-") || !absl::SimpleAtoi(name, &step) ||
      step < 0 || absl::StrFormat("%08d", step) != name) {
    return {};
  }
  return step;
}

absl::string_view NameOf(absl::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

// Length and hash of the bytes before the data of a safetensors file.
absl::Status ReadHeader(const std::string& path, CheckpointIndex* index) {
  ZERO_ASSIGN_OR_RETURN(const auto file, ReadableFile::Open(path));
  uint64_t json_bytes = 0;
  ZERO_RETURN_IF_ERROR(file->ReadAt(0, &json_bytes, sizeof(json_bytes)));
  std::string header(sizeof(json_bytes) + json_bytes, '\0');
  index->header_bytes = static_cast<int64_t>(header.size());
  index->data.file_bytes = file->size();
  ZERO_RETURN_IF_ERROR(
      file->ReadAt(0, header.data(), static_cast<int64_t>(header.size())));
  index->header_hash = HashOf(header);
  return absl::OkStatus();
}

}  // namespace

std::string CheckpointTensorName(const CheckpointRange& range) {
  return absl::StrCat(range.state, "/", range.parameter, "[", range.begin, ":",
                      range.begin + range.elems, "]");
}

absl::StatusOr<std::unique_ptr<CheckpointPartWriter>>
CheckpointPartWriter::Create(const std::string& folder, int64_t part,
                             const std::string& save,
                             std::vector<CheckpointRange> ranges) {
  std::vector<TensorSpec> specs;
  for (const CheckpointRange& range : ranges) {
    const std::string name = CheckpointTensorName(range);
    if (range.begin < 0 || range.elems <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", name, "' has no elements"));
    }
    specs.push_back({name, range.dtype, {range.elems}});
  }
  std::unique_ptr<CheckpointPartWriter> writer(new CheckpointPartWriter);
  ZERO_ASSIGN_OR_RETURN(
      writer->data_,
      SafetensorsWriter::Create(
          absl::StrCat(folder, "/", PartName(part), ".safetensors"),
          std::move(specs), {{"save", save}}));
  writer->folder_ = folder;
  writer->save_ = save;
  writer->part_ = part;
  writer->progress_.resize(ranges.size());
  writer->ranges_ = std::move(ranges);
  return writer;
}

absl::Status CheckpointPartWriter::Write(size_t range, int64_t first,
                                         const void* data, int64_t elems) {
  ZERO_CHECK_LT(range, ranges_.size());
  Progress& progress = progress_[range];
  const int64_t item = static_cast<int64_t>(DTypeBytes(ranges_[range].dtype));
  if (first * item != progress.bytes || elems < 0 ||
      elems > ranges_[range].elems - first) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", CheckpointTensorName(ranges_[range]), "': given elements ", first,
        " to ", first + elems, " after ", progress.bytes / item));
  }
  absl::string_view bytes(static_cast<const char*>(data), elems * item);
  ZERO_RETURN_IF_ERROR(data_->Write(range, progress.bytes, bytes.data(),
                                    static_cast<int64_t>(bytes.size())));
  if (progress.hash == nullptr) {
    progress.hash = std::make_unique<RunningHash>();
  }
  while (!bytes.empty()) {
    const int64_t missing =
        kCheckpointBlockBytes - progress.bytes % kCheckpointBlockBytes;
    const absl::string_view piece = bytes.substr(0, missing);
    progress.hash->Add(piece);
    progress.bytes += static_cast<int64_t>(piece.size());
    bytes.remove_prefix(piece.size());
    const bool is_last = progress.bytes == BytesOf(ranges_[range]);
    if (static_cast<int64_t>(piece.size()) == missing || is_last) {
      progress.hashes.push_back(progress.hash->Take());
    }
    if (is_last) progress.hash.reset();
  }
  return absl::OkStatus();
}

absl::Status CheckpointPartWriter::Commit() {
  ZERO_RETURN_IF_ERROR(data_->Commit());
  CheckpointIndex index;
  index.part = part_;
  index.save = save_;
  index.data.file = PartName(part_) + ".safetensors";
  const std::string path = absl::StrCat(folder_, "/", PartName(part_));
  ZERO_RETURN_IF_ERROR(ReadHeader(path + ".safetensors", &index));
  for (Progress& progress : progress_) {
    index.data.hashes.push_back(std::move(progress.hashes));
  }
  index.data.ranges = std::move(ranges_);
  return WriteFileAtomically(path + ".json", IndexText(index));
}

std::string CheckpointFolder(const std::string& checkpoints, int64_t step) {
  return absl::StrCat(checkpoints, "/", absl::StrFormat("step-%08d", step));
}

std::string PartialFolder(const std::string& checkpoints, int64_t step) {
  return CheckpointFolder(checkpoints, step) + kPartial;
}

absl::Status BeginCheckpoint(const std::string& checkpoints, int64_t step) {
  ZERO_RETURN_IF_ERROR(AbandonCheckpoint(checkpoints, step));
  return MakeFolders(PartialFolder(checkpoints, step));
}

absl::Status AbandonCheckpoint(const std::string& checkpoints, int64_t step) {
  return RemoveTree(PartialFolder(checkpoints, step));
}

absl::Status CommitCheckpoint(const std::string& checkpoints,
                              const CheckpointManifest& manifest,
                              const std::function<void()>& step_hook) {
  const std::string path = CheckpointFolder(checkpoints, manifest.step);
  const std::string partial = PartialFolder(checkpoints, manifest.step);
  const auto folder = AtomicFolder::Adopt(path, partial);
  folder->set_step_hook(step_hook);
  CheckpointManifest dated = manifest;
  dated.date =
      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone());
  ZERO_RETURN_IF_ERROR(WriteFileAtomically(
      absl::StrCat(partial, "/", kManifestFile), ManifestText(dated)));
  if (step_hook) step_hook();
  ZERO_RETURN_IF_ERROR(CheckpointReader::Open(partial).status());
  // The first save has also made `checkpoints`.
  ZERO_RETURN_IF_ERROR(SyncFolder(FolderOf(checkpoints)));
  return folder->Commit();
}

absl::Status WriteLatest(const std::string& checkpoints, int64_t step) {
  return WriteFileAtomically(
      absl::StrCat(checkpoints, "/", kLatest),
      absl::StrCat(NameOf(CheckpointFolder("", step)), "\n"));
}

std::vector<std::string> ListCheckpoints(const std::string& checkpoints) {
  std::map<int64_t, std::string> by_step;
  const auto names = ListFolder(checkpoints);
  if (!names.ok()) return {};
  for (const std::string& name : *names) {
    const absl::optional<int64_t> step = StepOf(name);
    if (step) by_step[*step] = absl::StrCat(checkpoints, "/", name);
  }
  std::vector<std::string> paths;
  for (const auto& [step, path] : by_step) paths.push_back(path);
  return paths;
}

bool IsDamage(const absl::Status& opened) {
  return absl::IsNotFound(opened) || absl::IsDataLoss(opened) ||
         absl::IsInvalidArgument(opened);
}

absl::StatusOr<FoundCheckpoint> FindNewestCheckpoint(
    const std::string& checkpoints) {
  FoundCheckpoint found;
  std::vector<std::string> paths = ListCheckpoints(checkpoints);
  std::reverse(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    auto reader = CheckpointReader::Open(path);
    if (reader.ok()) {
      found.path = path;
      found.reader = *std::move(reader);
      return found;
    }
    if (!IsDamage(reader.status())) return reader.status();
    found.notes.push_back(
        absl::StrCat(NameOf(path), " is damaged: ", reader.status().message()));
  }
  if (!found.notes.empty()) {
    return absl::DataLossError(
        absl::StrCat("no checkpoint in '", checkpoints,
                     "' can be read: ", absl::StrJoin(found.notes, "; ")));
  }
  return absl::NotFoundError(
      absl::StrCat("there is no checkpoint in '", checkpoints, "'"));
}

absl::Status RemoveUnfinishedCheckpoints(const std::string& checkpoints) {
  if (!PathExists(checkpoints)) return absl::OkStatus();
  ZERO_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                        ListFolder(checkpoints));
  std::vector<std::string> ours = {kLatest};
  for (const std::string& name : names) {
    // "step-N.zero-old.PID.N" is of "step-N".
    const std::string step = name.substr(0, name.find('.'));
    if (!StepOf(step)) continue;
    ours.push_back(step);
    if (name == step + kPartial) {
      ZERO_RETURN_IF_ERROR(RemoveTree(absl::StrCat(checkpoints, "/", name)));
    }
  }
  return RemoveStaleFiles(checkpoints, ours, /*others_too=*/true);
}

absl::Status PruneCheckpoints(const std::string& checkpoints, int64_t keep_last,
                              int64_t keep_every) {
  if (keep_last == 0) return absl::OkStatus();
  std::vector<std::string> paths = ListCheckpoints(checkpoints);
  int64_t num_kept = 0;
  for (; !paths.empty() && num_kept < keep_last; paths.pop_back()) {
    if (CheckpointReader::Open(paths.back()).ok()) ++num_kept;
  }
  for (const std::string& path : paths) {
    if (keep_every > 0 && *StepOf(NameOf(path)) % keep_every == 0) continue;
    const std::string aside = NameBeside(path, "tmp");
    if (::rename(path.c_str(), aside.c_str()) != 0) {
      return FileError("cannot remove", path, errno);
    }
    ZERO_RETURN_IF_ERROR(RemoveTree(aside));
  }
  return absl::OkStatus();
}

}  // namespace zero
