#include "kernels/cpu/device.h"

#include <omp.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/parallel.h"
#include "kernels/sizes.h"

namespace zero {
namespace cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// Of each compute thread where oneDNN multiplies bf16: what it packs in memory
// of its own, of the widest tile (matmul.cc): 384 k of 384 rows and of 2064
// columns.
constexpr int64_t kPackedBytes = int64_t{384} * (384 + 2064) * 4;

// Copies of fewer bytes take one thread less time than all of them need to
// meet, which is long where they share the cores: resuming GPT-2 124M is a
// thousand copies of 1-2 MiB, and spent most of its time so.
constexpr size_t kSharedBytes = size_t{4} << 20;
// Copies of so many bytes leave nothing in the caches that is used again.
constexpr size_t kStreamedBytes = size_t{32} << 20;

// What a run takes beside its arenas once it runs: kernels that oneDNN writes,
// stacks, pages of libraries and files that are used late.
constexpr int64_t kLateBytes = int64_t{16} << 20;

// The state outlives the event object while a worker still has to mark it.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t num_recorded = 0;  // Records issued
  uint64_t num_done = 0;      // the last of them that has been reached
  Clock::time_point time;     // when it was

  uint64_t Issue() {
    std::lock_guard<std::mutex> lock(mutex);
    return ++num_recorded;
  }
  uint64_t Issued() {
    std::lock_guard<std::mutex> lock(mutex);
    return num_recorded;
  }
  void Reach(uint64_t ticket) {
    const Clock::time_point now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex);
    // Two streams may record one event; the later Record wins.
    if (ticket > num_done) {
      num_done = ticket;
      time = now;
    }
    changed.notify_all();
  }
  void Await(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return num_done >= ticket; });
  }
};

class CpuEvent final : public Event {
 public:
  void Synchronize() override { state_->Await(state_->Issued()); }

  bool IsDone() const override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->num_done >= state_->num_recorded;
  }

  double MillisSince(const Event& start) const override {
    const auto& from = static_cast<const CpuEvent&>(start);
    ZERO_CHECK(IsDone() && from.IsDone())
        << "MillisSince: both events must be done";
    return std::chrono::duration<double, std::milli>(Time() - from.Time())
        .count();
  }

  const std::shared_ptr<EventState>& state() const { return state_; }

 private:
  Clock::time_point Time() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->time;
  }

  std::shared_ptr<EventState> state_ = std::make_shared<EventState>();
};

class CallingThreadStream final : public Stream {
 public:
  explicit CallingThreadStream(Device& device) : device_(device) {}

  void Enqueue(std::function<void()> work) override { work(); }
  void Record(Event& event) override {
    EventState& state = *static_cast<CpuEvent&>(event).state();
    state.Reach(state.Issue());
  }
  void Wait(Event& event) override { event.Synchronize(); }
  void Synchronize() override {}
  Device& device() override { return device_; }

 private:
  Device& device_;
};

class WorkerStream final : public Stream {
 public:
  explicit WorkerStream(Device& device)
      : device_(device), thread_([this] { Loop(); }) {}

  // Finishes what is queued.
  ~WorkerStream() override {
    Push(nullptr);
    thread_.join();
  }

  void Enqueue(std::function<void()> work) override { Push(std::move(work)); }

  void Record(Event& event) override {
    std::shared_ptr<EventState> state = static_cast<CpuEvent&>(event).state();
    const uint64_t ticket = state->Issue();
    Push([state = std::move(state), ticket] { state->Reach(ticket); });
  }

  void Wait(Event& event) override {
    std::shared_ptr<EventState> state = static_cast<CpuEvent&>(event).state();
    const uint64_t ticket = state->Issued();
    Push([state = std::move(state), ticket] { state->Await(ticket); });
  }

  void Synchronize() override {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t last = num_pushed_;
    done_.wait(lock, [&] { return num_done_ >= last; });
  }

  Device& device() override { return device_; }

 private:
  // A null function ends the thread.
  void Push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    ++num_pushed_;
    pushed_.notify_one();
  }

  void Loop() {
    omp_set_num_threads(1);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        pushed_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (work == nullptr) return;
      work();
      work = nullptr;  // what it captured is gone before it counts as done
      std::lock_guard<std::mutex> lock(mutex_);
      ++num_done_;
      done_.notify_all();
    }
  }

  Device& device_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::condition_variable done_;
  std::deque<std::function<void()>> queue_;
  uint64_t num_pushed_ = 0;
  uint64_t num_done_ = 0;
  std::thread thread_;  // last: it uses the members above
};

// The value of the first line of `path` that starts with `key`, or "".
std::string FindLine(const char* path, absl::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key.data(), key.size()) != 0) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

