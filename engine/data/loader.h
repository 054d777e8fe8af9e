// Fills micro-batches from a token source: Loader for training, in the
// sampler's order; EvalLoader for validation, in the file's order.
//
// Rows are windows of the stream, regardless of document boundaries. With a
// `document_token`, the separator of documents, a row is cut into documents,
// each with positions from 0: one begins at every document token and one at the
// row's first token, even in the middle of a text. The token begins the
// document after it, so that no target is lost: a text's last token predicts
// the end of text, as it must to end, and the end of text alone predicts the
// next text's first token, as in generation without a prompt. (Megatron-LM's
// --reset-attention-mask cuts after that token, and the first token is then
// predicted from the previous document.)
//
// Rows of packed samples (PackedRows) are windows themselves, and their
// sequences are documents.
//
// There is no prefetch thread: a micro-batch is a few page-cache copies (4 x
// 1024 tokens take about 5 microseconds), and the kernel reads ahead. If token
// files came over a slow network, a thread would belong here, in Fill.
#ifndef ZERO_ENGINE_DATA_LOADER_H_
#define ZERO_ENGINE_DATA_LOADER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/data/sampler.h"
#include "engine/data/token_file.h"

namespace zero {

// The `document_token` that cuts no row: every row is one sequence.
inline constexpr int32_t kNoDocumentToken = -1;

// One micro-batch of one rank. Legend: B batch_size, T sequence_length.
struct Batch {
  int64_t batch_size = 0;
  int64_t sequence_length = 0;
  std::vector<int32_t> tokens;      // [B * T]
  std::vector<int32_t> targets;     // [B * T] next token, or kIgnoredTarget
  std::vector<int32_t> positions;   // [B * T] in the row, or in its document
  std::vector<int64_t> sample_ids;  // [B] unique over the run
  std::vector<int64_t> windows;     // [B] first token is windows[b] * T
  int64_t num_valid_targets = 0;
  // [B * T + 1] the first token of every document, counted over the batch, in
  // order, then B * T (PackedSequences in kernels/ops.h); empty if rows are not
  // cut.
  std::vector<int32_t> offsets;
  int64_t num_documents = 0;  // in `offsets`
};

// Training batches.
// Threads: const; ranks as threads may share one.
class Loader {
 public:
  // `source` must outlive the loader.
  // Errors: InvalidArgument when the source has fewer windows than one global
  //         batch, with both numbers and the largest batch that fits.
  static absl::StatusOr<Loader> Create(
      const TokenSource* source, const BatchShape& shape, uint64_t seed,
      int32_t document_token = kNoDocumentToken);

  // Overwrites `batch` (its memory is reused). Steps count from 0 over the run.
  void Fill(int64_t step, int64_t micro_step, int64_t rank, Batch* batch) const;

  // The sampler, for steps_per_epoch(), dropped_per_epoch() and the like.
  const Sampler& sampler() const { return sampler_; }

 private:
  Loader(const TokenSource* source, const Sampler& sampler,
         int32_t document_token)
      : source_(source), sampler_(sampler), document_token_(document_token) {}

  const TokenSource* source_;
  Sampler sampler_;
  int32_t document_token_;
};

// Validation batches: windows in file order, each once, no shuffle; also the
// last partial window, whose missing targets are ignored. Every rank gets the
// same number of batches; rows past the end are ignored.
class EvalLoader {
 public:
  // At most `max_windows` windows are used; 0: all. `source` must outlive the
  // loader. shape.micro_steps is not used.
  // Errors: InvalidArgument when the source has fewer than 2 tokens.
  static absl::StatusOr<EvalLoader> Create(
      const TokenSource* source, const BatchShape& shape, int64_t max_windows,
      int32_t document_token = kNoDocumentToken);

  // Batches of each rank.
  int64_t num_batches() const;

  // Row b of (index, rank) is window (index * world + rank) * B + b.
  void Fill(int64_t index, int64_t rank, Batch* batch) const;

  // Counted targets over all batches and ranks.
  int64_t num_targets() const { return num_targets_; }

  // Windows over all batches and ranks, and how many the source has.
  int64_t num_windows() const { return num_windows_; }
  int64_t source_windows() const { return source_windows_; }

 private:
  EvalLoader() = default;

  const TokenSource* source_ = nullptr;
  BatchShape shape_;
  int32_t document_token_ = kNoDocumentToken;
  int64_t num_windows_ = 0;
  int64_t source_windows_ = 0;
  int64_t num_targets_ = 0;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_LOADER_H_
