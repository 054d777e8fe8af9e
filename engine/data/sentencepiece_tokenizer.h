// SentencePiece models, BPE and Unigram.
#ifndef ZERO_ENGINE_DATA_SENTENCEPIECE_TOKENIZER_H_
#define ZERO_ENGINE_DATA_SENTENCEPIECE_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/data/tokenizer.h"

namespace zero {

// Errors: NotFound; InvalidArgument if the file is not a SentencePiece model or
//         has no end-of-sentence token.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenSentencePiece(
    const std::string& path);

struct SentencePieceTraining {
  std::vector<std::string> inputs = {};  // text files and globs
  std::string model_prefix = {};         // writes MODEL_PREFIX.model
  int64_t vocab_size = 8192;
  std::string model_type = "bpe";  // bpe | unigram
  // Beyond this many bytes lines are dropped evenly (every k-th is kept).
  int64_t max_input_bytes = 100 << 20;
  int num_threads = 2;
};

// Trains a lossless model: no normalization, byte fallback, no leading space,
// so Decode(Encode(text)) == text for valid UTF-8. Deterministic for equal
// inputs and threads. Written atomically.
// Errors: InvalidArgument naming the field, e.g. a vocabulary larger than the
//         text supports, with the largest that works.
absl::Status TrainSentencePiece(const SentencePieceTraining& options);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_SENTENCEPIECE_TOKENIZER_H_
