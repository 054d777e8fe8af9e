#include "kernels/cuda/cuda_ops.h"

#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/matmul.h"

namespace zero::cuda {

CudaOps::CudaOps(int num_sms, const CudaOptions& options)
    : options_(options),
      num_sms_(num_sms),
      matmul_(std::make_unique<MatmulPlans>(*this, options)),
      attention_(
          std::make_unique<AttentionPlans>(options.deterministic_attention)) {}

CudaOps::~CudaOps() = default;

}  // namespace zero::cuda
