#include "engine/base/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "engine/base/status.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// O_DIRECT's alignment of offsets, sizes and memory: the largest block of
// common disks.
constexpr int64_t kAlignment = 4096;

void Close(int fd) {
  if (fd >= 0) ::close(fd);
}

}  // namespace

void AlignedMemory::Free::operator()(char* memory) const {
  ::munmap(memory, static_cast<size_t>(bytes));
}

char* AlignedMemory::Reserve(int64_t bytes) {
  const int64_t old = memory_.get_deleter().bytes;
  if (bytes > old) {
    memory_.reset();
    const int64_t rounded = RoundUp(bytes, kAlignment);
    void* const memory =
        ::mmap(nullptr, static_cast<size_t>(rounded), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = {static_cast<char*>(memory), Free{rounded}};
  }
  return memory_.get();
}

// ---- Writing ----------------------------------------------------------------

absl::StatusOr<std::unique_ptr<DirectWriter>> DirectWriter::Create(
    const std::string& path) {
  // Refuses paths that a file cannot replace.
  ZERO_RETURN_IF_ERROR(AtomicFile::Create(path).status());
  std::string temp_path = NameBeside(path, "tmp");
  const int fd =
      ::open(temp_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return FileError("cannot write", path, errno);
  const int direct_fd =
      ::open(temp_path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  return std::unique_ptr<DirectWriter>(
      new DirectWriter(path, std::move(temp_path), fd, direct_fd));
}

DirectWriter::DirectWriter(std::string path, std::string temp_path, int fd,
                           int direct_fd)
    : path_(std::move(path)),
      temp_path_(std::move(temp_path)),
      fd_(fd),
      direct_fd_(direct_fd) {}

DirectWriter::~DirectWriter() {
  if (fd_ >= 0) Fail(absl::OkStatus()).IgnoreError();
}

absl::Status DirectWriter::Fail(absl::Status status) {
  writing_.Wait().IgnoreError();
  // The file goes at once, so that a full disk has its space back.
  Close(direct_fd_);
  Close(std::exchange(fd_, -1));
  ::unlink(temp_path_.c_str());
  return status;
}

absl::Status DirectWriter::WriteAt(int64_t offset, const void* data,
                                   int64_t bytes) {
  ZERO_CHECK_GE(fd_, 0) << "DirectWriter: WriteAt in '" << path_
                        << "' after Commit or an error";
  ZERO_CHECK_GE(offset, 0);
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const bool full =
        filled_.end > filled_.begin && filled_.end % kWindowBytes == 0;
    if (full || offset != filled_.end) {
      ZERO_RETURN_IF_ERROR(HandOver());
      filled_.begin = filled_.end = offset;
    }
    const int64_t at = offset % kWindowBytes;
    const int64_t n = std::min(bytes, kWindowBytes - at);
    std::memcpy(filled_.memory.Reserve(kWindowBytes) + at, from,
                static_cast<size_t>(n));
    filled_.end += n;
    offset += n;
    from += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status DirectWriter::HandOver() {
  const absl::Status status = writing_.Wait();
  if (!status.ok()) return Fail(status);
  if (filled_.begin == filled_.end) return absl::OkStatus();
  std::swap(filled_, written_);
  writing_.Start([this] { return WriteOut(written_); });
  return absl::OkStatus();
}

absl::Status DirectWriter::WriteOut(Window& window) {
  for (int64_t at = window.begin; at < window.end;) {
    int64_t bytes = window.end - at;
    // Partial blocks go through the page cache; the two ways never share a
    // block, as each byte is written once.
    const bool direct =
        direct_fd_ >= 0 && at % kAlignment == 0 && bytes >= kAlignment;
    if (direct) {
      bytes -= bytes % kAlignment;
    } else if (direct_fd_ >= 0) {
      bytes = std::min(bytes, kAlignment - at % kAlignment);
    }
    const ssize_t n =
        ::pwrite(direct ? direct_fd_ : fd_,
                 window.memory.Reserve(kWindowBytes) + at % kWindowBytes,
                 static_cast<size_t>(bytes), at);
    if (n >= 0) {
      at += n;
    } else if (direct && errno == EINVAL) {  // needs larger blocks
      Close(std::exchange(direct_fd_, -1));
    } else if (errno != EINTR) {
      return FileError("cannot write", path_, errno);
    }
  }
  return absl::OkStatus();
}

absl::Status DirectWriter::Commit() {
  ZERO_CHECK_GE(fd_, 0) << "DirectWriter: Commit of '" << path_
                        << "' after Commit or an error";
  ZERO_RETURN_IF_ERROR(HandOver());
  const absl::Status status = writing_.Wait();
  if (!status.ok()) return Fail(status);
  // O_DIRECT leaves data in the disk's own cache, and the size in memory.
  if (::fsync(fd_) != 0) return Fail(FileError("cannot write", path_, errno));
  if (::rename(temp_path_.c_str(), path_.c_str()) != 0) {
    return Fail(FileError("cannot rename to", path_, errno));
  }
  Close(direct_fd_);
  if (::close(std::exchange(fd_, -1)) != 0) {
    return FileError("cannot close", path_, errno);
  }
  return SyncFolder(FolderOf(path_));
}

// ---- Reading ----------------------------------------------------------------

absl::StatusOr<std::shared_ptr<const DirectReader>> DirectReader::Open(
    const std::string& path) {
  ZERO_ASSIGN_OR_RETURN(auto file, ReadableFile::Open(path));
  const int direct_fd = ::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  return std::shared_ptr<const DirectReader>(
      new DirectReader(std::move(file), direct_fd));
}

DirectReader::~DirectReader() { Close(direct_fd_); }

absl::StatusOr<const char*> DirectReader::Read(int64_t offset, int64_t bytes,
                                               AlignedMemory* memory,
                                               int64_t* read_bytes) const {
  const int64_t begin = offset - offset % kAlignment;
  const int64_t want = offset + bytes - begin;
  const int64_t size = RoundUp(want, kAlignment);
  char* const to = memory->Reserve(size);
  int64_t done = 0;
  while (direct_fd_ >= 0 && done < want && done % kAlignment == 0) {
    const ssize_t n = ::pread(direct_fd_, to + done,
                              static_cast<size_t>(size - done), begin + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += n;
  }
  // The end of the file, or an error: one place words the message.
  if (done < want) {
    ZERO_RETURN_IF_ERROR(file_->ReadAt(begin + done, to + done, want - done));
    done = want;
  }
  *read_bytes += done;
  return to + (offset - begin);
}

}  // namespace zero
