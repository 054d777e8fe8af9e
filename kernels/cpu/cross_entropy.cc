#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/softmax.h"

namespace zero::cpu {
namespace {

// Logits of one chunk, at most: three chunks of 1024 rows of GPT-2. Never fewer
// than kMinRows rows, since every chunk reads and writes all of dw (a tenth of
// the product's time at 256 rows, and halving the rows doubles it), and oneDNN
// packs less well at 256 rows and below (fp32, AVX2: 74 against 84 GFLOP/s).
constexpr int64_t kChunkBytes = int64_t{68} << 20;
constexpr int64_t kMinRows = 272;
constexpr int64_t kMaxRows = 4096;

int64_t RoundUp(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

size_t Align(int64_t bytes) { return static_cast<size_t>(RoundUp(bytes, 64)); }

// The chunks of one call; a function of the shapes alone.
struct Chunks {
  int64_t rows = 0;       // of every chunk but the last
  int64_t logits_ld = 0;  // whole cache lines, for the products' sake
  DType grad_dtype = DType::kF32;

  size_t LogitsBytes() const { return Align(rows * logits_ld * 4); }
  size_t LossBytes() const { return Align(rows * 8); }
};

Chunks ChunksOf(const LinearCrossEntropyArgs& args, const MatmulCache& cache) {
  Chunks chunks;
  chunks.logits_ld = RoundUp(args.w.rows, 64);
  const int64_t limit =
      std::clamp(kChunkBytes / (4 * chunks.logits_ld), kMinRows, kMaxRows);
  const int64_t m = args.x.rows;
  const int64_t pieces = (m + limit - 1) / limit;
  chunks.rows =
      pieces <= 1 ? m : std::min(m, RoundUp((m + pieces - 1) / pieces, 16));
  // With 16-bit products the gradient of the logits is 16-bit as well, in the
  // first half of each row; else it stays fp32 and is not converted twice.
  if (args.x.dtype != DType::kF32 && cache.IsNative(args.x.dtype)) {
    chunks.grad_dtype = args.x.dtype;
  }
  return chunks;
}

ConstMatrix RowsOf(const ConstMatrix& x, int64_t row, int64_t rows) {
  return {ElementAt(x.data, x.dtype, row * x.ld), x.dtype, rows, x.cols, x.ld};
}

struct ChunkProducts {
  Product logits, dx, dw;
};

// `memory` may be null where only sizes are asked for.
ChunkProducts ProductsOf(const LinearCrossEntropyArgs& args,
                         const Chunks& chunks, float* memory, int64_t row,
                         int64_t rows, bool accumulate_dw) {
  const int64_t cols = args.w.rows;
  ChunkProducts p;
  p.logits.a = RowsOf(args.x, row, rows);
  p.logits.b = args.w;
  p.logits.b_transposed = true;
  p.logits.c = {memory, DType::kF32, rows, cols, chunks.logits_ld};
  const int64_t grad_ld =
      chunks.logits_ld *
      static_cast<int64_t>(sizeof(float) / DTypeBytes(chunks.grad_dtype));
  const ConstMatrix grad{memory, chunks.grad_dtype, rows, cols, grad_ld};
  p.dx.a = grad;
  p.dx.b = args.w;
  p.dx.c = {ElementAt(args.dx.data, args.dx.dtype, row * args.dx.ld),
            args.dx.dtype, rows, args.dx.cols, args.dx.ld};
  p.dw.a = grad;
  p.dw.a_transposed = true;
  p.dw.b = p.logits.a;
  p.dw.c = args.dw;
  p.dw.accumulate = accumulate_dw;
  return p;
}

void ZeroRows(const Matrix& x, int64_t row, int64_t rows) {
  for (int64_t i = row; i < row + rows; ++i) {
    std::memset(ElementAt(x.data, x.dtype, i * x.ld), 0,
                static_cast<size_t>(x.cols) * DTypeBytes(x.dtype));
  }
}

}  // namespace

size_t CpuOps::LinearCrossEntropyWorkspaceBytes(
    const LinearCrossEntropyArgs& args) const {
  if (args.x.rows == 0) return 0;
  const Chunks chunks = ChunksOf(args, *matmul_);
  const int64_t last = args.x.rows % chunks.rows;
  size_t product = 0;
  for (int64_t rows : {chunks.rows, last}) {
    if (rows == 0) continue;
    for (bool accumulate : {false, true}) {
      const ChunkProducts p =
          ProductsOf(args, chunks, nullptr, 0, rows, accumulate);
      product = std::max(product, matmul_->WorkspaceBytes(p.logits));
      if (args.dx.data == nullptr) continue;
      product = std::max(product, matmul_->WorkspaceBytes(p.dx));
      if (args.dw.data == nullptr) continue;
      product = std::max(product, matmul_->WorkspaceBytes(p.dw));
    }
  }
  return chunks.LogitsBytes() + chunks.LossBytes() + product;
}

void CpuOps::LinearCrossEntropy(Stream&, const LinearCrossEntropyArgs& args,
                                Workspace workspace) {
  const bool backward = args.dx.data != nullptr;
  const bool with_dw = backward && args.dw.data != nullptr;
  const Chunks chunks = ChunksOf(args, *matmul_);
  const auto item = static_cast<int64_t>(DTypeBytes(chunks.grad_dtype));
  const float scale = args.grad_scale == nullptr ? 1.0f : *args.grad_scale;

  char* const base = static_cast<char*>(workspace.data);
  float* const logits = reinterpret_cast<float*>(base);
  double* const losses = reinterpret_cast<double*>(base + chunks.LogitsBytes());
  const size_t used = chunks.LogitsBytes() + chunks.LossBytes();
  const Workspace scratch{base + used, workspace.bytes - used};

  bool dw_written = args.accumulate_dw;
  double loss_sum = 0;
  for (int64_t row = 0; row < args.x.rows; row += chunks.rows) {
    const int64_t rows = std::min(chunks.rows, args.x.rows - row);
    const int32_t* targets = args.targets + row;
    const bool any_valid =
        std::any_of(targets, targets + rows, [](int32_t t) { return t >= 0; });
    if (!any_valid) {
      if (backward) ZeroRows(args.dx, row, rows);
      if (args.losses != nullptr) {
        std::fill(args.losses + row, args.losses + row + rows, 0.0f);
      }
      continue;
    }
    const ChunkProducts p =
        ProductsOf(args, chunks, logits, row, rows, dw_written);
    matmul_->Run(p.logits, scratch);
    ParallelRanges(num_threads_, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* const logits_row = logits + i * chunks.logits_ld;
        if (targets[i] >= 0) {
          losses[i] =
              SoftmaxCrossEntropyRow(logits_row, args.vocab, targets[i],
                                     backward, scale, chunks.grad_dtype);
        } else {
          losses[i] = 0;
        }
        // Of the gradient.
        char* const row_begin = reinterpret_cast<char*>(logits_row);
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
  if (with_dw && !dw_written) ZeroRows(args.dw, 0, args.dw.rows);
  if (args.loss_sum != nullptr) *args.loss_sum += loss_sum;
}

}  // namespace zero::cpu
