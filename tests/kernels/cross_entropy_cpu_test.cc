// The chunks of the CPU.
#include "kernels/cpu/matmul.h"
#include "tests/kernels/cross_entropy_checks.h"

namespace zero {
namespace {

// 70001 words make 68 MiB of logits at 254 rows, below the least chunk of 272:
// 300 rows are two chunks of 160 and 140.
TEST(CrossEntropyCpuTest, ChunksAddUp) {
  const auto device = MakeCpuDevice(2);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  for (const bool accumulate : {false, true}) {
    CrossEntropyProblem p(DType::kF32, 300, 3, 70001, DType::kF32);
    const Dense old_dw = accumulate ? p.dw.dense() : ZeroDw(p);
    LinearCrossEntropyArgs args = p.Args();
    args.accumulate_dw = accumulate;
    const size_t bytes = device->ops().LinearCrossEntropyWorkspaceBytes(args);
    EXPECT_LT(bytes,
              size_t{160} * 70016 * 4 + 2 * cpu::MatmulCache::kThreadBytes);
    RunCrossEntropy(device->ops(), *stream, args);
    CheckCrossEntropy(p, old_dw, {}, "two chunks");
  }
}

TEST(CrossEntropyCpuTest, FullyIgnoredChunksStillOverwriteWhatTheyOwn) {
  const auto device = MakeCpuDevice(2);
  const auto stream = device->MakeStream(StreamRole::kCompute);
  for (const int first_ignored : {0, 160}) {
    CrossEntropyProblem p(DType::kF32, 300, 3, 70001, DType::kF32);
    const int last_ignored = first_ignored == 0 ? 160 : 300;
    std::fill(p.targets.begin() + first_ignored,
              p.targets.begin() + last_ignored, -1);
    RunCrossEntropy(device->ops(), *stream, p.Args());
    CheckCrossEntropy(p, ZeroDw(p), {}, "one chunk ignored");
  }
}

}  // namespace
}  // namespace zero
