#include <algorithm>
#include <cstdio>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/base/status.h"
#include "engine/config/print.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/product_rate.h"
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
  bool schema = false, keys = false, differences = false;
};

absl::Status ShowConfig(const ConfigFlags& flags) {
  if (flags.schema) {
    absl::PrintF("%s\n", PrintSchema());
  } else if (flags.keys) {
    absl::PrintF("%s\n", PrintKeyReference());
  } else if (flags.differences) {
    absl::PrintF("%s\n", PrintDifferences());
  } else {
    ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                          LoadRunConfig(flags.run, MissingFiles::kNote));
    absl::PrintF("%s\n", PrintResolved(loaded));
    for (const std::string& note : loaded.notes) {
      absl::PrintF("// note: %s\n", note);
    }
  }
  return absl::OkStatus();
}

std::string ProductsText(Device& device) {
  std::string text;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const ProductRate rate = MeasureProductRate(device, dtype);
    absl::StrAppendFormat(&text, "\n      %s products: %.0f GFLOP/s (n = %d)",
                          DTypeName(dtype), rate.flops / 1e9, rate.size);
  }
  return text;
}

std::string GpuText(Device& gpu) {
  const DeviceInfo info = gpu.info();
  const DeviceMemory memory = gpu.memory();
  std::string text = absl::StrFormat(
      "%s, %s, %d SMs, %s (%s free), %s", info.name, info.isa, info.num_threads,
      HumanBytes(static_cast<double>(memory.total_bytes)),
      HumanBytes(static_cast<double>(memory.free_bytes)), info.driver);
  if (info.peak_flops_bf16 > 0) {
    absl::StrAppendFormat(&text,
                          "\n      bf16 peak: %.0f GFLOP/s, the vendor's",
                          info.peak_flops_bf16 / 1e9);
  }
  absl::StrAppend(&text, ProductsText(gpu));
  for (const std::string& note : gpu.notes()) {
    absl::StrAppend(&text, "\n      note: ", note);
  }
  return text;
}

absl::Status Devices(const RunOptions& options) {
  ZERO_ASSIGN_OR_RETURN(const auto cpu, OpenDevice(options));
  const DeviceInfo info = cpu->info();
  absl::PrintF(
      "cpu   %s, %s, %d threads, %s%s\n", info.name, info.isa, info.num_threads,
      HumanBytes(static_cast<double>(info.memory_bytes)), ProductsText(*cpu));
  // Where there is no GPU, why.
  for (int index = 0; index < std::max(NumCudaDevices(), 1); ++index) {
    const auto gpu = MakeCudaDevice(index);
    absl::PrintF("cuda  %s\n", gpu.ok()
                                   ? absl::StrCat(index, ": ", GpuText(**gpu))
                                   : std::string(gpu.status().message()));
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
  app.add_flag("--schema", flags->schema, "print a JSON schema for editors");
  app.add_flag("--keys", flags->keys, "print every key, default and meaning");
  app.add_flag("--differences", flags->differences,
               "print where defaults differ from DeepSpeed's");
  app.parse_complete_callback([flags] {
    if (flags->run.config.empty() && !flags->schema && !flags->keys &&
        !flags->differences) {
      throw CLI::RequiredError("CONFIG, --schema, --keys or --differences");
    }
  });
  return [flags] { return ShowConfig(*flags); };
}

Command AddDevices(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  app.add_option("--threads", options->threads,
                 "compute threads (default: all cores)")
      ->check(CLI::Range(1, 1024));
  return [options] { return Devices(*options); };
}

}  // namespace zero
