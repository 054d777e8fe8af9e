#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"

namespace zero::cuda {

void CudaOps::EmbeddingForward(Stream&, const EmbeddingForwardArgs&) { ZERO_CHECK(false) << "not written yet"; }
size_t CudaOps::EmbeddingBackwardWorkspaceBytes( const EmbeddingBackwardArgs&) const { return 0; }
void CudaOps::EmbeddingBackward(Stream&, const EmbeddingBackwardArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }

}  // namespace zero::cuda
