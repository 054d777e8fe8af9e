// The functions of cudart that kernels/cuda and engine/comm call, over host
// memory and the queues of fake_gpu.h.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/support/cuda_emulator/control.h"
#include "tests/support/cuda_emulator/emulator.h"
#include "tests/support/cuda_emulator/fake_gpu.h"
#include "tests/support/cuda_emulator/fake_streams.h"
#include "tests/support/cuda_emulator/machine.h"

namespace zero::emulator {
namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Memory of a context and its modules.
constexpr int64_t kContextBytes = int64_t{256} << 20;
constexpr size_t kAlignment = 256;
constexpr int kNumSms = 4;
constexpr size_t kSharedPerBlock = 227 * 1024;

// A call of the runtime: takes the lock, counts, may fail on a test's request.
struct Call {
  explicit Call(const char* name)
      : gpu(Gpu::Get()), lock(gpu.mutex), error(Begin(gpu, name)) {}
  Gpu& gpu;
  Gpu::Lock lock;
  cudaError_t error;
};

// Starts every function below.
#define ZERO_FAKE_CALL(call) \
  Call call(__func__);       \
  if (call.error != cudaSuccess) return Fail(call.error)

FakeEvent* EventOf(Gpu& gpu, cudaEvent_t handle) {
  const auto found = gpu.events.find(reinterpret_cast<FakeEvent*>(handle));
  return found == gpu.events.end() ? nullptr : found->second.get();
}

// The stream of its last record, if that still exists.
FakeStream* StreamOf(Gpu& gpu, const FakeEvent& event) {
  const auto found = gpu.streams.find(event.stream);
  return found == gpu.streams.end() ? nullptr : found->second.get();
}

Allocation* AllocationOf(Gpu& gpu, const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  auto after = gpu.allocations.upper_bound(address);
  if (after == gpu.allocations.begin()) return nullptr;
  --after;
  return address < after->first + after->second.bytes ? &after->second
                                                      : nullptr;
}

// Of exactly this size, so that asan sees an access beyond it, and not zero.
cudaError_t Allocate(Gpu& gpu, void** p, size_t bytes, Memory memory) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  FakeDevice& device = *gpu.devices[current_device];
  const bool counts = memory == Memory::kDevice || memory == Memory::kManaged;
  const uint64_t free = gpu.device_bytes - kContextBytes - device.used_bytes;
  if (bytes > (counts ? free : uint64_t{1} << 40)) {
    return Fail(cudaErrorMemoryAllocation);
  }
  if (posix_memalign(p, kAlignment, bytes) != 0) {
    return Fail(cudaErrorMemoryAllocation);
  }
  std::memset(*p, 0xff, bytes);
  if (counts) device.used_bytes += static_cast<int64_t>(bytes);
  gpu.allocations[reinterpret_cast<uintptr_t>(*p)] = {bytes, current_device,
                                                      memory};
  return cudaSuccess;
}

cudaError_t Release(Gpu& gpu, void* p) {
  const auto found = gpu.allocations.find(reinterpret_cast<uintptr_t>(p));
  if (found == gpu.allocations.end() ||
      found->second.memory == Memory::kRegistered) {
    return Fail(cudaErrorInvalidValue);
  }
  const Allocation& freed = found->second;
  if (freed.memory != Memory::kPinned) {
    gpu.devices[freed.device]->used_bytes -= static_cast<int64_t>(freed.bytes);
  }
  gpu.allocations.erase(found);
  std::free(p);
  return cudaSuccess;
}

// As the driver does, waits for the device's work, which may use the memory.
cudaError_t WaitAndRelease(Call& call, void* p) {
  if (p == nullptr) return cudaSuccess;
  const Allocation* const allocation = AllocationOf(call.gpu, p);
  if (allocation != nullptr) {
    call.gpu.WaitForDevice(call.lock, allocation->device);
  }
  return Release(call.gpu, p);
}

cudaError_t AddWork(Call& call, cudaStream_t handle, Work work) {
  FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  call.gpu.Add(call.lock, *stream, std::move(work));
  return cudaSuccess;
}

// Pageable memory is read when the call is made, and written before it
// returns; all other memory when the stream comes to it.
cudaError_t AddCopy(Call& call, void* dst, const void* src, size_t bytes,
                    cudaStream_t handle) {
  FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  const bool wait = AllocationOf(call.gpu, dst) == nullptr;
  std::function<void()> copy = [=] { std::memmove(dst, src, bytes); };
  if (AllocationOf(call.gpu, src) == nullptr) {
    const char* const begin = static_cast<const char*>(src);
    copy = [dst, staged = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(dst, staged.data(), staged.size());
    };
  }
  call.gpu.Add(call.lock, *stream, {.run = std::move(copy)});
  if (wait) call.gpu.WaitUntilEmpty(call.lock, *stream);
  return cudaSuccess;
}

