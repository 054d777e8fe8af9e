// States in the host's memory: the same bits as on the device, for any stage,
// optimizer and dtype.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/device.h"
#include "tests/engine/zero/job_testing.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

constexpr StateHomes kOptimizerOnHost{.optimizer = Home::kHost};
constexpr StateHomes kAllOnHost{.parameters = Home::kHost,
                                .optimizer = Home::kHost};
constexpr StateHomes kOptimizerOnDisk{.optimizer = Home::kNvme};
constexpr StateHomes kAllOnDisk{.parameters = Home::kNvme,
                                .optimizer = Home::kNvme};

// A folder for files of states, for as long as the tests run.
const std::string& DiskFolder() {
  static const TempDir folder;
  return folder.path();
}

RigOptions Offloaded(RigOptions options, int stage, const StateHomes& homes) {
  options = AtStage(options, stage);
  options.plan.homes = homes;
  options.swap.path = DiskFolder();
  return options;
}

Job AtStage(Job job, int stage) {
  job.options = AtStage(job.options, stage);
  return job;
}

// Only allowed stages: parameters on the host are sharded.
struct Offload {
  int stage;
  StateHomes homes;
  std::string name;
};
std::vector<Offload> Offloads() {
  return {{1, kOptimizerOnHost, "stage 1, optimizer"},
          {2, kOptimizerOnHost, "stage 2, optimizer"},
          {3, kOptimizerOnHost, "stage 3, optimizer"},
          {3, kAllOnHost, "stage 3, all"},
          {1, kOptimizerOnDisk, "stage 1, optimizer on disk"},
          {2, kOptimizerOnDisk, "stage 2, optimizer on disk"},
          {3, kOptimizerOnDisk, "stage 3, optimizer on disk"},
          {3, kAllOnDisk, "stage 3, all on disk"},
          {3,
           {Home::kHost, Home::kNvme},
           "stage 3, optimizer on disk, "
           "parameters on the host"},
          {3,
           {Home::kNvme, Home::kHost},
           "stage 3, parameters on disk, "
           "optimizer on the host"}};
}

void ExpectTheSameBits(const Job& plain) {
  const Outcome want = Train(plain);
  for (const Offload& offload : Offloads()) {
    SCOPED_TRACE(offload.name);
    Job job = plain;
    job.options = Offloaded(plain.options, offload.stage, offload.homes);
    EXPECT_EQ(Train(job), want);
  }
}

TEST(OffloadTest, GivesTheSameBits) {
  for (const ModelFamily family :
       {ModelFamily::kGpt2, ModelFamily::kLlama, ModelFamily::kQwen3}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int world : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << ModelFamilyName(family) << " "
                                        << dtype << " world " << world);
        Job job;
        job.config = TinyConfig(family);
        job.config.resid_pdrop = 0.1;
        job.world = world;
        job.options.param_dtype = dtype;
        ExpectTheSameBits(job);
      }
    }
  }
}

TEST(OffloadTest, GivesTheSameBitsWithEveryOptimizer) {
  std::vector<RigOptions> all;
  const RigOptions base = Job().options;
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLamb, OptimizerKind::kSgd}) {
    all.push_back(base);
    all.back().optimizer.kind = kind;
    if (kind == OptimizerKind::kSgd) all.back().optimizer.momentum = 0.9;
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    all.push_back(base);
    all.back().param_dtype = dtype;
    all.back().split_master = false;
    all.push_back(all.back());
    all.back().stochastic_rounding = true;
  }
  all.push_back(base);
  all.back().param_dtype = DType::kBF16;
  all.back().grad_dtype = all.back().plan.gradients.dtype = DType::kBF16;
  for (size_t i = 0; i < all.size(); ++i) {
    for (const int world : {1, 2}) {
      SCOPED_TRACE(testing::Message() << "options " << i << " world " << world);
      Job job;
      job.config = TiedLlama();
      job.options = all[i];
      job.world = world;
      ExpectTheSameBits(job);
    }
  }
}

