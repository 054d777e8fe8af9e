// Fibers, barriers and shared memory of one block at a time.
//
// Compiled without sanitizers: its accesses across threads are not races of the
// kernel. It tells them of its fibers instead, if they are linked; its types
// have no linkage, so that no instrumented copy of a template is taken.
#include "tests/support/cuda_emulator/machine.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "tests/support/cuda_emulator/control.h"
#include "tests/support/cuda_emulator/emulator.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Present only with their sanitizer.
extern "C" {
#define ZERO_WEAK __attribute__((weak))
ZERO_WEAK void __sanitizer_start_switch_fiber(void**, const void*, size_t);
ZERO_WEAK void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
ZERO_WEAK void __asan_poison_memory_region(const volatile void*, size_t);
ZERO_WEAK void __asan_unpoison_memory_region(const volatile void*, size_t);
ZERO_WEAK void* __tsan_get_current_fiber(void);
ZERO_WEAK void* __tsan_create_fiber(unsigned);
ZERO_WEAK void __tsan_destroy_fiber(void*);
ZERO_WEAK void __tsan_switch_to_fiber(void*, unsigned);
ZERO_WEAK void __tsan_acquire(void*);
ZERO_WEAK void __tsan_release(void*);
#undef ZERO_WEAK
}

namespace zero::emulator {
namespace {

namespace context = boost::context::detail;

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxArrays = 32;
constexpr size_t kPage = 4096;
// Hopper's size; static arrays may use 48 KiB of it.
constexpr size_t kSharedBytes = 227 * 1024;
constexpr size_t kStaticBytes = 48 * 1024;
constexpr size_t kRedZone = 64;
constexpr unsigned char kRedByte = 0xa5;
constexpr size_t kArenaBytes =
    kSharedBytes + 2 * kRedZone * (kMaxArrays + 1) + kPage;

bool HaveAsan() { return __sanitizer_start_switch_fiber != nullptr; }
bool HaveTsan() { return __tsan_create_fiber != nullptr; }

// Frames grow in instrumented code.
size_t StackBytes() {
  return HaveAsan() || HaveTsan() ? 256 * 1024 : 64 * 1024;
}

struct Fiber {
  context::fcontext_t context = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* asan = nullptr;
  void* tsan = nullptr;
};

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kExited };

struct Thread {
  State state;
  WarpOp op;
  unsigned mask;
  int source;
  uint64_t value, result;
  Fiber* fiber;  // null before it first runs
  const char* file;
  int line;
};

struct SharedRegion {
  const void* key;
  unsigned char* data;
  size_t bytes;
};

// Two, for tsan: blocks are not ordered among each other, so a block has other
// fibers, other clocks and other shared memory than the one before it.
struct BlockSet {
  Fiber* fibers[kMaxThreads] = {};
  unsigned char* arena = nullptr;
  char exits[2] =
      {};  // clocks of threads that ended, in this and the last block
  int turn = 0;
  char barriers[1024] = {};  // clocks of barriers, in turn
  int next_barrier = 0;
};

Order order = Order::kForward;
uint64_t order_seed = 1;
int64_t num_kernels = 0;

class Machine {
 public:
  Machine();
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void Run(const KernelLaunch& launch, const std::function<void()>& body);

  void BlockBarrier(const char* file, int line);
  uint64_t WarpExchange(WarpOp op, unsigned mask, uint64_t value, int source,
                        const char* file, int line);
  int lane() const { return self_ % kLanes; }
  void* SharedArray(const void* key, size_t bytes, size_t alignment);
  void* DynamicShared() const { return dynamic_; }

  // A fiber's life: threads one after the other.
  [[noreturn]] void RunFiber(context::transfer_t from);

 private:
  void RunBlock(int64_t block);
  void StartThread(int thread);
  void EndThread();

