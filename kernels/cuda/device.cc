#include "kernels/cuda/device.h"

#include <cuda.h>
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/peak_flops.h"

namespace zero::cuda {
namespace {

// PTX of the oldest architecture that is compiled in (tools/configure).
constexpr int kMinComputeCapability = 80;

// Ignores an error where nothing may throw, as in a destructor.
void Ignore(cudaError_t) {}

class CudaEvent final : public Event {
 public:
  // Blocking: the host sleeps instead of spinning.
  CudaEvent() {
    ZERO_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventBlockingSync));
  }
  ~CudaEvent() override { Ignore(cudaEventDestroy(event_)); }

  void Synchronize() override { ZERO_CUDA_CHECK(cudaEventSynchronize(event_)); }
  bool IsDone() const override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaSuccess) return true;
    if (status == cudaErrorNotReady) {
      Ignore(cudaGetLastError());  // clears it: the next launch asks
      return false;
    }
    ThrowCudaError("cudaEventQuery(event_)", __FILE__, __LINE__, status);
  }
  double MillisSince(const Event& start) const override {
    float millis = 0;
    ZERO_CUDA_CHECK(cudaEventElapsedTime(
        &millis, static_cast<const CudaEvent&>(start).event_, event_));
    return millis;
  }
  cudaEvent_t handle() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Makes `stream` wait until *value >= least. It calls the driver, since the
// runtime has no name for it.
void WaitForValue(cudaStream_t stream, const std::atomic<uint32_t>* value,
                  uint32_t least) {
  using Function = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  static const Function function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    ZERO_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
        "cuStreamWaitValue32", &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) {
      ThrowDeviceError("cuStreamWaitValue32", __FILE__, __LINE__,
                       "the driver does not have it; update the driver");
    }
    return reinterpret_cast<Function>(found);
  }();
  const CUresult result = function(stream, reinterpret_cast<CUdeviceptr>(value),
                                   least, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) {
    ThrowCudaError("cuStreamWaitValue32", __FILE__, __LINE__,
                   static_cast<cudaError_t>(result));
  }
}

// A thread that does the host's work in the order of a CUDA stream. CUDA runs
// the functions of all streams on one thread, one after the other: a function
// there only wakes the worker, and the stream waits for its count.
class HostWorker {
 public:
  HostWorker(CudaDevice& device, StreamRole role)
      : memory_(Pinned(device)),
        num_done_(new (memory_.data()) std::atomic<uint32_t>(0)),
        worker_(device.host().MakeStream(role)) {}

  void Enqueue(cudaStream_t stream, std::function<void()> work) {
    const uint32_t number = ++num_enqueued_;
    auto wake = std::make_unique<std::function<void()>>(
        [this, number, work = std::move(work)]() mutable {
          worker_->Enqueue([this, number, work = std::move(work)]() mutable {
            work();
            work = nullptr;  // what it captured is gone before it counts
            num_done_->store(number);
          });
        });
    ZERO_CUDA_CHECK(cudaLaunchHostFunc(
        stream,
        [](void* data) {
          const std::unique_ptr<std::function<void()>> wake(
              static_cast<std::function<void()>*>(data));
          (*wake)();
        },
        wake.get()));
    wake.release();  // the function's
    WaitForValue(stream, num_done_, number);
  }

  // Waits for work that the stream does not wait for, after an error.
  void Synchronize() { worker_->Synchronize(); }

 private:
  static Buffer Pinned(CudaDevice& device) {
    auto memory = device.Allocate(sizeof(uint32_t), MemoryKind::kHost);
    if (!memory.ok()) {
      ThrowDeviceError("cudaHostAlloc", __FILE__, __LINE__,
                       std::string(memory.status().message()));
    }
    return *std::move(memory);
  }

  Buffer memory_;
  std::atomic<uint32_t>* num_done_;
  uint32_t num_enqueued_ = 0;
  std::unique_ptr<Stream> worker_;
};

bool IsOnHost(StreamRole role) {
  return role == StreamRole::kHost || role == StreamRole::kRead ||
         role == StreamRole::kWrite;
}

class CudaStream final : public Stream {
 public:
  CudaStream(CudaDevice& device, StreamRole role, int priority)
      : device_(device),
        worker_(IsOnHost(role) ? std::make_unique<HostWorker>(device, role)
                               : nullptr) {
    ZERO_CUDA_CHECK(cudaStreamCreateWithPriority(
        &stream_, cudaStreamNonBlocking, priority));
    const int64_t bytes = StreamBytes(role);
    if (bytes > 0) ZERO_CUDA_CHECK(cudaMalloc(&scratch_, bytes));
  }
  ~CudaStream() override {
    Ignore(cudaSetDevice(device_.index()));
    Ignore(cudaStreamSynchronize(stream_));
    Ignore(cudaStreamDestroy(stream_));
    Ignore(cudaFree(scratch_));
  }

