#include "engine/autograd/tape.h"

#include <pthread.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "engine/autograd/ops.h"
#include "gtest/gtest.h"
#include "kernels/device.h"

namespace zero {
namespace {

// Small integers and their products are exact in fp32, so results are expected
// to the bit.
class TapeTest : public testing::Test {
 protected:
  TapeTest()
      : device_(MakeCpuDevice(1)),
        stream_(device_->MakeStream(StreamRole::kCompute)) {
    auto arena =
        Arena::Make(*device_, MemoryKind::kDevice, 16 << 20, "tape", &ledger_);
    EXPECT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    arena_->set_poison_freed(true);
    ctx_ = std::make_unique<Context>(*device_, *stream_, *arena_);
    ctx_->tape = &tape_;
  }

  Tensor Make(const std::vector<float>& values, const Shape& shape) {
    Tensor tensor = ctx_->Empty(shape, DType::kF32);
    std::copy(values.begin(), values.end(), tensor.As<float>());
    return tensor;
  }
  Tensor Make(const std::vector<float>& values) {
    return Make(values, {1, static_cast<int64_t>(values.size())});
  }
  // `n` elements of `value`.
  Tensor Full(int64_t n, float value) {
    return Make(std::vector<float>(n, value));
  }
  static std::vector<float> Read(const Tensor& tensor) {
    if (!tensor.defined()) return {};
    return {tensor.As<float>(), tensor.As<float>() + tensor.num_elems()};
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  MemoryLedger ledger_;
  std::unique_ptr<Arena> arena_;
  Tape tape_;
  std::unique_ptr<Context> ctx_;
};

using Floats = std::vector<float>;

TEST_F(TapeTest, AParameterUsedTwiceAccumulatesInItsSink) {
  GradSink sink{Make({-7}, {1, 1})};
  const Weight w{Make({3}, {1, 1}), &sink};
  const Var x = tape_.Watch(Make({5}));
  const Var y = Linear(*ctx_, Linear(*ctx_, x, w), w);  // w w x
  EXPECT_EQ(Read(y.value), Floats({45}));
  tape_.Accumulate(*ctx_, y.slot, Make({1}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(sink.grad), Floats({2 * 3 * 5}));
  EXPECT_EQ(Read(tape_.Take(x.slot)), Floats({9}));
}

// Two layers read x = {2, 3}, which is not kept: backward recomputes it once
// for both, and frees it.
TEST_F(TapeTest, WhatHasARecipeIsComputedAgainOnce) {
  GradSink sinks[] = {{Make({0, 0})}, {Make({0, 0})}};
  const Weight a{Make({1, 1}), &sinks[0]}, b{Make({1, 1}), &sinks[1]};
  int computed = 0;
  Var x = tape_.Watch(Make({2, 3}));
  x.recipe = std::make_shared<Recipe>([&](Context&) {
    ++computed;
    return std::vector<Tensor>{Make({2, 3})};
  });
  const Var y = Linear(*ctx_, x, a), z = Linear(*ctx_, x, b);
  const int slot = x.slot;
  x = Var();
  EXPECT_EQ(computed, 0);
  tape_.Accumulate(*ctx_, y.slot, Make({10}));
  tape_.Accumulate(*ctx_, z.slot, Make({100}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(computed, 1);
  EXPECT_EQ(Read(sinks[0].grad), Floats({20, 30}));
  EXPECT_EQ(Read(sinks[1].grad), Floats({200, 300}));
  EXPECT_EQ(Read(tape_.Take(slot)), Floats({110, 110}));
}

TEST_F(TapeTest, ASinkIsOverwrittenOnceAndThenAddedTo) {
  GradSink sink{Make({1000}, {1, 1})};
  const Weight w{Make({3}, {1, 1}), &sink};
  for (float want : {5.0f, 10.0f}) {
    const Var y = Linear(*ctx_, tape_.Watch(Make({5})), w);
    tape_.Accumulate(*ctx_, y.slot, Make({1}));
    tape_.Backward(*ctx_);
    EXPECT_EQ(Read(sink.grad), Floats({want}));
    EXPECT_TRUE(sink.written);
  }
  sink.written = false;
  const Var y = Linear(*ctx_, tape_.Watch(Make({2})), w);
  tape_.Accumulate(*ctx_, y.slot, Make({1}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(sink.grad), Floats({2}));
}

TEST_F(TapeTest, AFrozenWeightStillLetsGradientsThrough) {
  GradSink bias_sink{Make({0}, {1})};
  const Weight frozen{Make({3}, {1, 1})}, bias{Make({1}, {1}), &bias_sink};
  const Var x = tape_.Watch(Make({5}));
  const Var y = Linear(*ctx_, x, frozen, &bias);
  tape_.Accumulate(*ctx_, y.slot, Make({2}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(tape_.Take(x.slot)), Floats({6}));
  EXPECT_EQ(Read(bias_sink.grad), Floats({2}));
}

TEST_F(TapeTest, NothingIsRecordedWhereNoGradientIsWanted) {
  const Weight frozen{Make({3}, {1, 1})};
  const Var y = Linear(*ctx_, Var(Make({5})), frozen);
  EXPECT_EQ(y.slot, -1);
  EXPECT_EQ(tape_.num_nodes(), 0);
  EXPECT_EQ(Add(*ctx_, y, y).slot, -1);
  // Without a tape, not even a weight that trains is recorded.
  GradSink sink{Make({0}, {1, 1})};
  const Weight trained{Make({3}, {1, 1}), &sink};
  ctx_->tape = nullptr;
  EXPECT_EQ(Linear(*ctx_, y, trained).slot, -1);
  EXPECT_EQ(tape_.num_nodes(), 0);
}

TEST_F(TapeTest, AVarUsedTwiceGetsTheSum) {
  const Var x = tape_.Watch(Make({1, 2, 3}));
  const Var y = Add(*ctx_, Add(*ctx_, x, x), x);
  tape_.Accumulate(*ctx_, y.slot, Make({1, 10, 100}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(tape_.Take(x.slot)), Floats({3, 30, 300}));
}

TEST_F(TapeTest, ASharedGradientIsNeverOverwritten) {
  // dy reaches a and b as one tensor; a then gets more, and b must not.
  const Var a = tape_.Watch(Make({0, 0})), b = tape_.Watch(Make({0, 0}));
  const Var ab = Add(*ctx_, a, b);
  const Var y = Add(*ctx_, ab, a);
  tape_.Accumulate(*ctx_, y.slot, Make({1, 2}));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(tape_.Take(b.slot)), Floats({1, 2}));
  EXPECT_EQ(Read(tape_.Take(a.slot)), Floats({2, 4}));
}

TEST_F(TapeTest, AnOpInPlaceLeavesASharedGradientAlone) {
  std::vector<int64_t> rows = {0};
  ctx_->training = true;
  ctx_->batch.row_ids = rows.data();
  const Var a = tape_.Watch(Full(256, 1)), b = tape_.Watch(Full(256, 1));
  // Recorded last, dropout's backward runs while b's slot holds its gradient.
  const Var y = Add(*ctx_, b, Dropout(*ctx_, a, 0.5, 0));
  tape_.Accumulate(*ctx_, y.slot, Full(256, 1));
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(tape_.Take(b.slot)), Floats(256, 1));
  const Floats da = Read(tape_.Take(a.slot));
  EXPECT_EQ(
      std::count(da.begin(), da.end(), 0) + std::count(da.begin(), da.end(), 2),
      256);
}

TEST_F(TapeTest, ACallersGradientIsNeverOverwritten) {
  const Var a = tape_.Watch(Make({0})), b = tape_.Watch(Make({0}));
  const Var y = Add(*ctx_, Add(*ctx_, a, b), a);
  const Tensor seed = Make({4});
  tape_.Accumulate(*ctx_, y.slot, seed);
  tape_.Backward(*ctx_);
  EXPECT_EQ(Read(seed), Floats({4}));
  EXPECT_EQ(Read(tape_.Take(a.slot)), Floats({8}));
}

TEST_F(TapeTest, AnOutputThatNobodyUsesCostsNoBackward) {
  GradSink sink{Make({-7}, {1, 1})};
  const Weight w{Make({3}, {1, 1}), &sink};
  const Var x = tape_.Watch(Make({5}));
  Linear(*ctx_, x, w);
  Swiglu(*ctx_,
         Add(*ctx_, tape_.Watch(Make({1, 2})), tape_.Watch(Make({1, 2}))));
  const Var y = Add(*ctx_, x, x);
  tape_.Accumulate(*ctx_, y.slot, Make({1}));
  tape_.Backward(*ctx_);
  EXPECT_FALSE(sink.written);
  EXPECT_EQ(Read(tape_.Take(x.slot)), Floats({2}));
}

TEST_F(TapeTest, GradientsOfDifferentShapesAreACallerMistake) {
  const int slot = tape_.NewSlot();
  tape_.Accumulate(*ctx_, slot, Make({1, 2}));
  EXPECT_DEATH(tape_.Accumulate(*ctx_, slot, Make({1, 2, 3})),
               "\\[1, 2\\] against \\[1, 3\\]");
}

TEST_F(TapeTest, ActivationsGoBackNodeByNode) {
  constexpr int64_t kWidth = 4096, kBytes = kWidth * sizeof(float);
  constexpr int kLayers = 6;
  const Weight norm{Full(kWidth, 1).Slice(0, {kWidth})};
  const int64_t resident = arena_->live_bytes();
  std::vector<int64_t> live;  // before each layer's backward, last first
  Var x = tape_.Watch(Full(kWidth, 0.5f));
  const int input_slot = x.slot;
  for (int i = 0; i < kLayers; ++i) {
    // Each layer keeps its input for its backward.
    x = Norm(*ctx_, x, {NormKind::kRmsNorm, &norm, nullptr, 1.0f});
    x.recipe = nullptr;
    tape_.Record("probe", {}, [&](Context&, Tape&) {
      live.push_back(arena_->live_bytes() - resident);
    });
  }
  tape_.Accumulate(*ctx_, x.slot, Full(kWidth, 1));
  x = Var();
  tape_.Backward(*ctx_);
  ASSERT_EQ(live.size(), size_t{kLayers});
  for (int i = 0; i < kLayers; ++i) {
    // The inputs of the layers still to come, and the gradient.
    EXPECT_EQ(live[i], (kLayers - i + 1) * kBytes) << i;
  }
  EXPECT_EQ(arena_->live_bytes() - resident, kBytes);
  EXPECT_TRUE(tape_.Take(input_slot).defined());
  EXPECT_EQ(arena_->live_bytes(), resident);
}

TEST_F(TapeTest, BackwardStopsBeforeALaterPhase) {
  GradSink sinks[3];
  Weight weights[3];
  for (int i = 0; i < 3; ++i) {
    sinks[i].phase = 2 - i;
    weights[i].sink = &sinks[i];
  }
  std::vector<int> run;
  const auto record = [&](int number, Weights weights) {
    tape_.Record("probe", weights,
                 [&run, number](Context&, Tape&) { run.push_back(number); });
  };
  record(0, {});
  record(1, {&weights[0], nullptr});
  record(2, {&weights[1]});
  record(3, {});
  record(4, {&weights[2]});
  tape_.Backward(*ctx_, 0);
  EXPECT_EQ(run, (std::vector<int>{4, 3}));
  tape_.Backward(*ctx_, 1);
  EXPECT_EQ(run, (std::vector<int>{4, 3, 2}));
  EXPECT_DEATH(record(5, {&weights[0], &weights[1]}), "two phases");
  record(5, {&weights[2]});
  EXPECT_DEATH(tape_.Backward(*ctx_, 2), "an earlier phase");
  tape_.Backward(*ctx_);
  EXPECT_EQ(run, (std::vector<int>{4, 3, 2, 5, 1, 0}));
}

TEST_F(TapeTest, TheFeedForwardLayerFreesWhatItNoLongerNeeds) {
  constexpr int64_t kTokens = 64, kWidth = 64, kInner = 256;
  constexpr int64_t kRow = kTokens * sizeof(float);
  auto weight = [&](int64_t rows, int64_t cols, GradSink* sink) {
    sink->grad = Full(rows * cols, 0).Slice(0, {rows, cols});
    return Weight{Full(rows * cols, 0.1f).Slice(0, {rows, cols}), sink};
  };
  GradSink up_sink, down_sink;
  const Weight up = weight(kInner, kWidth, &up_sink);
  const Weight down = weight(kWidth, kInner, &down_sink);
  const int64_t resident = ledger_.live_bytes(MemoryCategory::kActivations);
  int slot;
  {
    const Var x =
        tape_.Watch(Full(kTokens * kWidth, 0.3f).Slice(0, {kTokens, kWidth}));
    const Var y = GeluMlp(*ctx_, x, up, nullptr, Gelu::kTanh, down, nullptr);
    slot = y.slot;
  }
  // The input and the activation's input; its output comes again in backward.
  EXPECT_EQ(ledger_.live_bytes(MemoryCategory::kActivations) - resident,
            kRow * (kWidth + kInner));
  tape_.Accumulate(*ctx_, slot,
                   Full(kTokens * kWidth, 1).Slice(0, {kTokens, kWidth}));
  ledger_.ResetPeaks();
  tape_.Backward(*ctx_);
  // The output's memory is the gradient's before that is computed: at the peak
  // live the input, dy, the activation's input and its gradient.
  EXPECT_EQ(ledger_.peak_bytes(MemoryCategory::kActivations) - resident,
            kRow * (2 * kWidth + 2 * kInner));
}

TEST_F(TapeTest, AfterBackwardOnlyTheInputsGradientIsLive) {
  constexpr int64_t kTokens = 12, kWidth = 16;
  std::vector<int32_t> positions(kTokens);
  ctx_->batch = {.batch = 2, .length = 6, .positions = positions.data()};
  GradSink sinks[5] = {{Full(3 * 256, 0)},
                       {Full(256, 0)},
                       {Full(512, 0)},
                       {Full(256, 0)},
                       {Full(kWidth, 0)}};
  sinks[0].grad = sinks[0].grad.Slice(0, {3 * kWidth, kWidth});
  sinks[1].grad = sinks[1].grad.Slice(0, {kWidth, kWidth});
  sinks[2].grad = sinks[2].grad.Slice(0, {2 * kWidth, kWidth});
  sinks[3].grad = sinks[3].grad.Slice(0, {kWidth, kWidth});
  sinks[4].grad = sinks[4].grad.Slice(0, {kWidth});
  auto weight = [&](int i, const Shape& shape) {
    return Weight{Full(shape.num_elems(), 0.1f).Slice(0, shape), &sinks[i]};
  };
  const Weight qkv = weight(0, {3 * kWidth, kWidth});
  const Weight out = weight(1, {kWidth, kWidth});
  const Weight up = weight(2, {2 * kWidth, kWidth});
  const Weight down = weight(3, {kWidth, kWidth});
  const Weight scale = weight(4, {kWidth});
  const NormWeights norm{NormKind::kRmsNorm, &scale};
  const int64_t resident = arena_->live_bytes();
  int slot;
  {
    const Var in =
        tape_.Watch(Full(kTokens * kWidth, 0.3f).Slice(0, {kTokens, kWidth}));
    slot = in.slot;
    const Var attended =
        SelfAttention(*ctx_, Linear(*ctx_, Norm(*ctx_, in, norm), qkv),
                      {.num_heads = 2, .num_kv_heads = 2, .head_dim = 8});
    auto [x, normed] = AddNorm(*ctx_, Linear(*ctx_, attended, out), in, norm);
    const Var y = Linear(*ctx_, Swiglu(*ctx_, Linear(*ctx_, normed, up)), down,
                         nullptr, &x);
    tape_.Accumulate(*ctx_, y.slot,
                     Full(kTokens * kWidth, 1).Slice(0, {kTokens, kWidth}));
  }
  tape_.Backward(*ctx_);
  EXPECT_EQ(tape_.num_nodes(), 0);
  EXPECT_EQ(arena_->live_bytes() - resident,
            kTokens * kWidth * int64_t{sizeof(float)});
  for (const GradSink& sink : sinks) EXPECT_TRUE(sink.written);
  EXPECT_TRUE(tape_.Take(slot).defined());
}

TEST_F(TapeTest, ALongChainNeedsNoDeepStack) {
  // 10,000 nodes of recursion would take megabytes; the thread has 256 KiB.
  auto body = [&] {
    Var x = tape_.Watch(Make({1}));
    const Var input = x;
    const Var step(Make({1}));
    for (int i = 0; i < 10000; ++i) x = Add(*ctx_, x, step);
    EXPECT_EQ(Read(x.value), Floats({10001}));
    EXPECT_EQ(tape_.num_nodes(), 10000);
    tape_.Accumulate(*ctx_, x.slot, Make({3}));
    tape_.Backward(*ctx_);
    EXPECT_EQ(Read(tape_.Take(input.slot)), Floats({3}));
    // A tape that is dropped unplayed does not recurse either.
    for (int i = 0; i < 10000; ++i) x = Add(*ctx_, x, step);
    tape_ = Tape();
  };
  std::function<void()> run = body;
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 256 << 10), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void* f) -> void* {
                  (*static_cast<std::function<void()>*>(f))();
                  return nullptr;
                },
                &run),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

TEST_F(TapeTest, DropoutDoesNotDependOnHowRowsAreSplit) {
  ctx_->training = true;
  ctx_->dropout_key = 9;
  ctx_->tape = nullptr;
  constexpr int64_t kRows = 8, kCols = 33;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < kRows; ++i) rows.push_back(40 + i);
  const Tensor x = Full(kRows * kCols, 1).Slice(0, {kRows, kCols});
  ctx_->batch.row_ids = rows.data();
  const Floats whole = Read(Dropout(*ctx_, Var(x), 0.5, 3).value);
  Floats parts;
  for (int64_t begin = 0; begin < kRows; begin += 2) {
    ctx_->batch.row_ids = rows.data() + begin;
    const Floats part = Read(
        Dropout(*ctx_, Var(x.Slice(begin * kCols, {2, kCols})), 0.5, 3).value);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  EXPECT_EQ(whole, parts);

  // Another site, step or row has another mask; evaluation has none.
  ctx_->batch.row_ids = rows.data();
  EXPECT_NE(whole, Read(Dropout(*ctx_, Var(x), 0.5, 4).value));
  ctx_->dropout_key = 10;
  EXPECT_NE(whole, Read(Dropout(*ctx_, Var(x), 0.5, 3).value));
  ctx_->training = false;
  EXPECT_EQ(Read(Dropout(*ctx_, Var(x), 0.5, 3).value), Read(x));
}

TEST_F(TapeTest, ArgumentsThatDoNotFitPrintBothShapes) {
  const Weight w{Make({1, 2, 3}, {1, 3})};
  const Var x(Make({1, 2}));
  EXPECT_DEATH(Linear(*ctx_, x, w), "x \\[1, 2\\], w \\[1, 3\\]");
  EXPECT_DEATH(Add(*ctx_, x, Var(Make({1}))), "\\[1, 2\\] against \\[1, 1\\]");
  EXPECT_DEATH(Swiglu(*ctx_, Var(Make({1, 2, 3}))),
               "packed width of \\[1, 3\\]");
}

}  // namespace
}  // namespace zero
