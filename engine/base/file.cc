#include "engine/base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <string.h>
#include <sys/file.h>
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
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/base/nearest.h"
#include "engine/base/status.h"
#include "kernels/check.h"

namespace zero {
namespace {

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

absl::Status NothingMatches(const std::string& pattern) {
  const std::string folder = ExistingParent(pattern);
  // The part of the pattern after the existing folder.
  absl::string_view rest = pattern;
  if (folder != ".") absl::ConsumePrefix(&rest, folder);
  absl::ConsumePrefix(&rest, "/");
  const absl::string_view word = rest.substr(0, rest.find('/'));
  ZERO_ASSIGN_OR_RETURN(const auto names, ListFolder(folder));
  const std::vector<std::string> near = NearestNames(word, names, 3);
  return absl::NotFoundError(
      absl::StrCat("'", pattern, "' matches no file; in '", folder, "' ",
                   near.empty() ? "nothing has a similar name"
                                : absl::StrCat("the nearest names are: ",
                                               absl::StrJoin(near, ", "))));
}

// Appends the files of one pattern.
absl::Status ExpandOne(const std::string& pattern,
                       std::vector<std::string>* paths) {
  if (pattern.empty()) {
    return absl::InvalidArgumentError(
        "the file name is empty; name a file or a glob such as data/*.bin");
  }
  // A file whose name has brackets is a file first.
  struct stat info;
  if (::stat(pattern.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", pattern, "' is a folder; name its files, for example '",
          absl::StripSuffix(pattern, "/"), "/*'"));
    }
    paths->push_back(pattern);
    return absl::OkStatus();
  }
  if (errno != ENOENT && errno != ENOTDIR) {
    return FileError("cannot read", pattern, errno);
  }
  if (absl::StrContains(pattern, "**")) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", pattern,
                     "': ** is not supported; name each level, for example "
                     "[\"dir/*.txt\", \"dir/*/*.txt\"]"));
  }
  glob_t matches;
  const int result =
      ::glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE | GLOB_NOSORT, nullptr,
             &matches);
  if (result == GLOB_NOSPACE || result == GLOB_ABORTED) {
    ::globfree(&matches);
    return FileError("cannot expand", pattern,
                     result == GLOB_NOSPACE ? ENOMEM : EIO);
  }
  std::vector<std::string> found;
  for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i) {
    if (!IsFolder(matches.gl_pathv[i])) found.push_back(matches.gl_pathv[i]);
  }
  ::globfree(&matches);
  if (found.empty()) return NothingMatches(pattern);
  // The order is bytewise, whatever the locale, so it is the same everywhere.
  std::sort(found.begin(), found.end());
  paths->insert(paths->end(), found.begin(), found.end());
  return absl::OkStatus();
}

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

absl::Status RemoveTree(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  return error ? FileError("cannot remove", path, error.value())
               : absl::OkStatus();
}

absl::Status MakeFolders(const std::string& path) {
  if (path.empty() || IsFolder(path)) return absl::OkStatus();
  const std::string parent = FolderOf(path);
  if (parent != path) ZERO_RETURN_IF_ERROR(MakeFolders(parent));
  std::error_code error;
  std::filesystem::create_directory(path, error);  // or another rank did
  if (!error) return SyncFolder(parent);
  if (PathExists(path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot create the folder '", path,
        "': a file of that name exists; remove it or choose another folder"));
  }
  // The parent exists: /proc has folders but allows no new ones.
  if (error == std::errc::no_such_file_or_directory) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot create the folder '", path, "': no folder can be created in '",
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

std::string FollowLink(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const std::filesystem::path to = std::filesystem::canonical(path, error);
  return error ? path : to.string();
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

absl::StatusOr<std::shared_ptr<void>> LockFolder(const std::string& folder) {
  // The lock is on a file: network file systems lock a file for all hosts, and
  // a folder for only one.
  const std::string path = folder + "/" + kLockFile;
  while (true) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return FileError("cannot write", path, errno);
    std::shared_ptr<void> lock(new int(fd), [](int* held) {
      ::close(*held);
      delete held;
    });
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      switch (errno) {
        case EWOULDBLOCK:
          return absl::FailedPreconditionError(
              absl::StrCat("another run is writing to '", folder,
                           "'; wait until it ends, or choose another folder"));
        case EINVAL:
        case ENOLCK:
        case ENOSYS:
        case EOPNOTSUPP:
          ::unlink(path.c_str());
          return std::shared_ptr<void>();
        default:
          return FileError("cannot lock", path, errno);
      }
    }
    // The previous owner may have removed the file in between.
    struct stat mine = {}, there = {};
    if (::fstat(fd, &mine) != 0) return FileError("cannot lock", path, errno);
    if (::stat(path.c_str(), &there) != 0 || mine.st_ino != there.st_ino ||
        mine.st_dev != there.st_dev) {
      continue;
    }
    return std::shared_ptr<void>(
        lock.get(), [lock, path](void*) { ::unlink(path.c_str()); });
  }
}

