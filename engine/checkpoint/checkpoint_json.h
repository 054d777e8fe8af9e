// The JSON files of a checkpoint (checkpoint.h), as values. A disk may have
// changed any byte of their texts: none is trusted.
#ifndef ZERO_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
#define ZERO_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/checkpoint/checkpoint.h"

namespace zero {

inline constexpr char kManifestFile[] = "checkpoint.json";
// "states-00000", without a suffix.
std::string PartName(int64_t part);

// The content of an index file: a CheckpointPart, and more.
struct CheckpointIndex {
  int64_t part = 0;
  std::string save;
  int64_t header_bytes = 0;  // of the data file, with the 8 bytes before it
  std::string header_hash;
  CheckpointPart data;  // `file`: its name
};

std::string ManifestText(const CheckpointManifest& manifest);
std::string IndexText(const CheckpointIndex& index);

// `file` is the path for errors.
// Errors: DataLoss: the text is not what was written; FailedPrecondition: a
//         newer version.
absl::StatusOr<CheckpointManifest> ParseManifest(const std::string& file,
                                                 absl::string_view text);
// Reads an index. Its ranges are not empty and have one hash per block.
absl::StatusOr<CheckpointIndex> ParseIndex(const std::string& file,
                                           absl::string_view text);

// Product of `shape`; nothing if it does not fit or a dim is negative.
absl::optional<int64_t> ElementsOf(const std::vector<int64_t>& shape);

// Bytes of a range and its number of blocks.
inline int64_t BytesOf(const CheckpointRange& range) {
  return range.elems * static_cast<int64_t>(DTypeBytes(range.dtype));
}
int64_t NumBlocksOf(const CheckpointRange& range);

// "'FILE': ...; REMEDY".
template <typename... Parts>
absl::Status Damaged(absl::string_view file, const Parts&... what) {
  return absl::DataLossError(
      absl::StrCat("'", file, "': ", what...,
                   "; use another checkpoint, or copy this one again"));
}

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_CHECKPOINT_JSON_H_
