#include <algorithm>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/softmax.h"
#include "kernels/sizes.h"

namespace zero::cpu {
namespace {

// Logits of one chunk, at most: three chunks of 1024 rows of GPT-2. Never fewer
// than kMinRows rows, since every chunk reads and writes all of dw (a tenth of
// the product's time at 256 rows, and halving the rows doubles it), and oneDNN
// packs less well at 256 rows and below (fp32, AVX2: 74 against 84 GFLOP/s).
constexpr int64_t kChunkBytes = int64_t{68} << 20;
constexpr int64_t kMinRows = 272;
constexpr int64_t kMaxRows = 4096;

// The chunks of one call; a function of the shapes alone.
struct Chunks {
  Matrix logits;  // of every chunk but the last; whole cache lines a row
  DType grad_dtype = DType::kF32;

  size_t LogitsBytes() const {
    return static_cast<size_t>(logits.rows * logits.ld) * sizeof(float);
  }
  size_t LossBytes() const {
    return RoundUp(static_cast<size_t>(logits.rows) * sizeof(double), 64);
  }
};

Chunks ChunksOf(const LinearCrossEntropyArgs& args, const MatmulCache& cache) {
  const int64_t ld = RoundUp(args.w.rows, 64);
  const int64_t limit = std::clamp(kChunkBytes / (4 * ld), kMinRows, kMaxRows);
  const int64_t m = args.x.rows;
  const int64_t pieces = CeilDiv(m, limit);
  const int64_t rows =
      pieces <= 1 ? m : std::min(m, RoundUp(CeilDiv(m, pieces), 16));
  Chunks chunks{{nullptr, DType::kF32, rows, args.w.rows, ld}};
  // With 16-bit products the gradient of the logits is 16-bit as well, in the
  // first half of each row; else it stays fp32 and is not converted twice.
  if (args.x.dtype != DType::kF32 && cache.IsNative(args.x.dtype)) {
    chunks.grad_dtype = args.x.dtype;
  }
  return chunks;
}

}  // namespace

size_t CpuOps::LinearCrossEntropyWorkspaceBytes(
    const LinearCrossEntropyArgs& args) const {
  if (args.x.rows == 0) return 0;
  const Chunks chunks = ChunksOf(args, *matmul_);
  const int64_t last = args.x.rows % chunks.logits.rows;
  size_t product = 0;
  for (int64_t rows : {chunks.logits.rows, last}) {
    if (rows == 0) continue;
    for (bool accumulate : {false, true}) {
      const LossProducts p(args, chunks.logits.Rows(0, rows), chunks.grad_dtype,
                           0, accumulate);
      product = std::max(product, matmul_->WorkspaceBytes(p.logits));
      if (args.dx.data == nullptr) continue;
      product = std::max(product, matmul_->WorkspaceBytes(p.dx));
      if (args.dw.data == nullptr) continue;
      product = std::max(product, matmul_->WorkspaceBytes(p.dw));
    }
  }
  return chunks.LogitsBytes() + chunks.LossBytes() + product;
}

void CpuOps::LinearCrossEntropy(Stream& stream,
                                const LinearCrossEntropyArgs& args,
                                Workspace workspace) {
  const bool backward = args.dx.data != nullptr;
  const bool with_dw = backward && args.dw.data != nullptr;
  Chunks chunks = ChunksOf(args, *matmul_);
  const auto item = static_cast<int64_t>(DTypeBytes(chunks.grad_dtype));
  const float scale = args.grad_scale == nullptr ? 1.0f : *args.grad_scale;

  char* const base = static_cast<char*>(workspace.data);
  chunks.logits.data = base;
  double* const losses = reinterpret_cast<double*>(base + chunks.LogitsBytes());
  const size_t used = chunks.LogitsBytes() + chunks.LossBytes();
  const Workspace scratch{base + used, workspace.bytes - used};

  bool dw_written = args.accumulate_dw;
  double loss_sum = 0;
  for (int64_t row = 0; row < args.x.rows; row += chunks.logits.rows) {
    const int64_t rows = std::min(chunks.logits.rows, args.x.rows - row);
    const int32_t* targets = args.targets + row;
    const bool any_valid =
        std::any_of(targets, targets + rows, [](int32_t t) { return t >= 0; });
    if (!any_valid) {
      if (backward) Zero(*this, stream, args.dx.Rows(row, rows));
      if (args.losses != nullptr) {
        std::fill(args.losses + row, args.losses + row + rows, 0.0f);
      }
      continue;
    }
    const LossProducts p(args, chunks.logits.Rows(0, rows), chunks.grad_dtype,
                         row, dw_written);
    matmul_->Run(p.logits, scratch);
    ParallelRanges(num_threads_, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        char* const row_begin = static_cast<char*>(chunks.logits.Row(i));
        losses[i] = 0;
        if (targets[i] >= 0) {
          losses[i] = SoftmaxCrossEntropyRow(
              reinterpret_cast<float*>(row_begin), args.vocab, targets[i],
              backward, scale, chunks.grad_dtype);
        }
        // Of the gradient.
        const int64_t known = targets[i] >= 0 ? args.vocab : 0;
        std::fill(row_begin + known * item, row_begin + args.w.rows * item,
                  '\0');
      }
    });
    for (int64_t i = 0; i < rows; ++i) {
      loss_sum += losses[i];
      if (args.losses != nullptr) {
        args.losses[row + i] = static_cast<float>(losses[i]);
      }
    }
    if (backward) matmul_->Run(p.dx, scratch);
    if (with_dw) {
      matmul_->Run(p.dw, scratch);
      dw_written = true;
    }
  }
  if (with_dw && !dw_written) Zero(*this, stream, args.dw);
  if (args.loss_sum != nullptr) *args.loss_sum += loss_sum;
}

}  // namespace zero::cpu
