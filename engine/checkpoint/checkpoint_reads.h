// Reads of a checkpoint that are known in advance.
#ifndef ZERO_ENGINE_CHECKPOINT_CHECKPOINT_READS_H_
#define ZERO_ENGINE_CHECKPOINT_CHECKPOINT_READS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/background.h"
#include "engine/base/direct_file.h"
#include "engine/checkpoint/checkpoint.h"

namespace zero {

// Reads ranges one after the other. A thread reads and checks the next blocks
// while the caller uses the current ones. Reads only blocks with requested
// ranges, past the page cache, and a block only once if the ranges that share
// it are consecutive.
// Memory: two windows.
// Threads: one at a time.
class CheckpointReads {
 public:
  // Blocks that are neighbours in a file are read together up to this size: two
  // requests of common disks.
  static constexpr int64_t kWindowBytes = 4 * kCheckpointBlockBytes;

  // `reader` must outlive it. The dtypes of `ranges` are ignored.
  // Errors: NotFound, OutOfRange for a missing range.
  static absl::StatusOr<std::unique_ptr<CheckpointReads>> Open(
      const CheckpointReader& reader,
      const std::vector<CheckpointRange>& ranges);

  // The elements of the next range, as stored, to `out`; null: only checks
  // them.
  // REQUIRES: at most one call per range.
  // Errors: as CheckpointReader::Read. Nothing may follow.
  absl::Status Next(void* out);

  // Bytes read from the disk so far, in whole sectors.
  int64_t read_bytes() const { return read_bytes_; }

 private:
  // Neighbouring blocks of one file.
  struct Window {
    size_t part = 0;
    int64_t begin = 0, end = 0;  // in the file
    std::vector<CheckpointReader::Block> blocks;
  };
  // A block that was read.
  struct Loaded {
    AlignedMemory memory;
    const char* data = nullptr;
    absl::Status status;
  };

  explicit CheckpointReads(const CheckpointReader& reader) : reader_(&reader) {}
  void Add(const CheckpointReader::Block& block);
  // Fills `loaded` with windows_[number].
  void Load(size_t number, Loaded* loaded);
  // Advances to the next block.
  absl::Status Advance();

  const CheckpointReader* reader_;
  std::vector<std::vector<CheckpointReader::Slice>> ranges_;
  size_t range_ = 0;  // the next one
  std::vector<Window> windows_;
  size_t window_ = 0, block_ = 0;  // the block that was read last
  bool began_ = false;
  Loaded now_, next_;
  std::shared_ptr<const DirectReader> file_;  // of the part read last
  size_t part_ = 0;
  int64_t read_bytes_ = 0;
  Background reading_;  // last: it uses the members above
};

}  // namespace zero

#endif  // ZERO_ENGINE_CHECKPOINT_CHECKPOINT_READS_H_