// The second step's gradients overflow, on one rank.
void OverflowOnce(const Rank& rank, Rig& rig) {
  if (rank.rank() != 1) return;
  Parameter& bad = *rig.model().units()[2]->parameters()[1];
  rig->clock().set_hook(
      [&bad, step = 0](const Action& action, bool done) mutable {
        const bool here =
            action.kind == ActionKind::kBackward && action.index == 2 && done;
        if (!here || ++step != 2) return;
        bad.weight.sink->grad.As<float>()[5] =
            std::numeric_limits<float>::infinity();
      });
}

TEST(OffloadTest, AllSkipAStepTogether) {
  for (const bool ahead : {false, true}) {
    Job job;
    job.options.param_dtype = DType::kF16;
    job.ahead = ahead;
    job.prepare = OverflowOnce;
    const Outcome want = Train(job);
    EXPECT_FALSE(std::isfinite(want.norms[1]));
    for (const Offload& offload : Offloads()) {
      SCOPED_TRACE(offload.name);
      job.options = Offloaded(job.options, offload.stage, offload.homes);
      const Outcome got = Train(job);
      EXPECT_EQ(got.parameters, want.parameters);
      EXPECT_EQ(got.losses, want.losses);
    }
  }
}

// Gradients are in memory: who looks for the one that overflowed reads no file.
TEST(OffloadTest, ASkippedStepReadsNoMoreThanAnyOther) {
  std::atomic<int> reads = 0;
  Job job;
  job.options = Offloaded(job.options, 3, kAllOnDisk);
  job.options.param_dtype = DType::kF16;
  job.options.swap.io.fault = [&](DiskCall call, int64_t, int64_t,
                                  int64_t result) {
    reads += call == DiskCall::kRead;
    return result;
  };
  Train(job);
  const int want = reads.exchange(0);
  job.prepare = OverflowOnce;
  EXPECT_FALSE(std::isfinite(Train(job).norms[1]));
  EXPECT_EQ(reads, want);
}

// Setting all states reads none of them; keeping them reads each segment once,
// as the hash of the parameters does.
TEST(OffloadTest, BetweenStepsTheDiskIsReadNoMoreThanItMust) {
  std::atomic<int> reads = 0;
  Job job;
  job.world = 1;
  job.options = Offloaded(job.options, 3, kAllOnDisk);
  job.options.swap.io.fault = [&](DiskCall call, int64_t, int64_t,
                                  int64_t result) {
    reads += call == DiskCall::kRead;
    return result;
  };
  job.prepare = [&](const Rank&, Rig& rig) {
    StateAccess& states = rig->states();
    states.Initialize(1);
    EXPECT_EQ(reads, 0);
    EXPECT_TRUE(states.Hash().ok());
    const int once = reads.exchange(0);
    EXPECT_GT(once, 0);
    std::set<std::string> names;
    states.ForEachKept([&](const StateAccess::KeptRun& run) {
      names.insert(run.state);
      states.Bytes(run);
    });
    EXPECT_EQ(names.size(), 3u);
    EXPECT_EQ(reads, once);
  };
  Train(job);
}

TEST(OffloadTest, WhatChangesNoBitChangesNoneWithIt) {
  Job plain;
  plain.config = TiedLlama();
  plain.world = 2;
  const Outcome want = Train(plain);
  for (const Offload& offload : Offloads()) {
    for (int bits = 0; bits < 16; ++bits) {
      SCOPED_TRACE(testing::Message() << offload.name << " bits " << bits);
      Job job = plain;
      job.options = Offloaded(plain.options, offload.stage, offload.homes);
      if (bits & 1) job.options.plan.reduce_bucket_elems = 1;
      if (bits & 2) job.options.overlap = false;
      if (bits & 4) job.options.recompute = Recompute::kFull;
      job.ahead = bits & 8;
      EXPECT_EQ(Train(job), want);
    }
  }
}

