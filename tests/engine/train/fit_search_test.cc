#include "engine/train/fit_search.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "engine/base/file.h"
#include "engine/train/memory_fit.h"
#include "gtest/gtest.h"
#include "tests/support/model_tools.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace zero {
namespace {

constexpr int kWorld = 4;
constexpr int64_t kSequences = 24;  // of a rank in a step

Config SmallConfig(int64_t length, int64_t micro_batch) {
  Config config;
  config.model = TinyConfig(ModelFamily::kLlama);
  config.data.sequence_length = length;
  config.data.tokenizer = "none";
  config.train_micro_batch_size_per_gpu = micro_batch;
  config.gradient_accumulation_steps = 1;
  return config;
}

class FitSearchTest : public testing::Test {
 protected:
  FitSearchTest()
      : device_(MakeCpuDevice(1)),
        rank_(MakeSoloRank(*device_, /*rank=*/0, kWorld)),
        config_(SmallConfig(/*length=*/16, kSequences)) {}

  int64_t PeakOf(const Config& config) const {
    return RehearseRun(rank_, config, tools_, TrainingWorkload(config))
        ->ledger.total_peak_bytes();
  }

  FitSearch Search(const Config& config) const {
    return FitSearch(rank_, config, tools_, AssumedSpeedOf(*rank_.device));
  }

  std::vector<FitProposal> Fits(int64_t memory) const {
    return *Search(config_).Propose({memory, /*host=*/0});
  }

