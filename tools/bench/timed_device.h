// A device that runs another's kernels and times each call: the profile of a
// real step, inside that step. Two clock reads per call, about 100 ns; on a GPU
// two events per call, read when the times are asked for.
#ifndef ZERO_TOOLS_BENCH_TIMED_DEVICE_H_
#define ZERO_TOOLS_BENCH_TIMED_DEVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/ops.h"
#include "tools/bench/products.h"

namespace zero::bench {

struct OpTime {
  int64_t calls = 0;
  double seconds = 0;
  double flops = 0;  // of matrix products, over all calls
};

// Times by op; those of matrix products also by shape: "linear 1024x768x3072
// gelu".
using OpTimes = std::map<std::string, OpTime>;

// How a call is timed.
enum class Timing {
  kClock,  // by the clock: for a device whose work is done when a call returns
  // Times by events on the op's own stream. REQUIRES: the work is done when the
  // times are read.
  kEvents,
  kOff,  // not timed
};

// REQUIRES: `inner` outlives the device.
class TimedDevice final : public Device {
 public:
  TimedDevice(Device& inner, Timing timing);

  void set_timing(Timing timing) { timing_ = timing; }
  // From now on the products of every timed op are added to `products`; null:
  // to none.
  void set_products(std::vector<ProductShape>* products) {
    products_ = products;
  }
  OpTimes& times();
  // CPU time of the calling thread in kernels timed by kClock.
  double cpu_seconds() const { return cpu_seconds_; }

  DeviceKind kind() const override { return inner_.kind(); }
  DeviceInfo info() const override { return inner_.info(); }
  std::vector<std::string> notes() const override { return inner_.notes(); }
  DeviceMemory memory() const override { return inner_.memory(); }
  int64_t stream_bytes(StreamRole role) const override {
    return inner_.stream_bytes(role);
  }
  bool asynchronous() const override { return inner_.asynchronous(); }
  void PushRange(const char* name) override { inner_.PushRange(name); }
  void PopRange() override { inner_.PopRange(); }
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return inner_.Allocate(bytes, kind);
  }
  std::unique_ptr<Stream> MakeStream(StreamRole role) override {
    return inner_.MakeStream(role);
  }
  std::unique_ptr<Event> MakeEvent() override { return inner_.MakeEvent(); }
  Ops& ops() override { return *ops_; }
  Device& host() override { return inner_.host(); }
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override {
    inner_.Copy(stream, dst, src, bytes);
  }
  void CopyRows(Stream& stream, void* dst, size_t dst_stride, const void* src,
                size_t src_stride, size_t row_bytes, size_t num_rows) override {
    inner_.CopyRows(stream, dst, dst_stride, src, src_stride, row_bytes,
                    num_rows);
  }

 private:
  class TimedOps;
  // An op that is running, or not yet waited for.
  struct Pending {
    std::string name;
    double flops;
    std::unique_ptr<Event> start, end;
  };

  void Count(const std::string& name, double flops, double seconds);
  void Free(void*, size_t, MemoryKind) override;

  Device& inner_;
  Timing timing_;
  std::unique_ptr<Ops> ops_;
  OpTimes times_;
  double cpu_seconds_ = 0;
  std::vector<ProductShape>* products_ = nullptr;
  std::vector<Pending> pending_;
};

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_TIMED_DEVICE_H_
