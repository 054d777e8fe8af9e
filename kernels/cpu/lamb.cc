#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/optimizer_ranges.h"
#include "kernels/cpu/reduce-inl.h"
#include "kernels/cpu/rounding-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

struct Constants : MomentConstants {
  Constants(const LambArgs& args, float decay)
      : MomentConstants(args),
        weight_decay(hn::Set(df, decay)),
        m_scale(hn::Set(
            df, static_cast<float>(
                    1.0 / static_cast<double>(args.bias_correction1)))) {}

  VF weight_decay, m_scale;
};

// Both passes compute it: the same bits.
HWY_INLINE VF UpdateElement(const Constants& c, VF p, VF m, VF v) {
  const VF direction = hn::Div(hn::Mul(m, c.m_scale), c.Denominator(v));
  return Fma(c.weight_decay, p, direction);
}

// Updates m and v of [begin, end); p[i - begin] and update[i - begin] are those
// of element i.
template <class G, class M>
void MomentSpan(const LambArgs& args, const Constants& c, const M& masters,
                int64_t begin, int64_t end, float* HWY_RESTRICT p_,
                float* HWY_RESTRICT update) {
  const G* grad = static_cast<const G*>(args.state.grad.data);
  ForEachVector(begin, end,
                [&, m_ = args.m, v_ = args.v](auto at) ZERO_CPU_BODY {
                  const VF g = hn::Mul(at.Load(grad), c.grad_scale);
                  const auto [m, v] = c.Follow(at, g, m_, v_);
                  const VF p = masters.Load(at);
                  at.Store(p, p_ - begin);
                  at.Store(UpdateElement(c, p, m, v), update - begin);
                });
}

// Sums squares of p and of the update into squares[0] and [1] on the way, so
// that the update is never stored.
void MomentRun(const LambArgs& args, float weight_decay, int64_t begin,
               int64_t end, double* squares) {
  constexpr int64_t kChunk = 16 * kSquareBlock;  // stays in the L1 cache
  HWY_ALIGN float p[kChunk], update[kChunk];
  const Constants c(args, weight_decay);
  squares[0] = squares[1] = 0;
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t stop = std::min(end, i + kChunk);
    ZERO_CPU_WITH_FLOAT_TYPE(args.state.grad.dtype, G, {
      if (args.state.splits_master()) {
        MomentSpan<G>(args, c, SplitMasters(args.state), i, stop, p, update);
      } else {
        MomentSpan<G>(args, c, Masters(args.state), i, stop, p, update);
      }
    });
    squares[0] = AddSquares(squares[0], p, 0, stop - i);
    squares[1] = AddSquares(squares[1], update, 0, stop - i);
  }
}

// p -= step * update, with step = lr * trust ratio.
void ApplyRange(const LambArgs& args, float weight_decay, float step,
                int64_t begin, int64_t end) {
  const Constants c(args, weight_decay);
  const VF scale = hn::Set(df, step);
  const auto update = [&c, scale, m = args.m, v = args.v](auto at,
                                                          VF p) ZERO_CPU_BODY {
    return NegFma(scale, UpdateElement(c, p, at.Load(m), at.Load(v)), p);
  };
  UpdateMasters(args.state, begin, end, update);
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(MomentRun);
HWY_EXPORT(ApplyRange);

namespace {

// A run of elements of one range, and the sums of its squares.
struct Run {
  size_t range;
  int64_t begin, end;
  int64_t passed;     // elements of the runs before it
  double squares[2];  // of p, of the update
};

// Runs whose sums are on the stack at a time: 8 million elements.
constexpr size_t kRunsAtATime = 512;

// The next runs after element `begin` of range `range`; advances both.
size_t NextRuns(absl::Span<const UpdateRange> ranges, size_t* range,
                int64_t* begin, Run* runs) {
  size_t count = 0;
  int64_t passed = 0;
  while (count < kRunsAtATime && *range < ranges.size()) {
    const int64_t first = ranges[*range].begin + *begin;
    const int64_t end = std::min(first + kRunElements, ranges[*range].end);
    if (first < end) {
      runs[count++] = {*range, first, end, passed, {0, 0}};
      passed += end - first;
      *begin += kRunElements;
    } else {
      ++*range;
      *begin = 0;
    }
  }
  return count;
}

}  // namespace

void CpuOps::LambMoments(Stream&, const LambArgs& args) {
  if (SkipsUpdate(args.state)) return;
  CheckUpdateState("LambMoments", args.state);
  const auto ranges = args.state.ranges;
  ZERO_CHECK_EQ(args.parts.size(), ranges.size());
  Run runs[kRunsAtATime];
  size_t next_range = 0;
  int64_t next_begin = 0;
  size_t range = 0;  // of which sums are being formed
  double sums[2] = {0, 0};
  const auto finish_range = [&] {
    for (int k = 0; k < 2; ++k) {
      args.norms[2 * args.parts[range].own + k] += std::exchange(sums[k], 0);
    }
  };
  while (const size_t count =
             NextRuns(ranges, &next_range, &next_begin, runs)) {
    const Run& last = runs[count - 1];
    ParallelRanges(num_threads_, last.passed + (last.end - last.begin),
                   kElementGrain, [&](int64_t begin, int64_t end) {
                     for (size_t i = 0; i < count; ++i) {
                       Run& run = runs[i];
                       if (run.passed < begin || run.passed >= end) continue;
                       const UpdateRange& of = ranges[run.range];
                       HWY_DYNAMIC_DISPATCH(MomentRun)
                       (ArgsOf(args, of), of.weight_decay, run.begin, run.end,
                        run.squares);
                     }
                   });
    for (size_t i = 0; i < count; ++i) {
      if (runs[i].range != range) finish_range();
      range = runs[i].range;
      for (int k = 0; k < 2; ++k) sums[k] += runs[i].squares[k];
    }
  }
  if (range < ranges.size()) finish_range();
}

namespace {

double TrustRatio(const LambArgs& args, const TensorPart& part) {
  double p = 0, update = 0;
  for (int64_t k = part.begin; k < part.end; ++k) {
    p += args.norms[2 * k];
    update += args.norms[2 * k + 1];
  }
  if (p == 0 || update == 0) return 1;
  return std::clamp(std::sqrt(p) / std::sqrt(update),
                    static_cast<double>(args.min_coeff),
                    static_cast<double>(args.max_coeff));
}

}  // namespace

void CpuOps::LambApply(Stream&, const LambArgs& args) {
  ZERO_CHECK_EQ(args.parts.size(), args.state.ranges.size());
  UpdateRanges(
      "LambApply", team(), args,
      [&](const LambArgs& own, size_t range, int64_t begin, int64_t end) {
        const double step = args.lr * TrustRatio(args, args.parts[range]);
        HWY_DYNAMIC_DISPATCH(ApplyRange)
        (own, args.state.ranges[range].weight_decay, static_cast<float>(step),
         begin, end);
      });
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
