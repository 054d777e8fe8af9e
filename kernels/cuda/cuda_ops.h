// The GPU's kernels: cuBLASLt for matrix products, cuDNN for 16-bit attention,
// our own for the rest. Every method is in the file of its name; see
// kernels/ops.h for what each computes.
//
// Invariant: the bits of a result depend on the arguments and on CudaOptions,
// never on timing or on what ran before (no float atomics), and not on
// addresses that are multiples of 16 bytes: libraries are promised that
// alignment, or where an operand does not keep it, that of an element.
#ifndef ZERO_KERNELS_CUDA_CUDA_OPS_H_
#define ZERO_KERNELS_CUDA_CUDA_OPS_H_

#include <memory>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/ops.h"

namespace zero::cuda {

class MatmulPlans;     // cuBLASLt handle and one plan per shape (matmul.h)
class AttentionPlans;  // cuDNN graphs, one per shape (cudnn_attention.h)

class CudaOps final : public Ops {
 public:
  // REQUIRES: the device is current on the calling thread.
  CudaOps(int num_sms, const CudaOptions& options);
  ~CudaOps() override;

  const CudaOptions& options() const { return options_; }

  // As Device::notes(): products that cuBLASLt does not add, attention that
  // runs without tensor cores.
  std::vector<std::string> notes() const;

  // linear.cc
  size_t LinearWorkspaceBytes(const LinearArgs&) const override;
  void Linear(Stream&, const LinearArgs&, Workspace) override;
  size_t LinearBackwardInputWorkspaceBytes(
      const LinearBackwardInputArgs&) const override;
  void LinearBackwardInput(Stream&, const LinearBackwardInputArgs&,
                           Workspace) override;
  size_t LinearBackwardWeightWorkspaceBytes(
      const LinearBackwardWeightArgs&) const override;
  void LinearBackwardWeight(Stream&, const LinearBackwardWeightArgs&,
                            Workspace) override;
  // cross_entropy.cu
  size_t LinearCrossEntropyWorkspaceBytes(
      const LinearCrossEntropyArgs&) const override;
  void LinearCrossEntropy(Stream&, const LinearCrossEntropyArgs&,
                          Workspace) override;
  // attention.cc
  size_t AttentionForwardWorkspaceBytes(
      const AttentionForwardArgs&) const override;
  void AttentionForward(Stream&, const AttentionForwardArgs&,
                        Workspace) override;
  size_t AttentionBackwardWorkspaceBytes(
      const AttentionBackwardArgs&) const override;
  void AttentionBackward(Stream&, const AttentionBackwardArgs&,
                         Workspace) override;
  // norm.cu
  void LayerNormForward(Stream&, const NormForwardArgs&) override;
  size_t NormBackwardWorkspaceBytes(const NormBackwardArgs&) const override;
  void LayerNormBackward(Stream&, const NormBackwardArgs&, Workspace) override;
  void RmsNormForward(Stream&, const NormForwardArgs&) override;
  void RmsNormBackward(Stream&, const NormBackwardArgs&, Workspace) override;
  // rotary.cu
  void Rotary(Stream&, const RotaryArgs&) override;
  // embedding.cu
  void EmbeddingForward(Stream&, const EmbeddingForwardArgs&) override;
  size_t EmbeddingBackwardWorkspaceBytes(
      const EmbeddingBackwardArgs&) const override;
  void EmbeddingBackward(Stream&, const EmbeddingBackwardArgs&,
                         Workspace) override;
  // gelu.cu
  void GeluForward(Stream&, const GeluForwardArgs&) override;
  void GeluBackward(Stream&, const GeluBackwardArgs&) override;
  // swiglu.cu
  void SwigluForward(Stream&, const SwigluForwardArgs&) override;
  void SwigluBackward(Stream&, const SwigluBackwardArgs&) override;
  // dropout.cu
  void Dropout(Stream&, const DropoutArgs&) override;
  // elementwise.cu
  void Add(Stream&, const AddArgs&) override;
  void Cast(Stream&, const CastArgs&) override;
  void Fill(Stream&, const FillArgs&) override;
  // reduce.cu
  void SumSquares(Stream&, const SumSquaresArgs&) override;
  void Sum(Stream&, const SumArgs&) override;
  void CountNonFinite(Stream&, const CountNonFiniteArgs&) override;
  void Clip(Stream&, const ClipArgs&) override;
  // sum_ranks.cu
  void SumRanks(Stream&, const SumRanksArgs&) override;
  // adamw.cu, sgd.cu, lamb.cu
  void AdamW(Stream&, const AdamWArgs&) override;
  void Sgd(Stream&, const SgdArgs&) override;
  void LambMoments(Stream&, const LambArgs&) override;
  void LambApply(Stream&, const LambArgs&) override;

 private:
  CudaOptions options_;
  int num_sms_;
  std::unique_ptr<MatmulPlans> matmul_;
  std::unique_ptr<AttentionPlans> attention_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_CUDA_OPS_H_
