#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "engine/base/file.h"
#include "engine/config/resolve.h"

namespace zero {

bool ResolveContext::Given(const std::string& path) const {
  return given_.keys.count(path) > 0;
}

bool ResolveContext::IsAuto(const std::string& path) const {
  return given_.autos.count(path) > 0;
}

JsonPlace ResolveContext::Place(const std::string& path) const {
  const auto key = given_.keys.find(path);
  if (key != given_.keys.end()) return key->second.place;
  const auto automatic = given_.autos.find(path);
  if (automatic != given_.autos.end()) return automatic->second;
  std::string parent = path;
  while (true) {
    const auto object = given_.objects.find(parent);
    if (object != given_.objects.end()) return object->second;
    if (parent.empty()) return {};
    const size_t dot = parent.rfind('.');
    parent = dot == std::string::npos ? "" : parent.substr(0, dot);
  }
}

std::string ResolveContext::Origin(const std::string& path) const {
  const JsonPlace place = Place(path);
  const std::string& source = given_.sources[place.source];
  if (place.source == 0) return absl::StrCat(source, ":", place.line);
  return absl::StartsWith(source, "--set ") ? "--set" : source;
}

std::string ResolveContext::Cite(const std::string& path) const {
  if (!Given(path)) return path;
  const JsonPlace place = Place(path);
  return place.source == 0
             ? absl::StrCat(path, " (line ", place.line, ")")
             : absl::StrCat(path, " (", given_.sources[place.source], ")");
}

void ResolveContext::Set(const std::string& path) {
  const auto it = given_.keys.find(path);
  if (it == given_.keys.end()) return;
  FindKey(path)->set(config_, it->second.value);
  loaded_.origins[path] = Origin(path);
}

void ResolveContext::Derived(const std::string& path,
                             absl::string_view formula) {
  loaded_.origins[path] = absl::StrCat("derived: ", formula);
}

std::string ResolveContext::Locate(const std::string& path) const {
  if (absl::StartsWith(path, "/") || Exists(path)) return path;
  const std::string beside =
      absl::StrCat(FolderOf(given_.sources[0]), "/", path);
  return Exists(beside) ? beside : path;
}

std::string ResolveContext::Missing(
    const std::vector<std::string>& files) const {
  const std::string folder = FolderOf(given_.sources[0]);
  const bool several = files.size() > 1;
  const bool globs = absl::c_all_of(files, [](const std::string& file) {
    return file.find_first_of("*?[{") != std::string::npos;
  });
  std::string message =
      absl::StrCat(absl::StrJoin(files, ", ",
                                 [](std::string* out, const std::string& file) {
                                   out->append(JsonQuote(file));
                                 }),
                   globs     ? several ? " match no file" : " matches no file"
                   : several ? " do not exist"
                             : " does not exist");
  const bool relative = absl::c_any_of(files, [](const std::string& file) {
    return !absl::StartsWith(file, "/");
  });
  const bool elsewhere = relative && folder != ".";
  if (elsewhere) {
    absl::StrAppend(&message, ", neither from the current folder nor from ",
                    folder, "/");
  }
  absl::StrAppend(&message, "; correct the name");
  if (elsewhere) {
    absl::StrAppend(&message,
                    ", or start zero in the folder that it is relative to");
  }
  return message;
}

void ResolveContext::Lacking(const std::string& path,
                             const std::string& message) {
  switch (options_.missing_files) {
    case MissingFiles::kError:
      return Problem(path, message);
    case MissingFiles::kCollect:
      loaded_.lacking.push_back(
          absl::StrCat(Origin(path), ": ", path, ": ", message));
      return;
    case MissingFiles::kIgnored:
      return;
  }
}

bool ResolveContext::Exists(const std::string& path) {
  return PathExists(path) || ExpandPaths({path}).ok();
}

}  // namespace zero