  // Runs others until this thread is ready again.
  void Suspend();
  int TakeReady();
  void PutReady(int thread) { ready_[num_ready_++] = thread; }
  void Release(int first, int last, unsigned lanes);
  void BecomeThread(int thread);
  Fiber* FiberOf(int thread);
  Fiber* NewFiber();
  void PrepareTsan();
  void SwitchTo(Fiber* fiber);
  void Arrive(context::transfer_t from);

  void FinishWarp(unsigned mask);
  void CheckWarp(unsigned mask);
  void CheckExit();
  void CheckMissed();
  void CheckNames(int thread, int exited_lane);

  unsigned char* Carve(size_t bytes, size_t alignment);
  void CheckRedZones();
  void* NextClock();

  uint64_t Random(uint64_t n);
  [[noreturn]] void Die(int thread, const char* format, ...)
      __attribute__((format(printf, 3, 4)));
  [[noreturn]] void DieOfDeadlock();

  KernelLaunch launch_;
  const std::function<void()>* body_ = nullptr;
  int num_threads_ = 0;
  int self_ = 0;
  Thread threads_[kMaxThreads];
  uint3 indices_[kMaxThreads];
  unsigned waiting_[kMaxThreads / kLanes];  // lanes in an exchange
  void* clock_[kMaxThreads / kLanes];
  int at_barrier_ = 0, exited_ = 0;
  void* barrier_clock_ = nullptr;
  int ready_[kMaxThreads];  // a stack, the next on top
  int num_ready_ = 0;

  Fiber main_;
  Fiber* running_ = &main_;
  Fiber* all_[2 * kMaxThreads];
  int num_all_ = 0;
  Fiber* idle_[2 * kMaxThreads];
  int num_idle_ = 0;

  BlockSet sets_[2];
  BlockSet* set_ = &sets_[0];
  char launch_clock_ = 0, done_clock_ = 0;
  SharedRegion regions_[kMaxArrays];
  int num_regions_ = 0;
  size_t arena_used_ = 0, shared_used_ = 0;
  unsigned char* dynamic_ = nullptr;
  uint64_t random_ = 1;
};

// The one that runs a kernel; there is one at a time.
Machine* machine = nullptr;

Machine& ThisThreadsMachine() {
  // Fibers belong to the thread that made them.
  thread_local std::unique_ptr<Machine> of_thread;
  if (of_thread == nullptr) of_thread = std::make_unique<Machine>();
  return *of_thread;
}

void Acquire(void* clock) {
  if (HaveTsan()) __tsan_acquire(clock);
}
void ReleaseClock(void* clock) {
  if (HaveTsan()) __tsan_release(clock);
}

void FiberEntry(context::transfer_t from) { machine->RunFiber(from); }

// Not memset, which tsan would count as a write of the running thread.
void Fill(volatile unsigned char* p, unsigned char value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) p[i] = value;
}

void* Map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("cuda emulator: mmap");
    std::abort();
  }
  return p;
}

Machine::Machine() {
  for (BlockSet& set : sets_) {
    set.arena = static_cast<unsigned char*>(Map(kArenaBytes));
  }
}

Machine::~Machine() {
  for (int i = 0; i < num_all_; ++i) {
    Fiber* fiber = all_[i];
    if (HaveTsan()) __tsan_destroy_fiber(fiber->tsan);
    munmap(static_cast<char*>(const_cast<void*>(fiber->bottom)) - kPage,
           fiber->bytes + kPage);
    delete fiber;
  }
  for (BlockSet& set : sets_) {
    if (HaveAsan()) __asan_unpoison_memory_region(set.arena, kArenaBytes);
    munmap(set.arena, kArenaBytes);
  }
}

// ---- Fibers -----------------------------------------------------------------

Fiber* Machine::NewFiber() {
  Fiber* fiber = all_[num_all_++] = new Fiber;
  fiber->bytes = StackBytes();
  char* memory = static_cast<char*>(Map(fiber->bytes + kPage));
  mprotect(memory, kPage, PROT_NONE);  // guards against a stack overflow
  fiber->bottom = memory + kPage;
  fiber->context = context::make_fcontext(memory + kPage + fiber->bytes,
                                          fiber->bytes, FiberEntry);
  if (HaveTsan()) fiber->tsan = __tsan_create_fiber(0);
  return fiber;
}