// Of loops long enough to be shared.
TEST(OffloadTest, AnyNumberOfHostThreadsGivesTheSameBits) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLamb}) {
    Job plain;
    plain.config.vocab_size = 1000;
    plain.options.optimizer.kind = kind;
    plain.options.param_dtype = DType::kBF16;
    plain.world = 1;
    ASSERT_GT(PlanOf(plain).units.back().trained_elems, 5 * 4096);
    const Outcome want = Train(plain);
    for (const StateHomes& homes : {kAllOnHost, kAllOnDisk}) {
      for (const int threads : {1, 2, 5}) {
        SCOPED_TRACE(testing::Message() << threads << " threads");
        Job job = plain;
        job.options = Offloaded(plain.options, 3, homes);
        EXPECT_EQ(
            Train(job, [&](int) { return cpu::MakeCpuDevice(1, threads); }),
            want);
      }
    }
  }
}

TEST(OffloadTest, SlowCopiesAndCollectivesChangeNoBit) {
  for (const Offload& offload : Offloads()) {
    SCOPED_TRACE(offload.name);
    Job job;
    job.world = 3;
    job.steps = 2;
    const Outcome want = Train(job);
    job.options = Offloaded(job.options, offload.stage, offload.homes);
    AddDelays(&job);
    EXPECT_EQ(Train(job), want);
  }
}

// Micro-batches add up in the same order as on the device; on a single rank,
// only if the stage does not shard gradients.
TEST(OffloadTest, MicroBatchesGiveTheBitsOfTheStage) {
  for (const bool in_parts : {false, true}) {
    for (const int world : {1, 2, 3}) {
      for (const Offload& offload : Offloads()) {
        SCOPED_TRACE(testing::Message()
                     << offload.name << " world " << world << " " << in_parts);
        Job job{.config = TiedLlama(), .world = world, .micro_steps = 2};
        job.options.plan.vocabulary_parts = in_parts;
        job.options.plan.min_part_elems = 640;
        job.options = AtStage(job.options, offload.stage);
        const Outcome want = Train(job);
        job.options = Offloaded(job.options, offload.stage, offload.homes);
        const Outcome got = Train(job);
        if (world > 1 || offload.stage == 1) {
          EXPECT_EQ(got, want);
          continue;
        }
        EXPECT_LT(RelativeDifference(got.parameters, want.parameters), 1e-5);
        for (int step = 0; step < job.steps; ++step) {
          EXPECT_NEAR(got.losses[step], want.losses[step], 1e-5);
          EXPECT_NEAR(got.norms[step], want.norms[step],
                      1e-5 * want.norms[step]);
        }
      }
    }
  }
}

// A share of 1e-9 is the smallest unit.
TEST(OffloadTest, AnyShareOfTheHostGivesTheSameBits) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kLamb}) {
    for (const int world : {1, 2, 3}) {
      for (const int stage : {1, 2, 3}) {
        for (const double share : {1e-9, 0.3, 0.8}) {
          for (const int bits : {0, 1, 2}) {
            SCOPED_TRACE(testing::Message()
                         << "stage " << stage << " world " << world << " share "
                         << share << " bits " << bits);
            Job job;
            job.config = TiedLlama();
            job.world = world;
            job.micro_steps = bits & 1 ? 2 : 1;
            job.options.optimizer.kind = kind;
            job.options.param_dtype = DType::kBF16;
            job.options.plan.vocabulary_parts = bits & 2;
            job.options.plan.min_part_elems = 640;
            const Outcome want = Train(AtStage(job, world == 1 ? 0 : stage));
            for (const StateHomes& homes :
                 {kOptimizerOnHost, kOptimizerOnDisk}) {
              job.options = Offloaded(job.options, stage, homes);
              job.options.plan.host_share = share;
              EXPECT_EQ(Train(job), want)
                  << (homes == kOptimizerOnDisk ? "on disk" : "");
            }
          }
        }
      }
    }
  }
}

