// What a device can do, through the very ops of a training step: its copy
// bandwidth, its rate of matrix products, and beside the copy the bandwidth of
// AdamW, norms and other ops that only move memory. Prints one JSON object per
// line. Timed by events on the stream, several calls between two of them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/ops.h"
#include "nlohmann/json.hpp"
#include "tools/bench/fill.h"
#include "tools/bench/timing.h"
#include "tools/cli/commands.h"

namespace zero::bench {
namespace {

struct Options {
  RunOptions run;
  int64_t mebibytes = 1024;  // that a case moves, about; more than any cache
  int64_t product = 8192;    // rows and columns of the square products
  int rounds = 5;
  std::string filter;
};

class DeviceBench {
 public:
  DeviceBench(Device& device, const Options& options)
      : device_(device),
        options_(options),
        stream_(device.MakeStream(StreamRole::kCompute)),
        start_(device.MakeEvent()),
        end_(device.MakeEvent()) {}

  void Run() {
    Copy();
    for (const DType dtype : {DType::kBF16, DType::kF32}) Products(dtype);
    for (const DType grad : {DType::kF32, DType::kBF16}) AdamW(grad);
    for (const int64_t width : {768, 1600, 4096}) Norms(width);
    ElementWise(4864);
    SumSquares();
  }

 private:
  int64_t bytes() const { return options_.mebibytes << 20; }
  Ops& ops() { return device_.ops(); }
  bool Wanted(const std::string& op) const {
    return absl::StrContains(op, options_.filter);
  }

  void* Memory(int64_t bytes, MemoryKind kind = MemoryKind::kDevice);
  void* Random(int64_t size, DType dtype);
  Vector RandomVector(int64_t size, DType dtype) {
    return {Random(size, dtype), dtype, size};
  }
  Matrix RandomMatrix(int64_t rows, int64_t cols, DType dtype) {
    return {Random(rows * cols, dtype), dtype, rows, cols, cols};
  }
  Rows RandomRows(int64_t rows, int64_t width) {
    return {Random(rows * width, kType), kType, rows, 1, width, width};
  }
  Workspace Scratch(size_t bytes) {
    return {Memory(static_cast<int64_t>(bytes) + 64), bytes};
  }

  void Copy();
  void Products(DType dtype);
  void AdamW(DType grad);
  void Norms(int64_t width);
  void NormBackward(int64_t rows, int64_t width);
  void ElementWise(int64_t width);
  void SumSquares();

  // Prints the rate of `run`, which does `amount` FLOP or bytes.
  void Measure(const std::string& op, const std::string& shape, DType dtype,
               const char* unit, double amount,
               const std::function<void()>& run);
  void Move(const std::string& op, const std::string& shape, int64_t bytes,
            const std::function<void()>& run) {
    Measure(op, shape, kType, "GB/s", 1.0 * bytes, run);
  }
  double MillisOf(const std::function<void()>& run, int calls);

  static constexpr DType kType = DType::kBF16;  // of activations

