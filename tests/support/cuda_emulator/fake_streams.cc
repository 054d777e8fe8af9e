#include "tests/support/cuda_emulator/fake_streams.h"

#include <cstdlib>
#include <utility>

#include "tests/support/cuda_emulator/fake_gpu.h"

namespace zero::emulator {

Gpu& Gpu::Get() {
  static Gpu* const gpu = new Gpu;
  return *gpu;
}

Gpu::Gpu() {
  const char* const devices = std::getenv("EMULATED_GPUS");
  SetDevices(devices == nullptr ? 2 : std::atoi(devices));
}

void Gpu::SetDevices(int count) {
  while (static_cast<int>(devices.size()) < count) {
    auto device = std::make_unique<FakeDevice>();
    device->null_stream.device = static_cast<int>(devices.size());
    devices.push_back(std::move(device));
  }
  num_devices = count;
}

FakeStream* Gpu::StreamOf(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy ||
      handle == cudaStreamPerThread) {
    return &devices[CurrentDevice()]->null_stream;
  }
  const auto found = streams.find(reinterpret_cast<FakeStream*>(handle));
  if (found == streams.end() || found->second->destroyed) return nullptr;
  return found->second.get();
}

uint64_t Gpu::Random(uint64_t n) {
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return random % n;
}

void Gpu::Add(Lock& lock, FakeStream& stream, Work work) {
  if (IsNull(stream)) {
    // The legacy stream runs after all that the blocking streams have.
    WaitUntil(lock, nullptr, [&] {
      for (auto& [key, other] : streams) {
        if (other->blocking && other->device == stream.device &&
            !other->empty()) {
          return false;
        }
      }
      return true;
    });
  }
  stream.queue.push_back(std::move(work));
  changed.notify_all();
  if (IsNull(stream)) WaitUntilEmpty(lock, stream);
}

void Gpu::WaitUntilEmpty(Lock& lock, FakeStream& stream) {
  // Later work is not waited for.
  const int64_t last = stream.num_run + stream.queue.size() + stream.running;
  WaitUntil(lock, &stream, [&] { return stream.num_run >= last; });
}

void Gpu::WaitForDevice(Lock& lock, int device) {
  WaitUntil(lock, nullptr, [&] {
    for (auto& [key, stream] : streams) {
      if (stream->device == device && !stream->empty()) return false;
    }
    return true;
  });
}

void Gpu::WaitUntil(Lock& lock, FakeStream* target,
                    const std::function<bool()>& done) {
  const bool lazy = target != nullptr && Random(2) == 0;
  if (target != nullptr) ++target->num_waiting;
  while (!done()) {
    FakeStream* next = lazy ? NeededBy(*target) : nullptr;
    if (next == nullptr) next = AnyReady();
    if (next != nullptr) {
      RunFirst(lock, *next);
    } else {
      // A value that a stream waits for changes without a word.
      changed.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  if (target == nullptr) return;
  --target->num_waiting;
  EraseIfOver(*target);
}

void Gpu::EraseIfOver(FakeStream& stream) {
  if (stream.destroyed && stream.empty() && stream.num_waiting == 0) {
    streams.erase(&stream);
  }
}

// Work that must run before the target can continue.
FakeStream* Gpu::NeededBy(FakeStream& target) {
  FakeStream* stream = &target;
  while (!stream->CanRun()) {
    if (stream->running || stream->queue.empty()) return nullptr;
    const auto found = streams.find(stream->queue.front().after);
    if (found == streams.end()) return nullptr;
    stream = found->second.get();
  }
  return stream;
}

FakeStream* Gpu::AnyReady() {
  std::vector<FakeStream*> ready;
  for (auto& [key, stream] : streams) {
    if (stream->CanRun()) ready.push_back(stream.get());
  }
  for (auto& device : devices) {
    if (device->null_stream.CanRun()) ready.push_back(&device->null_stream);
  }
  return ready.empty() ? nullptr : ready[Random(ready.size())];
}

void Gpu::RunFirst(Lock& lock, FakeStream& stream) {
  const Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.running = true;
  if (work.on_host) lock.unlock();
  work.run();
  if (work.on_host) lock.lock();
  stream.running = false;
  ++stream.num_run;
  EraseIfOver(stream);
  changed.notify_all();
}

cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work) {
  return EnqueueWhen(stream, nullptr, std::move(work));
}

cudaError_t EnqueueWhen(cudaStream_t handle, std::function<bool()> ready,
                        std::function<void()> run) {
  Gpu& gpu = Gpu::Get();
  Gpu::Lock lock(gpu.mutex);
  FakeStream* const stream = gpu.StreamOf(handle);
  if (stream == nullptr) return Fail(cudaErrorInvalidResourceHandle);
  gpu.Add(lock, *stream, {.ready = std::move(ready), .run = std::move(run)});
  return cudaSuccess;
}

}  // namespace zero::emulator
