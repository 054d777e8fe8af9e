// The sizes of the workspaces of the GPU's ops, and what lies in them:
// functions of an op's arguments and of CudaOptions. Includes nothing of CUDA
// and is in every build, so that a run can be planned without a GPU.
#ifndef ZERO_KERNELS_CUDA_WORKSPACE_H_
#define ZERO_KERNELS_CUDA_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/device.h"
#include "kernels/op_list.h"
#include "kernels/ops.h"
#include "kernels/options.h"
#include "kernels/product.h"

namespace zero::cuda {

// Scratch of every stream: what one kernel leaves for the next on the same
// stream (partial sums of a reduction).
inline constexpr size_t kScratchBytes = size_t{1} << 20;

// Bytes that a stream takes of the device. Streams that copy, or that the host
// computes on, run no kernels.
inline int64_t StreamBytes(StreamRole role) {
  switch (role) {
    case StreamRole::kUp:
    case StreamRole::kDown:
    case StreamRole::kHost:
    case StreamRole::kRead:
    case StreamRole::kWrite:
      return 0;
    default:
      return kScratchBytes;
  }
}

// ---- Matrix products --------------------------------------------------------

// The most that cuBLASLt is given, as NVIDIA recommends for Hopper, and the
// alignment that it asks for; Workspace promises 64.
inline constexpr size_t kMaxLibraryBytes = size_t{32} << 20;
inline constexpr size_t kLibraryAlignment = 256;

// The workspace that cuBLASLt is given for a product into c.
size_t LibraryBytes(const Matrix& c);
// The workspace of a product in fp32 that our own kernel adds to c.
size_t ApartBytes(const Matrix& c);
// The workspace of a product into c, or of one that is added to c apart.
size_t ProductBytes(const Matrix& c, bool apart);

// ---- Sums over rows ---------------------------------------------------------

// Sums over rows go over fixed blocks of rows, then over the blocks in order: a
// function of the shape alone. The partial sums, [count, width] fp32, lie in
// the workspace.
struct RowBlocks {
  int64_t rows;   // of one block
  int64_t count;  // of blocks
};

// The row blocks of bias gradients: at least 64 rows, so that partial sums are
// a small part of the bytes moved, and at most 256 blocks.
RowBlocks ColumnSumBlocks(int64_t num_rows);
size_t ColumnSumBytes(int64_t rows, int64_t cols);
// The workspace of a bias gradient that is then added to the sink.
size_t BiasBytes(const LinearBackwardWeightArgs& args);

// Norms. A row of up to kNarrowRow elements has 16 lanes; a wider one has a
// block of at most kMaxRowThreads or, forward, up to 1024 elements have a warp.
// A thread holds at most 32 elements.
inline constexpr int64_t kNarrowRow = 128;
inline constexpr int kMaxRowThreads = kMaxGpuNormWidth / 32;
// The threads of a row if each has `values` elements. REQUIRES: width <= values
// * kMaxRowThreads.
unsigned ThreadsOfRow(int64_t width, int values);

// The threads of a row in backward: 8 elements each where kMaxRowThreads
// suffice for them, or 16; wider rows take 32 in turns.
struct RowThreads {
  unsigned threads;
  int values;
};
RowThreads BackwardThreads(int64_t width);

// Threads of an SM at 8 elements each, for which backward's registers suffice.
inline constexpr int kRowThreads = 1024;

// The row blocks of norms: as many as an H100 or H200 runs at once, so that all
// end together. A block has at least 16 rows (4 where a row has a block), so
// that the partial sums are a small part of the bytes moved.
RowBlocks NormBlocks(const NormBackwardArgs& args);

// ---- Losses -----------------------------------------------------------------

// The row chunks of one LinearCrossEntropy.
struct LossChunks {
  LossChunks(const LinearCrossEntropyArgs& args, const CudaOptions& options);
  LossLogits logits;  // of every chunk but the last
  size_t logits_bytes;
  size_t known_bytes;  // of their statistics
  size_t loss_bytes;   // of all rows
  Matrix dx;           // of a chunk, where it is summed apart; data null
  size_t dx_bytes;
};

// ---- Embedding --------------------------------------------------------------

// Rows of one id whose gradients are added in one part (EmbeddingBackwardArgs).
inline constexpr int64_t kEmbeddingPartRows = 256;

// Upper bound of the temporary memory of SortPairs: CUB's one-sweep sort takes
// a second buffer of keys and one of values, a kilobyte of look-back per tile
// (of more than 1024 pairs) and some counters. It refuses to run in less than
// it needs.
constexpr size_t SortPairsTempBytes(int64_t n) {
  return static_cast<size_t>(9 * n) + (size_t{64} << 10);
}

// Offsets into the workspace of EmbeddingBackward.
struct EmbeddingLayout {
  explicit EmbeddingLayout(const EmbeddingBackwardArgs& args);
  size_t positions, sorted_ids, order, temp, partials;
  size_t bytes;
};

// ---- Attention --------------------------------------------------------------

// The workspace of our own backward kernel: one float per row of every head.
size_t TiledAttentionBackwardBytes(const AttentionShape& shape);

// ---- All ops ----------------------------------------------------------------

// The sizes of a GPU's ops. Attention's are a bound where cuDNN takes the call
// (attention_call.h), and assume cuDNN 9.25 or newer: a GPU that is here asks
// its library instead.
class CudaSizes final : public OpSizes {
 public:
  // accumulates_into_f32: MatmulPlans::AccumulatesIntoF32().
  explicit CudaSizes(const CudaOptions& options,
                     bool accumulates_into_f32 = true)
      : options_(options), accumulates_into_f32_(accumulates_into_f32) {}

#define ZERO_OP(Name, Args) \
  size_t Name##WorkspaceBytes(const Args& args) const override;
  ZERO_OPS_WITH_WORKSPACE(ZERO_OP)
#undef ZERO_OP
  size_t LossLogitsBytes(const LinearCrossEntropyArgs& args) const override;

 private:
  // The workspace of c (+)= a product of `operands`.
  size_t BytesOf(DType operands, const Matrix& c, bool accumulate) const;

  CudaOptions options_;
  bool accumulates_into_f32_;
};

}  // namespace zero::cuda

#endif  // ZERO_KERNELS_CUDA_WORKSPACE_H_
