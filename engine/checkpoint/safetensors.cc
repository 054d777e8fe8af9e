#include "engine/checkpoint/safetensors.h"

#include <string.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

using Json = nlohmann::json;

// The reference implementation's limit.
constexpr uint64_t kMaxHeaderBytes = 100000000;
constexpr int64_t kPrefixBytes = 8;
constexpr char kMetadataKey[] = "__metadata__";
constexpr char kIndexSuffix[] = ".safetensors.index.json";

struct DTypeRow {
  const char* name;
  DType dtype;
};

// The first row of a type is used for writing.
constexpr DTypeRow kDTypes[] = {
    {"F32", DType::kF32}, {"BF16", DType::kBF16}, {"F16", DType::kF16},
    {"F64", DType::kF64}, {"I32", DType::kI32},   {"I64", DType::kI64},
    {"U8", DType::kU8},   {"U16", DType::kU16},   {"BOOL", DType::kU8},
};

const char* StoredName(DType dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "?";
}

bool FindDType(absl::string_view name, DType* dtype) {
  for (const DTypeRow& row : kDTypes) {
    if (name != row.name) continue;
    *dtype = row.dtype;
    return true;
  }
  return false;
}

std::string DTypeNames() {
  return absl::StrJoin(kDTypes, ", ", [](std::string* out, const DTypeRow& r) {
    out->append(r.name);
  });
}

// Product of `shape`; false when a dim is negative or it does not fit.
bool NumElements(const std::vector<int64_t>& shape, int64_t* product) {
  *product = 1;
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(*product, dim, product)) return false;
  }
  return true;
}

template <typename... Parts>
absl::Status Wrong(absl::string_view file, const Parts&... what) {
  return absl::InvalidArgumentError(absl::StrCat("'", file, "': ", what...));
}

template <typename... Parts>
absl::Status WrongTensor(absl::string_view file, absl::string_view tensor,
                         const Parts&... what) {
  return Wrong(file, "tensor '", tensor, "': ", what...);
}

// Parses JSON; a key that an object has twice is an error.
absl::Status ParseJson(absl::string_view file, absl::string_view text,
                       Json* json) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && duplicate.empty()) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) duplicate = key;
    }
    return true;
  };
  *json = Json::parse(text.begin(), text.end(), watch,
                      /*allow_exceptions=*/false);
  if (json->is_discarded()) return Wrong(file, "the header is not valid JSON");
  if (!duplicate.empty()) {
    return Wrong(file, "the name '", duplicate, "' appears twice");
  }
  if (!json->is_object()) {
    return Wrong(file, "the header is not a JSON object");
  }
  return absl::OkStatus();
}

// Reads a JSON number that is an integer >= 0 and fits int64.
bool ReadCount(const Json& json, int64_t* value) {
  if (!json.is_number_unsigned()) return false;
  const uint64_t wide = json.get<uint64_t>();
  *value = static_cast<int64_t>(wide);
  return *value >= 0;
}

