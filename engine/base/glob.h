// Names of files with wildcards.
#ifndef ZERO_ENGINE_BASE_GLOB_H_
#define ZERO_ENGINE_BASE_GLOB_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace zero {

// Files named by `patterns` (files, and globs with *, ?, [ab], {a,b} and ~), in
// the order of the patterns and bytewise sorted within a glob. A file named
// twice counts twice.
// Errors: NotFound with the nearest names when a pattern matches nothing;
//         InvalidArgument for "**", a folder and an empty list.
absl::StatusOr<std::vector<std::string>> ExpandPaths(
    const std::vector<std::string>& patterns);

}  // namespace zero

#endif  // ZERO_ENGINE_BASE_GLOB_H_
