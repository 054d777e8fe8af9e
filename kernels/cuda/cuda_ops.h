// The GPU's kernels: cuBLASLt for matrix products, cuDNN for 16-bit attention,
// our own for the rest. Every op is in the file of its name; see
// kernels/ops.h for what each computes.
//
// Invariant: the bits of a result depend on the arguments and on CudaOptions,
// never on timing or on what ran before (no float atomics). They do not depend
// on addresses that are multiples of 16 bytes: libraries are promised that
// alignment, or an element's if an operand has less.
#ifndef ZERO_KERNELS_CUDA_CUDA_OPS_H_
#define ZERO_KERNELS_CUDA_CUDA_OPS_H_

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/workspace.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace zero::cuda {

class MatmulPlans;     // cuBLASLt handle and one plan per shape (matmul.h)
class AttentionPlans;  // cuDNN graphs, one per shape (cudnn_attention.h)

class CudaOps final : public Ops {
 public:
  // REQUIRES: the device is current on the calling thread.
  explicit CudaOps(const CudaOptions& options);
  ~CudaOps() override;

  const CudaOptions& options() const { return options_; }

  // As Device::notes(): products that cuBLASLt does not accumulate, and
  // attention that runs without tensor cores.
  std::vector<std::string> notes() const;

  ZERO_OVERRIDE_ALL_OPS

 private:
  CudaOptions options_;
  std::unique_ptr<MatmulPlans> matmul_;
  std::unique_ptr<AttentionPlans> attention_;
  CudaSizes sizes_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_CUDA_OPS_H_