// With the optimizer on the host, and with the parameters too.
void ExpectTheSameBitsBeforeTheNorm(Job job, int stage, double share = 1) {
  job.options.max_grad_norm = 0;
  job.options.param_dtype = DType::kBF16;
  for (const StateHomes& homes : {kOptimizerOnHost, kAllOnHost}) {
    const bool all = homes == kAllOnHost;
    if (all && stage < 3) continue;
    job.options = Offloaded(job.options, stage, homes);
    job.options.plan.host_share = all ? 1 : share;
    job.options.update_before_norm = false;
    const Outcome want = Train(job);
    job.options.update_before_norm = true;
    EXPECT_EQ(Train(job), want) << (all ? "all on the host" : "");
  }
}

TEST(OffloadTest, UpdatesBeforeTheNormGiveTheSameBits) {
  for (const int world : {1, 2, 3}) {
    for (const int stage : {1, 2, 3}) {
      for (const int bits : {0, 1, 2, 4, 8, 16, 31}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << " world "
                                        << world << " bits " << bits);
        Job job{.config = TiedLlama(), .world = world};
        if (bits & 1) job.micro_steps = 2;
        if (bits & 2) job.options.optimizer.kind = OptimizerKind::kSgd;
        job.options.plan.vocabulary_parts = bits & 4;
        job.options.plan.min_part_elems = 640;
        if (bits & 8) AddDelays(&job);
        job.options.overlap = !(bits & 16);
        ExpectTheSameBitsBeforeTheNorm(job, stage, bits & 8 ? 0.3 : 1);
      }
    }
  }
}

TEST(OffloadTest, UpdatesBeforeTheNormGiveTheSameBitsInGroups) {
  for (const auto& [world, shards] :
       {std::pair(4, 2), std::pair(2, 1), std::pair(6, 3)}) {
    for (const int stage : {1, 2, 3}) {
      for (const int64_t micro_steps : {1, 2}) {
        for (const double share : {1.0, 0.5}) {
          SCOPED_TRACE(testing::Message()
                       << "stage " << stage << " world " << world << " shards "
                       << shards << " micro " << micro_steps << " " << share);
          Job job{.config = TiedLlama(), .world = world, .shards = shards};
          job.batch = 12 * micro_steps;
          job.micro_steps = micro_steps;
          AddDelays(&job);
          ExpectTheSameBitsBeforeTheNorm(job, stage, share);
        }
      }
    }
  }
}

// A unit without trained parameters has no update; one with some has one.
TEST(OffloadTest, UpdatesBeforeTheNormGiveTheSameBitsWithFrozenParameters) {
  for (const int world : {1, 2, 3}) {
    for (const int stage : {1, 2, 3}) {
      for (const bool rows : {false, true}) {
        SCOPED_TRACE(testing::Message() << "stage " << stage << " world "
                                        << world << " rows " << rows);
        Job job{.world = world, .rows = rows};
        job.config.vocab_size = kManyWords;
        job.make = [config = job.config] { return MakePartlyFrozen(config); };
        AddDelays(&job);
        ExpectTheSameBitsBeforeTheNorm(job, stage);
      }
    }
  }
}

TEST(OffloadTest, OnlyTrainedUnitsAreUpdatedBeforeTheNorm) {
  Job job;
  job.make = [config = job.config] { return MakePartlyFrozen(config); };
  job.options = Offloaded(job.options, 3, kOptimizerOnHost);
  const Plan plan = PlanOf(job);
  std::multiset<int> updated, trained;
  for (const Action& action :
       MakeSchedule(plan, {.update_before_norm = true})) {
    if (action.kind == ActionKind::kNorm) break;
    if (action.kind == ActionKind::kUpdate) updated.insert(action.index);
  }
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    if (plan.units[u].trained_elems > 0) trained.insert(u);
  }
  EXPECT_EQ(updated, trained);
  EXPECT_LT(trained.size(), plan.units.size());
}