Fiber* Machine::FiberOf(int thread) {
  if (HaveTsan()) return set_->fibers[thread];
  return num_idle_ > 0 ? idle_[--num_idle_] : NewFiber();
}

// A separate fiber for every thread, created outside the kernel: creation
// happens before its use.
void Machine::PrepareTsan() {
  main_.tsan = __tsan_get_current_fiber();
  for (BlockSet& set : sets_) {
    for (int i = 0; i < num_threads_; ++i) {
      if (set.fibers[i] == nullptr) set.fibers[i] = NewFiber();
    }
  }
}

void Machine::SwitchTo(Fiber* fiber) {
  Fiber* const self = running_;
  running_ = fiber;
  if (HaveAsan()) {
    __sanitizer_start_switch_fiber(&self->asan, fiber->bottom, fiber->bytes);
  }
  constexpr unsigned kNoSync = 1;
  if (HaveTsan()) __tsan_switch_to_fiber(fiber->tsan, kNoSync);
  Arrive(context::jump_fcontext(fiber->context, self));
}

// Runs on the fiber that was switched to.
void Machine::Arrive(context::transfer_t from) {
  Fiber* const previous = static_cast<Fiber*>(from.data);
  previous->context = from.fctx;
  if (HaveAsan()) {
    __sanitizer_finish_switch_fiber(running_->asan, &previous->bottom,
                                    &previous->bytes);
  }
}

void Machine::RunFiber(context::transfer_t from) {
  Arrive(from);
  for (;;) {
    Acquire(&launch_clock_);
    Acquire(&set_->exits[1 - set_->turn]);
    (*body_)();
    ReleaseClock(&set_->exits[set_->turn]);
    ReleaseClock(&done_clock_);
    EndThread();
  }
}

void Machine::BecomeThread(int thread) {
  self_ = thread;
  threadIdx = indices_[thread];
}

void Machine::StartThread(int thread) {
  Thread& t = threads_[thread];
  if (t.fiber == nullptr) t.fiber = FiberOf(thread);
  BecomeThread(thread);
  SwitchTo(t.fiber);
}

// Returns when the fiber has another thread to run from its start.
void Machine::EndThread() {
  threads_[self_].state = State::kExited;
  ++exited_;
  CheckExit();
  CheckMissed();
  if (exited_ == num_threads_) {
    if (!HaveTsan()) idle_[num_idle_++] = running_;
    SwitchTo(&main_);
    return;
  }
  const int next = TakeReady();
  if (HaveTsan()) {
    StartThread(next);
  } else if (threads_[next].fiber == nullptr) {
    threads_[next].fiber = running_;
    BecomeThread(next);
  } else {
    idle_[num_idle_++] = running_;
    StartThread(next);
  }
}

void Machine::Suspend() {
  const int self = self_;
  const int next = TakeReady();
  if (next == self) return;
  StartThread(next);
}

int Machine::TakeReady() {
  if (num_ready_ == 0) DieOfDeadlock();
  if (order == Order::kRandom) {
    std::swap(ready_[Random(num_ready_)], ready_[num_ready_ - 1]);
  }
  return ready_[--num_ready_];
}

// Makes the threads first, ..., last ready, of each 32 those in `lanes`.
void Machine::Release(int first, int last, unsigned lanes) {
  for (int i = first; i <= last; ++i) {
    const int thread = order == Order::kReverse ? i : first + last - i;
    if ((lanes >> (thread % kLanes) & 1) == 0) continue;
    threads_[thread].state = State::kReady;
    PutReady(thread);
  }
}

// ---- Barriers and exchanges
// ---------------------------------------------------

void* Machine::NextClock() {
  constexpr int kClocks = sizeof(set_->barriers);
  return &set_->barriers[set_->next_barrier++ % kClocks];
}

