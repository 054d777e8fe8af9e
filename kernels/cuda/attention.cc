#include <algorithm>

#include "kernels/cuda/attention_tiles.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/workspace.h"

// cuDNN computes attention where it takes the call, else our own kernel. The
// workspace is enough for either: which of them runs may depend on the
// operands' alignment.
namespace zero::cuda {

size_t CudaOps::AttentionForwardWorkspaceBytes(
    const AttentionForwardArgs& args) const {
  return attention_->WorkspaceBytes(CallOf(args)).value_or(0);
}

void CudaOps::AttentionForward(Stream& stream, const AttentionForwardArgs& args,
                               Workspace workspace) {
  if (attention_->Run(HandleOf(stream), CallOf(args), workspace)) return;
  TiledAttentionForward(HandleOf(stream), args);
}

size_t CudaOps::AttentionBackwardWorkspaceBytes(
    const AttentionBackwardArgs& args) const {
  return std::max(attention_->WorkspaceBytes(CallOf(args)).value_or(0),
                  TiledAttentionBackwardBytes(args.shape));
}

void CudaOps::AttentionBackward(Stream& stream,
                                const AttentionBackwardArgs& args,
                                Workspace workspace) {
  if (attention_->Run(HandleOf(stream), CallOf(args), workspace)) return;
  TiledAttentionBackward(HandleOf(stream), args, workspace);
}

}  // namespace zero::cuda
