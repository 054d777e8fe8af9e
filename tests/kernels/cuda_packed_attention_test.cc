// Packed sequences of sizes for cuDNN, in the layers' layout. On a real GPU
// cuDNN must have taken them, unless the library is too old.
#include "absl/strings/str_join.h"
#include "tests/kernels/attention_checks.h"
#include "tests/kernels/attention_projection.h"

namespace zero {
namespace {

void RunForward(const Path& path, AttentionProblem& p) {
  AttentionProjection projection(p);
  const AttentionForwardArgs args = projection.ForwardArgs();
  Scratch scratch(path.ops.AttentionForwardWorkspaceBytes(args));
  path.ops.AttentionForward(path.stream, args, scratch.workspace());
}

void RunBackward(const Path& path, AttentionProblem& p) {
  AttentionProjection projection(p);
  const AttentionBackwardArgs args = projection.BackwardArgs();
  Scratch scratch(path.ops.AttentionBackwardWorkspaceBytes(args));
  path.ops.AttentionBackward(path.stream, args, scratch.workspace());
  projection.TakeGradients();
}

double SquareOfRows(const Dense& x, int64_t first, int64_t n) {
  double sum = 0;
  for (int64_t i = first; i < first + n; ++i) sum += Norm(x, i) * Norm(x, i);
  return sum;
}

// The bounds of single elements are those of the worst case, within which a
// gradient of zeros may lie. For a whole sequence the roundings of the weights,
// of their gradients, of cuDNN's sums over heads and of the result are
// independent: eight times one of them at most, against the norm of that
// sequence or of as many usual rows (of one token dq and dk are 0).
void ExpectSequencesNear(const AttentionProblem& p, const GuardedMatrix& got,
                         const Dense& want, const std::string& what) {
  const Dense is = got.dense();
  Dense difference = want;
  for (size_t i = 0; i < want.values.size(); ++i) {
    difference.values[i] -= is.values[i];
  }
  const double usual =
      SquareOfRows(want, 0, want.rows) / static_cast<double>(want.rows);
  for (const AttentionProblem::Sequence& s : p.Sequences()) {
    const double size = std::max(SquareOfRows(want, s.q, s.num_queries),
                                 usual * static_cast<double>(s.num_queries));
    EXPECT_LE(std::sqrt(SquareOfRows(difference, s.q, s.num_queries)),
              8 * HalfUlp(p.dtype) * std::sqrt(size))
        << what << " of the sequence at " << s.q;
  }
}

// Batch, heads, kv heads, queries, keys, head width, pad. One token; as many
// sequences as the smallest graph has; fewer than a graph has; many.
const std::pair<AttentionTestShape, Lengths> kProblems[] = {
    {{2, 4, 4, 512, 512, 64, 0}, {512, 1, 300, 211}},
    {{1, 8, 2, 1024, 1024, 128, 0}, {300, 1, 211, 500, 12}},
    {{1, 8, 2, 1024, 1024, 128, 0}, Lengths(32, 32)},
};

TEST(CudaPackedAttentionTest, EverySequenceIsThatOfFloat64) {
  ForEachPath([](const Path& path) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const auto& [shape, lengths] : kProblems) {
        ForwardCase forward(shape, dtype, lengths);
        forward.p.SpoilOutputs();
        RunForward(path, forward.p);
        forward.Check(path);
        ExpectSequencesNear(forward.p, forward.p.out, forward.out,
                            forward.what + ": out");
        BackwardCase backward(forward);
        RunBackward(path, backward.p);
        backward.Check(path);
        ExpectSequencesNear(backward.p, backward.p.dq, backward.dq,
                            backward.what + ": dq");
        ExpectSequencesNear(backward.p, backward.p.dk, backward.dk,
                            backward.what + ": dk");
        ExpectSequencesNear(backward.p, backward.p.dv, backward.dv,
                            backward.what + ": dv");
      }
    }
    const std::string says = absl::StrJoin(path.device.notes(), "; ");
    if (says.find("our own kernel") == std::string::npos) return;
    // All of the above was of our own kernel; on Hopper for want of a library.
    if (path.device.info().isa == "sm_90") {
      EXPECT_NE(says.find("install"), std::string::npos) << says;
    }
    GTEST_SKIP() << "cuDNN was not asked: " << says;
  });
}

}  // namespace
}  // namespace zero
