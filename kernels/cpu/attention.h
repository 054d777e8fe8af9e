// Causal attention in tiles: the pieces that attention.cc runs in parallel.
//
// Scores are computed transposed (keys down, queries across), so that the
// softmax of 8 or 16 queries advances in the lanes of one vector and no
// horizontal sum is needed. With packed sequences, tiles that no query sees are
// skipped. Where the CPU has instructions for them (pair_product.h), bf16
// operands are multiplied as pairs, and probabilities are rounded to bf16 for
// it; else 16-bit operands are converted to fp32, panel by panel. All other
// math is fp32. Sources: Dao et al. 2022 (FlashAttention); Milakov and
// Gimelshein 2018.
#ifndef ZERO_KERNELS_CPU_ATTENTION_H_
#define ZERO_KERNELS_CPU_ATTENTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace zero::cpu {

// Queries of one tile: the columns of a tile of scores.
inline constexpr int64_t kQueryTile = 64;
// Keys of one tile. 128 x 64 scores are 32 KiB.
inline constexpr int64_t kKeyTile = 128;

// Floats between the rows of a panel of `width` columns: whole vectors of
// every target, and no multiple of 512 bytes, which would crowd a few cache
// sets.
inline int64_t PanelLd(int64_t width) {
  const int64_t ld = (width + 15) / 16 * 16;
  return ld % 128 == 0 ? ld + 16 : ld;
}

// One piece of the forward pass: queries [q_begin, q_end) of one head.
struct AttentionForwardTask {
  int64_t batch = 0, head = 0, q_begin = 0, q_end = 0;
};

// How the backward pass is cut. Tiles, and the order in which they are summed,
// do not depend on it.
struct BackwardCut {
  // Tokens of a task, which sums their dk and dv in fp32: all of a head, or a
  // multiple of `keys` and of `queries`.
  int64_t tokens = 0;
  // What a task holds at once. All queries that it holds share the keys and
  // values that it loads.
  int64_t keys = 0, queries = 0;
  // The task that sums a query's dq: that of the query's own token, so that
  // tasks take similar times; or, if true, that of the tokens before if the
  // query sees more keys there, so that fewer scores are computed twice.
  bool most_keys = false;
};

// One piece of the backward pass: dk and dv of tokens [begin, end) of one kv
// head, and dq of some queries in the heads that share it.
struct AttentionBackwardTask {
  int64_t batch = 0, kv_head = 0, begin = 0, end = 0;
};

// The first key that query `q` of row `b` sees; no query after it sees an
// earlier one.
template <class Args>
int64_t FirstKey(const Args& args, int64_t b, int64_t q) {
  if (args.packed.positions == nullptr) return 0;
  return q - args.packed.positions[b * args.shape.q_len + q];
}
// The first key of the tile that FirstKey's result is in.
template <class Args>
int64_t FirstKeyTile(const Args& args, int64_t b, int64_t q) {
  return FirstKey(args, b, q) / kKeyTile * kKeyTile;
}

// Floats of scratch that one task needs. `pairs`: bf16 operands are multiplied
// as pairs; a single query, as in generation, never is.
int64_t ForwardScratch(const AttentionShape& shape, int64_t num_queries,
                       bool pairs);
int64_t BackwardScratch(const AttentionShape& shape, const BackwardCut& cut,
                        bool pairs);

// The cut for `num_threads`, whose tasks take at most
// MatmulCache::kThreadBytes of scratch if heads are at most 256 wide.
BackwardCut CutBackward(const AttentionShape& shape, int num_threads,
                        bool pairs);

// Runs one task on the calling thread. scratch: 64-byte aligned.
void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, bool pairs,
                    float* scratch);
void RunBackwardTask(const AttentionBackwardArgs& args, const BackwardCut& cut,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_ATTENTION_H_
