// Patterns of tokenizer.json, which Hugging Face matches with Oniguruma, on
// PCRE2.
//
// Both agree on \p{L}, \d or (?i:s) for every character in PCRE2's Unicode
// tables (10.42: Unicode 14; newer characters have no class there). If they
// differ, the pattern is translated (PCRE2's \s contains U+180E) or refused.
#ifndef ZERO_ENGINE_DATA_REGEX_H_
#define ZERO_ENGINE_DATA_REGEX_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zero {

// The working memory of a match.
// Threads: one at a time. Any number of patterns may share one.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// Threads: const methods may be called from many threads.
class Regex {
 public:
  struct Match {
    size_t begin = 0, end = 0;  // bytes; an empty match is possible
  };

  // Errors: InvalidArgument if it is not a pattern; Unimplemented naming the
  //         construct that Oniguruma and PCRE2 read differently.
  static absl::StatusOr<Regex> FromOniguruma(absl::string_view pattern);

  // Compiles a pattern in PCRE2's own syntax. REQUIRES: the pattern is valid.
  static Regex FromPcre(absl::string_view pattern);

  // Matches `text` itself.
  static Regex Literal(absl::string_view text);

  // The first match in `text` that begins at or after `from`; false: none.
  // REQUIRES: `text` is valid UTF-8, and `from` the start of a character.
  bool Find(absl::string_view text, size_t from, RegexScratch* scratch,
            Match* match) const;

 private:
  explicit Regex(std::shared_ptr<const void> code) : code_(std::move(code)) {}
  static absl::StatusOr<Regex> Compile(absl::string_view pattern,
                                       unsigned options);

  std::shared_ptr<const void> code_;  // pcre2_code
};

}  // namespace zero

#endif  // ZERO_ENGINE_DATA_REGEX_H_
