#include "engine/base/atomic_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

// "NAME.zero-KIND.PID.N", parsed; `kind` is empty for any other name.
struct StaleName {
  std::string name, kind;
  int pid = 0;
};

StaleName ParseStaleName(absl::string_view file_name) {
  const std::vector<std::string> parts = absl::StrSplit(file_name, '.');
  if (parts.size() < 4) return {};
  const auto tail = parts.end() - 3;
  int pid = 0, number = 0;
  const bool ours = tail[0] == "zero-tmp" || tail[0] == "zero-old";
  if (!ours || !absl::SimpleAtoi(tail[1], &pid) ||
      !absl::SimpleAtoi(tail[2], &number) || pid <= 0 || number < 0) {
    return {};
  }
  return {absl::StrJoin(parts.begin(), tail, "."),
          tail[0].substr(sizeof("zero-") - 1), pid};
}

bool IsOtherLiveProcess(int pid) {
  return pid != ::getpid() && (::kill(pid, 0) == 0 || errno == EPERM);
}

// Exchanges two names at once; errno as renameat2 sets it.
bool Exchange(const std::string& a, const std::string& b) {
#ifdef RENAME_EXCHANGE
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(),
                     RENAME_EXCHANGE) == 0;
#else
  errno = ENOSYS;
  return false;
#endif
}

}  // namespace

absl::StatusOr<std::unique_ptr<AtomicFolder>> AtomicFolder::Create(
    const std::string& path) {
  if (PathExists(path) && !IsFolder(path)) return MakeFolders(path);
  const std::string temp_path = NameBeside(path, "tmp");
  // A folder of that name can only be a dead process's.
  ZERO_RETURN_IF_ERROR(RemoveTree(temp_path));
  ZERO_RETURN_IF_ERROR(MakeFolders(temp_path));
  return std::unique_ptr<AtomicFolder>(new AtomicFolder(path, temp_path));
}

std::unique_ptr<AtomicFolder> AtomicFolder::Adopt(
    const std::string& path, const std::string& temp_path) {
  return std::unique_ptr<AtomicFolder>(new AtomicFolder(path, temp_path));
}

AtomicFolder::~AtomicFolder() {
  if (!temp_path_.empty()) RemoveTree(temp_path_).IgnoreError();
}

// Returns the earlier folder's new name; empty: there was none.
absl::StatusOr<std::string> AtomicFolder::PutInPlace() {
  std::string old;
  if (PathExists(path_)) {
    if (can_exchange_ && Exchange(temp_path_, path_)) return temp_path_;
    if (can_exchange_ && errno != ENOSYS && errno != EINVAL) {
      return FileError("cannot replace the folder", path_, errno);
    }
    old = NameBeside(path_, "old");
    if (::rename(path_.c_str(), old.c_str()) != 0) {
      return FileError("cannot move the folder away", path_, errno);
    }
    StepDone();
  }
  if (::rename(temp_path_.c_str(), path_.c_str()) != 0) {
    const int error_number = errno;
    if (!old.empty()) ::rename(old.c_str(), path_.c_str());
    return FileError("cannot rename to the folder", path_, error_number);
  }
  return old;
}

absl::Status AtomicFolder::Commit(const std::string& kept) {
  ZERO_CHECK(!temp_path_.empty())
      << "AtomicFolder: second Commit of '" << path_ << "'";
  ZERO_RETURN_IF_ERROR(SyncFolder(temp_path_));
  StepDone();
  ZERO_ASSIGN_OR_RETURN(const std::string old, PutInPlace());
  temp_path_.clear();
  StepDone();
  if (const absl::Status synced = SyncFolder(FolderOf(path_)); !synced.ok()) {
    // Both folders stay: after a power cut the name may be the old one's again.
    return absl::Status(synced.code(),
                        absl::StrCat("'", path_,
                                     "' is written, but might not survive a "
                                     "power cut: ",
                                     synced.message()));
  }
  StepDone();
  if (old.empty()) return absl::OkStatus();
  if (kept.empty()) {
    RemoveTree(old).IgnoreError();
  } else if (::rename(old.c_str(), kept.c_str()) != 0) {
    return FileError("cannot rename the earlier folder to", kept, errno);
  }
  return absl::OkStatus();
}

bool IsStaleFile(absl::string_view name) {
  return !ParseStaleName(name).kind.empty();
}

absl::Status RemoveStaleFiles(const std::string& folder,
                              const std::vector<std::string>& names,
                              bool others_too) {
  ZERO_ASSIGN_OR_RETURN(const std::vector<std::string> present,
                        ListFolder(folder));
  for (const std::string& name : present) {
    const StaleName stale = ParseStaleName(name);
    if (stale.kind.empty() || (!others_too && IsOtherLiveProcess(stale.pid)) ||
        std::find(names.begin(), names.end(), stale.name) == names.end()) {
      continue;
    }
    const std::string path = absl::StrCat(folder, "/", name);
    const std::string place = absl::StrCat(folder, "/", stale.name);
    if (stale.kind == "old" && !PathExists(place)) {
      if (::rename(path.c_str(), place.c_str()) != 0) {
        return FileError("cannot put back", place, errno);
      }
      continue;
    }
    ZERO_RETURN_IF_ERROR(RemoveTree(path));
  }
  return absl::OkStatus();
}

}  // namespace zero