  Device& device_;
  const Options& options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> start_, end_;
  std::vector<Buffer> memory_;  // of the current case
};

void* DeviceBench::Memory(int64_t bytes, MemoryKind kind) {
  auto buffer = device_.Allocate(static_cast<size_t>(bytes), kind);
  ZERO_CHECK(buffer.ok()) << buffer.status().message();
  memory_.push_back(std::move(*buffer));
  return memory_.back().data();
}

// The same random numbers again and again: the host makes only so many.
void* DeviceBench::Random(int64_t size, DType dtype) {
  const int64_t total = size * static_cast<int64_t>(DTypeBytes(dtype));
  const int64_t part = std::min<int64_t>(total, int64_t{16} << 20);
  char* const data = static_cast<char*>(Memory(total));
  void* const host = Memory(part, MemoryKind::kHost);
  FillRandom(host, dtype, part / static_cast<int64_t>(DTypeBytes(dtype)));
  for (int64_t at = 0; at < total; at += part) {
    device_.Copy(*stream_, data + at, host,
                 static_cast<size_t>(std::min(part, total - at)));
  }
  stream_->Synchronize();
  return data;
}

double DeviceBench::MillisOf(const std::function<void()>& run, int calls) {
  stream_->Record(*start_);
  for (int i = 0; i < calls; ++i) run();
  stream_->Record(*end_);
  end_->Synchronize();
  return end_->MillisSince(*start_) / calls;
}

void DeviceBench::Measure(const std::string& op, const std::string& shape,
                          DType dtype, const char* unit, double amount,
                          const std::function<void()>& run) {
  MillisOf(run, 1);
  // Some 20 ms between two events.
  const double once = std::max(MillisOf(run, 1), 1e-3);
  const int calls = std::clamp(static_cast<int>(20 / once), 1, 1000);
  std::vector<double> ms;
  for (int i = 0; i < options_.rounds; ++i) ms.push_back(MillisOf(run, calls));
  const nlohmann::ordered_json row = {
      {"op", op},
      {"shape", shape},
      {"dtype", DTypeName(dtype)},
      {"ms", Median(ms)},
      {"unit", unit},
      {"rate", amount / Median(ms) * 1e-6},
      {"best_rate", amount / *std::min_element(ms.begin(), ms.end()) * 1e-6}};
  std::cout << row.dump() << std::endl;
  memory_.clear();
}

void DeviceBench::Copy() {
  const int64_t half = bytes() / 2;
  if (!Wanted("copy")) return;
  void* const from = Random(half / 4, DType::kF32);
  void* const to = Random(half / 4, DType::kF32);
  Move("copy", absl::StrCat(half, " bytes"), 2 * half,
       [&] { device_.Copy(*stream_, to, from, static_cast<size_t>(half)); });
}

void DeviceBench::Products(DType dtype) {
  if (!Wanted("product")) return;
  const int64_t n = options_.product;
  LinearArgs args{.x = RandomMatrix(n, n, dtype),
                  .w = RandomMatrix(n, n, dtype)};
  args.y = RandomMatrix(n, n, dtype);
  const Workspace scratch = Scratch(ops().LinearWorkspaceBytes(args));
  Measure("product", absl::StrCat(n, " x ", n, " x ", n), dtype, "GFLOP/s",
          2.0 * n * n * n, [&] { ops().Linear(*stream_, args, scratch); });
}

// Reads and writes master, m and v, reads the gradient, writes the parameter.
void DeviceBench::AdamW(DType grad) {
  const std::string op = absl::StrCat("adamw, ", DTypeName(grad), " gradients");
  if (!Wanted(op)) return;
  const int64_t per_param = 6 * 4 + DTypeBytes(grad) + DTypeBytes(kType);
  const int64_t n = bytes() / per_param / 64 * 64;
  const UpdateRange range = {0, n, 0.1f};
  UpdateState state;
  state.param = RandomVector(n, kType);
  state.master = static_cast<float*>(Random(n, DType::kF32));
  state.grad = RandomVector(n, grad);
  state.ranges = {&range, 1};
  AdamWArgs args{state, static_cast<float*>(Random(n, DType::kF32)),
                 static_cast<float*>(Memory(n * 4))};
  // Half of the random numbers are negative; no second moment is.
  ops().Fill(*stream_, {{args.v, DType::kF32, n}, 0.1f});
  args.lr = 1e-4f;
  Move(op, absl::StrCat(n), per_param * n,
       [&] { ops().AdamW(*stream_, args); });
}

// Reads x and the residual, writes their sum and y.
void DeviceBench::Norms(int64_t width) {
  const int64_t rows = bytes() / 8 / width;
  const std::string shape = absl::StrCat(rows, " x ", width);
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    const bool layer = kind == NormKind::kLayerNorm;
    const char* const op = layer ? "layernorm" : "rmsnorm";
    if (!Wanted(op)) continue;
    NormForwardArgs args{.kind = kind,
                         .x = RandomRows(rows, width),
                         .residual = RandomRows(rows, width)};
    args.sum = RandomRows(rows, width);
    args.weight = RandomVector(width, kType);
    if (layer) args.bias = RandomVector(width, kType);
    args.y = RandomRows(rows, width);
    if (layer) args.mean = static_cast<float*>(Memory(rows * 4));
    args.rstd = static_cast<float*>(Memory(rows * 4));
    Move(op, shape, rows * (8 * width + (layer ? 8 : 4)),
         [&] { ops().NormForward(*stream_, args); });
  }
  NormBackward(rows, width);
}

// Reads dy, the sum and its gradient, writes dx.
void DeviceBench::NormBackward(int64_t rows, int64_t width) {
  const std::string shape = absl::StrCat(rows, " x ", width);
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    const bool layer = kind == NormKind::kLayerNorm;
    const char* const op = layer ? "layernorm backward" : "rmsnorm backward";
    if (!Wanted(op)) continue;
    NormBackwardArgs args{.kind = kind,
                          .dy = RandomRows(rows, width),
                          .sum = RandomRows(rows, width)};
    args.weight = RandomVector(width, kType);
    args.mean = static_cast<float*>(Random(rows, DType::kF32));
    args.rstd = static_cast<float*>(Random(rows, DType::kF32));
    args.dsum = RandomRows(rows, width);
    args.dx = RandomRows(rows, width);
    args.dweight = RandomVector(width, DType::kF32);
    if (layer) args.dbias = RandomVector(width, DType::kF32);
    const Workspace scratch = Scratch(ops().NormBackwardWorkspaceBytes(args));
    Move(op, shape, rows * (8 * width + (layer ? 8 : 4)),
         [&] { ops().NormBackward(*stream_, args, scratch); });
  }
}

