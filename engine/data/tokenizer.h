// Text to token ids and back.
//
// ByteTokenizer needs no file; sentencepiece_tokenizer.h reads a .model and
// tokenizer_json.h a tokenizer.json. To add one: implement Tokenizer, add its
// line to OpenTokenizer.
#ifndef ZERO_ENGINE_DATA_TOKENIZER_H_
#define ZERO_ENGINE_DATA_TOKENIZER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace zero {

// U+FFFD, which replaces ill-formed bytes.
inline constexpr char kReplacementCharacter[] = "\xEF\xBF\xBD";

// Threads: const methods may be called from many threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual int64_t vocab_size() const = 0;

  // The token between documents; never produced by Encode.
  virtual int32_t eot_id() const = 0;

  // "bytes", "sentencepiece:FILE", or the path of a tokenizer.json.
  virtual std::string name() const = 0;

  // The ids before every document: the end of text, then the begin of text if
  // the model has one (Llama 3).
  virtual std::vector<int32_t> DocumentStart() const { return {eot_id()}; }

  // Appends the ids of the first `size` bytes of `text` to `ids`; never control
  // tokens, even if their names occur in the text. `continues`: text of the
  // same document was encoded before this, so nothing is prepended
  // (SentencePiece models may begin a text with a space). Returns false if a
  // token crosses `size`, so that these are not the first ids of the whole
  // text: drop them and encode a longer part. A SentencePiece model cannot tell
  // and returns true; cut its text after line breaks.
  virtual bool EncodePart(absl::string_view text, size_t size, bool continues,
                          std::vector<int32_t>* ids) const = 0;

  // The ids of a prompt: with the begin of text if the model has one, and
  // control tokens where their names occur in the text.
  virtual std::vector<int32_t> EncodePrompt(absl::string_view text) const {
    return Encode(text);
  }

  // The tokenizer's files for a model's folder, by name, with their contents:
  // FindTokenizer and other programs find it there.
  virtual std::map<std::string, std::string> Files() const { return {}; }

  // The bytes of one token in the middle of a text; empty for control tokens.
  // An id outside the vocabulary (a model may have a padded one) gives U+FFFD.
  virtual std::string TokenBytes(int32_t id) const = 0;

  // The text of `ids` as a whole document.
  virtual std::string Decode(absl::Span<const int32_t> ids) const;

  std::vector<int32_t> Encode(absl::string_view text) const {
    std::vector<int32_t> ids;
    EncodePart(text, text.size(), /*continues=*/false, &ids);
    return ids;
  }
};

// Bytes as ids, 256 = end of text. Any byte string survives the round trip.
std::unique_ptr<Tokenizer> MakeByteTokenizer();

// "bytes", the path of a tokenizer.json or of a SentencePiece .model
// ("sentencepiece:" in front is allowed), or a folder with one of them.
// Errors: NotFound; those of the file; InvalidArgument naming the
//         possibilities.
absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(
    const std::string& spec);

// The tokenizer's file in a model's folder; empty: it has none.
std::string FindTokenizer(const std::string& dir);

// Turns tokens into text as they are sampled, printing valid UTF-8 only: the
// bytes of an unfinished character are held back, invalid ones become U+FFFD.
class StreamDecoder {
 public:
  // `tokenizer` must outlive the decoder.
  explicit StreamDecoder(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // The text that `id` completes; may be empty.
  std::string Push(int32_t id);

  // The held-back bytes, as U+FFFD; resets the decoder.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;
};

// Removes the longest complete prefix of `bytes` and returns it as valid UTF-8:
// each maximal invalid piece becomes one U+FFFD, as in the Unicode standard
// (3.9, "substitution of maximal subparts"). At most 3 bytes of an unfinished
// character stay.
std::string TakeValidUtf8(std::string* bytes);

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_TOKENIZER_H_
