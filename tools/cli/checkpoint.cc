// `zero checkpoint`: list, verify, compare and export what runs saved.
#include "engine/checkpoint/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/checkpoint/checkpoint_json.h"
#include "engine/checkpoint/portable.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/data/tokenizer.h"
#include "engine/train/console.h"
#include "engine/train/metrics.h"
#include "engine/train/run_folder.h"
#include "models/catalog.h"
#include "models/hf_config.h"
#include "models/registry.h"
#include "nlohmann/json.hpp"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"

namespace zero {
namespace {

using Json = nlohmann::ordered_json;

std::string WithoutSlash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// `dir` if it is a folder of checkpoints, else checkpoints/ in the run's `dir`.
std::string CheckpointsOf(const std::string& dir) {
  const std::string below = dir + "/checkpoints";
  return IsFolder(below) ? below : dir;
}

constexpr char kWanted[] =
    "; name a checkpoint, such as OUT_DIR/checkpoints/step-00001000, or a "
    "run's training.out_dir";

absl::Status CheckIsFolder(const std::string& given) {
  if (IsFolder(given)) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(
      "'", given, "' ",
      PathExists(given) ? "is not a folder" : "does not exist", kWanted));
}

absl::Status NoCheckpoint(const std::string& dir) {
  const std::string weights = dir + "/final";
  return absl::NotFoundError(absl::StrCat(
      NoCheckpointIn(dir),
      HoldsModel(weights) ? absl::StrCat("; the run's weights are ", weights)
                          : kWanted));
}

// The checkpoint that `dir` is, or those of a run or a folder of checkpoints,
// oldest first.
absl::StatusOr<std::vector<std::string>> CheckpointsAt(const std::string& dir) {
  ZERO_RETURN_IF_ERROR(CheckIsFolder(dir));
  std::vector<std::string> paths = ListCheckpoints(CheckpointsOf(dir));
  // A checkpoint without its manifest is a damaged one.
  const bool has_the_name =
      absl::StartsWith(dir.substr(dir.rfind('/') + 1), "step-");
  if (PathExists(dir + "/checkpoint.json") || (paths.empty() && has_the_name)) {
    return std::vector<std::string>{dir};
  }
  if (paths.empty()) return NoCheckpoint(dir);
  return paths;
}

// The checkpoint named directly or by `latest`, or else the newest of a run.
// Prints on stderr which one, and why not a newer one.
absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenCheckpoint(
    const std::string& given) {
  std::string path = WithoutSlash(given);
  if (absl::EndsWith(path, "/latest") && !IsFolder(path)) path = FolderOf(path);
  ZERO_ASSIGN_OR_RETURN(const auto paths, CheckpointsAt(path));
  if (paths.front() == path) return CheckpointReader::Open(path);
  ZERO_ASSIGN_OR_RETURN(FoundCheckpoint found,
                        FindNewestCheckpoint(FolderOf(paths.front())));
  for (const std::string& note : found.notes) {
    absl::FPrintF(stderr, "zero: note: %s\n", note);
  }
  absl::FPrintF(stderr, "zero: note: this is %s\n", found.path);
  return std::move(found.reader);
}

int64_t FileBytes(const CheckpointReader& reader) {
  int64_t bytes = 0;
  for (const CheckpointPart& part : reader.parts()) bytes += part.file_bytes;
  return bytes;
}

std::string BytesText(int64_t bytes) {
  return HumanBytes(static_cast<double>(bytes));
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// ---- list -------------------------------------------------------------------

absl::Status List(const std::string& dir, bool json) {
  ZERO_RETURN_IF_ERROR(CheckIsFolder(dir));
  const std::string checkpoints = CheckpointsOf(WithoutSlash(dir));
  std::vector<std::string> paths = ListCheckpoints(checkpoints);
  ZERO_ASSIGN_OR_RETURN(const auto names, ListFolder(checkpoints));
  for (const std::string& name : names) {
    if (absl::StartsWith(name, "step-") && absl::StrContains(name, '.')) {
      paths.push_back(absl::StrCat(checkpoints, "/", name));
    }
  }
  if (paths.empty()) return NoCheckpoint(WithoutSlash(dir));
  const auto name_of = [](const std::string& path) {
    return path.substr(path.rfind('/') + 1);
  };
  size_t width = 24;
  for (const std::string& path : paths) {
    width = std::max(width, name_of(path).size());
  }
  const auto print_row = [&](const std::string& name, const std::string& step,
                             const std::string& samples,
                             const std::string& date, const std::string& size,
                             const std::string& complete) {
    absl::PrintF("%-*s %10s %12s %-20s %10s  %s\n", static_cast<int>(width),
                 name, step, samples, date, size, complete);
  };
  if (!json) {
    print_row("checkpoint", "step", "samples", "date", "size", "complete");
  }
  for (const std::string& path : paths) {
    const std::string name = name_of(path);
    std::string problem;
    if (absl::EndsWith(name, ".partial")) {
      problem = "is being written, or was left by a crash";
    } else if (absl::StrContains(name, '.')) {
      problem = "was set aside: no run resumes from it on its own";
    }
    std::unique_ptr<CheckpointReader> reader;
    if (problem.empty()) {
      auto opened = CheckpointReader::Open(path);
      if (opened.ok()) reader = *std::move(opened);
      problem = std::string(opened.status().message());
    }
    Json line = {{"path", path}, {"complete", reader != nullptr}};
    if (reader != nullptr) {
      line["step"] = reader->manifest().step;
      line["samples"] = reader->manifest().samples;
      line["date"] = reader->manifest().date;
      line["bytes"] = FileBytes(*reader);
      line["run"] = reader->manifest().run;
    } else {
      line["problem"] = problem;
    }
    if (json) {
      absl::PrintF("%s\n", ToLine(line));
    } else if (reader == nullptr) {
      print_row(name, "-", "-", "-", "-", "no: " + problem);
    } else {
      print_row(name, absl::StrCat(reader->manifest().step),
                absl::StrCat(reader->manifest().samples),
                reader->manifest().date, BytesText(FileBytes(*reader)), "yes");
    }
  }
  return absl::OkStatus();
}

// ---- show -------------------------------------------------------------------

// For each state: how many parameters have it, their elements and bytes.
Json StatesOf(const CheckpointReader& reader) {
  Json states = Json::array();
  for (const std::string& state : reader.states()) {
    int64_t num_parameters = 0, elems = 0, bytes = 0;
    std::set<std::string> dtypes;
    for (const auto& [name, shape] : reader.manifest().parameters) {
      const auto dtype = reader.dtype(state, name);
      if (!dtype.has_value()) continue;
      ++num_parameters;
      elems += *ElementsOf(shape);
      bytes += *ElementsOf(shape) * static_cast<int64_t>(DTypeBytes(*dtype));
      dtypes.insert(DTypeName(*dtype));
    }
    states.push_back({{"state", state},
                      {"dtype", absl::StrJoin(dtypes, ", ")},
                      {"parameters", num_parameters},
                      {"elements", elems},
                      {"bytes", bytes}});
  }
  return states;
}

Json ShowJson(const CheckpointReader& reader) {
  const CheckpointManifest& manifest = reader.manifest();
  Json parts = Json::array(), parameters = Json::object();
  for (const CheckpointPart& part : reader.parts()) {
    parts.push_back({{"file", part.file},
                     {"ranges", part.ranges.size()},
                     {"bytes", part.file_bytes}});
  }
  for (const auto& [name, shape] : manifest.parameters) {
    Json states = Json::array();
    for (const std::string& state : reader.states()) {
      if (reader.Has(state, name)) states.push_back(state);
    }
    parameters[name] = {{"shape", shape}, {"states", states}};
  }
  return {{"path", reader.folder()},
          {"step", manifest.step},
          {"samples", manifest.samples},
          {"date", manifest.date},
          {"run", manifest.run},
          {"save", manifest.save},
          {"bytes", FileBytes(reader)},
          {"states", StatesOf(reader)},
          {"parts", parts},
          {"parameters", parameters},
          {"progress", manifest.progress},
          {"config", manifest.config}};
}

absl::Status Show(const std::string& path, bool as_json) {
  ZERO_ASSIGN_OR_RETURN(const auto reader, OpenCheckpoint(path));
  const Json json = ShowJson(*reader);
  if (as_json) {
    absl::PrintF("%s\n", ToLine(json));
    return absl::OkStatus();
  }
  const CheckpointManifest& manifest = reader->manifest();
  Console console(stdout, /*is_terminal=*/false);
  std::vector<std::pair<std::string, std::string>> rows = {
      {"step", WithCommas(manifest.step)},
      {"samples", WithCommas(manifest.samples)},
      {"date", manifest.date},
      {"run", manifest.run},
      {"save", manifest.save},
      {"size", BytesText(FileBytes(*reader))}};
  for (const auto& [key, value] : Flatten(manifest.progress)) {
    rows.emplace_back("progress." + key, value.dump());
  }
  console.Table(reader->folder(), rows);
  rows.clear();
  for (const Json& state : json["states"]) {
    rows.emplace_back(
        state["state"].get<std::string>(),
        absl::StrCat(state["dtype"].get<std::string>(), ", ",
                     WithCommas(state["elements"].get<int64_t>()), " in ",
                     Counted(state["parameters"].get<int64_t>(), "parameter"),
                     ", ", BytesText(state["bytes"].get<int64_t>())));
  }
  console.Table("states", rows);
  rows.clear();
  for (const auto& [name, shape] : manifest.parameters) {
    std::vector<std::string> states;
    for (const Json& state : json["parameters"][name]["states"]) {
      states.push_back(state.get<std::string>());
    }
    rows.emplace_back(
        name, absl::StrCat(ShapeText(shape), "  ", absl::StrJoin(states, " ")));
  }
  console.Table("parameters", rows);
  rows.clear();
  for (const CheckpointPart& part : reader->parts()) {
    rows.emplace_back(part.file.substr(part.file.rfind('/') + 1),
                      absl::StrCat(Counted(part.ranges.size(), "range"), ", ",
                                   BytesText(part.file_bytes)));
  }
  console.Table("parts", rows);
  return absl::OkStatus();
}

// ---- verify -----------------------------------------------------------------

// Prints one line for each damaged file, or that there is none.
bool VerifyOne(const std::string& path) {
  const auto reader = CheckpointReader::Open(path);
  if (!reader.ok()) {
    absl::PrintF("%s: %s\n", path, reader.status().message());
    return false;
  }
  bool right = true;
  for (size_t part = 0; part < (*reader)->parts().size(); ++part) {
    const absl::Status status = (*reader)->VerifyPart(part);
    if (status.ok()) continue;
    absl::PrintF("%s: %s\n", path, status.message());
    right = false;
  }
  if (right) {
    absl::PrintF("%s: %s, %s, all as written\n", path,
                 Counted((*reader)->parts().size(), "part"),
                 BytesText(FileBytes(**reader)));
  }
  return right;
}

absl::Status Verify(const std::vector<std::string>& given) {
  std::vector<std::string> paths;
  for (const std::string& one : given) {
    ZERO_ASSIGN_OR_RETURN(const auto named, CheckpointsAt(WithoutSlash(one)));
    paths.insert(paths.end(), named.begin(), named.end());
  }
  size_t num_damaged = 0;
  for (const std::string& path : paths) {
    if (!VerifyOne(path)) ++num_damaged;
  }
  if (num_damaged == 0) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(num_damaged, " of ", Counted(paths.size(), "checkpoint"),
                   num_damaged == 1 ? " is damaged" : " are damaged"));
}

// ---- diff -------------------------------------------------------------------

std::string ValueText(DType dtype, const char* bytes) {
  const auto as = [&](auto value) {
    std::memcpy(&value, bytes, sizeof(value));
    return value;
  };
  switch (dtype) {
    case DType::kF32:
      return absl::StrFormat("%.9g (0x%08x)", as(0.0f), as(uint32_t{0}));
    case DType::kF64:
      return absl::StrFormat("%.17g (0x%016x)", as(0.0), as(uint64_t{0}));
    case DType::kBF16:
      return absl::StrFormat("%.4g (0x%04x)", BF16ToF32(as(uint16_t{0})),
                             as(uint16_t{0}));
    case DType::kF16:
      return absl::StrFormat("%.5g (0x%04x)", F16ToF32(as(uint16_t{0})),
                             as(uint16_t{0}));
    case DType::kI32:
      return absl::StrCat(as(int32_t{0}));
    case DType::kI64:
      return absl::StrCat(as(int64_t{0}));
    case DType::kU16:
      return absl::StrCat(as(uint16_t{0}));
    case DType::kU8:
      return absl::StrCat(as(uint8_t{0}));
  }
  return "?";
}

struct StateDifferences {
  int64_t states = 0, elems = 0;  // compared
  int64_t different_states = 0, different_elems = 0;
  std::string first;
  // What differs, each with its number of elements: kWhole if the states cannot
  // be compared by element.
  std::vector<std::pair<int64_t, std::string>> lines;
  static constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

