#include "engine/checkpoint/portable.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/atomic_folder.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/safetensors.h"

namespace zero {
namespace {

std::vector<int64_t> Dims(const Shape& shape) {
  std::vector<int64_t> dims;
  for (int i = 0; i < shape.num_dims(); ++i) dims.push_back(shape[i]);
  return dims;
}

int64_t RowElems(const Parameter& parameter) {
  return parameter.shape.num_dims() == 1 ? 1 : parameter.shape[1];
}

// out[c, r] = in[r, c].
void Transpose(const float* in, int64_t rows, int64_t cols, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
  }
}

absl::Status Send(absl::Span<const float> values, DType dtype,
                  const TensorSink& sink) {
  if (dtype == DType::kF32) {
    return sink(values.data(), values.size() * sizeof(float));
  }
  std::vector<uint16_t> half(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    half[i] =
        dtype == DType::kBF16 ? F32ToBF16(values[i]) : F32ToF16(values[i]);
  }
  return sink(half.data(), half.size() * sizeof(uint16_t));
}

struct Range {
  int64_t begin, end;
};

// The elements of its parameter that a tensor holds.
Range ElementsOf(const PortableTensor& tensor) {
  const int64_t begin = tensor.row_begin * RowElems(*tensor.parameter);
  return {begin, begin + tensor.shape.num_elems()};
}

absl::Status WriteTensor(const PortableTensor& tensor, DType dtype,
                         const ReadParameterFn& read, const TensorSink& sink) {
  const auto [begin, end] = ElementsOf(tensor);
  if (!tensor.transpose) {
    return ReadInPieces(read, *tensor.parameter, begin, end,
                        [&](int64_t, absl::Span<const float> piece) {
                          return Send(piece, dtype, sink);
                        });
  }
  // [out, in] arrives, [in, out] is written.
  const int64_t rows = tensor.shape[1], cols = tensor.shape[0];
  std::vector<float> turned(end - begin);
  ZERO_RETURN_IF_ERROR(ReadInPieces(
      read, *tensor.parameter, begin, end,
      [&, first = begin](int64_t at, absl::Span<const float> piece) {
        int64_t row = (at - first) / cols, col = (at - first) % cols;
        for (const float value : piece) {
          turned[col * rows + row] = value;
          if (++col == cols) ++row, col = 0;
        }
        return absl::OkStatus();
      }));
  for (size_t at = 0; at < turned.size(); at += kPieceElems) {
    ZERO_RETURN_IF_ERROR(Send(
        absl::MakeConstSpan(turned).subspan(at, kPieceElems), dtype, sink));
  }
  return absl::OkStatus();
}

// Tensors that Hugging Face files may carry and that hold no parameter.
bool IsIgnorable(const std::string& name) {
  return absl::EndsWith(name, ".attn.bias") ||
         absl::EndsWith(name, ".attn.masked_bias") ||
         absl::EndsWith(name, "rotary_emb.inv_freq");
}

// The stored tensor of a portable one: some GPT-2 files lack the
// "transformer." in front, and tied heads may be stored all the same.
const StoredTensor* FindTensor(const SafetensorsReader& reader,
                               const std::string& name) {
  if (const StoredTensor* tensor = reader.Find(name)) return tensor;
  constexpr absl::string_view kPrefix = "transformer.";
  return absl::StartsWith(name, kPrefix)
             ? reader.Find(absl::string_view(name).substr(kPrefix.size()))
             : nullptr;
}

absl::Status CheckTensors(const std::string& dir,
                          const SafetensorsReader& reader,
                          const std::vector<PortableTensor>& wanted) {
  std::vector<std::string> problems;
  std::set<std::string> used;
  for (const PortableTensor& want : wanted) {
    const StoredTensor* have = FindTensor(reader, want.name);
    if (have == nullptr) {
      problems.push_back(absl::StrCat("missing ", want.name));
      continue;
    }
    used.insert(have->name);
    if (have->shape != Dims(want.shape) || !IsFloat(have->dtype)) {
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
  if (problems.empty()) return absl::OkStatus();
  const size_t shown = std::min<size_t>(problems.size(), 8);
  return absl::InvalidArgumentError(absl::StrCat(
      dir, ": the weights do not fit the model of config.json: ",
      absl::StrJoin(problems.begin(), problems.begin() + shown, "; "),
      problems.size() > shown
          ? absl::StrCat(" and ", problems.size() - shown, " more")
          : ""));
}

// Puts what is in `from` and not yet in `to` there too; the files are shared
// where the file system has hard links. What it can not take goes to `left`.
void CarryOver(const std::string& from, const std::string& to,
               std::vector<std::string>* left) {
  namespace fs = std::filesystem;
  const auto names = ListFolder(from);
  if (!names.ok()) left->push_back(std::string(names.status().message()));
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const std::string source = from + "/" + name, target = to + "/" + name;
    if (PathExists(target) || IsLeaving(name)) continue;
    std::error_code error;
    if (fs::is_directory(fs::symlink_status(source, error))) {
      fs::create_directory(target, error);
      if (!error) CarryOver(source, target, left);
    } else {
      fs::create_hard_link(source, target, error);
      if (error) {
        error.clear();
        fs::copy(source, target, fs::copy_options::copy_symlinks, error);
      }
    }
    if (error) {
      left->push_back(std::string(
          FileError("cannot copy", source, error.value()).message()));
    }
  }
}

// Where things of the earlier folder could not be carried over, it stays under
// another name instead of being removed.
absl::Status MoveAway(const std::string& dir, std::vector<std::string>* notes) {
  std::string place = dir + ".previous";
  for (int i = 2; PathExists(place); ++i) {
    place = absl::StrCat(dir, ".previous.", i);
  }
  std::error_code error;
  std::filesystem::rename(dir, place, error);
  if (error) return FileError("cannot move away", dir, error.value());
  for (std::string& note : *notes) {
    absl::StrAppend(&note, "; the earlier folder stays as ", place);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadInPieces(
    const ReadParameterFn& read, const Parameter& parameter, int64_t begin,
    int64_t end,
    const std::function<absl::Status(int64_t at, absl::Span<const float>)>&
        take) {
  std::vector<float> values(std::min(end - begin, kPieceElems));
  for (int64_t at = begin; at < end; at += kPieceElems) {
    const int64_t count = std::min(end - at, kPieceElems);
    ZERO_RETURN_IF_ERROR(read(parameter, at, count, values.data()));
    ZERO_RETURN_IF_ERROR(take(at, {values.data(), static_cast<size_t>(count)}));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> SavePortable(
    const std::string& dir, const Model& model, const std::string& config_json,
    DType dtype, const ReadParameterFn& read) {
  ZERO_ASSIGN_OR_RETURN(const auto folder, AtomicFolder::Create(dir));
  const std::string& temp_dir = folder->temp_path();
  const std::vector<PortableTensor> tensors = model.PortableTensors();
  std::vector<TensorSpec> specs;
  std::map<std::string, const PortableTensor*> by_name;
  for (const PortableTensor& tensor : tensors) {
    specs.push_back({tensor.name, dtype, Dims(tensor.shape)});
    by_name[tensor.name] = &tensor;
  }
  auto fill = [&](const TensorSpec& spec,
                  const TensorSink& sink) -> absl::Status {
    return WriteTensor(*by_name[spec.name], dtype, read, sink);
  };
  ZERO_RETURN_IF_ERROR(
      WriteSafetensors(temp_dir + "/model.safetensors", specs, fill));
  ZERO_RETURN_IF_ERROR(
      WriteFileAtomically(temp_dir + "/config.json", config_json));
  std::vector<std::string> notes;
  if (IsFolder(dir)) CarryOver(dir, temp_dir, &notes);
  if (!notes.empty()) ZERO_RETURN_IF_ERROR(MoveAway(dir, &notes));
  ZERO_RETURN_IF_ERROR(folder->Commit());
  return notes;
}

absl::Status ReadAsSavePortable(const Model& model,
                                const ReadParameterFn& read) {
  for (const PortableTensor& tensor : model.PortableTensors()) {
    const auto [begin, end] = ElementsOf(tensor);
    ZERO_RETURN_IF_ERROR(ReadInPieces(
        read, *tensor.parameter, begin, end,
        [](int64_t, absl::Span<const float>) { return absl::OkStatus(); }));
  }
  return absl::OkStatus();
}

absl::Status LoadPortable(const std::string& dir, const Model& model,
                          const LoadParametersFn& load) {
  ZERO_ASSIGN_OR_RETURN(const auto reader, SafetensorsReader::Open(dir));
  const std::vector<PortableTensor> tensors = model.PortableTensors();
  ZERO_RETURN_IF_ERROR(CheckTensors(dir, *reader, tensors));
  std::map<const Parameter*, std::vector<const PortableTensor*>> parts;
  for (const PortableTensor& tensor : tensors) {
    parts[tensor.parameter].push_back(&tensor);
  }
  load([&](const Parameter& parameter, float* out) {
    for (const PortableTensor* part : parts[&parameter]) {
      const StoredTensor& stored = *FindTensor(*reader, part->name);
      const int64_t n = part->shape.num_elems();
      float* to = out + part->row_begin * RowElems(parameter);
      if (part->transpose) {
        std::vector<float> values(n);
        ReadAsF32(stored, 0, n, values.data());
        Transpose(values.data(), part->shape[0], part->shape[1], to);
      } else {
        ReadAsF32(stored, 0, n, to);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace zero
