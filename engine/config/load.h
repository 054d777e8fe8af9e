// Makes a Config from a JSON file: the only way in.
//
// Strict everywhere. Each error is one line
//   FILE:LINE:COLUMN: json.path: what was found, what is wanted; the remedy
// and independent errors are reported together. `--set` stands in the place of
// FILE:LINE:COLUMN where an override is at fault.
#ifndef ZERO_ENGINE_CONFIG_LOAD_H_
#define ZERO_ENGINE_CONFIG_LOAD_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/config/config.h"

namespace zero {

// What it means that a file of the config (data, tokenizer) is not there.
enum class MissingFiles {
  kError,    // a run: data.train is required, too
  kNote,     // `zero config`: says what a run would lack
  kIgnored,  // planners, and commands that read no data
};

struct LoadOptions {
  // "a.b=value", value in JSON or a bare string; later ones win. They count as
  // if they stood in the file.
  std::vector<std::string> overrides;
  // A folder that takes the place of the whole `model` section but dropout
  // (`zero eval CONFIG --model DIR`); empty: none.
  std::string model_dir;
  int world = 1;
  // Of these, how many the launcher started on this host; 0: all.
  int ranks_per_host = 0;
  // Resolves model.preset and model.from_pretrained; may be null, then these
  // keys are errors.
  const ModelCatalog* catalog = nullptr;
  // The number of ids of a tokenizer file, for a model whose vocab_size is not
  // given; null: then that is an error.
  std::function<absl::StatusOr<int64_t>(const std::string&)> tokenizer_ids;
  // The tokenizer's file in a model's folder, for a data.tokenizer that is not
  // given; "": it has none. Null: none has.
  std::function<std::string(const std::string&)> model_tokenizer;
  MissingFiles missing_files = MissingFiles::kError;
};

struct LoadedConfig {
  Config config;
  // JSON path -> "default", "FILE:LINE", "--set", "preset NAME",
  // "DIR/config.json" or "derived: FORMULA".
  std::map<std::string, std::string> origins;
  // Keys that are accepted and ignored, with the reason, and what else the
  // user should know: print them.
  std::vector<std::string> notes;
};

// Reads and resolves `file`.
// Errors: NotFound, InvalidArgument, Unimplemented (a key or value that a
// later version builds), with all lines.
absl::StatusOr<LoadedConfig> LoadConfig(const std::string& file,
                                        const LoadOptions& options);

// The same for text in memory; `file` is its name in errors and origins.
absl::StatusOr<LoadedConfig> ParseConfig(absl::string_view text,
                                         const std::string& file,
                                         const LoadOptions& options);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_LOAD_H_
