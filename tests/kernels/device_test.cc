#include "kernels/device.h"

#include <omp.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/numa.h"
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "tests/support/temp_dir.h"

namespace zero {
namespace {

constexpr StreamRole kWorkerRoles[] = {StreamRole::kGather,
                                       StreamRole::kReduce};

void Sleep(int millis) {
  std::this_thread::sleep_for(std::chrono::milliseconds(millis));
}

TEST(CpuDeviceTest, SaysWhatItIs) {
  const auto device = MakeCpuDevice(2);
  EXPECT_EQ(device->kind(), DeviceKind::kCpu);
  EXPECT_STREQ(DeviceKindName(device->kind()), "cpu");
  const DeviceInfo info = device->info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_FALSE(info.isa.empty());
  EXPECT_EQ(info.num_threads, 2);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 28);
}

class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    dir_.Write("proc/meminfo",
               "MemTotal:        8000000 kB\nMemFree:         1000 kB\n"
               "MemAvailable:    5000000 kB\n");
    dir_.Write("proc/self/status", "Name:\tzero\nVmRSS:\t   20000 kB\n");
  }

  void Write(const std::string& file, const std::string& text) {
    dir_.Write(file, text);
  }
  cpu::HostMemory Read() const { return cpu::ReadHostMemory(dir_.path()); }

 private:
  const TempDir dir_;
};

TEST_F(HostMemoryTest, WithoutGroupsIsTheMachines) {
  EXPECT_EQ(Read().total, int64_t{8000000} * 1024);
  EXPECT_EQ(Read().available, int64_t{5000000} * 1024);
  EXPECT_EQ(Read().resident, int64_t{20000} * 1024);
}

// A container's limit is less than the machine's memory, and its file cache can
// be evicted.
TEST_F(HostMemoryTest, IsTheSmallestOfTheGroupAndThoseAroundIt) {
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(Read().total, int64_t{8000000} * 1024);
  Write("sys/fs/cgroup/a/memory.max", "2000000000\n");
  Write("sys/fs/cgroup/a/memory.current", "900000000\n");
  Write("sys/fs/cgroup/a/memory.stat",
        "anon 1\nfile 3\ninactive_anon 2\ninactive_file 300000000\n");
  EXPECT_EQ(Read().total, 2000000000);
  EXPECT_EQ(Read().available, 1400000000);
  Write("sys/fs/cgroup/memory.max", "1000000000\n");
  EXPECT_EQ(Read().total, 1000000000);
  EXPECT_EQ(Read().available, 1000000000);
}

TEST_F(HostMemoryTest, ReadsGroupsOfTheFirstVersion) {
  const std::string v1 = "sys/fs/cgroup/memory/";
  Write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/1\n");
  Write(v1 + "memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(Read().total, int64_t{8000000} * 1024);
  Write(v1 + "docker/1/memory.limit_in_bytes", "3000000000\n");
  Write(v1 + "docker/1/memory.usage_in_bytes", "3000000000\n");
  EXPECT_EQ(Read().total, 3000000000);
  EXPECT_EQ(Read().available, 0);
}

TEST(CpuDeviceTest, SetsTheThreadsOfTheCallingThread) {
  MakeCpuDevice(3);
  EXPECT_EQ(omp_get_max_threads(), 3);
  std::thread([] {
    MakeCpuDevice(1);
    EXPECT_EQ(omp_get_max_threads(), 1);
  }).join();
  EXPECT_EQ(omp_get_max_threads(), 3);
}

// Also those that are ending: teams of threads that are gone.
std::set<std::string> ThreadsOfThisProcess() {
  std::set<std::string> ids;
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ids.insert(thread.path().filename());
  }
  return ids;
}

// The calling thread has a team of its own, as wide as the device computes.
TEST(CpuDeviceTest, ItsHostWorksWithItsOwnThreadsOnly) {
  for (const int host_threads : {0, 1, 2, 3, 4}) {
    const auto device = cpu::MakeCpuDevice(2, host_threads);
    const int want = host_threads == 0 ? 2 : host_threads;
    EXPECT_EQ(device->info().num_threads, 2);
    EXPECT_EQ(device->host().info().num_threads, want);
    EXPECT_EQ(omp_get_max_threads(), 2);
    std::vector<float> values(1 << 16, 1.0f);
    const Vector all = {values.data(), DType::kF32,
                        static_cast<int64_t>(values.size())};
    const auto compute = device->MakeStream(StreamRole::kCompute);
    device->ops().Fill(*compute, {all, 2.0f});
    const std::set<std::string> before = ThreadsOfThisProcess();
    const auto stream = device->MakeStream(StreamRole::kHost);
    stream->Enqueue([&] { device->host().ops().Fill(*stream, {all, 3.0f}); });
    stream->Synchronize();
    std::set<std::string> host = ThreadsOfThisProcess();
    for (const std::string& thread : before) host.erase(thread);
    EXPECT_EQ(host.size(), static_cast<size_t>(want));
    EXPECT_EQ(values, std::vector<float>(values.size(), 3.0f));
  }
}