  void Add(int64_t elems, const std::string& what, const std::string& line) {
    if (different_states++ == 0) first = what;
    lines.emplace_back(elems, line);
  }
};

// The states with the most different elements first.
void PrintMostDifferent(StateDifferences differences, bool all) {
  constexpr size_t kMost = 10;
  auto& lines = differences.lines;
  std::stable_sort(
      lines.begin(), lines.end(),
      [](const auto& a, const auto& b) { return a.first > b.first; });
  const size_t shown = all ? lines.size() : std::min(lines.size(), kMost);
  for (size_t i = 0; i < shown; ++i) absl::PrintF("%s\n", lines[i].second);
  if (shown == lines.size()) return;
  absl::PrintF("... and %s more; --all prints them\n",
               WithCommas(lines.size() - shown));
}

// Compares a state of a parameter that both checkpoints have, with the same
// type and shape.
absl::Status DiffState(const CheckpointReader& a, const CheckpointReader& b,
                       const std::string& state, const std::string& name,
                       StateDifferences* differences) {
  const DType dtype = *a.dtype(state, name);
  const int64_t item = static_cast<int64_t>(DTypeBytes(dtype));
  const int64_t elems = *ElementsOf(a.manifest().parameters.at(name));
  const int64_t chunk = kCheckpointBlockBytes / item;
  std::string of_a(chunk * item, '\0'), of_b(chunk * item, '\0');
  int64_t first = -1, num_different = 0;
  std::string values;
  for (int64_t begin = 0; begin < elems; begin += chunk) {
    const int64_t n = std::min(chunk, elems - begin);
    ZERO_RETURN_IF_ERROR(a.Read(state, name, begin, n, of_a.data()));
    ZERO_RETURN_IF_ERROR(b.Read(state, name, begin, n, of_b.data()));
    if (std::memcmp(of_a.data(), of_b.data(), n * item) == 0) continue;
    for (int64_t i = 0; i < n; ++i) {
      const char* one = of_a.data() + i * item;
      const char* other = of_b.data() + i * item;
      if (std::memcmp(one, other, item) == 0) continue;
      ++num_different;
      if (first >= 0) continue;
      first = begin + i;
      values =
          absl::StrCat(ValueText(dtype, one), " and ", ValueText(dtype, other));
    }
  }
  differences->elems += elems;
  differences->different_elems += num_different;
  if (first < 0) return absl::OkStatus();
  differences->Add(
      num_different,
      absl::StrCat(state, " of ", name, ", element ", first, ": ", values),
      absl::StrFormat("%s of %s: %s of %s elements differ, first %d: %s", state,
                      name, WithCommas(num_different), WithCommas(elems), first,
                      values));
  return absl::OkStatus();
}

// Compares every state of every parameter.
absl::Status DiffStates(const CheckpointReader& a, const CheckpointReader& b,
                        StateDifferences* differences) {
  const auto &of_a = a.manifest().parameters, &of_b = b.manifest().parameters;
  std::set<std::string> states, names;
  for (const CheckpointReader* reader : {&a, &b}) {
    for (const std::string& state : reader->states()) states.insert(state);
    for (const auto& [name, shape] : reader->manifest().parameters) {
      names.insert(name);
    }
  }
  for (const std::string& state : states) {
    for (const std::string& name : names) {
      const auto dtype_a = a.dtype(state, name), dtype_b = b.dtype(state, name);
      if (!dtype_a && !dtype_b) continue;
      ++differences->states;
      std::string what;
      if (!dtype_a || !dtype_b) {
        what = absl::StrCat("only in ", (dtype_a ? a : b).folder());
      } else if (of_a.at(name) != of_b.at(name)) {
        what = absl::StrCat("its shape is ", ShapeText(of_a.at(name)), " and ",
                            ShapeText(of_b.at(name)));
      } else if (*dtype_a != *dtype_b) {
        what = absl::StrCat("stored as ", DTypeName(*dtype_a), " and ",
                            DTypeName(*dtype_b));
      }
      if (what.empty()) {
        ZERO_RETURN_IF_ERROR(DiffState(a, b, state, name, differences));
      } else {
        what = absl::StrCat(state, " of ", name, ": ", what);
        differences->Add(StateDifferences::kWhole, what, what);
      }
    }
  }
  return absl::OkStatus();
}

// The difference in words; none if they are equal.
absl::StatusOr<absl::optional<std::string>> DifferenceOf(
    const std::string& path_a, const std::string& path_b, bool all) {
  ZERO_ASSIGN_OR_RETURN(const auto a, OpenCheckpoint(path_a));
  ZERO_ASSIGN_OR_RETURN(const auto b, OpenCheckpoint(path_b));
  const CheckpointManifest &of_a = a->manifest(), &of_b = b->manifest();
  if (of_a.step != of_b.step) {
    absl::PrintF("step: %d and %d\n", of_a.step, of_b.step);
  }
  if (of_a.samples != of_b.samples) {
    absl::PrintF("samples: %d and %d\n", of_a.samples, of_b.samples);
  }
  for (const JsonDifference& one : Differences(of_a.config, of_b.config)) {
    absl::PrintF("config %s: %s and %s\n", one.name, one.a, one.b);
  }
  StateDifferences differences;
  const absl::Status read = DiffStates(*a, *b, &differences);
  // Of a damaged checkpoint, what differs before the damage.
  PrintMostDifferent(differences, all);
  ZERO_RETURN_IF_ERROR(read);
  if (differences.different_states == 0) {
    absl::PrintF("equal: %s states of parameters, %s elements\n",
                 WithCommas(differences.states), WithCommas(differences.elems));
    return absl::optional<std::string>();
  }
  return absl::optional<std::string>(absl::StrFormat(
      "%s of %s states of parameters and %s of %s elements differ, first %s",
      WithCommas(differences.different_states), WithCommas(differences.states),
      WithCommas(differences.different_elems), WithCommas(differences.elems),
      differences.first));
}

// Exit status as diff(1): 1 if they differ, 2 if they cannot be compared.
absl::Status Diff(const std::string& path_a, const std::string& path_b,
                  bool all) {
  const auto difference = DifferenceOf(path_a, path_b, all);
  if (!difference.ok()) return WithExitCode(difference.status(), 2);
  return difference->has_value() ? absl::FailedPreconditionError(**difference)
                                 : absl::OkStatus();
}

// ---- export -----------------------------------------------------------------

// The model of a run's resolved config.
absl::StatusOr<ModelConfig> ModelOf(const CheckpointReader& reader) {
  const Json& config = reader.manifest().config;
  if (!config.is_object() || !config.contains("model") ||
      !config["model"].is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", reader.folder(), "': its config has no model"));
  }
  // All keys are present, and their sources may be gone.
  Json model = config["model"];
  const Json base = model.value("from_pretrained", Json());
  model.erase("preset");
  model.erase("from_pretrained");
  const Json alone = {
      {"model", model},
      {"train_batch_size", 1},
      {"training", {{"steps", 1}}},
      {"data", {{"tokenizer", "none"}, {"sequence_length", 1}}}};
  const auto catalog = MakeModelCatalog();
  LoadOptions load;
  load.catalog = catalog.get();
  load.missing_files = MissingFiles::kIgnored;
  ZERO_ASSIGN_OR_RETURN(
      const LoadedConfig loaded,
      ParseConfig(alone.dump(), reader.folder() + "/checkpoint.json", load));
  ModelConfig parsed = loaded.config.model;
  if (base.is_string()) parsed.from_pretrained = base.get<std::string>();
  return parsed;
}

bool IsEnabled(const Json& config, const char* section) {
  const auto it = config.find(section);
  return it != config.end() && it->is_object() && it->contains("enabled") &&
         (*it)["enabled"] == true;
}

// The tokenizer of the run; null if unknown.
std::unique_ptr<Tokenizer> TokenizerOf(const Json& config) {
  const auto data = config.find("data");
  if (data == config.end() || !data->is_object()) return nullptr;
  const auto name = data->find("tokenizer");
  if (name == data->end() || !name->is_string() || *name == "none") {
    return nullptr;
  }
  auto tokenizer = OpenTokenizer(name->get<std::string>());
  if (tokenizer.ok()) return *std::move(tokenizer);
  absl::FPrintF(stderr,
                "zero: note: the folder has no tokenizer, and its config.json "
                "no eos_token_id: %s\n",
                tokenizer.status().message());
  return nullptr;
}

absl::Status CheckParameters(const CheckpointReader& reader,
                             const Model& model) {
  for (const Parameter* parameter : model.AllParameters()) {
    const std::vector<int64_t> shape = parameter->shape.dims();
    const auto& parameters = reader.manifest().parameters;
    const auto it = parameters.find(parameter->name);
    const bool is_float = it != parameters.end() &&
                          IsFloat(*reader.dtype("weight", parameter->name));
    if (!is_float || it->second != shape) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", reader.folder(), "': the model of its config has a parameter ",
          parameter->name, " ", ShapeText(shape), ", the checkpoint ",
          it == parameters.end() ? "has none"
                                 : "has it as " + ShapeText(it->second)));
    }
  }
  return absl::OkStatus();
}

