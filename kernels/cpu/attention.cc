#include "kernels/cpu/attention.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/pair_product.h"
#include "kernels/cpu/parallel.h"

namespace zero::cpu {
namespace {

// Queries that one forward task takes: keys and values are read into panels
// once for all of them. The block is short if there are too few heads to occupy
// all threads. A tile's bits are the same either way.
int64_t QueryBlock(const AttentionShape& shape, int num_threads) {
  const int64_t heads = shape.batch * shape.num_heads;
  return heads >= num_threads ? 4 * kQueryTile : kQueryTile;
}

size_t Bytes(int64_t floats) {
  return (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
}

// Runs fn(task index, this thread's scratch) for [0, num_tasks).
template <class Fn>
void RunTasks(int num_threads, int64_t num_tasks, Workspace workspace,
              size_t scratch_bytes, const Fn& fn) {
  ParallelTasks(num_threads, num_tasks, [&](int64_t i, int thread) {
    fn(i,
       reinterpret_cast<float*>(static_cast<char*>(workspace.data) +
                                static_cast<size_t>(thread) * scratch_bytes));
  });
}

// Whether attention multiplies bf16 operands as pairs.
bool HasPairs(const CpuOps& ops, const AttentionShape& shape) {
  return shape.dtype == DType::kBF16 && ops.HasNativeBf16() &&
         !PairIsas().empty();
}

}  // namespace

// A score is computed twice if one task sums the query's dq and another the
// key's dk and dv. So with enough kv heads to occupy all threads a task takes
// as many tokens as its scratch allows.
BackwardCut CutBackward(const AttentionShape& shape, int num_threads,
                        bool pairs) {
  constexpr int64_t kBlock = 2 * kKeyTile;
  const BackwardCut whole = {shape.q_len, shape.q_len, kQueryTile};
  const bool enough_heads = shape.batch * shape.num_kv_heads >= num_threads;
  const auto fits = [&](const BackwardCut& cut) {
    return Bytes(BackwardScratch(shape, cut, pairs)) <=
           MatmulCache::kThreadBytes;
  };
  if (shape.q_len <= kBlock || (enough_heads && fits(whole))) return whole;
  BackwardCut cut = {kBlock, kBlock, kBlock, enough_heads};
  if (!enough_heads) return cut;
  while (cut.tokens < shape.q_len &&
         fits({cut.tokens + kBlock, cut.keys, cut.queries})) {
    cut.tokens += kBlock;
  }
  // Keys and values of a long sequence are loaded again for every block of
  // queries: fewer blocks. Several tasks must agree on them.
  while (cut.tokens >= shape.q_len && cut.queries < 4 * kBlock &&
         fits({cut.tokens, cut.keys, cut.queries + kBlock})) {
    cut.queries += kBlock;
  }
  return cut;
}

size_t CpuOps::AttentionForwardWorkspaceBytes(
    const AttentionForwardArgs& args) const {
  const int64_t block =
      std::min(args.shape.q_len, QueryBlock(args.shape, num_threads_));
  return static_cast<size_t>(num_threads_) *
         Bytes(ForwardScratch(args.shape, block, HasPairs(*this, args.shape)));
}

void CpuOps::AttentionForward(Stream&, const AttentionForwardArgs& args,
                              Workspace workspace) {
  const AttentionShape& shape = args.shape;
  if (args.packed.positions != nullptr) {
    ZERO_CHECK_EQ(shape.q_len, shape.kv_len) << "packed sequences";
  }
  const int64_t block = QueryBlock(shape, num_threads_);
  const int64_t blocks = (shape.q_len + block - 1) / block;
  const int64_t heads = shape.batch * shape.num_heads;
  const bool pairs = HasPairs(*this, shape);
  const size_t scratch_bytes =
      Bytes(ForwardScratch(shape, std::min(shape.q_len, block), pairs));
  RunTasks(num_threads_, heads * blocks, workspace, scratch_bytes,
           [&](int64_t i, float* scratch) {
             // The last queries see the most keys and go first.
             const int64_t q = (blocks - 1 - i / heads) * block;
             AttentionForwardTask task;
             task.batch = i % heads / shape.num_heads;
             task.head = i % heads % shape.num_heads;
             task.q_begin = q;
             task.q_end = std::min(shape.q_len, q + block);
             RunForwardTask(args, task, pairs, scratch);
           });
}

size_t CpuOps::AttentionBackwardWorkspaceBytes(
    const AttentionBackwardArgs& args) const {
  const bool pairs = HasPairs(*this, args.shape);
  const BackwardCut cut = CutBackward(args.shape, num_threads_, pairs);
  return static_cast<size_t>(num_threads_) *
         Bytes(BackwardScratch(args.shape, cut, pairs));
}

void CpuOps::AttentionBackward(Stream&, const AttentionBackwardArgs& args,
                               Workspace workspace) {
  const AttentionShape& shape = args.shape;
  const bool pairs = HasPairs(*this, shape);
  const BackwardCut cut = CutBackward(shape, num_threads_, pairs);
  const int64_t pieces = (shape.q_len + cut.tokens - 1) / cut.tokens;
  const int64_t kv_heads = shape.batch * shape.num_kv_heads;
  const size_t scratch_bytes = Bytes(BackwardScratch(shape, cut, pairs));
  RunTasks(num_threads_, kv_heads * pieces, workspace, scratch_bytes,
           [&](int64_t i, float* scratch) {
             AttentionBackwardTask task;
             task.batch = i % kv_heads / shape.num_kv_heads;
             task.kv_head = i % kv_heads % shape.num_kv_heads;
             task.begin = i / kv_heads * cut.tokens;
             task.end = std::min(shape.q_len, task.begin + cut.tokens);
             RunBackwardTask(args, cut, task, pairs, scratch);
           });
}

}  // namespace zero::cpu
