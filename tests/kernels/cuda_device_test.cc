// Streams, events and memory of a GPU, emulated and real.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"
#include "kernels/device.h"

namespace zero {
namespace {

constexpr StreamRole kRoles[] = {StreamRole::kCompute, StreamRole::kGather,
                                 StreamRole::kReduce};

std::unique_ptr<Device> OpenDevice(int index = 0) {
  auto device = MakeCudaDevice(index);
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

Buffer Allocate(Device& device, size_t bytes, MemoryKind kind) {
  auto buffer = device.Allocate(bytes, kind);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return *std::move(buffer);
}

char* Bytes(const Buffer& buffer) { return static_cast<char*>(buffer.data()); }

TEST(CudaDeviceTest, SaysWhatItIs) {
  const auto device = OpenDevice();
  EXPECT_EQ(device->kind(), DeviceKind::kCuda);
  EXPECT_TRUE(device->asynchronous());
  const DeviceInfo info = device->info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_EQ(info.isa.substr(0, 3), "sm_");
  EXPECT_GT(info.num_threads, 0);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
  EXPECT_EQ(info.driver.substr(0, 5), "CUDA ");
}

TEST(CudaDeviceTest, IndexThatIsNoGpuIsNotFound) {
  for (const int index : {-1, NumCudaDevices(), 1000}) {
    const auto device = MakeCudaDevice(index);
    ASSERT_EQ(device.status().code(), absl::StatusCode::kNotFound);
    const std::string message(device.status().message());
    EXPECT_NE(message.find("cuda:" + std::to_string(index)), std::string::npos)
        << message;
    EXPECT_NE(message.find("this process sees"), std::string::npos) << message;
  }
}

TEST(CudaDeviceTest, MemoryCountsWhatIsAllocated) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  const auto device = OpenDevice();
  const DeviceMemory before = device->memory();
  EXPECT_GE(before.context_bytes, 0);
  EXPECT_GT(before.free_bytes, 0);
  EXPECT_LE(before.free_bytes, before.total_bytes);
  const Buffer buffer = Allocate(*device, kBytes, MemoryKind::kDevice);
  // Half of it: other programs may have given memory back meanwhile.
  EXPECT_LT(device->memory().free_bytes, before.free_bytes - kBytes / 2);
}

// So that ranks that share a GPU report the same.
TEST(CudaDeviceTest, WhatIsTakenAtFirstIsMeasuredOnce) {
  const auto first = OpenDevice();
  const Buffer buffer = Allocate(*first, size_t{64} << 20, MemoryKind::kDevice);
  EXPECT_EQ(OpenDevice()->memory().context_bytes,
            first->memory().context_bytes);
}

TEST(CudaDeviceTest, AllocationBeyondTheDeviceNamesItsSize) {
  const auto device = OpenDevice();
  const auto buffer = device->Allocate(size_t{1} << 50, MemoryKind::kDevice);
  ASSERT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(buffer.status().message());
  EXPECT_NE(message.find("1125899906842624 bytes"), std::string::npos)
      << message;
  EXPECT_NE(message.find("cuda:0"), std::string::npos) << message;
  // The failure is over: the next allocation and its use succeed.
  const Buffer small = Allocate(*device, 100, MemoryKind::kDevice);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  device->Copy(*stream, Bytes(small), Bytes(small) + 50, 50);
  stream->Synchronize();
}

TEST(CudaDeviceTest, BuffersAreAlignedAndEmptyOnesDiffer) {
  const auto device = OpenDevice();
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kHost}) {
    const Buffer odd = Allocate(*device, 33, kind);
    const Buffer empty = Allocate(*device, 0, kind);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(odd.data()) % 256, 0u);
    EXPECT_EQ(odd.bytes(), 33u);
    EXPECT_NE(empty.data(), nullptr);
    EXPECT_NE(empty.data(), odd.data());
  }
}

TEST(CudaDeviceTest, CopiesGoThereAndBackOnStreamsOfEveryRole) {
  const auto device = OpenDevice();
  for (const size_t bytes : {1, 31, 4096, 100003}) {
    for (const StreamRole role : kRoles) {
      const Buffer source = Allocate(*device, bytes, MemoryKind::kHost);
      const Buffer first = Allocate(*device, bytes, MemoryKind::kDevice);
      const Buffer second = Allocate(*device, bytes, MemoryKind::kDevice);
      const Buffer back = Allocate(*device, bytes, MemoryKind::kHost);
      for (size_t i = 0; i < bytes; ++i) {
        Bytes(source)[i] = static_cast<char>(i * 7 + 1);
      }
      std::memset(back.data(), 0, bytes);
      const auto stream = device->MakeStream(role);
      EXPECT_EQ(&stream->device(), device.get());
      device->Copy(*stream, first.data(), source.data(), bytes);
      device->Copy(*stream, second.data(), first.data(), bytes);
      device->Copy(*stream, back.data(), second.data(), bytes);
      device->Copy(*stream, back.data(), nullptr, 0);
      stream->Synchronize();
      EXPECT_EQ(std::memcmp(back.data(), source.data(), bytes), 0);
    }
  }
}

