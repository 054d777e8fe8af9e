// Text to token ids and back.
//
// ByteTokenizer needs no file; SentencePieceTokenizer reads a .model. To add
// one: implement Tokenizer, add its line to OpenTokenizer.
#ifndef ZERO_ENGINE_DATA_TOKENIZER_H_
#define ZERO_ENGINE_DATA_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zero {

// Threads: const methods may be called from many threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;

  // The token between documents; never produced by Encode.
  virtual int32_t eot_id() const = 0;

  // "bytes", or "sentencepiece:FILE".
  virtual std::string name() const = 0;

  // Appends the ids of `text` to `ids`. `continues` says that text was encoded
  // before it in the same document, so nothing is put in front (SentencePiece
  // models may begin a text with a space of their own). Encoding a document in
  // pieces cut after line breaks gives the ids of encoding it at once.
  virtual void Encode(absl::string_view text, bool continues,
                      std::vector<int32_t>* ids) const = 0;

  // The bytes one token stands for in the middle of a text; empty for control
  // tokens. An id that is not in the vocabulary (a model may have a padded
  // one) gives U+FFFD.
  virtual std::string TokenBytes(int32_t id) const = 0;

  // The text of `ids` as a whole document.
  virtual std::string Decode(absl::Span<const int32_t> ids) const = 0;

  std::vector<int32_t> Encode(absl::string_view text) const {
    std::vector<int32_t> ids;
    Encode(text, /*continues=*/false, &ids);
    return ids;
  }
};

// Bytes as ids, 256 = end of text. Any byte string survives the round trip.
std::unique_ptr<Tokenizer> MakeByteTokenizer();

// "bytes", or the path of a SentencePiece model ("sentencepiece:" in front is
// allowed).
// Errors: NotFound; InvalidArgument when the file is no SentencePiece model or
//         has no end-of-sentence token, or naming what is possible, e.g. for
//         tokenizer.json.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(
    const std::string& spec);

struct SentencePieceTraining {
  std::vector<std::string> inputs = {};  // text files and globs
  std::string model_prefix = {};         // writes MODEL_PREFIX.model
  int64_t vocab_size = 8192;
  std::string model_type = "bpe";  // bpe | unigram
  // Lines beyond this many bytes are left out evenly (every k-th is kept).
  int64_t max_input_bytes = 100 << 20;
  int num_threads = 2;
};

// Trains a model that loses nothing: no normalization, bytes as fallback, no
// space in front, so Decode(Encode(text)) == text for valid UTF-8.
// Deterministic for equal inputs and threads. Written atomically.
// Errors: InvalidArgument naming the field, e.g. a vocabulary larger than the
//         text supports, with the largest that works.
absl::Status TrainSentencePiece(const SentencePieceTraining& options);

// Turns tokens into text as they are sampled, printing valid UTF-8 only: the
// bytes of an unfinished character are held back, invalid ones become U+FFFD.
class StreamDecoder {
 public:
  // `tokenizer` must outlive the decoder.
  explicit StreamDecoder(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // The text that `id` completes; may be empty.
  std::string Push(int32_t id);

  // What was held back, as U+FFFD; the decoder starts anew.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;
};

// Moves the longest prefix of `bytes` that is complete from it and returns it
// as valid UTF-8: each maximal invalid piece becomes one U+FFFD, as in the
// Unicode standard (3.9, "substitution of maximal subparts"). At most 3 bytes
// of an unfinished character stay.
std::string TakeValidUtf8(std::string* bytes);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKENIZER_H_
