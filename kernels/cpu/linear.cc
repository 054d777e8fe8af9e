#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"
#include "kernels/sizes.h"

namespace zero::cpu {

size_t CpuOps::LinearWorkspaceBytes(const LinearArgs& args) const {
  return matmul_->WorkspaceBytes(ProductOf(args));
}

void CpuOps::Linear(Stream& stream, const LinearArgs& args,
                    Workspace workspace) {
  matmul_->Run(ProductOf(args), workspace);
  Activate(*this, stream, args);
}

size_t CpuOps::LinearBackwardInputWorkspaceBytes(
    const LinearBackwardInputArgs& args) const {
  return matmul_->WorkspaceBytes(ProductOf(args));
}

void CpuOps::LinearBackwardInput(Stream& stream,
                                 const LinearBackwardInputArgs& args,
                                 Workspace workspace) {
  matmul_->Run(ProductOf(args), workspace);
  Activate(*this, stream, args);
}

size_t CpuOps::LinearBackwardWeightWorkspaceBytes(
    const LinearBackwardWeightArgs& args) const {
  const size_t product =
      args.dw.data == nullptr ? 0 : matmul_->WorkspaceBytes(ProductOf(args));
  if (args.dbias.data == nullptr) return product;
  const size_t sums = static_cast<size_t>(args.dbias.size) * sizeof(float);
  return std::max(product, RoundUp(sums, 64));
}

void CpuOps::LinearBackwardWeight(Stream&, const LinearBackwardWeightArgs& args,
                                  Workspace workspace) {
  if (args.dw.data != nullptr) matmul_->Run(ProductOf(args), workspace);
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
