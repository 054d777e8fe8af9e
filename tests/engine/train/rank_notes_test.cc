#include "engine/train/rank_notes.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/config/keys.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zero {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// Of 256 elements but for the last, of 128 on two ranks.
std::vector<UnitSpec> Units() {
  std::vector<UnitSpec> units;
  for (const char* name : {"embedding", "block.0", "block.1"}) {
    units.push_back({name, {{absl::StrCat(name, ".weight"), {10, 20}}}});
  }
  units.push_back({"head", {{"head.scale", {100}}}});
  return units;
}

Plan PlanAt(int stage, const LoadedConfig& loaded, int64_t world = 2) {
  const ZeroConfig& zero = loaded.config.zero_optimization;
  return MakePlan(Units(), {.world = world,
                            .placement = PlacementOfStage(stage),
                            .reduce_bucket_elems = zero.reduce_bucket_size,
                            .gather_bucket_elems = zero.allgather_bucket_size});
}

LoadedConfig Load(const std::vector<std::string>& overrides) {
  LoadOptions options;
  options.overrides = overrides;
  options.missing_files = MissingFiles::kIgnored;
  auto loaded = ParseConfig(R"({
      "model": {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2},
      "training": {"steps": 4}, "train_batch_size": 4
    })",
                            "run.json", options);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  return *std::move(loaded);
}

TEST(RankNotesTest, WhatOneRankDoesNotReadIsNamedAtOnce) {
  const LoadedConfig loaded =
      Load({"zero_optimization.stage=2", "communication.algorithm=ring",
            "communication_data_type=bf16",
            "zero_optimization.overlap_comm="
            "true"});
  EXPECT_THAT(
      RankNotes(loaded, PlanAt(2, loaded, /*world=*/1)),
      ElementsAre(
          "communication_data_type, zero_optimization.stage, "
          "communication.algorithm change nothing on one rank, which has no "
          "other to share with or talk to; start several with --ranks N"));
  EXPECT_THAT(RankNotes(loaded, PlanAt(2, loaded)), IsEmpty());
  // Values derived from another key, or equal to the default, need no note.
  const LoadedConfig plain =
      Load({"bf16.enabled=true", "data_types.grad_accum_dtype=bf16",
            "zero_optimization.stage=0"});
  EXPECT_THAT(RankNotes(plain, PlanAt(0, plain, /*world=*/1)), IsEmpty());
}

TEST(RankNotesTest, PartsOfATableThatIsNotDividedChangeNothing) {
  const LoadedConfig loaded = Load({"zero_optimization.vocabulary_parts=on"});
  EXPECT_THAT(RankNotes(loaded, PlanAt(0, loaded)),
              ElementsAre(StartsWith(
                  "zero_optimization.vocabulary_parts on changes nothing: ")));
}

TEST(RankNotesTest, EveryKeyBetweenRanksIsNamed) {
  const std::string stage3 = "zero_optimization.stage=3";
  const std::string keep =
      "zero_optimization.stage3_param_persistence_threshold=7";
  const struct {
    const char* path;
    const char* value;
    std::vector<std::string> context;
  } kLines[] = {
      {"communication_data_type", "bf16", {}},
      {"zero_optimization.stage", "1", {}},
      {"zero_optimization.reduce_bucket_size", "7", {}},
      {"zero_optimization.allgather_bucket_size",
       "7",
       {"zero_optimization.stage=1"}},
      {"zero_optimization.overlap_comm", "false", {}},
      {"zero_optimization.stage3_prefetch_bucket_size", "7", {stage3}},
      {"zero_optimization.stage3_max_live_parameters", "7", {stage3}},
      {"zero_optimization.stage3_max_reuse_distance", "7", {stage3}},
      {"zero_optimization.stage3_param_persistence_threshold", "7", {stage3}},
      {"zero_optimization.stage3_model_persistence_threshold",
       "7",
       {stage3, keep}},
      {"zero_optimization.vocabulary_parts", "on", {stage3}},
      {"zero_optimization.mics_shard_size", "1", {stage3}},
      {"communication.algorithm", "ring", {}},
      {"communication.ranks_per_host",
       "2",
       {"communication.algorithm=hierarchical"}},
      {"communication.backend", "local", {}},
      {"communication.timeout_seconds", "7", {}},
      {"communication.straggler_factor", "7", {}},
  };
  std::vector<std::string> named;
  for (const auto& line : kLines) {
    std::vector<std::string> overrides = line.context;
    overrides.push_back(absl::StrCat(line.path, "=", line.value));
    const LoadedConfig loaded = Load(overrides);
    const auto notes = RankNotes(loaded, PlanAt(0, loaded, /*world=*/1));
    ASSERT_EQ(notes.size(), 1u) << line.path;
    EXPECT_THAT(notes[0], HasSubstr(line.path));
    named.push_back(line.path);
  }
  for (const KeySpec& key : AllKeys()) {
    EXPECT_EQ(std::count(named.begin(), named.end(), key.path),
              key.between_ranks ? 1 : 0)
        << key.path;
  }
}

