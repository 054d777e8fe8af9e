#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/workspace.h"

namespace zero::cuda {
namespace {

// cuBLASLt's GELU is the tanh form, approximated to what 16 bits can show.
bool HasFusedForm(Gelu act, DType dtype) {
  return act == Gelu::kTanh && dtype != DType::kF32;
}

Product FusedForward(const LinearArgs& args) {
  Product p{ProductOf(args)};
  p.c = args.y;
  p.epilogue = Epilogue::kGelu;
  p.gelu_input = args.pre_act;
  return p;
}

Product FusedInput(const LinearBackwardInputArgs& args) {
  const ConstMatrix& x = args.pre_act;
  return {ProductOf(args),
          Epilogue::kGeluGradient,
          {const_cast<void*>(x.data), x.dtype, x.rows, x.cols, x.ld}};
}

Workspace After(const Workspace& workspace, size_t bytes) {
  return {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
}

// Runs the product with the bias gradient in its epilogue and returns true, or
// does nothing. The epilogue overwrites, so a gradient that must be accumulated
// goes to the start of the workspace first. A 16-bit one would then be rounded
// twice and is left to the caller.
bool SumWithProduct(Ops& ops, MatmulPlans& plans, Stream& stream,
                    const LinearBackwardWeightArgs& args, Workspace workspace) {
  const bool accumulate = args.accumulate_dbias;
  if (args.dbias.data == nullptr || args.dbias.dtype != args.dw.dtype ||
      (accumulate && args.dbias.dtype != DType::kF32)) {
    return false;
  }
  const Workspace rest = After(workspace, BiasBytes(args));
  Product p{ProductOf(args)};
  p.a_sums = args.dbias;
  if (accumulate) p.a_sums.data = workspace.data;
  const auto separately = [&] {
    ColumnSums(HandleOf(stream), args.dy, p.a_sums, false, rest.data);
  };
  if (!plans.RunIfRowSumsPay(stream, p, rest, separately)) return false;
  if (accumulate) ops.Add(stream, {args.dbias, p.a_sums, args.dbias});
  return true;
}

}  // namespace

void CudaOps::Linear(Stream& stream, const LinearArgs& args,
                     Workspace workspace) {
  if (args.y.rows == 0 || args.y.cols == 0) return;
  const bool may_fuse =
      HasFusedForm(args.act, args.y.dtype) && args.residual.data == nullptr;
  if (may_fuse && matmul_->TryRun(stream, FusedForward(args), workspace)) {
    return;
  }
  matmul_->Run(stream, {ProductOf(args)}, workspace);
  Activate(*this, stream, args);
}

void CudaOps::LinearBackwardInput(Stream& stream,
                                  const LinearBackwardInputArgs& args,
                                  Workspace workspace) {
  if (args.dx.rows == 0 || args.dx.cols == 0) return;
  if (HasFusedForm(args.act, args.dx.dtype) &&
      matmul_->TryRun(stream, FusedInput(args), workspace)) {
    return;
  }
  matmul_->Run(stream, {ProductOf(args)}, workspace);
  Activate(*this, stream, args);
}

void CudaOps::LinearBackwardWeight(Stream& stream,
                                   const LinearBackwardWeightArgs& args,
                                   Workspace workspace) {
  Workspace rest = workspace;
  if (args.dbias.data != nullptr) rest = After(workspace, BiasBytes(args));
  if (args.dw.data != nullptr) {
    if (args.dy.rows == 0) {
      if (!args.accumulate_dw) Zero(*this, stream, args.dw);
    } else {
      if (SumWithProduct(*this, *matmul_, stream, args, workspace)) return;
      matmul_->Run(stream, {ProductOf(args)}, rest);
    }
  }
  if (args.dbias.data != nullptr) {
    ColumnSums(HandleOf(stream), args.dy, args.dbias, args.accumulate_dbias,
               rest.data);
  }
}

}  // namespace zero::cuda