TEST(CudaDeviceTest, RowsAreCopiedInOneCallAndNothingBetweenThem) {
  constexpr size_t kRows = 5, kRowBytes = 7, kFrom = 11, kTo = 9;
  const auto device = OpenDevice();
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const Buffer from = Allocate(*device, kRows * kFrom, MemoryKind::kHost);
  const Buffer there = Allocate(*device, kRows * kTo, MemoryKind::kDevice);
  const Buffer back = Allocate(*device, kRows * kTo, MemoryKind::kHost);
  for (size_t i = 0; i < from.bytes(); ++i) {
    Bytes(from)[i] = static_cast<char>(i);
  }
  std::memset(back.data(), -1, back.bytes());
  device->Copy(*stream, there.data(), back.data(), back.bytes());
  device->CopyRows(*stream, there.data(), kTo, from.data(), kFrom, kRowBytes,
                   kRows);
  device->CopyRows(*stream, nullptr, kTo, nullptr, kFrom, kRowBytes, 0);
  device->Copy(*stream, back.data(), there.data(), back.bytes());
  stream->Synchronize();
  for (size_t i = 0; i < back.bytes(); ++i) {
    const size_t row = i / kTo, byte = i % kTo;
    EXPECT_EQ(Bytes(back)[i],
              byte < kRowBytes ? static_cast<char>(row * kFrom + byte) : -1);
  }
}

// A relay: each stream passes the value to the next one, by an event.
TEST(CudaDeviceTest, AnEventOrdersTwoStreams) {
  constexpr int kSteps = 40;
  constexpr size_t kBytes = 1 << 16;
  const auto device = OpenDevice();
  const std::unique_ptr<Stream> streams[] = {
      device->MakeStream(StreamRole::kCompute),
      device->MakeStream(StreamRole::kReduce)};
  std::vector<Buffer> relay;
  for (int i = 0; i <= kSteps; ++i) {
    relay.push_back(Allocate(*device, kBytes, MemoryKind::kDevice));
  }
  const Buffer host = Allocate(*device, kBytes, MemoryKind::kHost);
  std::memset(host.data(), 5, kBytes);
  device->Copy(*streams[0], relay[0].data(), host.data(), kBytes);
  const auto event = device->MakeEvent();
  for (int i = 0; i < kSteps; ++i) {
    streams[i % 2]->Record(*event);
    Stream& next = *streams[(i + 1) % 2];
    next.Wait(*event);
    device->Copy(next, relay[i + 1].data(), relay[i].data(), kBytes);
  }
  Stream& last = *streams[kSteps % 2];
  // The source is read before the host may overwrite it.
  last.Synchronize();
  std::memset(host.data(), 0, kBytes);
  device->Copy(last, host.data(), relay[kSteps].data(), kBytes);
  last.Record(*event);
  event->Synchronize();
  EXPECT_TRUE(event->IsDone());
  EXPECT_EQ(Bytes(host)[0], 5);
  EXPECT_EQ(Bytes(host)[kBytes - 1], 5);
}

TEST(CudaDeviceTest, EventThatWasNeverRecordedIsDone) {
  const auto device = OpenDevice();
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const auto event = device->MakeEvent();
  EXPECT_TRUE(event->IsDone());
  event->Synchronize();
  stream->Wait(*event);
  stream->Synchronize();
}

TEST(CudaDeviceTest, EventsTellTheTimeBetweenThem) {
  const auto device = OpenDevice();
  const auto stream = device->MakeStream(StreamRole::kCompute);
  const Buffer buffer = Allocate(*device, 1 << 20, MemoryKind::kDevice);
  const auto start = device->MakeEvent(), end = device->MakeEvent();
  stream->Record(*start);
  for (int i = 0; i < 20; ++i) {
    device->Copy(*stream, Bytes(buffer), Bytes(buffer) + (1 << 19), 1 << 19);
  }
  stream->Record(*end);
  while (!end->IsDone()) std::this_thread::yield();
  EXPECT_TRUE(start->IsDone());
  EXPECT_GT(end->MillisSince(*start), 0);
  EXPECT_LT(end->MillisSince(*start), 10e3);
}

TEST(CudaDeviceTest, EnqueuedWorkIsCalledAtOnce) {
  const auto device = OpenDevice();
  const auto stream = device->MakeStream(StreamRole::kGather);
  bool called = false;
  stream->Enqueue([&] { called = true; });
  EXPECT_TRUE(called);
}

