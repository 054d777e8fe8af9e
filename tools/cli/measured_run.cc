#include "tools/cli/measured_run.h"

#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/data/tokenize.h"
#include "nlohmann/json.hpp"

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

// Runs this program; its output goes to `log`. Returns its exit status.
absl::StatusOr<int> RunSelf(std::vector<std::string> arguments,
                            const std::string& log) {
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
                                 argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (failed != 0) return FileError("start", "/proc/self/exe", failed);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return FileError("wait for", "zero train", errno);
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
  std::error_code error;
  std::string path =
      std::filesystem::temp_directory_path(error) / "zero-memory-XXXXXX";
  if (error || ::mkdtemp(path.data()) == nullptr) {
    return FileError("create", path, error ? error.value() : errno);
  }
  return std::unique_ptr<MeasureFolder>(new MeasureFolder(path));
}

MeasureFolder::~MeasureFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::Status MeasureFolder::GiveData(const Config& config, RunOptions* run) {
  if (!config.data.train.empty()) return absl::OkStatus();
  const std::string file = path_ + "/tokens.bin";
  const bool wide = config.model.vocab_size > 1 << 16;
  ZERO_ASSIGN_OR_RETURN(const auto writer,
                        TokenFileWriter::Create(file, wide ? 4 : 2));
  std::vector<int32_t> tokens(config.data.sequence_length + 1);
  uint32_t random = 1;  // Numerical Recipes' generator: any tokens will do
  for (int64_t n = 0; n < kSteps * config.train_batch_size; ++n) {
    for (int32_t& token : tokens) {
      random = random * 1664525 + 1013904223;
      token = static_cast<int32_t>((random >> 4) % config.model.vocab_size);
    }
    ZERO_RETURN_IF_ERROR(
        writer->Append(tokens.data(), static_cast<int64_t>(tokens.size())));
  }
  ZERO_RETURN_IF_ERROR(writer->Commit());
  run->sets.insert(run->sets.end(),
                   {absl::StrCat("data.train=", file), "data.tokenizer=none"});
  return absl::OkStatus();
}

absl::StatusOr<MeasuredRun> MeasureFolder::Measure(const RunOptions& run) {
  const std::string out = path_ + "/run", log = path_ + "/log";
  std::vector<std::string> arguments = {"train", run.config, "--device",
                                        run.device,
                                        absl::StrCat("--ranks=", run.ranks)};
  if (run.threads > 0) {
    arguments.push_back(absl::StrCat("--threads=", run.threads));
  }
  if (!run.model_dir.empty()) {
    arguments.push_back("--model=" + run.model_dir);
  }
  for (const std::string& set : run.sets) arguments.push_back("--set=" + set);
  for (const std::string& set :
       {absl::StrCat("training.steps=", kSteps), "training.out_dir=" + out}) {
    arguments.push_back("--set=" + set);
  }
  ZERO_ASSIGN_OR_RETURN(const int status, RunSelf(arguments, log));
  if (WIFEXITED(status) && WEXITSTATUS(status) == 130) {
    return absl::CancelledError("stopped by a signal");
  }
  if (status != 0) {
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
