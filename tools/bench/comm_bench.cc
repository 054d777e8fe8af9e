// Collectives of local ranks beside plain loops over the same bytes: memcpy for
// the all-gather, additions for the reduce-scatter. Each rank is a thread with
// a communication stream; ours and the plain loop run in turns, all ranks at
// once. Then what a collective costs that moves next to nothing. Prints one
// JSON object per line, as op_bench does.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/comm/local.h"
#include "kernels/check.h"
#include "nlohmann/json.hpp"
#include "tools/bench/fill.h"
#include "tools/bench/memory_loops.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

struct Options {
  int ranks = 2;
  double megabytes = 25;
  double seconds = 1;  // per case, at least
};

// One rank: its memory is touched on its own thread.
struct Rank {
  int rank;
  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Stream> stream;
  Buffer full;
};

// What one rank does in one turn, to the end.
using Turn = std::function<void(Rank&)>;

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        group_(LocalGroup::Make(options.ranks)),
        together_(options.ranks),
        bytes_(static_cast<int64_t>(options.megabytes * 1e6) /
               (256 * options.ranks) * (256 * options.ranks)),
        ranks_(options.ranks) {}

  void AllGather(DType dtype);
  void ReduceScatter(DType dtype);
  void Latency(StreamRole role, const char* name);

 private:
  Rank& Start(int rank, const std::string& channel, StreamRole role);
  // Runs both in turns on all ranks; the seconds of each turn of the slowest.
  void Measure(const std::string& op, const std::string& shape, DType dtype,
               const char* unit, double amount, StreamRole role,
               const Turn& ours, const Turn& plain);

  int64_t piece_bytes() const { return bytes_ / options_.ranks; }

  const Options options_;
  const std::shared_ptr<LocalGroup> group_;
  std::barrier<> together_;
  const int64_t bytes_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

Rank& Bench::Start(int number, const std::string& channel, StreamRole role) {
  ranks_[number] = std::make_unique<Rank>();
  Rank& rank = *ranks_[number];
  rank.rank = number;
  rank.device = MakeCpuDevice(1);
  rank.comm = group_->Connect(rank.rank, channel);
  rank.stream = rank.device->MakeStream(role);
  auto full = rank.device->Allocate(bytes_, MemoryKind::kDevice);
  ZERO_CHECK(full.ok()) << full.status().message();
  rank.full = std::move(*full);
  FillRandom(rank.full.data(), DType::kF32, bytes_ / 4);
  return rank;
}

void Bench::Measure(const std::string& op, const std::string& shape,
                    DType dtype, const char* unit, double amount,
                    StreamRole role, const Turn& ours, const Turn& plain) {
  std::vector<double> our_s, plain_s;
  bool enough = false;
  const auto run = [&](int number) {
    Rank& rank = Start(
        number, absl::StrCat(op, " ", shape, " ", DTypeName(dtype)), role);
    // The end of a turn is when the last rank is there.
    const auto turn = [&](const Turn& work) {
      together_.arrive_and_wait();
      const double begin = Now();
      work(rank);
      together_.arrive_and_wait();
      return Now() - begin;
    };
    double spent = 0;
    for (int round = 0; !enough; ++round) {
      const double one = turn(ours), other = turn(plain);
      if (rank.rank == 0 && round > 0) {
        our_s.push_back(one);
        plain_s.push_back(other);
        spent += one + other;
        enough = spent >= options_.seconds && our_s.size() >= 5;
      }
      together_.arrive_and_wait();
    }
    rank.stream->Synchronize();
    const absl::Status status = rank.comm->status();
    ZERO_CHECK(status.ok()) << status.message();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    threads.emplace_back(run, rank);
  }
  for (std::thread& thread : threads) thread.join();
  // The best turns, not the median: on a machine that others are busy on, a
  // rank that waits asleep loses its core, and the plain loop does not.
  const double best = *std::min_element(our_s.begin(), our_s.end());
  const double plain_best = *std::min_element(plain_s.begin(), plain_s.end());
  const nlohmann::ordered_json row = {{"op", op},
                                      {"shape", shape},
                                      {"dtype", DTypeName(dtype)},
                                      {"ms", best * 1e3},
                                      {"unit", unit},
                                      {"rate", amount / best},
                                      {"ceiling", amount / plain_best},
                                      {"ratio", plain_best / best},
                                      {"rounds", our_s.size()}};
  std::cout << row.dump() << std::endl;
}

