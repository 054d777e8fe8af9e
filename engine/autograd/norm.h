// Normalization of strided rows with its weights, shared by Norm, AddNorm and
// the q/k norm inside SelfAttention.
#ifndef ZERO_ENGINE_AUTOGRAD_NORM_H_
#define ZERO_ENGINE_AUTOGRAD_NORM_H_

#include "engine/autograd/ops.h"

namespace zero {

// Fills in kind, weight, bias and eps of `args` from `norm` and runs the
// kernel.
void NormRows(Context& ctx, const NormWeights& norm, NormForwardArgs args);

// Fills in the sinks of `args` (null: frozen) and runs the kernel.
void NormRowsBackward(Context& ctx, GradSink* weight_sink, GradSink* bias_sink,
                      NormBackwardArgs args);

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_NORM_H_
