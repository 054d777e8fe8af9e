#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd-inl.h"
#include "kernels/op_checks.h"

HWY_BEFORE_NAMESPACE();
namespace zero::cpu::HWY_NAMESPACE {
namespace {

template <class T, class Data>
HWY_INLINE ConstAs<T, Data>* RowOf(const RowsView<Data>& rows, int64_t row) {
  return static_cast<ConstAs<T, Data>*>(rows.data) +
         row / rows.inner * rows.stride + row % rows.inner * rows.width;
}

// The sum over the row, in four vectors of lanes; add(sum, x) adds a vector.
template <class T, class Add>
HWY_INLINE float RowSum(const T* x, int64_t width, const Add& add) {
  const int64_t lanes = NumLanes();
  VF s0 = hn::Zero(df), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * lanes <= width; i += 4 * lanes) {
    s0 = add(s0, Load(x + i));
    s1 = add(s1, Load(x + i + lanes));
    s2 = add(s2, Load(x + i + 2 * lanes));
    s3 = add(s3, Load(x + i + 3 * lanes));
  }
  ForEachVector(i, width, [&](auto at) ZERO_CPU_BODY {
    s0 = at.Keep(add(s0, at.Load(x)), s0);
  });
  return Sum(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

template <bool kMean, class T>
void ForwardRows(const NormForwardArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.x.width;
  const float count = static_cast<float>(width);
  const T* weight = static_cast<const T*>(args.weight.data);
  const T* bias = static_cast<const T*>(args.bias.data);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = RowOf<T>(args.x, row);
    if (args.residual.data != nullptr) {
      T* sum = RowOf<T>(args.sum, row);
      // Rounded to storage: the statistics are of the values that the backward
      // pass will read.
      AddSpans(x, RowOf<T>(args.residual, row), sum, 0, width);
      x = sum;
    }
    const auto add = [](VF sum, VF v) ZERO_CPU_BODY { return hn::Add(sum, v); };
    const float mean = kMean ? RowSum(x, width, add) / count : 0.0f;
    const VF center = hn::Set(df, mean);
    const auto add_square = [&](VF sum, VF v) ZERO_CPU_BODY {
      const VF d = hn::Sub(v, center);
      return Fma(d, d, sum);
    };
    const float variance = RowSum(x, width, add_square) / count;
    const float rstd = 1.0f / std::sqrt(variance + args.eps);
    const VF factor = hn::Set(df, rstd);
    T* y = RowOf<T>(args.y, row);
    ForEachVector(0, width, [&](auto at) ZERO_CPU_BODY {
      VF v = at.Load(x);
      if constexpr (kMean) v = hn::Sub(v, center);
      v = hn::Mul(v, factor);
      const VF w = at.Load(weight);
      v = bias != nullptr ? Fma(v, w, at.Load(bias)) : hn::Mul(v, w);
      at.Store(v, y);
    });
    if (kMean && args.mean != nullptr) args.mean[row] = mean;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
  }
}

// One row of the backward pass; dweight and dbias are the fp32 partial sums of
// this block of rows (null: frozen).
template <bool kMean, class T>
HWY_INLINE void BackwardRow(const NormBackwardArgs& args, int64_t row,
                            float* dweight, float* dbias) {
  const int64_t width = args.dy.width;
  const float count = static_cast<float>(width);
  const T* dy = RowOf<T>(args.dy, row);
  const T* x = RowOf<T>(args.sum, row);
  const T* weight = static_cast<const T*>(args.weight.data);
  const VF mean = hn::Set(df, kMean ? args.mean[row] : 0.0f);
  const VF rstd = hn::Set(df, args.rstd[row]);

  VF sum_g = hn::Zero(df);   // of dy w
  VF sum_gx = hn::Zero(df);  // of dy w xhat
  ForEachVector(0, width, [&](auto at) ZERO_CPU_BODY {
    const VF grad = at.Load(dy);
    const VF xhat = hn::Mul(hn::Sub(at.Load(x), mean), rstd);
    const VF g = hn::Mul(grad, at.Load(weight));
    if constexpr (kMean) sum_g = hn::Add(sum_g, g);
    sum_gx = Fma(g, xhat, sum_gx);
    if (dweight != nullptr) {
      at.Store(Fma(grad, xhat, at.Load(dweight)), dweight);
    }
    if (dbias != nullptr) at.Store(hn::Add(grad, at.Load(dbias)), dbias);
  });
  const VF mean_g = hn::Set(df, kMean ? Sum(sum_g) / count : 0.0f);
  const VF mean_gx = hn::Set(df, Sum(sum_gx) / count);

  T* dx = RowOf<T>(args.dx, row);
  const T* dsum =
      args.dsum.data != nullptr ? RowOf<T>(args.dsum, row) : nullptr;
  ForEachVector(0, width, [&](auto at) ZERO_CPU_BODY {
    const VF xhat = hn::Mul(hn::Sub(at.Load(x), mean), rstd);
    VF g = hn::Mul(at.Load(dy), at.Load(weight));
    if constexpr (kMean) g = hn::Sub(g, mean_g);
    g = NegFma(xhat, mean_gx, g);
    const VF residual = dsum != nullptr ? at.Load(dsum) : hn::Zero(df);
    at.Store(Fma(g, rstd, residual), dx);
  });
}

// Rows [begin, end) into partial sums at `dweight` and `dbias`, zeroed first.
template <bool kMean, class T>
void BackwardRows(const NormBackwardArgs& args, int64_t begin, int64_t end,
                  float* dweight, float* dbias) {
  if (dweight != nullptr) std::fill_n(dweight, args.dy.width, 0.0f);
  if (dbias != nullptr) std::fill_n(dbias, args.dy.width, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    BackwardRow<kMean, T>(args, row, dweight, dbias);
  }
}

void NormForwardRange(const NormForwardArgs& args, int64_t begin, int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.y.dtype, T, {
    const auto run = args.kind == NormKind::kLayerNorm ? ForwardRows<true, T>
                                                       : ForwardRows<false, T>;
    run(args, begin, end);
  });
}

void NormBackwardBlock(const NormBackwardArgs& args, int64_t begin, int64_t end,
                       float* dweight, float* dbias) {
  ZERO_CPU_WITH_FLOAT_TYPE(args.dx.dtype, T, {
    const auto run = args.kind == NormKind::kLayerNorm ? BackwardRows<true, T>
                                                       : BackwardRows<false, T>;
    run(args, begin, end, dweight, dbias);
  });
}

// Columns [begin, end): out (+)= partials[0] + partials[1] + ..., in order.
template <class T>
void SumPartials(const float* partials, int64_t num_partials, int64_t width,
                 T* out, bool accumulate, int64_t begin, int64_t end) {
  ForEachVector(begin, end, [&](auto at) ZERO_CPU_BODY {
    VF sum = hn::Zero(df);
    for (int64_t k = 0; k < num_partials; ++k) {
      sum = hn::Add(sum, at.Load(partials + k * width));
    }
    if (accumulate) sum = hn::Add(sum, at.Load(out));
    at.Store(sum, out);
  });
}

void SumPartialsRange(const float* partials, int64_t num_partials,
                      const Vector& out, bool accumulate, int64_t begin,
                      int64_t end) {
  ZERO_CPU_WITH_FLOAT_TYPE(
      out.dtype, T,
      SumPartials(partials, num_partials, out.size, static_cast<T*>(out.data),
                  accumulate, begin, end));
}

}  // namespace
}  // namespace zero::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::cpu {