// States lie near the threads that touched them first, so these must also be
// the ones that update them.
TEST(CpuDeviceTest, EveryLoopOverTheSameElementsGivesAThreadTheSameOnes) {
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kHost);
  for (const int num_threads : {1, 2, 3, 5}) {
    for (const int64_t size : {1, 4096, 4097, 123456}) {
      std::map<std::pair<int64_t, int64_t>, pid_t> by_range, again;
      for (auto* const threads : {&by_range, &again}) {
        stream->Enqueue([&] {
          std::mutex mutex;
          cpu::ParallelRanges(num_threads, size, cpu::kElementGrain,
                              [&](int64_t begin, int64_t end) {
                                const std::lock_guard<std::mutex> lock(mutex);
                                (*threads)[{begin, end}] = gettid();
                              });
        });
        stream->Synchronize();
      }
      EXPECT_EQ(by_range, again);
      EXPECT_FALSE(by_range.empty());
      EXPECT_LE(by_range.size(), static_cast<size_t>(num_threads));
      for (const auto& [range, thread] : by_range) EXPECT_NE(thread, gettid());
    }
  }
}

TEST(NumaTest, NodesHaveTheCoresThatThisProcessMayUse) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  const TempDir dir;
  EXPECT_TRUE(cpu::ReadNumaNodes(dir.path()).empty());
  const std::string folder = "sys/devices/system/node/";
  dir.Write(folder + "online", "0,2-3\n");
  dir.Write(folder + "node0/cpulist", std::to_string(first) + "\n");
  dir.Write(folder + "node2/cpulist", "\n");  // memory alone
  dir.Write(folder + "node3/cpulist", "0-1023\n");
  const cpu::NumaNodes nodes = cpu::ReadNumaNodes(dir.path());
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(CPU_COUNT(&nodes[0]), 1);
  EXPECT_TRUE(CPU_ISSET(first, &nodes[0]));
  EXPECT_TRUE(CPU_EQUAL(&nodes[1], &allowed));
}

TEST(NumaTest, NeighboursShareANodeAndSmallTeamsHaveNone) {
  const cpu::NumaNodes two(2), one(1);
  std::vector<int> of_five;
  for (int t = 0; t < 5; ++t) of_five.push_back(cpu::NodeOfThread(two, t, 5));
  EXPECT_EQ(of_five, (std::vector<int>{0, 0, 0, 1, 1}));
  EXPECT_EQ(cpu::NodeOfThread(two, 0, 1), -1);
  EXPECT_EQ(cpu::NodeOfThread(one, 3, 4), -1);
  EXPECT_EQ(cpu::NodeOfThread({}, 3, 4), -1);
}

// Two nodes with the same cores but one: on one core that is no choice.
TEST(NumaTest, ThreadsOfALoopStayOnTheirNodes) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  if (CPU_COUNT(&allowed) < 2) GTEST_SKIP() << "one core";
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  cpu::NumaNodes nodes(2, allowed);
  CPU_ZERO(&nodes[0]);
  CPU_SET(first, &nodes[0]);
  CPU_CLR(first, &nodes[1]);
  std::thread([&] {
    std::map<int64_t, cpu_set_t> cores;
    std::mutex mutex;
    cpu::ParallelRanges(cpu::Team(4, &nodes), 4, 1,
                        [&](int64_t begin, int64_t) {
                          cpu_set_t own;
                          sched_getaffinity(0, sizeof(own), &own);
                          const std::lock_guard<std::mutex> lock(mutex);
                          cores[begin] = own;
                        });
    ASSERT_EQ(cores.size(), 4u);
    for (const auto& [begin, own] : cores) {
      EXPECT_TRUE(CPU_EQUAL(&own, &nodes[begin / 2])) << begin;
    }
  }).join();
  cpu_set_t after;
  ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&after, &allowed));
}

