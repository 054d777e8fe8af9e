#include "engine/tensor/arena.h"

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device.h"

namespace zero {
namespace {

constexpr MemoryCategory kActivations = MemoryCategory::kActivations;
constexpr MemoryCategory kWorkspace = MemoryCategory::kWorkspace;
constexpr MemoryCategory kGathered = MemoryCategory::kGatheredParameters;

std::unique_ptr<Arena> MakeArena(Device& device, int64_t bytes,
                                 MemoryLedger* ledger) {
  auto arena =
      Arena::Make(device, MemoryKind::kDevice, bytes, "test arena", ledger);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

int64_t SumOfCategories(const MemoryLedger& ledger) {
  int64_t sum = 0;
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    sum += ledger.live_bytes(static_cast<MemoryCategory>(i));
  }
  return sum;
}

// A random workload: `visit` sees every block after each step.
using Blocks = std::vector<std::shared_ptr<ArenaBlock>>;
void Exercise(Arena& arena, int steps,
              const std::function<void(const Blocks&)>& visit) {
  std::mt19937 random(7);
  Blocks live;
  for (int i = 0; i < steps; ++i) {
    const bool allocate = live.size() < 3 || (live.size() < 40 && random() % 2);
    if (allocate) {
      const auto category =
          static_cast<MemoryCategory>(random() % kNumMemoryCategories);
      live.push_back(arena.Allocate(random() % 5000, category));
    } else {
      live.erase(live.begin() + random() % live.size());
    }
    visit(live);
  }
}

TEST(ArenaTest, UnusedMemoryIsBetweenTheBlocksOfBothSides) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 4096, &ledger);
  EXPECT_EQ(arena->unused().data(), arena->data());
  EXPECT_EQ(arena->unused().size(), 4096u);
  const auto near = arena->Allocate(256, kActivations);
  const auto far = arena->Allocate(512, kGathered);
  EXPECT_EQ(arena->unused().data(), static_cast<char*>(near->data()) + 256);
  EXPECT_EQ(arena->unused().data() + arena->unused().size(), far->data());
}

TEST(ArenaTest, BlocksAreDisjointAlignedAndInside) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 1 << 20, &ledger);
  Exercise(*arena, 2000, [&](const Blocks& live) {
    std::map<int64_t, int64_t> ends;
    int64_t total = 0;
    for (const auto& block : live) {
      ASSERT_EQ(block->offset() % Arena::kAlignment, 0);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 256, 0u);
      const int64_t begin =
          static_cast<char*>(block->data()) - static_cast<char*>(arena->data());
      ASSERT_TRUE(ends.emplace(begin, begin + block->bytes()).second);
      total += block->bytes();
    }
    int64_t end = 0;
    for (const auto& [begin, block_end] : ends) {
      ASSERT_LE(end, begin);
      end = block_end;
    }
    ASSERT_LE(end, arena->capacity_bytes());
    ASSERT_LE(total, arena->high_water_bytes());
    ASSERT_LE(arena->high_water_bytes(), arena->capacity_bytes());
    ASSERT_EQ(arena->live_bytes(), total);
    ASSERT_EQ(ledger.total_live_bytes(), total);
    ASSERT_EQ(SumOfCategories(ledger), total);
  });
  EXPECT_EQ(arena->live_bytes(), 0);
}

TEST(ArenaTest, SameRequestsGiveSameOffsetsOnCpuAndMeta) {
  const auto cpu = MakeCpuDevice(1);
  const auto meta = MakeMetaDevice(*cpu);
  // The capacity may not matter either: a step is measured in an unlimited
  // arena and run in one of exactly the size that it needed.
  struct Run {
    std::vector<int64_t> offsets;
    int64_t high_water = 0;
  };
  auto run = [](Device& device, int64_t capacity) {
    MemoryLedger ledger;
    const auto arena = MakeArena(device, capacity, &ledger);
    Run result;
    Exercise(*arena, 3000, [&](const Blocks& live) {
      for (const auto& block : live) result.offsets.push_back(block->offset());
    });
    result.high_water = arena->high_water_bytes();
    return result;
  };
  const Run predicted = run(*meta, int64_t{1} << 46);
  const Run exact = run(*cpu, predicted.high_water);
  EXPECT_EQ(predicted.offsets, exact.offsets);
  EXPECT_EQ(predicted.high_water, exact.high_water);
}

