#include "engine/base/swap_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

constexpr absl::string_view kFolder = "zero_swap";
constexpr absl::string_view kPrefix = "rank_";
constexpr absl::string_view kMagic = "zero swap file\n";

std::string NameOf(int number) { return absl::StrCat(kPrefix, number); }

void Close(int fd) {
  if (fd >= 0) ::close(fd);
}

// Whether a locked file is a dead process's: it has the header, or its process
// died before writing it.
bool IsOurs(int fd, const struct stat& info) {
  if (!S_ISREG(info.st_mode)) return false;
  if (info.st_size == 0) return true;
  std::string begin(kMagic.size(), '\0');
  const ssize_t n = ::pread(fd, begin.data(), begin.size(), 0);
  return n == static_cast<ssize_t>(begin.size()) && begin == kMagic;
}

std::string SwapFolder(const std::string& folder) {
  return absl::StrCat(folder, "/", kFolder);
}

}  // namespace

void SwapFile::RemoveStale(const std::string& folder) {
  const auto names = ListFolder(SwapFolder(folder));
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    absl::string_view digits = name;
    int number = 0;
    if (!absl::ConsumePrefix(&digits, kPrefix) ||
        !absl::SimpleAtoi(digits, &number)) {
      continue;
    }
    const std::string path = absl::StrCat(SwapFolder(folder), "/", name);
    const int fd =
        ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat info;
    if (fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0 &&
        ::fstat(fd, &info) == 0 && IsOurs(fd, info)) {
      ::unlink(path.c_str());
    }
    Close(fd);
  }
}

int64_t SwapFile::FileBytes(absl::Span<const int64_t> pieces) {
  int64_t bytes = kBlockAlignment;
  for (const int64_t piece : pieces) bytes += PaddedBytes(piece);
  return bytes;
}

absl::StatusOr<std::unique_ptr<SwapFile>> SwapFile::Create(
    const SwapFileOptions& options, absl::Span<const int64_t> pieces,
    absl::Span<const absl::Span<char>> registered) {
  ZERO_CHECK(options.block_bytes > 0 &&
             options.block_bytes % kBlockAlignment == 0)
      << options.block_bytes;
  std::unique_ptr<SwapFile> file(new SwapFile(options));
  int64_t offset = kBlockAlignment;
  for (const int64_t bytes : pieces) {
    file->pieces_.push_back({offset, PaddedBytes(bytes), {}});
    offset += PaddedBytes(bytes);
  }
  const std::string folder = SwapFolder(options.folder);
  ZERO_RETURN_IF_ERROR(MakeFolders(folder));
  file->path_ = absl::StrCat(folder, "/", NameOf(options.number));
  ZERO_RETURN_IF_ERROR(file->Open());
  ZERO_RETURN_IF_ERROR(file->Reserve(offset));
  ZERO_RETURN_IF_ERROR(file->OpenDirect());
  file->MakeLanes(registered);
  return file;
}

SwapFile::~SwapFile() {
  for (auto& lane : lanes_) lane.reset();
  Close(direct_fd_);
  if (fd_ < 0) return;  // not ours
  ::unlink(path_.c_str());
  ::close(fd_);
  ::rmdir(FolderOf(path_).c_str());  // by the last of the ranks
}

absl::Status SwapFile::Open() {
  // A run that ends may remove the file or the folder between two calls.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    const int fd =
        ::open(path_.c_str(),
               O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0 && errno == ENOENT) {
      ZERO_RETURN_IF_ERROR(MakeFolders(FolderOf(path_)));
      continue;
    }
    if (fd < 0) return FileError("cannot write", path_, errno);
    const absl::Status taken = Take(fd);
    if (fd_ < 0) ::close(fd);
    if (!taken.ok() || fd_ >= 0) return taken;
  }
  return absl::UnavailableError(absl::StrCat(
      "'", path_,
      "' keeps being removed; give this run an nvme_path of its own"));
}

// Takes over an open file. Leaves fd_ at -1 if it was removed meanwhile.
absl::Status SwapFile::Take(int fd) {
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return absl::FailedPreconditionError(
          absl::StrCat("'", path_,
                       "' belongs to another run in progress; give each run an "
                       "nvme_path of its own, or wait until that run ends"));
    }
    // Without locks a second run would write over the first one's file.
    const int error = errno;
    struct stat empty;
    if (::fstat(fd, &empty) == 0 && empty.st_size == 0) {
      ::unlink(path_.c_str());  // made by Open
      ::rmdir(FolderOf(path_).c_str());
    }
    return absl::FailedPreconditionError(
        absl::StrCat("cannot lock '", path_, "': ", ::strerror(error),
                     "; choose an nvme_path on a local disk"));
  }
  struct stat open_file, named;
  if (::fstat(fd, &open_file) != 0) {
    return FileError("cannot read", path_, errno);
  }
  if (::lstat(path_.c_str(), &named) != 0 || named.st_ino != open_file.st_ino ||
      named.st_dev != open_file.st_dev) {
    return absl::OkStatus();
  }
  if (!IsOurs(fd, open_file)) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", path_,
                     "' was not written by zero and is left alone; choose "
                     "another nvme_path, or remove the file"));
  }
  // This also frees the space of a dead process's file.
  if (::ftruncate(fd, 0) != 0) return FileError("cannot write", path_, errno);
  fd_ = fd;
  if (::pwrite(fd, kMagic.data(), kMagic.size(), 0) !=
      static_cast<ssize_t>(kMagic.size())) {
    return FileError("cannot write", path_, errno);
  }
  return absl::OkStatus();
}

