#include "kernels/check.h"
#include "kernels/cuda/cuda_ops.h"

namespace zero::cuda {

size_t CudaOps::LinearWorkspaceBytes(const LinearArgs&) const { return 0; }
void CudaOps::Linear(Stream&, const LinearArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }
size_t CudaOps::LinearBackwardInputWorkspaceBytes( const LinearBackwardInputArgs&) const { return 0; }
void CudaOps::LinearBackwardInput(Stream&, const LinearBackwardInputArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }
size_t CudaOps::LinearBackwardWeightWorkspaceBytes( const LinearBackwardWeightArgs&) const { return 0; }
void CudaOps::LinearBackwardWeight(Stream&, const LinearBackwardWeightArgs&, Workspace) { ZERO_CHECK(false) << "not written yet"; }

}  // namespace zero::cuda