// All but the first unit's, whose backward pass is the last.
TEST(OffloadTest, UpdatesBeforeTheNormRunUnderTheRestOfBackward) {
  Job job;
  job.options = Offloaded(job.options, 3, kOptimizerOnHost);
  job.options.plan.reduce_bucket_elems = 1;
  const Plan plan = PlanOf(job);
  const std::vector<Action> list =
      MakeSchedule(plan, {.update_before_norm = true});
  int update = 0, under = 0;
  bool backward_follows = false;
  for (auto action = list.rbegin(); action != list.rend(); ++action) {
    backward_follows |= action->kind == ActionKind::kBackward;
    if (action->kind == ActionKind::kNorm) {
      EXPECT_EQ(update, 0) << "an update behind the norm";
    }
    if (action->kind != ActionKind::kUpdate) continue;
    ++update;
    under += backward_follows;
    for (const int wait : action->waits) {
      EXPECT_NE(list[wait < 0 ? wait + list.size() : wait].kind,
                ActionKind::kNorm);
    }
  }
  EXPECT_EQ(update, static_cast<int>(plan.units.size()));
  EXPECT_GE(under, update - 2);
}

TEST(OffloadTest, TheHostHasItsShareOfWholeUnits) {
  Job job;
  job.options = Offloaded(job.options, 2, kOptimizerOnHost);
  for (const double share : {1e-9, 0.2, 0.5, 0.9, 1.0}) {
    job.options.plan.host_share = share;
    const Plan plan = PlanOf(job);
    int64_t on_host = 0, largest_block = 0;
    for (size_t u = 0; u < plan.units.size(); ++u) {
      const int64_t elems = plan.units[u].trained_elems;
      if (plan.UpdatesOnHost(u)) on_host += elems;
      largest_block = std::max(largest_block, elems);
    }
    EXPECT_GT(on_host, 0) << share;
    if (share > 0.1) {
      EXPECT_LE(on_host, share * plan.trained_elems + 1) << share;
    }
    EXPECT_GE(on_host, share * plan.trained_elems - largest_block) << share;
  }
}

// Hybrid sharding adds groups up on the device.
TEST(OffloadTest, GroupsGiveTheBitsOfGroups) {
  for (const auto& [world, shards] :
       {std::pair(4, 2), std::pair(2, 1), std::pair(6, 3)}) {
    for (const Offload& offload : Offloads()) {
      for (const int64_t micro_steps : {1, 2}) {
        for (const double share : {1.0, 0.5}) {
          const bool all = offload.homes.parameters != Home::kDevice;
          if (all && share < 1) continue;
          SCOPED_TRACE(testing::Message()
                       << offload.name << " world " << world << " shards "
                       << shards << " micro " << micro_steps << " " << share);
          Job job;
          job.config = TiedLlama();
          job.world = world;
          job.shards = shards;
          job.batch = 12 * micro_steps;
          job.micro_steps = micro_steps;
          job.options.param_dtype = DType::kBF16;
          job.options = AtStage(job.options, offload.stage);
          const Outcome want = Train(job);
          job.options = Offloaded(job.options, offload.stage, offload.homes);
          job.options.plan.host_share = share;
          EXPECT_EQ(Train(job), want);
        }
      }
    }
  }
}

TEST(OffloadTest, FrozenParametersAndDenseTablesGiveTheSameBits) {
  for (const bool rows : {false, true}) {
    for (const int world : {1, 2}) {
      Job job;
      job.config.vocab_size = kManyWords;
      job.world = world;
      job.rows = rows;
      ExpectTheSameBits(job);
      job.make = [config = job.config] { return MakePartlyFrozen(config); };
      ExpectTheSameBits(job);
    }
  }
}