HWY_EXPORT(NormForwardRange);
HWY_EXPORT(NormBackwardBlock);
HWY_EXPORT(SumPartialsRange);

namespace {

// dweight and dbias are summed over fixed blocks of rows, and the blocks in
// order: a function of only the number of rows.
struct RowBlocks {
  explicit RowBlocks(int64_t num_rows)
      : rows(std::max<int64_t>(32, (num_rows + 127) / 128)),
        count((num_rows + rows - 1) / rows) {}
  int64_t rows;   // of one block
  int64_t count;  // <= 128
};

}  // namespace

void CpuOps::NormForward(Stream&, const NormForwardArgs& args) {
  ZERO_CHECK_ONE_DTYPE(args.y, args.x, args.weight, args.bias, args.residual,
                       args.sum);
  ParallelRanges(num_threads_, args.x.outer * args.x.inner,
                 RowGrain(args.x.width), HWY_DYNAMIC_DISPATCH(NormForwardRange),
                 args);
}

size_t CpuOps::NormBackwardWorkspaceBytes(const NormBackwardArgs& args) const {
  const RowBlocks blocks(args.dy.outer * args.dy.inner);
  const int64_t outputs = (args.dweight.data != nullptr ? 1 : 0) +
                          (args.dbias.data != nullptr ? 1 : 0);
  return static_cast<size_t>(blocks.count * outputs * args.dy.width) *
         sizeof(float);
}

void CpuOps::NormBackward(Stream&, const NormBackwardArgs& args,
                          Workspace workspace) {
  ZERO_CHECK_ONE_DTYPE(args.dx, args.dy, args.sum, args.weight, args.dsum);
  const int64_t width = args.dy.width;
  const int64_t num_rows = args.dy.outer * args.dy.inner;
  const RowBlocks blocks(num_rows);
  // [count, width] partial sums of dweight, then of dbias.
  float* rest = static_cast<float*>(workspace.data);
  const auto take = [&](const Vector& out) {
    return out.data == nullptr
               ? nullptr
               : std::exchange(rest, rest + blocks.count * width);
  };
  float* const dweight = take(args.dweight);
  float* const dbias = take(args.dbias);
  ParallelRanges(
      num_threads_, blocks.count, 1, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) {
          HWY_DYNAMIC_DISPATCH(NormBackwardBlock)
          (args, b * blocks.rows, std::min(num_rows, (b + 1) * blocks.rows),
           dweight == nullptr ? nullptr : dweight + b * width,
           dbias == nullptr ? nullptr : dbias + b * width);
        }
      });
  const auto reduce = [&](const float* partials, const Vector& out,
                          bool accumulate) {
    if (partials == nullptr) return;
    ParallelRanges(num_threads_, width, 256,
                   HWY_DYNAMIC_DISPATCH(SumPartialsRange), partials,
                   blocks.count, out, accumulate);
  };
  reduce(dweight, args.dweight, args.accumulate_dweight);
  reduce(dbias, args.dbias, args.accumulate_dbias);
}

}  // namespace zero::cpu
#endif  // HWY_ONCE
