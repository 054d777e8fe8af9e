#include "engine/checkpoint/portable.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/rounding.h"
#include "kernels/sizes.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// Calls `visit` for elements of [begin, begin + count) of a parameter that are
// contiguous in one of `tensors`: from `at` on in the tensor, and from, from +
// stride, ... in the range.
struct StoredRun {
  size_t tensor;
  int64_t at, elems;
  int64_t from, stride;
};
template <typename Visit>
void ForEachStored(const std::vector<PortableTensor>& tensors,
                   const Parameter& parameter, int64_t begin, int64_t count,
                   const Visit& visit) {
  const int64_t row_elems =
      parameter.shape.num_dims() == 1 ? 1 : parameter.shape[1];
  for (size_t t = 0; t < tensors.size(); ++t) {
    const PortableTensor& tensor = tensors[t];
    if (tensor.parameter != &parameter) continue;
    const int64_t first = tensor.row_begin * row_elems;
    const int64_t elems = tensor.shape.num_elems();
    const int64_t from = std::max(begin - first, int64_t{0});
    const int64_t to = std::min(begin + count - first, elems);
    if (from >= to) continue;
    // A transposed tensor has our columns as its rows.
    const int64_t cols = tensor.transpose ? tensor.shape[0] : 1;
    const int64_t rows = elems / cols;
    for (int64_t col = 0; col < cols; ++col) {
      // The rows whose element in this column is in [from, to).
      const int64_t row = CeilDiv(from - col, cols);
      const int64_t end = CeilDiv(to - col, cols);
      if (row >= end) continue;
      visit(StoredRun{t, col * rows + row, end - row,
                      first + row * cols + col - begin, cols});
    }
  }
}

// Tensors that Hugging Face files may carry and that hold no parameter.
bool IsIgnorable(const std::string& name) {
  return absl::EndsWith(name, ".attn.bias") ||
         absl::EndsWith(name, ".attn.masked_bias") ||
         absl::EndsWith(name, "rotary_emb.inv_freq");
}

// The stored tensor of a portable one: some GPT-2 files lack the prefix
// "transformer.", and tied heads may be stored anyway.
const StoredTensor* FindTensor(const SafetensorsReader& reader,
                               const std::string& name) {
  if (const StoredTensor* tensor = reader.Find(name)) return tensor;
  constexpr absl::string_view kPrefix = "transformer.";
  return absl::StartsWith(name, kPrefix)
             ? reader.Find(absl::string_view(name).substr(kPrefix.size()))
             : nullptr;
}

// The stored tensors of `wanted`.
absl::StatusOr<std::vector<const StoredTensor*>> FindTensors(
    const std::string& dir, const SafetensorsReader& reader,
    const std::vector<PortableTensor>& wanted) {
  std::vector<const StoredTensor*> found;
  std::vector<std::string> problems;
  std::set<std::string> used;
  for (const PortableTensor& want : wanted) {
    const StoredTensor* have = FindTensor(reader, want.name);
    if (have == nullptr) {
      problems.push_back(absl::StrCat("missing ", want.name));
      continue;
    }
    used.insert(have->name);
    found.push_back(have);
    if (have->shape != want.shape.dims() || !IsFloat(have->dtype)) {
      problems.push_back(absl::StrCat(want.name, " is ", DTypeName(have->dtype),
                                      have->ShapeString(), ", want a float ",
                                      want.shape.ToString()));
    }
  }
  for (const StoredTensor& tensor : reader.tensors()) {
    if (used.count(tensor.name) || IsIgnorable(tensor.name)) continue;
    if (tensor.name == "lm_head.weight") continue;  // a stored tied head
    problems.push_back(absl::StrCat("unexpected ", tensor.name));
  }
  if (problems.empty()) return found;
  const size_t shown = std::min<size_t>(problems.size(), 8);
  return absl::InvalidArgumentError(absl::StrCat(
      dir, ": the weights do not fit the model of config.json: ",
      absl::StrJoin(problems.begin(), problems.begin() + shown, "; "),
      problems.size() > shown
          ? absl::StrCat(" and ", problems.size() - shown, " more")
          : ""));
}

constexpr char kOneFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

// The weights files of a folder, which a new one replaces.
bool IsWeights(absl::string_view name) {
  return name == kOneFile || name == kIndexFile ||
         (absl::StartsWith(name, "model-") &&
          absl::EndsWith(name, ".safetensors"));
}

void CarryOver(const std::string& from, const std::string& to, bool is_model,
               std::vector<std::string>* left);