TEST(RankNotesTest, KeysOfAGpuChangeNothingOnTheCpu) {
  const auto cpu = MakeCpuDevice(1);
  EXPECT_THAT(DeviceNotes(Load({"device.allow_tf32=false"}), *cpu), IsEmpty());
  const std::vector<std::string> values = {
      "allow_tf32=true", "deterministic_attention=true", "time_algorithms=true",
      "fp32_logits=true", "loss_chunk_rows=7"};
  std::vector<std::string> overrides = {"bf16.enabled=true"};
  for (const std::string& value : values)
    overrides.push_back("device." + value);
  const auto notes = DeviceNotes(Load(overrides), *cpu);
  ASSERT_EQ(notes.size(), 1u);
  for (const KeySpec& key : AllKeys()) {
    if (!key.is_leaf()) continue;
    EXPECT_EQ(absl::StrContains(notes[0], key.path), key.of_gpu) << key.path;
  }
}

TEST(RankNotesTest, ABucketBelowEverySegmentIsOneSegment) {
  const LoadedConfig small = Load({"zero_optimization.stage=1",
                                   "zero_optimization.reduce_bucket_size=127",
                                   "zero_optimization.allgather_bucket_size="
                                   "128"});
  EXPECT_THAT(RankNotes(small, PlanAt(1, small)),
              ElementsAre(StartsWith(
                  "zero_optimization.reduce_bucket_size 127 puts every segment "
                  "into a bucket of its own: segments are not cut, and this "
                  "model's smallest one has 128 elements")));
  const LoadedConfig smaller =
      Load({"zero_optimization.stage=1",
            "zero_optimization.allgather_bucket_size=1"});
  EXPECT_THAT(
      RankNotes(smaller, PlanAt(1, smaller)),
      ElementsAre(StartsWith("zero_optimization.allgather_bucket_size 1 ")));
  // It is as said: the same buckets.
  const LoadedConfig one = Load(
      {"zero_optimization.stage=1", "zero_optimization.reduce_bucket_size=1"});
  EXPECT_EQ(PlanAt(1, one).reduce_buckets, PlanAt(1, small).reduce_buckets);
}

TEST(RankNotesTest, APersistenceThresholdHoldsForWholeUnits) {
  const std::string stage = "zero_optimization.stage=3";
  const std::string path =
      "zero_optimization.stage3_param_persistence_threshold";
  const LoadedConfig one = Load({stage, path + "=101"});
  EXPECT_THAT(
      RankNotes(one, PlanAt(3, one)),
      ElementsAre(path + " 101 holds for whole units, all of whose parameters "
                         "must be smaller: 1 of 4 stay in place (head; 128 "
                         "elements)"));
  const LoadedConfig none = Load({stage, path + "=100"});
  EXPECT_THAT(RankNotes(none, PlanAt(3, none)),
              ElementsAre(HasSubstr("must be smaller: 0 of 4 stay in place")));
  const LoadedConfig off = Load({stage});
  EXPECT_THAT(RankNotes(off, PlanAt(3, off)), IsEmpty());
}

TEST(RankNotesTest, ARatioHoldsForWholeUnits) {
  const std::string path = "zero_optimization.offload_optimizer.";
  const auto notes = [&](double ratio, const std::string& device) {
    const LoadedConfig loaded =
        Load({"zero_optimization.stage=2", path + "device=" + device,
              absl::StrCat(path, "ratio=", ratio)});
    PlanOptions options{.world = 2, .placement = PlacementOfStage(2)};
    if (device == "cpu") options.homes.optimizer = Home::kHost;
    options.host_share = device == "cpu" ? ratio : 1;
    return RankNotes(loaded, MakePlan(Units(), options));
  };
  // 2 * 256 of 896 elements; the head's 128 would make it 71 %.
  EXPECT_THAT(notes(0.6, "cpu"),
              ElementsAre(path + "ratio 0.6 holds for whole units: the host "
                                 "updates 2 of 4 (block.0, block.1; 57.1 % of "
                                 "the elements)"));
  EXPECT_THAT(notes(1, "cpu"), IsEmpty());
  EXPECT_THAT(notes(0.6, "none"), IsEmpty());
}

TEST(RankNotesTest, ADelayedUpdateSaysThatItChangesResults) {
  const std::string path = "zero_optimization.offload_optimizer.";
  const auto notes = [&](int warmup) {
    const LoadedConfig loaded =
        Load({"zero_optimization.stage=1", path + "device=cpu",
              path + "delayed_update.enabled=true",
              absl::StrCat(path, "delayed_update.warmup_steps=", warmup)});
    return RankNotes(loaded, PlanAt(1, loaded, /*world=*/1));
  };
  EXPECT_THAT(notes(3), ElementsAre(HasSubstr("changes results: after step 3 "
                                              "gradients are those of")));
  EXPECT_THAT(
      notes(4),
      ElementsAre(HasSubstr("begins after 4 steps, but the run has 4")));
}

TEST(RankNotesTest, AnUpdateBeforeTheNormSaysThatABadGradientEndsTheRun) {
  const std::string path = "zero_optimization.offload_optimizer.";
  for (const int world : {1, 2}) {
    const auto notes = [&](const std::string& device) {
      const LoadedConfig loaded =
          Load({"zero_optimization.stage=2", "gradient_clipping=0",
                path + "device=" + device, path + "update_before_norm=true"});
      return RankNotes(loaded, PlanAt(2, loaded, world));
    };
    const std::string note = path +
                             "update_before_norm: a gradient that is not "
                             "finite ends the run";
    EXPECT_THAT(notes("cpu"), ElementsAre(note));
    EXPECT_THAT(notes("none"), Not(Contains(note)));
  }
}

}  // namespace
}  // namespace zero