TEST(BufferTest, IsAlignedZeroedAndWritableToTheEnd) {
  const auto device = MakeCpuDevice(1);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, size_t{4097},
                             (size_t{5} << 20) + 1}) {
    for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kHost}) {
      auto buffer = device->Allocate(bytes, kind);
      ASSERT_TRUE(buffer.ok()) << buffer.status();
      EXPECT_EQ(buffer->bytes(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 4096, 0u);
      if (bytes == 0) continue;
      char* const last = static_cast<char*>(buffer->data()) + bytes - 1;
      EXPECT_EQ(*last, 0);
      *last = 1;
    }
  }
}

TEST(BufferTest, MovesItsMemory) {
  const auto device = MakeCpuDevice(1);
  Buffer a = *device->Allocate(100, MemoryKind::kDevice);
  void* const data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(a.bytes(), 0u);
  Buffer c = *device->Allocate(50, MemoryKind::kDevice);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.bytes(), 100u);
}

TEST(BufferTest, ImpossibleSizesAreNamedErrors) {
  const auto device = MakeCpuDevice(1);
  for (const size_t bytes : {size_t{1} << 60, ~size_t{0}, ~size_t{0} - 4095}) {
    const auto buffer = device->Allocate(bytes, MemoryKind::kDevice);
    ASSERT_FALSE(buffer.ok());
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(
        std::string(buffer.status().message()).find(std::to_string(bytes)),
        std::string::npos)
        << buffer.status();
  }
}

TEST(StreamTest, TheComputeStreamIsTheCallingThread) {
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  std::thread::id ran;
  stream->Enqueue([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_EQ(&stream->device(), device.get());
}

TEST(StreamTest, AWorkerRunsItsQueueInOrderOnOneOtherThread) {
  const auto device = MakeCpuDevice(1);
  for (const StreamRole role : kWorkerRoles) {
    const auto stream = device->MakeStream(role);
    std::vector<int> order;
    std::set<std::thread::id> threads;
    for (int i = 0; i < 100; ++i) {
      stream->Enqueue([&, i] {
        order.push_back(i);
        threads.insert(std::this_thread::get_id());
      });
    }
    stream->Synchronize();
    ASSERT_EQ(order.size(), 100u);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
    EXPECT_EQ(threads.size(), 1u);
    EXPECT_EQ(threads.count(std::this_thread::get_id()), 0u);
  }
}

TEST(StreamTest, AWorkerIsOneThread) {
  const auto device = MakeCpuDevice(4);
  for (const StreamRole role : kWorkerRoles) {
    const auto stream = device->MakeStream(role);
    int threads = 0;
    stream->Enqueue([&] { threads = omp_get_max_threads(); });
    stream->Synchronize();
    EXPECT_EQ(threads, 1);
  }
}

TEST(StreamTest, DestructionFinishesTheQueue) {
  const auto device = MakeCpuDevice(1);
  int done = 0;
  {
    const auto stream = device->MakeStream(StreamRole::kReduce);
    stream->Enqueue([] { Sleep(5); });
    for (int i = 0; i < 10; ++i) stream->Enqueue([&] { ++done; });
  }
  EXPECT_EQ(done, 10);
}

TEST(StreamTest, AnIdleWorkerBurnsNoProcessorTime) {
  const auto device = MakeCpuDevice(1);
  std::vector<std::unique_ptr<Stream>> streams;
  for (const StreamRole role : kWorkerRoles) {
    streams.push_back(device->MakeStream(role));
  }
  const auto never = device->MakeEvent();
  const auto gate = device->MakeStream(StreamRole::kReduce);
  gate->Enqueue([] { Sleep(300); });
  gate->Record(*never);
  for (auto& stream : streams) stream->Wait(*never);  // all of them blocked
  timespec before, after;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  never->Synchronize();
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double used =
      static_cast<double>(after.tv_sec - before.tv_sec) +
      static_cast<double>(after.tv_nsec - before.tv_nsec) * 1e-9;
  EXPECT_LT(used, 0.1);  // a spinner would have used 0.3 s
}

TEST(EventTest, NeverRecordedIsDone) {
  const auto device = MakeCpuDevice(1);
  const auto event = device->MakeEvent();
  EXPECT_TRUE(event->IsDone());
  event->Synchronize();
  const auto stream = device->MakeStream(StreamRole::kReduce);
  stream->Wait(*event);
  stream->Synchronize();
}

TEST(EventTest, IsDoneWhenTheWorkBeforeItIs) {
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kReduce);
  const auto event = device->MakeEvent();
  std::atomic<bool> open{false}, passed{false};
  stream->Enqueue([&] {
    while (!open) Sleep(1);
    passed = true;
  });
  stream->Record(*event);
  EXPECT_FALSE(event->IsDone());
  open = true;
  event->Synchronize();
  EXPECT_TRUE(passed);
  EXPECT_TRUE(event->IsDone());
}

TEST(EventTest, OneStreamWaitsForAnother) {
  const auto device = MakeCpuDevice(1);
  const auto first = device->MakeStream(StreamRole::kGather);
  const auto second = device->MakeStream(StreamRole::kReduce);
  for (int round = 0; round < 20; ++round) {
    const auto event = device->MakeEvent();
    int value = 0, seen = -1;
    first->Enqueue([&] {
      Sleep(1);
      value = 1;
    });
    first->Record(*event);
    second->Wait(*event);
    second->Enqueue([&] { seen = value; });
    second->Synchronize();
    EXPECT_EQ(seen, 1);
  }
}

// As on a GPU: a wait is for the Record issued before it, not for a later one.
TEST(EventTest, AWaitIsForTheRecordBeforeIt) {
  const auto device = MakeCpuDevice(1);
  const auto worker = device->MakeStream(StreamRole::kGather);
  const auto blocked = device->MakeStream(StreamRole::kReduce);
  const auto event = device->MakeEvent();
  worker->Record(*event);
  std::atomic<bool> open{false};
  blocked->Wait(*event);
  worker->Enqueue([&] {
    while (!open) Sleep(1);
  });
  worker->Record(*event);
  blocked->Synchronize();  // would hang if it waited for the second
  EXPECT_FALSE(event->IsDone());
  open = true;
  event->Synchronize();
}

TEST(EventTest, MayDieBeforeItIsReached) {
  const auto device = MakeCpuDevice(1);
  const auto stream = device->MakeStream(StreamRole::kReduce);
  stream->Enqueue([] { Sleep(5); });
  {
    const auto event = device->MakeEvent();
    stream->Record(*event);
  }
  stream->Synchronize();
}

TEST(EventTest, MeasuresTheTimeBetweenTwoPoints) {
  const auto device = MakeCpuDevice(1);
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kReduce}) {
    const auto stream = device->MakeStream(role);
    const auto start = device->MakeEvent(), end = device->MakeEvent();
    stream->Record(*start);
    stream->Enqueue([] { Sleep(20); });
    stream->Record(*end);
    stream->Synchronize();
    EXPECT_GE(end->MillisSince(*start), 20);
    EXPECT_LT(end->MillisSince(*start), 2000);
  }
}