  const ModelTools tools_ = TestModelTools();
  const std::unique_ptr<Device> device_;
  const Rank rank_;
  Config config_;
};

TEST_F(FitSearchTest, WhatFitsStaysAsItIsOrComputesNothingAgain) {
  config_.zero_optimization.stage = 2;  // stages 0 and 1 save no traffic
  std::vector<FitProposal> fits = Fits(int64_t{1} << 40);
  const auto as_it_is = absl::c_find_if(
      fits, [&](const FitProposal& fit) { return fit.Patch(config_).empty(); });
  ASSERT_NE(as_it_is, fits.end());
  EXPECT_EQ(as_it_is->peak_bytes, PeakOf(config_));
  // The same price, whether or not it fits.
  const FitProposal own = *Search(config_).Price(SettingsOf(config_));
  EXPECT_EQ(own.peak_bytes, as_it_is->peak_bytes);
  EXPECT_EQ(own.seconds, as_it_is->seconds);
  EXPECT_EQ(fits.front().Patch(config_),
            "--set activation_checkpointing.keep_all=true");
  // Of what is priced, it saves passes over memory alone.
  EXPECT_LT(fits.front().seconds, as_it_is->seconds);
  EXPECT_EQ(fits.front().flops, as_it_is->flops);

  config_.keep_all_activations = true;
  fits = Fits(int64_t{1} << 40);
  EXPECT_EQ(fits.front().Patch(config_), "");
  EXPECT_EQ(fits.front().peak_bytes, PeakOf(config_));
}

TEST_F(FitSearchTest, WhereNothingFitsThereIsNoProposal) {
  EXPECT_TRUE(Fits(1 << 20).empty());
}

// The bytes that an option takes from "needs at least 1.5 MiB of `memory`".
int64_t AmountIn(const std::string& advice,
                 const std::string& memory = "the ") {
  const std::string needs = "needs at least ";
  double amount = 0;
  char unit = ' ';
  const size_t end = advice.find(" of " + memory);
  const size_t at = advice.rfind(needs, end);
  EXPECT_TRUE(end != std::string::npos && at != std::string::npos) << advice;
  if (at != std::string::npos) {
    std::sscanf(advice.c_str() + at + needs.size(), "%lf %c", &amount, &unit);
  }
  return static_cast<int64_t>(amount * (unit == 'G'   ? 1 << 30
                                        : unit == 'M' ? 1 << 20
                                                      : 1 << 10));
}

// Several micro-steps keep sums of gradients, and one step has activations of
// all sequences: both take more than a single small step.
TEST_F(FitSearchTest, TheAmountThatIsNamedIsEnoughAndLittleMore) {
  config_.model.hidden_size = 256;
  config_.gradient_accumulation_steps = 2;
  for (const int64_t stage : {0, 3}) {
    config_.zero_optimization.stage = stage;
    FitSearch search = Search(config_);
    FitLimits limits = {.device = 1 << 20, .host = 0};
    ASSERT_TRUE(search.Propose(limits)->empty());
    const int64_t amount = AmountIn(*search.NothingFits(limits));
    limits.device = amount;
    EXPECT_FALSE(search.Propose(limits)->empty());
    // Less the room that it leaves, and 0.1 MiB of what is printed.
    limits.device = amount - RoomBytes(rank_) - (1 << 20) / 10;
    EXPECT_TRUE(search.Propose(limits)->empty());
    EXPECT_EQ(AmountIn(*search.NothingFits(limits)), amount);
  }
}

// For every memory from too little to enough: each proposal is the same
// training, takes what it predicts, and has the largest micro-batch.
TEST_F(FitSearchTest, ProposesTheLargestMicroBatchThatFits) {
  const int64_t all = PeakOf(config_);
  std::set<std::string> patches;
  for (int64_t memory = all; memory > 0; memory -= all / 100) {
    const std::vector<FitProposal> fits = Fits(memory);
    if (fits.empty()) break;
    patches.insert(fits.front().Patch(config_));
    for (size_t i = 0; i < fits.size(); ++i) {
      const FitProposal& fit = fits[i];
      EXPECT_EQ(fit.micro_batch * fit.accumulation, kSequences);
      EXPECT_LE(fit.peak_bytes, memory);
      EXPECT_EQ(fit.peak_bytes, PeakOf(WithSettings(config_, fit)));
      if (fit.recompute == Recompute::kKeepAll) {
        EXPECT_EQ(fit.micro_batch, kSequences);
      }
      if (i > 0) {
        EXPECT_GE(fit.seconds, fits[i - 1].seconds);
        EXPECT_LT(fit.peak_bytes, fits[i - 1].peak_bytes);
      }
      FitProposal larger = fit;
      do {
        ++larger.micro_batch;
      } while (larger.micro_batch < kSequences &&
               kSequences % larger.micro_batch != 0);
      if (larger.micro_batch > kSequences) continue;
      larger.accumulation = kSequences / larger.micro_batch;
      EXPECT_GT(PeakOf(WithSettings(config_, larger)), memory);
    }
  }
  EXPECT_GT(patches.size(), 3u);
}

// A table much larger than all else is reduced into a gradient that coexists
// with the next micro-step's: one micro-step takes less than two smaller ones.
TEST_F(FitSearchTest, OneMicroStepMayTakeLessThanSeveral) {
  config_.model.vocab_size = 50000;
  config_.zero_optimization.stage = 2;
  config_.train_micro_batch_size_per_gpu = 1;
  config_.gradient_accumulation_steps = 4;
  Config whole = config_;
  whole.train_micro_batch_size_per_gpu = 4;
  whole.gradient_accumulation_steps = 1;
  const int64_t memory = PeakOf(whole);
  bool found = false;
  for (const FitProposal& fit : Fits(memory)) {
    found = found || fit.accumulation == 1;
  }
  EXPECT_TRUE(found);
}

// Cheaper proposals come first even if the config shards more than it must.
TEST_F(FitSearchTest, LessShardingAndLessRecomputeAreProposedToo) {
  config_.zero_optimization.stage = 3;
  config_.activation_checkpointing = true;
  config_.recompute_granularity = Recompute::kFull;
  const std::vector<FitProposal> fits = Fits(int64_t{1} << 40);
  ASSERT_FALSE(fits.empty());
  EXPECT_LT(fits.front().stage, 3);
  EXPECT_EQ(fits.front().recompute, Recompute::kKeepAll);
  EXPECT_NE(fits.front().Patch(config_).find(
                "activation_checkpointing.enabled=false "
                "activation_checkpointing.keep_all=true"),
            std::string::npos);
}

// The kernels take fewer than 2^31 tokens in one pass.
TEST_F(FitSearchTest, ASplitThatTheKernelsRefuseDoesNotFit) {
  config_.data.sequence_length = 1 << 16;
  config_.train_micro_batch_size_per_gpu = 1 << 14;
  config_.gradient_accumulation_steps = 2;
  const auto fits =
      Search(config_).Propose({.device = int64_t{1} << 49, .host = 0});
  ASSERT_TRUE(fits.ok()) << fits.status();
  ASSERT_FALSE(fits->empty());
  for (const FitProposal& fit : *fits) EXPECT_LE(fit.micro_batch, 1 << 14);
  // The config's own split is an error.
  config_.train_micro_batch_size_per_gpu = 1 << 15;
  config_.gradient_accumulation_steps = 1;
  const auto refused =
      Search(config_).Propose({.device = int64_t{1} << 49, .host = 0});
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
}

// Within a node bytes are cheaper: groups of a node's size shard there.
TEST(FitSearchOfNodesTest, GroupsOfANodeAreProposed) {
  Config config;
  config.model = TinyConfig(ModelFamily::kLlama);
  config.data.sequence_length = 16;
  config.data.tokenizer = "none";
  config.train_micro_batch_size_per_gpu = 1;
  config.gradient_accumulation_steps = 1;
  config.zero_optimization.stage = 3;
  const auto device = MakeAssumedGpu({});
  const Rank rank = MakeSoloRank(*device, /*rank=*/0, /*world=*/64);
  const ModelTools tools = TestModelTools();
  const auto fits = FitSearch(rank, config, tools, AssumedSpeedOf(*device))
                        .Propose({.device = int64_t{1} << 40, .host = 0});
  ASSERT_TRUE(fits.ok()) << fits.status();
  bool found = false;
  for (const FitProposal& fit : *fits) {
    found = found || (fit.stage == 3 && fit.mics_shard_size == 8);
  }
  EXPECT_TRUE(found);
}

TEST_F(FitSearchTest, APatchNamesWhatChanges) {
  const FitSettings fit = {.stage = 3,
                           .mics_shard_size = 2,
                           .micro_batch = 2,
                           .accumulation = 12,
                           .recompute = Recompute::kSelective};
  EXPECT_EQ(fit.Patch(config_),
            "--set zero_optimization.stage=3 "
            "zero_optimization.mics_shard_size=2 "
            "activation_checkpointing.enabled=true "
            "activation_checkpointing.granularity=selective "
            "train_micro_batch_size_per_gpu=2 "
            "gradient_accumulation_steps=12");
}

// A run that fits the device only without its states fits if the host has room.
TEST(FitSearchOfGpusTest, TheHostTakesWhatTheDeviceCanNot) {
  Config config = SmallConfig(/*length=*/16, /*micro_batch=*/1);
  config.model.num_hidden_layers = 32;
  config.model.hidden_size = 512;
  const auto device = MakeAssumedGpu({});
  const Rank rank = MakeSoloRank(*device);
  const ModelTools tools = TestModelTools();
  FitSearch search(rank, config, tools, AssumedSpeedOf(*device));
  const auto fits_in = [&](const FitLimits& limits) {
    return *search.Propose(limits);
  };
  const auto all = fits_in({.device = int64_t{1} << 40, .host = 0});
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.front().offload, Offload::kNone);
  const int64_t least = all.back().peak_bytes;
  EXPECT_TRUE(fits_in({.device = least - 1, .host = 0}).empty());
  const auto offloaded =
      fits_in({.device = least - 1, .host = int64_t{1} << 40});
  ASSERT_FALSE(offloaded.empty());
  const FitProposal& fit = offloaded.front();
  EXPECT_EQ(fit.offload, Offload::kOptimizer);
  EXPECT_GT(fit.seconds, all.front().seconds);
  EXPECT_NE(fit.Patch(config).find("zero_optimization.offload_optimizer."
                                   "device=cpu"),
            std::string::npos);
  const auto same = RehearseRun(rank, WithSettings(config, fit),
                                TestModelTools(), TrainingWorkload(config));
  EXPECT_EQ(same->host_bytes(), fit.host_bytes);
  // If the host has no room either, a disk takes the rest.
  const auto on_disk =
      fits_in({.device = least - 1, .host = fit.host_bytes / 2});
  ASSERT_FALSE(on_disk.empty());
  const FitProposal& swapped = on_disk.front();
  EXPECT_TRUE(swapped.on_disk);
  EXPECT_LE(swapped.host_bytes, fit.host_bytes / 2);
  EXPECT_GT(swapped.seconds, fit.seconds);
  const Config after = WithSettings(config, swapped);
  const std::string patch = swapped.Patch(config);
  for (const char* set : {"device=nvme", "nvme_path=nvme"}) {
    EXPECT_NE(
        patch.find(absl::StrCat("zero_optimization.offload_optimizer.", set)),
        std::string::npos)
        << patch;
  }
  const auto rehearsed =
      RehearseRun(rank, after, TestModelTools(), TrainingWorkload(after));
  EXPECT_EQ(rehearsed->host_bytes(), swapped.host_bytes);
  EXPECT_EQ(rehearsed->disk_bytes, swapped.disk_bytes);
  // Weights and both moments, in blocks.
  EXPECT_NEAR(swapped.disk_bytes, rehearsed->plan.trained_elems * 12,
              swapped.disk_bytes / 50);
  const FitLimits little_host = {.device = least - 1,
                                 .host = swapped.host_bytes / 2};
  EXPECT_TRUE(fits_in(little_host).empty());
  // The memory that is too small is named.
  const auto reason = [&](const FitLimits& limits) {
    return *search.NothingFits(limits);
  };
  EXPECT_NE(reason(little_host)
                .find("with offload the device has room, but a rank needs at "
                      "least "),
            std::string::npos)
      << reason(little_host);
  EXPECT_NE(
      reason({.device = 1 << 20, .host = int64_t{1} << 40})
          .find(" MiB of the device's memory (128.0 MiB of it for kernels "
                "that load later) and may take 129.0 MiB; take a "
                "shorter"),
      std::string::npos);
  // As much as is named is enough, with what is left for kernels.
  const int64_t host = AmountIn(reason(little_host));
  EXPECT_GT(host, little_host.host);
  EXPECT_FALSE(fits_in({.device = least - 1, .host = host}).empty());
  // With room for the gradients all settings with a disk are searched, and the
  // one that needs least is named: its parameters are on the device.
  const FitLimits gradients = {.device = least - 1,
                               .host = swapped.host_gradient_bytes};
  ASSERT_TRUE(fits_in(gradients).empty());
  const int64_t less = AmountIn(reason(gradients));
  EXPECT_LT(less, host);
  EXPECT_FALSE(fits_in({.device = least - 1, .host = less}).empty());
  EXPECT_TRUE(
      fits_in({.device = least - 1, .host = less - (1 << 20) / 10}).empty());
  const int64_t enough =
      AmountIn(reason({.device = 1 << 20, .host = int64_t{1} << 40})) -
      kLateKernelsBytes;
  EXPECT_FALSE(fits_in({.device = enough, .host = int64_t{1} << 40}).empty());
  EXPECT_TRUE(
      fits_in({.device = enough - (1 << 20) / 10, .host = int64_t{1} << 40})
          .empty());
  // A disk without room takes nothing.
  const auto with_disk = [&](int64_t disk) {
    return fits_in(
        {.device = least - 1, .host = fit.host_bytes / 2, .disk = disk});
  };
  EXPECT_TRUE(with_disk(1).empty());
  EXPECT_NE(reason({.device = least - 1, .host = fit.host_bytes / 2, .disk = 1})
                .find("only offload to a disk fits, and the disk at "),
            std::string::npos);
  ASSERT_FALSE(with_disk(swapped.disk_bytes).empty());
  EXPECT_EQ(with_disk(swapped.disk_bytes).front().disk_bytes,
            swapped.disk_bytes);
  for (const FitProposal& other : with_disk(swapped.disk_bytes - 1)) {
    EXPECT_LT(other.disk_bytes, swapped.disk_bytes);
  }
  config.zero_optimization.delayed_update = true;
  FitSearch delayed(rank, config, tools, AssumedSpeedOf(*device));
  const FitLimits half = {.device = least - 1, .host = fit.host_bytes / 2};
  EXPECT_TRUE(delayed.Propose(half)->empty());
  EXPECT_GT(AmountIn(*delayed.NothingFits(half)), half.host);
}

