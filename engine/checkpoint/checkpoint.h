// Checkpoints of training runs: named states of named parameters, complete, in
// pieces independent of the number of ranks. A run that reads one may divide
// them differently.
//
// Layout: a folder `step-00001000/` in the run's `checkpoints/`:
//   checkpoint.json           the manifest
//   states-00000.safetensors the data of one part (a rank of the run that
//   saved):
//                             tensors "STATE/PARAMETER[begin:end]" of elements
//                             in the parameter's row-major order
//   states-00000.json         its index: ranges, and a checksum of each block
//   states-00001.safetensors  ...
// and next to it `latest`, a file with the newest folder's name, for people and
// scripts; a run finds its newest checkpoint without it.
//
// Both JSON files begin with {"zero_checkpoint": "manifest" or "states",
// "xxh3_128": hash, "version": 1, ...}: the XXH3-128 (engine/base/hash.h) of
// the file's text, with 32 zeros in the hash's place. Every version keeps these
// three keys; a newer version is refused. The index has the checksums of the
// data file: of its header, and of blocks of kCheckpointBlockBytes of each
// range, counted from its beginning, the last one shorter. `save`, a random id,
// is in all of a checkpoint's files, so two saves are never mixed. Non-goals:
// compression, and files that are correct on big-endian machines.
//
// Invariant: a folder called step-N is complete. It is written as
// step-N.partial, every file durable, then renamed.
#ifndef ZERO_ENGINE_CHECKPOINT_CHECKPOINT_H_
#define ZERO_ENGINE_CHECKPOINT_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "engine/base/file.h"
#include "engine/base/hash.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/dtype.h"
#include "nlohmann/json.hpp"

namespace zero {

inline constexpr int64_t kCheckpointVersion = 1;
inline constexpr int64_t kCheckpointBlockBytes = int64_t{2} << 20;

// Elements [begin, begin + elems) of one state of a parameter, in the
// parameter's own row-major numbering.
struct CheckpointRange {
  std::string state;      // "weight", "exp_avg", ...
  std::string parameter;  // its name
  int64_t begin = 0, elems = 0;
  DType dtype = DType::kF32;
};

// The name of a range's tensor: "exp_avg/wte.weight[0:4096]".
std::string CheckpointTensorName(const CheckpointRange& range);

struct CheckpointManifest {
  int64_t step = 0;
  int64_t samples = 0;  // sequences consumed: step * train_batch_size
  int64_t parts = 0;    // states-*.safetensors
  std::string run;      // id of the run, the same in all of its checkpoints
  std::string save;     // id of this save
  // Shapes of all parameters of the model.
  std::map<std::string, std::vector<int64_t>> parameters;
  nlohmann::ordered_json progress;  // the trainer's, opaque here
  nlohmann::ordered_json config;    // of the run, resolved; opaque here
  std::string date;                 // UTC; CommitCheckpoint sets it
};

// Writes the files of one part.
// Threads: one at a time.
class CheckpointPartWriter {
 public:
  // `folder` exists (BeginCheckpoint's).
  // Errors: InvalidArgument for an empty or doubled range; FileError, here and
  //         below. After an error nothing may follow, and no file appears.
  static absl::StatusOr<std::unique_ptr<CheckpointPartWriter>> Create(
      const std::string& folder, int64_t part, const std::string& save,
      std::vector<CheckpointRange> ranges);

  // Elements [first, first + elems) of ranges[range]; `first` counts within the
  // range. Ranges come in any order, also interleaved; the elements of each in
  // increasing order, without gaps.
  // Errors: InvalidArgument for any other order.
  absl::Status Write(size_t range, int64_t first, const void* data,
                     int64_t elems);

  // Makes the data durable, then its index.
  // Errors: InvalidArgument if elements are missing.
  absl::Status Commit();

 private:
  struct Progress {
    int64_t bytes = 0;                  // written
    std::unique_ptr<RunningHash> hash;  // of the block that is not full
    std::vector<std::string> hashes;
  };
  CheckpointPartWriter() = default;

  std::string folder_, save_;
  int64_t part_ = 0;
  std::vector<CheckpointRange> ranges_;
  std::vector<Progress> progress_;  // of ranges_
  std::unique_ptr<SafetensorsWriter> data_;
};

// CHECKPOINTS/step-00001000: a complete checkpoint.
std::string CheckpointFolder(const std::string& checkpoints, int64_t step);

// CHECKPOINTS/step-00001000.partial: the folder of an unfinished save. The same
// on all ranks.
std::string PartialFolder(const std::string& checkpoints, int64_t step);

// Makes an empty PartialFolder, replacing an earlier one. Called by one rank.
// Errors: FileError, here and below.
absl::Status BeginCheckpoint(const std::string& checkpoints, int64_t step);

// Frees the space of a failed save. Called by one rank instead of
// CommitCheckpoint.
absl::Status AbandonCheckpoint(const std::string& checkpoints, int64_t step);

// Writes the manifest, checks the whole as CheckpointReader::Open does, and
// renames the folder into place, durably. Called by one rank when all parts are
// durable. An existing checkpoint of that step is replaced without a gap (if
// the file system can exchange two names; elsewhere RemoveUnfinishedCheckpoints
// repairs a crash between two renames).
// `step_hook` is for tests: called after each step.
// Errors: those of Open; the partial folder is then removed.
absl::Status CommitCheckpoint(const std::string& checkpoints,
                              const CheckpointManifest& manifest,
                              const std::function<void()>& step_hook = {});

// Names the checkpoint of `step` in the file `latest`.
absl::Status WriteLatest(const std::string& checkpoints, int64_t step);

// One part of a checkpoint, as its index says.
struct CheckpointPart {
  std::string file;  // path of states-*.safetensors
  int64_t file_bytes = 0;
  std::vector<CheckpointRange> ranges;
  // The offset of each range's data in the file, and the hashes of its blocks.
  std::vector<int64_t> offsets;
  std::vector<std::vector<std::string>> hashes;
};

// Reads a checkpoint in any pieces; never returns a byte that differs from what
// was written.
// Threads: const methods may be called from many threads.
class CheckpointReader {
 public:
  // Opens a step folder. Read and checked: manifest, indexes, headers and sizes
  // of all data files; that they belong together; that every state present has
  // each element once, and every parameter has a "weight".
  // Errors: NotFound: a file is missing; DataLoss: a file is damaged;
  //         InvalidArgument: the files do not belong together, or lack
  //         elements; FailedPrecondition: a newer format; FileError.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(
      const std::string& folder);

