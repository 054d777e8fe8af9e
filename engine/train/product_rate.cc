#include "engine/train/product_rate.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "kernels/ops.h"
#include "kernels/philox.h"
#include "nlohmann/json.hpp"

namespace zero {
namespace {

// On a busy machine only short products find all cores quiet, and only long
// ones reach the ceiling; the best of all sizes counts.
constexpr int64_t kSmallest = 512, kAlways = 1024, kLargest = 8192;
constexpr double kLongEnoughMs = 5;  // one product
constexpr double kLongMs = 25;       // even the smallest one is
// Per size: stop after this long without a better product, and after that long
// in any case.
constexpr double kPatienceMs = 150, kLimitMs = 1000;
constexpr double kBetter = 0.98;
constexpr int kMinRuns = 3, kMaxRuns = 5000;

// Numbers that operands repeat: a prime, so that no row is another's copy. As
// fp32 they fit into the smallest y of 16 bits.
constexpr int64_t kNumbers = (1 << 16) - 15;

// x and w, which lies behind x, get numbers in [-0.5, 0.5), by way of y.
// Neither zeros nor equal rows: a GPU multiplies those with less power and at a
// higher clock (an H200: 890 TFLOP/s of equal rows, 718 of these).
void FillOperands(Device& device, Stream& stream, const LinearArgs& args) {
  std::vector<float> numbers(kNumbers);
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = UniformFromBits(Philox(/*key=*/1, i, 0).x[0]) - 0.5f;
  }
  device.Copy(stream, args.y.data, numbers.data(), kNumbers * sizeof(float));
  char* const base = static_cast<char*>(const_cast<void*>(args.x.data));
  device.ops().Cast(stream, {{args.y.data, DType::kF32, kNumbers},
                             {base, args.x.dtype, kNumbers}});
  const int64_t bytes =
      2 * args.x.rows * args.x.cols * DTypeBytes(args.x.dtype);
  for (int64_t done = kNumbers * DTypeBytes(args.x.dtype); done < bytes;
       done *= 2) {
    device.Copy(stream, base + done, base, std::min(done, bytes - done));
  }
  stream.Synchronize();
}

// Milliseconds of the fastest n x n x n product; 0: no memory.
double BestMillis(Device& device, DType dtype, int64_t n,
                  absl::Span<char> memory) {
  const int64_t bytes = n * n * DTypeBytes(dtype);
  LinearArgs args{.x = {nullptr, dtype, n, n, n},
                  .w = {nullptr, dtype, n, n, n},
                  .y = {nullptr, dtype, n, n, n}};
  const int64_t scratch = device.ops().LinearWorkspaceBytes(args);
  Buffer own;
  if (memory.data() == nullptr) {
    auto allocated = device.Allocate(3 * bytes + scratch, MemoryKind::kDevice);
    if (!allocated.ok()) return 0;
    own = *std::move(allocated);
  } else if (static_cast<int64_t>(memory.size()) < 3 * bytes + scratch) {
    return 0;
  }
  char* const base =
      memory.data() == nullptr ? static_cast<char*>(own.data()) : memory.data();
  args.x.data = base;
  args.w.data = base + bytes;
  args.y.data = base + 2 * bytes;
  const Workspace workspace{base + 3 * bytes, static_cast<size_t>(scratch)};
  const auto stream = device.MakeStream(StreamRole::kCompute);
  const auto start = device.MakeEvent(), end = device.MakeEvent();
  FillOperands(device, *stream, args);
  double best_ms = 1e30, total_ms = 0, stop_ms = kPatienceMs;
  for (int i = 0; i <= kMinRuns || (i <= kMaxRuns && total_ms < stop_ms); ++i) {
    stream->Record(*start);
    device.ops().Linear(*stream, args, workspace);
    stream->Record(*end);
    end->Synchronize();
    const double ms = end->MillisSince(*start);
    total_ms += ms;
    if (i == 0) continue;  // it warms up
    if (ms < kBetter * best_ms) {
      stop_ms = std::min(total_ms + kPatienceMs, kLimitMs);
    }
    best_ms = std::min(best_ms, ms);
  }
  return best_ms;
}

}  // namespace

ProductRate MeasureProductRate(Device& device, DType dtype,
                               absl::Span<char> memory) {
  ProductRate best;
  for (int64_t n = kSmallest; n <= kLargest; n *= 2) {
    const double ms = BestMillis(device, dtype, n, memory);
    if (ms <= 0) break;
    const double flops = 2.0 * n * n * n / (ms * 1e-3);
    if (flops > best.flops) best = {flops, n};
    if (ms >= (n >= kAlways ? kLongEnoughMs : kLongMs)) break;
  }
  return best;
}

ProductRate BestProductRate(const std::string& file, const DeviceInfo& device,
                            DType dtype, const ProductRate& measured) {
  using Json = nlohmann::ordered_json;
  const auto text = ReadFile(file);
  Json rates = Json::parse(text.ok() ? *text : "", /*cb=*/nullptr,
                           /*allow_exceptions=*/false);
  if (!rates.is_object()) rates = Json::object();
  Json& kept =
      rates[absl::StrCat(device.name, ", ", device.isa, ", ",
                         device.num_threads, " threads, ", DTypeName(dtype))];
  const Json flops = kept.is_object() ? kept.value("flops", Json()) : Json();
  const Json size = kept.is_object() ? kept.value("size", Json()) : Json();
  if (flops.is_number() && size.is_number_integer() &&
      flops.get<double>() >= measured.flops) {
    return {flops.get<double>(), size.get<int64_t>(), /*earlier=*/true};
  }
  if (measured.flops <= 0) return measured;
  kept = {{"flops", measured.flops}, {"size", measured.size}};
  WriteFileAtomically(file, rates.dump(1) + "\n").IgnoreError();
  return measured;
}

}  // namespace zero