// Copies one file, link or folder for CarryOver, durably.
absl::Status CarryOne(const std::string& source, const std::string& target,
                      std::vector<std::string>* left) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(fs::symlink_status(source, error))) {
    ZERO_RETURN_IF_ERROR(MakeFolders(target));
    CarryOver(source, target, /*is_model=*/false, left);
    return SyncFolder(target);
  }
  fs::create_hard_link(source, target, error);
  if (!error) return absl::OkStatus();
  error.clear();
  fs::copy(source, target, fs::copy_options::copy_symlinks, error);
  if (error) return FileError("cannot copy", source, error.value());
  return fs::is_regular_file(fs::symlink_status(target, error))
             ? SyncFile(target)
             : absl::OkStatus();
}

// Copies files of `from` that `to` lacks, as hard links if the file system has
// them, except a model's weights. What it cannot copy goes to `left`.
void CarryOver(const std::string& from, const std::string& to, bool is_model,
               std::vector<std::string>* left) {
  const auto names = ListFolder(from);
  if (!names.ok()) left->push_back(std::string(names.status().message()));
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string source = from + "/" + name, target = to + "/" + name;
    if (PathExists(target) || IsStaleFile(name)) continue;
    if (is_model && IsWeights(name)) continue;
    const absl::Status status = CarryOne(source, target, left);
    if (!status.ok()) left->push_back(std::string(status.message()));
  }
}

// If files of the earlier folder could not be carried over, it is renamed
// instead of removed.
}  // namespace

absl::StatusOr<std::unique_ptr<PortableWriter>> PortableWriter::Create(
    const std::string& dir, const Model& model, DType dtype,
    int64_t max_shard_bytes) {
  std::unique_ptr<PortableWriter> writer(
      new PortableWriter(dir, model.PortableTensors(), dtype));
  ZERO_ASSIGN_OR_RETURN(writer->folder_, AtomicFolder::Create(dir));
  writer->PlanFiles(model, max_shard_bytes);
  return writer;
}

int64_t PortableWriter::TensorBytes(size_t tensor) const {
  return tensors_[tensor].shape.num_elems() *
         static_cast<int64_t>(DTypeBytes(dtype_));
}

void PortableWriter::PlanFiles(const Model& model, int64_t max_shard_bytes) {
  std::map<const Parameter*, size_t> first;  // file
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const PortableTensor& tensor = tensors_[i];
    const int64_t bytes = TensorBytes(i);
    if (files_.empty() ||
        files_.back()->missing_bytes + bytes > max_shard_bytes) {
      files_.push_back(std::make_unique<File>());
    }
    File& file = *files_.back();
    file.missing_bytes += bytes;
    places_.push_back({files_.size() - 1, file.specs.size()});
    file.specs.push_back({tensor.name, dtype_, tensor.shape.dims()});
    first.try_emplace(tensor.parameter, files_.size() - 1);
  }
  for (size_t i = 0; i < files_.size(); ++i) {
    files_[i]->name = files_.size() == 1
                          ? kOneFile
                          : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                            i + 1, files_.size());
  }
  groups_.resize(files_.size());
  for (const Parameter* parameter : model.AllParameters()) {
    groups_[first.at(parameter)].push_back(parameter);
  }
}

