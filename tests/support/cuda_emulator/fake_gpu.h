// State of the fake CUDA runtime: devices, streams, events, allocations.
//
// Invariant: nothing runs when it is queued. Work runs on a thread that waits,
// in an order that a GPU might have chosen: so a forgotten wait gives a wrong
// result, and not only rarely.
#ifndef ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_GPU_H_
#define ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_GPU_H_

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace zero::emulator {

struct FakeStream;

struct Work {
  std::function<bool()> ready;  // null: always
  std::function<void()> run;
  bool on_host = false;         // may take time and locks of its own
  FakeStream* after = nullptr;  // the stream that makes it ready, if one does
};

struct FakeStream {
  int device = 0;
  bool blocking = false;
  int priority = 0;
  bool destroyed = false;
  bool running = false;
  int64_t num_run = 0;
  int num_waiting = 0;  // threads in a synchronization of it
  std::deque<Work> queue;

  bool empty() const { return queue.empty() && !running; }
  bool CanRun() const {
    return !running && !queue.empty() &&
           (queue.front().ready == nullptr || queue.front().ready());
  }
};

struct FakeEvent {
  int64_t num_recorded = 0;  // times it was queued
  int64_t num_done = 0;      // the last that has run
  bool timed = true;
  int device = 0;
  std::chrono::steady_clock::time_point when;
  FakeStream* stream = nullptr;  // of the last record; may be gone
};

enum class Memory { kDevice, kManaged, kPinned, kRegistered };

struct Allocation {
  size_t bytes = 0;
  int device = 0;
  Memory memory = Memory::kDevice;
};

struct FakeDevice {
  FakeStream null_stream;
  int64_t used_bytes = 0;
  std::set<int> peers;
};

struct Gpu {
  using Lock = std::unique_lock<std::mutex>;

  static Gpu& Get();

  void SetDevices(int count);
  // Null if there is no such stream.
  FakeStream* StreamOf(cudaStream_t handle);
  bool IsNull(const FakeStream& stream) const {
    return &stream == &devices[stream.device]->null_stream;
  }

  void Add(Lock& lock, FakeStream& stream, Work work);
  void WaitUntilEmpty(Lock& lock, FakeStream& stream);
  void WaitForDevice(Lock& lock, int device);
  // Runs work until done(); `target` is the stream it is about, if it is one.
  void WaitUntil(Lock& lock, FakeStream* target,
                 const std::function<bool()>& done);
  FakeStream* AnyReady();
  void RunFirst(Lock& lock, FakeStream& stream);
  void EraseIfOver(FakeStream& stream);

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<FakeDevice>> devices;
  int num_devices = 0;
  int64_t device_bytes = int64_t{8} << 30;
  std::map<FakeStream*, std::unique_ptr<FakeStream>> streams;
  std::map<FakeEvent*, std::shared_ptr<FakeEvent>> events;
  std::map<uintptr_t, Allocation> allocations;
  std::map<std::string, int64_t> calls;
  struct Failure {
    int in;
    cudaError_t error;
  };
  std::map<std::string, Failure> failures;
  uint64_t random = 88172645463325252ull;

 private:
  Gpu();
  FakeStream* NeededBy(FakeStream& target);
  uint64_t Random(uint64_t n);
};

// The calling thread's.
int CurrentDevice();

// Marks the call of a CUDA function; an error that FailCall asked for, or none.
// REQUIRES: the lock is held.
cudaError_t Begin(Gpu& gpu, const char* name);

// Makes `error` the result of cudaGetLastError, and returns it.
cudaError_t Fail(cudaError_t error);

}  // namespace zero::emulator

#endif  // ZERO_TESTS_SUPPORT_CUDA_EMULATOR_FAKE_GPU_H_