  const std::string& folder() const { return folder_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  const std::vector<CheckpointPart>& parts() const { return parts_; }
  // Names of the states that any parameter has, sorted.
  std::vector<std::string> states() const;

  // The dtype of a stored state; none: the parameter lacks it.
  absl::optional<DType> dtype(absl::string_view state,
                              absl::string_view parameter) const;
  bool Has(absl::string_view state, absl::string_view parameter) const {
    return dtype(state, parameter).has_value();
  }

  // Copies elements [begin, begin + elems), as stored, to `out`. Checks blocks
  // as it reads them. For many reads known in advance: checkpoint_reads.h.
  // Errors: DataLoss naming file, tensor and bytes; NotFound where !Has;
  //         OutOfRange; other FileError. `out` is then undefined.
  absl::Status Read(absl::string_view state, absl::string_view parameter,
                    int64_t begin, int64_t elems, void* out) const;

  // Reads and checks all blocks of one of parts(): the first damage.
  absl::Status VerifyPart(size_t part) const;

  // The unit of checksums.
  struct Block {
    size_t part = 0, range = 0;     // of parts(), of its ranges
    int64_t number = 0;             // within the range
    int64_t offset = 0, bytes = 0;  // in the part's file
    bool operator==(const Block&) const = default;
  };
  // Bytes [begin, end) of a block.
  struct Slice {
    Block block;
    int64_t begin = 0, end = 0;
  };
  // The slices that hold elements [begin, begin + elems), in order.
  // Errors: NotFound, OutOfRange.
  absl::StatusOr<std::vector<Slice>> Find(absl::string_view state,
                                          absl::string_view parameter,
                                          int64_t begin, int64_t elems) const;
  // Returns DataLoss if `bytes` are not what was written.
  absl::Status Check(const Block& block, absl::string_view bytes) const;

 private:
  // A range of a part, by its beginning in the parameter.
  struct Piece {
    int64_t begin = 0, elems = 0;
    size_t part = 0, range = 0;
  };
  struct State {
    DType dtype = DType::kF32;
    std::vector<Piece> pieces;  // in order, without gaps
  };
  struct CachedBlock {
    Block block;
    std::string bytes;
  };

  CheckpointReader() = default;
  absl::Status ReadManifest();
  absl::Status ReadPart(int64_t number);
  absl::Status AddPieces();
  const State* StateOf(absl::string_view state,
                       absl::string_view parameter) const;
  Block BlockOf(const Piece& piece, int64_t number) const;
  absl::StatusOr<std::shared_ptr<const ReadableFile>> DataFile(
      size_t part) const;
  absl::Status ReadBlock(const Block& block, char* out) const;
  absl::StatusOr<std::shared_ptr<const CachedBlock>> ReadCached(
      const Block& block) const;

  std::string folder_;
  CheckpointManifest manifest_;
  std::vector<CheckpointPart> parts_;
  // By state and parameter.
  std::map<std::pair<std::string, std::string>, State> states_;

  mutable std::mutex mutex_;
  // The parts whose data files were read, most recent first.
  struct OpenPart {
    size_t part = 0;
    std::shared_ptr<const ReadableFile> file;
  };
  mutable std::vector<OpenPart> files_;
  // Partly used blocks, most recent first, for reads that continue after them.
  mutable std::vector<std::shared_ptr<const CachedBlock>> cache_;
};

// Whether an error of CheckpointReader::Open says that files are missing,
// damaged or mixed, not that they cannot be read here.
bool IsDamage(const absl::Status& opened);

struct FoundCheckpoint {
  std::string path;
  std::vector<std::string> notes;  // why each newer one does not open
  std::unique_ptr<CheckpointReader> reader;
};

// The newest checkpoint in `checkpoints` that opens.
// Errors: NotFound: there is none; DataLoss: none of them opens; errors that
//         are no damage (permission, a newer format) as they are.
absl::StatusOr<FoundCheckpoint> FindNewestCheckpoint(
    const std::string& checkpoints);

// Paths of the complete folders, by their names, oldest first; nothing where
// `checkpoints` is missing.
std::vector<std::string> ListCheckpoints(const std::string& checkpoints);

// Restores checkpoints that were moved aside and not replaced, and removes all
// else that a crash left. Called at the start of a run, whose lock keeps others
// out.
absl::Status RemoveUnfinishedCheckpoints(const std::string& checkpoints);

// Removes checkpoints except the newest `keep_last` that open (0: removes
// nothing), those whose step is a multiple of `keep_every` (0: none), and those
// newer than the oldest kept. A partly removed one is never taken for a
// complete one.
absl::Status PruneCheckpoints(const std::string& checkpoints, int64_t keep_last,
                              int64_t keep_every);

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_CHECKPOINT_H_