void Machine::BlockBarrier(const char* file, int line) {
  Thread& t = threads_[self_];
  t.state = State::kAtBarrier;
  t.file = file;
  t.line = line;
  if (at_barrier_++ == 0) barrier_clock_ = NextClock();
  void* const clock = barrier_clock_;
  ReleaseClock(clock);
  CheckExit();
  if (at_barrier_ == num_threads_) {
    for (int i = 0; i < num_threads_; ++i) {
      const Thread& other = threads_[i];
      if (other.line != line || std::strcmp(other.file, file) != 0) {
        Die(i, "divergent barriers: thread %d is at %s:%d, this one at %s:%d",
            self_, file, line, other.file, other.line);
      }
    }
    at_barrier_ = 0;
    Release(0, num_threads_ - 1, ~0u);
  }
  Suspend();
  Acquire(clock);
}

// Dies if all remaining threads wait for one that has ended.
void Machine::CheckExit() {
  if (exited_ > 0 && at_barrier_ > 0 && at_barrier_ + exited_ == num_threads_) {
    for (int i = 0; i < num_threads_; ++i) {
      if (threads_[i].state != State::kAtBarrier) continue;
      Die(i, "%d of %d threads end without reaching the barrier at %s:%d",
          exited_, num_threads_, threads_[i].file, threads_[i].line);
    }
  }
}

uint64_t Machine::WarpExchange(WarpOp op, unsigned mask, uint64_t value,
                               int source, const char* file, int line) {
  Thread& t = threads_[self_];
  t.state = State::kInWarp;
  t.op = op;
  t.mask = mask;
  t.value = value;
  t.source = source;
  t.file = file;
  t.line = line;
  const int warp = self_ / kLanes;
  if (waiting_[warp] == 0) clock_[warp] = NextClock();
  void* const clock = clock_[warp];
  ReleaseClock(clock);
  waiting_[warp] |= 1u << lane();
  CheckWarp(mask);
  if ((waiting_[warp] & mask) == mask) FinishWarp(mask);
  Suspend();
  Acquire(clock);
  return t.result;
}

void Machine::CheckWarp(unsigned mask) {
  const Thread& t = threads_[self_];
  if ((mask >> lane() & 1) == 0) {
    Die(self_, "mask %08x at %s:%d leaves out the calling lane %d", mask,
        t.file, t.line, lane());
  }
  if (exited_ == 0) return;
  const int first = self_ / kLanes * kLanes;
  for (int i = 0; i < kLanes; ++i) {
    if (threads_[first + i].state == State::kExited) CheckNames(self_, i);
  }
}

// Dies if a lane of the warp waits for this thread, which has ended.
void Machine::CheckMissed() {
  const int first = self_ / kLanes * kLanes;
  for (int i = 0; waiting_[self_ / kLanes] != 0 && i < kLanes; ++i) {
    if (threads_[first + i].state == State::kInWarp) {
      CheckNames(first + i, lane());
    }
  }
}

void Machine::CheckNames(int thread, int exited_lane) {
  const Thread& t = threads_[thread];
  if ((t.mask >> exited_lane & 1) == 0) return;
  Die(thread, "mask %08x at %s:%d names lane %d, which has exited", t.mask,
      t.file, t.line, exited_lane);
}

