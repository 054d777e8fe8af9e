#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/device.h"

namespace zero {
namespace {

constexpr int64_t kSize = 100;

// Parameters and their states, stepped by OptimizerStep.
class Training {
 public:
  explicit Training(const OptimizerSpec& spec)
      : spec_(spec),
        device_(MakeCpuDevice(1)),
        stream_(device_->MakeStream(StreamRole::kCompute)),
        params(kSize),
        states_(spec.StateFloatsPerElement(), std::vector<float>(kSize)) {
    for (int64_t i = 0; i < kSize; ++i) {
      params[i] = std::sin(static_cast<float>(i) + 1);
    }
  }

  // The gradient of step `step` (from 1) at element i.
  static float Grad(int64_t step, int64_t i) {
    return std::cos(static_cast<float>(3 * step + i)) / 2;
  }

  void Step(int64_t step, float lr, float beta1 = -1) {
    std::vector<float> grad(kSize);
    for (int64_t i = 0; i < kSize; ++i) grad[i] = Grad(step, i);
    // The first half decays, the second does not.
    const float decay = static_cast<float>(spec_.weight_decay);
    const UpdateRange ranges[] = {{0, kSize / 2, decay}, {kSize / 2, kSize, 0}};
    UpdateState state;
    state.param = {params.data(), DType::kF32, kSize};
    state.grad = {grad.data(), DType::kF32, kSize};
    state.ranges = ranges;
    std::vector<float*> states;
    for (std::vector<float>& s : states_) states.push_back(s.data());
    const OptimizerStepOptions options{lr, beta1, step};
    TensorNorms norms;
    const TensorPart parts[] = {{0, 0, 1}, {1, 1, 2}};
    double sums[4] = {};
    if (spec_.needs_tensor_norms()) {
      norms = {parts, sums};
      OptimizerMoments(device_->ops(), *stream_, spec_, state, states, options,
                       norms);
    }
    OptimizerStep(device_->ops(), *stream_, spec_, state, states, options,
                  norms);
  }

  double Decay(int64_t i) const {
    return i < kSize / 2 ? spec_.weight_decay : 0;
  }

 private:
  OptimizerSpec spec_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;

 public:
  std::vector<float> params;

 private:
  std::vector<std::vector<float>> states_;
};

// torch.optim.AdamW, or Adam with L2, in float64 with the exact betas.
std::vector<double> TextbookAdam(Training& run, const OptimizerSpec& spec,
                                 int64_t steps, double lr, bool decoupled) {
  std::vector<double> p(run.params.begin(), run.params.end());
  std::vector<double> m(kSize), v(kSize);
  for (int64_t t = 1; t <= steps; ++t) {
    const double c1 = spec.bias_correction ? 1 - std::pow(spec.beta1, t) : 1;
    const double c2 = spec.bias_correction ? 1 - std::pow(spec.beta2, t) : 1;
    for (int64_t i = 0; i < kSize; ++i) {
      double g = Training::Grad(t, i);
      if (decoupled) {
        p[i] *= 1 - lr * run.Decay(i);
      } else {
        g += run.Decay(i) * p[i];
      }
      m[i] = spec.beta1 * m[i] + (1 - spec.beta1) * g;
      v[i] = spec.beta2 * v[i] + (1 - spec.beta2) * g * g;
      p[i] -= lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + spec.eps);
    }
  }
  return p;
}

void ExpectNear(const std::vector<float>& got, const std::vector<double>& want,
                double tolerance) {
  for (int64_t i = 0; i < kSize; ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance) << i;
  }
}

TEST(OptimizerTest, AdamWFollowsTheTextbookOverTwentySteps) {
  OptimizerSpec spec;
  spec.weight_decay = 0.1;
  Training run(spec);
  const std::vector<double> want = TextbookAdam(run, spec, 20, 0.01, true);
  for (int64_t t = 1; t <= 20; ++t) run.Step(t, 0.01f);
  // 20 roundings of p, plus steps of about lr with errors of 10 half-ulps.
  ExpectNear(run.params, want, 2e-6);
}