// Passes a whole parameter to the writer, as in final/: the parameter itself if
// masters are rounded stochastically.
absl::Status ExportParameter(const CheckpointReader& reader,
                             const Parameter& parameter, DType dtype,
                             PortableWriter* writer) {
  const char* const state =
      reader.dtype("rounded", parameter.name) == dtype ? "rounded" : "weight";
  StoredTensor stored;
  stored.dtype = *reader.dtype(state, parameter.name);
  const int64_t item = static_cast<int64_t>(DTypeBytes(stored.dtype));
  const int64_t elems = parameter.shape.num_elems();
  const int64_t chunk = kCheckpointBlockBytes / item;
  std::vector<float> values;
  std::string bytes;
  for (int64_t begin = 0; begin < elems; begin += chunk) {
    const int64_t n = std::min(chunk, elems - begin);
    bytes.resize(n * item);
    values.resize(n);
    ZERO_RETURN_IF_ERROR(
        reader.Read(state, parameter.name, begin, n, bytes.data()));
    stored.num_elements = n;
    stored.data = reinterpret_cast<const uint8_t*>(bytes.data());
    ReadAsF32(stored, 0, n, values.data());
    writer->Write(parameter, begin, values);
  }
  return absl::OkStatus();
}

// Calls work(i) for all of [0, size), with a thread per core at most. The first
// error, by i.
absl::Status InParallel(size_t size,
                        const std::function<absl::Status(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::vector<absl::Status> results(size);
  const auto take = [&] {
    for (size_t i; (i = next.fetch_add(1)) < size;) {
      results[i] = CatchExceptions([&] { return work(i); });
    }
  };
  std::vector<std::thread> helpers;
  const size_t num_threads =
      std::min<size_t>(size, std::thread::hardware_concurrency());
  for (size_t i = 1; i < num_threads; ++i) helpers.emplace_back(take);
  take();
  for (std::thread& helper : helpers) helper.join();
  for (const absl::Status& result : results) ZERO_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

// The writer replaces the folder as a whole: a run's metrics, checkpoints and
// lock would go with it.
absl::Status CheckMayBeReplaced(const std::string& dir) {
  if (!PathExists(dir)) return absl::OkStatus();
  for (const char* name :
       {"metrics.jsonl", "checkpoints", "checkpoint.json", "latest"}) {
    if (!PathExists(absl::StrCat(dir, "/", name))) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("'", dir, "' is a run's folder (it has ", name,
                     "), and the weights would replace it; name another"));
  }
  ZERO_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListFolder(dir));
  if (names.empty() || HoldsModel(dir)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "'", dir, "' is neither empty nor a model (it has ", names.front(),
      "), and the weights would replace it; name another"));
}

