// The CPU's kernels: oneDNN for matrix products, Highway (run-time dispatch)
// and OpenMP for the rest. Every method is in the file of its name; see
// kernels/ops.h for what each computes.
//
// Invariant: the bits of a result depend on the arguments and on
// `num_threads`, never on which thread ran what.
#ifndef ZERO_KERNELS_CPU_CPU_OPS_H_
#define ZERO_KERNELS_CPU_CPU_OPS_H_

#include <memory>

#include "kernels/ops.h"

namespace zero::cpu {

class MatmulCache;  // oneDNN engine, stream and primitives (matmul.h)

// How products of 16-bit operands are computed. kNative: by oneDNN's 16-bit
// primitives, where it has them. kConvert: in fp32, panel by panel, rounded on
// the way out. kAuto: native where that is faster (HasFastBf16).
enum class LowPrecision { kAuto, kNative, kConvert };

class CpuOps final : public Ops {
 public:
  explicit CpuOps(int num_threads,
                  LowPrecision low_precision = LowPrecision::kAuto);
  ~CpuOps() override;

  int num_threads() const { return num_threads_; }

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
  // cross_entropy.cc
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
  // norm.cc
  void LayerNormForward(Stream&, const NormForwardArgs&) override;
  size_t NormBackwardWorkspaceBytes(const NormBackwardArgs&) const override;
  void LayerNormBackward(Stream&, const NormBackwardArgs&, Workspace) override;
  void RmsNormForward(Stream&, const NormForwardArgs&) override;
  void RmsNormBackward(Stream&, const NormBackwardArgs&, Workspace) override;
  // rotary.cc
  void Rotary(Stream&, const RotaryArgs&) override;
  // embedding.cc
  void EmbeddingForward(Stream&, const EmbeddingForwardArgs&) override;
  size_t EmbeddingBackwardWorkspaceBytes(
      const EmbeddingBackwardArgs&) const override;
  void EmbeddingBackward(Stream&, const EmbeddingBackwardArgs&,
                         Workspace) override;
  // gelu.cc
  void GeluForward(Stream&, const GeluForwardArgs&) override;
  void GeluBackward(Stream&, const GeluBackwardArgs&) override;
  // swiglu.cc
  void SwigluForward(Stream&, const SwigluForwardArgs&) override;
  void SwigluBackward(Stream&, const SwigluBackwardArgs&) override;
  // dropout.cc
  void Dropout(Stream&, const DropoutArgs&) override;
  // elementwise.cc
  void Add(Stream&, const AddArgs&) override;
  void Cast(Stream&, const CastArgs&) override;
  void Fill(Stream&, const FillArgs&) override;
  // reduce.cc
  void SumSquares(Stream&, const SumSquaresArgs&) override;
  void Sum(Stream&, const SumArgs&) override;
  void CountNonFinite(Stream&, const CountNonFiniteArgs&) override;
  void Clip(Stream&, const ClipArgs&) override;
  // sum_ranks.cc
  void SumRanks(Stream&, const SumRanksArgs&) override;
  // adamw.cc, sgd.cc, lamb.cc
  void AdamW(Stream&, const AdamWArgs&) override;
  void Sgd(Stream&, const SgdArgs&) override;
  void LambMoments(Stream&, const LambArgs&) override;
  void LambApply(Stream&, const LambArgs&) override;

 private:
  int num_threads_;
  std::unique_ptr<MatmulCache> matmul_;
};

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_CPU_OPS_H_
