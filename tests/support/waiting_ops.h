// Ops that are done when their call returns, so that a test may read results.
#ifndef ZERO_TESTS_SUPPORT_WAITING_OPS_H_
#define ZERO_TESTS_SUPPORT_WAITING_OPS_H_

#include "kernels/device.h"
#include "kernels/op_list.h"
#include "kernels/ops.h"

namespace zero {

class WaitingOps final : public Ops {
 public:
  // `inner` must outlive it.
  explicit WaitingOps(Ops& inner) : inner_(inner) {}

#define ZERO_OP(Name, Args)                                   \
  size_t Name##WorkspaceBytes(const Args& a) const override { \
    return inner_.Name##WorkspaceBytes(a);                    \
  }                                                           \
  void Name(Stream& s, const Args& a, Workspace w) override { \
    inner_.Name(s, a, w);                                     \
    s.Synchronize();                                          \
  }
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
#define ZERO_OP(Name, Args)                      \
  void Name(Stream& s, const Args& a) override { \
    inner_.Name(s, a);                           \
    s.Synchronize();                             \
  }
  ZERO_OPS_WITHOUT_WORKSPACE(ZERO_OP)
#undef ZERO_OP
  size_t LossLogitsBytes(const LinearCrossEntropyArgs& a) const override {
    return inner_.LossLogitsBytes(a);
  }

 private:
  Ops& inner_;
};

}  // namespace zero

#endif  // ZERO_TESTS_SUPPORT_WAITING_OPS_H_
