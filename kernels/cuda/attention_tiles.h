// Our own causal attention: any float dtype, any strides, heads up to 256
// wide, as many keys as there are. The reference beside cuDNN, and what runs
// where cuDNN takes no call: fp32, odd head widths, a cache of keys.
//
// Of packed sequences a block skips the tiles that none of its rows sees.
//
// Tiles in shared memory, an online softmax, all sums in fp32 on the CUDA
// cores; the T x T matrix never exists. Every output is summed by one block in
// one order, so bits depend on nothing but the arguments.
// Sources: Dao et al. 2022 (FlashAttention); Dao 2023 (FlashAttention-2).
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