// All lanes of `mask` have arrived: gives each its result.
void Machine::FinishWarp(unsigned mask) {
  const Thread& last = threads_[self_];
  const int warp = self_ / kLanes;
  Thread* const lanes = &threads_[warp * kLanes];
  unsigned ballot = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) == 0) continue;
    const Thread& t = lanes[i];
    if (t.mask != mask || t.op != last.op || t.line != last.line) {
      Die(self_,
          "divergent warp: lane %d is at %s:%d with mask %08x, this one at "
          "%s:%d with mask %08x",
          i, t.file, t.line, t.mask, last.file, last.line, mask);
    }
    if (t.value != 0) ballot |= 1u << i;
  }
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) == 0) continue;
    Thread& t = lanes[i];
    t.result = t.op == WarpOp::kBallot ? ballot : 0;
    if (t.op != WarpOp::kShuffle) continue;
    const int source = t.source % kLanes;
    if ((mask >> source & 1) == 0) {
      Die(warp * kLanes + i,
          "shuffle at %s:%d reads lane %d, which mask %08x leaves out", t.file,
          t.line, source, mask);
    }
    t.result = lanes[source].value;
  }
  waiting_[warp] &= ~mask;
  const int first = warp * kLanes;
  Release(first, std::min(first + kLanes, num_threads_) - 1, mask);
}

// ---- Shared memory
// ------------------------------------------------------------

// Ends where a red zone begins, with exactly the requested alignment.
unsigned char* Machine::Carve(size_t bytes, size_t alignment) {
  alignment = std::max<size_t>(alignment, 1);
  if (num_regions_ == kMaxArrays) Die(self_, "more than 32 shared arrays");
  size_t offset = (arena_used_ + kRedZone + 255) / 256 * 256;
  if (alignment < 16) offset += alignment;
  unsigned char* const data = set_->arena + offset;
  arena_used_ = offset + bytes;
  if (arena_used_ + kRedZone > kArenaBytes)
    Die(self_, "too much shared memory");
  unsigned char* const begin = data - kRedZone;
  const size_t whole = bytes + 2 * kRedZone;
  if (HaveAsan()) __asan_unpoison_memory_region(begin, whole);
  Fill(begin, kRedByte, whole);
  Fill(data, 0xff, bytes);  // NaN
  if (HaveAsan()) {
    __asan_poison_memory_region(begin, whole);
    __asan_unpoison_memory_region(data, bytes);
  }
  return data;
}

void* Machine::SharedArray(const void* key, size_t bytes, size_t alignment) {
  for (int i = 0; i < num_regions_; ++i) {
    if (regions_[i].key == key) return regions_[i].data;
  }
  unsigned char* const data = Carve(bytes, alignment);
  regions_[num_regions_++] = {key, data, bytes};
  shared_used_ += bytes;
  if (shared_used_ > kStaticBytes ||
      shared_used_ + launch_.shared_bytes > kSharedBytes) {
    Die(self_, "%zu static and %zu dynamic bytes of shared memory, over %zu",
        shared_used_, launch_.shared_bytes, kStaticBytes);
  }
  return data;
}

void Machine::CheckRedZones() {
  for (int i = 0; i < num_regions_; ++i) {
    const SharedRegion& region = regions_[i];
    for (size_t j = 0; j < kRedZone; ++j) {
      if (region.data[j - kRedZone] != kRedByte ||
          region.data[region.bytes + j] != kRedByte) {
        Die(0, "a thread wrote beyond a shared array of %zu bytes",
            region.bytes);
      }
    }
  }
}

// ---- Grids
// ----------------------------------------------------------------------

uint64_t Machine::Random(uint64_t n) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_ % n;
}

void Machine::RunBlock(int64_t block) {
  const dim3& grid = launch_.grid;
  blockIdx = {static_cast<unsigned>(block % grid.x),
              static_cast<unsigned>(block / grid.x % grid.y),
              static_cast<unsigned>(block / grid.x / grid.y)};
  set_ = set_ == &sets_[0] ? &sets_[1] : &sets_[0];
  set_->turn = 1 - set_->turn;
  if (HaveAsan()) __asan_poison_memory_region(set_->arena, kArenaBytes);
  num_regions_ = 0;
  arena_used_ = shared_used_ = 0;
  self_ = 0;
  dynamic_ = Carve(launch_.shared_bytes, 16);
  regions_[num_regions_++] = {nullptr, dynamic_, launch_.shared_bytes};
  exited_ = at_barrier_ = num_ready_ = 0;
  std::memset(waiting_, 0, sizeof(waiting_));
  for (int i = 0; i < num_threads_; ++i) threads_[i].fiber = nullptr;
  Release(0, num_threads_ - 1, ~0u);
  StartThread(TakeReady());
  CheckRedZones();
}

