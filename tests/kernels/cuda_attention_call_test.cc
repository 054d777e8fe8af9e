// The data at the pointers of a packed cuDNN graph, on the GPU's paths: a
// reference that sees nothing else replaces cuDNN.
#include "kernels/cuda/attention_call.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/packed_attention.h"
#include "tests/kernels/attention_checks.h"
#include "tests/kernels/attention_projection.h"

namespace zero {
namespace {

using cuda::AttentionOperand;

// Ragged attention in fp32, like cuDNN's: sequence i of an operand begins at
// its table's element and has the other table's length.
class RaggedReference {
 public:
  RaggedReference(const cuda::AttentionCall& call, int64_t num_sequences,
                  const cuda::OperandPointers& pointers)
      : call_(call), num_sequences_(num_sequences), pointers_(pointers) {}

  void Run() const {
    const AttentionShape& s = call_.shape;
    const int64_t group = s.num_heads / s.num_kv_heads;
    for (int64_t i = 0; i < num_sequences_; ++i) {
      EXPECT_EQ(Length(cuda::kQueryLengths, i), Length(cuda::kKeyLengths, i));
      if (Length(cuda::kQueryLengths, i) == 0) continue;
      for (int64_t h = 0; h < s.num_heads; ++h) {
        call_.is_backward ? Backward(i, h, h / group, h % group == 0)
                          : Forward(i, h, h / group);
      }
    }
  }

 private:
  void Forward(int64_t i, int64_t h, int64_t kv) const {
    const AttentionReference r =
        ReferenceAttention(Read(cuda::kQ, i, h), Read(cuda::kK, i, kv),
                           Read(cuda::kV, i, kv), call_.shape.scale);
    Write(cuda::kOut, i, h, r.out);
    Dense lse(static_cast<int64_t>(r.lse.size()), 1);
    lse.values = r.lse;
    Write(cuda::kLse, i, h, lse);
  }
  // is_first: of the query heads that share one of keys, which are added up.
  void Backward(int64_t i, int64_t h, int64_t kv, bool is_first) const {
    const AttentionGradient r = ReferenceAttentionGradient(
        Read(cuda::kQ, i, h), Read(cuda::kK, i, kv), Read(cuda::kV, i, kv),
        Read(cuda::kOut, i, h), Read(cuda::kDout, i, h),
        Read(cuda::kLse, i, h).values, call_.shape.scale);
    Write(cuda::kDq, i, h, r.dq);
    Write(cuda::kDk, i, kv, is_first ? r.dk : Sum(r.dk, cuda::kDk, i, kv));
    Write(cuda::kDv, i, kv, is_first ? r.dv : Sum(r.dv, cuda::kDv, i, kv));
  }
  Dense Sum(Dense x, AttentionOperand id, int64_t i, int64_t head) const {
    const Dense old = Read(id, i, head);
    for (size_t j = 0; j < x.values.size(); ++j) x.values[j] += old.values[j];
    return x;
  }

  int64_t Length(AttentionOperand lengths, int64_t i) const {
    return static_cast<const int32_t*>(pointers_.at(lengths))[i];
  }
  // The statistics have a row of H, one element of each head.
  int64_t Width(AttentionOperand id) const {
    return id == cuda::kLse ? 1 : call_.shape.head_dim;
  }
  int64_t TokenStride(AttentionOperand id) const {
    for (const cuda::OperandPlace& place : call_.places) {
      if (place.id == id) return cuda::TokenStride(call_, place);
    }
    return call_.shape.num_heads;
  }
  float* Row(AttentionOperand id, int64_t i, int64_t head, int64_t t) const {
    const void* const table = pointers_.at(cuda::OffsetsOf(id));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(table) % 16, 0u);
    return static_cast<float*>(pointers_.at(id)) +
           static_cast<const int64_t*>(table)[i] + t * TokenStride(id) +
           head * Width(id);
  }
  Dense Read(AttentionOperand id, int64_t i, int64_t head) const {
    Dense x(Length(cuda::kQueryLengths, i), Width(id));
    for (int64_t t = 0; t < x.rows; ++t) {
      const float* const row = Row(id, i, head, t);
      for (int64_t j = 0; j < x.cols; ++j) x(t, j) = row[j];
    }
    return x;
  }
  void Write(AttentionOperand id, int64_t i, int64_t head,
             const Dense& x) const {
    for (int64_t t = 0; t < x.rows; ++t) {
      float* const row = Row(id, i, head, t);
      for (int64_t j = 0; j < x.cols; ++j) {
        row[j] = static_cast<float>(x(t, j));
      }
    }
  }

  const cuda::AttentionCall& call_;
  int64_t num_sequences_;
  const cuda::OperandPointers& pointers_;
};

void RunPacked(const Path& path, const cuda::AttentionCall& call,
               int64_t num_sequences) {
  constexpr size_t kGraphBytes = 100;
  const cuda::PackedSpace space =
      cuda::SpaceOf(call, num_sequences, kGraphBytes);
  EXPECT_GE(space.end, space.graph + kGraphBytes);
  Scratch scratch(space.end + cuda::kWorkspaceAlignment);
  void* workspace = scratch.workspace().data;
  size_t left = scratch.workspace().bytes;
  ASSERT_NE(std::align(cuda::kWorkspaceAlignment, space.end, workspace, left),
            nullptr);
  cuda::OperandPointers pointers = cuda::PointersOf(call);
  const cudaStream_t stream = cuda::HandleOf(path.stream);
  cuda::BeforePacked(stream, call, num_sequences, space,
                     static_cast<char*>(workspace), pointers);
  path.stream.Synchronize();
  RaggedReference(call, num_sequences, pointers).Run();
  cuda::AfterPacked(stream, call, pointers);
  path.stream.Synchronize();
}

// Batch, heads, kv heads, queries, keys, head width, pad. The widths cover dq
// staged alone, with dk and dv, and not at all.
const std::pair<AttentionTestShape, Lengths> kProblems[] = {
    {{2, 3, 3, 24, 24, 8, 0}, {24, 1, 13, 10}},
    {{1, 4, 2, 40, 40, 8, 0}, {7, 33}},
    {{2, 8, 2, 15, 15, 8, 0}, {1, 14, 15}},
};

TEST(CudaAttentionCallTest, AGraphFindsEverySequenceAtItsPointers) {
  ForEachPath([](const Path& path) {
    for (const auto& [shape, lengths] : kProblems) {
      const auto count = static_cast<int64_t>(lengths.size());
      for (const int64_t num_sequences : {count, count + 1, count + 6}) {
        ForwardCase forward(shape, DType::kF32, lengths);
        forward.p.SpoilOutputs();
        AttentionProjection projection(forward.p);
        RunPacked(path, cuda::CallOf(projection.ForwardArgs()), num_sequences);
        forward.Check(path);

        BackwardCase backward(forward);
        AttentionProjection gradients(backward.p);
        RunPacked(path, cuda::CallOf(gradients.BackwardArgs()), num_sequences);
        gradients.TakeGradients();
        backward.Check(path);
      }
    }
  });
}

}  // namespace
}  // namespace zero
