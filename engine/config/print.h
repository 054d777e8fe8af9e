// Shows a configuration, and the keys that there are.
#ifndef ZERO_ENGINE_CONFIG_PRINT_H_
#define ZERO_ENGINE_CONFIG_PRINT_H_

#include <string>

#include "engine/config/load.h"

namespace zero {

// The resolved config as JSON with a // comment that gives each value's
// origin. Loading the text gives the same Config, but for an out_dir that
// follows from the name of the file.
std::string PrintResolved(const LoadedConfig& loaded);

// The same without comments, for out_dir/config.json.
std::string PrintResolvedJson(const Config& config);

// JSON Schema (draft 2020-12) of a config file, for editors.
std::string PrintSchema();

// Every key in one Markdown table: type, default, meaning.
std::string PrintKeyReference();

// Where a default or a meaning is not DeepSpeed's, as a Markdown table.
std::string PrintDifferences();

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_PRINT_H_