absl::Status SwapFile::Reserve(int64_t bytes) {
  int64_t error;
  int tries = 0;
  do {
    error = -::posix_fallocate(fd_, 0, bytes);
    if (options_.io.fault) {
      error = options_.io.fault(DiskCall::kAllocate, 0, bytes, error);
    }
  } while (error == -EINTR && ++tries < 1000);
  if (error == 0) return absl::OkStatus();
  // The data goes at once, so that others and the message see its space.
  const bool cut = ::ftruncate(fd_, 0) == 0;
  const int64_t free = cut ? FreeDiskBytes(path_) : -1;
  return FileError(
      absl::StrCat("cannot reserve ", bytes, " bytes",
                   free < 0 ? "" : absl::StrCat(", where ", free, " are free,"),
                   " for"),
      path_, static_cast<int>(-error));
}

absl::Status SwapFile::OpenDirect() {
  direct_fd_ = ::open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (direct_fd_ >= 0) return absl::OkStatus();
  if (errno != EINVAL && errno != EOPNOTSUPP) {
    return FileError("cannot write", path_, errno);
  }
  notes_.push_back(
      absl::StrCat("the file system of '", options_.folder,
                   "' refuses O_DIRECT: states there also take page cache"));
  direct_fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  return direct_fd_ >= 0 ? absl::OkStatus()
                         : FileError("cannot write", path_, errno);
}

void SwapFile::MakeLanes(absl::Span<const absl::Span<char>> registered) {
  std::string refused, note;
  for (auto& lane : lanes_) {
    if (options_.uring && refused.empty()) {
      auto uring = MakeUringIo(direct_fd_, path_, options_.io, registered);
      if (uring.ok()) {
        lane = *std::move(uring);
        note = lane->note();
        continue;
      }
      refused = std::string(uring.status().message());
    }
    lane = MakeThreadIo(direct_fd_, path_, options_.io);
  }
  if (!note.empty()) notes_.push_back(note);
  if (refused.empty()) return;
  notes_.push_back(absl::StrCat(
      "this system does not permit ", refused, ": '", options_.folder,
      "' is read and written by ", options_.io.threads,
      options_.io.threads == 1 ? " thread" : " threads",
      " each with pread and pwrite (aio.thread_count)"));
}

std::vector<BlockRequest> SwapFile::BlocksOf(const Piece& piece,
                                             char* data) const {
  std::vector<BlockRequest> blocks;
  for (int64_t at = 0; at < piece.bytes; at += options_.block_bytes) {
    blocks.push_back({piece.offset + at, data + at,
                      std::min(options_.block_bytes, piece.bytes - at)});
  }
  return blocks;
}

absl::Status SwapFile::Read(int piece, char* data) {
  const Piece& of = pieces_[piece];
  const std::vector<BlockRequest> blocks = BlocksOf(of, data);
  ZERO_CHECK(!options_.checksums || of.hashes.size() == blocks.size())
      << path_ << ": piece " << piece << " was never written";
  return lanes_[kReads]->Run(DiskCall::kRead, blocks, [&](size_t i) {
    const BlockRequest& block = blocks[i];
    if (!options_.checksums ||
        XXH3_64bits(block.data, block.bytes) == of.hashes[i]) {
      return absl::OkStatus();
    }
    return absl::DataLossError(absl::StrCat(
        "'", path_, "': ", block.bytes, " bytes at offset ", block.offset,
        " are not what was written there (checksum); the disk or another "
        "program changed them, see dmesg and start the run again"));
  });
}

absl::Status SwapFile::Write(int piece, const char* data) {
  Piece& of = pieces_[piece];
  const std::vector<BlockRequest> blocks =
      BlocksOf(of, const_cast<char*>(data));
  if (options_.checksums) of.hashes.resize(blocks.size());
  return lanes_[kWrites]->Run(DiskCall::kWrite, blocks, [&](size_t i) {
    if (options_.checksums) {
      of.hashes[i] = XXH3_64bits(blocks[i].data, blocks[i].bytes);
    }
    return absl::OkStatus();
  });
}

}  // namespace zero
