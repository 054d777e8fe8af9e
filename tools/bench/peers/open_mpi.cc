// The collectives of comm_bench through Open MPI: a process per rank, what is
// moved and how it is timed the same. Run by mpirun; rank 0 prints one JSON
// object per line.
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tools/bench/fill.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

struct Options {
  double megabytes = 25;
  double seconds = 1;  // per case, at least
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_);
    piece_ = static_cast<int>(options.megabytes * 1e6) / (256 * world_) * 64;
    full_.resize(static_cast<size_t>(piece_) * world_);
    shard_.resize(piece_);
    FillRandom(full_.data(), DType::kF32, full_.size());
  }

  void AllGather() {
    Measure("all_gather", [&] {
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, full_.data(), piece_,
                    MPI_FLOAT, MPI_COMM_WORLD);
    });
  }

  void ReduceScatter() {
    Measure("reduce_scatter", [&] {
      MPI_Reduce_scatter_block(full_.data(), shard_.data(), piece_, MPI_FLOAT,
                               MPI_SUM, MPI_COMM_WORLD);
    });
  }

 private:
  // As comm_bench: a turn ends when the last rank is there, the best counts.
  void Measure(const std::string& op, const std::function<void()>& collective) {
    std::vector<double> turns;
    double spent = 0;
    int enough = 0;
    for (int round = 0; enough == 0; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = Now();
      collective();
      MPI_Barrier(MPI_COMM_WORLD);
      const double one = Now() - begin;
      if (round > 0) turns.push_back(one);
      spent += one;
      enough = spent >= options_.seconds && turns.size() >= 5 ? 1 : 0;
      MPI_Bcast(&enough, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (rank_ != 0) return;
    const double best = *std::min_element(turns.begin(), turns.end());
    const int64_t bytes = static_cast<int64_t>(full_.size()) * 4;
    const nlohmann::ordered_json row = {
        {"op", op},
        {"shape", absl::StrCat(world_, " ranks, ", bytes / 1000, " KB")},
        {"dtype", "fp32"},
        {"ms", best * 1e3},
        {"unit", "GB/s"},
        {"rate", 1e-9 * static_cast<double>(bytes - bytes / world_) / best},
        {"rounds", turns.size()}};
    std::cout << row.dump() << std::endl;
  }

  const Options options_;
  int rank_ = 0, world_ = 1;
  int piece_;  // elements of one rank
  std::vector<float> full_, shard_;
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times collectives of Open MPI");
  app.add_option("--megabytes", options.megabytes, "of the full side")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 2000.0));
  app.add_option("--seconds", options.seconds, "per case, at least")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  MPI_Init(&argc, &argv);
  {
    Bench bench(options);
    bench.AllGather();
    bench.ReduceScatter();
  }
  MPI_Finalize();
  return 0;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
