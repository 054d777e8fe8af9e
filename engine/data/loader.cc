#include "engine/data/loader.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/check.h"
#include "kernels/sizes.h"

namespace zero {
namespace {

// The shape of `batch`, and everything independent of its tokens.
void Resize(const BatchShape& shape, Batch* batch) {
  const int64_t rows = shape.micro_batch_size;
  const int64_t length = shape.sequence_length;
  const size_t n = static_cast<size_t>(rows * length);
  batch->num_valid_targets = 0;
  batch->tokens.resize(n);
  batch->targets.resize(n);
  batch->sample_ids.resize(static_cast<size_t>(rows));
  batch->windows.resize(static_cast<size_t>(rows));
  const bool same_rows = batch->batch_size == rows &&
                         batch->sequence_length == length &&
                         batch->positions.size() == n && batch->offsets.empty();
  if (same_rows) return;
  batch->offsets.clear();
  batch->num_documents = 0;
  batch->batch_size = rows;
  batch->sequence_length = length;
  batch->positions.resize(n);
  for (size_t i = 0; i < n; ++i) {
    batch->positions[i] = static_cast<int32_t>(i % static_cast<size_t>(length));
  }
}

// The number of windows that start in the source; the last may be partial.
int64_t NumWindows(const TokenSource& source, int64_t length) {
  if (source.rows() != nullptr) return source.rows()->num_rows();
  return CeilDiv(std::max<int64_t>(source.size() - 1, 0), length);
}

// The number of counted targets in the first `windows` windows.
int64_t NumTargets(const TokenSource& source, int64_t windows, int64_t length) {
  const PackedRows* const rows = source.rows();
  if (rows == nullptr) return std::min(source.size() - 1, windows * length);
  const auto end = rows->targets.begin() + windows * length;
  return windows * length -
         std::count(rows->targets.begin(), end, kIgnoredTarget);
}

// Row `row` = row `window` of packed samples; empty after the last one.
void FillPackedRow(const PackedRows& rows, int64_t window, int64_t row,
                   Batch* batch) {
  const int64_t length = batch->sequence_length;
  ZERO_CHECK_EQ(length, rows.length);
  int32_t* const tokens = batch->tokens.data() + row * length;
  int32_t* const targets = batch->targets.data() + row * length;
  int32_t* const positions = batch->positions.data() + row * length;
  batch->windows[static_cast<size_t>(row)] = window;
  if (window >= rows.num_rows()) {
    std::fill_n(tokens, length, 0);
    std::fill_n(targets, length, kIgnoredTarget);
    std::iota(positions, positions + length, 0);
    return;
  }
  const int64_t begin = window * length;
  std::copy_n(&rows.tokens[begin], length, tokens);
  std::copy_n(&rows.targets[begin], length, targets);
  std::copy_n(&rows.positions[begin], length, positions);
  batch->num_valid_targets +=
      length - std::count(targets, targets + length, kIgnoredTarget);
}

// Row `row` = `window`; tokens beyond the source are 0, and ignored.
void FillRow(const TokenSource& source, int64_t window, int64_t row,
             Batch* batch) {
  if (source.rows() != nullptr) {
    return FillPackedRow(*source.rows(), window, row, batch);
  }
  const int64_t length = batch->sequence_length;
  const int64_t begin = window * length;
  const int64_t num_targets =
      std::clamp<int64_t>(source.size() - 1 - begin, 0, length);
  int32_t* tokens = batch->tokens.data() + row * length;
  int32_t* targets = batch->targets.data() + row * length;
  if (num_targets > 0) {
    source.Read(begin, num_targets, tokens);
    source.Read(begin + 1, num_targets, targets);
  }
  std::fill(tokens + num_targets, tokens + length, 0);
  std::fill(targets + num_targets, targets + length, kIgnoredTarget);
  batch->windows[static_cast<size_t>(row)] = window;
  batch->num_valid_targets += num_targets;
}

// Counts the positions of a filled batch from its document tokens on. Padding
// belongs to the last document: nothing reads it.
void CountInDocuments(int32_t document_token, Batch* batch) {
  const int64_t length = batch->sequence_length;
  const int64_t n = batch->batch_size * length;
  int64_t begin = 0;
  for (int64_t i = 0; i < n; ++i) {
    const size_t at = static_cast<size_t>(i);
    const bool is_token = batch->targets[at] != kIgnoredTarget;
    if (i % length == 0 || (is_token && batch->tokens[at] == document_token)) {
      begin = i;
    }
    batch->positions[at] = static_cast<int32_t>(i - begin);
  }
}

// Cuts every row of a filled batch into documents where positions begin, if
// requested.
void CutIntoDocuments(const TokenSource& source, int32_t document_token,
                      Batch* batch) {
  if (source.rows() == nullptr) {
    if (document_token == kNoDocumentToken) return;
    CountInDocuments(document_token, batch);
  }
  const int64_t n = batch->batch_size * batch->sequence_length;
  ZERO_CHECK_LE(n, std::numeric_limits<int32_t>::max());
  batch->offsets.assign(static_cast<size_t>(n) + 1, static_cast<int32_t>(n));
  batch->num_documents = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (batch->positions[static_cast<size_t>(i)] != 0) continue;
    batch->offsets[static_cast<size_t>(batch->num_documents++)] =
        static_cast<int32_t>(i);
  }
}

}  // namespace

