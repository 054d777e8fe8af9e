// The file of states that are on a disk (engine/base/swap_file.h), as an update
// uses it: a piece is read while the one before is written. Prints one JSON
// object: bytes of the file, and medians of the seconds in which all pieces
// were read and written once, with and without checksums.
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "engine/base/status.h"
#include "engine/base/swap_file.h"
#include "nlohmann/json.hpp"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string dir = "out/bench/swap";
  int64_t piece_mib = 64;  // about a block of GPT-2's states
  int pieces = 16;
  int queue_depth = 8;  // as the key aio.queue_depth
  int rounds = 3;
};

// Aligned as O_DIRECT wants it.
struct Memory {
  explicit Memory(int64_t bytes) : storage(bytes + kBlockAlignment, 'x') {
    data = reinterpret_cast<char*>(
        RoundUp(reinterpret_cast<uintptr_t>(storage.data()),
                uintptr_t{kBlockAlignment}));
  }
  std::vector<char> storage;
  char* data;
};

absl::StatusOr<double> Seconds(const Options& options, bool checksums) {
  const int64_t bytes = options.piece_mib << 20;
  Memory memory(2 * bytes);  // read to one half, written from the other
  const absl::Span<char> registered(memory.data, 2 * bytes);
  SwapFileOptions file_options = {.folder = options.dir,
                                  .checksums = checksums};
  file_options.io.queue_depth = options.queue_depth;
  ZERO_ASSIGN_OR_RETURN(
      const auto file,
      SwapFile::Create(file_options,
                       std::vector<int64_t>(options.pieces, bytes),
                       {&registered, 1}));
  for (int i = 0; i < options.pieces; ++i) {
    ZERO_RETURN_IF_ERROR(file->Write(i, memory.data));
  }
  std::vector<double> seconds;
  for (int round = 0; round < options.rounds; ++round) {
    absl::Status read, written;
    seconds.push_back(SecondsOf([&] {
      // Step i reads piece i and writes piece i - 1.
      for (int i = 0; i <= options.pieces; ++i) {
        std::thread reader([&] {
          if (i < options.pieces) read.Update(file->Read(i, memory.data));
        });
        if (i > 0) written.Update(file->Write(i - 1, memory.data + bytes));
        reader.join();
      }
    }));
    ZERO_RETURN_IF_ERROR(read);
    ZERO_RETURN_IF_ERROR(written);
  }
  return Median(seconds);
}

absl::StatusOr<Json> Bench(const Options& options) {
  ZERO_ASSIGN_OR_RETURN(const double plain, Seconds(options, false));
  ZERO_ASSIGN_OR_RETURN(const double checked, Seconds(options, true));
  return Json{{"bytes", options.pieces * (options.piece_mib << 20)},
              {"seconds", checked},
              {"unchecked_seconds", plain}};
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times the file of states that are on a disk");
  app.add_option("--dir", options.dir, "on the disk in question")
      ->capture_default_str();
  app.add_option("--piece-mib", options.piece_mib, "MiB of a piece")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--pieces", options.pieces, "in the file")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
  app.add_option("--queue-depth", options.queue_depth, "requests in flight")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "whose median is printed")
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
