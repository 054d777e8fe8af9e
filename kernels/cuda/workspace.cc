#include "kernels/cuda/workspace.h"

#include <algorithm>

#include "kernels/check.h"
#include "kernels/cuda/attention_call.h"
#include "kernels/dtype.h"
#include "kernels/product.h"
#include "kernels/sizes.h"

namespace zero::cuda {
namespace {

// cudnnGetVersion() of the library that a plan assumes.
constexpr size_t kAssumedCudnn = 92500;

size_t Fp32Bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(rows) * static_cast<size_t>(cols) * sizeof(float);
}

}  // namespace

size_t LibraryBytes(const Matrix& c) {
  // Split-K keeps fp32 copies of the output: room for 32 of a small one.
  return std::clamp(32 * Fp32Bytes(c.rows, c.cols), size_t{1} << 20,
                    kMaxLibraryBytes);
}

size_t ApartBytes(const Matrix& c) {
  return RoundUp(Fp32Bytes(c.rows, c.ld), 64);
}

size_t ProductBytes(const Matrix& c, bool apart) {
  if (c.rows == 0 || c.cols == 0) return 0;
  return LibraryBytes(c) + kLibraryAlignment + (apart ? ApartBytes(c) : 0);
}

RowBlocks ColumnSumBlocks(int64_t num_rows) {
  const int64_t rows = std::max<int64_t>(64, CeilDiv(num_rows, 256));
  return {rows, CeilDiv(num_rows, rows)};
}

size_t ColumnSumBytes(int64_t rows, int64_t cols) {
  return Fp32Bytes(ColumnSumBlocks(rows).count, cols);
}

size_t BiasBytes(const LinearBackwardWeightArgs& args) {
  return RoundUp(Fp32Bytes(1, args.dy.cols), 64);
}

unsigned ThreadsOfRow(int64_t width, int values) {
  const int64_t threads = RoundUp(CeilDiv(width, values), 32);
  ZERO_CHECK_LE(threads, kMaxRowThreads)
      << "norms on a GPU do not support rows of width " << width;
  return static_cast<unsigned>(threads);
}

RowThreads BackwardThreads(int64_t width) {
  for (const int values : {8, 16}) {
    if (width <= values * kMaxRowThreads) {
      return {ThreadsOfRow(width, values), values};
    }
  }
  return {kMaxRowThreads, 32};
}

RowBlocks NormBlocks(const NormBackwardArgs& args) {
  constexpr int64_t kMultiprocessors = 132;
  const bool narrow = args.dy.width <= kNarrowRow;
  const RowThreads block =
      narrow ? RowThreads{128, 8} : BackwardThreads(args.dy.width);
  const int64_t at_once = std::max<int64_t>(
      1, kRowThreads / (block.values / 8) / static_cast<int>(block.threads));
  const int64_t num_rows = args.dy.outer * args.dy.inner;
  const int64_t rows = std::max<int64_t>(
      narrow ? 16 : 4, CeilDiv(num_rows, kMultiprocessors * at_once));
  return {rows, CeilDiv(num_rows, rows)};
}

LossChunks::LossChunks(const LinearCrossEntropyArgs& args,
                       const CudaOptions& options) {
  constexpr int64_t kMaxLogitsBytes = int64_t{2} << 30;
  constexpr int64_t kRowMultiple = 128;  // tiles of a product
  // Groups of a row of logits are whole and aligned.
  static_assert(LossLogits::kAlignCols % 64 == 0);
  const int64_t all = args.x.rows;
  logits.dtype = options.fp32_logits ? DType::kF32 : args.x.dtype;
  const int64_t row_bytes = RoundUp(args.rows(), LossLogits::kAlignCols) *
                            static_cast<int64_t>(DTypeBytes(logits.dtype));
  const int64_t limit = std::max<int64_t>(
      1, std::min(options.loss_chunk_rows, kMaxLogitsBytes / row_bytes));
  const int64_t pieces = CeilDiv(all, limit);
  const int64_t even = pieces == 0 ? 0 : CeilDiv(all, pieces);
  logits.rows = std::min({all, limit, RoundUp(even, kRowMultiple)});
  logits_bytes = logits.Bytes(args);
  known_bytes = RoundUp(static_cast<size_t>(logits.rows) * sizeof(LossRow), 64);
  loss_bytes = static_cast<size_t>(RoundUp(all * 8, 64));
  if (SumsDxApart(args)) {
    dx = {nullptr, DType::kF32, logits.rows, args.dx.cols, args.dx.cols};
  }
  dx_bytes = RoundUp(Fp32Bytes(dx.rows, dx.ld), 64);
}

