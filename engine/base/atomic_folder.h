// Folders that appear atomically, and the cleanup after a crash.
#ifndef ZERO_ENGINE_BASE_ATOMIC_FOLDER_H_
#define ZERO_ENGINE_BASE_ATOMIC_FOLDER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zero {

// A folder written under a temporary name next to `path` and then moved there.
// An earlier folder stays whole until that moment and is removed after it. If
// the file system can exchange two names (renameat2, Linux), a reader always
// sees a whole folder; elsewhere the earlier one is moved away first, and
// RemoveStaleFiles repairs a crash between the two renames. Destroyed without
// Commit, it leaves nothing behind.
// Threads: one at a time.
class AtomicFolder {
 public:
  // Makes temp_path(), empty, and the folders above it. A link called `path`
  // is replaced, not followed.
  // Errors: as FileError; InvalidArgument when `path` is a file.
  static absl::StatusOr<std::unique_ptr<AtomicFolder>> Create(
      const std::string& path);
  // The same for the folder `temp_path` next to `path`, which others have
  // filled.
  static std::unique_ptr<AtomicFolder> Adopt(const std::string& path,
                                             const std::string& temp_path);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  // The folder to fill. Its files must be durable, as those of AtomicFile are.
  const std::string& temp_path() const { return temp_path_; }

  // Moves the folder into place, durably. Nothing may follow. The earlier
  // folder is removed, or renamed to `kept`, which must be free; what cannot be
  // removed is left for RemoveStaleFiles.
  // Errors: as FileError; the earlier folder is then still in place. If only
  //         the last step fails, making the name durable, the new folder is in
  //         place and the error says so.
  absl::Status Commit(const std::string& kept = "");

  // `can` false makes a test behave as on a file system that cannot exchange
  // two names.
  void set_can_exchange(bool can) { can_exchange_ = can; }
  // Tests set a hook that is called after each step of Commit.
  void set_step_hook(std::function<void()> hook) { hook_ = std::move(hook); }

 private:
  AtomicFolder(std::string path, std::string temp_path)
      : path_(std::move(path)), temp_path_(std::move(temp_path)) {}
  absl::StatusOr<std::string> PutInPlace();
  void StepDone() {
    if (hook_) hook_();
  }

  std::string path_;
  std::string temp_path_;  // empty: committed
  bool can_exchange_ = true;
  std::function<void()> hook_;
};

// True for a name that NameBeside made.
bool IsStaleFile(absl::string_view name);

// Cleans up `folder` after processes that were killed while they wrote one of
// `names` in it: removes their unfinished files and folders, and restores an
// earlier folder that was moved away and not yet replaced. Files of living
// processes are left alone, except this one's: it must have nothing open here.
// With `others_too`, no other process writes here (by a lock), so files with a
// living process's id are stale too.
// Errors: as FileError.
absl::Status RemoveStaleFiles(const std::string& folder,
                              const std::vector<std::string>& names,
                              bool others_too = false);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_ATOMIC_FOLDER_H_