// The trained parameters, and their states.
int64_t BytesOf(const MemoryLedger& ledger) {
  return ledger.live_bytes(MemoryCategory::kParameters) +
         ledger.live_bytes(MemoryCategory::kGradients) +
         ledger.live_bytes(MemoryCategory::kOptimizer);
}

// The host has gradients and the buffers that segments pass through.
TEST(OffloadTest, TheHostKeepsWhatTheDiskHasNot) {
  for (const int world : {1, 2}) {
    for (const Offload& offload : Offloads()) {
      if (offload.homes.optimizer != Home::kNvme ||
          offload.homes.parameters == Home::kHost) {
        continue;
      }
      SCOPED_TRACE(testing::Message() << offload.name << " world " << world);
      Job job;
      job.world = world;
      job.options.param_dtype = DType::kBF16;
      job.options = Offloaded(job.options, offload.stage, offload.homes);
      const Plan plan = PlanOf(job);
      int64_t largest = 0, on_disk = 0, pieces = 0;
      for (const PlannedUnit& unit : plan.units) {
        for (const Segment& segment : unit.segments) {
          largest = std::max(largest, segment.elems / world);
          pieces += 2;
        }
        // bf16, the rest of masters, both moments.
        on_disk += unit.padded_elems / world * (2 + 2 + 8);
      }
      const bool all = offload.homes.parameters == Home::kNvme;
      const int64_t places =
          Plan::kNumSwapSlots * largest * ((all ? 2 : 1) * 2 + 2 + 8);
      const int64_t grads = plan.trained_elems / world * 4;
      job.prepare = [&](const Rank&, Rig& rig) {
        EXPECT_NEAR(BytesOf(rig.host_ledger()), grads + places,
                    12 * kBlockAlignment);
        EXPECT_NEAR(rig->swapped()->disk_bytes(), on_disk,
                    (pieces + 1) * kBlockAlignment);
      };
      job.between = [&](Rig& rig) {
        const auto traffic = rig->swapped()->CountTraffic(rig->schedule());
        EXPECT_NEAR(traffic.written, on_disk, (pieces + 1) * kBlockAlignment);
        EXPECT_GE(traffic.read, traffic.written);
      };
      Train(job);
      EXPECT_FALSE(std::filesystem::exists(DiskFolder() + "/zero_swap"));
    }
  }
}

TEST(OffloadTest, TheDeviceKeepsWhatTheHostHasNot) {
  for (const int world : {1, 2}) {
    for (const Offload& offload : Offloads()) {
      SCOPED_TRACE(testing::Message() << offload.name << " world " << world);
      Job job;
      job.world = world;
      job.options.param_dtype = DType::kBF16;
      job.options = Offloaded(job.options, offload.stage, offload.homes);
      const Plan plan = PlanOf(job);
      if (offload.homes != kOptimizerOnHost && offload.homes != kAllOnHost) {
        continue;
      }
      const bool all = offload.homes.parameters == Home::kHost;
      const int64_t on_device =
          all ? 0
              : plan.StateElems(plan.padded_elems, plan.placement.parameters) *
                    2;
      // Only within a step.
      const int64_t gradients = offload.stage > 1 ? 0 : plan.trained_elems * 4;
      // bf16, the rest of masters, both moments, and fp32 gradients.
      const int64_t on_host = plan.trained_elems / world * (2 + 2 + 8 + 4);
      job.prepare = [&](const Rank&, Rig& rig) {
        EXPECT_NEAR(BytesOf(rig.ledger()), on_device, 3 * Arena::kAlignment);
        EXPECT_NEAR(BytesOf(rig.host_ledger()), on_host, 6 * Arena::kAlignment);
      };
      job.between = [&](Rig& rig) {
        EXPECT_NEAR(BytesOf(rig.ledger()), on_device, 3 * Arena::kAlignment);
        EXPECT_EQ(rig.ledger().peak_bytes(MemoryCategory::kGradients),
                  gradients);
      };
      Train(job);
    }
  }
}

}  // namespace
}  // namespace zero
