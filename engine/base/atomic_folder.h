// Folders that appear all at once, and the tidying up after a crash.
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

// A folder written under a temporary name beside `path` and then put in its
// place. An earlier folder there stays whole until that moment and is removed
// after it. Where the file system can exchange two names (renameat2, Linux) a
// reader never sees anything but a whole folder; elsewhere the earlier one is
// moved away first, and a crash between the two renames is mended by
// RemoveStaleFiles. Destroyed without Commit, it leaves nothing behind.
// Threads: one at a time.
class AtomicFolder {
 public:
  // Makes temp_path(), empty, and the folders above it. A link called `path`
  // is replaced, not followed.
  // Errors: as FileError; InvalidArgument when `path` is a file.
  static absl::StatusOr<std::unique_ptr<AtomicFolder>> Create(
      const std::string& path);
  // The same for the folder `temp_path` beside `path`, which others have
  // filled.
  static std::unique_ptr<AtomicFolder> Adopt(const std::string& path,
                                             const std::string& temp_path);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  // The folder to fill, with files that are durable (AtomicFile's are).
  const std::string& temp_path() const { return temp_path_; }

  // Puts the folder in its place, durably. Nothing may follow. The earlier
  // folder is removed, or gets the name `kept`, which must be free; what cannot
  // be removed is left for RemoveStaleFiles.
  // Errors: as FileError; the earlier folder is then where it was. Where only
  //         the last step fails, making the name durable, the new folder is in
  //         its place and the error says so.
  absl::Status Commit(const std::string& kept = "");

  // For tests. Without exchange: the file system cannot exchange two names.
  void set_can_exchange(bool can) { can_exchange_ = can; }
  // For tests: called after each step of Commit.
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

// Tidies `folder` after processes that were killed while they wrote one of
// `names` in it: removes their unfinished files and folders, and puts back an
// earlier folder that was moved away and not yet replaced. What belongs to a
// process that lives is left alone, except this one: it must have nothing open
// here. With `others_too`, nobody else writes here (a lock says so), and what
// has the id of a living process is from before that process.
// Errors: as FileError.
absl::Status RemoveStaleFiles(const std::string& folder,
                              const std::vector<std::string>& names,
                              bool others_too = false);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_ATOMIC_FOLDER_H_