absl::Status SyncFile(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileError("cannot open", path, errno);
  const int result = ::fsync(fd);
  const int error_number = errno;
  ::close(fd);
  return result == 0 ? absl::OkStatus()
                     : FileError("cannot sync", path, error_number);
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

std::string FreeName(const std::string& path) {
  std::string name = path;
  for (int i = 2; PathExists(name); ++i) name = absl::StrCat(path, ".", i);
  return name;
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

absl::StatusOr<std::vector<std::string>> ExpandPaths(
    const std::vector<std::string>& patterns) {
  if (patterns.empty()) {
    return absl::InvalidArgumentError(
        "no data files; name at least one file or glob");
  }
  std::vector<std::string> paths;
  for (const std::string& pattern : patterns) {
    ZERO_RETURN_IF_ERROR(ExpandOne(pattern, &paths));
  }
  return paths;
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(
    const std::string& path) {
  if (IsFolder(path)) return FileError("cannot write", path, EISDIR);
  // A device or a pipe would be replaced by the file, not written to.
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot write '", path,
                     "': it is a device, a pipe or a socket, not a file; name "
                     "a regular file"));
  }
  const std::string temp_path = NameBeside(path, "tmp");
  // A file of that name can only be a dead process's.
  std::FILE* const file = std::fopen(temp_path.c_str(), "we");
  if (file == nullptr) return FileError("cannot write", path, errno);
  // The buffer is large: on network file systems every write is a request.
  std::setvbuf(file, nullptr, _IOFBF, size_t{1} << 20);
  return std::unique_ptr<AtomicFile>(new AtomicFile(path, temp_path, file));
}

AtomicFile::~AtomicFile() {
  if (file_ != nullptr) Fail("").IgnoreError();
}

absl::Status AtomicFile::Fail(absl::string_view action) {
  const int error_number = errno;
  // The file goes at once, so that a full disk has its space back.
  std::fclose(file_);
  ::unlink(temp_path_.c_str());
  file_ = nullptr;
  return FileError(action, path_, error_number);
}

absl::Status AtomicFile::Append(const void* data, size_t bytes) {
  ZERO_CHECK(file_ != nullptr)
      << "AtomicFile: Append to '" << path_ << "' after Commit or an error";
  if (std::fwrite(data, 1, bytes, file_) != bytes) return Fail("cannot write");
  size_ += static_cast<int64_t>(bytes);
  return absl::OkStatus();
}

absl::Status AtomicFile::WriteAt(int64_t offset, const void* data,
                                 size_t bytes) {
  ZERO_CHECK(file_ != nullptr)
      << "AtomicFile: WriteAt in '" << path_ << "' after Commit or an error";
  ZERO_CHECK_GE(offset, 0);
  const bool written = ::fseeko(file_, offset, SEEK_SET) == 0 &&
                       std::fwrite(data, 1, bytes, file_) == bytes &&
                       ::fseeko(file_, size_, SEEK_SET) == 0;
  return written ? absl::OkStatus() : Fail("cannot write");
}

absl::Status AtomicFile::Commit() {
  ZERO_CHECK(file_ != nullptr)
      << "AtomicFile: Commit of '" << path_ << "' after Commit or an error";
  if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0) {
    return Fail("cannot write");
  }
  if (::rename(temp_path_.c_str(), path_.c_str()) != 0) {
    return Fail("cannot rename to");
  }
  if (std::fclose(std::exchange(file_, nullptr)) != 0) {
    return FileError("cannot close", path_, errno);
  }
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

absl::StatusOr<std::shared_ptr<const ReadableFile>> ReadableFile::Open(
    const std::string& path) {
  OpenFile file;
  ZERO_RETURN_IF_ERROR(file.Open(path));
  return std::shared_ptr<const ReadableFile>(
      new ReadableFile(path, std::exchange(file.fd, -1), file.size));
}

ReadableFile::~ReadableFile() { ::close(fd_); }

absl::Status ReadableFile::ReadAt(int64_t offset, void* data,
                                  int64_t bytes) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, to, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError("cannot read", path_, errno);
    if (n == 0) {
      return absl::DataLossError(
          absl::StrCat("'", path_, "': it ends at byte ", offset, ", ", bytes,
                       " more were expected: truncated"));
    }
    to += n;
    offset += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

}  // namespace zero
