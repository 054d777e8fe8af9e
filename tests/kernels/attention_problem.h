// One problem of attention: operands strided as in a packed projection, the
// calls, and the heads as dense matrices for the reference.
#ifndef ZERO_TESTS_KERNELS_ATTENTION_PROBLEM_H_
#define ZERO_TESTS_KERNELS_ATTENTION_PROBLEM_H_

#include <string>
#include <vector>

#include "tests/kernels/matrix.h"

namespace zero {

struct AttentionTestShape {
  int64_t batch, heads, kv_heads, q_len, kv_len, dim;
  // Elements after every token: with a multiple of 8 (and such heads) rows lie
  // on multiples of 16 bytes.
  int64_t pad = 7;
};

inline std::string Name(const AttentionTestShape& s, DType dtype) {
  std::string name = DTypeName(dtype);
  for (const int64_t n :
       {s.batch, s.heads, s.kv_heads, s.q_len, s.kv_len, s.dim}) {
    name += " " + std::to_string(n);
  }
  return name;
}

// The lengths of packed sequences, row by row; none: every row is one.
using Lengths = std::vector<int64_t>;

// [B * T, heads * D] matrices with room after every token, as in a packed
// projection.
struct AttentionProblem {
  AttentionTestShape s;
  DType dtype;
  GuardedMatrix q, k, v, out, dout, dq, dk, dv;
  TestVector<float> lse;
  float scale;
  TestVector<int32_t> positions, offsets;  // of packed sequences
  int64_t num_sequences = 0;

  AttentionProblem(const AttentionTestShape& s, DType dtype, int64_t offset = 0)
      : s(s),
        dtype(dtype),
        q(Input(s.q_len, s.heads, 1, offset)),
        k(Input(s.kv_len, s.kv_heads, 2, offset)),
        v(Input(s.kv_len, s.kv_heads, 3, offset)),
        out(Output(s.q_len, s.heads)),
        dout(Input(s.q_len, s.heads, 4, offset)),
        dq(Output(s.q_len, s.heads)),
        dk(Output(s.kv_len, s.kv_heads)),
        dv(Output(s.kv_len, s.kv_heads)),
        lse(static_cast<size_t>(s.batch * s.heads * s.q_len)),
        scale(static_cast<float>(1 / std::sqrt(s.dim))) {}

  GuardedMatrix Input(int64_t tokens, int64_t heads, uint64_t seed,
                      int64_t offset) const {
    return GuardedMatrix::Normal(dtype, s.batch * tokens, heads * s.dim, s.pad,
                                 seed, 1, offset);
  }
  GuardedMatrix Output(int64_t tokens, int64_t heads) const {
    return GuardedMatrix(dtype, s.batch * tokens, heads * s.dim, s.pad);
  }
  AttentionShape shape() const {
    return {dtype,   s.batch,    s.q_len, s.kv_len,
            s.heads, s.kv_heads, s.dim,   scale};
  }
  void Pack(const Lengths& lengths) {
    num_sequences = static_cast<int64_t>(lengths.size());
    offsets.assign(static_cast<size_t>(s.batch * s.q_len + 1),
                   static_cast<int32_t>(s.batch * s.q_len));
    positions.clear();
    for (size_t i = 0; i < lengths.size(); ++i) {
      offsets[i] = static_cast<int32_t>(positions.size());
      for (int32_t t = 0; t < lengths[i]; ++t) positions.push_back(t);
    }
    EXPECT_EQ(positions.size(), static_cast<size_t>(s.batch * s.q_len));
  }
  PackedSequences packed() const {
    if (num_sequences == 0) return {};
    return {positions.data(), offsets.data(), num_sequences};
  }
  MutableHeadsRef Mutable(GuardedMatrix& m) const {
    const Matrix view = m.view();
    return {view.data, view.rows / s.batch * view.ld, view.ld};
  }
  HeadsRef Const(GuardedMatrix& m) const {
    const MutableHeadsRef r = Mutable(m);
    return {r.data, r.batch_stride, r.token_stride};
  }

  void Forward(Ops& ops, Stream& stream, bool with_lse = true) {
    AttentionForwardArgs args;
    args.shape = shape();
    args.packed = packed();
    args.q = Const(q);
    args.k = Const(k);
    args.v = Const(v);
    args.out = Mutable(out);
    args.lse = with_lse ? lse.data() : nullptr;
    Scratch scratch(ops.AttentionForwardWorkspaceBytes(args));
    ops.AttentionForward(stream, args, scratch.workspace());
  }
  void Backward(Ops& ops, Stream& stream) {
    AttentionBackwardArgs args;
    args.shape = shape();
    args.packed = packed();
    args.q = Const(q);
    args.k = Const(k);
    args.v = Const(v);
    args.out = Const(out);
    args.dout = Const(dout);
    args.lse = lse.data();
    args.dq = Mutable(dq);
    args.dk = Mutable(dk);
    args.dv = Mutable(dv);
    Scratch scratch(ops.AttentionBackwardWorkspaceBytes(args));
    ops.AttentionBackward(stream, args, scratch.workspace());
  }

  // NaN where the calls must write.
  static void Spoil(GuardedMatrix& m) {
    for (int64_t i = 0; i < m.rows(); ++i) {
      for (int64_t j = 0; j < m.cols(); ++j) m.Set(i, j, NAN);
    }
  }
  void SpoilOutputs() {
    Spoil(out);
    std::fill(lse.begin(), lse.end(), NAN);
  }
  void SpoilGradients() {
    for (GuardedMatrix* m : {&dq, &dk, &dv}) Spoil(*m);
  }

  // Rows of q and of k that see each other alone: a packed sequence, or a row
  // of the batch.
  struct Sequence {
    int64_t q, num_queries, k, num_keys;
  };
  std::vector<Sequence> Sequences() const {
    std::vector<Sequence> sequences;
    for (int64_t i = 0; i < num_sequences; ++i) {
      const int64_t first = offsets[i], n = offsets[i + 1] - first;
      sequences.push_back({first, n, first, n});
    }
    if (num_sequences > 0) return sequences;
    for (int64_t b = 0; b < s.batch; ++b) {
      sequences.push_back({b * s.q_len, s.q_len, b * s.kv_len, s.kv_len});
    }
    return sequences;
  }

  // One head of some rows.
  Dense Head(const GuardedMatrix& m, int64_t row, int64_t rows,
             int64_t h) const {
    Dense d(rows, s.dim);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < s.dim; ++i) {
        d(t, i) = m(row + t, h * s.dim + i);
      }
    }
    return d;
  }
  void PutHead(Dense& whole, int64_t row, int64_t h, const Dense& d,
               bool add) const {
    for (int64_t t = 0; t < d.rows; ++t) {
      for (int64_t i = 0; i < s.dim; ++i) {
        double& to = whole(row + t, h * s.dim + i);
        to = add ? to + d(t, i) : d(t, i);
      }
    }
  }
  // Where the statistics of a row of q are, for one head.
  int64_t LseAt(int64_t row, int64_t h) const {
    return (row / s.q_len * s.heads + h) * s.q_len + row % s.q_len;
  }
};

}  // namespace zero

#endif  // ZERO_TESTS_KERNELS_ATTENTION_PROBLEM_H_
