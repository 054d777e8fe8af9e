// Every op's gradients against central differences.
//
// The scalar is L = sum of r * output with fixed random r, added in float64.
// Along a direction d, with f(t) = L(x + t d),
//   f'(0) = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h + O(h^4 f^(5) / 30).
// Values lie on a grid of 2^-10, so that x + t d is exact in fp32. The kernels
// round each output to 2^-24 of its size: over about 1000 outputs of size 1 to
// 4 that is 2^-24 * 32 * 4 = 8e-6 in L, and at h = 2^-5 2e-4 in f'. The term
// h^4 = 1e-6 times the fifth derivative is smaller. Hence kTolerance; a wrong
// or missing term is of the size of the gradient itself.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine/autograd/ops.h"
#include "gtest/gtest.h"
#include "kernels/device.h"
#include "kernels/philox.h"

namespace zero {
namespace {

constexpr double kTolerance = 5e-4;
constexpr float kStep = 1.0f / 32;

using Values = std::vector<float>;
using Op = std::function<std::vector<Var>(Context&, const std::vector<Var>&,
                                          const std::vector<Weight>&)>;

// Signed values of magnitude 1/4 to 1 on a grid of 2^-10: norms of a row of
// width 1 are not differentiable at 0.
Values RandomValues(int64_t n, uint64_t key) {
  Values values(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = Philox(key, i, 0).x[0];
    const float size = 0.25f + static_cast<float>(bits % 769) / 1024.0f;
    values[i] = bits & 0x80000000u ? -size : size;
  }
  return values;
}

class GradientTest : public testing::Test {
 protected:
  // One thread: thousands of tiny calls would only wait for each other.
  GradientTest()
      : device_(MakeCpuDevice(1)),
        stream_(device_->MakeStream(StreamRole::kCompute)) {
    auto arena = Arena::Make(*device_, MemoryKind::kDevice, 32 << 20,
                             "gradients", &ledger_);
    EXPECT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    // Reading memory before it is written, or after it is freed, gives NaNs.
    arena_->set_poison_freed(true);
    arena_->Allocate(32 << 20, MemoryCategory::kActivations);
  }

  // B sequences of T tokens with ids below `vocab`; every third target of a
  // batch is ignored.
  void SetBatch(int64_t batch, int64_t length, int64_t vocab) {
    const int64_t tokens = batch * length;
    ids_.resize(tokens);
    positions_.resize(tokens);
    targets_.resize(tokens);
    row_ids_.resize(tokens);
    for (int64_t i = 0; i < tokens; ++i) {
      const PhiloxBlock bits = Philox(11, i, 0);
      ids_[i] = bits.x[0] % vocab;
      positions_[i] = i % length;
      targets_[i] = i % 3 == 2 ? -1 : bits.x[1] % vocab;
      row_ids_[i] = 1000 + i;
    }
    batch_ = {.batch = batch,
              .length = length,
              .tokens = ids_.data(),
              .positions = positions_.data(),
              .targets = targets_.data(),
              .row_ids = row_ids_.data(),
              .grad_scale = &grad_scale_,
              .loss_sum = &loss_sum_};
  }

  // Cuts every row into sequences of 1, 2, 4 ... tokens.
  void PackBatch() {
    offsets_.clear();
    for (int64_t i = 0; i < batch_.num_tokens(); ++i) {
      const int64_t t = i % batch_.length + 1;
      const bool begins = (t & (t - 1)) == 0;  // powers of two
      positions_[i] = begins ? 0 : positions_[i - 1] + 1;
      if (begins) offsets_.push_back(i);
    }
    const int64_t count = offsets_.size();
    offsets_.resize(batch_.num_tokens() + 1, batch_.num_tokens());
    batch_.packed = {positions_.data(), offsets_.data(), count};
  }

  Context MakeContext() {
    Context ctx(*device_, *stream_, *arena_);
    ctx.training = true;
    ctx.dropout_key = 5;
    ctx.batch = batch_;
    return ctx;
  }

  Tensor Upload(const Values& values, const Shape& shape) {
    Tensor tensor = Tensor::Empty(*arena_, shape, DType::kF32,
                                  MemoryCategory::kActivations);
    std::copy(values.begin(), values.end(), tensor.As<float>());
    return tensor;
  }

  static uint64_t SeedKey(size_t output) { return 900 + output; }

