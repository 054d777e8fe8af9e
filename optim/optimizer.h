// Update rules as values: the kind, its hyperparameters, and one call that
// performs it over a flat span through the fused kernels; for a rule that needs
// norms of whole tensors, an earlier call measures each rank's part.
//
// The state is separate flat fp32 arrays, owned by the caller, one per
// StateFloatsPerElement, each as long as the parameters: (m, v) for Adam and
// LAMB, (momentum buffer) for SGD. Zeroed arrays are the initial state.
//
// To add an optimizer: a kind here, a fused kernel in kernels/ops.h, a case in
// optimizer.cc, a test against the formula in tests/optim.
#ifndef ZERO_OPTIM_OPTIMIZER_H_
#define ZERO_OPTIM_OPTIMIZER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/ops.h"

namespace zero {

enum class OptimizerKind { kAdamW, kAdam, kSgd, kLamb };

// Hyperparameters that are constant over a run. weight_decay reaches the
// kernels through UpdateRange, so ranges may differ.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  bool bias_correction = true;
  bool decoupled_decay = true;  // false (Adam): decay is added to the gradient
  double momentum = 0;          // SGD
  double dampening = 0;
  bool nesterov = false;
  double max_coeff = 10.0;  // LAMB: limits of |param| / |update|
  double min_coeff = 0.01;

  // The names of the arrays, as in torch.optim; one fp32 of each per parameter
  // element.
  absl::Span<const char* const> StateNames() const;
  int StateFloatsPerElement() const {
    return static_cast<int>(StateNames().size());
  }

  // LAMB: OptimizerMoments comes before OptimizerStep, and both take norms.
  bool needs_tensor_norms() const { return kind == OptimizerKind::kLamb; }

  bool operator==(const OptimizerSpec&) const = default;
};

// The values that change from step to step.
struct OptimizerStepOptions {
  float lr = 0;
  float beta1 = -1;  // < 0: the spec's (OneCycle cycles it); SGD: momentum
  int64_t step = 1;  // from 1; skipped steps do not count
};

// Squares of tensors in parts; see LambArgs.
struct TensorNorms {
  absl::Span<const TensorPart> parts;  // of every range
  double* sums = nullptr;              // two of every part
};

// If needs_tensor_norms: updates the moments and adds each range's squares to
// the sums of its tensor part, which must start as zeros. Before OptimizerStep
// the sums of all parts of a tensor must be collected from their ranks.
void OptimizerMoments(Ops& ops, Stream& stream, const OptimizerSpec& spec,
                      const UpdateState& state, absl::Span<float* const> states,
                      const OptimizerStepOptions& options,
                      const TensorNorms& norms);

// One step over a flat span. `states` are the arrays above, sliced alike.
// Bias corrections are 1 - beta^step in double, of beta as in the kernels
// (rounded to fp32), so the moments' weights and the corrections agree. `norms`
// only if the spec needs_tensor_norms.
void OptimizerStep(Ops& ops, Stream& stream, const OptimizerSpec& spec,
                   const UpdateState& state, absl::Span<float* const> states,
                   const OptimizerStepOptions& options,
                   const TensorNorms& norms = {});

}  // namespace zero

#endif  // ZERO_OPTIM_OPTIMIZER_H_
