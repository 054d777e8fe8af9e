#include "tools/cli/measured_run.h"

#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/comm/launch.h"
#include "engine/data/tokenize.h"
#include "nlohmann/json.hpp"
#include "tools/cli/signals.h"

extern char** environ;

namespace zero {
namespace {

using Json = nlohmann::json;

// The last line of a run's output: why it failed.
std::string LastLine(const std::string& file) {
  absl::StatusOr<std::string> text = ReadFile(file);
  if (!text.ok()) return std::string(text.status().message());
  const std::vector<std::string> lines =
      absl::StrSplit(*text, '\n', absl::SkipWhitespace());
  return lines.empty() ? "it said nothing" : lines.back();
}

bool HasLines(const std::string& file, int lines) {
  const absl::StatusOr<std::string> text = ReadFile(file);
  return text.ok() && std::count(text->begin(), text->end(), '\n') >= lines;
}

// The environment without a launcher's variables: the run has its own ranks.
std::vector<char*> EnvironmentOfOneProcess() {
  std::vector<char*> kept;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const absl::string_view text(*variable);
    if (!IsLaunchVariable(text.substr(0, text.find('=')))) {
      kept.push_back(*variable);
    }
  }
  kept.push_back(nullptr);
  return kept;
}

// Runs this program; its output goes to `log`. Asks it to stop once `metrics`
// has this many steps, since a config's schedule may be for more, or with
// `stop`. Returns its exit status.
absl::StatusOr<int> RunSelf(std::vector<std::string> arguments,
                            const std::string& log, const std::string& metrics,
                            int steps, const std::atomic<bool>& stop) {
  arguments.insert(arguments.begin(), "zero");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0666);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t child = 0;
  const int failed = posix_spawn(&child, "/proc/self/exe", &files, nullptr,
                                 argv.data(), EnvironmentOfOneProcess().data());
  posix_spawn_file_actions_destroy(&files);
  if (failed != 0) return FileError("cannot start", "/proc/self/exe", failed);
  int status = 0;
  for (bool asked = false; ::waitpid(child, &status, WNOHANG) == 0;) {
    if (!asked && (stop || HasLines(metrics, steps))) {
      asked = true;
      ::kill(child, SIGINT);
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return status;
}

std::map<std::string, int64_t> BytesByName(const Json& json) {
  std::map<std::string, int64_t> bytes;
  for (const auto& [name, value] : json.items()) bytes[name] = value;
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MeasureFolder>> MeasureFolder::Make() {
  const std::atomic<bool>* stop = InstallStopSignals(
      "; runs that were measured are in the system's folder "
      "for temporary files, as zero-memory-*");
  std::error_code error;
  std::string path =
      std::filesystem::temp_directory_path(error) / "zero-memory-XXXXXX";
  if (error || ::mkdtemp(path.data()) == nullptr) {
    return FileError("cannot create", path, error ? error.value() : errno);
  }
  return std::unique_ptr<MeasureFolder>(new MeasureFolder(path, stop));
}

MeasureFolder::~MeasureFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::Status MeasureFolder::GiveData(const Config& config, RunOptions* run) {
  if (!config.data.train.empty() && ExpandPaths(config.data.train).ok()) {
    return absl::OkStatus();
  }
  const std::string file = path_ + "/tokens.bin";
  const bool wide = config.model.vocab_size > 1 << 16;
  ZERO_ASSIGN_OR_RETURN(const auto writer,
                        TokenFileWriter::Create(file, wide ? 4 : 2));
  std::vector<int32_t> tokens(config.data.sequence_length + 1);
  uint32_t random = 1;  // Numerical Recipes' generator: any tokens will do
  const double trained = 1 - config.data.validation_fraction;
  const auto sequences = static_cast<int64_t>(
      std::ceil(kSteps * config.train_batch_size / trained) + 1);
  for (int64_t n = 0; n < sequences; ++n) {
    for (int32_t& token : tokens) {
      random = random * 1664525 + 1013904223;
      token = static_cast<int32_t>((random >> 4) % config.model.vocab_size);
    }
    ZERO_RETURN_IF_ERROR(
        writer->Append(tokens.data(), static_cast<int64_t>(tokens.size())));
  }
  ZERO_RETURN_IF_ERROR(writer->Commit());
  run->sets.insert(
      run->sets.end(),
      {absl::StrCat("data.train=", file), "data.tokenizer=none",
       "data.format=llmc", "training.sample_every=0",
       absl::StrCat("model.vocab_size=", config.model.vocab_size)});
  if (!config.data.validation.empty()) {
    run->sets.push_back(absl::StrCat("data.validation=", file));
  }
  return absl::OkStatus();
}

absl::StatusOr<MeasuredRun> MeasureFolder::Measure(const Config& config,
                                                   const RunOptions& run) {
  const std::string out = path_ + "/run", log = path_ + "/log";
  std::vector<std::string> arguments = {"train", run.config, "--device",
                                        run.device,
                                        absl::StrCat("--ranks=", run.ranks)};
  if (run.threads > 0) {
    arguments.push_back(absl::StrCat("--threads=", run.threads));
  }
  if (run.host_threads > 0) {
    arguments.push_back(absl::StrCat("--host-threads=", run.host_threads));
  }
  if (!run.model_dir.empty()) {
    arguments.push_back("--model=" + run.model_dir);
  }
  for (const std::string& set : run.sets) arguments.push_back("--set=" + set);
  for (const std::string& set :
       {"training.out_dir=" + out, std::string("training.resume="),
        // A save is never due, but the run reserves the copy of the states that
        // a save needs.
        absl::StrCat("training.save_every=",
                     config.training.saves() ? int64_t{1} << 40 : 0),
        std::string("training.save_every_minutes=0"),
        std::string("training.save_interrupted=false")}) {
    arguments.push_back("--set=" + set);
  }
  ZERO_ASSIGN_OR_RETURN(
      const int status,
      RunSelf(arguments, log, out + "/metrics.jsonl", kSteps, *stop_));
  if (*stop_) return absl::CancelledError("stopped by a signal");
  const bool stopped = WIFEXITED(status) && WEXITSTATUS(status) == 130;
  if (status != 0 && !stopped) {
    return absl::InternalError(
        absl::StrCat("zero ", absl::StrJoin(arguments, " "), ": ",
                     WIFSIGNALED(status)
                         ? absl::StrCat("killed by signal ", WTERMSIG(status))
                         : LastLine(log)));
  }
  ZERO_ASSIGN_OR_RETURN(const std::string text,
                        ReadFile(out + "/summary.json"));
  std::error_code ignored;
  std::filesystem::remove_all(out, ignored);
  const Json summary = Json::parse(text);
  MeasuredRun measured{.peaks = BytesByName(summary.at("peak_bytes"))};
  measured.host = summary.at("host_bytes");
  if (run.device == "cuda") {
    measured.peak = measured.peaks.at("total");
  } else {
    measured.resident = BytesByName(summary.at("resident_bytes"));
    measured.peak =
        summary.at("peak_resident_bytes").get<int64_t>() / run.ranks;
  }
  return measured;
}

}  // namespace zero
