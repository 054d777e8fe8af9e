// A device that runs another one's kernels and times each call: the profile of
// a real step, in that very step. Two clock reads per call, some 100 ns.
#ifndef ZERO_TOOLS_BENCH_TIMED_DEVICE_H_
#define ZERO_TOOLS_BENCH_TIMED_DEVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "kernels/device.h"

namespace zero::bench {

struct OpTime {
  int64_t calls = 0;
  double seconds = 0;
  double flops = 0;  // of matrix products, over all calls
};

// By op, and for matrix products by shape: "linear 1024x768x3072 gelu".
using OpTimes = std::map<std::string, OpTime>;

// Of a device whose work is asynchronous it waits for every op: the sum of the
// times is then more than a step takes.
// REQUIRES: `inner` outlives the device.
class TimedDevice final : public Device {
 public:
  explicit TimedDevice(Device& inner);
  ~TimedDevice() override;

  OpTimes& times();

  DeviceKind kind() const override { return inner_.kind(); }
  DeviceInfo info() const override { return inner_.info(); }
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override {
    return inner_.Allocate(bytes, kind);
  }
  std::unique_ptr<Stream> MakeStream(StreamRole role) override {
    return inner_.MakeStream(role);
  }
  std::unique_ptr<Event> MakeEvent() override { return inner_.MakeEvent(); }
  Ops& ops() override;
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override {
    inner_.Copy(stream, dst, src, bytes);
  }

 private:
  class TimedOps;
  void Free(void*, size_t, MemoryKind) override;

  Device& inner_;
  std::unique_ptr<TimedOps> ops_;
};

}  // namespace zero::bench

#endif  // ZERO_TOOLS_BENCH_TIMED_DEVICE_H_
