// The CPU as a Device: streams that are threads, events that are futexes,
// buffers that are mappings.
//
// The compute stream is the calling thread: Enqueue runs the work at once. A
// stream of any other role is one worker thread with a queue; it blocks on a
// condition variable while idle, never spins, and enters OpenMP only on kHost,
// whose kernels have as many threads as those of kCompute.
#ifndef ZERO_KERNELS_CPU_DEVICE_H_
#define ZERO_KERNELS_CPU_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/device.h"

namespace zero::cpu {

// An event with CUDA's semantics: a wait is for the last Record issued before
// it.
std::unique_ptr<Event> MakeEvent();

// A stream of `device`.
std::unique_ptr<Stream> MakeStream(Device& device, StreamRole role);

class CpuDevice final : public Device {
 public:
  struct Options {
    int num_threads = 1;
    LowPrecision low_precision = LowPrecision::kAuto;
  };
  explicit CpuDevice(const Options& options);

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  DeviceInfo info() const override;
  // As of the first call in this process: its own bytes, and those it may take.
  DeviceMemory memory() const override;
  int64_t stream_bytes(StreamRole role) const override;
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override;
  std::unique_ptr<Stream> MakeStream(StreamRole role) override;
  std::unique_ptr<Event> MakeEvent() override;
  Ops& ops() override { return ops_; }

  // On the compute stream all compute threads copy; a worker copies alone.
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override;

 private:
  void Free(void* data, size_t bytes, MemoryKind kind) override;

  Options options_;
  CpuOps ops_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_DEVICE_H_
