#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "engine/base/status.h"
#include "engine/config/json_text.h"
#include "engine/data/token_file.h"
#include "engine/data/tokenizer.h"
#include "kernels/cpu/device.h"
#include "models/catalog.h"
#include "tools/cli/commands.h"

namespace zero {

namespace {

std::string CheckDevice(const std::string& device) {
  if (device == "cpu" || device == "cuda") return "";
  return absl::StrCat("\"", device,
                      "\" is not cpu or cuda; CUDA_VISIBLE_DEVICES chooses the "
                      "GPUs that a run sees");
}

// Suffixes of a size, case-insensitive: powers of 1000 (MB), of 1024 (MiB).
std::map<std::string, double> SizeUnits() {
  std::map<std::string, double> units = {{"b", 1}};
  double thousands = 1, binary = 1;
  for (const char* prefix : {"k", "m", "g", "t"}) {
    thousands *= 1000;
    binary *= 1024;
    units[absl::StrCat(prefix, "b")] = thousands;
    for (const char* rest : {"", "i", "ib"}) {
      units[absl::StrCat(prefix, rest)] = binary;
    }
  }
  return units;
}

}  // namespace

std::string SizeToBytes(std::string& size) {
  static const std::map<std::string, double> units = SizeUnits();
  const auto wrong = [&](const auto&... reason) {
    return absl::StrCat("\"", size, "\" ", reason...,
                        "; want a size such as 80GiB");
  };
  const absl::string_view text = absl::StripAsciiWhitespace(size);
  const size_t end = text.find_last_of("0123456789.") + 1;
  const absl::string_view unit = absl::StripAsciiWhitespace(text.substr(end));
  const absl::string_view number = text.substr(0, end);
  double bytes = 0;
  // SimpleAtod reads "0x10", too.
  if (number.find_first_of("xX") != number.npos ||
      !absl::SimpleAtod(number, &bytes)) {
    return wrong("is not a number with a unit");
  }
  if (bytes <= 0) return wrong("is not more than 0");
  if (unit.empty()) return wrong("has no unit");
  const auto factor = units.find(absl::AsciiStrToLower(unit));
  if (factor == units.end()) {
    return wrong("has an unknown unit, ", unit,
                 ": the units are B, KB, MB, GB, TB, KiB, MiB, GiB and TiB");
  }
  bytes *= factor->second;
  if (bytes < 1) return wrong("is less than one byte");
  if (bytes >= 1e18) return wrong("is too large: the limit is 1000000 TB");
  size = absl::StrCat(static_cast<int64_t>(bytes));
  return "";
}

int AllowedCores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max(CPU_COUNT(&cores), 1);
}

void AddRunOptions(CLI::App& app, RunOptions* options, bool config_required) {
  CLI::Option* config =
      app.add_option("CONFIG", options->config, "JSON config file");
  if (config_required) config->required();
  app.add_option("--set", options->sets,
                 "override keys: --set training.steps=100 bf16.enabled=true")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  app.add_option("--model", options->model_dir,
                 "start from this Hugging Face folder");
  app.add_option("--threads", options->threads,
                 "compute threads of a rank (default: its share of the cores)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--device", options->device, "cpu or cuda")
      ->capture_default_str()
      ->check(CLI::Validator(CheckDevice, ""));
}

void RequireConfigOrModel(CLI::App& app, const RunOptions* options) {
  app.parse_complete_callback([options] {
    if (options->config.empty() && options->model_dir.empty()) {
      throw CLI::RequiredError(
          "CONFIG, or --model DIR with a Hugging Face "
          "folder,");
    }
  });
}

void AddRanksOption(CLI::App& app, RunOptions* options) {
  app.add_option("--ranks", options->ranks,
                 "data-parallel ranks, as threads of this process; on the CPU, "
                 "of each process if mpirun or srun starts several")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
}

void AddHostThreadsOption(CLI::App& app, RunOptions* options) {
  app.add_option(
         "--host-threads", options->host_threads,
         "threads with which a rank's host updates what is offloaded to "
         "it, besides those that compute; changes speed, never results "
         "(default: as many as --threads)")
      ->check(CLI::Range(1, 1024));
}