const char* IsaName() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
  if (__builtin_cpu_supports("avx512bw")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
  return "sse";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}

// Copies past the caches: where neither side fits in them, storing through them
// would first read what is overwritten, a third of the traffic.
void StreamingCopy(char* dst, const char* src, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLine = 64;
  const size_t head =
      std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(dst)) % kLine);
  std::memcpy(dst, src, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* const from = reinterpret_cast<const __m128i*>(src + i);
    auto* const to = reinterpret_cast<__m128i*>(dst + i);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + i, src + i, bytes - i);
  _mm_sfence();
#else
  std::memcpy(dst, src, bytes);
#endif
}

}  // namespace

std::unique_ptr<Event> MakeEvent() { return std::make_unique<CpuEvent>(); }

std::unique_ptr<Stream> MakeStream(Device& device, StreamRole role) {
  if (role == StreamRole::kCompute) {
    return std::make_unique<CallingThreadStream>(device);
  }
  return std::make_unique<WorkerStream>(device);
}

CpuDevice::CpuDevice(const Options& options)
    : options_(options), ops_(options.num_threads, options.low_precision) {
  ZERO_CHECK_GE(options.num_threads, 1);
  // A new std::thread starts with all cores; the number is part of the
  // numerics, so it is set here, on the thread that will compute.
  omp_set_num_threads(options.num_threads);
  omp_set_dynamic(0);
}

DeviceInfo CpuDevice::info() const {
  DeviceInfo info;
  info.name = FindLine("/proc/cpuinfo", "model name");
  if (info.name.empty()) info.name = "CPU";
  info.isa = IsaName();
  info.num_threads = options_.num_threads;
  info.memory_bytes = ReadHostMemory().total;
  return info;
}

DeviceMemory CpuDevice::memory() const {
  static const HostMemory at_start = ReadHostMemory();
  return {.free_bytes = ReadHostMemory().available,
          .total_bytes = at_start.available + at_start.resident,
          .context_bytes = at_start.resident + kLateBytes};
}

int64_t CpuDevice::stream_bytes(StreamRole role) const {
  return role == StreamRole::kCompute && ops_.HasNativeBf16()
             ? options_.num_threads * kPackedBytes
             : 0;
}

absl::StatusOr<Buffer> CpuDevice::Allocate(size_t bytes, MemoryKind kind) {
  const size_t mapped = RoundUp(std::max<size_t>(bytes, 1), kPageBytes);
  void* data = mapped < bytes
                   ? MAP_FAILED
                   : mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cpu: the system refused ", bytes, " bytes of ",
        kind == MemoryKind::kHost ? "host" : "device",
        " memory; use a smaller model or micro-batch, or raise the limit "
        "(ulimit -v)"));
  }
  if (mapped >= kHugePageBytes) madvise(data, mapped, MADV_HUGEPAGE);
  return Buffer(this, kind, data, bytes);
}

void CpuDevice::Free(void* data, size_t bytes, MemoryKind) {
  munmap(data, RoundUp(std::max<size_t>(bytes, 1), kPageBytes));
}

std::unique_ptr<Stream> CpuDevice::MakeStream(StreamRole role) {
  return cpu::MakeStream(*this, role);
}

std::unique_ptr<Event> CpuDevice::MakeEvent() { return cpu::MakeEvent(); }

void CpuDevice::Copy(Stream& stream, void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  if (dynamic_cast<CallingThreadStream*>(&stream) == nullptr) {
    stream.Enqueue([dst, src, bytes] { std::memcpy(dst, src, bytes); });
    return;
  }
  if (bytes < kSharedBytes) {
    std::memcpy(dst, src, bytes);
    return;
  }
  constexpr size_t kBlock = size_t{1} << 20;
  const auto num_blocks = static_cast<int64_t>(CeilDiv(bytes, kBlock));
  // The next free thread takes the next block: a thread that other programs
  // hold up holds up one block and not its share of the whole.
  const auto num_threads = std::min<int64_t>(options_.num_threads, num_blocks);
  ParallelTasks(
      static_cast<int>(num_threads), num_blocks, [&](int64_t block, int) {
        const size_t begin = static_cast<size_t>(block) * kBlock;
        char* const to = static_cast<char*>(dst) + begin;
        const char* const from = static_cast<const char*>(src) + begin;
        const size_t n = std::min(kBlock, bytes - begin);
        if (bytes >= kStreamedBytes) {
          StreamingCopy(to, from, n);
        } else {
          std::memcpy(to, from, n);
        }
      });
}

}  // namespace cpu

std::unique_ptr<Device> MakeCpuDevice(int num_threads) {
  cpu::CpuDevice::Options options;
  options.num_threads = num_threads;
  return std::make_unique<cpu::CpuDevice>(options);
}

}  // namespace zero