void PortableWriter::WriteBytes(size_t tensor, int64_t offset, const char* data,
                                int64_t bytes) {
  const Place& place = places_[tensor];
  File& file = *files_[place.file];
  absl::Status status;
  {
    const std::lock_guard<std::mutex> lock(file.mutex);
    if (file.status.ok()) {
      file.status = WriteTo(file, place.number, offset, data, bytes);
    }
    status = file.status;
  }
  if (status.ok()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  status_.Update(status);
}

absl::Status PortableWriter::WriteTo(File& file, size_t tensor, int64_t offset,
                                     const char* data, int64_t bytes) {
  if (file.writer == nullptr) {
    ZERO_ASSIGN_OR_RETURN(
        file.writer,
        SafetensorsWriter::Create(
            absl::StrCat(folder_->temp_path(), "/", file.name), file.specs));
  }
  ZERO_RETURN_IF_ERROR(file.writer->Write(tensor, offset, data, bytes));
  file.missing_bytes -= bytes;
  if (file.missing_bytes > 0) return absl::OkStatus();
  ZERO_RETURN_IF_ERROR(file.writer->Commit());
  file.writer.reset();
  return absl::OkStatus();
}

void PortableWriter::WriteTurned(size_t tensor, int64_t elems,
                                 const std::function<void(char* bytes)>& fill) {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t all = tensors_[tensor].shape.num_elems();
  Turned& turned = turned_.try_emplace(tensor, Turned{{}, all}).first->second;
  turned.bytes.resize(TensorBytes(tensor));
  lock.unlock();  // others fill other elements
  fill(turned.bytes.data());
  lock.lock();
  turned.missing -= elems;
  if (turned.missing > 0) return;
  const std::vector<char> bytes = std::move(turned.bytes);
  turned_.erase(tensor);
  lock.unlock();
  WriteBytes(tensor, 0, bytes.data(), TensorBytes(tensor));
}

void PortableWriter::Write(const Parameter& parameter, int64_t begin,
                           absl::Span<const float> values) {
  const int64_t item = static_cast<int64_t>(DTypeBytes(dtype_));
  std::vector<char> bytes;
  const auto round = [&](const StoredRun& run, char* to) {
    for (int64_t i = 0; i < run.elems; ++i, to += item) {
      const float value = values[run.from + i * run.stride];
      if (dtype_ == DType::kF32) {
        std::memcpy(to, &value, item);
      } else {
        const uint16_t half =
            dtype_ == DType::kBF16 ? SplitMaster(value).param : F32ToF16(value);
        std::memcpy(to, &half, item);
      }
    }
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;
  }
  ForEachStored(tensors_, parameter, begin, static_cast<int64_t>(values.size()),
                [&](const StoredRun& run) {
                  if (tensors_[run.tensor].transpose) {
                    return WriteTurned(run.tensor, run.elems, [&](char* all) {
                      round(run, all + run.at * item);
                    });
                  }
                  bytes.resize(run.elems * item);
                  round(run, bytes.data());
                  WriteBytes(run.tensor, run.at * item, bytes.data(),
                             run.elems * item);
                });
}

absl::Status PortableWriter::WriteIndex() {
  if (files_.size() == 1) return absl::OkStatus();
  nlohmann::ordered_json index = {{"metadata", {{"total_size", 0}}},
                                  {"weight_map", nlohmann::json::object()}};
  int64_t total = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    total += TensorBytes(i);
    index["weight_map"][tensors_[i].name] = files_[places_[i].file]->name;
  }
  index["metadata"]["total_size"] = total;
  return WriteFileAtomically(
      absl::StrCat(folder_->temp_path(), "/", kIndexFile),
      index.dump(2) + "\n");
}

absl::StatusOr<std::vector<std::string>> PortableWriter::Commit(
    const std::map<std::string, std::string>& files) {
  ZERO_RETURN_IF_ERROR(status_);
  ZERO_CHECK(turned_.empty()) << "a parameter is incomplete";
  for (const auto& file : files_) {
    ZERO_CHECK(file->missing_bytes == 0) << file->name << " is not complete";
  }
  ZERO_RETURN_IF_ERROR(WriteIndex());
  const std::string& temp_dir = folder_->temp_path();
  for (const auto& [name, contents] : files) {
    ZERO_RETURN_IF_ERROR(
        WriteFileAtomically(absl::StrCat(temp_dir, "/", name), contents));
  }
  std::vector<std::string> notes;
  if (IsFolder(dir_)) CarryOver(dir_, temp_dir, /*is_model=*/true, &notes);
  std::string kept;
  if (!notes.empty()) kept = FreeName(dir_ + ".previous");
  for (std::string& note : notes) {
    absl::StrAppend(&note, "; the earlier folder remains as ", kept);
  }
  ZERO_RETURN_IF_ERROR(folder_->Commit(kept));
  return notes;
}

absl::StatusOr<ReadParameterFn> OpenPortable(const std::string& dir,
                                             const Model& model) {
  ZERO_ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsReader> file,
                        SafetensorsReader::Open(dir));
  const std::vector<PortableTensor> tensors = model.PortableTensors();
  ZERO_ASSIGN_OR_RETURN(const std::vector<const StoredTensor*> stored,
                        FindTensors(dir, *file, tensors));
  return [file, tensors, stored](const Parameter& parameter, int64_t begin,
                                 int64_t count, float* out) {
    std::vector<float> values;
    ForEachStored(tensors, parameter, begin, count, [&](const StoredRun& run) {
      values.resize(run.elems);
      ReadAsF32(*stored[run.tensor], run.at, run.elems, values.data());
      for (int64_t i = 0; i < run.elems; ++i) {
        out[run.from + i * run.stride] = values[i];
      }
    });
  };
}

}  // namespace zero
