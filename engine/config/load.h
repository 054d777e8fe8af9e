// Makes a Config from a JSON file: the only way in.
//
// Strict everywhere. Each error is one line
//   FILE:LINE:COLUMN: json.path: what was found, what is wanted; the remedy
// and independent errors are reported together. If an override is at fault, the
// line begins with `--set json.path`, or `--set:` if several may be.
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

// How a missing file that the config names (data, tokenizer) is treated.
enum class MissingFiles {
  kError,    // a run: data.train is required as well
  kCollect,  // `zero config`: LoadedConfig::lacking
  kIgnored,  // planners, and commands that read no data
};

struct LoadOptions {
  // "a.b=value", value in JSON or a bare string; later ones win. They count as
  // part of the file.
  std::vector<std::string> overrides;
  // A folder that replaces the whole `model` section except dropout (`zero eval
  // CONFIG --model DIR`); empty: none.
  std::string model_dir;
  int world = 1;
  // How many of these the launcher started on this host; 0: all.
  int ranks_per_host = 0;
  // Resolves model.preset and model.from_pretrained; null: these keys are
  // errors.
  const ModelCatalog* catalog = nullptr;
  // Returns the number of ids of a tokenizer file, for a model without
  // vocab_size. Null: a model without vocab_size is an error.
  std::function<absl::StatusOr<int64_t>(const std::string&)> tokenizer_ids;
  // The tokenizer's file in a model's folder, if data.tokenizer is not given;
  // "": it has none. Null: no folder has one.
  std::function<std::string(const std::string&)> model_tokenizer;
  MissingFiles missing_files = MissingFiles::kError;
};

struct LoadedConfig {
  Config config;
  // JSON path -> "default", "FILE:LINE", "--set", "preset NAME",
  // "DIR/config.json" or "derived: FORMULA".
  std::map<std::string, std::string> origins;
  // Whether --set has this key.
  bool IsSet(const std::string& path) const {
    const auto origin = origins.find(path);
    return origin != origins.end() && origin->second == "--set";
  }
  // Lines to print: accepted and ignored keys, with the reason, and other
  // remarks.
  std::vector<std::string> notes;
  // Why a run would not start here. Filled only with MissingFiles::kCollect.
  std::vector<std::string> lacking;
};

// Reads and resolves `file`.
// Errors: NotFound, InvalidArgument, Unimplemented (a key or value not built
//         yet), with all lines.
absl::StatusOr<LoadedConfig> LoadConfig(const std::string& file,
                                        const LoadOptions& options);

// The same for text in memory; `file` is its name in errors and origins.
absl::StatusOr<LoadedConfig> ParseConfig(absl::string_view text,
                                         const std::string& file,
                                         const LoadOptions& options);

}  // namespace zero

#endif  // ZERO_ENGINE_CONFIG_LOAD_H_