  double Loss(const Op& op) {
    Context ctx = MakeContext();
    loss_sum_ = 0;
    std::vector<Var> inputs;
    std::vector<Weight> weights;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      Tensor tensor = Upload(values_[i], shapes_[i]);
      if (i < num_inputs_) {
        inputs.emplace_back(std::move(tensor));
      } else {
        weights.push_back({std::move(tensor)});
      }
    }
    const std::vector<Var> outputs = op(ctx, inputs, weights);
    double loss = loss_sum_ * grad_scale_;
    for (size_t k = 0; k < outputs.size(); ++k) {
      const Tensor& value = outputs[k].value;
      const Values r = RandomValues(value.num_elems(), SeedKey(k));
      for (size_t i = 0; i < r.size(); ++i) {
        loss += double{r[i]} * value.As<float>()[i];
      }
    }
    return loss;
  }

  // The gradients of everything, by the tape. Weight sinks start as NaNs that
  // the first pass must overwrite; each further pass adds.
  std::vector<Values> Gradients(const Op& op, int passes,
                                Recompute recompute = Recompute::kOff) {
    std::vector<Values> grads;
    std::vector<Weight> weights;
    std::vector<GradSink> sinks(shapes_.size());
    for (size_t i = num_inputs_; i < shapes_.size(); ++i) {
      const Values nans(shapes_[i].num_elems(),
                        std::numeric_limits<float>::quiet_NaN());
      sinks[i].grad = Upload(nans, shapes_[i]);
      weights.push_back({Upload(values_[i], shapes_[i]), &sinks[i]});
    }
    for (int pass = 0; pass < passes; ++pass) {
      Context ctx = MakeContext();
      Tape tape;
      ctx.tape = &tape;
      ctx.recompute = recompute;
      std::vector<Var> inputs;
      std::vector<int> slots;
      for (size_t i = 0; i < num_inputs_; ++i) {
        inputs.push_back(tape.Watch(Upload(values_[i], shapes_[i])));
        slots.push_back(inputs.back().slot);
      }
      std::vector<Var> outputs = op(ctx, inputs, weights);
      for (size_t k = 0; k < outputs.size(); ++k) {
        const Shape shape = outputs[k].shape();
        tape.Accumulate(
            ctx, outputs[k].slot,
            Upload(RandomValues(shape.num_elems(), SeedKey(k)), shape));
      }
      inputs.clear();
      outputs.clear();
      tape.Backward(ctx);
      for (size_t i = 0; i < num_inputs_ && pass == 0; ++i) {
        const Tensor grad = tape.Take(slots[i]);
        EXPECT_TRUE(grad.defined()) << "input " << i;
        if (!grad.defined()) return {};
        grads.emplace_back(grad.As<float>(),
                           grad.As<float>() + grad.num_elems());
      }
    }
    for (size_t i = num_inputs_; i < shapes_.size(); ++i) {
      EXPECT_TRUE(sinks[i].written) << "weight " << i - num_inputs_;
      const float* const grad = sinks[i].grad.As<float>();
      grads.emplace_back(grad, grad + shapes_[i].num_elems());
    }
    return grads;
  }

  // f'(0) for tensor `t` along `direction` (sparse: index and sign).
  double Numeric(const Op& op, size_t t,
                 const std::vector<std::pair<int64_t, float>>& direction,
                 float h) {
    const Values saved = values_[t];
    auto at = [&](float step) {
      values_[t] = saved;
      for (const auto& [i, sign] : direction) values_[t][i] += step * sign;
      return Loss(op);
    };
    const double near = at(h) - at(-h), far = at(2 * h) - at(-2 * h);
    values_[t] = saved;
    return (8 * near - far) / (12.0 * h);
  }

  // Inputs and weights of these shapes go through `op`.
  void Check(const Op& op, const std::vector<Shape>& inputs,
             const std::vector<Shape>& weights) {
    num_inputs_ = inputs.size();
    shapes_ = inputs;
    shapes_.insert(shapes_.end(), weights.begin(), weights.end());
    values_.clear();
    for (size_t t = 0; t < shapes_.size(); ++t) {
      values_.push_back(RandomValues(shapes_[t].num_elems(), 100 + t));
    }
    const std::vector<Values> grads = Gradients(op, 1);
    const std::vector<Values> twice = Gradients(op, 2);
    ASSERT_EQ(grads.size(), shapes_.size());
    for (const Recompute recompute : kRecomputeLevels) {
      EXPECT_EQ(Gradients(op, 1, recompute), grads)
          << "recompute " << RecomputeName(recompute);
    }
    for (size_t t = 0; t < shapes_.size(); ++t) {
      CheckTensor(op, t, grads[t]);
      if (t < num_inputs_) continue;
      for (size_t i = 0; i < grads[t].size(); ++i) {
        // Two roundings of the sum.
        ASSERT_NEAR(twice[t][i], 2 * grads[t][i],
                    1e-5 * std::max(1.0f, std::fabs(grads[t][i])))
            << "second pass, tensor " << t << ", element " << i;
      }
    }
    EXPECT_EQ(arena_->live_bytes(), 0);
  }

