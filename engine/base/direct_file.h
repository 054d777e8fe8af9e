// Large files past the page cache (O_DIRECT): their bytes are used once, and
// caching them costs a copy, new pages and other files' places in the cache.
//
// Each file has two aligned windows: the caller fills or empties one while a
// thread writes or reads the other, so disk and caller work at the same time.
// Where a file system refuses O_DIRECT (tmpfs), the same windows go through the
// page cache.
#ifndef ZERO_ENGINE_BASE_DIRECT_FILE_H_
#define ZERO_ENGINE_BASE_DIRECT_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/background.h"
#include "engine/base/file.h"

namespace zero {

// A file that appears all at once, as AtomicFile.
// Threads: one at a time.
class DirectWriter {
 public:
  // Of each of two windows. One request of common disks: larger ones write no
  // faster and take more of the host's memory beside training.
  static constexpr int64_t kWindowBytes = int64_t{4} << 20;

  // Errors: as AtomicFile::Create.
  static absl::StatusOr<std::unique_ptr<DirectWriter>> Create(
      const std::string& path);
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  // Writes bytes anywhere, each byte once; fast where most calls go on behind
  // the one before.
  // Errors: FileError, perhaps of an earlier call; the file is then removed and
  //         nothing may follow.
  absl::Status WriteAt(int64_t offset, const void* data, int64_t bytes);

  // Makes the file durable under its name. Nothing may follow.
  absl::Status Commit();

  const std::string& path() const { return path_; }

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  // Bytes [begin, end) of the file, at memory[begin % kWindowBytes].
  struct Window {
    std::unique_ptr<char, Free> memory;
    int64_t begin = 0, end = 0;
  };

  DirectWriter(std::string path, std::string temp_path, int fd, int direct_fd);
  // Begins to write `filled_`, once `written_` is on its way no more.
  absl::Status HandOver();
  absl::Status WriteOut(const Window& window);
  // Removes what was written and returns `status`.
  absl::Status Fail(absl::Status status);

  std::string path_, temp_path_;
  int fd_;         // -1: committed, or removed after an error
  int direct_fd_;  // the same file; -1: the file system refuses O_DIRECT
  Window filled_, written_;
  Background writing_;  // last: it uses the members above
};

// A regular file that is read mostly in order. Where it is cut off meanwhile,
// reading is an error and no signal.
// Threads: const methods may be called from many threads; one reads at a time.
class DirectReader {
 public:
  // Of each of two windows: two requests of common disks, which read ahead less
  // than they write behind.
  static constexpr int64_t kWindowBytes = int64_t{8} << 20;

  // Errors: as ReadableFile::Open.
  static absl::StatusOr<std::shared_ptr<const DirectReader>> Open(
      const std::string& path);
  ~DirectReader();
  DirectReader(const DirectReader&) = delete;
  DirectReader& operator=(const DirectReader&) = delete;

  // Errors: as ReadableFile::ReadAt.
  absl::Status ReadAt(int64_t offset, void* data, int64_t bytes) const;

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  // Bytes [begin, begin + bytes) of the file; begin is a multiple of
  // kWindowBytes, -kWindowBytes where nothing was read.
  struct Window {
    std::unique_ptr<char, Free> memory;
    int64_t begin = -kWindowBytes, bytes = 0;
  };

  DirectReader(std::shared_ptr<const ReadableFile> file, int direct_fd)
      : file_(std::move(file)), direct_fd_(direct_fd) {}
  // Makes `now_` the window that begins there.
  void MoveTo(int64_t begin) const;
  void Fill(Window* window, int64_t begin) const;

  std::shared_ptr<const ReadableFile> file_;
  int direct_fd_;  // -1: the file system refuses O_DIRECT
  mutable std::mutex mutex_;
  mutable Window now_, next_;
  mutable Background reading_;  // last: it uses the members above
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_DIRECT_FILE_H_
