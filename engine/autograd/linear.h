// The two halves of a linear layer's backward, shared by Linear and GeluMlp.
#ifndef ZERO_ENGINE_AUTOGRAD_LINEAR_H_
#define ZERO_ENGINE_AUTOGRAD_LINEAR_H_

#include "engine/autograd/context.h"

namespace zero {

// Checks x [M, C], w [N, C], bias [N], residual [M, N], then
// y = act(x w^T + bias) + residual with y taken from the arena. With act,
// `pre_act` (when not null) receives the input of the activation.
Tensor LinearForward(Context& ctx, const Tensor& x, const Tensor& w,
                     const Weight* bias, const Tensor* residual, Gelu act,
                     Tensor* pre_act);

// dx [M, C] = dy [M, N] w, times gelu'(pre_act) when act is set.
Tensor LinearInputGrad(Context& ctx, const Tensor& dy, const Tensor& w,
                       Gelu act = Gelu::kNone, const Tensor& pre_act = {});

// Writes dy^T x and the column sums of dy into the sinks (null: frozen).
void LinearWeightGrad(Context& ctx, const Tensor& dy, const SavedVar& x,
                      GradSink* w_sink, GradSink* bias_sink);

}  // namespace zero

#endif  // ZERO_ENGINE_AUTOGRAD_LINEAR_H_
