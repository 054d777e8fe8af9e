#include "engine/base/glob.h"

#include <errno.h>
#include <glob.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "engine/base/file.h"
#include "engine/base/nearest.h"
#include "engine/base/status.h"

namespace zero {
namespace {

absl::Status NothingMatches(const std::string& pattern) {
  std::string folder = FolderOf(pattern);
  while (!IsFolder(folder) && folder != "." && folder != "/") {
    folder = FolderOf(folder);
  }
  // What of the pattern lies behind the folder that exists.
  absl::string_view rest = pattern;
  if (folder != ".") absl::ConsumePrefix(&rest, folder);
  absl::ConsumePrefix(&rest, "/");
  const absl::string_view word = rest.substr(0, rest.find('/'));
  ZERO_ASSIGN_OR_RETURN(const auto names, ListFolder(folder));
  const std::vector<std::string> near = NearestNames(word, names, 3);
  return absl::NotFoundError(
      absl::StrCat("'", pattern, "' matches no file; in '", folder, "' ",
                   near.empty() ? "there is nothing of a similar name"
                                : absl::StrCat("the nearest names are: ",
                                               absl::StrJoin(near, ", "))));
}

// Appends what one pattern names.
absl::Status ExpandOne(const std::string& pattern,
                       std::vector<std::string>* paths) {
  if (pattern.empty()) {
    return absl::InvalidArgumentError(
        "an empty file name; name a file or a glob such as data/*.bin");
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
  // Bytewise, whatever the locale, so that the order is the same everywhere.
  std::sort(found.begin(), found.end());
  paths->insert(paths->end(), found.begin(), found.end());
  return absl::OkStatus();
}

}  // namespace

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

}  // namespace zero
