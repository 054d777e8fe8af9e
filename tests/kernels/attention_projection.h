// An attention problem in the layers' layout: q, k and v side by side in one
// array, and their gradients in another.
#ifndef ZERO_TESTS_KERNELS_ATTENTION_PROJECTION_H_
#define ZERO_TESTS_KERNELS_ATTENTION_PROJECTION_H_

#include "tests/kernels/attention_problem.h"

namespace zero {

// REQUIRES: the problem outlives the projection.
class AttentionProjection {
 public:
  explicit AttentionProjection(AttentionProblem& p)
      : p_(p),
        qkv_(p.dtype, p.s.batch * p.s.q_len,
             (p.s.heads + 2 * p.s.kv_heads) * p.s.dim),
        gradients_(qkv_) {
    for (int64_t t = 0; t < qkv_.rows(); ++t) {
      for (int64_t j = 0; j < qkv_.cols(); ++j) {
        qkv_.Set(t, j,
                 j < k()   ? p.q(t, j)
                 : j < v() ? p.k(t, j - k())
                           : p.v(t, j - v()));
      }
    }
    AttentionProblem::Spoil(gradients_);
  }

  AttentionForwardArgs ForwardArgs() {
    AttentionForwardArgs args;
    args.shape = p_.shape();
    args.packed = p_.packed();
    args.q = Const(qkv_, 0);
    args.k = Const(qkv_, k());
    args.v = Const(qkv_, v());
    args.out = p_.Mutable(p_.out);
    args.lse = p_.lse.data();
    return args;
  }
  AttentionBackwardArgs BackwardArgs() {
    AttentionBackwardArgs args;
    args.shape = p_.shape();
    args.packed = p_.packed();
    args.q = Const(qkv_, 0);
    args.k = Const(qkv_, k());
    args.v = Const(qkv_, v());
    args.out = p_.Const(p_.out);
    args.dout = p_.Const(p_.dout);
    args.lse = p_.lse.data();
    args.dq = Mutable(gradients_, 0);
    args.dk = Mutable(gradients_, k());
    args.dv = Mutable(gradients_, v());
    return args;
  }
  // Copies the gradients to the problem's own matrices.
  void TakeGradients() {
    Take(0, p_.dq);
    Take(k(), p_.dk);
    Take(v(), p_.dv);
  }

 private:
  // The columns of the first key and of the first value.
  int64_t k() const { return p_.s.heads * p_.s.dim; }
  int64_t v() const { return k() + p_.s.kv_heads * p_.s.dim; }

  MutableHeadsRef Mutable(GuardedMatrix& m, int64_t column) const {
    const Matrix view = m.view();
    const auto item = static_cast<int64_t>(DTypeBytes(p_.dtype));
    return {static_cast<char*>(view.data) + column * item, p_.s.q_len * view.ld,
            view.ld};
  }
  HeadsRef Const(GuardedMatrix& m, int64_t column) const {
    const MutableHeadsRef heads = Mutable(m, column);
    return {heads.data, heads.batch_stride, heads.token_stride};
  }
  void Take(int64_t column, GuardedMatrix& to) const {
    for (int64_t t = 0; t < to.rows(); ++t) {
      for (int64_t j = 0; j < to.cols(); ++j) {
        to.Set(t, j, gradients_(t, column + j));
      }
    }
  }

  AttentionProblem& p_;
  GuardedMatrix qkv_, gradients_;
};

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_ATTENTION_PROJECTION_H_
