// How the fused optimizers walk their ranges: threads split the elements, not
// the ranges, so that one large tensor among many small ones is shared too.
#ifndef ZERO_KERNELS_CPU_OPTIMIZER_RANGES_H_
#define ZERO_KERNELS_CPU_OPTIMIZER_RANGES_H_

#include <algorithm>

#include "kernels/cpu/parallel.h"
#include "kernels/op_checks.h"

namespace zero::cpu {

// An optimizer's `args` for the elements of one of its ranges.
template <class Args>
Args ArgsOf(const Args& args, const UpdateRange& range) {
  Args own = args;
  UpdateState& state = own.state;
  state.first_element += range.shift;
  Vector& param = state.param;
  ConstVector& grad = state.grad;
  if (state.whole_param) {
    param.data = ElementAt(param.data, param.dtype, range.shift);
  }
  if (state.whole_grad) {
    grad.data = ElementAt(grad.data, grad.dtype, range.shift);
  }
  return own;
}

// True if this step must change nothing.
inline bool SkipsUpdate(const UpdateState& state) {
  return state.found_non_finite != nullptr && *state.found_non_finite != 0;
}

inline float GradScale(const UpdateState& state) {
  return state.grad_scale == nullptr ? 1.0f : *state.grad_scale;
}

// Calls update(args, i, begin, end) for pieces that together cover every range
// i once; `args` are those of ArgsOf for range i. The updates are element-wise,
// so where ranges are cut changes no bit.
template <class Args, class Update>
void UpdateRanges(const char* op, const Team& team, const Args& args,
                  const Update& update) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState(op, args.state);
  const auto ranges = args.state.ranges;
  int64_t total = 0;
  for (const UpdateRange& range : ranges) total += range.end - range.begin;
  ParallelRanges(team, total, kElementGrain, [&](int64_t begin, int64_t end) {
    int64_t passed = 0;  // elements of the ranges before this one
    for (size_t i = 0; i < ranges.size() && passed < end; ++i) {
      const int64_t first = ranges[i].begin;
      const int64_t size = ranges[i].end - first;
      const int64_t from = std::max(begin - passed, int64_t{0});
      const int64_t to = std::min(end - passed, size);
      if (from < to) {
        update(ArgsOf(args, ranges[i]), i, first + from, first + to);
      }
      passed += size;
    }
  });
}

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_OPTIMIZER_RANGES_H_
