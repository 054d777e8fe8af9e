// A file for states that do not fit into memory, for the duration of a run.
//
// It is cut into pieces that are written and read as a whole, past the page
// cache (O_DIRECT). All of its space is taken when it is made, so that a full
// disk shows then. The file has a header of one block, is locked while its
// owner lives and is removed when that ends; what a killed run left behind has
// the header and no lock, and is removed or replaced. No other file is ever
// touched.
//
// Layout: header [kBlockAlignment], then the pieces in order, each padded to a
//   multiple of kBlockAlignment. It is never read later: no version, no
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

  // `pieces`: bytes of each. Memory that pieces are read to and written from
  // should lie in `registered`, which must outlive the file.
  // Errors: ResourceExhausted where the disk has less space than it takes;
  //         FailedPrecondition where another run has the file, it is none of
  //         ours, or its file system has no locks; FileError.
  static absl::StatusOr<std::unique_ptr<SwapFile>> Create(
      const SwapFileOptions& options, absl::Span<const int64_t> pieces,
      absl::Span<const absl::Span<char>> registered);
  // Removes what dead runs left in `folder`. All ranks of a run call it before
  // any of them makes its file: dead files take space, and a file that is made
  // but not locked yet looks dead.
  static void RemoveStale(const std::string& folder);
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  // Bytes of a piece in the file, and in its memory, which begins at a multiple
  // of kBlockAlignment.
  static int64_t PaddedBytes(int64_t bytes) {
    return RoundUp(bytes, kBlockAlignment);
  }
  // Bytes of a file with such pieces.
  static int64_t FileBytes(absl::Span<const int64_t> pieces);

  // Errors: those of BlockIo::Run; DataLoss if a block is not what was written.
  //         REQUIRES: the piece was written.
  // Threads: one in each, here and below; a piece in only one of them.
  absl::Status Read(int piece, char* data);
  absl::Status Write(int piece, const char* data);

  const std::string& path() const { return path_; }
  // What is slower than it could be, and why.
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
