// Files: their names, whole reads, memory maps, and writes that a crash cannot
// tear.
//
// Every error names the path, what went wrong in words, and the remedy.
// Nothing here knows a file's content.
#ifndef ZERO_ENGINE_BASE_FILE_H_
#define ZERO_ENGINE_BASE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zero {

// "ACTION PATH: reason; remedy" with the status code that fits `error_number`
// (NotFound, PermissionDenied, ResourceExhausted for a full disk, ...).
absl::Status FileError(absl::string_view action, absl::string_view path,
                       int error_number);

// The whole of a regular file.
// Errors: NotFound, PermissionDenied, InvalidArgument for a folder.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Replaces `path` by `contents`: after a crash at any moment the file is either
// the old or the new one. See AtomicFile.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);

// Removes a file; a missing one is not an error.
absl::Status RemoveFile(const std::string& path);

// rm -rf, of a file or a folder.
absl::Status RemoveTree(const std::string& path);

// mkdir -p, durably.
absl::Status MakeFolders(const std::string& path);

// Bytes that an ordinary user may still write on the disk of `path`; -1:
// unknown.
int64_t FreeDiskBytes(const std::string& path);

// The target of a link, if `path` is a link to something that exists; else
// `path`.
std::string FollowLink(const std::string& path);

bool PathExists(const std::string& path);
bool IsFolder(const std::string& path);

// "a/b/c.bin" -> "a/b"; "c.bin" -> "."; "/c" -> "/".
std::string FolderOf(const std::string& path);

// Makes the contents of `path` durable.
absl::Status SyncFile(const std::string& path);

// Makes the names in `folder` durable.
absl::Status SyncFolder(const std::string& folder);

// "PATH.zero-KIND.PID.N": a name next to `path` that nothing else uses while
// this process lives. RemoveStaleFiles (atomic_folder.h) finds such names after
// a crash, so `kind` is "tmp" or "old".
std::string NameBeside(const std::string& path, absl::string_view kind);

// `path`, or if that is taken, PATH.2, PATH.3, ...
std::string FreeName(const std::string& path);

// Names in `folder`, sorted bytewise, without "." and "..".
absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& folder);

// The files named by `patterns`: names, and globs with *, ?, [ab], {a,b} and ~.
// They are in the order of the patterns, and sorted bytewise within a glob. A
// file named twice counts twice.
// Errors: NotFound with the nearest names when a pattern matches nothing;
//         InvalidArgument for "**", a folder and an empty list.
absl::StatusOr<std::vector<std::string>> ExpandPaths(
    const std::vector<std::string>& patterns);

// Locks `folder`, which must exist, for one process and one run in it, on all
// hosts that share the folder. The lock lasts until the last copy of the result
// is destroyed or the process ends in any way. It is on a file in the folder,
// kLockFile, which is removed at the end; after a kill the file stays and locks
// nothing. Advisory: only processes that also take it are kept out. Null if the
// file system has no locks.
// Errors: FailedPrecondition if another process or run holds it; FileError.
inline constexpr char kLockFile[] = ".zero-lock";
absl::StatusOr<std::shared_ptr<void>> LockFolder(const std::string& folder);

// A file that appears atomically: written under a temporary name in the same
// folder, then fsync, rename, fsync of the folder. Destroyed without Commit, it
// leaves nothing behind.
// Threads: one at a time.
class AtomicFile {
 public:
  // Errors: as FileError; a missing folder is named as such.
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(
      const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Errors: ResourceExhausted when the disk is full; the file is then removed.
  absl::Status Append(const void* data, size_t bytes);

  // Writes bytes anywhere: over appended ones (a header whose counts are known
  // last), or after them, if nothing more is appended.
  absl::Status WriteAt(int64_t offset, const void* data, size_t bytes);

  // Makes the file durable under its name. Nothing may follow.
  absl::Status Commit();

  // Bytes appended so far.
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  AtomicFile(std::string path, std::string temp_path, std::FILE* file)
      : path_(std::move(path)), temp_path_(std::move(temp_path)), file_(file) {}
  // Removes what was written and returns FileError of errno.
  absl::Status Fail(absl::string_view action);

  std::string path_;
  std::string temp_path_;
  std::FILE* file_;  // null: committed, or removed after an error
  int64_t size_ = 0;
};

// A regular file, mapped privately and read only. The bytes are those on disk;
// truncating the file while it is mapped kills the process (SIGBUS), so writers
// must replace files, as AtomicFile does. Copies share the map.
class MappedFile {
 public:
  // An empty file maps to zero bytes.
  // Errors: NotFound, PermissionDenied, InvalidArgument for a folder or a
  //         device, ResourceExhausted when there are too many maps.
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  const uint8_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  std::shared_ptr<const uint8_t> data_;
  int64_t size_ = 0;
};

// A regular file, read in pieces. If the file is truncated while it is open,
// reading is an error, not a signal as with a map.
// Threads: const methods may be called from many threads.
class ReadableFile {
 public:
  // Errors: as MappedFile::Open.
  static absl::StatusOr<std::shared_ptr<const ReadableFile>> Open(
      const std::string& path);
  ~ReadableFile();
  ReadableFile(const ReadableFile&) = delete;
  ReadableFile& operator=(const ReadableFile&) = delete;

  // Errors: DataLoss if the file ends before offset + bytes; FileError.
  absl::Status ReadAt(int64_t offset, void* data, int64_t bytes) const;

  // The size when the file was opened.
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  ReadableFile(std::string path, int fd, int64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}

  std::string path_;
  int fd_;
  int64_t size_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_FILE_H_