cudaError_t AddFill(Call& call, void* dst, size_t pitch, int value,
                    size_t width, size_t height, cudaStream_t handle) {
  return AddWork(call, handle, {.run = [=] {
                   for (size_t i = 0; i < height; ++i) {
                     std::memset(static_cast<char*>(dst) + i * pitch, value,
                                 width);
                   }
                 }});
}

cudaError_t AddRecord(Call& call, cudaEvent_t event_handle,
                      cudaStream_t stream_handle) {
  Gpu& gpu = call.gpu;
  FakeEvent* const event = EventOf(gpu, event_handle);
  FakeStream* const stream = gpu.StreamOf(stream_handle);
  if (event == nullptr || stream == nullptr ||
      event->device != stream->device) {
    return Fail(cudaErrorInvalidResourceHandle);
  }
  event->stream = stream;
  const int64_t number = ++event->num_recorded;
  auto record = [shared = gpu.events[event], number] {
    shared->num_done = std::max(shared->num_done, number);
    shared->when = std::chrono::steady_clock::now();
  };
  gpu.Add(call.lock, *stream, {.run = std::move(record)});
  return cudaSuccess;
}

cudaError_t MakeStream(Call& call, cudaStream_t* handle, unsigned flags,
                       int priority) {
  auto stream = std::make_unique<FakeStream>();
  stream->device = current_device;
  stream->blocking = (flags & cudaStreamNonBlocking) == 0;
  stream->priority = priority;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  FakeStream* const key = stream.get();
  call.gpu.streams[key] = std::move(stream);
  return cudaSuccess;
}

cudaError_t MakeEvent(Call& call, cudaEvent_t* handle, unsigned flags) {
  auto event = std::make_shared<FakeEvent>();
  event->timed = (flags & cudaEventDisableTiming) == 0;
  event->device = current_device;
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  FakeEvent* const key = event.get();
  call.gpu.events[key] = std::move(event);
  return cudaSuccess;
}

CUresult WaitValue(CUstream stream, CUdeviceptr address, cuuint32_t least,
                   unsigned flags) {
  Call call("cuStreamWaitValue32");
  if (call.error != cudaSuccess || flags != CU_STREAM_WAIT_VALUE_GEQ) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto* const value =
      reinterpret_cast<const std::atomic<uint32_t>*>(address);
  const cudaError_t error = AddWork(
      call, stream,
      {.ready =
           [=] { return static_cast<int32_t>(value->load() - least) >= 0; },
       .run = [] {}});
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

bool IsDevice(const Gpu& gpu, int device) {
  return device >= 0 && device < gpu.num_devices;
}

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice",
     "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice",
     "no CUDA-capable device is detected"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
     "invalid resource handle"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure",
     "unspecified launch failure"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
};

const ErrorText& TextOf(cudaError_t error) {
  static constexpr ErrorText kUnknown = {cudaErrorUnknown, "cudaErrorUnknown",
                                         "unknown error"};
  for (const ErrorText& row : kErrors) {
    if (row.error == error) return row;
  }
  return kUnknown;
}

}  // namespace

int CurrentDevice() { return current_device; }

cudaError_t Fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t Begin(Gpu& gpu, const char* name) {
  ++gpu.calls[name];
  const auto failure = gpu.failures.find(name);
  if (failure == gpu.failures.end() || --failure->second.in > 0) {
    return cudaSuccess;
  }
  const cudaError_t error = failure->second.error;
  gpu.failures.erase(failure);
  return error;
}

cudaError_t Called(const char* name) {
  const Call call(name);
  return call.error;
}

cudaError_t EnqueueKernel(cudaStream_t handle, const Grid& grid, dim3 block,
                          size_t shared_bytes, std::function<void()> body) {
  Call call("launch");
  if (call.error != cudaSuccess) return Fail(call.error);
  const FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr || stream->device != current_device) {
    return Fail(cudaErrorInvalidResourceHandle);
  }
  const KernelLaunch launch = {grid, block, shared_bytes, grid.file, grid.line};
  return AddWork(call, handle, {.run = [launch, body = std::move(body)] {
                   RunKernel(launch, body);
                 }});
}

void SetStreamSeed(uint64_t seed) {
  Gpu& gpu = Gpu::Get();
  const Gpu::Lock lock(gpu.mutex);
  gpu.random = seed * 0x9e3779b97f4a7c15ull | 1;
}

void SetDeviceCount(int count) {
  Gpu& gpu = Gpu::Get();
  const Gpu::Lock lock(gpu.mutex);
  gpu.SetDevices(count);
}

void SetDeviceMemory(int64_t bytes) {
  Gpu& gpu = Gpu::Get();
  const Gpu::Lock lock(gpu.mutex);
  gpu.device_bytes = bytes;
}

