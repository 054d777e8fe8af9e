#include "optim/optimizer.h"

#include <cmath>

#include "kernels/check.h"

namespace zero {
namespace {

float BiasCorrection(const OptimizerSpec& spec, float beta, int64_t step) {
  if (!spec.bias_correction) return 1;
  return static_cast<float>(
      1 - std::pow(static_cast<double>(beta), static_cast<double>(step)));
}

void SetMoments(const OptimizerSpec& spec, const UpdateState& state,
                absl::Span<float* const> states,
                const OptimizerStepOptions& options, MomentArgs& args) {
  args.state = state;
  args.m = states[0];
  args.v = states[1];
  args.lr = options.lr;
  args.beta1 =
      options.beta1 < 0 ? static_cast<float>(spec.beta1) : options.beta1;
  args.beta2 = static_cast<float>(spec.beta2);
  args.eps = static_cast<float>(spec.eps);
  args.bias_correction1 = BiasCorrection(spec, args.beta1, options.step);
  args.bias_correction2 = BiasCorrection(spec, args.beta2, options.step);
}

void AdamStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
              const UpdateState& state, absl::Span<float* const> states,
              const OptimizerStepOptions& options) {
  AdamWArgs args;
  SetMoments(spec, state, states, options, args);
  args.adam_w = spec.kind == OptimizerKind::kAdamW || spec.decoupled_decay;
  ops.AdamW(stream, args);
}

void SgdStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
             const UpdateState& state, absl::Span<float* const> states,
             const OptimizerStepOptions& options) {
  SgdArgs args;
  args.state = state;
  args.momentum_buffer = states.empty() ? nullptr : states[0];
  args.lr = options.lr;
  args.momentum =
      options.beta1 < 0 ? static_cast<float>(spec.momentum) : options.beta1;
  args.dampening = static_cast<float>(spec.dampening);
  args.nesterov = spec.nesterov;
  args.first_step = options.step == 1;
  ops.Sgd(stream, args);
}

LambArgs MakeLambArgs(const OptimizerSpec& spec, const UpdateState& state,
                      absl::Span<float* const> states,
                      const OptimizerStepOptions& options,
                      const TensorNorms& norms) {
  LambArgs args;
  SetMoments(spec, state, states, options, args);
  args.parts = norms.parts;
  args.norms = norms.sums;
  args.min_coeff = static_cast<float>(spec.min_coeff);
  args.max_coeff = static_cast<float>(spec.max_coeff);
  return args;
}

}  // namespace

absl::Span<const char* const> OptimizerSpec::StateNames() const {
  static constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq"};
  static constexpr const char* kMomentum[] = {"momentum_buffer"};
  if (kind != OptimizerKind::kSgd) return kMoments;
  if (momentum != 0) return kMomentum;
  return {};
}

void OptimizerMoments(Ops& ops, Stream& stream, const OptimizerSpec& spec,
                      const UpdateState& state, absl::Span<float* const> states,
                      const OptimizerStepOptions& options,
                      const TensorNorms& norms) {
  ZERO_CHECK(spec.needs_tensor_norms());
  ZERO_CHECK_GE(options.step, 1);
  ops.LambMoments(stream, MakeLambArgs(spec, state, states, options, norms));
}

void OptimizerStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
                   const UpdateState& state, absl::Span<float* const> states,
                   const OptimizerStepOptions& options,
                   const TensorNorms& norms) {
  ZERO_CHECK_EQ(static_cast<int>(states.size()), spec.StateFloatsPerElement());
  ZERO_CHECK_GE(options.step, 1);
  switch (spec.kind) {
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam:
      return AdamStep(ops, stream, spec, state, states, options);
    case OptimizerKind::kSgd:
      return SgdStep(ops, stream, spec, state, states, options);
    case OptimizerKind::kLamb:
      return ops.LambApply(stream,
                           MakeLambArgs(spec, state, states, options, norms));
  }
}

}  // namespace zero
