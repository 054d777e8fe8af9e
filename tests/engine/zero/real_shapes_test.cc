// Stages compute the same bits on the shapes of a real model too: GPT-2 124M's
// widths and vocabulary, two layers of it, on two ranks of two threads. The
// logits take more than one chunk, the table more than one segment, and the
// products are large enough for every way of dividing them among threads.
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/engine/zero/job_testing.h"

namespace zero {
namespace {

Job RealJob(DType dtype, int stage, Recompute recompute) {
  Job job;
  job.config.vocab_size = 50257;
  job.config.hidden_size = 768;
  job.config.num_attention_heads = job.config.num_key_value_heads = 12;
  job.config.head_dim = 64;
  job.config.intermediate_size = 3072;
  job.config.max_position_embeddings = 208;
  job.config.initializer_range = 0.02;
  job.config.resid_pdrop = 0.1;
  // 416 rows of each rank: two chunks of logits, of 208 rows each.
  job.batch = 4;
  job.length = 208;
  job.steps = 2;
  job.options.max_positions = job.length;
  job.options.param_dtype = dtype;
  job.options.recompute = recompute;
  job.options = AtStage(job.options, stage);
  return job;
}

// The two lists of `others` together have every stage, and all levels of
// recomputation.
void ExpectTheBitsOfStageZero(
    DType dtype, const std::vector<std::pair<int, Recompute>>& others) {
  const auto two_threads = [](int) { return MakeCpuDevice(2); };
  const Outcome base = Train(RealJob(dtype, 0, Recompute::kOff), two_threads);
  ASSERT_EQ(base.losses.size(), 2u);
  for (const auto& [stage, recompute] : others) {
    SCOPED_TRACE(absl::StrCat("stage ", stage, ", recompute ",
                              RecomputeName(recompute)));
    const Outcome outcome =
        Train(RealJob(dtype, stage, recompute), two_threads);
    EXPECT_EQ(outcome.losses, base.losses);
    EXPECT_EQ(outcome.norms, base.norms);
    // Not EXPECT_EQ, which would print all of them.
    EXPECT_TRUE(outcome.parameters == base.parameters);
  }
}

TEST(RealShapesTest, EveryStageGivesTheBitsOfStageZeroInFp32) {
  ExpectTheBitsOfStageZero(DType::kF32, {{1, Recompute::kFull},
                                         {2, Recompute::kOff},
                                         {3, Recompute::kSelective}});
}

TEST(RealShapesTest, EveryStageGivesTheBitsOfStageZeroInBf16) {
  ExpectTheBitsOfStageZero(DType::kBF16, {{0, Recompute::kFull},
                                          {1, Recompute::kOff},
                                          {2, Recompute::kSelective},
                                          {3, Recompute::kFull}});
}

// The purpose of the shapes.
TEST(RealShapesTest, TheTableHasSegmentsAndTheLogitsHaveChunks) {
  const Job job = RealJob(DType::kF32, 0, Recompute::kOff);
  const Plan plan = MakePlan(DescribeUnits(*job.Make()),
                             job.options.plan_options(2, 2, job.algorithm));
  EXPECT_GT(plan.units.back().segments.size(), 2u);
  EXPECT_GT(plan.reduce_buckets.size(), 4u);
  const auto device = MakeCpuDevice(2);
  const int64_t rows = job.batch / job.world * job.length;
  const int64_t vocab = job.config.vocab_size, width = job.config.hidden_size;
  const LinearCrossEntropyArgs args{
      .x = {nullptr, DType::kF32, rows, width, width},
      .w = {nullptr, DType::kF32, vocab, width, width},
      .vocab = vocab};
  EXPECT_LT(device->ops().LinearCrossEntropyWorkspaceBytes(args),
            rows * vocab * sizeof(float));
}

}  // namespace
}  // namespace zero
