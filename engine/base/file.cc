#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

constexpr size_t kPendingBytes = size_t{1} << 20;

struct ErrnoWords {
  int error_number;
  absl::StatusCode code;
  const char* remedy;
};
using enum absl::StatusCode;
constexpr ErrnoWords kErrnoWords[] = {
    {ENOENT, kNotFound, "check the spelling"},
    {ENOTDIR, kInvalidArgument, "a part of the path is a file, not a folder"},
    {EISDIR, kInvalidArgument, "name a file, not a folder"},
    {EACCES, kPermissionDenied,
     "check owner and permissions (ls -l) of it and its folder"},
    {EPERM, kPermissionDenied,
     "check owner and permissions (ls -l) of it and its folder"},
    {EROFS, kPermissionDenied, "choose a writable place"},
    {ENOSPC, kResourceExhausted,
     "free some space (df -h) or choose another folder"},
    {EDQUOT, kResourceExhausted,
     "free some of your quota or choose another folder"},
    {EFBIG, kResourceExhausted, "raise the file size limit (ulimit -f)"},
    {EMFILE, kResourceExhausted, "raise the limit of open files (ulimit -n)"},
    {ENFILE, kResourceExhausted, "raise the limit of open files (ulimit -n)"},
    {ENOMEM, kResourceExhausted,
     "use fewer, larger files or raise vm.max_map_count"},
    {EIO, kDataLoss, "the disk reported an error (dmesg)"},
};

ErrnoWords WordsFor(int error_number) {
  for (const ErrnoWords& words : kErrnoWords) {
    if (words.error_number == error_number) return words;
  }
  return {error_number, kUnknown, "see the system's message"};
}

// The longest parent of `path` that exists.
std::string ExistingParent(std::string path) {
  while (path != "." && path != "/") {
    path = FolderOf(path);
    if (IsFolder(path)) break;
  }
  return path;
}

// Writes everything or sets errno.
bool WriteFully(int fd, const char* data, size_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t written =
        ::pwrite(fd, data, std::min(bytes, size_t{1} << 30), offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    data += written;
    offset += written;
    bytes -= static_cast<size_t>(written);
  }
  return true;
}

// A regular file that is open for reading.
struct OpenFile {
  int fd = -1;
  int64_t size = 0;

  OpenFile() = default;
  OpenFile(const OpenFile&) = delete;
  ~OpenFile() {
    if (fd >= 0) ::close(fd);
  }
  absl::Status Open(const std::string& path) {
    // Non-blocking, so that a FIFO is refused below instead of waited for.
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0 || ::fstat(fd, &info) != 0) {
      return FileError("cannot read", path, errno);
    }
    if (S_ISDIR(info.st_mode)) return FileError("cannot read", path, EISDIR);
    if (!S_ISREG(info.st_mode)) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot read '", path,
                       "': it is a device or a pipe; expected a regular file"));
    }
    size = info.st_size;
    return absl::OkStatus();
  }
};

}  // namespace

absl::Status FileError(absl::string_view action, absl::string_view path,
                       int error_number) {
  const ErrnoWords words = WordsFor(error_number);
  std::string reason = ::strerror(error_number);
  if (!reason.empty()) reason[0] = absl::ascii_tolower(reason[0]);
  std::string remedy = words.remedy;
  if (error_number == ENOENT) {
    const std::string folder = FolderOf(std::string(path));
    if (!IsFolder(folder)) {
      remedy = absl::StrCat("the folder '", folder,
                            "' does not exist (what exists: '",
                            ExistingParent(std::string(path)), "')");
    }
  }
  return absl::Status(words.code, absl::StrCat(action, " '", path,
                                               "': ", reason, "; ", remedy));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  OpenFile file;
  ZERO_RETURN_IF_ERROR(file.Open(path));
  // Read until the end, not `size` bytes: /proc files say 0.
  std::string contents;
  contents.reserve(static_cast<size_t>(file.size) + 1);
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = ::read(file.fd, buffer, sizeof(buffer));
    if (n == 0) return contents;
    if (n > 0) {
      contents.append(buffer, static_cast<size_t>(n));
    } else if (errno != EINTR) {
      return FileError("cannot read", path, errno);
    }
  }
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  ZERO_ASSIGN_OR_RETURN(auto file, AtomicFile::Create(path));
  ZERO_RETURN_IF_ERROR(file->Append(contents.data(), contents.size()));
  return file->Commit();
}

absl::Status RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return FileError("cannot remove", path, errno);
}

absl::Status MakeFolders(const std::string& path) {
  if (path.empty() || IsFolder(path)) return absl::OkStatus();
  const std::string parent = FolderOf(path);
  if (parent != path) ZERO_RETURN_IF_ERROR(MakeFolders(parent));
  std::error_code error;
  std::filesystem::create_directory(path, error);  // or another rank did
  if (!error) return absl::OkStatus();
  if (PathExists(path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot create the folder '", path,
        "': a file of that name exists; remove it or choose another folder"));
  }
  // The parent is there: /proc has folders and lets nobody make one.
  if (error == std::errc::no_such_file_or_directory) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot create the folder '", path, "': no folder can be made in '",
        parent, "'; choose another place"));
  }
  return FileError("cannot create the folder", path, error.value());
}