// Both memories are too small: what is named of each is enough with the other.
// On a GPU the copy that checkpoints are written from is the host's, so the
// device needs as much without it.
TEST(FitSearchOfGpusTest, BothAmountsTogetherAreEnough) {
  Config config = SmallConfig(/*length=*/16, /*micro_batch=*/1);
  config.model.num_hidden_layers = 4;
  config.model.hidden_size = 512;
  config.training.save_every = 10;
  config.zero_optimization.delayed_update = true;  // which excludes disks
  const auto device = MakeAssumedGpu({});
  const Rank rank = MakeSoloRank(*device);
  const ModelTools tools = TestModelTools();
  FitSearch search(rank, config, tools, AssumedSpeedOf(*device));
  FitLimits limits = {.device = 1 << 20, .host = 1 << 20};
  ASSERT_TRUE(search.Propose(limits)->empty());
  const std::string reason = *search.NothingFits(limits);
  limits.device = AmountIn(reason, "the device's") - kLateKernelsBytes;
  limits.host = AmountIn(reason, "the host's");
  EXPECT_FALSE(search.Propose(limits)->empty()) << reason;
  limits.host -= (1 << 20) / 10;  // of what is printed
  EXPECT_TRUE(search.Propose(limits)->empty()) << reason;
}

// Messages name what was given, or a GPU's share: kernels that load late, which
// ranks on one GPU share, are part of it.
TEST(FitSearchOfGpusTest, TheLimitThatIsNamedIsTheOneThatWasGiven) {
  const Config config = SmallConfig(/*length=*/16, /*micro_batch=*/1);
  const auto device = MakeAssumedGpu({});
  Rank rank = MakeSoloRank(*device, /*rank=*/0, /*world=*/4);
  const ModelTools tools = TestModelTools();
  const auto reason = [&] {
    FitSearch search(rank, config, tools, AssumedSpeedOf(*device));
    FitLimits limits = {.device = TakeableBytes(rank), .host = 1};
    if (rank.memory.device_budget == 0) limits.device = 1 << 20;
    return *search.NothingFits(limits);
  };
  rank.memory.device_budget = 100 << 20;
  EXPECT_NE(reason().find("and may take 100.0 MiB (--device-memory)"),
            std::string::npos)
      << reason();
  EXPECT_NE(reason().find("; raise --device-memory, or take a shorter"),
            std::string::npos)
      << reason();
  rank.memory.device_budget = 0;
  EXPECT_NE(reason().find("(32.0 MiB of it for kernels that load later) and "
                          "may take 33.0 MiB; take a shorter"),
            std::string::npos)
      << reason();
}

