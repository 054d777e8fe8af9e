// A file for states that do not fit into memory, for the duration of a run.
//
// The file is cut into pieces that are written and read whole, past the page
// cache (O_DIRECT). All of its space is allocated when it is created, so a full
// disk is noticed at once. It has a header of one block, is locked while its
// owner lives, and is removed at the end. A file that a killed run left behind
// has the header and no lock; it is removed or replaced. No other file is ever
// touched.
//
// Layout: header [kBlockAlignment], then the pieces in order, each padded to a
//   multiple of kBlockAlignment. No later run reads it: no version, no
//   endianness.
#ifndef ZERO_ENGINE_BASE_SWAP_FILE_H_
#define ZERO_ENGINE_BASE_SWAP_FILE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/base/block_io.h"
#include "kernels/sizes.h"

namespace zero {

struct SwapFileOptions {
  std::string folder;  // made where it is not there
  int number = 0;      // of the file in it: a rank's, or one that no rank has
  // Changes speed.
  int64_t block_bytes = int64_t{1} << 20;  // of a request
  bool uring = true;                       // false: threads
  BlockIoOptions io;
  // Changes error detection: XXH3 of every block, verified on reads.
  bool checksums = true;
};

class SwapFile {
 public:
  // Reads and writes run concurrently, each in order.
  enum Lane { kReads, kWrites };

  // `pieces`: the bytes of each piece. Memory that pieces are read to and
  // written from should lie in `registered`, which must outlive the file.
  // Errors: ResourceExhausted if the disk has too little space;
  //         FailedPrecondition if another run has the file, if it is not a swap
  //         file, or if its file system has no locks; FileError.
  static absl::StatusOr<std::unique_ptr<SwapFile>> Create(
      const SwapFileOptions& options, absl::Span<const int64_t> pieces,
      absl::Span<const absl::Span<char>> registered);
  // Removes the files that dead runs left in `folder`. All ranks of a run call
  // it before any of them creates its file: dead files take space, and a file
  // that is created but not locked yet looks dead.
  static void RemoveStale(const std::string& folder);
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  // The bytes of a piece in the file, and in memory, where it begins at a
  // multiple of kBlockAlignment.
  static int64_t PaddedBytes(int64_t bytes) {
    return RoundUp(bytes, kBlockAlignment);
  }
  // Bytes of a file with pieces of these sizes.
  static int64_t FileBytes(absl::Span<const int64_t> pieces);

  // Errors: those of BlockIo::Run; DataLoss if a block is not what was written.
  // REQUIRES: the piece was written.
  // Threads: one thread reads and one writes, never the same piece.
  absl::Status Read(int piece, char* data);
  absl::Status Write(int piece, const char* data);

  const std::string& path() const { return path_; }
  // Why this is slower than it could be, one note per reason.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  struct Piece {
    int64_t offset = 0, bytes = 0;
    std::vector<uint64_t> hashes;  // of its blocks; none: never written
  };

  explicit SwapFile(const SwapFileOptions& options) : options_(options) {}
  absl::Status Open();
  absl::Status Take(int fd);
  absl::Status Reserve(int64_t bytes);
  absl::Status OpenDirect();
  void MakeLanes(absl::Span<const absl::Span<char>> registered);
  std::vector<BlockRequest> BlocksOf(const Piece& piece, char* data) const;

  const SwapFileOptions options_;
  std::string path_;
  int fd_ = -1;         // holds the lock
  int direct_fd_ = -1;  // the same file, past the page cache
  std::vector<Piece> pieces_;
  std::array<std::unique_ptr<BlockIo>, 2> lanes_;
  std::vector<std::string> notes_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_SWAP_FILE_H_