void FailCall(const char* name, int nth, cudaError_t error) {
  Gpu& gpu = Gpu::Get();
  const Gpu::Lock lock(gpu.mutex);
  gpu.failures[name] = {nth, error};
}

int64_t NumCalls(const char* name) {
  Gpu& gpu = Gpu::Get();
  const Gpu::Lock lock(gpu.mutex);
  return gpu.calls[name];
}

}  // namespace zero::emulator

using namespace zero::emulator;  // NOLINT: the functions below are C

extern "C" {

// ---- Devices
// ------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  ZERO_FAKE_CALL(call);
  *count = call.gpu.num_devices;
  return *count == 0 ? Fail(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, device)) return Fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  ZERO_FAKE_CALL(call);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, device)) return Fail(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated GPU");
  properties->totalGlobalMem = call.gpu.device_bytes;
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = kNumSms;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = kSharedPerBlock;
  properties->pciBusID = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int device) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, device)) return Fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = kNumSms;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedPerBlock;
      return cudaSuccess;
    default:
      return Fail(cudaErrorInvalidValue);
  }
}

cudaError_t cudaDriverGetVersion(int* version) {
  ZERO_FAKE_CALL(call);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, device)) return Fail(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  ZERO_FAKE_CALL(call);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ZERO_FAKE_CALL(call);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, device) || !IsDevice(call.gpu, peer)) {
    return Fail(cudaErrorInvalidDevice);
  }
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  ZERO_FAKE_CALL(call);
  if (!IsDevice(call.gpu, peer) || peer == current_device) {
    return Fail(cudaErrorInvalidDevice);
  }
  const bool added =
      call.gpu.devices[current_device]->peers.insert(peer).second;
  return added ? cudaSuccess : Fail(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceSynchronize() {
  ZERO_FAKE_CALL(call);
  call.gpu.WaitForDevice(call.lock, current_device);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ZERO_FAKE_CALL(call);
  *total = call.gpu.device_bytes;
  *free = call.gpu.device_bytes - kContextBytes -
          call.gpu.devices[current_device]->used_bytes;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  ZERO_FAKE_CALL(call);
  return cudaSuccess;
}

// ---- Errors
// -------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) { return TextOf(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return TextOf(error).text; }

// ---- Memory
// -------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  ZERO_FAKE_CALL(call);
  return Allocate(call.gpu, p, bytes, Memory::kDevice);
}

cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  if (call.gpu.StreamOf(stream) == nullptr) {
    return Fail(cudaErrorInvalidResourceHandle);
  }
  return Allocate(call.gpu, p, bytes, Memory::kDevice);
}

cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) {
  ZERO_FAKE_CALL(call);
  return Allocate(call.gpu, p, bytes, Memory::kManaged);
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  ZERO_FAKE_CALL(call);
  return Allocate(call.gpu, p, bytes, Memory::kPinned);
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
  ZERO_FAKE_CALL(call);
  return Allocate(call.gpu, p, bytes, Memory::kPinned);
}

cudaError_t cudaFree(void* p) {
  ZERO_FAKE_CALL(call);
  return WaitAndRelease(call, p);
}

cudaError_t cudaFreeHost(void* p) {
  ZERO_FAKE_CALL(call);
  return WaitAndRelease(call, p);
}

cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  Gpu& gpu = call.gpu;
  return AddWork(call, stream, {.run = [&gpu, p] { Release(gpu, p); }});
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  ZERO_FAKE_CALL(call);
  call.gpu.allocations[reinterpret_cast<uintptr_t>(p)] = {bytes, current_device,
                                                          Memory::kRegistered};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* p) {
  ZERO_FAKE_CALL(call);
  const auto found = call.gpu.allocations.find(reinterpret_cast<uintptr_t>(p));
  if (found == call.gpu.allocations.end() ||
      found->second.memory != Memory::kRegistered) {
    return Fail(cudaErrorInvalidValue);
  }
  call.gpu.WaitForDevice(call.lock, found->second.device);
  call.gpu.allocations.erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                     const void* p) {
  ZERO_FAKE_CALL(call);
  *attributes = {};
  const Allocation* const allocation = AllocationOf(call.gpu, p);
  attributes->hostPointer = const_cast<void*>(p);
  attributes->type = cudaMemoryTypeUnregistered;
  if (allocation == nullptr) return cudaSuccess;
  attributes->device = allocation->device;
  attributes->devicePointer = const_cast<void*>(p);
  attributes->type =
      allocation->memory == Memory::kDevice    ? cudaMemoryTypeDevice
      : allocation->memory == Memory::kManaged ? cudaMemoryTypeManaged
                                               : cudaMemoryTypeHost;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  return AddCopy(call, dst, src, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int,
                                size_t bytes, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  return AddCopy(call, dst, src, bytes, stream);
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes,
                       cudaMemcpyKind) {
  ZERO_FAKE_CALL(call);
  return AddCopy(call, dst, src, bytes, nullptr);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src,
                              size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  for (size_t i = 0; i < height; ++i) {
    const cudaError_t error =
        AddCopy(call, static_cast<char*>(dst) + i * dst_pitch,
                static_cast<const char*>(src) + i * src_pitch, width, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* dst, int value, size_t bytes) {
  ZERO_FAKE_CALL(call);
  return AddFill(call, dst, bytes, value, bytes, 1, nullptr);
}

cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes,
                            cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  return AddFill(call, dst, bytes, value, bytes, 1, stream);
}

cudaError_t cudaMemset2DAsync(void* dst, size_t pitch, int value, size_t width,
                              size_t height, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  return AddFill(call, dst, pitch, value, width, height, stream);
}

// ---- Streams
// ------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  ZERO_FAKE_CALL(call);
  return MakeStream(call, stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  ZERO_FAKE_CALL(call);
  return MakeStream(call, stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                         int priority) {
  ZERO_FAKE_CALL(call);
  return MakeStream(call, stream, flags, priority);
}

// Its work still runs, as it does on a GPU.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  ZERO_FAKE_CALL(call);
  FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr || call.gpu.IsNull(*stream)) {
    return Fail(cudaErrorInvalidResourceHandle);
  }
  stream->destroyed = true;
  call.gpu.EraseIfOver(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ZERO_FAKE_CALL(call);
  FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  call.gpu.WaitUntilEmpty(call.lock, *stream);
  return cudaSuccess;
}

// Polling in a loop makes progress.
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ZERO_FAKE_CALL(call);
  FakeStream* const stream = call.gpu.StreamOf(handle);
  if (stream == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  if (stream->empty()) return cudaSuccess;
  FakeStream* const next = call.gpu.AnyReady();
  if (next != nullptr) call.gpu.RunFirst(call.lock, *next);
  return cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle,
                                unsigned) {
  ZERO_FAKE_CALL(call);
  FakeEvent* const event = EventOf(call.gpu, handle);
  if (event == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  const auto shared = call.gpu.events[event];
  const int64_t number = event->num_recorded;
  return AddWork(
      call, stream,
      {.ready = [shared, number] { return shared->num_done >= number; },
       .run = [] {},
       .after = event->stream});
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                               void* data) {
  ZERO_FAKE_CALL(call);
  return AddWork(call, stream,
                 {.run = [=] { function(data); }, .on_host = true});
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  ZERO_FAKE_CALL(call);
  if (std::strcmp(name, "cuStreamWaitValue32") != 0) {
    *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
  }
  *function = reinterpret_cast<void*>(&WaitValue);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- Events
// -------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  ZERO_FAKE_CALL(call);
  return MakeEvent(call, event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ZERO_FAKE_CALL(call);
  return MakeEvent(call, event, flags);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ZERO_FAKE_CALL(call);
  const bool erased =
      call.gpu.events.erase(reinterpret_cast<FakeEvent*>(handle)) > 0;
  return erased ? cudaSuccess : Fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ZERO_FAKE_CALL(call);
  return AddRecord(call, event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ZERO_FAKE_CALL(call);
  const FakeEvent* const event = EventOf(call.gpu, handle);
  if (event == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  if (event->num_done >= event->num_recorded) return cudaSuccess;
  FakeStream* const next = call.gpu.AnyReady();
  if (next != nullptr) call.gpu.RunFirst(call.lock, *next);
  return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ZERO_FAKE_CALL(call);
  FakeEvent* const event = EventOf(call.gpu, handle);
  if (event == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  const auto shared = call.gpu.events[event];
  const int64_t number = event->num_recorded;
  call.gpu.WaitUntil(call.lock, StreamOf(call.gpu, *event),
                     [&] { return shared->num_done >= number; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* millis, cudaEvent_t start_handle,
                                 cudaEvent_t end_handle) {
  ZERO_FAKE_CALL(call);
  const FakeEvent* const start = EventOf(call.gpu, start_handle);
  const FakeEvent* const end = EventOf(call.gpu, end_handle);
  if (start == nullptr || end == nullptr || !start->timed || !end->timed ||
      start->num_recorded == 0 || end->num_recorded == 0) {
    return Fail(cudaErrorInvalidResourceHandle);
  }
  if (start->num_done < start->num_recorded ||
      end->num_done < end->num_recorded) {
    return cudaErrorNotReady;
  }
  *millis =
      std::chrono::duration<float, std::milli>(end->when - start->when).count();
  return cudaSuccess;
}

}  // extern "C"