// Reads one entry of the header and checks it against itself and the data's
// size; *begin is its offset in the data.
absl::Status ReadEntry(const std::string& name, const Json& entry,
                       int64_t data_bytes, StoredTensor* tensor,
                       int64_t* begin) {
  const std::string& file = tensor->file;
  tensor->name = name;
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") ||
      !entry.contains("shape") || !entry.contains("data_offsets")) {
    return WrongTensor(file, name,
                       "its entry must have dtype, shape and data_offsets");
  }
  const Json& dtype = entry["dtype"];
  if (!dtype.is_string() ||
      !FindDType(dtype.get_ref<const std::string&>(), &tensor->dtype)) {
    return WrongTensor(file, name, "dtype ",
                       dtype.is_string() ? dtype.get_ref<const std::string&>()
                                         : "(not a string)",
                       " is not one of ", DTypeNames());
  }
  const Json& shape = entry["shape"];
  if (!shape.is_array()) return WrongTensor(file, name, "shape is not a list");
  for (const Json& json : shape) {
    int64_t dim = 0;
    if (!ReadCount(json, &dim)) {
      return WrongTensor(file, name,
                         "shape has a value that is not an integer >= 0");
    }
    tensor->shape.push_back(dim);
  }
  int64_t end = 0;
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 ||
      !ReadCount(offsets[0], begin) || !ReadCount(offsets[1], &end) ||
      *begin > end) {
    return WrongTensor(file, name,
                       "data_offsets is not a pair begin <= end of counts");
  }
  const int64_t item = static_cast<int64_t>(DTypeBytes(tensor->dtype));
  if (!NumElements(tensor->shape, &tensor->num_elements) ||
      __builtin_mul_overflow(tensor->num_elements, item, &tensor->num_bytes)) {
    return WrongTensor(file, name, "shape ", tensor->ShapeString(),
                       " has more elements than fit in memory");
  }
  if (end - *begin != tensor->num_bytes) {
    return WrongTensor(file, name, "data_offsets span ", end - *begin,
                       " bytes, but ", StoredName(tensor->dtype), " ",
                       tensor->ShapeString(), " has ", tensor->num_bytes);
  }
  if (end > data_bytes) {
    return absl::DataLossError(
        absl::StrCat("'", file, "': tensor '", name, "': its data ends at ",
                     end, ", but the file has only ", data_bytes,
                     " bytes of data: truncated; copy or download it again"));
  }
  return absl::OkStatus();
}

// Checks that every byte of the data belongs to exactly one tensor.
absl::Status CheckCover(const std::string& file, const uint8_t* data,
                        int64_t data_bytes, std::vector<StoredTensor> tensors) {
  // Empty tensors first, so that they do not hide behind others.
  std::sort(tensors.begin(), tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return std::pair(a.data, a.num_bytes) <
                     std::pair(b.data, b.num_bytes);
            });
  const uint8_t* covered = data;
  std::string previous = "the header";
  for (const StoredTensor& tensor : tensors) {
    if (tensor.data != covered) {
      return WrongTensor(file, tensor.name, "its data ",
                         tensor.data < covered ? "overlaps" : "leaves a gap to",
                         " that of ", previous);
    }
    covered += tensor.num_bytes;
    previous = absl::StrCat("'", tensor.name, "'");
  }
  if (covered != data + data_bytes) {
    return Wrong(file, data + data_bytes - covered,
                 " bytes after the last tensor belong to "
                 "no tensor");
  }
  return absl::OkStatus();
}

// The bytes of each tensor.
absl::StatusOr<std::vector<int64_t>> BytesOf(
    const std::string& path, const std::vector<TensorSpec>& specs) {
  std::vector<int64_t> bytes;
  std::set<std::string> names;
  int64_t total = 0;
  for (const TensorSpec& spec : specs) {
    if (spec.name.empty() || spec.name == kMetadataKey) {
      return WrongTensor(path, spec.name, "this name is reserved");
    }
    if (!names.insert(spec.name).second) {
      return WrongTensor(path, spec.name, "declared twice");
    }
    int64_t n = 0;
    const int64_t item = static_cast<int64_t>(DTypeBytes(spec.dtype));
    if (!NumElements(spec.shape, &n) || __builtin_mul_overflow(n, item, &n) ||
        __builtin_add_overflow(total, n, &total)) {
      return WrongTensor(path, spec.name, "shape [",
                         absl::StrJoin(spec.shape, ", "),
                         "] is negative or too large");
    }
    bytes.push_back(n);
  }
  return bytes;
}

}  // namespace

std::string StoredTensor::ShapeString() const {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(
    const std::string& path) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader);
  std::string file = path;
  if (IsFolder(path)) {
    file = absl::StrCat(path, "/model.safetensors");
    const std::string index = absl::StrCat(path, "/model", kIndexSuffix);
    if (!PathExists(file) && PathExists(index)) file = index;
    if (!PathExists(file)) {
      return absl::NotFoundError(absl::StrCat(
          "the folder '", path, "' has neither model.safetensors nor model",
          kIndexSuffix, "; expected a model saved in the safetensors format"));
    }
  }
  ZERO_RETURN_IF_ERROR(absl::EndsWith(file, ".json") ? reader->AddIndex(file)
                                                     : reader->AddFile(file));
  // Names are unique: a header is checked for it, and an index gives each name
  // one file.
  std::sort(reader->tensors_.begin(), reader->tensors_.end(),
            [](const StoredTensor& a, const StoredTensor& b) {
              return a.name < b.name;
            });
  return reader;
}

