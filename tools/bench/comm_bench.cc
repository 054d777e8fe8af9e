// Collectives of local ranks compared with plain loops over the same bytes:
// memcpy for the all-gather, additions for the reduce-scatter. Each rank is a
// thread with a communication stream; ours and the plain loop alternate, all
// ranks at once. Then the cost of a collective that moves almost nothing.
// Prints one JSON object per line, like op_bench. Under mpirun the ranks are
// those of all processes, without a plain loop.
#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "engine/base/status.h"
#include "engine/comm/launch.h"
#include "engine/comm/local_ranks.h"
#include "engine/comm/mpi_ranks.h"
#include "nlohmann/json.hpp"
#include "tools/bench/fill.h"
#include "tools/bench/memory_loops.h"
#include "tools/bench/timing.h"

namespace zero::bench {
namespace {

struct Options {
  int ranks = 2;  // of each process
  absl::optional<Launch> launch;
  double megabytes = 25;
  double seconds = 1;  // per case, at least
};

// Shared by the ranks of a process.
struct Group {
  explicit Group(const Options& options)
      : options(options),
        piece_bytes(static_cast<int64_t>(options.megabytes * 1e6) /
                    (256 * world()) * 256),
        together(options.ranks),
        full(options.ranks) {}

  int world() const {
    return options.ranks * (options.launch ? options.launch->world : 1);
  }

  const Options options;
  const int64_t piece_bytes;  // of each rank
  std::barrier<> together;
  // Each rank's memory in this process, with one piece for every rank.
  std::vector<char*> full;
  bool enough = false;
};

class Bench {
 public:
  Bench(const Rank& rank, Group& group)
      : rank_(rank),
        group_(group),
        piece_bytes_(group.piece_bytes),
        bytes_(group.piece_bytes * rank.world()) {}

  absl::Status Run() {
    // Touched on the rank's own thread.
    ZERO_ASSIGN_OR_RETURN(const Buffer full,
                          rank_.device->Allocate(bytes_, MemoryKind::kDevice));
    FillRandom(full.data(), DType::kF32, bytes_ / 4);
    full_ = static_cast<char*>(full.data());
    if (!group_.options.launch) group_.full[rank_.rank()] = full_;
    own_ = full_ + rank_.rank() * piece_bytes_;
    AllGather(DType::kF32);
    ReduceScatter(DType::kF32);
    ReduceScatter(DType::kBF16);
    Latency(StreamRole::kCompute, "own thread");
    Latency(StreamRole::kReduce, "worker thread");
    return rank_.status();
  }

 private:
  void AllGather(DType dtype) {
    const int64_t elems = bytes_ / static_cast<int64_t>(DTypeBytes(dtype));
    const auto stream = rank_.device->MakeStream(StreamRole::kGather);
    const auto ours = [&] {
      rank_.gather->AllGather(*stream, "bench", dtype, {{own_, full_, elems}});
      stream->Synchronize();
    };
    const auto plain = [&] {
      for (int step = 1; step < rank_.world(); ++step) {
        const int from = (rank_.rank() + step) % rank_.world();
        std::memcpy(full_ + from * piece_bytes_,
                    group_.full[from] + from * piece_bytes_, piece_bytes_);
      }
    };
    Measure("all_gather", Shape(), dtype, "GB/s",
            1e-9 * (bytes_ - piece_bytes_), ours, plain);
  }

  // In place; the plain loop adds as many bytes of fp32 into the same place.
  void ReduceScatter(DType dtype) {
    const int64_t elems = bytes_ / static_cast<int64_t>(DTypeBytes(dtype));
    const auto stream = rank_.device->MakeStream(StreamRole::kReduce);
    const auto ours = [&] {
      rank_.reduce->ReduceScatter(*stream, "bench", dtype, false,
                                  {{full_, own_, elems}});
      stream->Synchronize();
    };
    const auto plain = [&] {
      std::vector<const float*> in;
      for (const char* full : group_.full) {
        in.push_back(
            reinterpret_cast<const float*>(full + rank_.rank() * piece_bytes_));
      }
      SumLoop(in, reinterpret_cast<float*>(own_), piece_bytes_ / 4);
    };
    Measure("reduce_scatter", Shape(), dtype, "GB/s",
            1e-9 * (bytes_ - piece_bytes_), ours, plain);
  }