TEST(ArenaTest, FreedNeighboursBecomeOneBlock) {
  const auto device = MakeCpuDevice(1);
  // Whatever the order in which three neighbours are freed, their memory
  // serves one request of the sum.
  const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                           {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (const auto& order : orders) {
    MemoryLedger ledger;
    const auto arena = MakeArena(*device, 4 * 256, &ledger);
    std::shared_ptr<ArenaBlock> blocks[3];
    for (auto& block : blocks) block = arena->Allocate(256, kActivations);
    const auto fence = arena->Allocate(256, kActivations);
    for (int i : order) blocks[i] = nullptr;
    const auto whole = arena->Allocate(3 * 256, kActivations);
    EXPECT_EQ(whole->offset(), 0);
    EXPECT_EQ(fence->offset(), 3 * 256);
  }
}

TEST(ArenaTest, TheSmallestFittingHoleIsTakenLowestFirst) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 1 << 16, &ledger);
  std::vector<std::shared_ptr<ArenaBlock>> blocks;
  for (int64_t units : {4, 1, 2, 1, 2, 1}) {
    blocks.push_back(arena->Allocate(units * 256, kActivations));
  }
  const int64_t first_of_two = blocks[2]->offset();
  blocks[0] = blocks[2] = blocks[4] = nullptr;
  EXPECT_EQ(arena->Allocate(300, kActivations)->offset(), first_of_two);
}

TEST(ArenaTest, WhatUnitsHoldForAWhileComesFromTheFarEnd) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 4 * 256, &ledger);
  const auto place = [&](const std::shared_ptr<ArenaBlock>& block) {
    return (static_cast<char*>(block->data()) -
            static_cast<char*>(arena->data())) /
           256;
  };
  auto activations = arena->Allocate(3 * 256, kActivations);
  auto gathered = arena->Allocate(256, kGathered);
  EXPECT_EQ(place(activations), 0);
  EXPECT_EQ(place(gathered), 3);
  // One side reuses the other's memory, so the arena need not be as large as
  // both peaks.
  activations = nullptr;
  const auto reduced = arena->Allocate(256, MemoryCategory::kReduceBuffers);
  gathered = nullptr;
  EXPECT_EQ(place(reduced), 2);
  EXPECT_EQ(place(arena->Allocate(256, kGathered)), 3);
  activations = arena->Allocate(2 * 256, kActivations);
  EXPECT_EQ(place(activations), 0);
  EXPECT_EQ(arena->high_water_bytes(), 4 * 256);
}

// A rank keeps the beginning of reduced gradients.
TEST(ArenaTest, ABlockShrinksToItsBeginningOnBothSides) {
  const auto device = MakeCpuDevice(1);
  for (const MemoryCategory category : {kActivations, kGathered}) {
    MemoryLedger ledger;
    const auto arena = MakeArena(*device, 8 * 256, &ledger);
    arena->set_poison_freed(true);
    const bool far = category == kGathered;
    const MemoryCategory kept = far ? MemoryCategory::kGradients : kWorkspace;
    const auto before = arena->Allocate(256, category);
    const auto block = arena->Allocate(4 * 256, category);
    const auto behind = arena->Allocate(256, category);
    float* const data = static_cast<float*>(block->data());
    std::fill_n(data, 256, 1.0f);
    block->Shrink(200, kept);
    EXPECT_EQ(block->data(), data);
    EXPECT_EQ(block->bytes(), 256);
    EXPECT_EQ(data[63], 1);
    EXPECT_TRUE(std::isnan(data[64]));
    EXPECT_TRUE(std::isnan(data[255]));
    EXPECT_EQ(arena->live_bytes(), 3 * 256);
    EXPECT_EQ(ledger.live_bytes(kept), 256);
    EXPECT_EQ(ledger.live_bytes(category), 2 * 256);
    // The returned memory serves the next request, between its neighbours.
    EXPECT_TRUE(arena->HasHole(3 * 256, category));
    EXPECT_FALSE(arena->HasHole(3 * 256 + 1, category));
    const auto next = arena->Allocate(3 * 256, category);
    EXPECT_EQ(next->data(), data + 64);
    EXPECT_EQ(arena->high_water_bytes(), 6 * 256);
  }
}

TEST(ArenaTest, HighWaterStaysWhenMemoryReturns) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 1 << 16, &ledger);
  auto a = arena->Allocate(1000, kActivations);
  auto b = arena->Allocate(1, kActivations);
  EXPECT_EQ(arena->high_water_bytes(), 1024 + 256);
  a = b = nullptr;
  EXPECT_EQ(arena->live_bytes(), 0);
  EXPECT_EQ(arena->high_water_bytes(), 1024 + 256);
  a = arena->Allocate(256, kActivations);
  EXPECT_EQ(arena->high_water_bytes(), 1024 + 256);
}

TEST(ArenaTest, AnEmptyRequestStillHasAnAddressOfItsOwn) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 1024, &ledger);
  const auto a = arena->Allocate(0, kActivations);
  const auto b = arena->Allocate(0, kActivations);
  EXPECT_NE(a->data(), b->data());
}

