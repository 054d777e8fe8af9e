// Matrix products for the linear layers and losses of every backend, and the
// operations after a product that has no such epilogue.
#ifndef ZERO_KERNELS_PRODUCT_H_
#define ZERO_KERNELS_PRODUCT_H_

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"
#include "kernels/runs.h"
#include "kernels/sizes.h"

namespace zero {

// c[m,n] (+)= a[m,k] b[k,n] + bias[n] + residual[m,n], sums in fp32.
// Dtypes: a and b fp32, bf16 or fp16; c that or fp32; everything else as c.
struct Product {
  ConstMatrix a;
  bool a_transposed = false;  // a is stored as [k, m]
  ConstMatrix b;
  bool b_transposed = false;  // b is stored as [n, k]
  Matrix c;
  bool accumulate = false;    // not together with a residual
  ConstVector bias = {};      // data null: none
  ConstMatrix residual = {};  // data null: none
};

// With an activation the product goes to pre_act (or to y, if pre_act is null),
// and the activation reads the stored values, so that training, recompute and
// inference see the same rounding.
inline Product ProductOf(const LinearArgs& args) {
  Product p{.a = args.x, .b = args.w, .b_transposed = true, .c = args.y};
  p.bias = args.bias;
  if (args.act == Gelu::kNone) {
    p.residual = args.residual;
  } else if (args.pre_act.data != nullptr) {
    p.c = args.pre_act;
  }
  return p;
}
inline Product ProductOf(const LinearBackwardInputArgs& args) {
  return {
      .a = args.dy, .b = args.w, .c = args.dx, .accumulate = args.accumulate};
}
inline Product ProductOf(const LinearBackwardWeightArgs& args) {
  return {.a = args.dy,
          .a_transposed = true,
          .b = args.x,
          .c = args.dw,
          .accumulate = args.accumulate_dw};
}

// Does the rest of the op after ProductOf(args).
inline void Activate(Ops& ops, Stream& stream, const LinearArgs& args) {
  if (args.act == Gelu::kNone) return;
  const ConstMatrix x = ProductOf(args).c;
  const bool with_residual = args.residual.data != nullptr;
  const Runs runs = RunsOf({x, args.y, with_residual ? args.residual : x});
  for (int64_t i = 0; i < runs.count; ++i) {
    const Vector y = RunOf(args.y, runs, i);
    ops.GeluForward(stream, {args.act, RunOf(x, runs, i), y});
    if (with_residual) ops.Add(stream, {y, RunOf(args.residual, runs, i), y});
  }
}
inline void Activate(Ops& ops, Stream& stream,
                     const LinearBackwardInputArgs& args) {
  if (args.act == Gelu::kNone) return;
  const Runs runs = RunsOf({args.dx, args.pre_act});
  for (int64_t i = 0; i < runs.count; ++i) {
    const Vector dx = RunOf(args.dx, runs, i);
    ops.GeluBackward(stream, {args.act, RunOf(args.pre_act, runs, i), dx, dx});
  }
}

// The parts of w that a loss iterates over, and whether it sums their dx in
// fp32 outside args.dx.
inline int64_t NumLossParts(const LinearCrossEntropyArgs& args) {
  return args.part_rows == 0 ? 1 : CeilDiv(args.w.rows, args.part_rows);
}
inline bool SumsDxApart(const LinearCrossEntropyArgs& args) {
  return args.dx.data != nullptr && args.dx.dtype != DType::kF32 &&
         NumLossParts(args) > 1;
}

// Logits of `rows` rows: a matrix for each part of w, its rows aligned, end to
// end.
struct LossLogits {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;

  static constexpr int64_t kAlignCols = 64;  // as part_rows
  size_t Bytes(const LinearCrossEntropyArgs& args) const {
    return static_cast<size_t>(rows * RoundUp(args.w.rows, kAlignCols)) *
           DTypeBytes(dtype);
  }
};

// Rows [row, row + rows) of a loss; their logits are from row `at` on.
struct LossChunk {
  int64_t row = 0, rows = 0, at = 0;
};

// A loss's work on one chunk with one part of w.
struct LossProducts {
  int64_t first;  // of this part's rows in the table
  int64_t words;  // of them
  Product logits, dx, dw;

  // The gradient of the logits has `grad_dtype` and replaces them, row by row.
  // `to` is dx of the chunk. Data may be null if only sizes are needed.
  LossProducts(const LinearCrossEntropyArgs& args, int64_t part,
               const LossLogits& all, DType grad_dtype, const LossChunk& chunk,
               const Matrix& to, bool accumulate_dw) {
    const int64_t begin = part * args.part_rows;
    const int64_t cols = args.part_rows == 0
                             ? args.w.rows
                             : std::min(args.part_rows, args.w.rows - begin);
    first = args.part.first + begin;
    words = std::clamp<int64_t>(args.vocab - first, 0, cols);
    const ConstMatrix x = args.x.Rows(chunk.row, chunk.rows);
    const ConstMatrix w = args.w.Rows(begin, cols);
    const Matrix own =
        Matrix{ElementAt(all.data, all.dtype, all.rows * begin), all.dtype,
               all.rows, cols, RoundUp(cols, LossLogits::kAlignCols)}
            .Rows(chunk.at, chunk.rows);
    logits = {.a = x, .b = w, .b_transposed = true, .c = own};
    Matrix grad = own;
    grad.dtype = grad_dtype;
    grad.ld *=
        static_cast<int64_t>(DTypeBytes(all.dtype) / DTypeBytes(grad_dtype));
    dx = {.a = grad,
          .b = w,
          .c = to,
          .accumulate = part + 1 < NumLossParts(args) ||
                        args.part.work == LossPart::Work::kGradients};
    dw = {.a = grad,
          .a_transposed = true,
          .b = x,
          .c = args.dw.Rows(begin, cols),
          .accumulate = accumulate_dw};
  }
};

}  // namespace zero

#endif  // ZERO_KERNELS_PRODUCT_H_