absl::Status Export(const std::string& path, const std::string& dir,
                    const std::string& dtype_name, int64_t max_shard_bytes) {
  if (dir.empty()) return absl::InvalidArgumentError("DIR: it is empty");
  ZERO_RETURN_IF_ERROR(CheckMayBeReplaced(dir));
  ZERO_ASSIGN_OR_RETURN(const auto reader, OpenCheckpoint(path));
  const Json& config = reader->manifest().config;
  ZERO_ASSIGN_OR_RETURN(const ModelConfig model_config, ModelOf(*reader));
  const auto model = MakeModel(model_config);
  ZERO_RETURN_IF_ERROR(CheckParameters(*reader, *model));
  DType dtype = IsEnabled(config, "bf16")   ? DType::kBF16
                : IsEnabled(config, "fp16") ? DType::kF16
                                            : DType::kF32;
  for (const DType one : {DType::kF32, DType::kBF16, DType::kF16}) {
    if (dtype_name == DTypeName(one)) dtype = one;
  }
  ZERO_ASSIGN_OR_RETURN(const auto writer,
                        PortableWriter::Create(FollowLink(WithoutSlash(dir)),
                                               *model, dtype, max_shard_bytes));
  const auto& groups = writer->groups();
  ZERO_RETURN_IF_ERROR(InParallel(groups.size(), [&](size_t group) {
    for (const Parameter* parameter : groups[group]) {
      ZERO_RETURN_IF_ERROR(
          ExportParameter(*reader, *parameter, dtype, writer.get()));
    }
    return absl::OkStatus();
  }));
  ZERO_ASSIGN_OR_RETURN(
      const std::vector<std::string> notes,
      writer->Commit(ModelFolderFiles(model_config, dtype, MakeModelTools(),
                                      TokenizerOf(config).get())));
  for (const std::string& note : notes) absl::PrintF("note: %s\n", note);
  absl::PrintF(
      "written %s: step %d, %s parameters as %s%s\n", dir,
      reader->manifest().step, WithCommas(model->NumParameters()),
      DTypeName(dtype),
      groups.size() == 1 ? "" : absl::StrCat(" in ", groups.size(), " shards"));
  return absl::OkStatus();
}

}  // namespace

