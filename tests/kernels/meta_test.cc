#include <map>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace zero {
namespace {

struct Meta {
  std::unique_ptr<Device> cpu = MakeCpuDevice(2);
  std::unique_ptr<Device> device = MakeMetaDevice(*cpu);
  std::unique_ptr<Stream> stream = device->MakeStream(StreamRole::kCompute);

  void* Address(size_t bytes) {
    buffers.push_back(*device->Allocate(bytes, MemoryKind::kDevice));
    return buffers.back().data();
  }
  std::vector<Buffer> buffers;
};

TEST(MetaTest, AddressesAreAlignedAndNeverOverlap) {
  Meta meta;
  std::map<uintptr_t, size_t> live;
  for (int i = 0; i < 1000; ++i) {
    const size_t bytes = static_cast<size_t>(i) * 977 % 20000;
    const auto begin = reinterpret_cast<uintptr_t>(meta.Address(bytes));
    EXPECT_NE(begin, 0u);
    EXPECT_EQ(begin % 4096, 0u);
    EXPECT_TRUE(live.emplace(begin, bytes).second);
  }
  uintptr_t last_end = 0;
  for (const auto& [begin, bytes] : live) {
    EXPECT_GE(begin, last_end);
    last_end = begin + bytes;
  }
}

// A released address is not reused, so that a use after free shows.
TEST(MetaTest, AddressesAreNotReused) {
  Meta meta;
  const void* const first = meta.Address(64);
  meta.buffers.clear();
  EXPECT_NE(meta.Address(64), first);
}

TEST(MetaTest, HoldsModelsThatNoMachineHolds) {
  Meta meta;
  // 175 B parameters with fp32 master weights and moments: 18 bytes each.
  const auto states =
      meta.device->Allocate(size_t{175'000'000'000} * 18, MemoryKind::kDevice);
  EXPECT_TRUE(states.ok()) << states.status();
  const auto absurd = meta.device->Allocate(~size_t{0}, MemoryKind::kDevice);
  EXPECT_EQ(absurd.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(MetaTest, SaysWhatItModels) {
  Meta meta;
  EXPECT_EQ(meta.device->kind(), DeviceKind::kMeta);
  EXPECT_STREQ(DeviceKindName(meta.device->kind()), "meta");
  EXPECT_EQ(meta.device->info().name, "meta of " + meta.cpu->info().name);
  EXPECT_EQ(meta.device->info().num_threads, 2);
}

// bf16 [4, 2048, H 32, K, D 64], side by side in one projection.
AttentionBackwardArgs BackwardOfHeads(int64_t kv_heads) {
  constexpr int64_t kLength = 2048, kHeads = 32, kDim = 64;
  const int64_t out_row = kHeads * kDim;
  const int64_t row = out_row + 2 * kv_heads * kDim;
  AttentionBackwardArgs args;
  args.shape = {DType::kBF16, 4,        kLength, kLength,
                kHeads,       kv_heads, kDim,    0.125f};
  args.q = args.k = args.v = {nullptr, kLength * row, row};
  args.out = args.dout = {nullptr, kLength * out_row, out_row};
  args.dq = args.dk = args.dv = {nullptr, kLength * row, row};
  return args;
}

TEST(AssumedGpuTest, NeedsNoGpu) {
  const auto gpu = MakeAssumedGpu();
  EXPECT_EQ(gpu->kind(), DeviceKind::kCuda);
  EXPECT_NE(gpu->info().name.find("assumed"), std::string::npos);
  EXPECT_GT(gpu->info().memory_bytes, int64_t{79} << 30);
  EXPECT_GT(gpu->memory().context_bytes, 0);
  EXPECT_GT(gpu->stream_bytes(StreamRole::kGather), 0);
  const auto meta = MakeMetaDevice(*gpu);
  const AttentionBackwardArgs args = BackwardOfHeads(8);
  EXPECT_EQ(meta->kind(), DeviceKind::kMeta);
  EXPECT_EQ(meta->ops().AttentionBackwardWorkspaceBytes(args),
            gpu->ops().AttentionBackwardWorkspaceBytes(args));
}

// Workspaces of a product, a loss and a norm on a GPU, by hand.
TEST(AssumedGpuTest, WorkspacesAreFunctionsOfShapes) {
  const auto gpu = MakeAssumedGpu({.loss_chunk_rows = 1024});
  const Ops& ops = gpu->ops();
  static char data = 0;  // only its presence counts
  LinearArgs linear;
  linear.x = {&data, DType::kBF16, 4096, 768, 768};
  linear.y = {&data, DType::kBF16, 4096, 3072, 3072};
  const size_t library = (size_t{32} << 20) + 256;
  EXPECT_EQ(ops.LinearWorkspaceBytes(linear), library);
  LinearCrossEntropyArgs loss;
  loss.x = linear.x;
  loss.w = {&data, DType::kBF16, 50257, 768, 768};
  // 1024 rows of 50304 logits in bf16 and their statistics, a double per row.
  EXPECT_EQ(ops.LinearCrossEntropyWorkspaceBytes(loss),
            size_t{1024} * (50304 * 2 + 16) + 4096 * 8 + library);
  NormBackwardArgs norm;
  norm.dy = {&data, DType::kBF16, 4096, 1, 768, 768};
  norm.dweight = {&data, DType::kF32, 768};
  // A block for every four rows.
  EXPECT_EQ(ops.NormBackwardWorkspaceBytes(norm), size_t{1024} * 768 * 4);
}

// Of queries of every head one float, dq in fp32, dk and dv in 16 bits or,
// where heads share them, in fp32; in a fixed order T x T scores for dq. A MiB
// for cuDNN's undocumented needs.
TEST(AssumedGpuTest, AttentionIsBounded) {
  const size_t queries = 4 * 32 * 2048, elems = queries * 64;
  const size_t rest = (size_t{1} << 20) + 255;
  const auto bytes = [](const AttentionBackwardArgs& args, bool fixed_order) {
    const auto gpu = MakeAssumedGpu({.deterministic_attention = fixed_order});
    return gpu->ops().AttentionBackwardWorkspaceBytes(args);
  };
  EXPECT_EQ(bytes(BackwardOfHeads(32), false),
            4 * queries + (4 + 2 * 2) * elems + rest);
  EXPECT_EQ(bytes(BackwardOfHeads(8), false),
            4 * queries + (4 + 2 * 4) * elems + rest);
  EXPECT_EQ(bytes(BackwardOfHeads(8), true),
            4 * queries + 2 * queries * 2048 + 2 * 4 * elems + rest);
  // Our own kernel runs shapes that cuDNN does not take.
  AttentionBackwardArgs fp32 = BackwardOfHeads(8);
  fp32.shape.dtype = DType::kF32;
  EXPECT_EQ(bytes(fp32, false), 4 * queries);
}

TEST(MetaTest, EnqueuedWorkRunsAndCopiesDoNot) {
  Meta meta;
  for (const StreamRole role : {StreamRole::kCompute, StreamRole::kReduce}) {
    const auto stream = meta.device->MakeStream(role);
    EXPECT_EQ(&stream->device(), meta.device.get());
    int ran = 0;
    stream->Enqueue([&] { ++ran; });
    EXPECT_EQ(ran, 1);
    const auto event = meta.device->MakeEvent();
    stream->Record(*event);
    stream->Wait(*event);
    EXPECT_TRUE(event->IsDone());
    meta.device->Copy(*stream, meta.Address(1 << 20), meta.Address(1 << 20),
                      1 << 20);
  }
}

template <class Args>
void ExpectSameWorkspace(Meta& meta,
                         size_t (OpSizes::*query)(const Args&) const,
                         const Args& args) {
  EXPECT_EQ((meta.device->ops().*query)(args), (meta.cpu->ops().*query)(args));
}

// Every op takes addresses that must not be read, answers with the model's
// workspace and returns.
TEST(MetaTest, OpsTouchNothingAndNeedTheModelsWorkspace) {
  Meta meta;
  Ops& ops = meta.device->ops();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    void* const data = meta.Address(size_t{1} << 30);
    const auto matrix = [&](int64_t rows, int64_t cols) {
      return Matrix{data, dtype, rows, cols, cols};
    };
    const Vector vector{data, dtype, 1024};
    const Rows rows{data, dtype, 64, 1, 1024, 1024};

    LinearArgs linear;
    linear.x = matrix(1024, 768);
    linear.w = matrix(3072, 768);
    linear.y = matrix(1024, 3072);
    linear.act = Gelu::kTanh;
    linear.pre_act = linear.y;
    ExpectSameWorkspace(meta, &Ops::LinearWorkspaceBytes, linear);
    ops.Linear(*meta.stream, linear, {});

    LinearBackwardInputArgs input;
    input.dy = linear.y;
    input.w = linear.w;
    input.dx = matrix(1024, 768);
    ExpectSameWorkspace(meta, &Ops::LinearBackwardInputWorkspaceBytes, input);
    ops.LinearBackwardInput(*meta.stream, input, {});

    LinearBackwardWeightArgs weight;
    weight.dy = linear.y;
    weight.x = linear.x;
    weight.dw = {data, DType::kF32, 3072, 768, 768};
    weight.dbias = {data, DType::kF32, 3072};
    ExpectSameWorkspace(meta, &Ops::LinearBackwardWeightWorkspaceBytes, weight);
    ops.LinearBackwardWeight(*meta.stream, weight, {});

    LinearCrossEntropyArgs loss;
    loss.x = linear.x;
    loss.w = matrix(50257, 768);
    loss.vocab = 50257;
    loss.targets = static_cast<const int32_t*>(data);
    loss.dx = input.dx;
    loss.dw = {data, DType::kF32, 50257, 768, 768};
    ExpectSameWorkspace(meta, &Ops::LinearCrossEntropyWorkspaceBytes, loss);
    // 68 MiB of logits, and 4 MiB of a product for each thread.
    EXPECT_LE(ops.LinearCrossEntropyWorkspaceBytes(loss), size_t{76} << 20);
    ops.LinearCrossEntropy(*meta.stream, loss, {});

    AttentionForwardArgs forward;
    forward.shape = {dtype, 4, 256, 256, 12, 12, 64, 0.125f};
    forward.out.data = data;
    ExpectSameWorkspace(meta, &Ops::AttentionForwardWorkspaceBytes, forward);
    ops.AttentionForward(*meta.stream, forward, {});
    AttentionBackwardArgs backward;
    backward.shape = forward.shape;
    ExpectSameWorkspace(meta, &Ops::AttentionBackwardWorkspaceBytes, backward);
    ops.AttentionBackward(*meta.stream, backward, {});

    NormForwardArgs norm;
    norm.x = rows;
    norm.weight = vector;
    norm.y = rows;
    ops.NormForward(*meta.stream, norm);
    NormBackwardArgs norm_back;
    norm_back.dy = rows;
    norm_back.sum = rows;
    norm_back.weight = vector;
    norm_back.dx = rows;
    norm_back.dweight = vector;
    ExpectSameWorkspace(meta, &Ops::NormBackwardWorkspaceBytes, norm_back);
    ops.NormBackward(*meta.stream, norm_back, {});

    ops.Rotary(*meta.stream, {rows, nullptr});
    EmbeddingForwardArgs embedding;
    embedding.ids = static_cast<const int32_t*>(data);
    embedding.table = matrix(50257, 768);
    embedding.out = matrix(1024, 768);
    ops.EmbeddingForward(*meta.stream, embedding);
    ops.EmbeddingBackward(
        *meta.stream, {embedding.ids, embedding.out, matrix(50257, 768), false},
        {});
    ops.GeluForward(*meta.stream, {Gelu::kTanh, vector, vector});
    ops.GeluBackward(*meta.stream, {Gelu::kErf, vector, vector, vector});
    ops.SwigluForward(*meta.stream, {matrix(4, 64), matrix(4, 32)});
    ops.SwigluBackward(*meta.stream,
                       {matrix(4, 64), matrix(4, 32), matrix(4, 64)});
    DropoutArgs dropout;
    dropout.x = matrix(4, 64);
    dropout.y = matrix(4, 64);
    dropout.row_ids = static_cast<const int64_t*>(data);
    ops.Dropout(*meta.stream, dropout);
    ops.Add(*meta.stream, {vector, vector, vector});
    ops.Cast(*meta.stream, {vector, vector});
    ops.Fill(*meta.stream, {vector, 1.0f});
    double* const sum = static_cast<double*>(data);
    const SquaredSpan span = {vector, sum};
    ops.SumSquares(*meta.stream, {{&span, 1}});
    ops.CountNonFinite(*meta.stream, {vector, static_cast<int64_t*>(data)});
    ClipArgs clip;
    clip.sum_squares = sum;
    ops.Clip(*meta.stream, clip);
    const void* const ranks[] = {data, data};
    ops.SumRanks(*meta.stream, {ranks, dtype, vector});
    UpdateState state;
    state.param = vector;
    state.grad = vector;
    float* const moments = static_cast<float*>(data);
    ops.AdamW(*meta.stream, {state, moments, moments});
    ops.Sgd(*meta.stream, {state, moments});
    const LambArgs lamb{{state, moments, moments}, {}, sum};
    ops.LambMoments(*meta.stream, lamb);
    ops.LambApply(*meta.stream, lamb);
  }
}

}  // namespace
}  // namespace zero