void DeviceBench::ElementWise(int64_t width) {
  if (Wanted("swiglu")) {
    const int64_t rows = bytes() / 6 / width;
    const Matrix x = RandomMatrix(rows, 2 * width, kType);
    const Matrix y = RandomMatrix(rows, width, kType);
    Move("swiglu", absl::StrCat(rows, " x ", width), 6 * rows * width, [&] {
      ops().SwigluForward(*stream_, {x, y});
    });
  }
  if (Wanted("swiglu backward")) {
    const int64_t rows = bytes() / 10 / width;
    const Matrix x = RandomMatrix(rows, 2 * width, kType);
    const Matrix dy = RandomMatrix(rows, width, kType);
    const Matrix dx = RandomMatrix(rows, 2 * width, kType);
    Move("swiglu backward", absl::StrCat(rows, " x ", width), 10 * rows * width,
         [&] {
           ops().SwigluBackward(*stream_, {x, dy, dx});
         });
  }
  if (Wanted("gelu")) {
    const Vector x = RandomVector(bytes() / 4, kType);
    const Vector y = RandomVector(bytes() / 4, kType);
    Move("gelu", absl::StrCat(x.size), 4 * x.size, [&] {
      ops().GeluForward(*stream_, {Gelu::kTanh, x, y});
    });
  }
}

void DeviceBench::SumSquares() {
  if (!Wanted("sum of squares")) return;
  const Vector src = RandomVector(bytes() / 4, DType::kF32);
  const SquaredSpan span = {src, static_cast<double*>(Memory(64))};
  Measure("sum of squares", absl::StrCat(src.size), DType::kF32, "GB/s",
          4.0 * src.size, [&] {
            ops().SumSquares(*stream_, {{&span, 1}});
          });
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Measures a device through the ops of a training step");
  app.add_option("--device", options.run.device, "cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--threads", options.run.threads, "of a CPU (all cores)");
  app.add_option("--mebibytes", options.mebibytes, "moved by a case")
      ->capture_default_str()
      ->check(CLI::Range(1, 16384));
  app.add_option("--product", options.product, "size of the square products")
      ->capture_default_str()
      ->check(CLI::Range(16, 65536));
  app.add_option("--rounds", options.rounds, "measurements of a case")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--filter", options.filter, "only ops with this in the name");
  CLI11_PARSE(app, argc, argv);
  // The machine's best rate, not the library's first choice.
  const auto device = OpenDevice(options.run, 0, {.time_algorithms = true});
  if (!device.ok()) {
    std::cerr << "device_bench: " << device.status().message() << "\n";
    return 1;
  }
  try {
    DeviceBench(**device, options).Run();
  } catch (const std::exception& error) {  // a fault of the device
    std::cerr << "device_bench: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace zero::bench

int main(int argc, char** argv) { return zero::bench::Main(argc, argv); }