Command AddCheckpoint(CLI::App& app) {
  struct Flags {
    std::string path, other, dtype;
    int64_t max_shard_bytes = kMaxShardBytes;
    std::vector<std::string> paths;
    bool json = false, all = false;
    absl::Status (*run)(const Flags&) = nullptr;
  };
  const auto flags = std::make_shared<Flags>();
  constexpr char kPath[] =
      "a checkpoint's folder, or a run's training.out_dir for its newest";
  app.require_subcommand(1);
  const auto add = [&](const char* name, const char* help, const char* example,
                       absl::Status (*run)(const Flags&)) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->footer(
        absl::StrCat("Example:\n  zero checkpoint ", name, " ", example));
    sub->parse_complete_callback([flags, run] { flags->run = run; });
    return sub;
  };
  CLI::App* list =
      add("list", "The checkpoints of a run: step, samples, date, size",
          "out/gpt2_tiny",
          [](const Flags& flags) { return List(flags.path, flags.json); });
  list->add_option("DIR", flags->path, "a run's training.out_dir")->required();
  list->add_flag("--json", flags->json, "one JSON object per line");
  CLI::App* show =
      add("show", "What is in a checkpoint: states, parameters, files",
          "out/gpt2_tiny/checkpoints/step-00000500",
          [](const Flags& flags) { return Show(flags.path, flags.json); });
  show->add_option("PATH", flags->path, kPath)->required();
  show->add_flag("--json", flags->json, "as one JSON object");
  CLI::App* verify =
      add("verify", "Read all bytes and compare them with their checksums",
          "out/gpt2_tiny out/llama_tiny/checkpoints/step-00000500",
          [](const Flags& flags) { return Verify(flags.paths); });
  verify
      ->add_option("PATH", flags->paths,
                   "folders of checkpoints, or of runs (training.out_dir) for "
                   "all of theirs")
      ->required();
  CLI::App* diff = add(
      "diff",
      "Compare two checkpoints bit by bit, whatever the ranks and the stage "
      "that each was written with; exits with 0 if they are equal, 1 if "
      "they differ, else 2",
      "out/gpt2_tiny out/gpt2_tiny_stage3/checkpoints/step-00000500",
      [](const Flags& flags) {
        return Diff(flags.path, flags.other, flags.all);
      });
  diff->add_option("A", flags->path, kPath)->required();
  diff->add_option("B", flags->other, kPath)->required();
  diff->add_flag("--all", flags->all,
                 "print every state that differs, not only the ten with the "
                 "most different elements");
  CLI::App* write =
      add("export", "Write the weights as a Hugging Face folder",
          "out/gpt2_tiny weights --dtype bf16", [](const Flags& flags) {
            return Export(flags.path, flags.other, flags.dtype,
                          flags.max_shard_bytes);
          });
  write->add_option("PATH", flags->path, kPath)->required();
  write
      ->add_option("DIR", flags->other,
                   "the folder to write: new, empty, or with a model, which is "
                   "replaced")
      ->required();
  write
      ->add_option("--dtype", flags->dtype,
                   "fp32, bf16 or fp16 (default: that of the run's parameters)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  write
      ->add_option(
          "--max-shard-size", flags->max_shard_bytes,
          "the largest file of weights, with a unit, such as 5GB (the "
          "default); a larger model is written as shards with an index")
      ->transform(CLI::Validator(SizeToBytes, ""))
      ->type_name("SIZE");
  return [flags] { return flags->run(*flags); };
}

}  // namespace zero