  void Enqueue(std::function<void()> work) override {
    device_.MakeCurrent();
    worker_ ? worker_->Enqueue(stream_, std::move(work)) : work();
  }
  void Record(Event& event) override {
    ZERO_CUDA_CHECK(cudaEventRecord(HandleOf(event), stream_));
  }
  void Wait(Event& event) override {
    ZERO_CUDA_CHECK(cudaStreamWaitEvent(stream_, HandleOf(event), 0));
  }
  void Synchronize() override {
    ZERO_CUDA_CHECK(cudaStreamSynchronize(stream_));
    if (worker_) worker_->Synchronize();
  }
  Device& device() override { return device_; }

  cudaStream_t handle() const { return stream_; }
  void* scratch() const { return scratch_; }

 private:
  CudaDevice& device_;
  const std::unique_ptr<HostWorker> worker_;  // of a role of the host
  cudaStream_t stream_ = nullptr;
  void* scratch_ = nullptr;
};

int Attribute(cudaDeviceAttr attribute, int index) {
  int value = 0;
  ZERO_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, index));
  return value;
}

int ComputeCapability(int index) {
  return 10 * Attribute(cudaDevAttrComputeCapabilityMajor, index) +
         Attribute(cudaDevAttrComputeCapabilityMinor, index);
}

// Lets kernels of the current device read the memory of `peer` in place; false
// where they cannot.
bool EnablePeer(int peer) {
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaSuccess) return true;
  Ignore(cudaGetLastError());  // clears it
  return status == cudaErrorPeerAccessAlreadyEnabled;
}

// Bytes that the current device, `index`, has taken once its first user in this
// process has loaded its libraries and allocated nothing else. The number is
// the same for all ranks that are threads, although some may have memory
// already.
int64_t ContextBytes(int index) {
  static std::mutex mutex;
  static std::map<int, int64_t>* const measured = new std::map<int, int64_t>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto known = measured->find(index);
  if (known != measured->end()) return known->second;
  size_t free = 0, total = 0;
  ZERO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return (*measured)[index] = static_cast<int64_t>(total - free);
}

// "CUDA 13.0" of 13000.
std::string CudaVersionText(int version) {
  return absl::StrCat("CUDA ", version / 1000, ".", version % 1000 / 10);
}

// Why there is no GPU, and what helps, by what counting them returned.
std::string WhyNone(cudaError_t count_error) {
  // The runtime says this, too, where there is no driver.
  if (count_error == cudaErrorInsufficientDriver) {
    int driver = 0;
    Ignore(cudaDriverGetVersion(&driver));
    if (driver == 0) {
      return "NVIDIA's driver (libcuda.so.1) is not on this machine; install "
             "it";
    }
    return absl::StrCat("NVIDIA's driver here is for ", CudaVersionText(driver),
                        ", and this program needs one for ",
                        CudaVersionText(CUDART_VERSION), "; update it");
  }
  if (count_error != cudaSuccess && count_error != cudaErrorNoDevice) {
    return absl::StrCat("CUDA does not start (",
                        cudaGetErrorString(count_error), "); run nvidia-smi");
  }
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return "NVIDIA's driver finds none; run nvidia-smi";
  return absl::StrCat("NVIDIA's driver finds none with CUDA_VISIBLE_DEVICES=\"",
                      visible, "\"; change that, or run nvidia-smi");
}

absl::Status CheckUsable(int index, int num_devices, cudaError_t count_error) {
  const std::string name = absl::StrCat("device cuda:", index, ": ");
  if (count_error != cudaSuccess || num_devices == 0) {
    return absl::NotFoundError(
        absl::StrCat(name, "no GPU can be used: ", WhyNone(count_error),
                     ", or use --device cpu"));
  }
  if (index < 0 || index >= num_devices) {
    return absl::NotFoundError(
        absl::StrCat(name, "this process sees ", num_devices,
                     num_devices == 1 ? " GPU" : " GPUs",
                     "; use fewer ranks, or check CUDA_VISIBLE_DEVICES"));
  }
  const int capability = ComputeCapability(index);
  if (capability < kMinComputeCapability) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, "its compute capability is ", capability / 10, ".",
        capability % 10, ", and kernels are built for ",
        kMinComputeCapability / 10, ".", kMinComputeCapability % 10,
        " and later (Ampere); use --device cpu"));
  }
  return absl::OkStatus();
}

}  // namespace

cudaStream_t HandleOf(Stream& stream) {
  return static_cast<CudaStream&>(stream).handle();
}

void* ScratchOf(Stream& stream) {
  return static_cast<CudaStream&>(stream).scratch();
}

cudaEvent_t HandleOf(Event& event) {
  return static_cast<CudaEvent&>(event).handle();
}

absl::StatusOr<std::unique_ptr<Device>> CudaDevice::Open(
    int index, const CudaOptions& options, int host_threads) {
  int num_devices = 0;
  const cudaError_t count_error = cudaGetDeviceCount(&num_devices);
  const absl::Status usable = CheckUsable(index, num_devices, count_error);
  if (!usable.ok()) return usable;
  ZERO_CUDA_CHECK(cudaSetDevice(index));
  std::unique_ptr<CudaDevice> device(
      new CudaDevice(index, options, host_threads, 0));
  device->context_bytes_ = ContextBytes(index);
  return device;
}

