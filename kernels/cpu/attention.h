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

// One piece of the backward pass: the contribution of queries [q_begin, q_end)
// of the heads [head_begin, head_end), which share one kv head, to their own
// dq, and to dk and dv of keys [kv_begin, kv_end). dq is complete only if these
// are all keys that the queries see, dk and dv only if these are all queries
// that see the keys. kv_begin is a multiple of kKeyTile, so tiles do not depend
// on how the pass is cut.
struct AttentionBackwardTask {
  int64_t batch = 0, head_begin = 0, head_end = 0;
  int64_t q_begin = 0, q_end = 0, kv_begin = 0, kv_end = 0;
  bool write_dq = true, write_dkv = true;
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
int64_t BackwardScratch(const AttentionShape& shape, int64_t num_keys,
                        bool pairs);

// Runs one task on the calling thread. scratch: 64-byte aligned.
void RunForwardTask(const AttentionForwardArgs& args,
                    const AttentionForwardTask& task, bool pairs,
                    float* scratch);
void RunBackwardTask(const AttentionBackwardArgs& args,
                     const AttentionBackwardTask& task, bool pairs,
                     float* scratch);

}  // namespace zero::cpu

#endif  // ZERO_KERNELS_CPU_ATTENTION_H_
