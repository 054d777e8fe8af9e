// The file of states on a disk (engine/base/swap_file.h), used as in an update:
// a piece is read while the previous one is written. Prints one JSON object:
// bytes of the file, and median seconds to read and write all pieces once, with
// and without checksums.
#include <cstdint>
#include <iostream>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "engine/base/status.h"
#include "engine/train/machine_speed.h"
#include "nlohmann/json.hpp"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  DiskTrial trial = {.folder = "out/bench/swap", .rounds = 3};
  int64_t piece_mib = 64;
};

absl::StatusOr<Json> Bench(Options options) {
  DiskTrial& trial = options.trial;
  trial.piece_bytes = options.piece_mib << 20;
  ZERO_ASSIGN_OR_RETURN(const double checked, MeasureDisk(trial));
  trial.checksums = false;
  ZERO_ASSIGN_OR_RETURN(const double plain, MeasureDisk(trial));
  return Json{{"bytes", trial.pieces * trial.piece_bytes},
              {"seconds", checked},
              {"unchecked_seconds", plain}};
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times the file of states that are on a disk");
  app.add_option("--dir", options.trial.folder, "on the disk in question")
      ->capture_default_str();
  app.add_option("--piece-mib", options.piece_mib, "MiB of a piece")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--pieces", options.trial.pieces, "in the file")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  app.add_option("--queue-depth", options.trial.queue_depth,
                 "requests in flight")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--rounds", options.trial.rounds, "whose median is printed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> json = Bench(options);
  if (!json.ok()) {
    std::cerr << "swap_bench: " << json.status().message() << "\n";
    return 1;
  }
  std::cout << json->dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
