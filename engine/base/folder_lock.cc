#include "engine/base/folder_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"

namespace zero {

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(
    const std::string& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return FileError("cannot open the folder", folder, errno);
  std::unique_ptr<FolderLock> lock(new FolderLock(fd));
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return absl::FailedPreconditionError(
        absl::StrCat("another run is writing to '", folder,
                     "'; wait until it ends, or choose another folder"));
  }
  return lock;
}

FolderLock::~FolderLock() { ::close(fd_); }

}  // namespace zero