TEST(OptimizerTest, AdamAddsTheDecayToTheGradientWhereAskedTo) {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::kAdam;
  spec.weight_decay = 0.1;
  for (const bool decoupled : {false, true}) {
    spec.decoupled_decay = decoupled;
    Training run(spec);
    const std::vector<double> want =
        TextbookAdam(run, spec, 5, 0.01, decoupled);
    for (int64_t t = 1; t <= 5; ++t) run.Step(t, 0.01f);
    ExpectNear(run.params, want, 1e-6);
  }
}

TEST(OptimizerTest, BiasCorrectionCanBeOff) {
  OptimizerSpec spec;
  spec.bias_correction = false;
  Training run(spec);
  const std::vector<double> want = TextbookAdam(run, spec, 3, 0.01, true);
  for (int64_t t = 1; t <= 3; ++t) run.Step(t, 0.01f);
  // Steps are up to 3 lr here. fp32's 1 - beta2 differs from the textbook's
  // by 1.3e-5, which a correction would cancel; its root is half of that.
  ExpectNear(run.params, want, 3 * 3 * 0.01 * 0.7e-5);
}

TEST(OptimizerTest, Beta1OfTheStepReplacesTheSpecs) {
  OptimizerSpec spec;
  spec.beta1 = 0.5;
  Training cycled(spec);
  cycled.Step(1, 0.01f, 0.8f);
  spec.beta1 = 0.8;
  Training fixed(spec);
  fixed.Step(1, 0.01f);
  EXPECT_EQ(cycled.params, fixed.params);
}

TEST(OptimizerTest, SgdWithMomentumFollowsTorch) {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::kSgd;
  spec.momentum = 0.9;
  spec.dampening = 0.2;
  spec.weight_decay = 0.1;
  Training run(spec);
  std::vector<double> p(run.params.begin(), run.params.end()), buffer(kSize);
  for (int64_t t = 1; t <= 5; ++t) {
    run.Step(t, 0.1f);
    for (int64_t i = 0; i < kSize; ++i) {
      const double g = Training::Grad(t, i) + run.Decay(i) * p[i];
      buffer[i] = t == 1 ? g : 0.9 * buffer[i] + 0.8 * g;
      p[i] -= 0.1 * buffer[i];
    }
  }
  ExpectNear(run.params, p, 1e-6);
}

TEST(OptimizerTest, LambScalesEachRangeByItsTrustRatio) {
  OptimizerSpec spec;
  spec.kind = OptimizerKind::kLamb;
  spec.weight_decay = 0.1;
  Training run(spec);
  std::vector<double> p(run.params.begin(), run.params.end());
  std::vector<double> m(kSize), v(kSize), update(kSize);
  for (int64_t t = 1; t <= 3; ++t) {
    run.Step(t, 0.01f);
    for (const int64_t begin : {int64_t{0}, kSize / 2}) {
      double p2 = 0, u2 = 0;
      for (int64_t i = begin; i < begin + kSize / 2; ++i) {
        const double g = Training::Grad(t, i);
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.999 * v[i] + 0.001 * g * g;
        update[i] = (m[i] / (1 - std::pow(0.9, t))) /
                        (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8) +
                    run.Decay(i) * p[i];
        p2 += p[i] * p[i];
        u2 += update[i] * update[i];
      }
      const double ratio = std::clamp(std::sqrt(p2 / u2), 0.01, 10.0);
      for (int64_t i = begin; i < begin + kSize / 2; ++i) {
        p[i] -= 0.01 * ratio * update[i];
      }
    }
  }
  ExpectNear(run.params, p, 2e-6);
}

TEST(OptimizerTest, StatesAreWhatEachKindNeeds) {
  OptimizerSpec spec;
  EXPECT_EQ(spec.StateFloatsPerElement(), 2);
  spec.kind = OptimizerKind::kLamb;
  EXPECT_EQ(spec.StateFloatsPerElement(), 2);
  spec.kind = OptimizerKind::kSgd;
  EXPECT_EQ(spec.StateFloatsPerElement(), 0);
  spec.momentum = 0.9;
  EXPECT_EQ(spec.StateFloatsPerElement(), 1);
}

}  // namespace
}  // namespace zero
