// The added tokens of a tokenizer.json: texts that are tokens wherever they
// stand, found before anything else looks at a text.
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
  bool single_word = false;  // not in a word: "in" in "inside"
  bool lstrip = false;       // takes white space in front of it along
  bool rstrip = false;       // and behind it, where no token is found any more
  bool normalized = false;   // is looked for in the normalized text
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

  // Cuts `text` into `segments`, from left to right; where several tokens
  // begin, the longest counts. Special tokens are text where `special_is_text`,
  // which hides what lies inside them all the same.
  void Split(absl::string_view text, bool special_is_text,
             RegexScratch* scratch, std::vector<Segment>* segments) const;

 private:
  // The longest token at the start of `text`, or null.
  const AddedToken* Find(absl::string_view text) const;

  std::vector<AddedToken> tokens_;
  // Of each first byte, longest first.
  std::array<std::vector<uint32_t>, 256> by_byte_;
  bool all_special_ = true;
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_ADDED_TOKENS_H_
