// The only face of hardware: Device, Stream, Event, Buffer.
//
// The engine is written once against these. A CUDA stream is a stream; on the
// CPU the compute stream is the calling thread and every other stream is a
// worker thread with a queue. The meta device has addresses and no memory: a
// whole training step runs on it in microseconds, which predicts the memory.
// Start reading here, then kernels/ops.h.
//
// To add a device: implement Device, Stream, Event and Ops in a folder next to
// cpu/, and a linked *_off twin that returns an error if it is not built.
#ifndef ZERO_KERNELS_DEVICE_H_
#define ZERO_KERNELS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/options.h"

namespace zero {

class Device;
class Ops;

enum class DeviceKind { kCpu, kCuda, kMeta };

// "cpu", "cuda", "meta".
const char* DeviceKindName(DeviceKind kind);

// kHost is memory that the CPU and a device's kernels can read, and that the
// device can copy from asynchronously (pinned on CUDA, plain on the CPU).
enum class MemoryKind { kDevice, kHost };

// A point in the work of one stream.
// Threads: may be recorded on one thread and awaited on another.
class Event {
 public:
  virtual ~Event() = default;

  // Blocks the calling thread (on a futex, never spinning) until the work
  // recorded before this event is done. An event never recorded is done.
  virtual void Synchronize() = 0;

  // True when the recorded work is done. Never blocks.
  virtual bool IsDone() const = 0;

  // Milliseconds from `start` to this event; both must be done.
  virtual double MillisSince(const Event& start) const = 0;
};

// A queue of work that runs in order.
class Stream {
 public:
  virtual ~Stream() = default;

  // Runs `work` after everything enqueued before it. The calling-thread stream
  // runs it at once; a worker stream runs it on its thread; on CUDA `work` is
  // called at once and launches asynchronously on this stream; on kHost, kRead
  // and kWrite it runs later, on a thread of that stream, and must not call
  // CUDA.
  virtual void Enqueue(std::function<void()> work) = 0;

  // Marks this point of the stream in `event`.
  virtual void Record(Event& event) = 0;

  // Makes work enqueued later on this stream wait for `event`.
  virtual void Wait(Event& event) = 0;

  // Blocks the caller until the stream is empty.
  virtual void Synchronize() = 0;

  virtual Device& device() = 0;
};

enum class StreamRole {
  kCompute,  // the calling thread on the CPU
  kGather,   // collectives that fetch parameters
  kReduce,   // collectives that reduce gradients
  kUp,       // copies from the host's memory
  kDown,     // copies to it
  kHost,     // the host's computation there
  kRead,     // reads from a disk into the host's memory
  kWrite,    // writes to it
};
inline constexpr int kNumStreamRoles = 8;

// One allocation from a device, owned. Alignment: 4096 bytes on the CPU, 256
// or better on CUDA. The meta device gives addresses that must not be read.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(Device* device, MemoryKind kind, void* data, size_t bytes)
      : device_(device), kind_(kind), data_(data), bytes_(bytes) {}
  ~Buffer();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  MemoryKind kind_ = MemoryKind::kDevice;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Facts about a device for start-up tables and benchmarks.
struct DeviceInfo {
  std::string name;          // "AMD EPYC ...", "NVIDIA H200"
  std::string isa;           // "avx2", "avx512_bf16", "sm_90"
  int num_threads = 1;       // compute threads of this rank; SMs on a GPU
  int64_t memory_bytes = 0;  // total
  // Dense peak by the vendor's table in FLOP/s for bf16; 0 if unknown.
  double peak_flops_bf16 = 0;
  std::string driver;  // "CUDA 13.0"; empty on the CPU
};

// Free and used memory of a device right now, by all its users; zeros on a
// device without its own memory.
struct DeviceMemory {
  int64_t free_bytes = 0;
  int64_t total_bytes = 0;
  // Memory used when the device was opened: context and modules, and other
  // processes' memory. Part of the category `fixed`.
  int64_t context_bytes = 0;
};

// One device as one rank sees it.
// Threads: used from the rank's own thread, except where a stream says so.
class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceKind kind() const = 0;
  virtual DeviceInfo info() const = 0;
  // Notes on what is slower on this device than it could be, why, and what
  // helps. New ones come at the end, as new shapes are used; empty if all is
  // well.
  virtual std::vector<std::string> notes() const { return {}; }
  virtual DeviceMemory memory() const { return {}; }
  // Device memory per stream: scratch of its kernels.
  virtual int64_t stream_bytes(StreamRole /*role*/) const { return 0; }

  // True if work of the compute stream may still run when the launching call
  // returns: reading a result on the host must wait for an event first, and
  // other threads wait for events, not for the call.
  virtual bool asynchronous() const { return false; }

  // True if kernels of this device can read and write the memory of `other`
  // (the same device, or a GPU with peer access).
  virtual bool Reaches(const Device& /*other*/) const { return true; }

  // Names the launches between the two calls for a profiler (NVTX on CUDA).
  // `name` must outlive the range.
  virtual void PushRange(const char* /*name*/) {}
  virtual void PopRange() {}

  // Errors: ResourceExhausted with the size asked for.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes, MemoryKind kind) = 0;

  virtual std::unique_ptr<Stream> MakeStream(StreamRole role) = 0;
  virtual std::unique_ptr<Event> MakeEvent() = 0;

  // The kernels of this device.
  virtual Ops& ops() = 0;

  // The CPU that computes on kHost memory, in functions enqueued on a stream
  // of this device with the role kHost.
  virtual Device& host() { return *this; }

  // Copies between any two memories this device can reach, on `stream`.
  virtual void Copy(Stream& stream, void* dst, const void* src,
                    size_t bytes) = 0;
  // The same for `num_rows` rows of `row_bytes`, `dst_stride` and `src_stride`
  // bytes apart: row by row, unless the device can do better. REQUIRES: strides
  // >= row_bytes.
  virtual void CopyRows(Stream& stream, void* dst, size_t dst_stride,
                        const void* src, size_t src_stride, size_t row_bytes,
                        size_t num_rows);

 private:
  friend class Buffer;
  virtual void Free(void* data, size_t bytes, MemoryKind kind) = 0;
};

// The CPU with `num_threads` compute threads. Ops run on the calling thread
// (the rank's thread), which this call binds to that many OpenMP threads; the
// number affects the bits (products are cut by it), so it is fixed for the life
// of the device.
std::unique_ptr<Device> MakeCpuDevice(int num_threads);

// A device without memory whose workspaces are as large as those of `model`,
// which must outlive it.
std::unique_ptr<Device> MakeMetaDevice(Device& model);

// GPU `index`, whose host() has `host_threads`. Errors: Unimplemented if CUDA
// is not built, with the remedy; NotFound if there is no such GPU.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    int index, const CudaOptions& options = {}, int host_threads = 1);

// A GPU for plans without one: "NVIDIA H100 80 GB (assumed: no GPU here)". Its
// workspaces are a real one's, with a bound for those that cuDNN chooses; the
// memory of its context and libraries is assumed too. It computes nothing.
std::unique_ptr<Device> MakeAssumedGpu(const CudaOptions& options = {});

// GPUs that this process sees; 0 if there is none or CUDA is not built.
int NumCudaDevices();

}  // namespace zero

#endif  // ZERO_KERNELS_DEVICE_H_