void AddMemoryOptions(CLI::App& app, RunOptions* options) {
  const auto add = [&](const char* name, double* bytes, const char* doc) {
    app.add_option(name, *bytes, doc)
        ->transform(CLI::Validator(SizeToBytes, ""))
        ->type_name("SIZE");
  };
  add("--device-memory", &options->device_memory,
      "how much of its device's memory a rank may take, such as 80GiB "
      "(default: this device's; on the CPU its share of the machine's)");
  add("--host-memory", &options->host_memory,
      "how much of its host's memory a rank may take for offload (default: its "
      "share of this machine's, with up to 8 ranks on a machine). On the CPU: "
      "besides --device-memory, as if that were another memory");
}

void RefuseRanksOption(CLI::App& app) {
  app.add_option_function<std::string>(
         "--ranks",
         [&app](const std::string& ranks) {
           if (ranks == "1") return;
           throw CLI::ValidationError("--ranks",
                                      app.get_name() +
                                          " runs on one rank; train, plan and "
                                          "memory take several");
         })
      ->group("");
}

absl::StatusOr<LoadedConfig> LoadRunConfig(const RunOptions& options,
                                           MissingFiles missing_files) {
  const std::unique_ptr<ModelCatalog> catalog = MakeModelCatalog();
  LoadOptions load;
  load.overrides = options.sets;
  load.catalog = catalog.get();
  load.tokenizer_ids = [](const std::string& file) -> absl::StatusOr<int64_t> {
    ZERO_ASSIGN_OR_RETURN(const auto tokenizer, OpenTokenizer(file));
    return tokenizer->vocab_size();
  };
  load.model_tokenizer = FindTokenizer;
  load.missing_files = missing_files;
  load.model_dir = options.model_dir;
  load.world = options.ranks;
  load.ranks_per_host = options.ranks_per_host;
  if (!options.config.empty()) return LoadConfig(options.config, load);
  ZERO_ASSIGN_OR_RETURN(const ModelConfig model,
                        catalog->Pretrained(options.model_dir));
  const int64_t context =
      std::min<int64_t>(model.max_position_embeddings, 1024);
  std::string tokenizer = FindTokenizer(options.model_dir);
  if (tokenizer.empty()) {
    tokenizer = model.vocab_size == kByteVocabSize ? "bytes" : "none";
  }
  return ParseConfig(
      absl::StrCat("{\"train_batch_size\": 1, \"training\": {\"steps\": 1}, "
                   "\"data\": {\"tokenizer\": ",
                   JsonQuote(tokenizer), ", \"sequence_length\": ", context,
                   "}}"),
      "--model", load);
}

void NoteStrangeTokenizer(const Tokenizer& tokenizer,
                          const ModelConfig& model) {
  const int64_t vocab_size = model.vocab_size;
  // Vocabularies are padded, but not by a tenth.
  if (tokenizer.vocab_size() >= vocab_size - vocab_size / 10) return;
  absl::FPrintF(stderr,
                "zero: note: tokenizer %s has %d ids, the model %d: is it the "
                "one that the model was trained with?\n",
                tokenizer.name(), tokenizer.vocab_size(), vocab_size);
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(const RunOptions& options,
                                                   int rank,
                                                   const CudaOptions& cuda) {
  // A launcher may have given each process its own cores.
  const int processes =
      options.launch ? std::max(options.launch->local_world, 1) : 1;
  const int cores = std::min(AllowedCores(), get_nprocs() / processes) /
                    std::max(options.ranks_here, 1);
  const int threads =
      options.threads > 0 ? options.threads : std::max(cores, 1);
  if (options.device != "cuda") {
    return cpu::MakeCpuDevice(threads, options.host_threads);
  }
  const int place = options.launch ? options.launch->local_rank : rank;
  return MakeCudaDevice(
      place % std::max(NumCudaDevices(), 1), cuda,
      options.host_threads > 0 ? options.host_threads : threads);
}

}  // namespace zero
