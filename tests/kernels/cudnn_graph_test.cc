// cuDNN's graphs are validated without a GPU: every model we name trains
// through them, and unsupported ones are refused with our message.
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cudnn_attention.h"
#include "models/catalog.h"

namespace zero::cuda {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr CudnnTarget kHopper = {.sm = 90, .version = 92500};
constexpr CudnnTarget kAmpere = {.sm = 80, .version = 92500};

// q, k and v side by side in one projection, as the layers lay them out; no
// memory behind them.
struct Packed {
  AttentionShape shape;

  int64_t row() const {
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  }
  int64_t out_row() const { return shape.num_heads * shape.head_dim; }
  HeadsRef Const(int64_t row) const {
    return {nullptr, shape.q_len * row, row};
  }
  MutableHeadsRef Mutable(int64_t row) const {
    return {nullptr, shape.q_len * row, row};
  }

  AttentionForwardArgs Forward(float* lse = nullptr) const {
    AttentionForwardArgs args;
    args.shape = shape;
    args.q = args.k = args.v = Const(row());
    args.out = Mutable(out_row());
    args.lse = lse;
    return args;
  }
  AttentionBackwardArgs Backward() const {
    AttentionBackwardArgs args;
    args.shape = shape;
    args.q = args.k = args.v = Const(row());
    args.out = args.dout = Const(out_row());
    args.dq = args.dk = args.dv = Mutable(row());
    return args;
  }
};

Packed Of(DType dtype, int64_t batch, int64_t length, int64_t heads,
          int64_t kv_heads, int64_t dim) {
  return {{dtype, batch, length, length, heads, kv_heads, dim, 0.125f}};
}

// The args of a call whose rows hold several sequences; only the presence of
// positions counts.
template <class Args>
Args WithSequences(Args args) {
  static const int32_t position = 0;
  args.packed.positions = &position;
  return args;
}

absl::Status ValidateCudnnAttention(const AttentionForwardArgs& args,
                                    const CudnnTarget& target) {
  return ValidateCudnnAttention(CallOf(args), /*deterministic=*/false, target);
}
absl::Status ValidateCudnnAttention(const AttentionBackwardArgs& args,
                                    bool deterministic,
                                    const CudnnTarget& target) {
  return ValidateCudnnAttention(CallOf(args), deterministic, target);
}

TEST(CudnnGraphTest, EveryPresetTrainsThroughCudnn) {
  float lse = 0;  // only its presence counts
  for (const ModelPreset& preset : ModelPresets()) {
    const ModelConfig& c = preset.config;
    for (const int64_t length : {1024, 4096}) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        SCOPED_TRACE(std::string(preset.name) + " at " +
                     std::to_string(length));
        const Packed p = Of(dtype, 4, length, c.num_attention_heads,
                            c.num_key_value_heads, c.head_dim);
        for (float* const stats : {static_cast<float*>(nullptr), &lse}) {
          EXPECT_EQ(ValidateCudnnAttention(p.Forward(stats), kHopper),
                    absl::OkStatus());
        }
        for (const bool deterministic : {false, true}) {
          EXPECT_EQ(
              ValidateCudnnAttention(p.Backward(), deterministic, kHopper),
              absl::OkStatus());
        }
      }
    }
  }
}

TEST(CudnnGraphTest, OddLengthsAndTheWidestHeadsValidate) {
  for (const int64_t length : {64, 65, 1023}) {
    for (const int64_t dim : {8, 80, 256}) {
      const Packed p = Of(DType::kBF16, 2, length, 6, 2, dim);
      EXPECT_EQ(ValidateCudnnAttention(p.Forward(), kHopper), absl::OkStatus());
      EXPECT_EQ(ValidateCudnnAttention(p.Backward(), false, kHopper),
                absl::OkStatus());
    }
  }
}

// The engine's workspace is right after the frontend's, which has a float per
// query and head. The statistics are the same for both kernels, so forward they
// stay with cuDNN.
TEST(CudnnGraphTest, AnEngineGetsNoWorkspaceThatIsNotAligned) {
  float lse = 0;
  for (const int64_t batch : {1, 2, 3, 4}) {
    for (const int64_t heads : {1, 2, 25}) {
      for (const int64_t length : {65, 66, 1000, 1023}) {
        SCOPED_TRACE(testing::Message()
                     << "B " << batch << ", H " << heads << ", T " << length);
        const Packed p = Of(DType::kBF16, batch, length, heads, 1, 64);
        EXPECT_EQ(ValidateCudnnAttention(p.Forward(&lse), kHopper),
                  absl::OkStatus());
        const absl::Status backward =
            ValidateCudnnAttention(p.Backward(), false, kHopper);
        const absl::Status packed =
            ValidateCudnnAttention(WithSequences(p.Backward()), false, kHopper);
        if (batch * heads * length % 4 == 0) {
          EXPECT_EQ(backward, absl::OkStatus());
          EXPECT_EQ(packed, absl::OkStatus());
          continue;
        }
        for (const absl::Status& status : {backward, packed}) {
          EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
          EXPECT_THAT(std::string(status.message()),
                      AllOf(HasSubstr("not a multiple of 16 bytes"),
                            HasSubstr("choose T as a multiple of 4")));
        }
      }
    }
  }
}