bool HoldsModel(const std::string& dir) {
  return PathExists(dir + "/model.safetensors") ||
         PathExists(absl::StrCat(dir, "/model", kIndexSuffix));
}

absl::Status SafetensorsReader::AddFile(const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  if (file.size() < kPrefixBytes) {
    return absl::DataLossError(
        absl::StrCat("'", path, "': ", file.size(),
                     " bytes are too few for a safetensors "
                     "file; copy or download it again"));
  }
  uint64_t header_bytes;
  memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  const int64_t after_prefix = file.size() - kPrefixBytes;
  if (header_bytes > kMaxHeaderBytes ||
      static_cast<int64_t>(header_bytes) > after_prefix) {
    return absl::DataLossError(
        absl::StrCat("'", path, "': its first 8 bytes say that the header has ",
                     header_bytes, " bytes, but ", after_prefix,
                     " follow: truncated, or not a safetensors file"));
  }
  Json header;
  ZERO_RETURN_IF_ERROR(
      ParseJson(path,
                absl::string_view(
                    reinterpret_cast<const char*>(file.data()) + kPrefixBytes,
                    header_bytes),
                &header));

  const uint8_t* data = file.data() + kPrefixBytes + header_bytes;
  const int64_t data_bytes = after_prefix - static_cast<int64_t>(header_bytes);
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadataKey) {
      if (!entry.is_object()) return Wrong(path, "__metadata__ is no object");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) {
          return Wrong(path, "__metadata__.", key, " is not a string");
        }
      }
      continue;
    }
    StoredTensor tensor;
    tensor.file = path;
    int64_t begin = 0;
    ZERO_RETURN_IF_ERROR(ReadEntry(name, entry, data_bytes, &tensor, &begin));
    tensor.data = data + begin;
    tensor.offset = tensor.data - file.data();
    tensors.push_back(std::move(tensor));
  }
  ZERO_RETURN_IF_ERROR(CheckCover(path, data, data_bytes, tensors));
  files_.push_back(std::move(file));
  tensors_.insert(tensors_.end(), std::make_move_iterator(tensors.begin()),
                  std::make_move_iterator(tensors.end()));
  return absl::OkStatus();
}

absl::Status SafetensorsReader::AddIndex(const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  Json index;
  ZERO_RETURN_IF_ERROR(ParseJson(path, text, &index));
  if (!index.contains("weight_map") || !index["weight_map"].is_object()) {
    return Wrong(path, "it has no object 'weight_map' {tensor: file}");
  }
  std::set<std::string> files;
  std::map<std::string, std::string> promised;  // tensor -> file
  for (const auto& [name, value] : index["weight_map"].items()) {
    if (!value.is_string()) {
      return WrongTensor(path, name, "its file in weight_map is not a string");
    }
    const std::string& file = value.get_ref<const std::string&>();
    if (file.empty() || absl::StrContains(file, '/')) {
      return WrongTensor(path, name, "'", file,
                         "' in weight_map is not the "
                         "name of a file in the same folder");
    }
    files.insert(file);
    promised[name] = absl::StrCat(FolderOf(path), "/", file);
  }
  for (const std::string& file : files) {
    ZERO_RETURN_IF_ERROR(AddFile(absl::StrCat(FolderOf(path), "/", file)));
  }
  for (const StoredTensor& tensor : tensors_) {
    const auto at = promised.find(tensor.name);
    if (at == promised.end() || at->second != tensor.file) {
      return WrongTensor(tensor.file, tensor.name, "'", path,
                         "' does not list it there");
    }
    promised.erase(at);
  }
  if (!promised.empty()) {
    return WrongTensor(path, promised.begin()->first, "it is not in '",
                       promised.begin()->second, "'");
  }
  return absl::OkStatus();
}

