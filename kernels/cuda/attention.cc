#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"

namespace zero::cuda {

size_t CudaOps::AttentionForwardWorkspaceBytes( const AttentionForwardArgs&) const { return 0; }
void CudaOps::AttentionForward(Stream&, const AttentionForwardArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }
size_t CudaOps::AttentionBackwardWorkspaceBytes( const AttentionBackwardArgs&) const { return 0; }
void CudaOps::AttentionBackward(Stream&, const AttentionBackwardArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }

}  // namespace zero::cuda