int64_t FreeDiskBytes(const std::string& path) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(path, error);
  // Some file systems have no number of blocks.
  if (error || space.capacity == 0) return -1;
  return static_cast<int64_t>(space.available);
}

bool PathExists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool IsFolder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

std::string FolderOf(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  const std::string folder =
      std::filesystem::path(path.substr(0, end + 1)).parent_path();
  return folder.empty() ? "." : folder;
}

absl::Status SyncFolder(const std::string& folder) {
  const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) return FileError("cannot open the folder", folder, errno);
  const int result = ::fsync(dir);
  const int error_number = errno;
  ::close(dir);
  // Some network file systems cannot sync a folder and say EINVAL.
  if (result != 0 && error_number != EINVAL) {
    return FileError("cannot sync the folder", folder, error_number);
  }
  return absl::OkStatus();
}

std::string NameBeside(const std::string& path, absl::string_view kind) {
  static std::atomic<int> counter{0};
  return absl::StrCat(path, ".zero-", kind, ".", ::getpid(), ".",
                      counter.fetch_add(1));
}

absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> names;
  std::filesystem::directory_iterator entry(folder, error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    names.push_back(entry->path().filename());
    entry.increment(error);
  }
  if (error) return FileError("cannot list", folder, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(
    const std::string& path) {
  if (IsFolder(path)) return FileError("cannot write", path, EISDIR);
  // A device or a pipe would be replaced by the file, not written to.
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write '", path,
                     "': it is a device, a pipe or a socket, no "
                     "file; give the name of a file"));
  }
  const std::string temp_path = NameBeside(path, "tmp");
  // A file of that name can only be the leavings of a dead process.
  const int fd =
      ::open(temp_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return FileError("cannot write", path, errno);
  return std::unique_ptr<AtomicFile>(new AtomicFile(path, temp_path, fd));
}

AtomicFile::AtomicFile(std::string path, std::string temp_path, int fd)
    : path_(std::move(path)), temp_path_(std::move(temp_path)), fd_(fd) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temp_path_.c_str());
}

absl::Status AtomicFile::Fail(absl::string_view action, int error_number) {
  // Gone at once, so that a full disk has its space back.
  ::close(fd_);
  ::unlink(temp_path_.c_str());
  fd_ = -1;
  return FileError(action, path_, error_number);
}

absl::Status AtomicFile::Flush() {
  if (!WriteFully(fd_, pending_.data(), pending_.size(),
                  size_ - static_cast<int64_t>(pending_.size()))) {
    return Fail("cannot write", errno);
  }
  pending_.clear();
  return absl::OkStatus();
}

absl::Status AtomicFile::Append(const void* data, size_t bytes) {
  ZERO_CHECK(fd_ >= 0) << "AtomicFile: Append to '" << path_
                       << "' after Commit or an error";
  const char* begin = static_cast<const char*>(data);
  if (pending_.size() + bytes > kPendingBytes) {
    ZERO_RETURN_IF_ERROR(Flush());
  }
  if (bytes > kPendingBytes) {
    if (!WriteFully(fd_, begin, bytes, size_)) {
      return Fail("cannot write", errno);
    }
  } else {
    pending_.append(begin, bytes);
  }
  size_ += static_cast<int64_t>(bytes);
  return absl::OkStatus();
}

absl::Status AtomicFile::WriteAt(int64_t offset, const void* data,
                                 size_t bytes) {
  ZERO_CHECK(fd_ >= 0) << "AtomicFile: WriteAt in '" << path_
                       << "' after Commit or an error";
  ZERO_CHECK_GE(offset, 0);
  ZERO_RETURN_IF_ERROR(Flush());
  if (!WriteFully(fd_, static_cast<const char*>(data), bytes, offset)) {
    return Fail("cannot write", errno);
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  ZERO_CHECK(fd_ >= 0) << "AtomicFile: Commit of '" << path_
                       << "' after Commit or an error";
  ZERO_RETURN_IF_ERROR(Flush());
  if (::fsync(fd_) != 0) return Fail("cannot write", errno);
  if (::rename(temp_path_.c_str(), path_.c_str()) != 0) {
    return Fail("cannot rename to", errno);
  }
  const int close_result = ::close(fd_);
  const int close_error = errno;
  fd_ = -1;
  if (close_result != 0) return FileError("cannot close", path_, close_error);
  return SyncFolder(FolderOf(path_));
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  OpenFile file;
  ZERO_RETURN_IF_ERROR(file.Open(path));
  MappedFile mapped;
  if (file.size == 0) return mapped;
  const size_t size = static_cast<size_t>(file.size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) return FileError("cannot map", path, errno);
  mapped.data_ = std::shared_ptr<const uint8_t>(
      static_cast<const uint8_t*>(data),
      [=](const uint8_t*) { ::munmap(data, size); });
  mapped.size_ = file.size;
  return mapped;
}

}  // namespace zero