const StoredTensor* SafetensorsReader::Find(absl::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const StoredTensor& t, absl::string_view n) { return t.name < n; });
  return at == tensors_.end() || at->name != name ? nullptr : &*at;
}

void ReadAsF32(const StoredTensor& tensor, int64_t begin, int64_t n,
               float* out) {
  ZERO_CHECK_GE(begin, 0);
  ZERO_CHECK_GE(n, 0);
  ZERO_CHECK_LE(begin + n, tensor.num_elements);
  const uint8_t* data =
      tensor.data + begin * static_cast<int64_t>(DTypeBytes(tensor.dtype));
  switch (tensor.dtype) {
    case DType::kF32:
      if (n > 0) memcpy(out, data, static_cast<size_t>(n) * sizeof(float));
      return;
    case DType::kF64:
      for (int64_t i = 0; i < n; ++i) {
        double value;
        memcpy(&value, data + 8 * i, sizeof(value));
        out[i] = static_cast<float>(value);
      }
      return;
    case DType::kBF16:
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) {
        uint16_t bits;
        memcpy(&bits, data + 2 * i, sizeof(bits));
        out[i] =
            tensor.dtype == DType::kBF16 ? BF16ToF32(bits) : F16ToF32(bits);
      }
      return;
    default:
      ZERO_CHECK(IsFloat(tensor.dtype))
          << "tensor '" << tensor.name << "' is " << tensor.dtype;
  }
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, std::vector<TensorSpec> specs,
    const std::map<std::string, std::string>& metadata) {
  ZERO_ASSIGN_OR_RETURN(const std::vector<int64_t> bytes, BytesOf(path, specs));
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter);
  writer->specs_ = std::move(specs);
  std::vector<size_t> order(writer->specs_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto item = [&](size_t tensor) {
    return DTypeBytes(writer->specs_[tensor].dtype);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return item(a) > item(b); });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  writer->places_.resize(order.size());
  int64_t end = 0;
  for (const size_t tensor : order) {
    const TensorSpec& spec = writer->specs_[tensor];
    const int64_t begin = std::exchange(end, end + bytes[tensor]);
    writer->places_[tensor] = {begin, bytes[tensor]};
    header[spec.name] = {{"dtype", StoredName(spec.dtype)},
                         {"shape", spec.shape},
                         {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  const uint64_t header_bytes =
      RoundUp(static_cast<int64_t>(text.size()), kPrefixBytes);
  text.resize(header_bytes, ' ');
  ZERO_ASSIGN_OR_RETURN(writer->file_, DirectWriter::Create(path));
  ZERO_RETURN_IF_ERROR(
      writer->file_->WriteAt(0, &header_bytes, sizeof(header_bytes)));
  const auto text_bytes = static_cast<int64_t>(header_bytes);
  ZERO_RETURN_IF_ERROR(
      writer->file_->WriteAt(kPrefixBytes, text.data(), text_bytes));
  for (Place& place : writer->places_)
    place.offset += kPrefixBytes + text_bytes;
  return writer;
}

absl::Status SafetensorsWriter::Write(size_t tensor, int64_t offset,
                                      const void* data, int64_t bytes) {
  Place& place = places_[tensor];
  if (offset < 0 || offset + bytes > place.bytes) {
    return WrongTensor(file_->path(), specs_[tensor].name, "given bytes ",
                       offset, " to ", offset + bytes, ", but its shape has ",
                       place.bytes);
  }
  place.num_given += bytes;
  return file_->WriteAt(place.offset + offset, data, bytes);
}

absl::Status SafetensorsWriter::Commit() {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (places_[i].num_given == places_[i].bytes) continue;
    return WrongTensor(file_->path(), specs_[i].name, "given ",
                       places_[i].num_given, " bytes, but its shape has ",
                       places_[i].bytes);
  }
  return file_->Commit();
}

}  // namespace zero
