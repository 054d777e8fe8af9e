#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/softmax.h"
#include "kernels/product.h"
#include "kernels/sizes.h"

namespace zero::cpu {
namespace {

// Logits of one chunk, at most: three chunks of 1024 rows of GPT-2. Never fewer
// than kMinRows rows, since every chunk reads and writes all of dw (a tenth of
// the product's time at 256 rows, and halving the rows doubles it).
constexpr int64_t kChunkBytes = int64_t{68} << 20;
constexpr int64_t kMinRows = 272;
constexpr int64_t kMaxRows = 4096;

// The chunks of one call; a function of the shapes alone.
struct Chunks {
  LossLogits logits;  // of every chunk but the last
  DType grad_dtype = DType::kF32;
  Matrix dx;  // of every chunk but the last, if summed separately

  size_t DxBytes() const {
    return RoundUp(static_cast<size_t>(dx.rows * dx.ld) * sizeof(float), 64);
  }
  size_t StatisticsBytes() const {
    return RoundUp(static_cast<size_t>(logits.rows) * sizeof(LossRow), 64);
  }
};

Chunks ChunksOf(const LinearCrossEntropyArgs& args, const MatmulCache& cache) {
  const int64_t ld = RoundUp(args.rows(), LossLogits::kAlignCols);
  const int64_t limit = std::clamp(kChunkBytes / (4 * ld), kMinRows, kMaxRows);
  const int64_t m = args.x.rows;
  const int64_t pieces = CeilDiv(m, limit);
  Chunks chunks;
  chunks.logits.rows =
      pieces <= 1 ? m : std::min(m, RoundUp(CeilDiv(m, pieces), 16));
  // With 16-bit products the gradient of the logits is 16-bit as well, in the
  // first half of each row; else it stays fp32 and is not converted twice.
  if (args.x.dtype != DType::kF32 && cache.IsNative(args.x.dtype)) {
    chunks.grad_dtype = args.x.dtype;
  }
  if (SumsDxApart(args)) {
    chunks.dx = {nullptr, DType::kF32, chunks.logits.rows, args.dx.cols,
                 args.dx.cols};
  }
  return chunks;
}

}  // namespace

size_t CpuOps::LossLogitsBytes(const LinearCrossEntropyArgs& args) const {
  return LossLogits{.rows = args.x.rows}.Bytes(args);
}

size_t CpuOps::LinearCrossEntropyWorkspaceBytes(
    const LinearCrossEntropyArgs& args) const {
  if (args.x.rows == 0) return 0;
  const Chunks chunks = ChunksOf(args, *matmul_);
  const int64_t last = args.x.rows % chunks.logits.rows;
  size_t product = 0;
  for (int64_t rows : {chunks.logits.rows, last}) {
    if (rows == 0) continue;
    const Matrix dx = (chunks.dx.rows > 0 ? chunks.dx : args.dx).Rows(0, rows);
    for (int64_t part = 0; part < NumLossParts(args); ++part) {
      for (bool accumulate : {false, true}) {
        const LossProducts p(args, part, chunks.logits, chunks.grad_dtype,
                             {.rows = rows}, dx, accumulate);
        product = std::max(product, matmul_->WorkspaceBytes(p.logits));
        if (args.dx.data != nullptr) {
          product = std::max(product, matmul_->WorkspaceBytes(p.dx));
        }
        if (args.dw.data != nullptr) {
          product = std::max(product, matmul_->WorkspaceBytes(p.dw));
        }
      }
    }
  }
  size_t bytes = chunks.DxBytes() + product;
  if (args.part.logits == nullptr) bytes += chunks.logits.Bytes(args);
  if (args.part.statistics == nullptr) bytes += chunks.StatisticsBytes();
  return bytes;
}

void CpuOps::LinearCrossEntropy(Stream& stream,
                                const LinearCrossEntropyArgs& args,
                                Workspace workspace) {
  using Work = LossPart::Work;
  const Work work = args.part.work;
  const bool with_dx = args.dx.data != nullptr;
  const bool backward =
      work == Work::kGradients || (work == Work::kAll && with_dx);
  const bool with_dw = backward && args.dw.data != nullptr;
  const int64_t num_parts = NumLossParts(args);
  Chunks chunks = ChunksOf(args, *matmul_);
  const float scale = args.grad_scale == nullptr ? 1.0f : *args.grad_scale;

  char* at = static_cast<char*>(workspace.data);
  const auto take = [&at](size_t bytes) {
    return std::exchange(at, at + bytes);
  };
  const bool kept = args.part.logits != nullptr;
  const bool owns_statistics = args.part.statistics == nullptr;
  LossLogits all = chunks.logits;
  if (kept) all.rows = args.x.rows;
  all.data = kept ? args.part.logits : take(all.Bytes(args));
  LossRow* const statistics =
      owns_statistics
          ? reinterpret_cast<LossRow*>(take(chunks.StatisticsBytes()))
          : args.part.statistics;
  const bool summed = chunks.dx.rows > 0;
  chunks.dx.data = take(chunks.DxBytes());
  const size_t used = at - static_cast<char*>(workspace.data);
  const Workspace scratch{at, workspace.bytes - used};

  bool dw_written = args.accumulate_dw;
  double loss_sum = 0;
  for (int64_t row = 0; row < args.x.rows; row += chunks.logits.rows) {
    const int64_t rows = std::min(chunks.logits.rows, args.x.rows - row);
    const Matrix dx = args.dx.Rows(row, rows);
    const Matrix dx_sum = summed ? chunks.dx.Rows(0, rows) : dx;
    const int32_t* targets = args.targets + row;
    LossRow* const known = statistics + (owns_statistics ? 0 : row);
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
      return LossProducts(args, part, all, chunks.grad_dtype,
                          {row, rows, kept ? row : 0}, dx_sum, dw_written);
    };
    // Visits each row of a part's logits, with the target's index in the part.
    const auto for_each_row = [&](const LossProducts& p, const auto& visit) {
      ParallelRanges(num_threads_, rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          visit(i, static_cast<float*>(p.logits.c.Row(i)),
                targets[i] - p.first);
        }
      });
    };
    for (int64_t part = 0; part < num_parts && work != Work::kGradients;
         ++part) {
      const LossProducts p = products(part);
      matmul_->Run(p.logits, scratch);
      for_each_row(p, [&](int64_t i, const float* logits, int64_t target) {
        if (p.first == 0) known[i] = {};
        if (targets[i] < 0) return;
        AddToLossRow(logits, p.words, &known[i]);
        if (target >= 0 && target < p.words) {
          known[i].target_logit = logits[target];
        }
      });
    }
    for (int64_t i = 0; i < rows && work == Work::kAll; ++i) {
      const double loss = targets[i] < 0
                              ? 0
                              : static_cast<double>(known[i].max) +
                                    std::log(known[i].sum) -
                                    static_cast<double>(known[i].target_logit);
      loss_sum += loss;
      if (args.losses != nullptr) {
        args.losses[row + i] = static_cast<float>(loss);
      }
    }
    if (!backward) continue;
    for (int64_t part = num_parts - 1; part >= 0; --part) {
      const LossProducts p = products(part);
      if (work == Work::kGradients && !kept) matmul_->Run(p.logits, scratch);
      for_each_row(p, [&](int64_t i, float* logits, int64_t target) {
        const int64_t words = targets[i] < 0 ? 0 : p.words;
        LossRowGradient(logits, words, known[i], target, scale,
                        chunks.grad_dtype);
        const auto item = static_cast<int64_t>(DTypeBytes(chunks.grad_dtype));
        char* const bytes = reinterpret_cast<char*>(logits);
        std::fill(bytes + words * item, bytes + p.dx.a.cols * item, '\0');
      });
      if (with_dx) matmul_->Run(p.dx, scratch);
      if (with_dw) matmul_->Run(p.dw, scratch);
    }
    if (with_dw) dw_written = true;
    if (summed) Convert(*this, stream, dx_sum, dx);
  }
  if (with_dw && !dw_written) Zero(*this, stream, args.dw);
  if (args.loss_sum != nullptr && work == Work::kAll) {
    *args.loss_sum += loss_sum;
  }
}

}  // namespace zero::cpu
