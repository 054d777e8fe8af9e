// Our own causal attention, for any float dtype, any strides, heads up to 256
// wide and any number of keys. It is the reference for cuDNN and runs the calls
// that cuDNN does not take: fp32, odd head widths, a cache of keys.
//
// With packed sequences a block skips the tiles that none of its rows sees.
//
// Tiles lie in shared memory, the softmax is online, and all sums are in fp32
// on the CUDA cores; the T x T matrix never exists. Every output is summed by
// one block in one order, so bits depend on nothing but the arguments. Sources:
// Dao et al. 2022 (FlashAttention); Dao 2023 (FlashAttention-2).
#ifndef ZERO_KERNELS_CUDA_ATTENTION_TILES_H_
#define ZERO_KERNELS_CUDA_ATTENTION_TILES_H_

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

namespace zero::cuda {

inline constexpr int64_t kMaxTiledHeadDim = 256;

void TiledAttentionForward(cudaStream_t stream,
                           const AttentionForwardArgs& args);

// REQUIRES: a workspace of TiledAttentionBackwardBytes (workspace.h).
void TiledAttentionBackward(cudaStream_t stream,
                            const AttentionBackwardArgs& args,
                            Workspace workspace);

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_ATTENTION_TILES_H_