CudaDevice::CudaDevice(int index, const CudaOptions& options, int host_threads,
                       int64_t context_bytes)
    : index_(index),
      context_bytes_(context_bytes),
      ops_(options),
      host_(MakeCpuDevice(host_threads)) {}

CudaDevice::~CudaDevice() { Ignore(cudaSetDevice(index_)); }

void CudaDevice::MakeCurrent() const { ZERO_CUDA_CHECK(cudaSetDevice(index_)); }

DeviceInfo CudaDevice::info() const {
  cudaDeviceProp properties;
  ZERO_CUDA_CHECK(cudaGetDeviceProperties(&properties, index_));
  int driver = 0;
  ZERO_CUDA_CHECK(cudaDriverGetVersion(&driver));
  DeviceInfo info;
  info.name = properties.name;
  info.isa = absl::StrCat("sm_", ComputeCapability(index_));
  info.num_threads = properties.multiProcessorCount;
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.peak_flops_bf16 = PeakFlopsBf16(info.name);
  info.driver = CudaVersionText(driver);
  return info;
}

DeviceMemory CudaDevice::memory() const {
  MakeCurrent();
  size_t free = 0, total = 0;
  ZERO_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {static_cast<int64_t>(free), static_cast<int64_t>(total),
          context_bytes_};
}

// Peer access is enabled where somebody asks for it: it takes a context on the
// peer, which processes with one rank each do not need.
bool CudaDevice::Reaches(const Device& other) const {
  if (other.kind() != DeviceKind::kCuda) return false;
  const int peer = static_cast<const CudaDevice&>(other).index_;
  if (peer == index_) return true;
  int can = 0, current = 0;
  ZERO_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, index_, peer));
  if (can == 0) return false;
  ZERO_CUDA_CHECK(cudaGetDevice(&current));
  MakeCurrent();
  const bool enabled = EnablePeer(peer);
  ZERO_CUDA_CHECK(cudaSetDevice(current));
  return enabled;
}

absl::StatusOr<Buffer> CudaDevice::Allocate(size_t bytes, MemoryKind kind) {
  MakeCurrent();
  void* data = nullptr;
  // A byte at least: every buffer has an address of its own.
  const size_t size = bytes == 0 ? 1 : bytes;
  const bool host = kind == MemoryKind::kHost;
  const cudaError_t status =
      host ? cudaHostAlloc(&data, size, cudaHostAllocPortable)
           : cudaMalloc(&data, size);
  if (status == cudaErrorMemoryAllocation) {
    Ignore(cudaGetLastError());  // clears it
    if (host) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cuda:", index_, ": no ", bytes,
                       " bytes of pinned host memory; free memory of this "
                       "machine, or start fewer ranks on it"));
    }
    const DeviceMemory now = memory();
    return absl::ResourceExhaustedError(absl::StrCat(
        "cuda:", index_, ": no ", bytes, " bytes of device memory; ",
        now.free_bytes, " of ", now.total_bytes, " are free"));
  }
  if (status != cudaSuccess) {
    ThrowCudaError(host ? "cudaHostAlloc" : "cudaMalloc", __FILE__, __LINE__,
                   status);
  }
  return Buffer(this, kind, data, bytes);
}

void CudaDevice::Free(void* data, size_t /*bytes*/, MemoryKind kind) {
  Ignore(cudaSetDevice(index_));
  Ignore(kind == MemoryKind::kHost ? cudaFreeHost(data) : cudaFree(data));
}

std::unique_ptr<Stream> CudaDevice::MakeStream(StreamRole role) {
  MakeCurrent();
  // A collective's few blocks start as soon as one of the product's ends:
  // behind them the network would idle.
  int lowest = 0, highest = 0;
  ZERO_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  const bool first = role == StreamRole::kGather || role == StreamRole::kReduce;
  return std::make_unique<CudaStream>(*this, role, first ? highest : lowest);
}

std::unique_ptr<Event> CudaDevice::MakeEvent() {
  MakeCurrent();
  return std::make_unique<CudaEvent>();
}

void CudaDevice::Copy(Stream& stream, void* dst, const void* src,
                      size_t bytes) {
  if (bytes == 0) return;
  ZERO_CUDA_CHECK(
      cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, HandleOf(stream)));
}

void CudaDevice::CopyRows(Stream& stream, void* dst, size_t dst_stride,
                          const void* src, size_t src_stride, size_t row_bytes,
                          size_t num_rows) {
  if (row_bytes == 0 || num_rows == 0) return;
  ZERO_CUDA_CHECK(cudaMemcpy2DAsync(dst, dst_stride, src, src_stride, row_bytes,
                                    num_rows, cudaMemcpyDefault,
                                    HandleOf(stream)));
}

void CudaDevice::PushRange(const char* name) { nvtxRangePushA(name); }
void CudaDevice::PopRange() { nvtxRangePop(); }

}  // namespace zero::cuda

namespace zero {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(
    int index, const CudaOptions& options, int host_threads) {
  try {
    return cuda::CudaDevice::Open(index, options, host_threads);
  } catch (const cuda::DeviceError& error) {
    return absl::InternalError(error.what());
  }
}

int NumCudaDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace zero