TEST(CpuDeviceTest, CopiesOnTheStreamItIsGiven) {
  const auto device = MakeCpuDevice(2);
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kReduce}) {
    const auto stream = device->MakeStream(role);
    for (const size_t bytes :
         {size_t{0}, size_t{1}, size_t{1} << 20, (size_t{3} << 20) + 17}) {
      // One byte more than copied: memcmp may not be given a null pointer.
      std::vector<char> from(bytes + 1), to(bytes + 1, 7);
      for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<char>(i * 31);
      device->Copy(*stream, to.data(), from.data(), bytes);
      stream->Synchronize();
      EXPECT_EQ(std::memcmp(to.data(), from.data(), bytes), 0);
      EXPECT_EQ(to[bytes], 7);
    }
  }
}

TEST(CpuDeviceTest, CopiesRowsAndNothingBetweenThem) {
  constexpr size_t kRows = 5, kRowBytes = 7, kFrom = 11, kTo = 9;
  const auto device = MakeCpuDevice(2);
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kReduce}) {
    const auto stream = device->MakeStream(role);
    std::vector<char> from(kRows * kFrom), to(kRows * kTo, -1);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i);
    device->CopyRows(*stream, to.data(), kTo, from.data(), kFrom, kRowBytes,
                     kRows);
    stream->Synchronize();
    for (size_t i = 0; i < to.size(); ++i) {
      const size_t row = i / kTo, byte = i % kTo;
      EXPECT_EQ(to[i],
                byte < kRowBytes ? static_cast<char>(row * kFrom + byte) : -1);
    }
  }
}

TEST(CudaOffTest, SaysThatItIsNotBuiltAndWhatToDo) {
  const auto device = MakeCudaDevice(0);
  if (device.ok()) GTEST_SKIP() << "CUDA is built, and here is a GPU";
  if (device.status().code() == absl::StatusCode::kNotFound) {
    GTEST_SKIP() << "CUDA is built, but: " << device.status();
  }
  EXPECT_EQ(device.status().code(), absl::StatusCode::kUnimplemented);
  const std::string message(device.status().message());
  EXPECT_NE(message.find("cuda:0"), std::string::npos) << message;
  EXPECT_NE(message.find("--device cpu"), std::string::npos) << message;
}

}  // namespace
}  // namespace zero
