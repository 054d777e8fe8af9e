#include "engine/checkpoint/checkpoint_json.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kHashKey[] = "\"xxh3_128\": \"";
constexpr size_t kHashKeyBytes = sizeof(kHashKey) - 1;
constexpr size_t kHashDigits = 32;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                             DType::kF64, DType::kI32,  DType::kI64,
                             DType::kU8,  DType::kU16};

std::string WithZeros(std::string text, size_t at) {
  return text.replace(at, kHashDigits, kHashDigits, '0');
}

// The text of {kind, hash, version} and `members`.
std::string Sealed(const char* kind, const Json& members) {
  Json json = {{"zero_checkpoint", kind},
               {"xxh3_128", std::string(kHashDigits, '0')},
               {"version", kCheckpointVersion}};
  json.update(members);
  std::string text =
      json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
  // The first such key: only `zero_checkpoint` precedes it.
  const size_t at = text.find(kHashKey) + kHashKeyBytes;
  return text.replace(at, kHashDigits, HashOf(text));
}

// Members of the object `json`, with errors that name `file`.
class Members {
 public:
  Members(const std::string& file, const Json& json)
      : file_(file), json_(json) {}

  absl::Status Count(const char* key, int64_t* value) const {
    const auto it = json_.find(key);
    return it != json_.end() && ReadCount(*it, value)
               ? absl::OkStatus()
               : Damaged(file_, key, " is missing or not an integer >= 0");
  }
  absl::Status Text(const char* key, std::string* value) const {
    const auto it = json_.find(key);
    if (it == json_.end() || !it->is_string()) {
      return Damaged(file_, key, " is not a string");
    }
    *value = it->get<std::string>();
    return absl::OkStatus();
  }
  // The list at `key`, or null.
  const Json* List(const char* key) const {
    const auto it = json_.find(key);
    return it != json_.end() && it->is_array() ? &*it : nullptr;
  }
  const Json* Object(const char* key) const {
    const auto it = json_.find(key);
    return it != json_.end() && it->is_object() ? &*it : nullptr;
  }

  // Reads a JSON number that is an integer >= 0 and fits int64.
  static bool ReadCount(const Json& json, int64_t* value) {
    if (!json.is_number_unsigned()) return false;
    *value = static_cast<int64_t>(json.get<uint64_t>());
    return *value >= 0;
  }

 private:
  const std::string& file_;
  const Json& json_;
};

// The object of a sealed text whose hash is right.
absl::StatusOr<Json> ParseSealed(const std::string& file, const char* kind,
                                 absl::string_view text) {
  const size_t key = text.find(kHashKey);
  const size_t at = key + kHashKeyBytes;
  if (key == text.npos || at + kHashDigits > text.size()) {
    return Damaged(file,
                   "it has no checksum xxh3_128: it is damaged, or not part of "
                   "a checkpoint");
  }
  const std::string hash = HashOf(WithZeros(std::string(text), at));
  if (hash != text.substr(at, kHashDigits)) {
    return Damaged(file, "its checksum is ", hash, ", not ",
                   absl::CHexEscape(text.substr(at, kHashDigits)),
                   ": some of its bytes have changed");
  }
  Json json = Json::parse(text.begin(), text.end(), nullptr,
                          /*allow_exceptions=*/false);
  if (!json.is_object()) return Damaged(file, "not a JSON object");
  const Members members(file, json);
  std::string found;
  int64_t version = 0;
  ZERO_RETURN_IF_ERROR(members.Text("zero_checkpoint", &found));
  ZERO_RETURN_IF_ERROR(members.Count("version", &version));
  if (version > kCheckpointVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", file, "': it has checkpoint format ", version,
                     ", and this program reads formats up to ",
                     kCheckpointVersion, "; use the newer zero that wrote it"));
  }
  if (found != kind) {
    return Damaged(file, "it is a '", absl::CHexEscape(found), "', expected '",
                   kind, "'");
  }
  return json;
}

