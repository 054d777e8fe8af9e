// The CPU as a Device: streams that are threads, events that are futexes,
// buffers that are mappings.
//
// The compute stream is the calling thread: Enqueue runs the work at once. A
// stream of any other role is one worker thread with a queue; it blocks on a
// condition variable while idle, never spins, and enters OpenMP only on kHost,
// whose kernels have a team of their own of Options::host_threads.
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
    int host_threads = 0;  // of host(); 0: as many
    // Another device's host: memory that Ops::Fill writes first lies on the
    // NUMA nodes of the threads that update it.
    bool is_host = false;
  };
  explicit CpuDevice(const Options& options);

  DeviceKind kind() const override { return DeviceKind::kCpu; }
  DeviceInfo info() const override;
  // total_bytes: what this process may take in all, measured at the first call.
  // context_bytes: ResidentAtStart and what a run takes later beside arenas.
  DeviceMemory memory() const override;
  int64_t stream_bytes(StreamRole role) const override;
  absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) override;
  std::unique_ptr<Stream> MakeStream(StreamRole role) override;
  std::unique_ptr<Event> MakeEvent() override;
  Ops& ops() override { return ops_; }
  Device& host() override;

  // On the compute stream all compute threads copy; a worker copies alone.
  void Copy(Stream& stream, void* dst, const void* src, size_t bytes) override;

 private:
  void Free(void* data, size_t bytes, MemoryKind kind) override;

  Options options_;
  CpuOps ops_;
  std::unique_ptr<Device> host_;  // null: this one
};

// zero::MakeCpuDevice with a host() of `host_threads`; 0: as many.
std::unique_ptr<Device> MakeCpuDevice(int num_threads, int host_threads);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_DEVICE_H_
