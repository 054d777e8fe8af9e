// Large files, read and written past the page cache (O_DIRECT): their bytes are
// used once, and caching them would cost a copy, new pages and other files'
// places in the cache.
//
// If a file system refuses O_DIRECT (tmpfs), the same bytes go through the page
// cache.
#ifndef ZERO_ENGINE_BASE_DIRECT_FILE_H_
#define ZERO_ENGINE_BASE_DIRECT_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/background.h"
#include "engine/base/file.h"

namespace zero {

// Memory aligned for O_DIRECT, in pages of its own: malloc would keep some of
// it for the process when it is freed.
class AlignedMemory {
 public:
  // Grows the memory to at least `bytes`; its content is then lost.
  char* Reserve(int64_t bytes);

 private:
  struct Free {
    int64_t bytes;
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> memory_;
};

// A file that appears atomically, like AtomicFile. It has two windows: the
// caller fills one while a thread writes the other. Threads: one at a time.
class DirectWriter {
 public:
  // Size of each window. One request of common disks: larger ones write no
  // faster and take more of the host's memory.
  static constexpr int64_t kWindowBytes = int64_t{4} << 20;

  // Errors: as AtomicFile::Create.
  static absl::StatusOr<std::unique_ptr<DirectWriter>> Create(
      const std::string& path);
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  // Writes bytes anywhere, each byte once; fast if most calls are sequential.
  // Errors: FileError, perhaps of an earlier call; the file is then removed and
  //         nothing may follow.
  absl::Status WriteAt(int64_t offset, const void* data, int64_t bytes);

  // Makes the file durable under its name. Nothing may follow.
  absl::Status Commit();

  const std::string& path() const { return path_; }

 private:
  // Bytes [begin, end) of the file, at memory[begin % kWindowBytes].
  struct Window {
    AlignedMemory memory;
    int64_t begin = 0, end = 0;
  };

  DirectWriter(std::string path, std::string temp_path, int fd, int direct_fd);
  // Starts to write `filled_`, once `written_` is written.
  absl::Status HandOver();
  absl::Status WriteOut(Window& window);
  // Removes what was written and returns `status`.
  absl::Status Fail(absl::Status status);

  std::string path_, temp_path_;
  int fd_;         // -1: committed, or removed after an error
  int direct_fd_;  // the same file; -1: the file system refuses O_DIRECT
  Window filled_, written_;
  Background writing_;  // last: it uses the members above
};

// A regular file, read past the page cache. If the file is truncated while it
// is open, reading is an error, not a signal.
// Threads: const methods may be called from many threads.
class DirectReader {
 public:
  // Errors: as ReadableFile::Open.
  static absl::StatusOr<std::shared_ptr<const DirectReader>> Open(
      const std::string& path);
  ~DirectReader();
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Reads bytes [offset, offset + bytes) into `memory`; returns the address of
  // the first. Adds the bytes read from the disk, in whole sectors, to
  // `read_bytes`.
  // Errors: as ReadableFile::ReadAt.
  absl::StatusOr<const char*> Read(int64_t offset, int64_t bytes,
                                   AlignedMemory* memory,
                                   int64_t* read_bytes) const;

 private:
  DirectReader(std::shared_ptr<const ReadableFile> file, int direct_fd)
      : file_(std::move(file)), direct_fd_(direct_fd) {}

  std::shared_ptr<const ReadableFile> file_;
  int direct_fd_;  // -1: the file system refuses O_DIRECT
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_DIRECT_FILE_H_