absl::StatusOr<Loader> Loader::Create(const TokenSource* source,
                                      const BatchShape& shape, uint64_t seed,
                                      int32_t document_token) {
  // Packed rows have separate targets; in a stream it is the next token.
  const int64_t behind = source->rows() == nullptr ? 0 : 1;
  const Sampler sampler(source->size() + behind, shape, seed);
  if (sampler.steps_per_epoch() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data.train has ", source->size(), " tokens, which make ",
        sampler.num_samples(),
        sampler.num_samples() == 1 ? " sample" : " samples",
        " of data.sequence_length ", shape.sequence_length,
        behind == 0 ? " (+ 1)" : "", ", fewer than one global batch of ",
        shape.GlobalBatch(), "; add data, or lower train_batch_size",
        sampler.num_samples() > 0
            ? absl::StrCat(" to at most ", sampler.num_samples())
            : "",
        " or data.sequence_length"));
  }
  return Loader(source, sampler, document_token);
}

void Loader::Fill(int64_t step, int64_t micro_step, int64_t rank,
                  Batch* batch) const {
  Resize(sampler_.shape(), batch);
  for (int64_t row = 0; row < batch->batch_size; ++row) {
    const int64_t id = sampler_.SampleId(step, micro_step, rank, row);
    batch->sample_ids[static_cast<size_t>(row)] = id;
    FillRow(*source_, sampler_.Window(id), row, batch);
  }
  CutIntoDocuments(*source_, document_token_, batch);
}

absl::StatusOr<EvalLoader> EvalLoader::Create(const TokenSource* source,
                                              const BatchShape& shape,
                                              int64_t max_windows,
                                              int32_t document_token) {
  ZERO_CHECK_GE(shape.sequence_length, 1);
  ZERO_CHECK_GE(shape.micro_batch_size, 1);
  ZERO_CHECK_GE(shape.world, 1);
  ZERO_CHECK_GE(max_windows, 0);
  if (source->rows() == nullptr && source->size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("data.validation has ", source->size(),
                     " token; a target needs at least 2"));
  }
  EvalLoader loader;
  loader.source_ = source;
  loader.shape_ = shape;
  loader.document_token_ = document_token;
  loader.source_windows_ = NumWindows(*source, shape.sequence_length);
  loader.num_windows_ = max_windows > 0
                            ? std::min(loader.source_windows_, max_windows)
                            : loader.source_windows_;
  loader.num_targets_ =
      NumTargets(*source, loader.num_windows_, shape.sequence_length);
  return loader;
}

int64_t EvalLoader::num_batches() const {
  return CeilDiv(num_windows_, shape_.world * shape_.micro_batch_size);
}

void EvalLoader::Fill(int64_t index, int64_t rank, Batch* batch) const {
  ZERO_CHECK(0 <= index && index < num_batches()) << index;
  ZERO_CHECK(0 <= rank && rank < shape_.world) << rank;
  Resize(shape_, batch);
  const int64_t rows = shape_.micro_batch_size;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t window = (index * shape_.world + rank) * rows + row;
    batch->sample_ids[static_cast<size_t>(row)] = window;
    // A window that max_windows cuts off is filled like one past the end.
    const int64_t past_end = source_->size();
    FillRow(*source_, window < num_windows_ ? window : past_end, row, batch);
    batch->windows[static_cast<size_t>(row)] = window;
  }
  CutIntoDocuments(*source_, document_token_, batch);
}

}  // namespace zero
