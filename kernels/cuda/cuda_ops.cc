#include "kernels/cuda/cuda_ops.h"

namespace zero::cuda {

CudaOps::CudaOps(int num_sms, const CudaOptions& options)
    : options_(options), num_sms_(num_sms) {}
CudaOps::~CudaOps() = default;

}  // namespace zero::cuda
