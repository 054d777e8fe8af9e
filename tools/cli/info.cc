#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "models/catalog.h"
#include "models/registry.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"

namespace zero {
namespace {

absl::Status Models(int64_t sequence_length, bool json) {
  const auto catalog = MakeModelCatalog();
  if (!json) {
    absl::PrintF("%-16s %-7s %14s %6s %6s %5s %4s %8s  FLOP/token at T = %d\n",
                 "preset", "family", "parameters", "layers", "width", "heads",
                 "kv", "vocab", sequence_length);
  }
  for (const std::string& name : catalog->PresetNames()) {
    ZERO_ASSIGN_OR_RETURN(const ModelConfig model, catalog->Preset(name));
    const double flops = FlopsPerToken(model, sequence_length);
    if (json) {
      absl::PrintF("%s\n", ToLine({{"preset", name},
                                   {"family", ModelFamilyName(model.family)},
                                   {"parameters", NumParameters(model)},
                                   {"flops_per_token", flops}}));
      continue;
    }
    absl::PrintF(
        "%-16s %-7s %14s %6d %6d %5d %4d %8d  %s\n", name,
        ModelFamilyName(model.family), WithCommas(NumParameters(model)),
        model.num_hidden_layers, model.hidden_size, model.num_attention_heads,
        model.num_key_value_heads, model.vocab_size, HumanCount(flops));
  }
  return absl::OkStatus();
}

struct ConfigFlags {
  RunOptions run;
  bool schema = false, differences = false;
  absl::optional<std::string> keys;  // whose paths contain it
};

absl::Status ShowConfig(const ConfigFlags& flags) {
  if (flags.schema) {
    absl::PrintF("%s\n", PrintSchema());
  } else if (flags.keys.has_value()) {
    const absl::StatusOr<std::string> keys = PrintKeyReference(*flags.keys);
    ZERO_RETURN_IF_ERROR(WithContext("--keys", keys.status()));
    absl::PrintF("%s", *keys);
  } else if (flags.differences) {
    absl::PrintF("%s\n", PrintDifferences());
  } else {
    ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                          LoadRunConfig(flags.run, MissingFiles::kCollect));
    absl::PrintF("%s\n", PrintResolved(loaded));
    for (const std::string& note : loaded.notes) {
      absl::PrintF("// note: %s\n", note);
    }
    for (const std::string& lacking : loaded.lacking) {
      absl::FPrintF(stderr, "zero: warning: a run would not start here: %s\n",
                    lacking);
    }
  }
  return absl::OkStatus();
}

}  // namespace

Command AddModels(CLI::App& app) {
  auto length = std::make_shared<int64_t>(1024);
  auto json = std::make_shared<bool>(false);
  app.add_option("--sequence-length", *length, "T of FLOP per token")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  app.add_flag("--json", *json, "one JSON object per line");
  return [length, json] { return Models(*length, *json); };
}

Command AddConfig(CLI::App& app) {
  auto flags = std::make_shared<ConfigFlags>();
  AddRunOptions(app, &flags->run, /*config_required=*/false);
  AddRanksOption(app, &flags->run);
  app.add_flag("--schema", flags->schema, "print a JSON schema for editors");
  app.add_option_function<std::string>(
         "--keys", [flags](const std::string& text) { flags->keys = text; },
         "print every key, default and meaning, or those whose name or meaning "
         "contains each word of PATTERN (\"*\": any text)")
      ->expected(0, 1)
      ->type_name("[PATTERN]")
      ->trigger_on_parse();
  app.add_flag("--differences", flags->differences,
               "print where defaults differ from DeepSpeed's");
  app.parse_complete_callback([flags] {
    if (flags->run.config.empty() && !flags->schema &&
        !flags->keys.has_value() && !flags->differences) {
      throw CLI::RequiredError("CONFIG, --schema, --keys or --differences");
    }
    if (flags->schema + flags->keys.has_value() + flags->differences > 1) {
      throw CLI::ValidationError("--schema, --keys and --differences",
                                 "print one at a time");
    }
    if (flags->run.config.empty()) return;
    const std::string also =
        absl::StrCat("no config, not ", flags->run.config, " as well");
    if (flags->keys.has_value()) {
      throw CLI::ValidationError("--keys", "takes one PATTERN and " + also);
    }
    if (flags->schema || flags->differences) {
      throw CLI::ValidationError(flags->schema ? "--schema" : "--differences",
                                 "takes " + also);
    }
  });
  return [flags] { return ShowConfig(*flags); };
}

}  // namespace zero