TEST(ArenaTest, PoisonTurnsFreedMemoryIntoNans) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 1 << 12, &ledger);
  arena->set_poison_freed(true);
  auto block = arena->Allocate(1024, kActivations);
  float* const values = static_cast<float*>(block->data());
  for (int i = 0; i < 256; ++i) values[i] = 1.0f;
  block = nullptr;
  for (int i = 0; i < 256; ++i) EXPECT_TRUE(std::isnan(values[i]));
}

TEST(ArenaTest, ReservationBeyondTheMachineNamesArenaAndSize) {
  const auto cpu = MakeCpuDevice(1);
  const auto meta = MakeMetaDevice(*cpu);
  MemoryLedger ledger;
  const auto arena = Arena::Make(*meta, MemoryKind::kDevice, int64_t{1} << 53,
                                 "activations and workspace", &ledger);
  ASSERT_FALSE(arena.ok());
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(arena.status().message());
  EXPECT_NE(message.find("activations and workspace"), std::string::npos);
  EXPECT_NE(message.find("8589934592.0 MiB"), std::string::npos) << message;
}

TEST(ArenaDeathTest, ExhaustionNamesCategoryAndSize) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  const auto arena = MakeArena(*device, 4096, &ledger);
  const auto block = arena->Allocate(1024, kActivations);
  EXPECT_DEATH(arena->Allocate(4000, kWorkspace),
               "test arena has no room for 4096 bytes of workspace; 1024 bytes "
               "are live");
}

TEST(ArenaDeathTest, AnArenaMayNotDieBeforeItsBlocks) {
  const auto device = MakeCpuDevice(1);
  MemoryLedger ledger;
  auto arena = MakeArena(*device, 4096, &ledger);
  const auto block = arena->Allocate(1024, kActivations);
  EXPECT_DEATH(arena.reset(), "live blocks in arena test arena");
}

TEST(LedgerTest, PeaksOfDifferentMomentsDoNotAddUp) {
  MemoryLedger ledger;
  ledger.Add(kActivations, 100);
  ledger.Remove(kActivations, 100);
  ledger.Add(kWorkspace, 70);
  EXPECT_EQ(ledger.peak_bytes(kActivations), 100);
  EXPECT_EQ(ledger.peak_bytes(kWorkspace), 70);
  EXPECT_EQ(ledger.total_peak_bytes(), 100);
  EXPECT_EQ(ledger.at_peak()[static_cast<int>(kActivations)], 100);
  EXPECT_EQ(ledger.at_peak()[static_cast<int>(kWorkspace)], 0);

  ledger.ResetPeaks();
  EXPECT_EQ(ledger.peak_bytes(kActivations), 0);
  EXPECT_EQ(ledger.total_peak_bytes(), 70);
  EXPECT_EQ(ledger.at_peak()[static_cast<int>(kWorkspace)], 70);
}

TEST(LedgerTest, ARecentPeakIsOfTheTimeSinceTheLastOne) {
  MemoryLedger ledger;
  const auto activations = [&ledger] {
    return ledger.TakeRecentPeak()[static_cast<int>(kActivations)];
  };
  ledger.Add(kActivations, 100);
  ledger.Remove(kActivations, 90);
  EXPECT_EQ(activations(), 100);
  EXPECT_EQ(activations(), 10);
  ledger.Add(kActivations, 20);
  ledger.AddConstant(MemoryCategory::kFixed, 5);
  const auto bytes = ledger.TakeRecentPeak();
  EXPECT_EQ(bytes[static_cast<int>(kActivations)], 30);
  EXPECT_EQ(bytes[static_cast<int>(MemoryCategory::kFixed)], 5);
  EXPECT_EQ(ledger.total_peak_bytes(), 105);
}

TEST(LedgerDeathTest, RemovingMoreThanIsLiveNamesTheCategory) {
  MemoryLedger ledger;
  ledger.Add(kActivations, 100);
  EXPECT_DEATH(ledger.Remove(kWorkspace, 1), "workspace");
}

TEST(LedgerTest, CategoriesHaveTheNamesOfTheMetrics) {
  const char* const names[kNumMemoryCategories] = {
      "parameters",     "gradients",     "optimizer", "gathered_parameters",
      "reduce_buffers", "activations",   "workspace", "inputs",
      "snapshot",       "fragmentation", "fixed"};
  for (int i = 0; i < kNumMemoryCategories; ++i) {
    EXPECT_STREQ(MemoryCategoryName(static_cast<MemoryCategory>(i)), names[i]);
  }
}

}  // namespace
}  // namespace zero
