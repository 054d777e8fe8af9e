#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_json.h"

namespace zero {
namespace {

constexpr size_t kCachedBlocks = 4;
constexpr size_t kOpenFiles = 16;

template <typename... Parts>
absl::Status Unfit(absl::string_view file, const Parts&... what) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", file, "': ", what..., "; use another checkpoint"));
}

// Checks that the header is the index's and has its ranges; sets their offsets.
absl::Status CheckData(const CheckpointIndex& index, CheckpointPart* part) {
  const std::string& path = part->file;
  if (!PathExists(path)) {
    return absl::NotFoundError(
        absl::StrCat("'", path,
                     "' is missing; use another checkpoint, or copy "
                     "this one again with all of its files"));
  }
  ZERO_ASSIGN_OR_RETURN(const auto file, ReadableFile::Open(path));
  if (file->size() != part->file_bytes) {
    return Damaged(path, "it has ", file->size(), " bytes, expected ",
                   part->file_bytes);
  }
  if (index.header_bytes > file->size()) {
    return Damaged(path, "its header is longer than the file");
  }
  std::string header(index.header_bytes, '\0');
  ZERO_RETURN_IF_ERROR(file->ReadAt(0, header.data(), index.header_bytes));
  if (HashOf(header) != index.header_hash) {
    return Damaged(path, "its header has changed since it was written");
  }
  ZERO_ASSIGN_OR_RETURN(const auto tensors, SafetensorsReader::Open(path));
  if (tensors->tensors().size() != part->ranges.size()) {
    return Unfit(path, "its index lists other tensors");
  }
  for (const CheckpointRange& range : part->ranges) {
    const std::string name = CheckpointTensorName(range);
    const StoredTensor* tensor = tensors->Find(name);
    if (tensor == nullptr || tensor->dtype != range.dtype ||
        tensor->num_elements != range.elems) {
      return Unfit(path, "its index has a tensor '", name,
                   "' that the file lacks or has in another size");
    }
    part->offsets.push_back(tensor->offset);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    const std::string& folder) {
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader);
  reader->folder_ = folder;
  while (reader->folder_.size() > 1 && reader->folder_.back() == '/') {
    reader->folder_.pop_back();
  }
  ZERO_RETURN_IF_ERROR(reader->ReadManifest());
  for (int64_t part = 0; part < reader->manifest_.parts; ++part) {
    ZERO_RETURN_IF_ERROR(reader->ReadPart(part));
  }
  ZERO_RETURN_IF_ERROR(reader->AddPieces());
  return reader;
}

absl::Status CheckpointReader::ReadManifest() {
  const std::string path = absl::StrCat(folder_, "/", kManifestFile);
  if (!PathExists(path)) {
    return absl::NotFoundError(absl::StrCat(
        "'", folder_, "' is not a checkpoint: it has no ", kManifestFile,
        "; expected a folder such as checkpoints/step-00001000"));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ZERO_ASSIGN_OR_RETURN(manifest_, ParseManifest(path, text));
  // A renamed folder would be taken for a newer or older one.
  absl::string_view name(folder_);
  name = name.substr(name.rfind('/') + 1);
  name = name.substr(0, name.find('.'));
  int64_t step = 0;
  if (absl::ConsumePrefix(&name, "step-") && absl::SimpleAtoi(name, &step) &&
      step != manifest_.step) {
    return Unfit(path, "it is from step ", manifest_.step,
                 ", not the one in the folder's name; rename the folder back");
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::ReadPart(int64_t number) {
  const std::string name = PartName(number);
  const std::string path = absl::StrCat(folder_, "/", name, ".json");
  if (!PathExists(path)) {
    return absl::NotFoundError(absl::StrCat(
        "part ", number + 1, " of ", manifest_.parts, " is missing: '", path,
        "'; use another checkpoint, or copy this one again with all of "
        "its files"));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ZERO_ASSIGN_OR_RETURN(CheckpointIndex index, ParseIndex(path, text));
  if (index.save != manifest_.save || index.part != number ||
      index.data.file != name + ".safetensors") {
    return Unfit(path, "it is part ", index.part, " of the save ", index.save,
                 ", expected part ", number, " of ", manifest_.save,
                 ": files of two checkpoints are mixed");
  }
  index.data.file = absl::StrCat(folder_, "/", name, ".safetensors");
  CheckpointPart part = std::move(index.data);
  ZERO_RETURN_IF_ERROR(CheckData(index, &part));
  parts_.push_back(std::move(part));
  return absl::OkStatus();
}

absl::Status CheckpointReader::AddPieces() {
  for (size_t p = 0; p < parts_.size(); ++p) {
    const CheckpointPart& part = parts_[p];
    for (size_t r = 0; r < part.ranges.size(); ++r) {
      const CheckpointRange& range = part.ranges[r];
      const auto shape = manifest_.parameters.find(range.parameter);
      if (shape == manifest_.parameters.end()) {
        return Unfit(part.file, "the manifest has no parameter '",
                     range.parameter, "'");
      }
      const auto [it, is_new] =
          states_.try_emplace({range.state, range.parameter});
      State& state = it->second;
      if (is_new) state.dtype = range.dtype;
      if (state.dtype != range.dtype) {
        return Unfit(part.file, "'", CheckpointTensorName(range), "' is ",
                     DTypeName(range.dtype), ", other elements are ",
                     DTypeName(state.dtype));
      }
      state.pieces.push_back({range.begin, range.elems, p, r});
    }
  }
  for (auto& [key, state] : states_) {
    std::sort(state.pieces.begin(), state.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    const int64_t all = *ElementsOf(manifest_.parameters[key.second]);
    const auto unfit = [&](int64_t element, const char* how) {
      return Unfit(folder_, "element ", element, " of ", key.first, " of '",
                   key.second, "' (", all, " elements) is ", how);
    };
    int64_t covered = 0;
    for (const Piece& piece : state.pieces) {
      if (piece.begin < covered) return unfit(piece.begin, "in two parts");
      if (piece.begin > covered) return unfit(covered, "in no part");
      covered += piece.elems;
    }
    if (covered < all) return unfit(covered, "in no part");
    if (covered > all) return unfit(all, "there all the same");
  }
  for (const auto& [name, shape] : manifest_.parameters) {
    if (!Has("weight", name)) {
      return Unfit(folder_, "no part has the weight of '", name, "'");
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> CheckpointReader::states() const {
  std::set<std::string> names;
  for (const auto& [key, state] : states_) names.insert(key.first);
  return {names.begin(), names.end()};
}

const CheckpointReader::State* CheckpointReader::StateOf(
    absl::string_view state, absl::string_view parameter) const {
  const auto it = states_.find({std::string(state), std::string(parameter)});
  return it == states_.end() ? nullptr : &it->second;
}

absl::optional<DType> CheckpointReader::dtype(
    absl::string_view state, absl::string_view parameter) const {
  const State* found = StateOf(state, parameter);
  if (found == nullptr) return absl::nullopt;
  return found->dtype;
}

absl::StatusOr<std::vector<CheckpointReader::Slice>> CheckpointReader::Find(
    absl::string_view state, absl::string_view parameter, int64_t begin,
    int64_t elems) const {
  const State* found = StateOf(state, parameter);
  if (found == nullptr) {
    return absl::NotFoundError(absl::StrCat("'", folder_, "' has no ", state,
                                            " of '", parameter, "'"));
  }
  const std::vector<Piece>& pieces = found->pieces;
  const int64_t all = pieces.back().begin + pieces.back().elems;
  if (begin < 0 || elems < 0 || elems > all - begin) {
    return absl::OutOfRangeError(absl::StrCat("elements ", begin, " to ",
                                              begin + elems, " of '", parameter,
                                              "', which has ", all));
  }
  // The last that begins at or before `begin`.
  auto piece = std::upper_bound(
                   pieces.begin(), pieces.end(), begin,
                   [](int64_t at, const Piece& p) { return at < p.begin; }) -
               1;
  const int64_t item = static_cast<int64_t>(DTypeBytes(found->dtype));
  std::vector<Slice> slices;
  for (const int64_t end = begin + elems; begin < end; ++piece) {
    // Bytes [at, stop) of the piece.
    int64_t at = (begin - piece->begin) * item;
    const int64_t stop = std::min(end - piece->begin, piece->elems) * item;
    while (at < stop) {
      const int64_t number = at / kCheckpointBlockBytes;
      const int64_t first = number * kCheckpointBlockBytes;
      const Block block = BlockOf(*piece, number);
      const int64_t to = std::min(stop - first, block.bytes);
      slices.push_back({block, at - first, to});
      at = first + to;
    }
    begin = piece->begin + piece->elems;
  }
  return slices;
}

CheckpointReader::Block CheckpointReader::BlockOf(const Piece& piece,
                                                  int64_t number) const {
  const CheckpointPart& part = parts_[piece.part];
  const int64_t begin = number * kCheckpointBlockBytes;
  return {piece.part, piece.range, number, part.offsets[piece.range] + begin,
          std::min(kCheckpointBlockBytes,
                   BytesOf(part.ranges[piece.range]) - begin)};
}

absl::Status CheckpointReader::Check(const Block& block,
                                     absl::string_view bytes) const {
  const CheckpointPart& part = parts_[block.part];
  if (HashOf(bytes) == part.hashes[block.range][block.number]) {
    return absl::OkStatus();
  }
  return Damaged(part.file, "bytes ", block.offset, " to ",
                 block.offset + block.bytes, ", of '",
                 CheckpointTensorName(part.ranges[block.range]),
                 "', are not what was written");
}

absl::Status CheckpointReader::Read(absl::string_view state,
                                    absl::string_view parameter, int64_t begin,
                                    int64_t elems, void* out) const {
  ZERO_ASSIGN_OR_RETURN(const std::vector<Slice> slices,
                        Find(state, parameter, begin, elems));
  char* to = static_cast<char*>(out);
  for (const Slice& slice : slices) {
    const int64_t bytes = slice.end - slice.begin;
    if (bytes == slice.block.bytes) {
      ZERO_RETURN_IF_ERROR(ReadBlock(slice.block, to));
    } else {
      ZERO_ASSIGN_OR_RETURN(const auto cached, ReadCached(slice.block));
      std::memcpy(to, cached->bytes.data() + slice.begin, bytes);
    }
    to += bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ReadableFile>> CheckpointReader::DataFile(
    size_t part) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it =
      std::find_if(files_.begin(), files_.end(),
                   [&](const OpenPart& open) { return open.part == part; });
  if (it != files_.end()) {
    std::rotate(files_.begin(), it, it + 1);
  } else {
    ZERO_ASSIGN_OR_RETURN(auto file, ReadableFile::Open(parts_[part].file));
    files_.insert(files_.begin(), {part, std::move(file)});
    if (files_.size() > kOpenFiles) files_.pop_back();
  }
  return files_.front().file;
}

absl::Status CheckpointReader::ReadBlock(const Block& block, char* out) const {
  ZERO_ASSIGN_OR_RETURN(const auto file, DataFile(block.part));
  ZERO_RETURN_IF_ERROR(file->ReadAt(block.offset, out, block.bytes));
  return Check(block, {out, static_cast<size_t>(block.bytes)});
}

absl::StatusOr<std::shared_ptr<const CheckpointReader::CachedBlock>>
CheckpointReader::ReadCached(const Block& block) const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it =
        std::find_if(cache_.begin(), cache_.end(),
                     [&](const auto& one) { return one->block == block; });
    if (it != cache_.end()) {
      std::rotate(cache_.begin(), it, it + 1);
      return cache_.front();
    }
  }
  const auto cached = std::make_shared<CachedBlock>();
  cached->block = block;
  cached->bytes.resize(block.bytes);
  ZERO_RETURN_IF_ERROR(ReadBlock(block, cached->bytes.data()));
  const std::lock_guard<std::mutex> lock(mutex_);
  cache_.insert(cache_.begin(), cached);
  if (cache_.size() > kCachedBlocks) cache_.pop_back();
  return std::shared_ptr<const CachedBlock>(cached);
}

}  // namespace zero