std::string Shape(int ranks, int64_t bytes) {
  return absl::StrCat(ranks, " ranks, ", bytes / 1000, " KB");
}

void Bench::AllGather(DType dtype) {
  const int64_t elems = bytes_ / static_cast<int64_t>(DTypeBytes(dtype));
  const auto ours = [&](Rank& rank) {
    char* const full = static_cast<char*>(rank.full.data());
    rank.comm->AllGather(*rank.stream, "bench", dtype,
                         {{full + rank.rank * piece_bytes(), full, elems}});
    rank.stream->Synchronize();
  };
  const auto plain = [&](Rank& rank) {
    char* const full = static_cast<char*>(rank.full.data());
    for (int step = 1; step < options_.ranks; ++step) {
      const int from = (rank.rank + step) % options_.ranks;
      std::memcpy(
          full + from * piece_bytes(),
          static_cast<char*>(ranks_[from]->full.data()) + from * piece_bytes(),
          piece_bytes());
    }
  };
  const double gigabytes = 1e-9 * (bytes_ - piece_bytes());
  Measure("all_gather", Shape(options_.ranks, bytes_), dtype, "GB/s", gigabytes,
          StreamRole::kGather, ours, plain);
}

// In place; the plain loop adds as many bytes of fp32 into the same place.
void Bench::ReduceScatter(DType dtype) {
  const int64_t elems = bytes_ / static_cast<int64_t>(DTypeBytes(dtype));
  const auto ours = [&](Rank& rank) {
    char* const full = static_cast<char*>(rank.full.data());
    rank.comm->ReduceScatter(*rank.stream, "bench", dtype, false,
                             {{full, full + rank.rank * piece_bytes(), elems}});
    rank.stream->Synchronize();
  };
  const auto plain = [&](Rank& rank) {
    const int64_t piece = piece_bytes() / 4;
    std::vector<const float*> in;
    for (const auto& one : ranks_) {
      in.push_back(static_cast<float*>(one->full.data()) + rank.rank * piece);
    }
    SumLoop(in, static_cast<float*>(rank.full.data()) + rank.rank * piece,
            piece);
  };
  const double gigabytes = 1e-9 * (bytes_ - piece_bytes());
  Measure("reduce_scatter", Shape(options_.ranks, bytes_), dtype, "GB/s",
          gigabytes, StreamRole::kReduce, ours, plain);
}

// Two doubles of each rank, beside two bare rendezvous (which may spin, ours
// must not).
void Bench::Latency(StreamRole role, const char* name) {
  constexpr int kCalls = 100;
  const auto ours = [&](Rank& rank) {
    double* const data = static_cast<double*>(rank.full.data());
    for (int i = 0; i < kCalls; ++i) {
      rank.comm->AllGather(*rank.stream, "bench", DType::kF64,
                           {{data + 2 * rank.rank, data, 2 * options_.ranks}});
      rank.stream->Synchronize();
    }
  };
  const auto plain = [&](Rank&) {
    for (int i = 0; i < 2 * kCalls; ++i) together_.arrive_and_wait();
  };
  Measure("all_gather", absl::StrCat("2 doubles, ", name), DType::kF64,
          "1000 calls/s", 1e-3 * kCalls, role, ours, plain);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times collectives of local ranks beside plain loops");
  app.add_option("--ranks", options.ranks, "threads")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--megabytes", options.megabytes, "of the full side")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 4000.0));
  app.add_option("--seconds", options.seconds, "per case, at least")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  Bench bench(options);
  bench.AllGather(DType::kF32);
  bench.ReduceScatter(DType::kF32);
  bench.ReduceScatter(DType::kBF16);
  bench.Latency(StreamRole::kCompute, "own thread");
  bench.Latency(StreamRole::kReduce, "worker thread");
  return 0;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
