// Prints a configuration, and the available keys.
#ifndef ZERO_ENGINE_CONFIG_PRINT_H_
#define ZERO_ENGINE_CONFIG_PRINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/config/load.h"

namespace zero {

// The resolved config as JSON with a // comment that gives each value's
// origin. Loading the text gives the same Config, except an out_dir derived
// from the file's name.
std::string PrintResolved(const LoadedConfig& loaded);

// The same without comments, for out_dir/config.json.
std::string PrintResolvedJson(const Config& config);

// JSON Schema (draft 2020-12) of a config file, for editors.
std::string PrintSchema();

// The keys whose path or meaning contains each word of `pattern`; a word may be
// a shell pattern: path, type and default, meaning. Those whose path contains
// them all come first. Case is ignored. Errors: NotFound, with similar keys.
absl::StatusOr<std::string> PrintKeyReference(absl::string_view pattern = "");

// Defaults and meanings that differ from DeepSpeed's, as a Markdown table.
std::string PrintDifferences();

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_PRINT_H_