// Up to 9.15 there are also two lengths per row.
TEST(CudnnGraphTest, AnOlderCudnnHasMoreBeforeItsWorkspace) {
  const auto backward = [](int64_t batch, int64_t length, size_t version) {
    return ValidateCudnnAttention(
        Of(DType::kBF16, batch, length, 4, 4, 64).Backward(), false,
        {90, version});
  };
  EXPECT_THAT(std::string(backward(1, 1000, 91500).message()),
              AllOf(HasSubstr("puts 16008 bytes"),
                    HasSubstr("choose T as a multiple of 128")));
  EXPECT_EQ(backward(2, 1000, 91500), absl::OkStatus());
  EXPECT_EQ(backward(1, 1024, 91500), absl::OkStatus());
  EXPECT_EQ(backward(1, 1000, 91501), absl::OkStatus());
}

TEST(CudnnGraphTest, EveryPresetTrainsOnPackedSequencesThroughCudnn) {
  float lse = 0;
  for (const ModelPreset& preset : ModelPresets()) {
    const ModelConfig& c = preset.config;
    SCOPED_TRACE(std::string(preset.name));
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const Packed p = Of(dtype, 4, 1024, c.num_attention_heads,
                          c.num_key_value_heads, c.head_dim);
      EXPECT_EQ(ValidateCudnnAttention(WithSequences(p.Forward(&lse)), kHopper),
                absl::OkStatus());
      EXPECT_EQ(
          ValidateCudnnAttention(WithSequences(p.Backward()), false, kHopper),
          absl::OkStatus());
    }
  }
}

TEST(CudnnGraphTest, PackedSequencesOfOddLengthsValidate) {
  for (const int64_t batch : {2, 40}) {
    for (const int64_t length : {64, 65, 1023}) {
      const Packed p = Of(DType::kBF16, batch, length, 6, 2, 80);
      EXPECT_EQ(ValidateCudnnAttention(WithSequences(p.Forward()), kHopper),
                absl::OkStatus());
      EXPECT_EQ(
          ValidateCudnnAttention(WithSequences(p.Backward()), false, kHopper),
          absl::OkStatus());
    }
  }
}

TEST(CudnnGraphTest, WhatPackedSequencesCannotHaveGivesOurMessage) {
  const Packed p = Of(DType::kBF16, 2, 1024, 8, 4, 64);
  const absl::Status ordered =
      ValidateCudnnAttention(WithSequences(p.Backward()), true, kHopper);
  EXPECT_EQ(ordered.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ordered.message()),
              AllOf(HasSubstr("attention backward of packed bf16 [B 2, T 1024"),
                    HasSubstr("T x T scores of every sequence"),
                    HasSubstr("do not pack")));
  AttentionForwardArgs gap = WithSequences(p.Forward());
  gap.v.batch_stride += 8;
  EXPECT_THAT(std::string(ValidateCudnnAttention(gap, kHopper).message()),
              AllOf(HasSubstr("rows of v are 1048584 elements apart, not T "
                              "times its token stride 1024"),
                    HasSubstr("leave no gap")));
  // Forward it may have any multiple of 8.
  const Packed narrow = Of(DType::kBF16, 2, 1024, 8, 4, 72);
  EXPECT_EQ(ValidateCudnnAttention(WithSequences(narrow.Forward()), kHopper),
            absl::OkStatus());
  EXPECT_THAT(
      std::string(ValidateCudnnAttention(WithSequences(narrow.Backward()),
                                         false, kHopper)
                      .message()),
      AllOf(HasSubstr("D 72]"), HasSubstr("72 is not a multiple of 16"),
            HasSubstr("T tokens of every sequence"), HasSubstr("choose one")));
  for (const absl::Status& old :
       {ValidateCudnnAttention(WithSequences(p.Forward()), {90, 92499}),
        ValidateCudnnAttention(WithSequences(p.Backward()), false,
                               {90, 92499})}) {
    EXPECT_EQ(old.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(old.message()),
                AllOf(HasSubstr("cuDNN 9.24.99 may give wrong gradients"),
                      HasSubstr("install cuDNN 9.25 or newer")));
  }
}

void ExpectRefused(const Packed& p, const std::string& shape,
                   const std::string& reason, const std::string& remedy) {
  for (const absl::Status& status :
       {ValidateCudnnAttention(p.Forward(), kHopper),
        ValidateCudnnAttention(p.Backward(), false, kHopper)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(shape), HasSubstr(reason), HasSubstr(remedy),
                      Not(HasSubstr("CUDNN_"))));
  }
}