void Machine::Run(const KernelLaunch& launch,
                  const std::function<void()>& body) {
  launch_ = launch;
  body_ = &body;
  blockDim = launch.block;
  gridDim = launch.grid;
  const dim3& b = launch.block;
  num_threads_ = static_cast<int>(b.x * b.y * b.z);
  if (num_threads_ == 0 || num_threads_ > kMaxThreads ||
      num_threads_ % kLanes != 0) {
    num_threads_ = 0;
    Die(-1, "blocks of %u x %u x %u threads: not 32, 64, ..., 1024", b.x, b.y,
        b.z);
  }
  const dim3& g = launch.grid;
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
    num_threads_ = 0;
    Die(-1, "a grid of %u x %u x %u blocks: beyond 2^31 - 1, 65535, 65535", g.x,
        g.y, g.z);
  }
  for (int i = 0; i < num_threads_; ++i) {
    const unsigned linear = i;
    indices_[i] = {linear % b.x, linear / b.x % b.y, linear / b.x / b.y};
  }
  random_ = (order_seed + num_kernels) * 0x9e3779b97f4a7c15ull | 1;
  ++num_kernels;
  if (HaveTsan()) PrepareTsan();
  ReleaseClock(&launch_clock_);
  const int64_t blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  // Random: a start, and every block after it, one way or the other around.
  const int64_t start = order == Order::kRandom ? Random(blocks) : 0;
  const bool backward =
      order == Order::kReverse || (order == Order::kRandom && Random(2) == 1);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = (start + i) % blocks;
    RunBlock(backward ? blocks - 1 - block : block);
  }
  Acquire(&done_clock_);
}

void Machine::Die(int thread, const char* format, ...) {
  const dim3 &g = launch_.grid, &b = launch_.block;
  std::fprintf(stderr, "cuda emulator: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  const uint3 t = thread < 0 ? uint3{} : indices_[thread];
  std::fprintf(stderr,
               "\n  in the kernel launched at %s:%d, grid (%u, %u, %u) of "
               "(%u, %u, %u)\n  block (%u, %u, %u), thread (%u, %u, %u)\n",
               launch_.file, launch_.line, g.x, g.y, g.z, b.x, b.y, b.z,
               blockIdx.x, blockIdx.y, blockIdx.z, t.x, t.y, t.z);
  std::abort();
}

void Machine::DieOfDeadlock() {
  for (int i = 0; i < num_threads_; ++i) {
    const Thread& t = threads_[i];
    if (t.state != State::kInWarp) continue;
    Die(i,
        "deadlock: lane %d waits at %s:%d for the lanes of mask %08x, of which "
        "%08x have come; %d threads are at a barrier, %d have exited",
        i % kLanes, t.file, t.line, t.mask, waiting_[i / kLanes], at_barrier_,
        exited_);
  }
  Die(0, "deadlock");
}

}  // namespace

void RunKernel(const KernelLaunch& launch, const std::function<void()>& body) {
  machine = &ThisThreadsMachine();
  machine->Run(launch, body);
  machine = nullptr;
}

void SetOrder(Order new_order, uint64_t seed) {
  order = new_order;
  order_seed = seed;
}

int64_t NumKernels() { return num_kernels; }

void BlockBarrier(const char* file, int line) {
  machine->BlockBarrier(file, line);
}

uint64_t WarpExchange(WarpOp op, unsigned mask, uint64_t value, int source,
                      const char* file, int line) {
  return machine->WarpExchange(op, mask, value, source, file, line);
}

int LaneId() { return machine->lane(); }

void* SharedArray(const void* key, size_t bytes, size_t alignment) {
  return machine->SharedArray(key, bytes, alignment);
}

void* DynamicShared() { return machine->DynamicShared(); }

}  // namespace zero::emulator
