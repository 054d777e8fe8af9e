// A small valid config and short ways to load variants of it.
#ifndef ZERO_TESTS_ENGINE_CONFIG_CONFIG_TESTING_H_
#define ZERO_TESTS_ENGINE_CONFIG_CONFIG_TESTING_H_

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/config/load.h"

namespace zero {

inline constexpr char kSmallConfig[] = R"({
  "model": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
  "data": {"train": "text.txt", "sequence_length": 32},
  "training": {"steps": 20},
  "train_batch_size": 8
})";

inline absl::StatusOr<LoadedConfig> LoadText(
    const std::string& text, std::vector<std::string> overrides = {},
    int world = 1, int ranks_per_host = 0) {
  LoadOptions options;
  options.overrides = std::move(overrides);
  options.world = world;
  options.ranks_per_host = ranks_per_host;
  options.missing_files = MissingFiles::kIgnored;
  return ParseConfig(text, "run.json", options);
}

// The small config with overrides.
inline absl::StatusOr<LoadedConfig> LoadSmall(
    std::vector<std::string> overrides, int world = 1, int ranks_per_host = 0) {
  return LoadText(kSmallConfig, std::move(overrides), world, ranks_per_host);
}

// The message of a config that must not load.
inline std::string ErrorOfText(const std::string& text,
                               std::vector<std::string> overrides = {},
                               int world = 1) {
  const auto loaded = LoadText(text, std::move(overrides), world);
  return loaded.ok() ? "no error" : std::string(loaded.status().message());
}
inline std::string ErrorOfSmall(std::vector<std::string> overrides,
                                int world = 1) {
  return ErrorOfText(kSmallConfig, std::move(overrides), world);
}

}  // namespace zero

#endif  // ZERO_TESTS_ENGINE_CONFIG_CONFIG_TESTING_H_