  void CheckTensor(const Op& op, size_t t, const Values& grad) {
    const int64_t n = grad.size();
    double largest = 1;
    for (float g : grad) largest = std::max<double>(largest, std::fabs(g));
    // Every element of a small tensor, some of a large one.
    const int64_t probes = std::min<int64_t>(n, 24);
    for (int64_t p = 0; p < probes; ++p) {
      const int64_t i = n <= probes ? p : Philox(77, p, t).x[0] % n;
      const double want = Numeric(op, t, {{i, 1.0f}}, kStep);
      ASSERT_NEAR(grad[i], want, kTolerance * largest)
          << "tensor " << t << " " << shapes_[t] << ", element " << i;
    }
    // All elements at once, each with a random sign; errors add up like a
    // random walk.
    for (uint64_t draw = 0; draw < 2; ++draw) {
      std::vector<std::pair<int64_t, float>> direction;
      double got = 0;
      for (int64_t i = 0; i < n; ++i) {
        const float sign = Philox(55 + draw, i, t).x[0] & 1 ? 1.0f : -1.0f;
        direction.push_back({i, sign});
        got += sign * double{grad[i]};
      }
      const double root = std::sqrt(static_cast<double>(n));
      // A power of two, so that the steps stay on the grid.
      const float h = std::ldexp(kStep, -static_cast<int>(std::log2(root) / 2));
      ASSERT_NEAR(got, Numeric(op, t, direction, h),
                  kTolerance * largest * root)
          << "tensor " << t << " " << shapes_[t] << ", all elements";
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  MemoryLedger ledger_;
  std::unique_ptr<Arena> arena_;
  BatchView batch_;
  std::vector<int32_t> ids_, positions_, targets_, offsets_;
  std::vector<int64_t> row_ids_;
  float grad_scale_ = 0.75f;
  double loss_sum_ = 0;
  std::vector<Shape> shapes_;
  std::vector<Values> values_;
  size_t num_inputs_ = 0;
};

// Rows and widths that vectors and tiles do not divide.
struct Size {
  int64_t rows, cols;
};
const Size kSizes[] = {{1, 1}, {1, 33}, {31, 1}, {33, 31}, {3, 1023}};

TEST_F(GradientTest, LinearWithBiasAndResidualIsThatOfDifferences) {
  for (const auto& [m, c] : kSizes) {
    SCOPED_TRACE(testing::Message() << m << " x " << c);
    for (int64_t n : {1, 33}) {
      Check(
          [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
            return {Linear(ctx, in[0], w[0])};
          },
          {{m, c}}, {{n, c}});
      Check(
          [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
            return {Linear(ctx, in[0], w[0], &w[1], &in[1])};
          },
          {{m, c}, {m, n}}, {{n, c}, {n}});
    }
  }
}

TEST_F(GradientTest, GeluMlpOfBothKindsIsThatOfDifferences) {
  for (const auto& [m, c] : {Size{1, 1}, {31, 33}, {33, 31}}) {
    SCOPED_TRACE(testing::Message() << m << " x " << c);
    const int64_t f = 2 * c + 1;
    for (Gelu kind : {Gelu::kTanh, Gelu::kErf}) {
      Check(
          [kind](Context& ctx, const auto& in,
                 const auto& w) -> std::vector<Var> {
            return {GeluMlp(ctx, in[0], w[0], &w[1], kind, w[2], &w[3])};
          },
          {{m, c}}, {{f, c}, {f}, {c, f}, {c}});
      Check(
          [kind](Context& ctx, const auto& in,
                 const auto& w) -> std::vector<Var> {
            return {GeluMlp(ctx, in[0], w[0], nullptr, kind, w[1], nullptr,
                            &in[1])};
          },
          {{m, c}, {m, c}}, {{f, c}, {c, f}});
    }
  }
}

TEST_F(GradientTest, TheResidualOfGeluMlpMayBeItsInput) {
  Check(
      [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        return {GeluMlp(ctx, in[0], w[0], nullptr, Gelu::kTanh, w[1], nullptr,
                        &in[0])};
      },
      {{7, 31}}, {{33, 31}, {31, 33}});
}

TEST_F(GradientTest, SwigluIsThatOfDifferences) {
  for (const auto& [m, f] : kSizes) {
    SCOPED_TRACE(testing::Message() << m << " x " << f);
    Check([](Context& ctx, const auto& in,
             const auto&) -> std::vector<Var> { return {Swiglu(ctx, in[0])}; },
          {{m, 2 * f}}, {});
  }
}

NormWeights LayerNormOf(const std::vector<Weight>& w) {
  return {NormKind::kLayerNorm, &w[0], &w[1], 1e-5f};
}
NormWeights RmsNormOf(const std::vector<Weight>& w) {
  return {NormKind::kRmsNorm, &w[0], nullptr, 1e-6f};
}

TEST_F(GradientTest, NormOfBothKindsIsThatOfDifferences) {
  for (const auto& [m, c] : kSizes) {
    SCOPED_TRACE(testing::Message() << m << " x " << c);
    Check(
        [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
          return {Norm(ctx, in[0], LayerNormOf(w))};
        },
        {{m, c}}, {{c}, {c}});
    Check(
        [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
          return {Norm(ctx, in[0], RmsNormOf(w))};
        },
        {{m, c}}, {{c}});
  }
}

TEST_F(GradientTest, NormWhoseInputGoesOnBesideIt) {
  // The residual stream of a block: the input's gradient has two parts.
  Check(
      [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        return {Add(ctx, Norm(ctx, in[0], LayerNormOf(w)), in[0])};
      },
      {{5, 33}}, {{33}, {33}});
}

// In one pass with one rounding, not by an Add behind it.
TEST_F(GradientTest, ANormAddsWhatReachesItsInputBesideItAsAnAddNormDoes) {
  const Op norm = [](Context& ctx, const auto& in,
                     const auto& w) -> std::vector<Var> {
    return {in[0], Norm(ctx, in[0], LayerNormOf(w))};
  };
  Check(norm, {{5, 33}}, {{33}, {33}});
  const Op add_norm = [&](Context& ctx, const auto& in,
                          const auto& w) -> std::vector<Var> {
    const Var zeros(Upload(Values(5 * 33), in[0].shape()));
    const auto [sum, y] = AddNorm(ctx, in[0], zeros, LayerNormOf(w));
    return {sum, y};
  };
  EXPECT_EQ(Gradients(norm, 1), Gradients(add_norm, 1));
}

TEST_F(GradientTest, AddNormWithBothOutputsOrOne) {
  for (const auto& [m, c] : {Size{1, 1}, {31, 33}, {3, 1023}}) {
    SCOPED_TRACE(testing::Message() << m << " x " << c);
    for (bool is_rms : {false, true}) {
      auto run = [is_rms](Context& ctx, const std::vector<Var>& in,
                          const std::vector<Weight>& w) {
        return AddNorm(ctx, in[0], in[1],
                       is_rms ? RmsNormOf(w) : LayerNormOf(w));
      };
      std::vector<Shape> weights = {{c}};
      if (!is_rms) weights.push_back({c});
      // {1, 1} of width 1: the sum of two values can be 0.
      if (c > 1) {
        Check(
            [&](Context& ctx, const auto& in,
                const auto& w) -> std::vector<Var> {
              auto [sum, y] = run(ctx, in, w);
              return {sum, y};
            },
            {{m, c}, {m, c}}, weights);
        Check([&](Context& ctx, const auto& in, const auto& w)
                  -> std::vector<Var> { return {run(ctx, in, w).second}; },
              {{m, c}, {m, c}}, weights);
      }
      // Without y nothing reaches the weights: only the inputs are checked.
      Check(
          [&](Context& ctx, const auto& in, const auto&) -> std::vector<Var> {
            Weight ones{Upload(Values(c, 1.0f), {c})};
            return {AddNorm(ctx, in[0], in[1],
                            {is_rms ? NormKind::kRmsNorm : NormKind::kLayerNorm,
                             &ones, nullptr, 1e-5f})
                        .first};
          },
          {{m, c}, {m, c}}, {});
    }
  }
}

TEST_F(GradientTest, EmbeddingWithAndWithoutPositionsIsThatOfDifferences) {
  struct Case {
    int64_t batch, length, vocab, channels;
  };
  for (const Case& c : {Case{1, 1, 1, 1}, {3, 11, 7, 33}, {2, 31, 61, 31}}) {
    SCOPED_TRACE(testing::Message() << c.batch << " x " << c.length);
    SetBatch(c.batch, c.length, c.vocab);
    Check(
        [](Context& ctx, const auto&, const auto& w) -> std::vector<Var> {
          return {Embedding(ctx, w[0], nullptr)};
        },
        {}, {{c.vocab, c.channels}});
    Check(
        [](Context& ctx, const auto&, const auto& w) -> std::vector<Var> {
          return {Embedding(ctx, w[0], &w[1])};
        },
        {}, {{c.vocab, c.channels}, {c.length + 2, c.channels}});
  }
}

struct AttentionCase {
  const char* name;
  int64_t batch, length, heads, kv_heads, head_dim;
  bool rotary, qk_norm;
  bool packed = false;  // sequences of 1, 2, 4 ... tokens in every row
};

class AttentionGradientTest
    : public GradientTest,
      public testing::WithParamInterface<AttentionCase> {};

TEST_P(AttentionGradientTest, SelfAttentionIsThatOfDifferences) {
  const AttentionCase& c = GetParam();
  SetBatch(c.batch, c.length, /*vocab=*/5);
  if (c.packed) PackBatch();
  const int64_t half = c.head_dim / 2;
  Values cosines, sines;
  for (int64_t p = 0; p < c.length; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = p * std::pow(100.0, -2.0 * i / c.head_dim);
      cosines.push_back(static_cast<float>(std::cos(angle)));
      sines.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  const RotaryTables tables{
      Tensor::Borrow(cosines.data(), {c.length, half}, DType::kF32),
      Tensor::Borrow(sines.data(), {c.length, half}, DType::kF32)};
  const Op op = [&](Context& ctx, const std::vector<Var>& in,
                    const std::vector<Weight>& w) -> std::vector<Var> {
    AttentionOptions options{.num_heads = c.heads,
                             .num_kv_heads = c.kv_heads,
                             .head_dim = c.head_dim,
                             .rotary = c.rotary ? &tables : nullptr};
    NormWeights q_norm, k_norm;
    if (c.qk_norm) {
      q_norm = {NormKind::kRmsNorm, &w[0], nullptr, 1e-6f};
      k_norm = {NormKind::kRmsNorm, &w[1], nullptr, 1e-6f};
      options.q_norm = &q_norm;
      options.k_norm = &k_norm;
    }
    return {SelfAttention(ctx, in[0], options)};
  };
  const int64_t width = (c.heads + 2 * c.kv_heads) * c.head_dim;
  std::vector<Shape> weights;
  if (c.qk_norm) weights = {{c.head_dim}, {c.head_dim}};
  Check(op, {{c.batch * c.length, width}}, weights);

  // Attention on a projection, which is recomputed and rotated again; its
  // output has two readers.
  const Op projected = [&](Context& ctx, const std::vector<Var>& in,
                           const std::vector<Weight>& w) -> std::vector<Var> {
    const Var out = op(ctx, {Linear(ctx, in[0], w[w.size() - 1])}, w)[0];
    return {Linear(ctx, out, w[w.size() - 2]), out};
  };
  weights.push_back({3, c.heads * c.head_dim});
  weights.push_back({width, 5});
  Check(projected, {{c.batch * c.length, 5}}, weights);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionGradientTest,
    testing::Values(AttentionCase{"OneToken", 1, 1, 1, 1, 1, false, false},
                    AttentionCase{"Plain", 2, 31, 3, 3, 8, false, false},
                    AttentionCase{"OddWidth", 1, 33, 2, 2, 13, false, false},
                    AttentionCase{"Grouped", 2, 17, 6, 2, 8, false, false},
                    AttentionCase{"Rotary", 2, 17, 3, 3, 10, true, false},
                    AttentionCase{"GroupedRotary", 1, 33, 4, 1, 8, true, false},
                    AttentionCase{"NormedRotary", 2, 11, 4, 2, 12, true, true},
                    AttentionCase{"Normed", 1, 9, 2, 1, 7, false, true},
                    AttentionCase{"Packed", 2, 17, 6, 2, 8, false, false, true},
                    AttentionCase{"PackedRotary", 2, 11, 2, 1, 6, true, false,
                                  true}),
    [](const auto& info) { return std::string(info.param.name); });

// What its layers keep depends on each other.
TEST_F(GradientTest, ABlockOfAllThatIsComputedAgain) {
  SetBatch(1, 7, 5);
  const NormWeights norm{NormKind::kRmsNorm, nullptr, nullptr, 1e-6f};
  const auto attend = [&](Context& ctx, const Var& x, const auto& w) {
    NormWeights first = norm, second = norm;
    first.weight = &w[0];
    second.weight = &w[1];
    const Var y = Linear(ctx, Norm(ctx, x, first), w[2]);
    return AddNorm(ctx, Dropout(ctx, y, 0.3, 1), x, second);
  };
  Check(
      [&](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        const auto [x, y] = attend(ctx, in[0], w);
        const Var hidden = Swiglu(ctx, Linear(ctx, y, w[3]));
        return {Linear(ctx, hidden, w[4], nullptr, &x)};
      },
      {{7, 31}}, {{31}, {31}, {31, 31}, {18, 31}, {31, 9}});
  Check(
      [&](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        const auto [x, y] = attend(ctx, in[0], w);
        return {GeluMlp(ctx, y, w[3], nullptr, Gelu::kTanh, w[4], nullptr, &x)};
      },
      {{7, 31}}, {{31}, {31}, {31, 31}, {9, 31}, {31, 9}});
}

TEST_F(GradientTest, DropoutIsLinearInItsInput) {
  for (const auto& [m, c] : {Size{1, 1}, {31, 33}, {33, 31}}) {
    SetBatch(1, m, 5);
    Check(
        [](Context& ctx, const auto& in, const auto&) -> std::vector<Var> {
          return {Dropout(ctx, in[0], 0.3, 2)};
        },
        {{m, c}}, {});
  }
}

TEST_F(GradientTest, AddAndAVarUsedTwiceIsThatOfDifferences) {
  Check(
      [](Context& ctx, const auto& in, const auto&) -> std::vector<Var> {
        return {Add(ctx, in[0], in[1])};
      },
      {{31, 33}, {31, 33}}, {});
  Check(
      [](Context& ctx, const auto& in, const auto&) -> std::vector<Var> {
        return {Add(ctx, in[0], in[0])};
      },
      {{31, 33}}, {});
  // A value with three uses, one of which works in place on its gradient.
  SetBatch(1, 31, 5);
  Check(
      [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        const Var x = Linear(ctx, in[0], w[0]);
        const Var kept = Add(ctx, Dropout(ctx, x, 0.5, 1), x);
        return {Add(ctx, Norm(ctx, kept, {NormKind::kRmsNorm, &w[1]}), kept),
                x};
      },
      {{31, 33}}, {{33, 33}, {33}});
}

TEST_F(GradientTest, AWeightUsedTwiceIsThatOfDifferences) {
  Check(
      [](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
        return {Linear(ctx, Linear(ctx, in[0], w[0], &w[1]), w[0], &w[1])};
      },
      {{7, 31}}, {{31, 31}, {31}});
}

TEST_F(GradientTest, LinearCrossEntropyWithIgnoredTargetsIsThatOfDifferences) {
  struct Case {
    int64_t rows, channels, vocab, table;
  };
  for (const Case& c :
       {Case{1, 1, 1, 1}, {31, 33, 61, 64}, {33, 31, 1023, 1023}}) {
    SCOPED_TRACE(testing::Message() << c.rows << ", vocabulary " << c.vocab);
    SetBatch(1, c.rows, c.vocab);
    Check(
        [&](Context& ctx, const auto& in, const auto& w) -> std::vector<Var> {
          LinearCrossEntropy(ctx, in[0], w[0], c.vocab);
          return {};
        },
        {{c.rows, c.channels}}, {{c.table, c.channels}});
  }
}

TEST_F(GradientTest, ATiedTableGetsBothItsGradients) {
  SetBatch(3, 11, 29);
  Check(
      [](Context& ctx, const auto&, const auto& w) -> std::vector<Var> {
        LinearCrossEntropy(ctx, Embedding(ctx, w[0], nullptr), w[0], 29);
        return {};
      },
      {}, {{29, 33}});
}

}  // namespace
}  // namespace zero