size_t CudaSizes::LossLogitsBytes(const LinearCrossEntropyArgs& args) const {
  LossLogits logits = LossChunks(args, options_).logits;
  logits.rows = args.x.rows;
  return logits.Bytes(args);
}

EmbeddingLayout::EmbeddingLayout(const EmbeddingBackwardArgs& args) {
  bytes = 0;
  const auto take = [this](size_t n) {
    const size_t begin = bytes;
    bytes += RoundUp(n, 64);
    return begin;
  };
  const int64_t m = args.dout.rows;
  const size_t ids = static_cast<size_t>(m) * sizeof(int32_t);
  positions = take(ids);
  sorted_ids = take(ids);
  order = take(ids);
  temp = take(SortPairsTempBytes(m));
  partials = take(Fp32Bytes(CeilDiv(m, kEmbeddingPartRows), args.dout.cols));
}

size_t TiledAttentionBackwardBytes(const AttentionShape& shape) {
  return Fp32Bytes(shape.batch * shape.num_heads, shape.q_len);
}

size_t CudaSizes::BytesOf(DType operands, const Matrix& c,
                          bool accumulate) const {
  return ProductBytes(c, accumulate && !accumulates_into_f32_ &&
                             c.dtype == DType::kF32 && operands != DType::kF32);
}

// The sum before an activation has the shape and dtype of y.
size_t CudaSizes::LinearWorkspaceBytes(const LinearArgs& args) const {
  return BytesOf(args.x.dtype, args.y, args.residual.data != nullptr);
}

size_t CudaSizes::LinearBackwardInputWorkspaceBytes(
    const LinearBackwardInputArgs& args) const {
  return BytesOf(args.dy.dtype, args.dx, args.accumulate);
}

size_t CudaSizes::LinearBackwardWeightWorkspaceBytes(
    const LinearBackwardWeightArgs& args) const {
  const size_t product =
      args.dw.data == nullptr || args.dy.rows == 0
          ? 0
          : BytesOf(args.dy.dtype, args.dw, args.accumulate_dw);
  if (args.dbias.data == nullptr) return product;
  return BiasBytes(args) +
         std::max(product, ColumnSumBytes(args.dy.rows, args.dy.cols));
}

size_t CudaSizes::LinearCrossEntropyWorkspaceBytes(
    const LinearCrossEntropyArgs& args) const {
  if (args.x.rows == 0) return 0;
  const LossChunks chunks(args, options_);
  const DType dtype = args.x.dtype;
  size_t product = 0;
  for (int64_t part = 0; part < NumLossParts(args); ++part) {
    const LossProducts p(
        args, part, chunks.logits, dtype, {.rows = chunks.logits.rows},
        chunks.dx_bytes > 0 ? chunks.dx : args.dx.Rows(0, chunks.logits.rows),
        /*accumulate_dw=*/true);
    product = std::max(product, BytesOf(dtype, p.logits.c, false));
    if (args.dx.data != nullptr) {
      product = std::max(product, BytesOf(dtype, p.dx.c, p.dx.accumulate));
    }
    if (args.dw.data != nullptr) {
      product = std::max(product, BytesOf(dtype, p.dw.c, true));
    }
  }
  size_t bytes = chunks.loss_bytes + chunks.dx_bytes + product;
  if (args.part.logits == nullptr) bytes += chunks.logits_bytes;
  if (args.part.statistics == nullptr) bytes += chunks.known_bytes;
  return bytes;
}

size_t CudaSizes::AttentionForwardWorkspaceBytes(
    const AttentionForwardArgs& args) const {
  return CudnnBound(CallOf(args),
                    {options_.deterministic_attention, kAssumedCudnn});
}

size_t CudaSizes::AttentionBackwardWorkspaceBytes(
    const AttentionBackwardArgs& args) const {
  return std::max(CudnnBound(CallOf(args),
                             {options_.deterministic_attention, kAssumedCudnn}),
                  TiledAttentionBackwardBytes(args.shape));
}

size_t CudaSizes::NormBackwardWorkspaceBytes(
    const NormBackwardArgs& args) const {
  const int64_t outputs = (args.dweight.data != nullptr ? 1 : 0) +
                          (args.dbias.data != nullptr ? 1 : 0);
  return Fp32Bytes(NormBlocks(args).count * outputs, args.dy.width);
}

size_t CudaSizes::EmbeddingBackwardWorkspaceBytes(
    const EmbeddingBackwardArgs& args) const {
  return EmbeddingLayout(args).bytes;
}

}  // namespace zero::cuda