// Of every stage, recompute and offload, at the config's micro-batch: none that
// fits is better than a proposal, whatever the config has.
TEST(FitSearchOfGpusTest, NothingThatFitsBeatsAProposal) {
  Config config = SmallConfig(/*length=*/64, /*micro_batch=*/2);
  config.model.num_hidden_layers = 2;
  config.model.hidden_size = 512;
  config.gradient_accumulation_steps = 2;
  config.activation_checkpointing = true;
  Config offloaded = config;
  offloaded.zero_optimization.stage = 3;
  offloaded.zero_optimization.set_offload(Offload::kAll);
  offloaded.set_recompute(Recompute::kOff);
  const auto device = MakeAssumedGpu({});
  const MachineSpeed speed = AssumedSpeedOf(*device);
  const ModelTools tools = TestModelTools();
  for (const int world : {1, 4}) {
    const Rank rank = MakeSoloRank(*device, /*rank=*/0, world);
    FitSearch search(rank, config, tools, speed);
    FitSearch from_offloaded(rank, offloaded, tools, speed);
    std::vector<FitProposal> rows;
    for (const Offload offload : kOffloads) {
      for (const Recompute recompute : kRecomputeLevels) {
        for (int64_t stage = FirstStageOf(offload); stage <= 3; ++stage) {
          Config row = config;
          row.zero_optimization.stage = stage;
          row.zero_optimization.set_offload(offload);
          row.set_recompute(recompute);
          const auto step =
              RehearseRun(rank, row, tools, TrainingWorkload(row));
          ASSERT_TRUE(step.ok()) << step.status();
          rows.push_back(*search.Price(SettingsOf(row)));
          EXPECT_EQ(rows.back().peak_bytes, step->needed_bytes());
        }
      }
    }
    std::set<int64_t> limits;
    for (const FitProposal& row : rows) limits.insert(row.peak_bytes);
    for (const int64_t limit : limits) {
      const auto prices_from = [&](FitSearch& start) {
        std::vector<std::pair<double, int64_t>> prices;
        const auto fits =
            start.Propose({.device = limit, .host = int64_t{1} << 40});
        EXPECT_TRUE(fits.ok()) << fits.status();
        if (!fits.ok()) return prices;
        for (const FitProposal& fit : *fits) {
          prices.emplace_back(fit.seconds, fit.peak_bytes);
        }
        return prices;
      };
      const auto prices = prices_from(search);
      EXPECT_EQ(prices, prices_from(from_offloaded));
      for (const FitProposal& row : rows) {
        if (row.peak_bytes > limit) continue;
        EXPECT_TRUE(absl::c_any_of(prices, [&](const auto& price) {
          return price.first <= row.seconds && price.second <= row.peak_bytes;
        }));
        for (const auto& [seconds, peak] : prices) {
          EXPECT_FALSE(row.seconds <= seconds && row.peak_bytes <= peak &&
                       (row.seconds < seconds || row.peak_bytes < peak));
        }
      }
    }
  }
}

