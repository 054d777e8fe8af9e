// Every op's name and arguments, once: X(Name, Args). Ops (ops.h), the
// backends, the meta device, the timer of tools/bench and the parity test
// generate their declarations and forwards from these two lists.
#ifndef ZERO_KERNELS_OP_LIST_H_
#define ZERO_KERNELS_OP_LIST_H_

// void Name(Stream&, const Args&, Workspace), and
// size_t NameWorkspaceBytes(const Args&) const.
#define ZERO_OPS_WITH_WORKSPACE(X)                  \
  X(Linear, LinearArgs)                             \
  X(LinearBackwardInput, LinearBackwardInputArgs)   \
  X(LinearBackwardWeight, LinearBackwardWeightArgs) \
  X(LinearCrossEntropy, LinearCrossEntropyArgs)     \
  X(AttentionForward, AttentionForwardArgs)         \
  X(AttentionBackward, AttentionBackwardArgs)       \
  X(NormBackward, NormBackwardArgs)                 \
  X(EmbeddingBackward, EmbeddingBackwardArgs)

// void Name(Stream&, const Args&).
#define ZERO_OPS_WITHOUT_WORKSPACE(X)       \
  X(NormForward, NormForwardArgs)           \
  X(Rotary, RotaryArgs)                     \
  X(EmbeddingForward, EmbeddingForwardArgs) \
  X(GeluForward, GeluForwardArgs)           \
  X(GeluBackward, GeluBackwardArgs)         \
  X(SwigluForward, SwigluForwardArgs)       \
  X(SwigluBackward, SwigluBackwardArgs)     \
  X(Dropout, DropoutArgs)                   \
  X(Add, AddArgs)                           \
  X(Cast, CastArgs)                         \
  X(Fill, FillArgs)                         \
  X(SumSquares, SumSquaresArgs)             \
  X(Sum, SumArgs)                           \
  X(CountNonFinite, CountNonFiniteArgs)     \
  X(Clip, ClipArgs)                         \
  X(SumRanks, SumRanksArgs)                 \
  X(AdamW, AdamWArgs)                       \
  X(Sgd, SgdArgs)                           \
  X(LambMoments, LambArgs)                  \
  X(LambApply, LambArgs)

// Declares all of them in a class that derives from Ops.
#define ZERO_OVERRIDE_ALL_OPS                              \
  ZERO_OPS_WITH_WORKSPACE(ZERO_OVERRIDE_OP_WITH_WORKSPACE) \
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OVERRIDE_OP)             \
  size_t LossLogitsBytes(const LinearCrossEntropyArgs&) const override;

#define ZERO_OVERRIDE_OP_WITH_WORKSPACE(Name, Args)        \
  size_t Name##WorkspaceBytes(const Args&) const override; \
  void Name(Stream&, const Args&, Workspace) override;
#define ZERO_OVERRIDE_OP(Name, Args) void Name(Stream&, const Args&) override;

#endif  // ZERO_KERNELS_OP_LIST_H_
