#include <algorithm>
#include <utility>

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
  Matrix dx;  // of every chunk but the last, where it is summed apart

  size_t LogitsBytes() const {
    return static_cast<size_t>(logits.rows * logits.ld) * sizeof(float);
  }
  size_t DxBytes() const {
    return RoundUp(static_cast<size_t>(dx.rows * dx.ld) * sizeof(float), 64);
  }
  size_t LossBytes() const {
    return RoundUp(static_cast<size_t>(logits.rows) * sizeof(double), 64);
  }
};

Chunks ChunksOf(const LinearCrossEntropyArgs& args, const MatmulCache& cache) {
  const int64_t ld = RoundUp(args.rows(), 64);
  const int64_t limit = std::clamp(kChunkBytes / (4 * ld), kMinRows, kMaxRows);
  const int64_t m = args.x.rows;
  const int64_t pieces = CeilDiv(m, limit);
  const int64_t rows =
      pieces <= 1 ? m : std::min(m, RoundUp(CeilDiv(m, pieces), 16));
  Chunks chunks{{nullptr, DType::kF32, rows, args.rows(), ld}};
  // With 16-bit products the gradient of the logits is 16-bit as well, in the
  // first half of each row; else it stays fp32 and is not converted twice.
  if (args.x.dtype != DType::kF32 && cache.IsNative(args.x.dtype)) {
    chunks.grad_dtype = args.x.dtype;
  }
  if (SumsDxApart(args)) {
    chunks.dx = {nullptr, DType::kF32, rows, args.dx.cols, args.dx.cols};
  }
  return chunks;
}

}  // namespace

size_t CpuOps::LossLogitsBytes(const LinearCrossEntropyArgs& args) const {
  return static_cast<size_t>(args.x.rows * RoundUp(args.rows(), 64)) *
         sizeof(float);
}

size_t CpuOps::LinearCrossEntropyWorkspaceBytes(
    const LinearCrossEntropyArgs& args) const {
  if (args.x.rows == 0) return 0;
  const Chunks chunks = ChunksOf(args, *matmul_);
  const int64_t last = args.x.rows % chunks.logits.rows;
  const bool summed = chunks.dx.rows > 0;
  size_t product = 0;
  for (int64_t rows : {chunks.logits.rows, last}) {
    if (rows == 0) continue;
    for (int64_t part = 0; part < NumLossParts(args); ++part) {
      for (bool accumulate : {false, true}) {
        const LossProducts p(
            args, part, chunks.logits.Rows(0, rows), chunks.grad_dtype, 0,
            (summed ? chunks.dx : args.dx).Rows(0, rows), accumulate);
        product = std::max(product, matmul_->WorkspaceBytes(p.logits));
        if (args.dx.data == nullptr) continue;
        product = std::max(product, matmul_->WorkspaceBytes(p.dx));
        if (args.dw.data == nullptr) continue;
        product = std::max(product, matmul_->WorkspaceBytes(p.dw));
      }
    }
  }
  return (args.part.logits == nullptr ? chunks.LogitsBytes() : 0) +
         chunks.LossBytes() + chunks.DxBytes() + product;
}

void CpuOps::LinearCrossEntropy(Stream& stream,
                                const LinearCrossEntropyArgs& args,
                                Workspace workspace) {
  using Work = LossPart::Work;
  const Work work = args.part.work;
  const bool backward = args.dx.data != nullptr;
  const bool with_dw = backward && args.dw.data != nullptr;
  const int64_t num_parts = NumLossParts(args);
  Chunks chunks = ChunksOf(args, *matmul_);
  const auto item = static_cast<int64_t>(DTypeBytes(chunks.grad_dtype));
  const float scale = args.grad_scale == nullptr ? 1.0f : *args.grad_scale;

  char* at = static_cast<char*>(workspace.data);
  const auto take = [&at](size_t bytes) {
    return std::exchange(at, at + bytes);
  };
  const bool kept = args.part.logits != nullptr;
  chunks.logits.data = kept ? args.part.logits : take(chunks.LogitsBytes());
  double* const losses = reinterpret_cast<double*>(take(chunks.LossBytes()));
  const bool summed = chunks.dx.rows > 0;
  chunks.dx.data = take(chunks.DxBytes());
  const size_t used = at - static_cast<char*>(workspace.data);
  const Workspace scratch{at, workspace.bytes - used};

  bool dw_written = args.accumulate_dw;
  double loss_sum = 0;
  for (int64_t row = 0; row < args.x.rows; row += chunks.logits.rows) {
    const int64_t rows = std::min(chunks.logits.rows, args.x.rows - row);
    const Matrix logits = chunks.logits.Rows(kept ? row : 0, rows);
    const Matrix dx = args.dx.Rows(row, rows);
    const Matrix dx_sum = summed ? chunks.dx.Rows(0, rows) : dx;
    const int32_t* targets = args.targets + row;
    const bool any_valid =
        std::any_of(targets, targets + rows, [](int32_t t) { return t >= 0; });
    if (!any_valid) {
      if (backward && work == Work::kAll) Zero(*this, stream, dx);
      if (args.losses != nullptr && work == Work::kAll) {
        std::fill(args.losses + row, args.losses + row + rows, 0.0f);
      }
      continue;
    }
    const auto products = [&](int64_t part) {
      return LossProducts(args, part, logits, chunks.grad_dtype, row, dx_sum,
                          dw_written);
    };
    if (work != Work::kGradients) {
      for (int64_t part = 0; part < num_parts; ++part) {
        matmul_->Run(products(part).logits, scratch);
      }
    }
    if (work == Work::kLogits) continue;
    if (work == Work::kAll) {
      ParallelRanges(num_threads_, rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          char* const row_begin = static_cast<char*>(logits.Row(i));
          losses[i] = 0;
          if (targets[i] >= 0) {
            losses[i] = SoftmaxCrossEntropyRow(
                reinterpret_cast<float*>(row_begin), args.vocab, targets[i],
                backward, scale, chunks.grad_dtype);
          }
          // Of the gradient.
          const int64_t known = targets[i] >= 0 ? args.vocab : 0;
          std::fill(row_begin + known * item, row_begin + logits.cols * item,
                    '\0');
        }
      });
      for (int64_t i = 0; i < rows; ++i) {
        loss_sum += losses[i];
        if (args.losses != nullptr) {
          args.losses[row + i] = static_cast<float>(losses[i]);
        }
      }
    }
    if (!backward) continue;
    for (int64_t part = num_parts - 1; part >= 0; --part) {
      const LossProducts p = products(part);
      matmul_->Run(p.dx, scratch);
      if (with_dw) matmul_->Run(p.dw, scratch);
    }
    if (with_dw) dw_written = true;
    if (!summed) continue;
    const Runs runs = RunsOf({dx_sum, dx});
    for (int64_t i = 0; i < runs.count; ++i) {
      Cast(stream, {RunOf(dx_sum, runs, i), RunOf(dx, runs, i)});
    }
  }
  if (with_dw && !dw_written) Zero(*this, stream, args.dw);
  if (args.loss_sum != nullptr && work == Work::kAll) {
    *args.loss_sum += loss_sum;
  }
}

}  // namespace zero::cpu