absl::Status ReadShapes(const std::string& file, const Json& parameters,
                        CheckpointManifest* manifest) {
  for (const auto& [name, shape] : parameters.items()) {
    std::vector<int64_t>& dims = manifest->parameters[name];
    if (!shape.is_array() || !dims.empty()) {
      return Damaged(file, "parameters has '", absl::CHexEscape(name),
                     "' twice or without a shape");
    }
    for (const Json& json : shape) {
      int64_t dim = 0;
      if (!Members::ReadCount(json, &dim)) {
        return Damaged(file, "the shape of '", absl::CHexEscape(name),
                       "' has a value that is not an integer >= 0");
      }
      dims.push_back(dim);
    }
    if (!ElementsOf(dims)) {
      return Damaged(file, "the shape of '", absl::CHexEscape(name),
                     "' has more elements than fit in memory");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadRange(const std::string& file, const Json& json,
                       CheckpointPart* part) {
  if (!json.is_object()) return Damaged(file, "a range is not an object");
  const Members members(file, json);
  CheckpointRange range;
  ZERO_RETURN_IF_ERROR(members.Text("state", &range.state));
  ZERO_RETURN_IF_ERROR(members.Text("parameter", &range.parameter));
  ZERO_RETURN_IF_ERROR(members.Count("begin", &range.begin));
  ZERO_RETURN_IF_ERROR(members.Count("elems", &range.elems));
  std::string dtype;
  ZERO_RETURN_IF_ERROR(members.Text("dtype", &dtype));
  bool known = false;
  for (const DType one : kDTypes) {
    if (dtype != DTypeName(one)) continue;
    range.dtype = one;
    known = true;
  }
  if (!known) {
    return Damaged(file, "dtype '", absl::CHexEscape(dtype), "' is unknown");
  }
  int64_t end = 0, bytes = 0;
  const Json* hashes = members.List("xxh3_128");
  if (range.elems == 0 ||
      __builtin_add_overflow(range.begin, range.elems, &end) ||
      __builtin_mul_overflow(end, int64_t{8}, &bytes) || hashes == nullptr ||
      static_cast<int64_t>(hashes->size()) != NumBlocksOf(range)) {
    return Damaged(file, "a range of '", absl::CHexEscape(range.parameter),
                   "' is empty, too large or lacks checksums");
  }
  part->hashes.emplace_back();
  for (const Json& hash : *hashes) {
    if (!hash.is_string()) return Damaged(file, "a checksum is not a string");
    part->hashes.back().push_back(hash.get<std::string>());
  }
  part->ranges.push_back(std::move(range));
  return absl::OkStatus();
}

}  // namespace

std::string PartName(int64_t part) {
  return absl::StrFormat("states-%05d", part);
}

absl::optional<int64_t> ElementsOf(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(product, dim, &product)) return {};
  }
  return product;
}

int64_t NumBlocksOf(const CheckpointRange& range) {
  return (BytesOf(range) - 1) / kCheckpointBlockBytes + 1;
}

std::string ManifestText(const CheckpointManifest& manifest) {
  return Sealed("manifest", {{"step", manifest.step},
                             {"samples", manifest.samples},
                             {"parts", manifest.parts},
                             {"date", manifest.date},
                             {"run", manifest.run},
                             {"save", manifest.save},
                             {"progress", manifest.progress},
                             {"parameters", manifest.parameters},
                             {"config", manifest.config}});
}

std::string IndexText(const CheckpointIndex& index) {
  Json ranges = Json::array();
  for (size_t i = 0; i < index.data.ranges.size(); ++i) {
    const CheckpointRange& range = index.data.ranges[i];
    ranges.push_back({{"state", range.state},
                      {"parameter", range.parameter},
                      {"begin", range.begin},
                      {"elems", range.elems},
                      {"dtype", DTypeName(range.dtype)},
                      {"xxh3_128", index.data.hashes[i]}});
  }
  return Sealed("states", {{"save", index.save},
                           {"part", index.part},
                           {"file", index.data.file},
                           {"file_bytes", index.data.file_bytes},
                           {"header_bytes", index.header_bytes},
                           {"header_xxh3_128", index.header_hash},
                           {"ranges", std::move(ranges)}});
}

absl::StatusOr<CheckpointManifest> ParseManifest(const std::string& file,
                                                 absl::string_view text) {
  ZERO_ASSIGN_OR_RETURN(Json json, ParseSealed(file, "manifest", text));
  const Members members(file, json);
  CheckpointManifest manifest;
  ZERO_RETURN_IF_ERROR(members.Count("step", &manifest.step));
  ZERO_RETURN_IF_ERROR(members.Count("samples", &manifest.samples));
  ZERO_RETURN_IF_ERROR(members.Count("parts", &manifest.parts));
  ZERO_RETURN_IF_ERROR(members.Text("date", &manifest.date));
  ZERO_RETURN_IF_ERROR(members.Text("run", &manifest.run));
  ZERO_RETURN_IF_ERROR(members.Text("save", &manifest.save));
  const Json* parameters = members.Object("parameters");
  if (parameters == nullptr || parameters->empty()) {
    return Damaged(file, "it lists no parameters");
  }
  ZERO_RETURN_IF_ERROR(ReadShapes(file, *parameters, &manifest));
  for (const auto& [key, to] : {std::pair("progress", &manifest.progress),
                                std::pair("config", &manifest.config)}) {
    if (members.Object(key) == nullptr) {
      return Damaged(file, "it has no object ", key);
    }
    *to = std::move(json[key]);
  }
  return manifest;
}

absl::StatusOr<CheckpointIndex> ParseIndex(const std::string& file,
                                           absl::string_view text) {
  ZERO_ASSIGN_OR_RETURN(const Json json, ParseSealed(file, "states", text));
  const Members members(file, json);
  CheckpointIndex index;
  ZERO_RETURN_IF_ERROR(members.Text("save", &index.save));
  ZERO_RETURN_IF_ERROR(members.Count("part", &index.part));
  ZERO_RETURN_IF_ERROR(members.Text("file", &index.data.file));
  ZERO_RETURN_IF_ERROR(members.Count("file_bytes", &index.data.file_bytes));
  ZERO_RETURN_IF_ERROR(members.Count("header_bytes", &index.header_bytes));
  ZERO_RETURN_IF_ERROR(members.Text("header_xxh3_128", &index.header_hash));
  const Json* ranges = members.List("ranges");
  if (ranges == nullptr) return Damaged(file, "it has no list of ranges");
  for (const Json& range : *ranges) {
    ZERO_RETURN_IF_ERROR(ReadRange(file, range, &index.data));
  }
  return index;
}

}  // namespace zero