  // Two doubles per rank, compared with two bare rendezvous (which may spin,
  // ours must not).
  void Latency(StreamRole role, const char* name) {
    constexpr int kCalls = 100;
    const auto stream = rank_.device->MakeStream(role);
    const auto ours = [&] {
      double* const data = reinterpret_cast<double*>(full_);
      for (int i = 0; i < kCalls; ++i) {
        rank_.gather->AllGather(
            *stream, "bench", DType::kF64,
            {{data + 2 * rank_.rank(), data, 2 * rank_.world()}});
        stream->Synchronize();
      }
    };
    const auto plain = [&] {
      for (int i = 0; i < 2 * kCalls; ++i) group_.together.arrive_and_wait();
    };
    Measure("all_gather", absl::StrCat("2 doubles, ", name), DType::kF64,
            "1000 calls/s", 1e-3 * kCalls, ours, plain);
  }

  std::string Shape() const {
    return absl::StrCat(rank_.world(), " ranks, ", bytes_ / 1000, " KB");
  }

  // A turn ends when the last rank is there.
  void Meet() {
    if (!group_.options.launch) return group_.together.arrive_and_wait();
    rank_.scalar->Barrier(*compute_, "bench");
    compute_->Synchronize();
  }

  // Rank 0's value, on all ranks.
  bool Agree(bool enough) {
    if (!group_.options.launch) {
      if (rank_.rank() == 0) group_.enough = enough;
      Meet();
      return group_.enough;
    }
    double said = enough ? 1 : 0;
    rank_.scalar->Broadcast(*compute_, "bench", DType::kF64, /*root=*/0,
                            {{&said, &said, 1}});
    compute_->Synchronize();
    return said != 0 || !rank_.status().ok();
  }

  // Times ours and the plain loop alternately, on all ranks.
  void Measure(const std::string& op, const std::string& shape, DType dtype,
               const char* unit, double amount,
               const std::function<void()>& ours,
               const std::function<void()>& plain) {
    const auto turn = [&](const std::function<void()>& work) {
      Meet();
      return SecondsOf([&] {
        work();
        Meet();
      });
    };
    // Ranks of other processes share no memory.
    const bool both = !group_.options.launch.has_value();
    std::vector<double> our_s, plain_s;
    double spent = 0;
    turn(ours);
    if (both) turn(plain);
    do {
      our_s.push_back(turn(ours));
      spent += our_s.back();
      if (!both) continue;
      plain_s.push_back(turn(plain));
      spent += plain_s.back();
    } while (!Agree(spent >= group_.options.seconds && our_s.size() >= 5));
    if (rank_.rank() > 0) return;
    // The best turns, not the median: on a busy machine a rank that sleeps
    // while waiting loses its core, and the plain loop does not.
    const double best = *std::min_element(our_s.begin(), our_s.end());
    nlohmann::ordered_json row = {{"op", op},
                                  {"shape", shape},
                                  {"dtype", DTypeName(dtype)},
                                  {"ms", best * 1e3},
                                  {"unit", unit},
                                  {"rate", amount / best},
                                  {"rounds", our_s.size()}};
    if (both) {
      const double plain = *std::min_element(plain_s.begin(), plain_s.end());
      row["ceiling"] = amount / plain;
      row["ratio"] = plain / best;
    }
    std::cout << row.dump() << std::endl;
  }

  const Rank& rank_;
  Group& group_;
  const int64_t piece_bytes_, bytes_;
  const std::unique_ptr<Stream> compute_ =
      rank_.device->MakeStream(StreamRole::kCompute);
  char* full_ = nullptr;
  char* own_ = nullptr;  // this rank's piece of it
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Times collectives of local ranks and plain loops");
  app.add_option("--ranks", options.ranks, "threads of each process")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.add_option("--megabytes", options.megabytes, "of the full side")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 4000.0));
  app.add_option("--seconds", options.seconds, "per case, at least")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto launch = ReadLaunch();
  absl::Status status = launch.status();
  if (launch.ok()) {
    options.launch = *launch;
    Group group(options);
    const auto device = [](int) { return MakeCpuDevice(1); };
    const RankBody body = [&](const Rank& rank) {
      return Bench(rank, group).Run();
    };
    status = *launch ? RunMpiProcess(**launch, options.ranks, {}, device, body)
                     : RunLocalRanks(options.ranks, {}, device, body);
  }
  if (!status.ok()) std::cerr << "comm_bench: " << status.message() << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
