// The added tokens of a tokenizer.json: texts that are tokens wherever they
// occur, found before any other step.
#ifndef ZERO_ENGINE_DATA_ADDED_TOKENS_H_
#define ZERO_ENGINE_DATA_ADDED_TOKENS_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "engine/data/regex.h"

namespace zero {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;      // such as the end of text
  bool single_word = false;  // not within a word ("in" in "inside")
  bool lstrip = false;       // includes white space before it
  bool rstrip = false;       // and after it, where no other token is found then
  bool normalized = false;   // searched in the normalized text
};

// Threads: const methods may be called from many threads.
class AddedTokens {
 public:
  // Part of a text: a token, or text between them (id < 0).
  struct Segment {
    size_t begin, end;
    int32_t id;
  };

  // Tokens with an empty content are never found.
  explicit AddedTokens(std::vector<AddedToken> tokens = {});

  // Cuts `text` into `segments`, from left to right; if several tokens begin at
  // a place, the longest counts. With `special_is_text` special tokens are
  // text, but still hide tokens inside them.
  void Split(absl::string_view text, bool special_is_text,
             RegexScratch* scratch, std::vector<Segment>* segments) const;

 private:
  // The longest token at the start of `text`, or null.
  const AddedToken* Find(absl::string_view text) const;

  std::vector<AddedToken> tokens_;
  // Indices of the tokens by their first byte, the longest token first.
  std::array<std::vector<uint32_t>, 256> by_byte_;
  bool all_special_ = true;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_ADDED_TOKENS_H_
