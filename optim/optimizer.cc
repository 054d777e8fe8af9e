#include "optim/optimizer.h"

#include <cmath>

#include "kernels/check.h"

namespace zero {
namespace {

// LAMB's norms follow its update, at the next multiple of 64 bytes.
size_t NormsOffset(int64_t num_elems) {
  return (static_cast<size_t>(num_elems) * sizeof(float) + 63) / 64 * 64;
}

float BiasCorrection(const OptimizerSpec& spec, float beta, int64_t step) {
  if (!spec.bias_correction) return 1;
  return static_cast<float>(
      1 - std::pow(static_cast<double>(beta), static_cast<double>(step)));
}

struct Betas {
  Betas(const OptimizerSpec& spec, const OptimizerStepOptions& options)
      : beta1(options.beta1 < 0 ? static_cast<float>(spec.beta1)
                                : options.beta1),
        beta2(static_cast<float>(spec.beta2)),
        correction1(BiasCorrection(spec, beta1, options.step)),
        correction2(BiasCorrection(spec, beta2, options.step)) {}
  float beta1, beta2, correction1, correction2;
};

void AdamStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
              const UpdateState& state, absl::Span<float* const> states,
              const OptimizerStepOptions& options) {
  const Betas betas(spec, options);
  AdamWArgs args;
  args.state = state;
  args.m = states[0];
  args.v = states[1];
  args.lr = options.lr;
  args.beta1 = betas.beta1;
  args.beta2 = betas.beta2;
  args.eps = static_cast<float>(spec.eps);
  args.bias_correction1 = betas.correction1;
  args.bias_correction2 = betas.correction2;
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

void LambStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
              const UpdateState& state, absl::Span<float* const> states,
              const OptimizerStepOptions& options, Workspace scratch) {
  const int64_t num_norms = 2 * static_cast<int64_t>(state.ranges.size());
  float* update = static_cast<float*>(scratch.data);
  double* norms = reinterpret_cast<double*>(static_cast<char*>(scratch.data) +
                                            NormsOffset(state.param.size));
  ops.Fill(stream, {{norms, DType::kF64, num_norms}, 0.0f});

  const Betas betas(spec, options);
  LambMomentsArgs moments;
  moments.state = state;
  moments.m = states[0];
  moments.v = states[1];
  moments.update = update;
  moments.norms = norms;
  moments.beta1 = betas.beta1;
  moments.beta2 = betas.beta2;
  moments.eps = static_cast<float>(spec.eps);
  moments.bias_correction1 = betas.correction1;
  moments.bias_correction2 = betas.correction2;
  ops.LambMoments(stream, moments);

  LambApplyArgs apply;
  apply.state = state;
  apply.update = update;
  apply.norms = norms;
  apply.lr = options.lr;
  apply.min_coeff = static_cast<float>(spec.min_coeff);
  apply.max_coeff = static_cast<float>(spec.max_coeff);
  ops.LambApply(stream, apply);
}

}  // namespace

int OptimizerSpec::StateFloatsPerElement() const {
  if (kind == OptimizerKind::kSgd) return momentum != 0 ? 1 : 0;
  return 2;
}

size_t OptimizerSpec::ScratchBytes(int64_t num_elems,
                                   int64_t num_ranges) const {
  if (kind != OptimizerKind::kLamb) return 0;
  return NormsOffset(num_elems) +
         2 * static_cast<size_t>(num_ranges) * sizeof(double);
}

void OptimizerStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
                   const UpdateState& state, absl::Span<float* const> states,
                   const OptimizerStepOptions& options, Workspace scratch) {
  ZERO_CHECK_EQ(static_cast<int>(states.size()), spec.StateFloatsPerElement());
  ZERO_CHECK_GE(options.step, 1);
  ZERO_CHECK_GE(scratch.bytes,
                spec.ScratchBytes(state.param.size, state.ranges.size()));
  switch (spec.kind) {
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam:
      return AdamStep(ops, stream, spec, state, states, options);
    case OptimizerKind::kSgd:
      return SgdStep(ops, stream, spec, state, states, options);
    case OptimizerKind::kLamb:
      return LambStep(ops, stream, spec, state, states, options, scratch);
  }
}

}  // namespace zero
