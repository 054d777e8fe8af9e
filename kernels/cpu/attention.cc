#include "kernels/cpu/attention.h"

#include "kernels/check.h"
#include "kernels/cpu/cpu_ops.h"
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

// How the backward pass is cut. With enough kv heads one task does all of a
// kv head. Else one set of tasks does dk and dv by blocks of keys and another
// dq by blocks of queries, which computes the scores twice.
struct BackwardPlan {
  bool whole_heads = true;
  int64_t block = 0;  // keys or queries of one task, if cut
  int64_t num_blocks = 0;
};

BackwardPlan PlanBackward(const AttentionShape& shape, int num_threads) {
  BackwardPlan plan;
  plan.whole_heads = shape.batch * shape.num_kv_heads >= num_threads ||
                     shape.q_len <= kKeyTile;
  plan.block = 2 * kKeyTile;
  plan.num_blocks = (shape.q_len + plan.block - 1) / plan.block;
  return plan;
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
  return static_cast<size_t>(num_threads_) *
         Bytes(BackwardScratch(args.shape, args.shape.kv_len,
                               HasPairs(*this, args.shape)));
}

void CpuOps::AttentionBackward(Stream&, const AttentionBackwardArgs& args,
                               Workspace workspace) {
  const AttentionShape& shape = args.shape;
  const BackwardPlan plan = PlanBackward(shape, num_threads_);
  const int64_t kv_heads = shape.batch * shape.num_kv_heads;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const bool pairs = HasPairs(*this, shape);
  const size_t scratch_bytes =
      Bytes(BackwardScratch(shape, shape.kv_len, pairs));
  const auto whole = [&](int64_t kv) {
    AttentionBackwardTask task;
    task.batch = kv / shape.num_kv_heads;
    task.head_begin = kv % shape.num_kv_heads * group;
    task.head_end = task.head_begin + group;
    task.q_end = shape.q_len;
    task.kv_end = shape.kv_len;
    return task;
  };
  if (plan.whole_heads) {
    RunTasks(num_threads_, kv_heads, workspace, scratch_bytes,
             [&](int64_t i, float* scratch) {
               RunBackwardTask(args, whole(i), pairs, scratch);
             });
    return;
  }
  RunTasks(num_threads_, kv_heads * plan.num_blocks, workspace, scratch_bytes,
           [&](int64_t i, float* scratch) {
             // The first keys are seen by the most queries.
             AttentionBackwardTask task = whole(i % kv_heads);
             task.kv_begin = i / kv_heads * plan.block;
             task.kv_end = std::min(shape.kv_len, task.kv_begin + plan.block);
             task.write_dq = false;
             RunBackwardTask(args, task, pairs, scratch);
           });
  const int64_t heads = shape.batch * shape.num_heads;
  RunTasks(num_threads_, heads * plan.num_blocks, workspace, scratch_bytes,
           [&](int64_t i, float* scratch) {
             const int64_t head = i % heads % shape.num_heads;
             AttentionBackwardTask task =
                 whole(i % heads / shape.num_heads * shape.num_kv_heads +
                       head / group);
             task.head_begin = head;
             task.head_end = head + 1;
             task.q_begin = (plan.num_blocks - 1 - i / heads) * plan.block;
             task.q_end = std::min(shape.q_len, task.q_begin + plan.block);
             task.kv_begin = FirstKeyTile(args, task.batch, task.q_begin);
             task.kv_end = task.q_end;  // the last query's keys
             task.write_dkv = false;
             RunBackwardTask(args, task, pairs, scratch);
           });
}

}  // namespace zero::cpu