// Each waits for the other: one after the other neither would end.
TEST(CudaDeviceTest, TheHostWorksOnStreamsOfItsRolesAtOnce) {
  const auto device = OpenDevice();
  const auto update = device->MakeStream(StreamRole::kHost);
  const auto read = device->MakeStream(StreamRole::kRead);
  std::mutex mutex;
  std::condition_variable changed;
  int arrived = 0, met = 0;
  const auto meet = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    ++arrived;
    changed.notify_all();
    met += changed.wait_for(lock, std::chrono::seconds(20),
                            [&] { return arrived == 2; });
  };
  update->Enqueue(meet);
  read->Enqueue(meet);
  // Both streams at once: an emulated GPU works while somebody waits.
  const auto both = device->MakeStream(StreamRole::kCompute);
  for (Stream* stream : {update.get(), read.get()}) {
    const auto event = device->MakeEvent();
    stream->Record(*event);
    both->Wait(*event);
  }
  both->Synchronize();
  EXPECT_EQ(met, 2);
}

// What a stream of the host wrote a copy behind it reads.
TEST(CudaDeviceTest, AStreamWaitsForWhatTheHostDoesOnIt) {
  constexpr int kSteps = 20;
  constexpr size_t kBytes = 1 << 12;
  const auto device = OpenDevice();
  const auto update = device->MakeStream(StreamRole::kHost);
  const auto up = device->MakeStream(StreamRole::kUp);
  const Buffer host = Allocate(*device, kBytes, MemoryKind::kHost);
  const Buffer there = Allocate(*device, kBytes, MemoryKind::kDevice);
  const Buffer back = Allocate(*device, kBytes, MemoryKind::kHost);
  std::memset(host.data(), 0, kBytes);
  std::string seen;
  const auto done = device->MakeEvent();
  for (int step = 0; step < kSteps; ++step) {
    update->Enqueue([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::memset(host.data(), ++Bytes(host)[0], kBytes);
    });
    update->Record(*done);
    up->Wait(*done);
    device->Copy(*up, there.data(), host.data(), kBytes);
    device->Copy(*up, back.data(), there.data(), kBytes);
    up->Record(*done);
    update->Wait(*done);
    update->Enqueue([&] { seen += Bytes(back)[kBytes - 1]; });
  }
  update->Synchronize();
  std::string want;
  for (int step = 0; step < kSteps; ++step) want += static_cast<char>(step + 1);
  EXPECT_EQ(seen, want);
}

TEST(CudaDeviceTest, RanksOfAProcessWorkAtTheSameTime) {
  constexpr size_t kBytes = 10007;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank] {
      const auto device = OpenDevice(rank % NumCudaDevices());
      const auto stream = device->MakeStream(StreamRole::kCompute);
      const Buffer host = Allocate(*device, kBytes, MemoryKind::kHost);
      const Buffer there = Allocate(*device, kBytes, MemoryKind::kDevice);
      for (int step = 0; step < 30; ++step) {
        std::memset(host.data(), rank * 30 + step, kBytes);
        device->Copy(*stream, there.data(), host.data(), kBytes);
        stream->Synchronize();
        std::memset(host.data(), 0, kBytes);
        device->Copy(*stream, host.data(), there.data(), kBytes);
        stream->Synchronize();
        EXPECT_EQ(Bytes(host)[kBytes - 1], static_cast<char>(rank * 30 + step));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(CudaDeviceTest, CopiesBetweenGpus) {
  if (NumCudaDevices() < 2) GTEST_SKIP() << "one GPU";
  constexpr size_t kBytes = 5001;
  const auto first = OpenDevice(0), second = OpenDevice(1);
  const Buffer host = Allocate(*first, kBytes, MemoryKind::kHost);
  const Buffer here = Allocate(*first, kBytes, MemoryKind::kDevice);
  const Buffer there = Allocate(*second, kBytes, MemoryKind::kDevice);
  const auto stream = first->MakeStream(StreamRole::kCompute);
  const auto other = second->MakeStream(StreamRole::kGather);
  const auto event = first->MakeEvent();
  std::memset(host.data(), 9, kBytes);
  first->Copy(*stream, here.data(), host.data(), kBytes);
  stream->Record(*event);
  other->Wait(*event);
  second->Copy(*other, there.data(), here.data(), kBytes);
  other->Synchronize();
  std::memset(host.data(), 0, kBytes);
  second->Copy(*other, host.data(), there.data(), kBytes);
  other->Synchronize();
  EXPECT_EQ(Bytes(host)[kBytes - 1], 9);
}

TEST(CudaDeviceTest, RangesForAProfilerNest) {
  const auto device = OpenDevice();
  device->PushRange("outer");
  device->PushRange("inner");
  device->PopRange();
  device->PopRange();
}

}  // namespace
}  // namespace zero
