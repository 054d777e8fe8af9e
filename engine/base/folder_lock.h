// One process, and one run in it, at a time in a folder.
#ifndef ZERO_ENGINE_BASE_FOLDER_LOCK_H_
#define ZERO_ENGINE_BASE_FOLDER_LOCK_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace zero {

// Held until it is destroyed or the process ends, however it ends; leaves no
// file behind. Advisory: only processes that also take it are kept
// out.
class FolderLock {
 public:
  // `folder` must exist. Where the file system knows no locks, there is none.
  // Errors: FailedPrecondition where somebody else holds it; FileError.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(
      const std::string& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_FOLDER_LOCK_H_
