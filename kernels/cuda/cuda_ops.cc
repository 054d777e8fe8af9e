#include "kernels/cuda/cuda_ops.h"

#include "kernels/cuda/cudnn_attention.h"
#include "kernels/cuda/matmul.h"

namespace zero::cuda {

CudaOps::CudaOps(const CudaOptions& options)
    : options_(options),
      matmul_(std::make_unique<MatmulPlans>(*this, options)),
      attention_(
          std::make_unique<AttentionPlans>(options.deterministic_attention)),
      sizes_(options, matmul_->AccumulatesIntoF32()) {}

CudaOps::~CudaOps() = default;

// Notes that never grow come first.
std::vector<std::string> CudaOps::notes() const {
  std::vector<std::string> notes;
  if (!matmul_->AccumulatesIntoF32()) {
    notes.push_back(
        "a separate kernel adds up weight gradients, with one more pass and "
        "one more buffer: this cuBLASLt does not accumulate 16-bit products "
        "into fp32; a newer libcublasLt.so may");
  }
  const std::vector<std::string> more = attention_->notes();
  notes.insert(notes.end(), more.begin(), more.end());
  return notes;
}

// The sizes of attention are in attention.cc, which asks cuDNN.
#define ZERO_SIZE(Name, Args)                                    \
  size_t CudaOps::Name##WorkspaceBytes(const Args& args) const { \
    return sizes_.Name##WorkspaceBytes(args);                    \
  }
ZERO_SIZE(Linear, LinearArgs)
ZERO_SIZE(LinearBackwardInput, LinearBackwardInputArgs)
ZERO_SIZE(LinearBackwardWeight, LinearBackwardWeightArgs)
ZERO_SIZE(LinearCrossEntropy, LinearCrossEntropyArgs)
ZERO_SIZE(NormBackward, NormBackwardArgs)
ZERO_SIZE(EmbeddingBackward, EmbeddingBackwardArgs)
#undef ZERO_SIZE

size_t CudaOps::LossLogitsBytes(const LinearCrossEntropyArgs& args) const {
  return sizes_.LossLogitsBytes(args);
}

}  // namespace zero::cuda