TEST(CudnnGraphTest, WrongShapesGiveOurMessage) {
  ExpectRefused(Of(DType::kBF16, 2, 1024, 8, 3, 64),
                "of bf16 [B 2, T 1024, H 8, K 3, D 64]",
                "num_kv_heads 3 does not divide num_heads 8",
                "every kv head must serve the same number of query heads");
  ExpectRefused(Of(DType::kF16, 2, 1024, 8, 4, 60), "D 60]",
                "head_dim 60 is not a multiple of 8", "choose one that is");
  ExpectRefused(Of(DType::kBF16, 2, 1024, 8, 4, 264), "D 264]",
                "head_dim 264 is more than 256", "use more and narrower heads");
  ExpectRefused(Of(DType::kF32, 2, 1024, 8, 4, 64), "of fp32",
                "cuDNN computes bf16 and fp16", "train in bf16");
  ExpectRefused(Of(DType::kBF16, 2, 63, 8, 4, 64), "T 63",
                "fewer than 64 tokens", "our own kernel");
}

TEST(CudnnGraphTest, CachesAndCrookedRowsAreNotAsked) {
  Packed cached = Of(DType::kBF16, 1, 1, 8, 4, 64);
  cached.shape.kv_len = 1000;
  EXPECT_THAT(
      std::string(ValidateCudnnAttention(cached.Forward(), kHopper).message()),
      AllOf(HasSubstr("T 1 of 1000"), HasSubstr("cache of keys")));
  AttentionForwardArgs crooked = Of(DType::kBF16, 2, 128, 8, 4, 64).Forward();
  crooked.k.token_stride += 1;
  EXPECT_THAT(std::string(ValidateCudnnAttention(crooked, kHopper).message()),
              AllOf(HasSubstr("a stride of k is 1025"), HasSubstr("16 bytes")));
}

// An older GPU has no backward pass for the widest heads: cuDNN's own reason
// comes through, under our shape.
TEST(CudnnGraphTest, WhatCudnnRefusesSaysSo) {
  const absl::Status status = ValidateCudnnAttention(
      Of(DType::kBF16, 2, 1024, 8, 4, 256).Backward(), false, kAmpere);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("attention backward of bf16 [B 2, T 1024, H 8, "
                              "K 4, D 256]: cuDNN 9."),
                    HasSubstr("refuses it on sm_80"), HasSubstr("128")));
  // Nor one for packed statistics.
  EXPECT_EQ(ValidateCudnnAttention(
                WithSequences(Of(DType::kBF16, 2, 1024, 8, 4, 64).Backward()),
                false, kAmpere)
                .code(),
            absl::StatusCode::kUnimplemented);
}

// With a GPU or without.
TEST(CudnnGraphTest, NotesSayWhatKeepsTrainingOffCudnn) {
  AttentionPlans plans(/*deterministic=*/true);
  AttentionForwardArgs crooked = Of(DType::kBF16, 2, 128, 8, 4, 64).Forward();
  crooked.k.token_stride += 1;
  EXPECT_FALSE(plans.WorkspaceBytes(CallOf(crooked)).has_value());
  EXPECT_FALSE(
      plans.WorkspaceBytes(CallOf(Of(DType::kF16, 2, 128, 8, 4, 60).Forward()))
          .has_value());
  EXPECT_FALSE(plans
                   .WorkspaceBytes(CallOf(WithSequences(
                       Of(DType::kBF16, 2, 256, 8, 4, 64).Backward())))
                   .has_value());
  // No note for prompts and fp32.
  EXPECT_FALSE(
      plans.WorkspaceBytes(CallOf(Of(DType::kBF16, 1, 9, 8, 4, 64).Forward()))
          .has_value());
  EXPECT_FALSE(
      plans.WorkspaceBytes(CallOf(Of(DType::kF32, 2, 128, 8, 4, 64).Forward()))
          .has_value());
  // Without a GPU there is one more before them.
  EXPECT_THAT(
      absl::StrJoin(plans.notes(), "\n"),
      AllOf(HasSubstr("attention forward of bf16 [B 2, T 128, H 8, K 4, D 64] "
                      "runs on our own kernel: a stride of k is 1025"),
            HasSubstr("head_dim 60 is not a multiple of 8"),
            HasSubstr("T 256, H 8, K 4, D 64] runs on our own kernel: with a "
                      "fixed order of summation"),
            Not(HasSubstr("T 9,")), Not(HasSubstr("fp32"))));
}

// Without a GPU (or a driver) there are no plans, but a reason.
TEST(CudnnGraphTest, WithoutADeviceEveryCallGoesToOurKernel) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
    GTEST_SKIP() << "there is a GPU here";
  }
  AttentionPlans plans(/*deterministic=*/false);
  const Packed p = Of(DType::kBF16, 4, 1024, 12, 12, 64);
  EXPECT_FALSE(plans.WorkspaceBytes(CallOf(p.Forward())).has_value());
  EXPECT_FALSE(plans.WorkspaceBytes(CallOf(p.Backward())).has_value());
  EXPECT_FALSE(plans.Run(nullptr, CallOf(p.Forward()), {}));
  EXPECT_FALSE(plans.Run(nullptr, CallOf(p.Backward()), {}));
  EXPECT_THAT(plans.notes(), ElementsAre(HasSubstr("does not start")));
}

}  // namespace
}  // namespace zero::cuda
