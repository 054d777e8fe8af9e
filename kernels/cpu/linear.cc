#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/gelu.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"

namespace zero::cpu {
namespace {

// With an activation the product goes to pre_act (or, unwanted, to y) and the
// activation reads it as it is stored, so that training, recompute and
// inference see the same rounded values.
Product ForwardProduct(const LinearArgs& args) {
  Product p;
  p.a = args.x;
  p.b = args.w;
  p.b_transposed = true;
  p.bias = args.bias;
  if (args.act == Gelu::kNone) {
    p.c = args.y;
    p.residual = args.residual;
  } else {
    p.c = args.pre_act.data != nullptr ? args.pre_act : args.y;
  }
  return p;
}

Product InputProduct(const LinearBackwardInputArgs& args) {
  Product p;
  p.a = args.dy;
  p.b = args.w;
  p.c = args.dx;
  p.accumulate = args.accumulate;
  return p;
}

Product WeightProduct(const LinearBackwardWeightArgs& args) {
  Product p;
  p.a = args.dy;
  p.a_transposed = true;
  p.b = args.x;
  p.c = args.dw;
  p.accumulate = args.accumulate_dw;
  return p;
}

const void* Row(const ConstMatrix& x, int64_t row) {
  return ElementAt(x.data, x.dtype, row * x.ld);
}
void* Row(const Matrix& x, int64_t row) {
  return ElementAt(x.data, x.dtype, row * x.ld);
}

size_t BiasSumBytes(const LinearBackwardWeightArgs& args) {
  if (args.dbias.data == nullptr) return 0;
  const size_t bytes = static_cast<size_t>(args.dbias.size) * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

}  // namespace

size_t CpuOps::LinearWorkspaceBytes(const LinearArgs& args) const {
  return matmul_->WorkspaceBytes(ForwardProduct(args));
}

void CpuOps::Linear(Stream&, const LinearArgs& args, Workspace workspace) {
  const Product p = ForwardProduct(args);
  matmul_->Run(p, workspace);
  if (args.act == Gelu::kNone) return;
  const Matrix& y = args.y;
  ParallelRanges(
      num_threads_, y.rows, RowGrain(y.cols), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          GeluForwardRange(args.act, y.dtype, Row(p.c, i), Row(y, i), 0,
                           y.cols);
          if (args.residual.data != nullptr) {
            AddToRow(y.dtype, Row(args.residual, i), Row(y, i), y.cols);
          }
        }
      });
}

size_t CpuOps::LinearBackwardInputWorkspaceBytes(
    const LinearBackwardInputArgs& args) const {
  return matmul_->WorkspaceBytes(InputProduct(args));
}

void CpuOps::LinearBackwardInput(Stream&, const LinearBackwardInputArgs& args,
                                 Workspace workspace) {
  matmul_->Run(InputProduct(args), workspace);
  if (args.act == Gelu::kNone) return;
  const Matrix& dx = args.dx;
  ParallelRanges(num_threads_, dx.rows, RowGrain(dx.cols),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     GeluBackwardRange(args.act, dx.dtype, Row(args.pre_act, i),
                                       Row(dx, i), Row(dx, i), 0, dx.cols);
                   }
                 });
}

size_t CpuOps::LinearBackwardWeightWorkspaceBytes(
    const LinearBackwardWeightArgs& args) const {
  const size_t product = args.dw.data == nullptr
                             ? 0
                             : matmul_->WorkspaceBytes(WeightProduct(args));
  return std::max(product, BiasSumBytes(args));
}

void CpuOps::LinearBackwardWeight(Stream&, const LinearBackwardWeightArgs& args,
                                  Workspace workspace) {
  if (args.dw.data != nullptr) matmul_->Run(WeightProduct(args), workspace);
  if (args.dbias.data == nullptr) return;
  float* const sums = static_cast<float*>(workspace.data);
  // 64 columns: whole cache lines of every dtype.
  ParallelRanges(
      num_threads_, args.dy.cols, 64, [&](int64_t begin, int64_t end) {
        ColumnSums(args.dy.dtype, ElementAt(args.dy.data, args.dy.dtype, begin),
                   args.dy.rows, end - begin, args.dy.ld, sums + begin);
        RoundRowArgs out;
        out.dtype = args.dbias.dtype;
        out.sum = sums + begin;
        out.dst = ElementAt(args.dbias.data, args.dbias.dtype, begin);
        out.accumulate = args.accumulate_dbias;
        out.n = end - begin;
        RoundRow(out);
      });
}

}  // namespace zero::cpu