TEST_F(FitSearchTest, TheRanksOfAHostShareTheFreeSpaceOfADisk) {
  const TempDir dir;
  const int64_t all = FreeDiskBytes(dir.path());
  ASSERT_GT(all, 0);
  Rank rank = MakeSoloRank(*device_, /*rank=*/0, /*world=*/4);
  // Others write there, too; folders that a run would make count as well.
  for (const std::string& folder : {dir.path(), dir.File("new/nvme")}) {
    rank.memory.host_sharers = 0;
    EXPECT_NEAR(TakeableDiskBytes(rank, folder), all / 4.0, all / 100.0);
    rank.memory.host_sharers = 2;
    EXPECT_NEAR(TakeableDiskBytes(rank, folder), all / 2.0, all / 100.0);
  }
  EXPECT_EQ(TakeableDiskBytes(rank, "/proc"), INT64_MAX);  // no disk
}

// The copy that checkpoints are written from is given up where a run fits only
// without it.
TEST_F(FitSearchTest, CheckpointsAreWrittenWithoutACopyIfThatFits) {
  config_.model.hidden_size = 256;
  config_.zero_optimization.stage = 3;
  config_.train_micro_batch_size_per_gpu = 1;
  config_.training.save_every = 10;
  for (const FitProposal& fit : Fits(int64_t{1} << 40)) {
    EXPECT_FALSE(fit.without_copy);
  }
  FitSearch search = Search(config_);
  FitSettings least = {.stage = 3,
                       .mics_shard_size = -1,
                       .micro_batch = 1,
                       .accumulation = 1,
                       .recompute = Recompute::kFull,
                       .offload = Offload::kNone};
  const FitProposal with_copy = *search.Price(least);
  EXPECT_GT(with_copy.copy_bytes, 0);
  const auto fits =
      search.Propose({with_copy.peak_bytes - with_copy.copy_bytes, /*host=*/0});
  ASSERT_FALSE(fits->empty());
  for (const FitProposal& fit : *fits) {
    EXPECT_TRUE(fit.without_copy);
    EXPECT_NE(fit.Patch(config_).find("training.async_save=false"),
              std::string::npos);
    EXPECT_EQ(fit.peak_bytes, PeakOf(WithSettings(config_, fit)));
  }
  // It costs what training waits for the disk.
  least.without_copy = true;
  EXPECT_GT(search.Price(least)->seconds, with_copy.seconds);
}

// On the CPU host and device share one memory, but a disk is another.
TEST_F(FitSearchTest, ADiskHelpsOnTheCpu) {
  config_.model.num_hidden_layers = 16;
  config_.model.hidden_size = 256;
  std::vector<FitProposal> fits = Fits(int64_t{1} << 40);
  int64_t least = 0;
  while (!fits.empty() && !fits.front().on_disk) {
    least = fits.back().peak_bytes;
    fits = Fits(least - 1);
  }
  ASSERT_FALSE(fits.empty());
  for (const FitProposal& fit : fits) {
    EXPECT_TRUE(fit.on_disk);
    EXPECT_GT(fit.disk_bytes, 0);
    EXPECT_LT(fit.peak_bytes, least);
  }
}

}  // namespace
}  // namespace zero
