// A checkpoint of a training run: how long training waits for a save, how fast
// it is written, and how fast a run resumes from it. Through Session,
// RunCheckpoints and ResumeRun of `zero train`; prints one JSON object.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/exceptions.h"
#include "engine/base/file.h"
#include "engine/base/status.h"
#include "engine/train/checkpoints.h"
#include "engine/train/resume.h"
#include "engine/train/run_folder.h"
#include "engine/train/session.h"
#include "nlohmann/json.hpp"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"
#include "tools/cli/model_tools.h"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  RunOptions run;
  std::string dir = "out/bench/checkpoint";
  int saves = 3;
};

// Evicts every file of `folder` from the page cache.
absl::Status DropFromCache(const std::string& folder) {
  ZERO_ASSIGN_OR_RETURN(const auto names, ListFolder(folder));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return FileError("cannot open", path, errno);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
  return absl::OkStatus();
}

int64_t BytesIn(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    bytes += static_cast<int64_t>(entry.file_size());
  }
  return bytes;
}

// Seconds of one plain copy of the same bytes, by the rank's threads.
double CopySeconds(const Rank& rank, int64_t bytes) {
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes, 2);
  const int threads = rank.device->info().num_threads;
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    seconds.push_back(SecondsOf([&] {
#pragma omp parallel num_threads(threads)
#pragma omp for schedule(static)
      for (int t = 0; t < threads; ++t) {
        const int64_t begin = bytes * t / threads;
        std::memcpy(&to[begin], &from[begin],
                    bytes * (t + 1) / threads - begin);
      }
    }));
  }
  return Median(seconds);
}

absl::StatusOr<Json> Bench(Options options) {
  ZERO_RETURN_IF_ERROR(MakeFolders(options.dir));
  // Tokens that are never trained on.
  const std::string data = options.dir + "/tokens.txt";
  ZERO_RETURN_IF_ERROR(WriteFileAtomically(data, std::string(1 << 20, '.')));
  const std::string out = options.dir + "/run";
  ZERO_RETURN_IF_ERROR(RemoveTree(out));
  for (const std::string& set :
       {"data.train=" + data, std::string("data.tokenizer=bytes"),
        "training.out_dir=" + out, std::string("training.save_every=1"),
        std::string("training.keep_last=1"),
        std::string("training.resume=auto")}) {
    options.run.sets.push_back(set);
  }
  ZERO_ASSIGN_OR_RETURN(const LoadedConfig loaded,
                        LoadRunConfig(options.run, MissingFiles::kError));
  const Config& config = loaded.config;
  ZERO_ASSIGN_OR_RETURN(const auto device, OpenDevice(options.run));
  const Rank rank = MakeSoloRank(*device);
  ZERO_ASSIGN_OR_RETURN(const RunData run_data,
                        OpenRunData(config, /*need_train=*/true, 1));
  Console console(nullptr, /*is_terminal=*/false);
  const auto open = [&] {
    return Session::Make(rank, config, MakeModelTools(),
                         TrainingWorkload(config));
  };
  std::vector<double> blocked, written;
  double copied = 0;
  int64_t state_bytes = 0;
  std::string folder;
  {
    ZERO_ASSIGN_OR_RETURN(const auto session, open());
    ZERO_ASSIGN_OR_RETURN(
        const auto run_folder,
        RunFolder::Open(*session, MakeModelTools(), nullptr, &console));
    ZERO_ASSIGN_OR_RETURN(
        const ResumedRun resumed,
        ResumeRun(*session, run_data, options.saves, &console));
    RunCheckpoints checkpoints(*session, run_data, *run_folder, resumed,
                               &console);
    for (int save = 1; save <= options.saves; ++save) {
      absl::Status status;
      const double begin = Now();
      status = checkpoints.Save({.step = save});
      blocked.push_back(Now() - begin);
      status.Update(checkpoints.Finish());
      written.push_back(Now() - begin);
      ZERO_RETURN_IF_ERROR(status);
    }
    folder = absl::StrCat(out, "/", checkpoints.saved());
    if (checkpoints.saved().empty()) {
      return absl::InternalError("nothing was saved");
    }
    state_bytes = session->snapshot()->bytes();
    copied = CopySeconds(rank, state_bytes);
  }
  const int64_t bytes = BytesIn(folder);
  std::vector<double> read;
  for (int i = 0; i < 2; ++i) {
    ZERO_ASSIGN_OR_RETURN(const auto session, open());
    ZERO_RETURN_IF_ERROR(DropFromCache(folder));
    absl::StatusOr<ResumedRun> resumed;
    read.push_back(SecondsOf([&] {
      resumed = ResumeRun(*session, run_data, options.saves, &console);
    }));
    ZERO_RETURN_IF_ERROR(resumed.status());
  }
  const Json result = {{"bytes", bytes},
                       {"state_bytes", state_bytes},
                       {"threads", device->info().num_threads},
                       {"copy_ms", 1e3 * copied},
                       {"blocked_ms", 1e3 * Median(blocked)},
                       {"written_s", Median(written)},
                       {"read_s", Median(read)}};
  ZERO_RETURN_IF_ERROR(RemoveTree(options.dir));
  return result;
}

int Main(int argc, char** argv) {
  CLI::App app{"Measures a checkpoint: waiting, writing, resuming"};
  Options options;
  AddRunOptions(app, &options.run, /*config_required=*/true);
  app.add_option("--dir", options.dir, "on the disk to measure; is removed");
  app.add_option("--saves", options.saves);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    ZERO_ASSIGN_OR_RETURN(const Json result, Bench(options));
    std::cout << result << std::endl;
    return absl::OkStatus();
  });
  if (status.ok()) return 0;
  std::cerr << "checkpoint_bench: " << status.message() << "\n";
  return 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
